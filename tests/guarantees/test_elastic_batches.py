"""G6 with `dataloader.global_batch_size`: one run at any number of processes, killed and changed in between.

The run is compared with one process that was left alone: the same samples in every update, and float64 weights within 1e-12, which is
what the order of sums leaves.
"""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_outcomes, run_processes
from support.toys import whole_settings
from torch import Tensor, nn
from torch.utils.data import Dataset

import danling as dl
from danling.checkpoints import CheckpointMismatch
from danling.utils.tensors import whole

TOLERANCE = 1e-12
SAMPLES = 50


class Numbered(Dataset[dict[str, Any]]):
    def __init__(self, length: int) -> None:
        self.points = torch.randn(
            length, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64
        )

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> dict[str, Any]:
        target = self.points[index, :3].argmax()
        noise = 0.1 * torch.randn(6, dtype=torch.float64)
        return {"input": self.points[index] + noise, "target": target, "index": index}


class Elastic(dl.Runner):
    """Writes down which samples made which update, and kills a process by SIGKILL where it is told."""

    def __init__(self, config: dict[str, Any], *, kill_at: int | None = None) -> None:
        super().__init__(config)
        self.kill_at = kill_at
        self.model = nn.Sequential(
            nn.Linear(6, 12), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, 3)
        ).double()
        self.criterion = nn.CrossEntropyLoss()
        self.datasets = {"train": Numbered(SAMPLES), "val": Numbered(7)}

    def train_step(self, data: dict[str, Any]) -> tuple[Any, Tensor]:
        padding = isinstance(self.window.current, float) and self.window.current == 0.0
        self.note(self.state.train.global_step, [] if padding else data["index"].tolist())
        return super().train_step((data["input"], data["target"]))

    def note(self, step: int, ids: list[int]) -> None:
        with open(
            Path(self.config.workspace_root) / f"{self.world_size}-{self.rank}.ids", "a"
        ) as file:
            print(json.dumps([step, ids]), file=file)

    def evaluate_step(self, data: dict[str, Any]) -> tuple[Any, Tensor | None]:
        return super().evaluate_step((data["input"], data["target"]))

    def step(self) -> Any:
        last = self.rank == self.world_size - 1
        if self.kill_at is not None and self.state.train.global_step == self.kill_at and last:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step()


def settings(root: Path, loader: dict[str, Any], **more: Any) -> dict[str, Any]:
    root.mkdir(exist_ok=True)
    base = {
        "steps": 14,
        "seed": 4,
        "accum_steps": 1,
        "ema": {},
        "auto_resume": True,
        "max_grad_norm": 1.0,
    }
    base |= {
        "checkpoint": {"interval": 1, "async_enabled": False},
        "dataloader": {"drop_last": False, **loader},
    }
    return whole_settings(root, **{**base, **more})


def train(config: dict[str, Any], kill_at: int | None = None) -> dict[str, Any]:
    with Elastic(config, kill_at=kill_at) as runner:
        begun = runner.state.train.global_step
        runner.train()
        return {
            "begun": begun,
            "steps": runner.state.train.global_step,
            "samples": runner.state.train.samples,
            "weights": torch.cat(
                [parameter.detach().flatten() for parameter in runner.unwrapped_model.parameters()]
            ),
            "figures": runner.latest_result,
        }


def updates_at(root: Path, world_size: int) -> dict[int, list[int]]:
    """Return the samples of each update that so many processes began, in order of their numbers."""
    updates: dict[int, list[int]] = {}
    for rank in range(world_size):
        for line in (root / f"{world_size}-{rank}.ids").read_text().splitlines():
            step, ids = json.loads(line)
            updates[step] = sorted(updates.get(step, []) + ids)
    return updates


def test_two_one_three_four_processes_with_kills(tmp_path: Path) -> None:
    sizes = {"global_batch_size": 12, "micro_batch_size": 2}
    (whole,) = run_processes(
        train, settings(tmp_path / "whole", {"global_batch_size": 12}), world_size=1
    )
    expected = updates_at(tmp_path / "whole", 1)
    assert [len(update) for update in expected.values()] == [
        12,
        12,
        12,
        12,
        2,
        12,
        12,
        12,
        12,
        2,
        12,
        12,
        12,
        12,
    ]
    config = settings(tmp_path / "parts", sizes)
    begun = 0
    for world_size, kill_at in ((2, 3), (1, 7), (3, 10)):
        outcomes = run_outcomes(train, config, kill_at, world_size=world_size, grace=0.5)
        assert [o.exit_code for o in outcomes if o.rank == world_size - 1] == [-signal.SIGKILL]
        made = updates_at(tmp_path / "parts", world_size)
        assert made == {step: expected[step] for step in range(begun, kill_at + 1)}
        begun = kill_at
    ended = run_processes(train, config, world_size=4)
    assert updates_at(tmp_path / "parts", 4) == {step: expected[step] for step in range(begun, 14)}
    for rank in ended:
        assert (rank["begun"], rank["steps"], rank["samples"]) == (10, 14, whole["samples"])
        assert (rank["weights"] - whole["weights"]).abs().max().item() < TOLERANCE
        assert rank["figures"]["val"]["loss"] == pytest.approx(
            whole["figures"]["val"]["loss"], abs=TOLERANCE
        )
    assert len(list((tmp_path / "parts").rglob("latest.pth"))) == 1, "one directory for all of them"


def test_batches_of_ranks_go_on_while_their_product_is_the_same(tmp_path: Path) -> None:
    """Two processes of six samples, one of twelve, three of two in two micro-batches: one directory, the same updates."""
    (whole,) = run_processes(
        train, settings(tmp_path / "whole", {"batch_size": 12, "keyed": "sample"}), world_size=1
    )
    expected = updates_at(tmp_path / "whole", 1)
    begun = 0
    for world_size, batch_size, accum_steps, steps in ((2, 6, 1, 3), (1, 12, 1, 7), (3, 2, 2, 14)):
        config = settings(
            tmp_path / "parts",
            {"batch_size": batch_size, "keyed": "sample"},
            accum_steps=accum_steps,
            steps=steps,
        )
        ended = run_processes(
            train, {**config, "scheduler": {"type": "constant"}}, world_size=world_size
        )
        assert updates_at(tmp_path / "parts", world_size) == {
            step: expected[step] for step in range(begun, steps)
        }
        begun = steps
    constant = {
        **settings(tmp_path / "flat", {"batch_size": 12, "keyed": "sample"}),
        "scheduler": {"type": "constant"},
    }
    (whole,) = run_processes(train, constant, world_size=1)
    assert (ended[0]["weights"] - whole["weights"]).abs().max().item() < TOLERANCE
    assert len(list((tmp_path / "parts").rglob("latest.pth"))) == 1


@pytest.mark.parametrize("place", ["default", "resume"])
def test_another_product_is_refused_with_both(place: str, tmp_path: Path) -> None:
    config = settings(tmp_path, {"batch_size": 6}, steps=2)
    run_processes(train, config, world_size=2)
    (latest,) = tmp_path.rglob("latest.pth")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    again = {**config, "steps": 4}
    if place == "resume":
        again |= {"auto_resume": False, "resume": str(latest), "dir": str(tmp_path / "other")}
    with pytest.raises(CheckpointMismatch) as raised:
        run_processes(train, again, world_size=1)
    assert "stored 12 samples an update (batch_size=6 x accum_steps=1 x 2 ranks)" in str(
        raised.value
    )
    assert "now 6 samples an update (batch_size=6 x accum_steps=1 x 1 rank)" in str(raised.value)
    assert all(
        file.read_bytes() == content for file, content in before.items() if file.name != ".lock"
    )
    assert list(tmp_path.rglob("*.pth")) == [file for file in before if file.suffix == ".pth"], (
        "nothing of a new run"
    )


def test_batch_product_with_other_ends_of_passes_is_refused(tmp_path: Path) -> None:
    """With drop_last, 50 samples are 4 updates of 12, and of two times six 4 and a ragged one of 2."""
    whole = {"train": {"drop_last": True}}
    run_processes(train, settings(tmp_path, {"batch_size": 12, **whole}, steps=2), world_size=1)
    halved = settings(tmp_path, {"batch_size": 2, **whole}, accum_steps=6)
    with pytest.raises(
        CheckpointMismatch,
        match="stored passes of 48 out of 50 samples over split 'train', now of 50 ",
    ):
        run_processes(train, halved, world_size=1)
    (ended,) = run_processes(
        train, settings(tmp_path, {"global_batch_size": 12, **whole}), world_size=1
    )
    assert ended["begun"] == 2


RANKS = r"at least the number of ranks .*, 2\. Received: dataloader.global_batch_size=1\."
SAMPLES_OF_UPDATE = r"at least one update of 51 samples, .* Received: 50 samples"


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        ({"global_batch_size": 1}, RANKS),
        ({"global_batch_size": 51, "drop_last": True}, SAMPLES_OF_UPDATE),
    ],
)
def test_bad_input_is_one_clear_error_and_nothing_is_written(
    loader: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    config = settings(tmp_path, loader)
    outcomes = run_outcomes(train, config, world_size=2, grace=2.0)
    for outcome in outcomes:
        assert isinstance(outcome.error, (TypeError, ValueError))
        assert re.search(expected, str(outcome.error))
    assert list(tmp_path.iterdir()) == []


def train_named(config: dict[str, Any]) -> dict[str, Tensor]:
    with Elastic(config) as runner:
        runner.train()
        return {name: whole(value) for name, value in runner.model_state_dict().items()}


def test_unequal_shares_under_fsdp(tmp_path: Path) -> None:
    """Seven samples over two shards of the weights, two at once: a share of four and one of three."""
    loader = {"global_batch_size": 7, "micro_batch_size": 2}
    (alone,) = run_processes(
        train_named, settings(tmp_path / "alone", loader, steps=9), world_size=1
    )
    mesh = {"stack": "parallel", "parallel": {"axes": {"shard": 2}}}
    for rank in run_processes(
        train_named, settings(tmp_path / "mesh", loader, steps=9, **mesh), world_size=2
    ):
        for name, value in rank.items():
            torch.testing.assert_close(value, alone[name], rtol=0, atol=TOLERANCE)
    assert updates_at(tmp_path / "mesh", 2) == updates_at(tmp_path / "alone", 1)

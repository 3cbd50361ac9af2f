"""`dataloader.own_state`: a `StatefulDataLoader` of the user's is read itself, and plain scripts and runs exchange its positions."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from support.datasets import stateful_loader
from support.processes import run_processes
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import danling as dl

LENGTH, BATCH = 20, 2


class Numbers(Dataset[Tensor]):
    """Its own indices; nothing is drawn."""

    draws_random = False

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


class Noisy(Numbers):
    draws_random = True

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + torch.rand(1) / 2


def loader_of(
    dataset: Dataset[Tensor], workers: int = 0, *, ranks: tuple[int, int] | None = None
) -> Any:
    generator = torch.Generator().manual_seed(5)
    order: dict[str, Any] = {"shuffle": True, "generator": generator}
    if ranks is not None:
        order = {"sampler": DistributedSampler(dataset, ranks[1], ranks[0], seed=3)}
    return stateful_loader(dataset, batch_size=BATCH, num_workers=workers, **order)


class Reading(dl.Runner):
    """Keeps what it reads."""

    not_saved = ("seen",)

    def __init__(
        self, config: Any, dataset: Dataset[Tensor], workers: int, state: Any = None
    ) -> None:
        super().__init__(config)
        self.model, self.criterion = nn.Linear(1, 1), nn.MSELoss()
        ranks = (self.rank, self.world_size) if self.world_size > 1 else None
        self.dataloaders = {"train": loader_of(dataset, workers, ranks=ranks)}
        if state is not None:
            self.dataloaders["train"].load_state_dict(state)
        self.seen: list[list[float]] = []

    def train_step(self, data: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.append(data.flatten().tolist())
        pred = self.model(data)
        loss = self.criterion(pred, data)
        self.backward(loss)
        return pred, loss


def all_of(batches: Iterable[list[float]]) -> list[float]:
    return sorted(chain.from_iterable(batches))


def settings(root: Path | str, steps: int, **more: Any) -> dict[str, Any]:
    base = {
        "dir": str(root),
        "seed": 1,
        "log": False,
        "steps": steps,
        "auto_resume": True,
        "optim": {"type": "sgd", "lr": 1e-4},
    }
    return {
        **base,
        "dataloader": {"own_state": True},
        "checkpoint": {"async_enabled": False, "backend": "file"},
        **more,
    }


def read(
    root: Path | str,
    steps: int,
    dataset: Dataset[Tensor] | None = None,
    workers: int = 0,
    state: Any = None,
    **more: Any,
) -> list[list[float]]:
    with Reading(settings(root, steps, **more), dataset or Numbers(), workers, state) as runner:
        runner.train()
        return runner.seen


def stored(root: Path) -> Any:
    payload = torch.load(root / "checkpoints" / "latest.pth", weights_only=True)
    return payload["dataloaders"]["train"]["ranks"]["0"]["loader"]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("accum_steps", [1, 2])
def test_plain_script_continues_at_the_stop_of_the_run(
    workers: int, accum_steps: int, tmp_path: Path
) -> None:
    more: dict[str, Any] = {"accum_steps": accum_steps}
    whole = read(tmp_path / "whole", 14 // accum_steps, workers=workers, **more)
    updates = 4 // accum_steps
    begun = read(tmp_path / "parts", updates, workers=workers, **more)
    assert begun == whole[:4]
    script = loader_of(Numbers(), workers)
    script.load_state_dict(stored(tmp_path / "parts"))
    assert [batch.flatten().tolist() for batch in script] == whole[4:10]
    assert read(tmp_path / "parts", 14 // accum_steps, workers=workers, **more) == whole[4:]
    assert all_of(whole[:10]) == [float(index) for index in range(LENGTH)]


@pytest.mark.parametrize("workers", [0, 2])
def test_run_begins_at_the_stop_of_a_plain_script(workers: int, tmp_path: Path) -> None:
    script = loader_of(Numbers(), workers)
    batches = iter(script)
    begun = [next(batches).flatten().tolist() for _ in range(4)]
    state = script.state_dict()
    rest = read(tmp_path, 6, workers=workers, state=state)
    assert all_of(begun + rest) == [float(index) for index in range(LENGTH)]
    assert rest == [batch.flatten().tolist() for batch in batches]


def test_samples_read_in_the_process_draw_the_same_after_a_resume(tmp_path: Path) -> None:
    whole = read(tmp_path / "whole", 13, Noisy())
    assert read(tmp_path / "parts", 4, Noisy()) + read(tmp_path / "parts", 13, Noisy()) == whole


def test_draws_of_workers_are_named_as_a_limit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    read(tmp_path / "silent", 1, workers=1)
    assert "own state" not in caplog.text
    read(tmp_path / "named", 1, Noisy(), workers=1)
    assert caplog.text.count("which has no random numbers of its 1 workers") == 1


def _read(root: str, steps: int) -> list[list[float]]:
    return read(root, steps)


def test_each_rank_keeps_its_own_state(tmp_path: Path) -> None:
    whole = run_processes(_read, str(tmp_path / "whole"), 8, world_size=2)
    parts = [run_processes(_read, str(tmp_path / "parts"), steps, world_size=2) for steps in (3, 8)]
    assert [first + second for first, second in zip(*parts, strict=True)] == whole
    assert all_of(batch for seen in whole for batch in seen[:5]) == [
        float(index) for index in range(LENGTH)
    ]


@pytest.mark.parametrize("given", ["DataLoader", "Numbers"])
def test_loader_without_a_state_is_refused(given: str, tmp_path: Path) -> None:
    class Wrong(Reading):
        def __init__(self, config: Any) -> None:
            super().__init__(config, Numbers(), 0)
            self.dataloaders = {"train": DataLoader(Numbers())} if given == "DataLoader" else {}
            self.datasets = {"train": Numbers()} if given == "Numbers" else {}

    with pytest.raises(
        ValueError, match=f"StatefulDataLoader.*own_state=true. Received: a {given}"
    ):
        Wrong(settings(tmp_path, 1))


def test_without_it_the_library_reads_in_the_order_of_the_loader(tmp_path: Path) -> None:
    read(tmp_path, 3, dataloader={"own_state": False})
    found = torch.load(tmp_path / "checkpoints" / "latest.pth", weights_only=True)["dataloaders"][
        "train"
    ]
    assert found["ranks"]["0"]["kind"] == "sampled"
    plain, with_default = (
        dl.RunnerConfig(dataloader=more, seed=1) for more in ({}, {"own_state": False})
    )
    assert plain.canonical() == with_default.canonical()

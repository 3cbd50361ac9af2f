"""G6b: with `gradient_sum: canonical` a run ends in one SHA-256 at any number of processes, also where that number changes.

The usual sums are compared too: they must end in another hash for each number of processes, so that these tests can fail.
"""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from models.gpt import GPT
from support.processes import run_outcomes, run_processes
from torch import Tensor, nn
from torch.utils.data import Dataset

import danling as dl
from danling.utils.tensors import whole

SAMPLES = 41
"""Two updates of 16 samples a pass and one of 9: five micro-batches of 4 at most, the last of one sample."""


class Noisy(Dataset[dict[str, Any]]):
    """Points, or tokens, that are augmented anew each time they are read."""

    def __init__(self, length: int, *, tokens: bool) -> None:
        draw = torch.Generator().manual_seed(7)
        self.tokens = tokens
        self.rows = (
            torch.randint(0, 29, (length, 12), generator=draw)
            if tokens
            else torch.randn(length, 10, generator=draw)
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        if self.tokens:
            noisy = torch.where(torch.rand(len(row)) < 0.1, torch.randint(0, 29, row.shape), row)
            target = row.roll(-1)
            target[-1 - index % 3 :] = -100  # so that micro-batches have different weights
            return {"input": noisy, "target": target}
        return {"input": row + 0.1 * torch.randn(10), "target": row[:5].argmax()}


class AnySize(dl.Runner):
    """Trains one of the two models, and kills its last process where it is told."""

    not_saved = ("kill_at",)
    kill_at: int | None = None

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        torch.manual_seed(3)
        tokens = self.config.model_kind == "gpt"
        mlp = (nn.Linear(10, 23), nn.LayerNorm(23), nn.GELU(), nn.Dropout(0.1), nn.Linear(23, 5))
        gpt = GPT(29, context=12, width=24, depth=2, heads=3, dropout=0.1)
        self.model = gpt if tokens else nn.Sequential(*mlp)
        self.criterion = nn.CrossEntropyLoss()
        self.datasets = {"train": Noisy(SAMPLES, tokens=tokens), "val": Noisy(19, tokens=tokens)}
        self.losses: list[float] = []

    def compute_loss(self, pred: Tensor, target: Tensor) -> Tensor:
        return super().compute_loss(pred.flatten(0, -2), target.flatten())

    def step(self) -> Any:
        last = self.rank == self.world_size - 1
        if self.kill_at is not None and self.state.train.global_step == self.kill_at and last:
            os.kill(os.getpid(), signal.SIGKILL)
        outcome = super().step()
        self.losses += [float(outcome.loss), float(outcome.grad_norm)]
        return outcome


def settings(root: Path, model: str = "mlp", **more: Any) -> dict[str, Any]:
    return {
        "model_kind": model,
        "gradient_sum": "canonical",
        "epochs": 3,
        "seed": 4,
        "workspace_root": str(root),
        "optim": {"type": "adamw", "lr": 1e-2},
        "scheduler": {"type": "reducelronplateau", "patience": 0, "factor": 0.7},
        "ema": {"enabled": True, "decay": 0.9},
        "max_grad_norm": 0.5,
        "checkpoint": {"interval": 1, "async_enabled": False},
        "dataloader": {"global_batch_size": 16, "micro_batch_size": 4, "drop_last": False},
        **more,
    }


def train(config: dict[str, Any], kill_at: int | None = None, threads: int = 1) -> dict[str, Any]:
    torch.set_num_threads(threads)
    with AnySize(config) as runner:
        runner.kill_at = kill_at
        runner.train()
        weights = [whole(p.detach()) for p in runner.unwrapped_model.parameters()]
        states = [runner.optimizer.state[p] for p in runner.unwrapped_model.parameters()]
        moments = [whole(state[name]) for state in states for name in sorted(state)]
        averages = [whole(runner.ema.weights[name]) for name in sorted(runner.ema.weights)]
        found = hashlib.sha256()
        for tensor in (*weights, *moments, *averages):
            found.update(tensor.contiguous().numpy().tobytes())
        results = {
            step: {split: figures["loss"] for split, figures in of.items()}
            for step, of in runner.results.items()
        }
        return {
            "hash": found.hexdigest(),
            "losses": runner.losses,
            "results": results,
            "weights": weights,
        }


def outcome_of(ranks: list[dict[str, Any]]) -> tuple[str, dict[int, Any]]:
    """Return what a run ended in, after a look at whether all its ranks agree."""
    assert all(
        rank["hash"] == ranks[0]["hash"] and rank["results"] == ranks[0]["results"]
        for rank in ranks
    )
    return ranks[0]["hash"], ranks[0]["results"]


FSDP = {"stack": "parallel", "parallel": {"axes": {"shard": -1}}}
MUON = {"optim": {"type": "muon", "lr": 1e-2, "adamw": {"lr": 1e-2}}}
REPLICATE = {"stack": "parallel", "parallel": {"axes": {"replicate": -1}}}
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("model", "precision", "sizes"),
    [
        ("mlp", None, [(2, {}), (3, {}), (2, FSDP)]),
        pytest.param(
            "mlp",
            None,
            [(4, {}), (5, {}), (8, {}), (2, REPLICATE), (1, FSDP), (4, FSDP)],
            marks=slow,
        ),
        pytest.param(
            "mlp",
            "bf16",
            [(2, {}), (3, {}), (4, {}), (5, {}), (8, {}), (2, FSDP), (4, FSDP)],
            marks=slow,
        ),
        pytest.param(
            "gpt",
            None,
            [(2, {}), (3, {}), (4, {}), (5, {}), (8, {}), (1, FSDP), (2, FSDP), (4, FSDP)],
            marks=slow,
        ),
        pytest.param("mlp", "fp16", [(2, {}), (3, {}), (2, FSDP)], marks=slow),
        pytest.param(
            "gpt",
            "bf16",
            [(2, {}), (3, {}), (4, {}), (5, {}), (8, {}), (2, FSDP), (4, FSDP)],
            marks=slow,
        ),
    ],
)
def test_one_hash(
    model: str, precision: str | None, sizes: list[tuple[int, dict[str, Any]]], tmp_path: Path
) -> None:
    """Five processes are more than the micro-batches of an update, eight more than those of the first ones too."""
    more = {"precision": precision}
    expected = outcome_of(
        run_processes(train, settings(tmp_path / "1", model, **more), world_size=1)
    )
    for number, (world_size, stack) in enumerate(sizes):
        config = settings(tmp_path / f"{number}", model, **more, **stack)
        assert outcome_of(run_processes(train, config, world_size=world_size)) == expected
    fast = {**more, "gradient_sum": "fast"}
    hashes = [
        outcome_of(
            run_processes(train, settings(tmp_path / f"fast{size}", model, **fast), world_size=size)
        )[0]
        for size in (1, 2)
    ]
    assert len({expected[0], *hashes}) == 3


@pytest.mark.parametrize(
    "sizes",
    [
        [(3, FSDP)],
        pytest.param(
            [(2, {}), (3, {}), (5, {}), (2, REPLICATE), (1, FSDP), (2, FSDP), (4, FSDP)], marks=slow
        ),
    ],
)
def test_one_hash_of_muon(sizes: list[tuple[int, dict[str, Any]]], tmp_path: Path) -> None:
    """The sides of its matrices (24, 72, 96) are divided by three ranks, and not all by five."""
    expected = outcome_of(
        run_processes(train, settings(tmp_path / "1", "gpt", **MUON), world_size=1)
    )
    for number, (world_size, stack) in enumerate(sizes):
        config = settings(tmp_path / f"{number}", "gpt", **MUON, **stack)
        assert outcome_of(run_processes(train, config, world_size=world_size)) == expected


def steps(root: Path, **more: Any) -> dict[str, Any]:
    """Return settings of a run of nine updates, each of which is saved."""
    schedule = {"type": "cosine", "warmup_steps": 3}
    return settings(
        root,
        epochs=None,
        steps=9,
        evaluate_interval=3,
        auto_resume=True,
        scheduler=schedule,
        **more,
    )


def audit(config: dict[str, Any]) -> tuple[bool, list[str]]:
    """Train a run again in this process, from its beginning, and return whether its end is bitwise the stored one."""
    with AnySize(config) as runner:
        found = runner.audit(0)
    return found.is_same, [each.path for each in found.differences]


WITH_MUON = {"model": "gpt", **MUON}


@pytest.mark.parametrize(
    "stack",
    [
        {},
        pytest.param(FSDP, marks=slow),
        pytest.param(WITH_MUON, marks=slow),
        pytest.param({**FSDP, **WITH_MUON}, marks=slow),
    ],
    ids=["ddp", "shards", "muon", "muon-shards"],
)
def test_two_three_and_one_process_with_kills(stack: dict[str, Any], tmp_path: Path) -> None:
    """A run goes on with other numbers of processes after SIGKILLs; one process that audits it finds the same bits."""
    program = {name: value for name, value in stack.items() if name in WITH_MUON}
    expected = run_processes(train, steps(tmp_path / "whole", **program), world_size=1)[0]
    config = steps(tmp_path / "parts", **stack)
    for world_size, kill_at in ((2, 2), (3, 5)):
        outcomes = run_outcomes(train, config, kill_at, world_size=world_size, grace=0.5)
        assert [o.exit_code for o in outcomes if o.rank == world_size - 1] == [-signal.SIGKILL]
    (ended,) = run_processes(train, config, world_size=1)
    assert [ended[name] for name in ("hash", "results", "losses")] == [
        expected[name] for name in ("hash", "results", "losses")
    ]
    if stack == program:
        two = run_processes(train, steps(tmp_path / "two", **program), world_size=2)
        assert two[0]["hash"] == expected["hash"]
        assert run_processes(audit, steps(tmp_path / "two", **program), world_size=1) == [
            (True, [])
        ]


@pytest.mark.parametrize(
    ("more", "received"),
    [
        ({"stack": "deepspeed"}, "stack='deepspeed'"),
        ({"stack": "accelerate"}, "stack='accelerate'"),
        ({"ft": {"enabled": True}}, "ft.enabled=True"),
        ({"stack": "parallel", "parallel": {"axes": {"tensor": 2}}}, "parallel.axes.tensor=2"),
        (
            {"stack": "parallel", "parallel": {"axes": {"replicate": 2, "shard": 2}}},
            "parallel.axes.shard=2",
        ),
        ({**FSDP, "fsdp": {"mp_policy": {"param_dtype": "bf16"}}}, "fsdp.mp_policy"),
        ({"optim": {"type": "adamw", "fused": True}}, "optim.fused=True"),
    ],
)
def test_settings_without_one_order_are_refused(more: dict[str, Any], received: str) -> None:
    with pytest.raises(ValueError, match="gradient_sum='canonical'") as caught:
        dl.RunnerConfig(settings(Path("nowhere"), **more)).validate()
    assert received in str(caught.value)


@pytest.mark.parametrize(
    ("loading", "received"),
    [
        ({"batch_size": 4}, "global_batch_size=None, micro_batch_size=None"),
        ({"global_batch_size": 16}, "micro_batch_size=None"),
        ({"global_batch_size": 16, "micro_batch_size": "auto"}, "micro_batch_size='auto'"),
    ],
)
def test_updates_of_no_given_size_are_refused(
    loading: dict[str, Any], received: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"gradient_sum='canonical', which adds .*{received}"):
        AnySize(settings(tmp_path, dataloader=loading))
    assert list(tmp_path.iterdir()) == []


def test_the_size_of_micro_batches_belongs_to_the_run() -> None:
    ids = {
        (gradient_sum, size): dl.RunnerConfig(
            settings(
                Path("nowhere"),
                gradient_sum=gradient_sum,
                dataloader={"global_batch_size": 16, "micro_batch_size": size},
            )
        ).config_id()
        for gradient_sum in ("canonical", "fast")
        for size in (4, 8)
    }
    assert ids["fast", 4] == ids["fast", 8]
    assert len(set(ids.values())) == 3


class Unfit(AnySize):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        part = self.config.unfit
        if part == "loader":
            self.dataloaders["train"] = [(torch.randn(4, 10), torch.randint(0, 5, (4,)))] * 4
            del self.datasets["train"]
        elif part == "batch norm":
            self.model[1] = nn.BatchNorm1d(23)
        elif part == "phases":
            layers = {"first": self.model[0], "last": self.model[4]}
            self.optimizer = {
                name: torch.optim.SGD(layer.parameters(), lr=0.1) for name, layer in layers.items()
            }
        elif part == "fused":
            self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)

    def train_step(self, data: Any) -> Any:
        found = super().train_step(data)
        if self.config.unfit == "carry":
            self.carry = found[0]
        return found


@pytest.mark.parametrize(
    ("part", "received"),
    [
        ("loader", "split 'train'.*list"),
        ("batch norm", "1.running_mean.*GroupNorm"),
        ("fused", r"AdamW\(fused=True\)"),
        ("carry", "self.carry"),
        ("phases", "several optimizers.*gradient_sum='fast'"),
    ],
)
def test_parts_without_one_order_are_refused(part: str, received: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=received), Unfit(settings(tmp_path, unfit=part)) as runner:
        runner.train()


def test_a_loop_by_hand_is_refused(tmp_path: Path) -> None:
    with (
        AnySize(settings(tmp_path)) as runner,
        pytest.raises(ValueError, match="no order over ranks"),
    ):
        runner.train_step({"input": torch.randn(4, 10), "target": torch.randint(0, 5, (4,))})


class Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 5), nn.Linear(10, 5)
        self.never = nn.Linear(10, 5)

    def forward(self, rows: Tensor) -> Tensor:
        return self.first(rows) + (self.second(rows) if rows[0, 0] > 0 else 0.0)


class PartlyUsed(AnySize):
    """Trains such a model, with momentum, where a zero is another gradient than none."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.model = Partly()


def train_partly(config: dict[str, Any]) -> Any:
    torch.set_num_threads(1)
    with PartlyUsed(config) as runner:
        runner.train()
        state = [runner.optimizer.state[p] for p in runner.model.parameters()]
        return [whole(p.detach()).clone() for p in runner.model.parameters()], [
            len(each) for each in state
        ]


def test_parameters_without_a_gradient_count_as_zeros(tmp_path: Path) -> None:
    """Where another micro-batch has a gradient for them; on FSDP2 if they are in a block that is run."""
    runs = [(1, {}), (3, {}), (2, FSDP)]
    one, *others = (
        run_processes(train_partly, settings(tmp_path / str(number), **stack), world_size=size)[0]
        for number, (size, stack) in enumerate(runs)
    )
    for other in others:
        assert all(
            torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())
            for a, b in zip(one[0], other[0])
        )
        assert other[1] == one[1]
    assert one[1][-1] == 0, "what never has a gradient is not stepped"


def test_block_of_fsdp_unused_in_a_micro_batch_is_refused(tmp_path: Path) -> None:
    config = settings(tmp_path, **FSDP, fsdp={"blocks": ["Linear"]})
    with pytest.raises(
        ValueError,
        match=r"Received: no gradient for (second|never)\.weight, .* which are one block",
    ):
        run_processes(train_partly, config, world_size=2)


class Running(AnySize):
    """A loss that reads what earlier micro-batches have left on the runner and the model."""

    def train_step(self, data: Any) -> tuple[Any, Tensor]:
        self.mean = 0.9 * getattr(self, "mean", 0.0) + 0.1
        self.unwrapped_model.seen = getattr(self.unwrapped_model, "seen", 0) + 1
        return super().train_step(data)

    def compute_loss(self, pred: Tensor, target: Tensor) -> Tensor:
        return super().compute_loss(pred, target) * (1.0 + getattr(self, "mean", 0.0))


class Declared(Running):
    saved = ("mean",)


def test_attributes_changed_by_a_micro_batch_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Running(settings(tmp_path, epochs=1)) as runner:
        runner.train()
    (said,) = [
        r.getMessage()
        for r in caplog.records
        if "depends on the number of processes" in r.getMessage()
    ]
    assert said.startswith("self.mean, self.model.seen changed within the first update")


def test_saved_attributes_changed_by_a_micro_batch_are_refused(tmp_path: Path) -> None:
    refused = pytest.raises(ValueError, match=r"attributes in `saved`.*Received: self\.mean\.")
    with refused, Declared(settings(tmp_path, epochs=1)) as runner:
        runner.train()


def test_attributes_changed_by_step_are_not_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with AnySize(settings(tmp_path, epochs=1)) as runner:
        runner.train()
    assert not [r for r in caplog.records if "within the first update" in r.getMessage()]

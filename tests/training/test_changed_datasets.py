"""What training writes into a dataset: it takes effect with any number of workers, and comes back or is named."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_outcomes, run_processes
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, get_worker_info

import danling as dl

SAMPLES, BATCH, RATE = 8, 2, 0.001


class Scale:
    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, value: Tensor) -> Tensor:
        return value * self.factor


class Scaled(Dataset[dict[str, Tensor]]):
    """Numbers times a factor, which is changed in each of the ways that users have."""

    def __init__(self, way: str = "number") -> None:
        self.way = way
        self.factor = 1.0
        self.factors = torch.ones(SAMPLES)
        self.samples = [float(index + 1) for index in range(SAMPLES)]
        self.transform = Scale()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        number = torch.tensor([self.samples[index] * self.factor * float(self.factors[index])])
        info = get_worker_info()
        process = torch.tensor(0 if info is None else os.getpid())
        return {"input": self.transform(number), "target": torch.ones(1), "process": process}

    def change(self, factor: float) -> None:
        if self.way == "number":
            self.factor = factor
        elif self.way == "tensor":
            self.factors.fill_(factor)
        elif self.way == "list":
            self.samples = [(index + 1) * factor for index in range(SAMPLES)]
        elif self.way == "transform":
            self.transform.factor = factor


class Stateful(Scaled):
    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.factor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.factor = state["factor"]


class Told(Scaled):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Trained(dl.TorchRunner):
    not_saved = ("losses", "processes")

    def __init__(self, config: dict[str, Any], dataset: Any) -> None:
        super().__init__(config)
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        self.criterion = nn.MSELoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self.datasets = {"train": dataset}
        self.losses: list[float] = []
        self.processes: list[set[int]] = []

    def train_step(self, data: dict[str, Tensor]) -> Any:
        self.processes[-1] |= set(data.pop("process").tolist())
        pred, loss = super().train_step(data)
        self.losses.append(loss.item())
        return pred, loss


class ChangedByPass(Trained):
    """Changes the dataset where a pass begins."""

    changes = True

    def on_pass_start(self, split: str) -> None:
        self.processes.append(set())
        if self.changes:
            self.datasets[split].change(1.0 + self.state.train.epoch)


class ChangedByLoss(Trained):
    """Changes the dataset after each update, by what was trained."""

    changing_rank = 0

    def __init__(self, config: dict[str, Any], dataset: Any, killed_in: int | None = None) -> None:
        super().__init__(config, dataset)
        self.killed_in = killed_in
        self.processes.append(set())

    def train_step(self, data: dict[str, Tensor]) -> Any:
        if self.state.train.global_step + 1 == self.killed_in:
            os.kill(os.getpid(), signal.SIGKILL)
        pred, loss = super().train_step(data)
        if self.changing_rank in (0, self.rank):
            self.datasets["train"].change(1.0 + loss.item() / 7)
        return pred, loss


def settings(
    root: Path, workers: int = 0, persistent: bool = False, **changes: Any
) -> dict[str, Any]:
    data: dict[str, Any] = {"batch_size": BATCH, "shuffle": False, "num_workers": workers}
    if persistent:
        data["persistent_workers"] = True
    return {"seed": 1, "epochs": 3, "dir": str(root), "dataloader": data, **changes}


def by_hand(world_size: int) -> tuple[list[float], float]:
    """Return losses and weight after factors of 1, 2 and 3 in three passes, in float64."""
    weight, losses = 0.0, []
    for factor in (1.0, 2.0, 3.0):
        for start in range(0, SAMPLES, BATCH * world_size):
            batch = [(start + place + 1) * factor for place in range(BATCH * world_size)]
            losses.append(sum((weight * x - 1) ** 2 for x in batch) / len(batch))
            weight -= RATE * sum(2 * x * (weight * x - 1) for x in batch) / len(batch)
    return losses, weight


def train_changed_by_pass(root: Path, way: str, workers: int, persistent: bool) -> Any:
    with ChangedByPass(settings(root, workers, persistent), Scaled(way)) as runner:
        runner.train()
        return runner.losses, runner.unwrapped_model.weight.item(), runner.processes


@pytest.mark.parametrize(
    ("way", "workers", "persistent"),
    [
        ("number", 0, False),
        ("number", 1, False),
        ("number", 2, True),
        ("list", 2, True),
        *(pytest.param(way, 2, True, marks=pytest.mark.slow) for way in ("tensor", "transform")),
    ],
)
def test_change_at_the_start_of_a_pass_takes_effect_in_its_first_batch(
    tmp_path: Path, way: str, workers: int, persistent: bool
) -> None:
    losses, weight, processes = train_changed_by_pass(tmp_path, way, workers, persistent)
    expected, last = by_hand(1)
    assert losses == pytest.approx(expected, rel=1e-5) and weight == pytest.approx(last, rel=1e-5)
    assert len(processes) == 3 and (not workers or processes[0].isdisjoint(processes[1]))


def test_change_at_the_start_of_a_pass_takes_effect_on_two_ranks(tmp_path: Path) -> None:
    found = run_processes(train_changed_by_pass, tmp_path, "number", 1, True, world_size=2)
    assert [weight for _, weight, _ in found] == pytest.approx([by_hand(2)[1]] * 2, rel=1e-5)


def test_kept_workers_are_not_restarted_without_a_change(tmp_path: Path) -> None:
    class Unchanged(ChangedByPass):
        changes = False

    with Unchanged(settings(tmp_path, 2, True), Scaled()) as runner:
        runner.train()
        assert runner.processes[0] == runner.processes[1] == runner.processes[2]


def train_changed_by_loss(
    root: Path, dataset: Any, workers: int = 0, killed_in: int | None = None, changing_rank: int = 0
) -> Any:
    class Changing(ChangedByLoss):
        pass

    Changing.changing_rank = changing_rank
    lines: list[str] = []

    class Collecting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Collecting(logging.WARNING)
    logging.getLogger("danling").addHandler(handler)
    config = settings(
        root,
        workers,
        **{"checkpoint.interval": 1, "auto_resume": True, "epochs": None, "steps": 11},
    )
    try:
        with Changing(config, dataset, killed_in) as runner:
            runner.train()
            return runner.unwrapped_model.weight.item(), [
                line for line in lines if "has changed" in line
            ]
    finally:
        logging.getLogger("danling").removeHandler(handler)


NAMED = (
    "The dataset of split 'train' ({}) has changed since its pass began: {}. It has no state_dict"
)


@pytest.mark.parametrize(
    ("dataset", "names"),
    [
        (Scaled, "factor"),
        (Told, "factor"),
        (lambda: Subset(Scaled(), range(SAMPLES)), "dataset.factor"),
        (Stateful, None),
        (lambda: Scaled("list"), None),
    ],
)
def test_dataset_changed_by_training_is_named_once(
    tmp_path: Path, dataset: Any, names: str | None
) -> None:
    data = dataset()
    if isinstance(data, Subset):
        data.change = data.dataset.change  # type: ignore[attr-defined]
    _, lines = train_changed_by_loss(tmp_path, data)
    expected = [] if names is None else [NAMED.format(type(data).__name__, names)]
    assert [line[: len(start)] for line, start in zip(lines, expected)] == expected and len(
        lines
    ) == len(expected)


def test_dataset_changed_by_another_rank_is_named_by_the_main_process(tmp_path: Path) -> None:
    found = run_processes(train_changed_by_loss, tmp_path, Scaled(), changing_rank=1, world_size=2)
    assert [len(lines) for _, lines in found] == [1, 0]
    assert found[0][1][0].startswith(NAMED.format("Scaled", "factor"))


def test_state_missing_in_workers_is_named(tmp_path: Path) -> None:
    _, lines = train_changed_by_loss(tmp_path, Stateful(), workers=1)
    assert (
        len(lines) == 1
        and "has changed its state within a pass, and its 1 workers read copies" in lines[0]
    )


@pytest.mark.parametrize("world_size", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_state_written_by_training_comes_back_after_a_kill(tmp_path: Path, world_size: int) -> None:
    whole = run_processes(
        train_changed_by_loss, tmp_path / "whole", Stateful(), world_size=world_size
    )
    parts = tmp_path / "parts"
    killed = run_outcomes(
        train_changed_by_loss, parts, Stateful(), killed_in=6, world_size=world_size
    )
    assert any(outcome.exit_code == -signal.SIGKILL for outcome in killed)
    resumed = run_processes(train_changed_by_loss, parts, Stateful(), world_size=world_size)
    assert resumed == whole and whole[0][1] == []


class Counting(Scaled):
    """Changes a number with each sample, or with the first one only."""

    count = 0
    is_open = False

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self.way == "count":
            self.count += 1
        elif not self.is_open:
            self.is_open = True
        return super().__getitem__(index)


class Reading(dl.Runner):
    def __init__(self, config: dict[str, Any], way: str) -> None:
        super().__init__(config)
        self.model, self.criterion = nn.Linear(1, 1), nn.MSELoss()
        self.datasets = {"train": Counting(way)}

    def train_step(self, data: dict[str, Tensor]) -> Any:
        return super().train_step((data["input"], data["target"]))


@pytest.mark.parametrize(("way", "lines"), [("count", 1), ("open", 0)])
@pytest.mark.parametrize("persistent", [False, True])
def test_what_reading_changes_in_workers_is_named_once(
    way: str, lines: int, persistent: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    loader = {"batch_size": 1, "num_workers": 2, "persistent_workers": persistent}
    config = {"epochs": 2, "seed": 1, "dir": str(tmp_path), "log": False, "dataloader": loader}
    with Reading({**config, "optim": {"type": "sgd", "lr": 1e-4}}, way) as runner:
        runner.train()
    told = [line for line in capfd.readouterr().err.splitlines() if "Reading changes" in line]
    assert len(told) == lines
    if lines:
        assert "(Counting): count. Each of its workers" in told[0]

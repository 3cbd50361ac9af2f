"""Datasets that differ from pass to pass: replaced, extended, or with a length that follows from `set_epoch`; also after a stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_outcomes, run_processes
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import danling as dl

BATCH = 2


class Numbers(Dataset[Tensor]):
    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = list(numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(self.numbers[index])])


class Growing(Numbers):
    """Has four more numbers in each epoch."""

    def __init__(self) -> None:
        super().__init__(of_epoch(0))

    def set_epoch(self, epoch: int) -> None:
        self.numbers = of_epoch(epoch)


def of_epoch(epoch: int) -> list[int]:
    return [100 * epoch + place for place in range(8 + 4 * epoch)]


class Epochs(dl.TorchRunner):
    """Trains on the numbers of each epoch, and stops itself within one."""

    not_saved = ("seen", "stop_at")

    def __init__(self, config: dict[str, Any], stop_at: int | None) -> None:
        super().__init__(config)
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.datasets = {"train": self.first()}
        self.stop_at = stop_at
        self.seen: list[tuple[int, int]] = []

    def first(self) -> Any:
        return Numbers(of_epoch(0))

    def train_step(self, data: Tensor) -> Any:
        self.seen += [(self.state.train.epoch, int(number)) for number in data.flatten()]
        if self.state.train.global_step + 1 == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        loss = (self.model(data) ** 2).mean()
        self.backward(loss)
        return None, loss


class Replaced(Epochs):
    def train_epoch(self, split: str = "train") -> Any:
        self.datasets[split] = Numbers(of_epoch(self.state.train.epoch))
        return super().train_epoch(split)


class ReplacedAlike(Epochs):
    """Other numbers, as many of them."""

    def train_epoch(self, split: str = "train") -> Any:
        epoch = self.state.train.epoch
        self.datasets[split] = Numbers([100 * epoch + place for place in range(12)])
        return super().train_epoch(split)

    def first(self) -> Any:
        return Numbers(range(12))


class Extended(Epochs):
    def train_epoch(self, split: str = "train") -> Any:
        self.datasets[split].numbers = of_epoch(self.state.train.epoch)
        return super().train_epoch(split)


class ReplacedAtStart(Epochs):
    def on_pass_start(self, split: str) -> None:
        self.datasets[split] = Numbers(of_epoch(self.state.train.epoch))


class ReplacedLoader(Epochs):
    """Has a loader of its own for each epoch."""

    def __init__(self, config: dict[str, Any], stop_at: int | None) -> None:
        super().__init__(config, stop_at)
        self.datasets = {}
        self.dataloaders = {"train": self.loader(0)}

    def loader(self, epoch: int) -> DataLoader[Tensor]:
        return DataLoader(Numbers(of_epoch(epoch)), batch_size=BATCH, shuffle=True)

    def train_epoch(self, split: str = "train") -> Any:
        self.dataloaders[split] = self.loader(self.state.train.epoch)
        return super().train_epoch(split)


class ReplacedLoaderAlike(ReplacedLoader):
    """Its loaders have as many numbers in each epoch."""

    def loader(self, epoch: int) -> DataLoader[Tensor]:
        return DataLoader(
            Numbers([100 * epoch + place for place in range(12)]), batch_size=BATCH, shuffle=True
        )


class Told(Epochs):
    def first(self) -> Any:
        return Growing()


class Shared(Told):
    """Evaluates the dataset too, which then hears of another epoch."""

    def __init__(self, config: dict[str, Any], stop_at: int | None) -> None:
        super().__init__({**config, "epochs": None, "steps": 18, "evaluate_interval": 1}, stop_at)
        self.datasets["val"] = self.datasets["train"]

    def evaluate_step(self, data: Tensor) -> Any:
        return None, (self.model(data) ** 2).mean()


def train(
    kind: Callable[..., Epochs],
    root: Path,
    stop_at: int | None = None,
    workers: int = 0,
    **changes: Any,
) -> tuple[list[tuple[int, int]], list[float]]:
    data = {"batch_size": BATCH, "num_workers": workers}
    config = {
        "seed": 1,
        "epochs": 3,
        "dir": str(root),
        "log": False,
        "auto_resume": True,
        "dataloader": data,
        **changes,
    }
    with kind(config, stop_at) as runner:
        with suppress(SystemExit):
            runner.train()
        return runner.seen, [value.item() for value in runner.unwrapped_model.parameters()]


KINDS = [Replaced, ReplacedAlike, Extended, Told, Shared]
LOADERS = [ReplacedLoader, ReplacedLoaderAlike]
QUICK = [Replaced, Told, Shared, ReplacedLoader]


@pytest.mark.parametrize("kind", [*KINDS, *LOADERS, ReplacedAtStart])
def test_each_pass_reads_the_dataset_of_its_epoch(tmp_path: Path, kind: Any) -> None:
    seen, _ = train(kind, tmp_path)
    numbers = (
        (lambda epoch: [100 * epoch + place for place in range(12)])
        if "Alike" in kind.__name__
        else of_epoch
    )
    for epoch in range(3):
        assert sorted(number for when, number in seen if when == epoch) == numbers(epoch)


@pytest.mark.parametrize(
    ("world_size", "workers", "kind"),
    [
        *(
            pytest.param(1, 0, kind, marks=[] if kind in QUICK else pytest.mark.slow)
            for kind in (*KINDS, *LOADERS)
        ),
        (2, 1, KINDS[0]),
        *(pytest.param(2, 1, kind, marks=pytest.mark.slow) for kind in KINDS[1:]),
    ],
)
def test_run_stopped_within_a_replaced_pass_continues(
    tmp_path: Path, kind: Any, world_size: int, workers: int
) -> None:
    options = {"world_size": world_size, "workers": workers}
    whole = run_processes(train, kind, tmp_path / "whole", **options)
    stop = len(whole[0][0]) // BATCH // 2 + 1  # within the second pass
    stopped = run_processes(train, kind, tmp_path / "parts", stop, **options)
    resumed = run_processes(train, kind, tmp_path / "parts", **options)
    for rank in range(world_size):
        assert 0 < len(stopped[rank][0]) < len(whole[rank][0])
        assert stopped[rank][0] + resumed[rank][0] == whole[rank][0]
        assert resumed[rank][1] == whole[rank][1]


def test_loader_that_is_not_replaced_again_is_refused_before_an_update(tmp_path: Path) -> None:
    class ReplacedUntilStopped(ReplacedLoader):
        def train_epoch(self, split: str = "train") -> Any:
            if self.stop_at is None:
                return Epochs.train_epoch(self, split)
            return super().train_epoch(split)

    train(ReplacedUntilStopped, tmp_path, 7)
    with pytest.raises(
        ValueError,
        match="to have the length 6, as when its position was saved. Received: .* of length 4",
    ):
        train(ReplacedUntilStopped, tmp_path)


@pytest.mark.parametrize("kind", LOADERS)
def test_loader_that_is_replaced_after_a_stop_takes_the_position(tmp_path: Path, kind: Any) -> None:
    class Stopping(kind):  # type: ignore[misc, valid-type]
        def step(self) -> Any:
            outcome = super().step()
            if self.state.train.global_step in (1, 7):
                self.stop()
            return outcome

    config = {"seed": 1, "epochs": 3, "log": False, "dataloader": {"batch_size": BATCH}}
    whole, _ = train(kind, tmp_path / "whole")
    with Stopping({**config, "dir": str(tmp_path / "parts")}, None) as runner:
        while runner.state.train.epoch < 3:
            runner.train()
        assert runner.seen == whole


class ReplacedOnce(Replaced):
    """Does not replace its dataset again where it is resumed."""

    def train_epoch(self, split: str = "train") -> Any:
        if self.stop_at is None:
            return Epochs.train_epoch(self, split)
        return super().train_epoch(split)


def test_dataset_without_its_replacement_is_refused_before_an_update(tmp_path: Path) -> None:
    run_processes(train, ReplacedOnce, tmp_path, 4, world_size=2)
    for outcome in run_outcomes(train, ReplacedOnce, tmp_path, world_size=2):
        assert isinstance(outcome.error, ValueError)
        assert "to have 12 samples, as when its position was saved. Received: 8 samples" in str(
            outcome.error
        )


def test_dataset_replaced_within_a_pass_is_still_refused(tmp_path: Path) -> None:
    class Late(Epochs):
        def train_step(self, data: Tensor) -> Any:
            self.datasets["train"] = Numbers(of_epoch(0))
            return super().train_step(data)

    with pytest.raises(ValueError, match="to stay as it is within a pass"):
        train(Late, tmp_path)


@pytest.mark.parametrize(
    ("kind", "is_named"), [(ReplacedAtStart, True), (Replaced, False), (Told, False)]
)
def test_dataset_that_the_hook_of_a_pass_replaces_is_named_at_a_save_within(
    tmp_path: Path, kind: Any, is_named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    train(kind, tmp_path / "whole")
    stops = (7, 9)  # within the second pass, after the end of which the whole run has saved
    sentence = "was put into self.datasets by on_pass_start"
    assert sentence not in caplog.text
    for number, stop in enumerate(stops):
        train(kind, tmp_path / str(number), stop)
    assert caplog.text.count(sentence) == is_named * len(stops)

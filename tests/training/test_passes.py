"""One pass: windows of micro-batches, the loop of its updates, and its end on several ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from torch import nn
from torch.utils.data import IterableDataset, get_worker_info

from danling import TorchRunner
from danling.data import open_source
from danling.distributed import Domain
from danling.training import UNCOMMITTED, PassAgreement, UpdateOutcome


class Passes(TorchRunner):
    """Numbers in windows of two, and everything that happened in a pass over them."""

    def __init__(self, directory: Any, numbers: int) -> None:
        super().__init__({"dir": directory, "steps": 9, "accum_steps": 2, "log": False, "seed": 1})
        self.model, self.read = nn.Linear(1, 1), list[int]()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.dataloaders["train"] = Reading(self, numbers)
        self.windows: list[list[int]] = [[]]
        self.outcomes: list[UpdateOutcome | None] = []
        self.begun: list[int] = []

    def on_pass_start(self, split: str) -> None:
        self.begun.append(self.source(split).consumed)

    def train_step(self, data: Any) -> Any:
        self.windows[-1].append(int(data))
        loss = self.model(data).mean()
        self.backward(loss)
        return None, loss

    def step(self) -> UpdateOutcome:
        instead = self.outcomes.pop(0) if self.outcomes else None
        if instead is not None and instead.reason == UNCOMMITTED:
            # What is left of an update that the groups did not commit.
            self.window.reset()
            self.zero_gradients()
            outcome = instead
        else:
            outcome = super().step()
        self.windows.append([])
        return instead or outcome

    def updates(self) -> Iterator[UpdateOutcome]:
        return self._parts.loop._updates("train")

    def seen(self) -> list[list[int]]:
        return [window for window in self.windows if window]


class Reading:
    def __init__(self, run: Passes, numbers: int) -> None:
        self.run, self.numbers = run, numbers

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(self.numbers):
            self.run.read.append(number)
            yield torch.tensor([[float(number)]])


def skipped(reason: str) -> UpdateOutcome:
    return UpdateOutcome(False, 1.0, 0.0, 1.0, None, reason)


def test_every_batch_is_in_one_window_and_the_last_one_is_shorter(tmp_path: Path) -> None:
    with Passes(tmp_path, 5) as run:
        assert [made.committed for made in run.updates()] == [True] * 3
        assert run.seen() == [[0, 1], [2, 3], [4]] and run.source("train").consumed == 5
        assert run.begun == [0]


def test_position_moves_with_skipped_updates_and_stays_at_the_exit_of_the_loop(
    tmp_path: Path,
) -> None:
    with Passes(tmp_path, 6) as run:
        run.outcomes = [skipped("nonfinite")]
        updates = run.updates()
        assert next(updates).reason == "nonfinite"
        assert run.source("train").consumed == 2
        next(updates)
        updates.close()  # type: ignore[attr-defined]
        assert run.source("train").consumed == 4
        list(run.updates())
        assert run.seen()[-1] == [4, 5] and run.begun == [0]


def test_uncommitted_update_is_repeated_from_the_same_batches(tmp_path: Path) -> None:
    with Passes(tmp_path, 4) as run:
        run.outcomes = [None, skipped(UNCOMMITTED)]
        assert len(list(run.updates())) == 2
        assert run.seen() == [[0, 1], [2, 3], [2, 3]] and run.source("train").consumed == 4


def test_too_large_window_is_read_again(tmp_path: Path) -> None:
    with Passes(tmp_path, 4) as run:
        run_window, fits = run._parts.loop.run_window, [True, False, True]

        def run_or_fail(source: Any, batches: Any, consumed: Any) -> bool:
            if fits.pop(0):
                return run_window(source, batches, consumed)
            return next(batches) is None

        run._parts.loop.run_window = run_or_fail
        assert len(list(run.updates())) == 2 and run.seen() == [[0, 1], [2, 3]]
        assert run.read.count(2) == 2


def test_a_pass_without_a_batch_is_refused(tmp_path: Path) -> None:
    with (
        Passes(tmp_path / "a", 0) as run,
        pytest.raises(ValueError, match="at least one batch on every rank in split 'train'"),
    ):
        list(run.updates())
    with Passes(tmp_path / "b", 2) as run:
        list(run.updates())
        assert list(run.updates()) == []  # its position is at the end, which is no empty loader


# Several ranks


def _compared() -> list[str]:
    world, said = Domain(), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("danling").addHandler(handler)
    agreement = PassAgreement(world, world)
    for split, offset in (("train_same", 0), ("train_own", world.rank)):
        other = open_source([torch.tensor([offset])], split=split, rank=world.rank, world_size=2)
        for _ in range(2):
            agreement.compare(other, next(other.batches()))
    return said


def test_ranks_with_the_same_batches_are_named_once() -> None:
    main, second = run_processes(_compared, init_process_group=True)
    assert (
        len(main) == 1
        and "All ranks read the same data in split 'train_same'" in main[0]
        and second == []
    )


class Uneven(TorchRunner):
    """The first rank has five batches and the second one three, of a loader that may not know its length."""

    def __init__(self, directory: str, *, knows_length: bool) -> None:
        super().__init__({"dir": directory, "log": False, "seed": 1, "steps": 6})
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        batches = list(torch.arange(5.0 if self.rank == 0 else 3.0).reshape(-1, 1, 1))
        self.dataloaders["train"] = batches if knows_length else Unknown(batches)

    def train_step(self, data: Any) -> Any:
        loss = self.model(data).mean()
        self.backward(loss)
        return None, loss


class Unknown:
    """A loader without a length."""

    def __init__(self, batches: list[torch.Tensor]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._batches)


def _ends(directory: str) -> list[str]:
    said = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    for knows_length in (True, False):
        with Uneven(f"{directory}/{knows_length}", knows_length=knows_length) as run:
            logging.getLogger("danling").addHandler(handler)
            run.train()
    return [line.partition("this pass ends early on ")[2] for line in said if "ends early" in line]


def test_batches_that_a_longer_rank_leaves_out_are_counted(tmp_path: Path) -> None:
    first, second = run_processes(_ends, str(tmp_path))
    # Two passes with a length; of those without, the end of the run comes before the end of the second is seen.
    assert first == [
        "rank 0, without its last 2 batches.",
        "rank 0, without its last 2 batches.",
        "rank 0, without the rest of its batches, whose number its loader does not know.",
    ]
    assert second == []


# Several workers


class Numbers(IterableDataset[torch.Tensor]):
    """A stream of some samples, of which each worker reads all, or its share; all are zeros where asked."""

    def __init__(self, divided: bool, samples: int, scale: float = 1.0) -> None:
        self.divided = divided
        self.samples = samples
        self.scale = scale

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        first, step = (
            (worker.id, worker.num_workers) if self.divided and worker is not None else (0, 1)
        )
        return iter(
            [torch.tensor([self.scale * number]) for number in range(first, self.samples, step)]
        )


class Streamed(TorchRunner):
    def __init__(self, config: dict[str, Any], divided: bool, samples: int, scale: float) -> None:
        super().__init__(config)
        self.datasets = {"train": Numbers(divided, samples, scale)}
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def train_step(self, data: torch.Tensor) -> tuple[None, torch.Tensor]:
        loss = self.model(data).square().mean()
        self.backward(loss)
        return None, loss


# Of one sample, only the first worker has a batch, which comes in each pass. Where all are zeros, those of other workers are equal too.
@pytest.mark.parametrize(
    ("divided", "samples", "updates", "scale"),
    [(False, 8, 8, 1.0), (True, 8, 4, 1.0), (True, 1, 1, 1.0), (True, 8, 4, 0.0)],
)
def test_workers_that_read_the_same_stream_are_named_once(
    divided: bool,
    samples: int,
    updates: int,
    scale: float,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = {"epochs": 2, "seed": 1, "dir": str(tmp_path), "log": False}
    with Streamed(
        {**config, "dataloader": {"batch_size": 2, "num_workers": 2, "drop_last": False}},
        divided,
        samples,
        scale,
    ) as runner:
        runner.train()
        assert runner.train_state.global_step == 2 * updates
        # Also where all batches are equal: the comparison has an end.
        assert bool(runner._parts.agreement._compared) == (samples > 1)
    assert sum("Two workers read the same data" in line for line in caplog.messages) == (
        not divided
    )

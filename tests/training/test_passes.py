"""One pass by itself: windows of micro-batches, the loop of its updates, and its end on several ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.processes import run_processes
from torch.utils.data import TensorDataset

from danling.data import Batch, BatchSource, build_dataloader
from danling.distributed import Domain, LocalDomain
from danling.training import UNCOMMITTED, PassAgreement, UpdateOutcome, updates_of_pass


def source(batches: int = 6, *, split: str = "train", first: int = 0, rank: int = 0, size: int = 1) -> BatchSource:
    """Return numbers from the first one, one a batch, of a loader of the user's."""
    numbers = [torch.tensor([first + i]) for i in range(batches)]
    return BatchSource(numbers, split=split, rank=rank, world_size=size)


def outcome(*, committed: bool = True, reason: str | None = None) -> UpdateOutcome:
    return UpdateOutcome(committed, 1.0, 0.0, 1.0, None, reason)


class Loop:
    """A pass in windows of two, and everything that happened in it."""

    def __init__(self, batches: BatchSource, size: int = 2) -> None:
        self.source, self.size = batches, size
        self.windows: list[list[int]] = []
        self.outcomes: list[UpdateOutcome] = []
        self.replaced: list[bool] = []
        self.fits: list[bool] = []
        self.over = False
        self.waited_for: list[int] = []
        self.begun: list[int] = []
        self.agreement = PassAgreement(LocalDomain(), LocalDomain())

    def run(self, batches: Iterator[Batch], consumed: list[Batch]) -> bool:
        """Run a window; it fits, unless it was said otherwise."""
        batch = next(batches, None)
        while batch is not None:
            consumed.append(batch)
            batch = self.agreement.next_of_window(self.source, batches) if len(consumed) < self.size else None
        if self.fits and not self.fits.pop(0):
            return False
        self.windows.append([int(batch.data) for batch in consumed])
        return True

    def timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Note the batches that are waited for."""
        for batch in batches:
            self.waited_for.append(int(batch.data))
            yield batch

    def updates(self) -> Iterator[UpdateOutcome]:
        """Return the loop."""
        return updates_of_pass(
            self.source,
            agreement=self.agreement,
            timed=self.timed,
            begin=lambda: self.begun.append(self.source.consumed),
            state_replaced=lambda: self.replaced.pop(0) if self.replaced else False,
            is_over=lambda: self.over,
            run=self.run,
            step=lambda: self.outcomes.pop(0) if self.outcomes else outcome(),
        )


def test_every_batch_is_in_one_window_and_the_last_one_is_shorter() -> None:
    loop = Loop(source(5))
    assert [made.committed for made in loop.updates()] == [True] * 3
    assert loop.windows == [[0, 1], [2, 3], [4]] and loop.source.consumed == 5
    assert loop.begun == [0]


def test_the_position_moves_with_skipped_updates_and_stands_where_the_loop_was_left() -> None:
    loop = Loop(source(6))
    loop.outcomes = [outcome(committed=False, reason="nonfinite")]
    updates = loop.updates()
    assert next(updates).reason == "nonfinite"
    assert loop.source.consumed == 2
    next(updates)
    updates.close()  # type: ignore[attr-defined]
    assert loop.source.consumed == 4
    again = Loop(loop.source)
    list(again.updates())
    assert again.windows == [[4, 5]]
    assert loop.begun == [0] and again.begun == []


def test_an_update_that_was_not_committed_is_made_again_from_the_same_batches() -> None:
    loop = Loop(source(4))
    loop.outcomes = [outcome(), outcome(committed=False, reason=UNCOMMITTED)]
    assert len(list(loop.updates())) == 2
    assert loop.windows == [[0, 1], [2, 3], [2, 3]] and loop.source.consumed == 4


def test_a_window_that_does_not_fit_is_read_again_smaller() -> None:
    loop = Loop(source(4))
    loop.fits = [True, False]
    updates = loop.updates()
    next(updates)
    loop.size = 1
    assert len(list(updates)) == 2 and loop.windows == [[0, 1], [2], [3]]
    assert loop.waited_for == [0, 1, 2, 2, 3]


def test_a_state_that_was_taken_over_is_gone_on_with_or_ends_the_pass() -> None:
    loop = Loop(source(4))
    loop.replaced = [True, False, True]
    assert len(list(loop.updates())) == 2 and loop.windows == [[0, 1], [2, 3]]
    # What the state in its place begins with is waited for as well.
    assert loop.waited_for == [0, 0, 1, 2, 2, 3]
    over = Loop(source(4))
    over.replaced, over.over = [False, True], True
    assert len(list(over.updates())) == 1


def test_a_pass_without_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one batch on every rank in split 'train'"):
        list(Loop(source(0)).updates())
    read = Loop(source(2))
    list(read.updates())
    assert list(Loop(read.source).updates()) == []  # its position stands at the end, which is no empty loader


# Several ranks


def _uneven() -> Any:
    world = Domain()
    loop = Loop(source(5 if world.rank == 0 else 3, rank=world.rank, size=2), size=1)
    loop.agreement = PassAgreement(world, world)
    count = len(list(loop.updates()))
    window = Loop(source(5 if world.rank == 0 else 3, rank=world.rank, size=2), size=2)
    window.agreement = PassAgreement(world, world, collective_forward=True)
    list(window.updates())
    return count, window.windows


def test_a_pass_ends_on_all_ranks_with_the_shortest_loader() -> None:
    assert run_processes(_uneven, init_process_group=True) == [(3, [[0, 1], [2]])] * 2


def _compared() -> list[str]:
    world, said = Domain(), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("danling").addHandler(handler)
    agreement = PassAgreement(world, world)
    for split, offset in (("train_same", 0), ("train_own", world.rank)):
        other = source(1, split=split, first=offset, rank=world.rank, size=2)
        for _ in range(2):
            agreement.compare(other, next(other.batches()))
    return said


def test_ranks_that_read_the_same_are_told_once() -> None:
    main, second = run_processes(_compared, init_process_group=True)
    assert len(main) == 1 and "All ranks read the same data in split 'train_same'" in main[0] and second == []


def test_the_end_of_a_loader_of_the_library_is_known_without_asking() -> None:
    data = TensorDataset(torch.arange(8))
    loader = build_dataloader(data, {"batch_size": 2}, split="train", train=True, seed=1, rank=0, world_size=2)
    own, users = BatchSource(loader, split="train", world_size=2), source(2, size=2)
    world = Domain.__new__(Domain)
    world.size, world.rank = 2, 0
    agreement = PassAgreement(world, world)
    assert agreement.ends_alike(own) and not agreement.ends_alike(users)
    assert PassAgreement(world, world, blind=True).ends_alike(own)
    assert PassAgreement(LocalDomain(), LocalDomain()).ends_alike(users)

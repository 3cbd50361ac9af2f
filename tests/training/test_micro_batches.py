"""Micro-batches by themselves: what is done around a `train_step`, and where a window closes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.keys import own_keys
from torch import Tensor

from danling.data import Batch, BatchSource
from danling.distributed import LocalDomain
from danling.reporting import Reporter
from danling.training import BatchWeights, PassAgreement, TrainingSession, Window
from danling.training.micro_batches import MicroBatches, WindowForwards

CPU = torch.device("cpu")


class OutOfMemory(RuntimeError):
    """Memory ran out."""


class Begins:
    """A reduction that is told where an update begins."""

    def __init__(self) -> None:
        self.begun: list[bool] = []

    def begin(self, *, first: bool) -> None:
        self.begun.append(first)


class Made:
    """Micro-batches of a run that writes down what it is asked."""

    def __init__(self, *, holds: int = 1000) -> None:
        self.carry: Any = None
        self.domain = LocalDomain()
        self.window = Window(self.domain, CPU)
        self.session, self.counter = TrainingSession(), SimpleNamespace(micro_step=0)
        self.state, self.reduction = SimpleNamespace(train=self.counter), Begins()
        self.reporter = Reporter(is_main=False, world_size=1, seconds_between_lines=0)
        self.reporter.begin(step=0, samples=0, total_steps=None, device=CPU, name="", epoch="", profiler=None)
        self.seen: list[tuple[list[float], bool, bool]] = []
        self.holds = holds
        self.batches = MicroBatches(
            self,  # type: ignore[arg-type]
            keys=own_keys(self.session),
            window=self.window,
            weights=BatchWeights(),
            reporter=self.reporter,
            session=self.session,
        )

    def to_device(self, data: Any) -> Any:
        return data[0]

    def batch_weight(self, data: Any, target: Any) -> float:
        return 2.0

    def count_tokens(self, data: Any) -> float:
        return 5.0

    def _run_train_step(self, step: Any, data: Any) -> Any:
        return step(data)

    def train_step(self, data: Tensor) -> str:
        if len(data) > self.holds:
            raise OutOfMemory
        self.seen.append((data.tolist(), self.window.reduces, self.session.in_step))
        self.window.scale(torch.ones(()))
        return "returned"

    @property
    def tokens(self) -> float:
        assert self.reporter.telemetry is not None
        return self.reporter.telemetry.tokens


def batch(*values: float, samples: int | None = None) -> Batch:
    return Batch((torch.tensor(values),), samples, None)


def test_a_micro_batch_is_moved_weighed_and_counted() -> None:
    made = Made()
    made.batches.run(batch(1, 2))
    made.batches.run(batch(3))
    made.batches.run(batch(4, samples=0))  # padding
    assert [data for data, _, _ in made.seen] == [[1, 2], [3], [4]]
    assert (
        made.reduction.begun == [True]
        and made.window.count == 3
        and made.window.samples == 3
        and made.window.weight == 4.0
    )
    assert made.counter.micro_step == 3 and made.tokens == 10.0
    assert all(in_step for _, _, in_step in made.seen) and not made.session.in_step


def test_a_step_that_fails_is_not_counted_and_is_over() -> None:
    made = Made(holds=1)
    with pytest.raises(OutOfMemory):
        made.batches.run(batch(1, 2))
    assert not made.session.in_step and made.counter.micro_step == 0


def test_a_step_alone_gives_back_what_it_returned() -> None:
    made = Made()
    assert made.batches.run_alone(lambda data: data.sum(), (torch.ones(3),)) == 3
    assert made.window.count == 1


def test_a_hook_that_is_replaced_is_called_from_then_on() -> None:
    made = Made()
    made.batches.run(batch(1))
    made.batch_weight = lambda data, target: 7.0  # type: ignore[method-assign]
    made.batches.run(batch(2))
    assert made.window.weight == 9.0


def window_of(made: Made, size: Callable[[], int] = lambda: 2, *, reduces_later: bool = False) -> WindowForwards:
    return WindowForwards(
        agreement=PassAgreement(made.domain, made.domain),
        window=made.window,
        size=size,
        run=made.batches.run,
        reduces_later=reduces_later,
    )


def test_the_last_micro_batch_of_a_window_reduces_also_where_the_pass_ends_before() -> None:
    made = Made()
    source = BatchSource([(torch.tensor([float(i)]),) for i in range(3)], split="train", seed=0)
    batches, forwards = source.batches(), window_of(made)
    for expected in (2, 1):
        consumed: list[Batch] = []
        assert forwards.run(source, batches, consumed) and len(consumed) == expected
        made.window.reset()
    assert [(data, reduces) for data, reduces, _ in made.seen] == [([0.0], False), ([1.0], True), ([2.0], True)]


def test_a_loader_that_knows_where_an_update_closes_is_believed() -> None:
    made = Made()
    source = BatchSource([], split="train", seed=0)
    closings = iter([Batch((torch.tensor([float(i)]),), None, None, i == 1) for i in range(3)])
    consumed: list[Batch] = []
    window_of(made, size=lambda: 1).run(source, closings, consumed)
    assert [reduces for _, reduces, _ in made.seen] == [False, True] and len(consumed) == 2

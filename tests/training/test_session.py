"""The session of a training by itself: requests, signals, time, what happens between batches, and how it ends."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.processes import run_processes

from danling.distributed import Domain, LocalDomain
from danling.stream.waits import Waits
from danling.supervision import SignalWatcher
from danling.training import TrainingSession, UpdateOutcome
from danling.training.session import EndOfPass, EvaluationStopped
from danling.utils.observers import Observer

# Requests


def test_a_request_is_taken_once_and_a_stop_goes_before_a_lesser_one() -> None:
    session = TrainingSession()
    session.request("stop", "save")
    assert session.asked_to_stop()
    assert session.local_requests() == {"stop", "save"} and session.local_requests() == frozenset()
    session.apply_requests(frozenset({"stop", "save", "terminate"}))
    assert (session.stop_reason, session.save_requested) == ("terminate", True)
    session.apply_requests(frozenset())  # a vote without requests takes nothing back
    assert (session.stop_reason, session.save_requested) == ("terminate", True)
    session.begin()
    assert (session.stop_reason, session.save_requested) == (None, False)


def _waits_in_two_trainings() -> list[str]:
    world, ends = Domain(), list[str]()
    for asked in (True, False):
        session = TrainingSession()
        session.begin()
        session.running = True
        waits = Waits(session, world)
        if asked and world.rank == 1:
            session.request("stop")
        try:
            for _ in range(
                60_000 if asked else 3
            ):  # a minute at least, since the other rank may be slow
                waits.leave_if_asked(4)
                time.sleep(0.001)
            ends.append("waits")
        except EndOfPass:
            ends.append(f"left: {session.stop_reason}")
        world.barrier()
    return ends


def test_request_of_an_earlier_training_does_not_end_a_wait() -> None:
    assert (
        run_processes(_waits_in_two_trainings, init_process_group=True)
        == [["left: stop", "waits"]] * 2
    )


# Between the batches of an evaluation


def test_batches_pass_while_nobody_asks_and_a_stop_leaves_the_evaluation() -> None:
    session, numbers = TrainingSession(), list[int]()

    class Numbering(Observer):
        def evaluation_batch_started(self, split: str, number: int) -> None:
            numbers.append(number)

    session.observers.append(Numbering())

    def evaluate(pending: frozenset[str] = frozenset(), stop_after: int = 9) -> Iterator[int]:
        sync: Any = SimpleNamespace(take_pending_requests=lambda: pending)
        session.running = True
        for batch in session.between_batches(
            "val", iter([5, 6, 7]), sync=sync, domain=LocalDomain()
        ):
            yield batch
            if batch == stop_after:
                session.request("stop")

    assert list(evaluate(frozenset({"save"}))) == [5, 6, 7] and numbers == [0, 1, 2]
    assert session.local_requests() == {"save"}  # what came with the last update is asked for again
    found = []
    with pytest.raises(EvaluationStopped):
        found.extend(evaluate(stop_after=6))
    assert session.stop_reason == "stop" and not session.asked_to_stop()
    session.begin()
    with pytest.raises(EvaluationStopped):
        list(evaluate(frozenset({"terminate"})))
    assert session.stop_reason == "terminate"


# How a training ends


def test_a_signal_ends_the_process_with_its_code_and_one_in_the_last_save_too() -> None:
    for number, code, said in (
        (signal.SIGTERM, 143, "Stopped by SIGTERM"),
        (signal.SIGINT, 130, "Stopped by SIGINT"),
    ):
        session = TrainingSession()
        with SignalWatcher() as session.signals:
            assert session.apply_late_signals(LocalDomain()) == "Finished"
            session.exit_if_signalled(3)
            signal.raise_signal(number)
            assert session.apply_late_signals(LocalDomain()) == said
            with pytest.raises(SystemExit) as end:
                session.exit_if_signalled(3)
        assert end.value.code == code


# Loops by hand


def test_observer_gets_a_boundary_only_without_an_update() -> None:
    class Counting(Observer):
        updates = boundaries = 0

        def update_ended(self, outcome: UpdateOutcome) -> None:
            self.updates += 1

        def boundary_reached(self) -> None:
            self.boundaries += 1

    session, counting = TrainingSession(), Counting()
    session.observers.append(counting)
    session.update(lambda: UpdateOutcome(True, 1.0, 0.0, 1.0))
    session.boundary()
    assert (counting.updates, counting.boundaries) == (1, 0)
    session.boundary()
    assert (counting.updates, counting.boundaries) == (1, 1)

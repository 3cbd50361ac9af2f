"""The session of a training by itself: requests, signals, time, what happens between batches, and how it ends."""

from __future__ import annotations

import gc
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.processes import run_processes

from danling.distributed import Domain, LocalDomain
from danling.supervision import GcPacer, Heartbeat, SignalWatcher
from danling.training import EvaluationStopped, SessionEnd, TrainingSession
from danling.training.session import PassLeft, TrainingAbandoned


class Abandoned(TrainingAbandoned):
    """A wait for others was given up."""


class Trace:
    """The end of a training, written down."""

    def __init__(self, session: TrainingSession, pending: frozenset[str] = frozenset()) -> None:
        self.session, self.waiting, self.calls = session, pending, list[str]()
        self.error: Exception | None = None
        self.end = SessionEnd(self.pending, self.finish, self.failed, self.close)

    def pending(self) -> frozenset[str]:
        """Return what the last update left."""
        self.calls.append("pending")
        return self.waiting

    def finish(self) -> None:
        """Be the last save."""
        self.calls.append("finish")
        assert not self.session.running

    def failed(self, error: Exception) -> None:
        """Keep the error."""
        self.calls.append("failed")
        self.error = error

    def close(self) -> None:
        """Be the end of all."""
        self.calls.append("close")


def trained(session: TrainingSession, *, whole: bool = True, pending: frozenset[str] = frozenset()) -> Trace:
    trace = Trace(session, pending)
    session.begin()
    with session.opened(trace.end, domain=LocalDomain(), whole=whole):
        assert session.running
    return trace


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


def test_a_signal_is_a_request_from_then_on() -> None:
    session = TrainingSession()
    with SignalWatcher() as session.signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert session.local_requests() == {"user_signal"} == session.local_requests()


def test_time_that_is_over_is_a_request_to_stop() -> None:
    now = [100.0]
    session = TrainingSession(clock=lambda: now[0])
    session.begin(max_seconds=10)
    now[0] = 109.9
    assert not session.asked_to_stop()
    now[0] = 110.0
    assert session.local_requests() == {"stop"}
    session.begin()
    assert not session.asked_to_stop()


def _two_ranks_stop() -> list[Any]:
    world, session = Domain(), TrainingSession()
    seen = [session.agree_to_stop(world)]
    if world.rank == 1:
        session.request("stop")
    return [*seen, session.agree_to_stop(world), session.stop_reason]


def test_one_rank_is_enough_to_stop_a_loop_by_hand() -> None:
    assert run_processes(_two_ranks_stop, init_process_group=True) == [[False, True, "stop"]] * 2


def _waits_in_two_trainings() -> list[str]:
    world, ends = Domain(), list[str]()
    for asked in (True, False):
        session = TrainingSession()
        session.begin()
        session.running = True
        if asked and world.rank == 1:
            session.request("stop")
        try:
            for _ in range(1000 if asked else 3):
                session.leave_wait(4, world)
                time.sleep(0.001)
            ends.append("waits")
        except PassLeft:
            ends.append(f"left: {session.stop_reason}")
        world.barrier()
    return ends


def test_a_wait_is_not_left_for_what_an_earlier_training_was_asked() -> None:
    assert run_processes(_waits_in_two_trainings, init_process_group=True) == [["left: stop", "waits"]] * 2


# Between the batches of an evaluation


def test_batches_pass_while_nobody_asks_and_a_stop_leaves_the_evaluation() -> None:
    session, numbers = TrainingSession(), list[int]()
    domain = LocalDomain()

    def evaluate(pending: frozenset[str] = frozenset(), stop_after: int = 9) -> Iterator[int]:
        batches = session.between_batches(iter([5, 6, 7]), domain=domain, pending=pending, seen=numbers.append)
        for batch in batches:
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


def _uneven_evaluation() -> Any:
    world, session, seen = Domain(), TrainingSession(), list[int]()
    own = iter(range(3 if world.rank == 0 else 1))
    batches = list(session.between_batches(own, domain=world, pending=frozenset(), seen=seen.append))
    again = iter(range(5))
    if world.rank == 0:
        session.request("interrupt")
    try:
        list(session.between_batches(again, domain=world, pending=frozenset(), seen=seen.append))
    except EvaluationStopped:
        return batches, seen, session.stop_reason
    return None


def test_a_rank_out_of_batches_votes_on_and_all_stop_together() -> None:
    long, short = run_processes(_uneven_evaluation, init_process_group=True)
    assert long == ([0, 1, 2], [0, 1, 2], "interrupt")
    assert short == ([0], [0, 1, 2], "interrupt")


# How a training ends


def test_a_training_that_ends_by_itself_is_finished_and_closed() -> None:
    session = TrainingSession()
    trace = trained(session)
    assert trace.calls == ["pending", "finish", "close"] and not session.running and session.stop_reason is None


def test_a_part_of_a_training_is_finished_only_where_it_was_asked_to_stop() -> None:
    session = TrainingSession()
    assert trained(session, whole=False).calls == ["pending", "close"]
    assert trained(session, whole=False, pending=frozenset({"stop"})).calls == ["pending", "finish", "close"]
    assert session.stop_reason == "stop"


def test_an_evaluation_that_was_left_and_a_wait_that_was_given_up_are_ends_like_others() -> None:
    session = TrainingSession()
    for error, reason in ((EvaluationStopped(), None), (Abandoned(), "stop")):
        trace = Trace(session)
        session.begin()
        with session.opened(trace.end, domain=LocalDomain()):
            if reason is not None:
                session.request(reason)
            raise error
        assert trace.calls == ["pending", "finish", "close"] and session.stop_reason == reason


def test_an_error_is_told_and_goes_on_its_way() -> None:
    session = TrainingSession()
    trace = Trace(session)
    with pytest.raises(ArithmeticError), session.opened(trace.end, domain=LocalDomain()):
        raise ArithmeticError("no further")
    assert trace.calls == ["failed", "close"] and isinstance(trace.error, ArithmeticError) and not session.running


def test_a_signal_ends_the_process_with_its_code_and_one_in_the_last_save_too() -> None:
    for number, code, said in ((signal.SIGTERM, 143, "Stopped by SIGTERM"), (signal.SIGINT, 130, "Stopped by SIGINT")):
        session = TrainingSession()
        with SignalWatcher() as session.signals:
            assert session.hear_late_signals(LocalDomain()) == "Finished"
            session.exit_if_signalled(3)
            signal.raise_signal(number)
            assert session.hear_late_signals(LocalDomain()) == said
            with pytest.raises(SystemExit) as end:
                session.exit_if_signalled(3)
        assert end.value.code == code


def test_a_signal_that_came_too_late_reaches_the_program() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        session = TrainingSession()
        session.signals = SignalWatcher()
        session.signals.install()
        trace = Trace(session)
        with session.opened(SessionEnd(trace.pending, trace.finish, trace.failed, _raise_signal), domain=LocalDomain()):
            pass
        assert heard == [signal.SIGUSR1] and signal.getsignal(signal.SIGUSR1) is not SignalWatcher
    finally:
        signal.signal(signal.SIGUSR1, before)


def _raise_signal() -> None:
    # As the program's own handlers are back, it is not noted but told at once; so it is raised only once.
    signal.raise_signal(signal.SIGUSR1)


def test_patience_is_an_ending_of_its_own() -> None:
    session = TrainingSession()
    session.stop_reason = "patience"
    assert session.hear_late_signals(LocalDomain()) == "Stopped early"
    session.exit_if_signalled(3)


# Watching


def test_updates_beat_the_heart_and_collect_garbage(tmp_path: Path) -> None:
    session = TrainingSession()
    session.updated(1, 0)  # nobody watches
    session.heartbeat = Heartbeat(tmp_path, rank=0, interval_seconds=60.0)
    session.gc_pacer = GcPacer(2)
    collected: list[int] = []
    gc.callbacks.append(lambda phase, info: collected.append(info["generation"]) if phase == "stop" else None)
    try:
        with session.collecting():
            assert not gc.isenabled()
            del collected[:]
            for step in (1, 2, 3, 4):
                session.updated(step, 0)
            assert len(collected) == 2
            assert list(session.paced(iter("abcd"))) == list("abcd") and len(collected) == 4
    finally:
        gc.callbacks.pop()
        session.heartbeat.stop()
    assert json.loads((tmp_path / "rank-0.json").read_text())["global_step"] == 4


def test_a_heartbeat_is_begun_anew_only_where_its_settings_have_changed(tmp_path: Path) -> None:
    session = TrainingSession()
    assert session.heartbeat_changed("a", ("enabled", True))
    session.heartbeat = first = Heartbeat(tmp_path, rank=0, interval_seconds=60.0)
    assert not session.heartbeat_changed("a", ("enabled", True)) and session.heartbeat is first
    assert session.heartbeat_changed("b", ("enabled", True)) and session.heartbeat is None
    assert '"stopped"' in first.file.read_text()

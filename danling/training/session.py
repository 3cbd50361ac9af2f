"""The session of a training: what asks it to stop or to save, what watches it, and how it ends."""

from __future__ import annotations

import itertools
import logging
import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from danling.distributed import Domain, StepSync, agree
from danling.supervision.signals import EXIT_CODES, SignalWatcher
from danling.utils.observers import Observers

from .outcome import UNCOMMITTED, UpdateOutcome

logger = logging.getLogger("danling")

_T = TypeVar("_T")

BY_SIGNAL = ("terminate", "interrupt", "user_signal")
"""Requests that came as a signal, after which the process ends."""

STOPS = (*BY_SIGNAL, "stop")
"""Requests that end a training; where ranks ask for several, the first one of these counts."""

ENDINGS = {
    "terminate": "Stopped by SIGTERM",
    "interrupt": "Stopped by SIGINT",
    "user_signal": "Stopped by SIGUSR1",
    "stop": "Stopped",
    "patience": "Stopped early",
}
"""The message about a training that ended for a reason."""

_NO_REQUESTS: frozenset[str] = frozenset()
_TRAININGS = itertools.count(1)


class EvaluationStopped(Exception):
    """Leaves an evaluation that all ranks have agreed to stop in; it is made anew when the run is resumed."""


class TrainingAbandoned(Exception):
    """All ranks have agreed to end a training between two updates; no failure. An extension raises it."""


class IntactStateError(RuntimeError):
    """An error that leaves all ranks together between two updates, with a state that may be saved. An extension raises it."""


class EndOfPass(Exception):
    """Leaves a pass between two updates: every rank knows that it ends here, or the only one was asked to stop while it waited."""


class DataEnded(EndOfPass):
    """Leaves a pass where nothing is left to train on, now or later, before the budget is used up."""


class TrainingSession:
    """Listens for requests, tells the observers of events, and agrees with the other ranks when to stop.

    One session serves a runner for its whole life. Requests may be made at any time and on any rank; they are applied at the boundaries
    between updates and between the batches of an evaluation, where all ranks agree on them.

    Attributes:
        running: Whether a loop of the library trains.
        training: Number of the training in this process, the same on all ranks; the store of a job outlives the runners in it.
        stop_reason: Why the training ends after the update that is under way: one of `STOPS`, or `"patience"`; `None` while it goes on.
            The same on all ranks.
        save_requested: Whether a checkpoint was asked for. The same on all ranks.
        regroup_requested: Whether ranks wait to be taken in at the next boundary. The same on all ranks.
        updated_once: Whether this process has made its first update.
        data_ended: Whether the last training ended with its stream of samples.
        ending: State and reason of `progress.json` after an exception that has ended the training, or the rest of the program; `None`
            without one. This rank's own.
        in_step: Whether a `train_step` is under way.
        in_update: Whether a `step` is under way.
        concluded: An update that is made, until its `step` has returned; where that raises, until the next save or update.
        signals: Watches for signals while a training runs; else `None`.
        observers: Are told of the events of a training.
    """

    def __init__(self) -> None:
        self.running = False
        self.training = 0
        self.stop_reason: str | None = None
        self.save_requested = False
        self.regroup_requested = False
        self.updated_once = False
        self.data_ended = False
        self.ending: tuple[str | None, str] | None = None
        self.in_step = False
        self.in_update = False
        self.concluded: UpdateOutcome | None = None
        self.signals: SignalWatcher | None = None
        self.observers = Observers()
        self.seed_step: Callable[[], object] | None = None
        """Seeds the random streams for a `step` of the program's."""
        self._requested: set[str] = set()
        self._deadline = math.inf
        self._begun_by_hand: float | None = None
        """When the first pass of a loop by hand began."""
        self._is_observed = self._evaluates = self._updated = False
        self._told: UpdateOutcome | None = None
        """The update of which the observers were told within the `step` that is under way."""

    # Requests

    def request(self, *names: str) -> None:
        """Ask all ranks for something at the next boundary. May be called on one rank."""
        self._requested.update(names)

    def asked_to_stop(self) -> bool:
        """Whether this rank was asked to stop since the last boundary: by a signal, by a request, or by the time. No communication."""
        if self.signals is not None and self.signals.received is not None:
            self._requested.add(self.signals.request or "terminate")
        # The clocks of ranks differ: the one that is over first asks the others.
        if time.monotonic() >= self._deadline:
            self._requested.add("stop")
        return not self._requested.isdisjoint(STOPS)

    def local_requests(self) -> frozenset[str]:
        """Return what this rank asks the others for, once. No communication."""
        signalled = self.signals is not None and self.signals.received is not None
        # Asked in every update, most of which have nothing to tell.
        if not (signalled or self._requested or time.monotonic() >= self._deadline):
            return _NO_REQUESTS
        self.asked_to_stop()
        taken = frozenset(self._requested)
        self._requested.clear()
        return taken

    def apply_requests(self, agreed: frozenset[str]) -> None:
        """Do at the next boundary what any rank asked for."""
        # Each is set to what this boundary says: no request is carried over from an earlier one.
        if agreed:
            self.stop_reason = first_stop(agreed)
            self.save_requested = "save" in agreed
            self.regroup_requested = "regroup" in agreed

    def drop_regroup(self) -> None:
        """Forget requests to take in the ranks that wait: they are in. May be called on one rank."""
        self.regroup_requested = False
        self._requested.discard("regroup")

    def agree_to_stop(self, domain: Domain) -> bool:
        """Return whether any rank was asked to stop: the boundary of a loop by hand. One small collective."""
        self.asked_to_stop()
        asked = self._requested.intersection(STOPS)
        self._requested -= asked
        self.stop_reason = first_stop(agree(domain, asked)) or self.stop_reason
        return self.stop_reason is not None

    # Events

    def start(self) -> None:
        """Tell the observers that a training begins, unless they have been told."""
        if not self._is_observed:
            self._is_observed = True
            self.ending = None
            self.observers.bind_events()
            self.observers.notify("training_started")

    def end(self) -> None:
        """Tell the observers that the training is over, if one has begun."""
        if self._is_observed:
            self._is_observed = False
            self.observers.notify("training_ended")

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Tell the observers of the training inside."""
        self.end()  # of a loop by hand
        try:
            self.start()
            yield
        except BaseException as error:
            self.note_error(error)
            if isinstance(error, Exception):
                self.observers.notify("training_failed", error)
            raise
        finally:
            self.end()

    def note_error(self, error: BaseException) -> None:
        """Note how an exception ends the run, in a training or in the rest of the program."""
        if isinstance(error, GeneratorExit):
            # The program has left a generator that trains, as another one leaves its loop by `break`.
            return
        ending = ending_of(error, self.stop_reason)
        # A program that leaves without an error after its training leaves the end of the training as it is.
        if ending[0] is not None or self._is_observed:
            self.ending = ending

    def update(self, step: Callable[[], UpdateOutcome]) -> UpdateOutcome:
        """Make one update, and tell the observers of it."""
        self.in_update = True
        self.concluded = self._told = None
        if self.seed_step is not None:
            self.seed_step()
        try:
            outcome = step()
        finally:
            self.in_update = False
        if not isinstance(outcome, UpdateOutcome):
            raise ValueError(
                f"Expected `step` to return an UpdateOutcome. Received: {outcome!r}. Return that of super().step()."
            )
        self._updated = True
        # A save within `step` has told them already, so that what they save has the update.
        is_told = self._told is not None and self._told is self.concluded
        self.concluded = self._told = None
        if outcome.reason != UNCOMMITTED and not is_told:
            self.observers.notify("update_ended", outcome)
        return outcome

    def boundary(self) -> None:
        """Tell the observers that a loop by hand is between two updates, unless they were told of the update."""
        if not self._updated:
            self.observers.notify("boundary_reached")
        self._updated = False

    @contextmanager
    def evaluating(self, split: str) -> Iterator[None]:
        """Tell the observers of the evaluation inside, once where one hook calls the other."""
        # `evaluate_epoch` calls `evaluate`.
        if self._evaluates:
            yield
            return
        self._evaluates = True
        try:
            self.observers.notify("evaluation_started", split)
            yield
        finally:
            self._evaluates = False
            self.observers.notify("evaluation_ended", split)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Tell the observers of the save inside, and before it of the update that it is made after, in an override of `step`."""
        outcome = self.concluded
        if not self.in_update:
            # An exception has ended the `step`.
            self.concluded = None
        if outcome is not None and outcome is not self._told:
            self._told = outcome
            self.observers.notify("update_ended", outcome)
        try:
            self.observers.notify("save_started")
            yield
        finally:
            self.observers.notify("save_ended")

    def between_batches(
        self, split: str, batches: Iterator[_T], *, sync: StepSync, domain: Domain
    ) -> Iterator[_T]:
        """Yield the batches of an evaluation; in a training, all ranks of a domain agree before each one whether to continue.

        A rank whose batches have come to their end goes on voting until those of all ranks have. When one was asked to stop, all of them
        raise `EvaluationStopped`; not within `train_step`, whose update is made first.
        """
        pending: frozenset[str] = frozenset()
        # Half of an update would be lost, and be trained again after a resume.
        may_stop = self.running and not self.in_step
        if may_stop:
            pending = sync.take_pending_requests()
            self._requested |= pending & {"save"}
        for number in itertools.count():
            batch = next(batches, None)
            goes_on = batch is not None
            if self.running:
                self.asked_to_stop()
                votes = {"continue"} if goes_on else set[str]()
                if may_stop:
                    votes |= self._requested.intersection(STOPS)
                agreed = agree(domain, votes)
                stop = first_stop({*agreed, *pending, self.stop_reason}) if may_stop else None
                if stop is not None:
                    self.stop_reason = stop
                    self._requested.difference_update(STOPS)
                    raise EvaluationStopped
                goes_on = "continue" in agreed
            if not goes_on:
                return
            self.observers.notify("evaluation_batch_started", split, number)
            if batch is not None:
                yield batch

    # One training

    def begin(self, *, max_seconds: float | None = None, whole: bool = True) -> None:
        """Begin a training, or a pass of a loop by hand: forget how an earlier one ended."""
        self.stop_reason = self.concluded = None
        self.save_requested = False
        self.training = next(_TRAININGS)
        now = time.monotonic()
        # The passes of a loop by hand have one limit together.
        begun = now if whole or self._begun_by_hand is None else self._begun_by_hand
        self._begun_by_hand = None if whole else begun
        self._deadline = begun + max_seconds if max_seconds is not None else math.inf

    def leave(self) -> None:
        """End a training: requests by time or within waits do not apply any more."""
        self.running, self._deadline = False, math.inf

    def apply_late_signals(self, domain: Domain) -> str:
        """Apply a signal that came after the last boundary, as in the last save, and return how the training ended."""
        received = self.signals.request if self.signals is not None else None
        late = agree(domain, () if received is None else (received,))
        self.stop_reason = next(
            (name for name in BY_SIGNAL if name in {*late, self.stop_reason}), self.stop_reason
        )
        return ENDINGS.get(str(self.stop_reason), "Finished")

    def exit_if_signalled(self, step: int, *, saved: bool = True) -> None:
        """End the process after a signal, with its exit code."""
        if self.stop_reason in EXIT_CODES:
            what = "the full state is saved" if saved else "nothing was saved"
            logger.info("Stopped by a signal at step %d; %s.", step, what)
            raise SystemExit(EXIT_CODES[self.stop_reason])

    def uninstall_signals(self, *, keep: bool = False) -> None:
        """Put the program's own handlers back."""
        if self.signals is not None and not (keep and self.stop_reason in BY_SIGNAL):
            self.signals.uninstall()

    def redeliver_signal(self) -> None:
        """Send this process once more a signal that came too late to be applied, now that the program's own handlers are back."""
        if (
            self.signals is not None
            and self.signals.received is not None
            and self.stop_reason not in BY_SIGNAL
        ):
            signal.raise_signal(self.signals.received)


def first_stop(requests: Iterable[str | None]) -> str | None:
    """Return the request to stop that counts among several."""
    asked = set(requests)
    return next((name for name in STOPS if name in asked), None)


def ending_of(error: BaseException, stop_reason: str | None) -> tuple[str | None, str]:
    """Return state and reason of `progress.json` for a run that an exception ends; a state of `None` follows from the budget.

    Args:
        error: The exception. It is not kept: it would keep what its frames hold.
        stop_reason: Why the training was to end, if it was.
    """
    if isinstance(error, KeyboardInterrupt):
        return "stopped", "interrupt"
    if isinstance(error, SystemExit):
        if error.code in (None, 0):
            return None, "exit"
        asked = [reason for reason, code in EXIT_CODES.items() if code == error.code]
        if asked:
            return "stopped", stop_reason if stop_reason in asked else asked[0]
    return "failed", type(error).__name__

"""Observers: classes that are told of the events of a training by the loop, and are named by nothing that makes updates."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, MutableSequence, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, overload

from torch import Tensor

if TYPE_CHECKING:
    from danling.distributed import StepTotals
    from danling.training.outcome import UpdateOutcome

logger = logging.getLogger("danling")


class Observer:
    """Watches a training. Override the events that you need, and append an object to `runner.observers` on all ranks.

    The loop calls each event on all ranks, in the order of the list. An event that ends something is called after a failure too. An
    observer draws no random numbers, and communicates only in events whose text allows it. If it raises an exception, the exception is
    logged and the observer is removed, unless it is `critical`; then the exception ends the training.

    An observer that overrides `state_dict` and `load_state_dict` is saved with the run, and restored by its name.
    """

    critical: ClassVar[bool] = False
    name: str = ""
    """The name of its state in a checkpoint. Empty: the name of its class. Set it before the observer is appended."""

    # Its state

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: tensors, NumPy arrays, numbers, text, and containers of them. Called on all ranks at each save.

        Does not communicate. Values that differ between ranks are saved for each rank. A skipped update does not take back what an
        observer has counted: it hears of the update in `update_ended`. Where the micro-batches of an update are computed again, the state
        of its beginning is put back by `load_state_dict`; runs that may do so call `state_dict` before each update.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, after all else of a checkpoint. Called on all ranks. Does not communicate.

        An observer that is appended after the checkpoint was loaded gets its state as soon as it is appended.
        """

    # A training

    def training_started(self) -> None:
        """A training begins, before the model is put into training mode. May communicate.

        That is `train`, a `train_epoch` that you call, `runner.session()`, or, in your own loop without it, the first `train_step`.
        """

    def training_failed(self, error: Exception) -> None:
        """The training ends with an error, maybe on this rank only. `training_ended` follows."""

    def training_ended(self) -> None:
        """The training is over, and its last save is made.

        Your own loop without `runner.session()` ends at the next training or at `runner.close()`.
        """

    # A pass

    def pass_started(self, split: str) -> None:
        """A pass over a split begins, or continues after a resume. May communicate."""

    def pass_ended(self, split: str) -> None:
        """A pass over a split is complete. Not called if the training stops within it. May communicate."""

    def batch_wait_started(self) -> None:
        """The loop asks for the next batch to train on."""

    def batch_wait_ended(self) -> None:
        """The batch is there, or the loader has no more."""

    # An update

    def update_started(self) -> None:
        """Before the first micro-batch of an update; called again if its micro-batches are computed again."""

    def micro_batch_started(self, data: object, *, read: object, samples: float) -> None:
        """A micro-batch is on the device, before its forward. Not called for padding.

        Args:
            data: The batch, on the device.
            read: The same batch as the loader returned it.
            samples: Its number of samples.
        """

    def micro_batch_ended(self) -> None:
        """Forward and backward of a micro-batch are over. Not called for padding."""

    def gradients_ready(self, totals: StepTotals, norm: Tensor) -> None:
        """The gradient is reduced and divided by its weight, and not clipped yet. It may be non-finite. May communicate.

        Args:
            totals: Sums over all ranks.
            norm: Its 2-norm, 0-dim.
        """

    def update_ended(self, outcome: UpdateOutcome) -> None:
        """An update was made or skipped. May communicate."""

    def boundary_reached(self) -> None:
        """A loop by hand that does not call `runner.step()` is between two updates: it calls `runner.boundary()`."""

    def membership_changed(self, before: int, after: int) -> None:
        """The ranks of the run are others than before, with `elastic.enabled`: between two updates.

        Args:
            before: Number of ranks before; on a rank that joins, 0.
            after: Number of ranks now.
        """

    # Evaluations and saves

    def evaluation_started(self, split: str) -> None:
        """An evaluation of a split begins, in a training or on its own."""

    def evaluation_batch_started(self, split: str, number: int) -> None:
        """A batch of an evaluation is about to be evaluated; `number` counts from 0. In a training also where this rank has none left."""

    def evaluation_ended(self, split: str) -> None:
        """The evaluation is over."""

    def save_started(self) -> None:
        """A save of the full state begins."""

    def save_ended(self) -> None:
        """The state is copied; the write may continue in the background."""

    def results_needed(self) -> None:
        """The state will be saved or evaluated: what was postponed is due. May communicate."""


_STATE = ("state_dict", "load_state_dict")
EVENTS = tuple(
    name
    for name, value in vars(Observer).items()
    if callable(value) and not name.startswith("_") and name not in _STATE
)


def keeps_state(kind: type[Any]) -> bool:
    """Whether observers of a class have a state that is saved."""
    return kind.state_dict is not Observer.state_dict


class Observers(MutableSequence[Observer]):
    """The observers of a runner, in the order in which they are called.

    Attributes:
        heard: The methods to call by event: without the events that no observer overrides. Made when observers are added or removed,
            and when a training begins.
        calls: One callable for each of these events, for the events of every update: the method itself where only one critical observer
            overrides the event, else `notify`.
        with_state: Observers with a state that is saved, by name.
        on_added: Called with the names of the observers with a state that are new in the list.
    """

    def __init__(self) -> None:
        self._observers: list[Observer] = []
        self.heard: dict[str, tuple[tuple[Observer, Callable[..., None]], ...]] = {}
        self.calls: dict[str, Callable[..., None]] = {}
        self.with_state: dict[str, Observer] = {}
        self.on_added: Callable[[Collection[str]], None] = lambda names: None

    def notify(self, event: str, *args: object, **named: object) -> None:
        """Call an event of every observer that overrides it.

        What ends in an event such as `update_ended` has ended for all of them, also where one of them leaves the training, as by an
        evaluation in which the ranks change.
        """
        leaving: BaseException | None = None
        for observer, call in self.heard.get(event, ()):
            try:
                call(*args, **named)
            except Exception as error:
                self.drop(observer, error)
            except BaseException as error:
                if not event.endswith("_ended"):
                    raise
                if leaving is None:
                    leaving = error
                elif error is not leaving:
                    leaving.add_note(
                        f"{type(observer).__name__} has then raised {type(error).__name__}: {error}"
                    )
        if leaving is not None:
            try:
                raise leaving
            finally:
                # Else this frame and the exception would keep each other, and with them the sockets of the collective.
                del leaving

    def drop(self, observer: Observer, error: Exception) -> None:
        """Remove an observer that has raised an error, and log it; raise the error of a critical one."""
        if observer.critical:
            raise error
        logger.error(
            "The observer %s failed and is dropped.", type(observer).__name__, exc_info=error
        )
        if any(each is observer for each in self._observers):  # it may have removed itself
            self.remove(observer)

    def _bind(self, observers: list[Observer]) -> None:
        """Take a list of observers, and look which of them override which events."""
        known = self.with_state
        self.with_state = _by_name(observers)
        self._observers = observers
        self.bind_events()
        added = [name for name, each in self.with_state.items() if known.get(name) is not each]
        if added:
            self.on_added(added)

    def bind_events(self) -> None:
        """Look which observers override which events, in their class or in an attribute of the object."""
        self.heard, self.calls = {}, {}
        for event in EVENTS:
            calls = [(each, getattr(each, event)) for each in self._observers]
            base = getattr(Observer, event)
            listening = tuple(
                (each, call) for each, call in calls if getattr(call, "__func__", call) is not base
            )
            if listening:
                self.heard[event] = listening
                (first, call), *others = listening
                # An error of a critical observer ends the training, as `notify` has it too.
                self.calls[event] = (
                    call if first.critical and not others else partial(self.notify, event)
                )

    # A sequence

    @overload
    def __getitem__(self, index: int) -> Observer: ...

    @overload
    def __getitem__(self, index: slice) -> list[Observer]: ...

    def __getitem__(self, index: int | slice) -> Observer | list[Observer]:
        return self._observers[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        observers = list(self._observers)
        observers[index] = value
        self._bind(observers)

    def __delitem__(self, index: int | slice) -> None:
        observers = list(self._observers)
        del observers[index]
        self._bind(observers)

    def __len__(self) -> int:
        return len(self._observers)

    def insert(self, index: int, value: Observer) -> None:
        """Add an observer before another one."""
        if not isinstance(value, Observer):
            raise TypeError(
                f"Expected an Observer. Received: {value!r}. Derive its class from danling.utils.observers.Observer."
            )
        observers = list(self._observers)
        observers.insert(index, value)
        self._bind(observers)

    def remove(self, value: Observer) -> None:
        """Remove this very observer: another one may be equal, as those of a dataclass are."""
        places = [index for index, each in enumerate(self._observers) if each is value]
        if not places:
            raise ValueError(f"Expected an observer of the list to remove. Received: {value!r}.")
        del self[places[0]]

    def __repr__(self) -> str:
        return repr(self._observers)


def _by_name(observers: Sequence[Observer]) -> dict[str, Observer]:
    """Return the observers with a state by the name of it, and refuse those that could not be told apart or restored."""
    found = {id(each): each for each in observers if keeps_state(type(each))}
    named = [(each.name or type(each).__name__, each) for each in found.values()]
    halves = [
        name for name, each in named if type(each).load_state_dict is Observer.load_state_dict
    ]
    if halves:
        raise TypeError(
            f"Expected an observer with `state_dict` to have `load_state_dict` too. Received: {halves[0]!r} without it. Override both."
        )
    twice = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if twice:
        raise ValueError(
            f"Expected observers with a state to have different names. Received: name={twice[0]!r} more than once. Set `name` of each "
            "before it is appended."
        )
    return dict(named)

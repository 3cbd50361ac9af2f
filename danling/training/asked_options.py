"""The options of optimizer and schedule that a program asks for: a resume names those that the checkpoint has replaced."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from danling.checkpoints.errors import CheckpointMismatch
from danling.optim.schedule_state import (
    OtherSchedule,
    is_plain,
    kind_of_schedule,
    options_of_schedule,
    rates_by_functions,
)
from danling.optim.state import HOW, rates_of
from danling.utils.encoding import without_numpy
from danling.utils.messages import listed
from danling.utils.observers import Observer

from .attributes import KeptAttributes
from .run_state import StatePart

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner

logger = logging.getLogger("danling")

_LONGEST = 80
_OF_OTHERS = (HOW - {"maximize"}) | {"params", "param_names"}
"""Entries of a parameter group that do not change a result, or are no options."""
_BUDGET = "run.steps"
_MOVED = ("betas", "momentum")
_USUAL = ("lr", "weight_decay", "betas", "momentum", "eps")
"""Options that are compared with a checkpoint of a version which did not save what the program had asked for."""


class AskedOptions:
    """Saves the options as the program has made them, before anything was restored or trained.

    A resume compares those of both programs: what training changes, by a hook or a schedule, is no other option.
    """

    def __init__(self, runner: TorchRunner, attributes: KeptAttributes) -> None:
        self._runner = runner
        self._attributes = attributes
        self._here: dict[str, Any] = {}
        self._kept: dict[str, str] = {}
        """Options as the program asked for them whose checkpoint was restored, which differ from those of this one."""
        self._class = ""
        self._stored: Mapping[str, Any] = {}
        self._other_functions: Callable[[], list[str]] | None = None
        """What names the functions of the schedule that give another rate than those of the checkpoint; `None` without its restore."""

    def note(self) -> None:
        """Remember the options. Called when optimizer and schedule are there, before the restore."""
        self._here, self._class = self._values(), type(self._runner.scheduler).__qualname__

    def part(self) -> StatePart:
        """Return the entry of a checkpoint."""
        return StatePart("asked_options", self._state, self._load, default=dict)

    def _state(self) -> dict[str, Any]:
        texts = {name: _text(value) for name, value in self._here.items()}
        kind = kind_of_schedule(self._runner.scheduler)
        texts[_BUDGET] = self._budget()
        return {"options": {**texts, **self._kept}, "class": self._class, "kind": kind}

    def _budget(self) -> str:
        """Return how long the run is; in epochs where the number of its updates is not known."""
        runner = self._runner
        return _text(runner.epochs if runner.steps is None else runner.steps)

    # A restore

    @contextmanager
    def compared_with(self, stored: Mapping[str, Any]) -> Iterator[None]:
        """Restore the components of a checkpoint inside, which has these options."""
        self._stored = stored
        try:
            yield
        finally:
            self._stored = {}

    @property
    def kind(self) -> str:
        """The kind of the schedule in the checkpoint that is being restored; empty where it is not known."""
        return str(self._stored.get("kind", ""))

    def restoring_schedule(self, restore: Callable[[], None]) -> None:
        """Restore the schedule. One that the training has replaced by another kind is refused only if a hook does not replace it again."""
        try:
            restore()
        except OtherSchedule as error:
            if self._stored.get("class") != self._class:
                raise
            refusal = RefusedSchedule(self._runner, error)
            self._runner.observers.append(refusal)
        else:
            self._other_functions = rates_by_functions(self._runner.scheduler)

    def _load(self, stored: Mapping[str, Any], _: Collection[str]) -> None:
        now = self._values()
        before: Mapping[str, str] = stored.get("options", {})
        if not stored:
            # An older version has not saved them. It may have been training that has changed what the checkpoint has.
            # A schedule that moves the momentum, as OneCycleLR does, keeps its bounds in the same group.
            moved = {
                f"{name.rpartition('.')[0]}.{option}"
                for name in now
                for option in _MOVED
                if name.endswith(".max_momentum")
            }
            compared = [name for name in now.keys() - moved if name.rpartition(".")[2] in _USUAL]
            before = {name: _text(now[name]) for name in compared}
        replaced = {
            name: value
            for name, value in self._here.items()
            if name in before and name in now and _text(now[name]) != _text(value)
        }
        self._kept = {name: before[name] for name in replaced} if stored else {}
        differ = {
            name: f"={_shown(now[name])} (here {_shown(value)})"
            for name, value in replaced.items()
            if before[name] != _text(value)
        }
        # On each rank: a function may be one that all ranks call.
        named = self._named_functions()
        if self._runner.is_main_process:
            self._warn(differ)
            if named:
                self._warn_of_functions(named, before.get(_BUDGET))
            before_class = stored.get("class", "NoneType")
            if self._runner.scheduler is None and before_class != "NoneType":
                self._warn_of_missing_schedule(before_class)

    def _named_functions(self) -> list[str]:
        """Return what functions of the schedule give another rate than the checkpoint has."""
        named_by, self._other_functions = self._other_functions, None
        if named_by is None:
            return []
        # A method of the program may count its calls in an attribute, which is restored: neither count this one nor compare it.
        before, put_back = self._attributes.digests(), self._attributes.remember()
        named = named_by()
        if self._attributes.digests() == before:
            return named
        put_back()
        return []

    def _warn_of_missing_schedule(self, before: str) -> None:
        """Name rates that a schedule has left in the optimizer, and that none moves any more."""
        now = rates_of(self._runner.optimizer)
        here = [self._here.get(f"optimizer.{number}.lr") for number in range(len(now))]
        if now != here:
            logger.warning(
                "The run of the checkpoint had a schedule, %s, and this one has none: the learning rate stays as it was at the save, %s "
                "(here %s). For the program's, add 'optimizer.param_groups' to checkpoint.exclude_from_loading.",
                before,
                _shown(now[0] if len(now) == 1 else now),
                _shown(here[0] if len(here) == 1 else here),
            )

    def _warn_of_functions(self, named: list[str], budget: str | None) -> None:
        """Name other rates of functions. Those of a run of another length may be meant: a function may depend on the length."""
        if budget is not None and budget != self._budget():
            logger.info(
                "The function of the schedule gives another rate than in the run of the checkpoint, which had another length: %s.",
                listed(named),
            )
            return
        logger.warning(
            "The function of the schedule gives another rate than in the run of the checkpoint, which contains no function: %s. The "
            "schedule continues with that of the program. If you have changed it, or have set the rate yourself, ignore this; otherwise "
            "let it depend on its argument alone.",
            listed(named),
        )

    def _warn(self, differ: Mapping[str, str]) -> None:
        options: dict[str, None] = {}
        schedule: dict[str, None] = {}
        entries: dict[str, None] = {}
        for path, values in differ.items():
            component, _, name = path.partition(".")
            if component == "optimizer":
                # Each once: most options are those of all groups.
                options[f"{name.partition('.')[2]}{values}"] = None
            else:
                within, _, last = name.rpartition(".")
                schedule[f"{last.lstrip('_')}{values}"] = None
                entries["scheduler" if within else f"scheduler.{last}"] = None
        if options:
            logger.warning(
                "The optimizer continues with the options of the checkpoint, which differ from those of the program: %s. For the "
                "program's, add 'optimizer.param_groups' to checkpoint.exclude_from_loading.",
                listed(list(options)),
            )
        if schedule:
            logger.warning(
                "The schedule continues with the options of the checkpoint, which differ from those of the program: %s. For the "
                "program's, add %s to checkpoint.exclude_from_loading.",
                listed(list(schedule)),
                ", ".join(map(repr, entries)),
            )

    def _values(self) -> dict[str, Any]:
        """Return the options by dotted name, those of the optimizer for each group. No communication."""
        optimizer, scheduler = self._runner.optimizer, self._runner.scheduler
        found: dict[str, Any] = {}
        for number, group in enumerate(getattr(optimizer, "param_groups", ())):
            for name, value in group.items():
                if isinstance(value, Tensor) and value.numel() == 1:
                    value = value.item()
                # A schedule moves the rate, and keeps that of the program as another entry.
                if name in _OF_OTHERS or (name == "lr" and "initial_lr" in group):
                    continue
                if is_plain(value):
                    found[f"optimizer.{number}.{'lr' if name == 'initial_lr' else name}"] = value
        if scheduler is not None:
            options = options_of_schedule(scheduler)
            found.update({f"scheduler.{name}": value for name, value in options.items()})
        return {name: without_numpy(value) for name, value in found.items()}


class RefusedSchedule(Observer):
    """Raises the error of a schedule that was not restored, unless a hook replaces it before the first update.

    Args:
        runner: The runner.
        error: The error.
    """

    critical: ClassVar[bool] = True

    def __init__(self, runner: TorchRunner, error: OtherSchedule) -> None:
        self._runner = runner
        self._error = error
        self._schedule = runner.scheduler

    def training_started(self) -> None:
        if self._runner.scheduler is not self._schedule:
            # Replaced by the program, before a hook could: the restore was of the one that it had made first.
            raise self._error

    def update_started(self) -> None:
        if self._runner.scheduler is self._schedule:
            self._refuse()
        self._runner.observers.remove(self)

    def save_started(self) -> None:
        if self._runner.scheduler is self._schedule:
            self._refuse()

    def _refuse(self) -> None:
        raise CheckpointMismatch(
            f"{self._error} In the training of the checkpoint a hook has replaced the schedule, and in this one none has: on_pass_start is "
            "not called for the rest of a pass."
        ) from self._error


def _text(value: object) -> str:
    """Return a text that differs where values do: a short value itself, or a digest."""
    # Equal numbers of two types are one option, such as 1 and 1.0.
    text = repr(float(value)) if isinstance(value, int) and abs(value) < 2**53 else repr(value)
    return text if len(text) <= _LONGEST else hashlib.sha256(text.encode()).hexdigest()


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."

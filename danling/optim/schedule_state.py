"""What a schedule keeps: the options that a program has made it with, and the restore of its state."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any

from torch.optim.lr_scheduler import LambdaLR, LRScheduler, MultiplicativeLR, ReduceLROnPlateau

from danling.utils.encoding import is_of_numpy, numpy_as, without_numpy

from .joint import JointScheduler

logger = logging.getLogger("danling")

_FIX = "Restore the schedule, or add 'scheduler' to checkpoint.exclude_from_loading to start it from the beginning."
_POSITION = frozenset(
    {
        "base_lrs",
        "last_epoch",
        "verbose",
        "_get_lr_called_within_step",
        "_is_initial",
        "_last_lr",
        "_step_count",
    }
)
"""Attributes of torch's schedules that say where one is, or follow from the optimizer. All others are options, or begin equally."""


_MOST_FACTORS = 100_000
"""Most calls of a function to compute a rate that is a product of its values."""


class OtherSchedule(ValueError):
    """A state is that of another schedule."""


# The options


def options_of_schedule(scheduler: Any) -> dict[str, Any]:
    """Return the numbers, text and lists that a schedule keeps, and those that it is made of, by name, less its position.

    A class of danling that keeps the program's options at a restore, such as the length of the run, names them in `kept_options`.
    """
    found = {}
    for prefix, part in _parts(scheduler):
        kept = dict(getattr(part, "__dict__", {}))
        if "lr_lambdas" in kept:
            # torch saves what the objects among them keep.
            kept["lr_lambdas"] = [dict(getattr(each, "__dict__", {})) for each in part.lr_lambdas]
        found.update(
            {
                f"{prefix}{name}": value
                for name, value in kept.items()
                if name not in {*_POSITION, *getattr(part, "kept_options", ())} and is_plain(value)
            }
        )
    return found


def is_plain(value: Any) -> bool:
    """Whether a value is made of numbers and text alone."""
    if value is None or isinstance(value, (bool, int, float, complex, str)) or is_of_numpy(value):
        return True
    if isinstance(value, dict):
        return all(map(is_plain, value)) and all(map(is_plain, value.values()))
    return isinstance(value, (list, tuple)) and all(map(is_plain, value))


def kind_of_schedule(scheduler: Any) -> str:
    """Return which of torch's classes a schedule is, or derives from, with those that it is made of."""
    kinds = [_kind(part) for _, part in _parts(scheduler)]
    return " of ".join([kinds[0], ", ".join(kinds[1:])]) if kinds[1:] else kinds[0]


def _kind(scheduler: Any) -> str:
    mro = type(scheduler).__mro__
    return next((kind.__name__ for kind in mro if kind.__module__.startswith("torch.")), "")


def _parts(scheduler: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a schedule and those that it is made of: several by name, in sequence, or chained. Each has a prefix of its names."""
    yield prefix, scheduler
    within = getattr(scheduler, "schedules", None) or getattr(scheduler, "_schedulers", None)
    if isinstance(within, (list, tuple)):
        within = dict(enumerate(within))
    for name, part in within.items() if isinstance(within, Mapping) else ():
        yield from _parts(part, f"{prefix}{name}.")


def rates_by_functions(scheduler: Any) -> Callable[[], list[str]] | None:
    """Return what names the functions of a schedule that do not give the rates that the schedule has now, after its restore.

    `None` for a schedule without functions.

    torch saves what objects among them keep, and no function: a restored schedule continues with that of the program.
    """
    is_joint = isinstance(scheduler, JointScheduler)
    parts = [
        (prefix, part, getattr(type(part), "get_lr", None)) for prefix, part in _parts(scheduler)
    ]
    found = [
        # Copies: a rate that the configuration asks for changes both.
        (part, part.last_epoch, list(part.base_lrs), list(getattr(part, "_last_lr", ())))
        for prefix, part, kind in parts
        # One that multiplies within another schedule does not begin at its base rate.
        if kind is LambdaLR.get_lr
        or (kind is MultiplicativeLR.get_lr and prefix.count(".") <= is_joint)
        if part.last_epoch >= 0
    ]

    def named() -> list[str]:
        lines = dict[str, None]()
        for part, at, bases, rates in found:
            for function, base, before in zip(part.lr_lambdas, bases, rates):
                if not isinstance(function, FunctionType) and getattr(function, "__dict__", None):
                    continue  # saved, and it may count its calls
                rate = _rate(part, function, base, at)
                if rate is not None and not math.isclose(rate, before, rel_tol=1e-5):
                    line = f"{type(part).__name__} at {at}: {rate:.6g} (before {float(before):.6g})"
                    lines[line] = None
        return list(lines)

    return named if found else None


def _rate(scheduler: Any, function: Callable[[int], float], base: float, at: int) -> float | None:
    """Return the rate of a schedule by a function at a position; `None` if that takes too long, or the function raises an error."""
    is_product = not isinstance(scheduler, LambdaLR)
    if is_product and at > _MOST_FACTORS:
        return None
    try:
        factor = math.prod(map(function, range(1, at + 1))) if is_product else function(at)
    except Exception:
        # That of a program may have nothing for the past, and torch asks for none.
        return None
    return float(base * factor)


# The state


def load_schedule(scheduler: Any, state: Mapping[str, object], *, kind: str = "") -> None:
    """Restore a schedule. One that follows a metric keeps its mode, and waits again where that of the state is another one.

    Args:
        scheduler: The schedule.
        state: What its `state_dict` returned, with numbers of NumPy as those of Python.
        kind: The kind of the schedule that the state is of, if it is known.

    Raises:
        OtherSchedule: If it is the state of another schedule.
    """
    mode = getattr(scheduler, "mode", None)
    for part, stored in _with_states(scheduler, state):
        _check_names(part, stored)
    here = kind_of_schedule(scheduler)
    # Schedules of torch that have the same names, such as those by a function. Classes of the user's may be renamed.
    if kind and here != kind and not {"", "LRScheduler"} & {here, kind}:
        raise OtherSchedule(
            f"Expected the state of {here}, the schedule of this run. Received: that of {kind}. {_FIX}"
        )
    own = getattr(scheduler, "__dict__", {})
    scheduler.load_state_dict(
        {name: numpy_as(value, own.get(name)) for name, value in state.items()}
    )
    if isinstance(scheduler, ReduceLROnPlateau) and scheduler.mode != mode:
        logger.info(
            "%s follows the %s value now, and followed the %s one when it was saved: its best value and its patience begin again.",
            *(
                type(scheduler).__name__,
                *(("lowest", "highest") if mode == "min" else ("highest", "lowest")),
            ),
        )
        scheduler.mode = mode
        scheduler.mode_worse = scheduler.best = math.inf if mode == "min" else -math.inf
        scheduler.num_bad_epochs = 0


def saved_schedule(scheduler: Any) -> Any:
    """Return the state of a schedule, with numbers of NumPy as those of Python, which a safe reader knows."""
    return without_numpy(scheduler.state_dict())


def _with_states(
    scheduler: Any, state: Mapping[str, Any]
) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Yield a schedule and its state, and those that it is made of."""
    yield scheduler, state
    named = getattr(scheduler, "schedules", None)
    within, stored = getattr(scheduler, "_schedulers", None), state.get("_schedulers")
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(named, Mapping):
        pairs = [(each, state.get(name)) for name, each in named.items()]
    elif isinstance(within, (list, tuple)) and isinstance(stored, (list, tuple)):
        if len(within) != len(stored):
            raise OtherSchedule(
                f"Expected the state of {type(scheduler).__name__}, the schedule of this run, which is made of {len(within)}. Received: "
                f"that of another one, made of {len(stored)}. {_FIX}"
            )
        pairs = zip(within, stored)
    for part, of_part in pairs:
        if isinstance(of_part, Mapping):
            yield from _with_states(part, of_part)


def _check_names(scheduler: Any, stored: Mapping[str, object]) -> None:
    """Refuse the state of another kind of schedule, which torch's schedules take in whatever it is.

    A class of the user's may get some attributes in training only.
    """
    if not isinstance(scheduler, LRScheduler):
        return
    own = {
        name for name in scheduler.state_dict() if not name.startswith("_") and name != "verbose"
    }
    others = {name for name in stored if not name.startswith("_") and name != "verbose"}
    is_of_torch = type(scheduler).__module__.startswith("torch.")
    missing, unexpected = own - others, others - own
    if (missing and unexpected) or (is_of_torch and (missing or unexpected)):
        shown = (
            ", ".join(f"{name}={stored[name]!r}" for name in sorted(unexpected))
            or f"no {sorted(missing)}"
        )
        raise OtherSchedule(
            f"Expected the state of {type(scheduler).__name__}, the schedule of this run. Received: that of another one, with {shown}. "
            f"{_FIX}"
        )

"""Which names of a runner are the library's: what a user sets under one of them is refused instead of replaced without a word."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from danling.utils.warn import warn_user

SETTABLE = frozenset(
    {"model", "ema", "criterion", "optimizer", "scheduler", "datasets", "dataloaders", "metrics", "meters", "config"}
    | {"carry", "shifts_labels"}
)
"""Components, which the library takes over as they were set."""

COMPONENTS = ("model", "ema", "criterion", "optimizer", "scheduler", "metrics")
"""Components of which a run has none until somebody sets one."""

_REPLACEABLE = frozenset({"state", "device", "workspace", "seed", "id", "timestamp", "code_id", "config_id"})
"""What a user may replace by another value of the same type."""

_CLASS_DATA = frozenset({"mode"})
"""What the library changes while it runs: it begins as an attribute of the class, and is no setting."""

FORMER_NAMES = {
    "ballot": "_parts.update.sync",
    "begin_updates": "_parts.driver.begin_updates",
    "bind_reduction": "_bind_reduction",
    "check_coverage": "_parts.readiness.check_optimizer",
    "check_optimizer_given": "_parts.readiness.check_optimizer_given",
    "check_scheduler": "_parts.readiness.check_schedule",
    "check_trainable": "_parts.driver.check_trainable",
    "data_place": "_data.place",
    "data_replicas": "placement.data_replicas",
    "excluded_from_loading": "run_state.excluded",
    "evaluations_since_best": "standing.evaluations_since_best",
    "figures_domain": "placement.metrics",
    "losses": "_parts.losses",
    "memory_retry": "_parts.wrapping.memory_retry",
    "metric_set": "_parts.metrics",
    "optimizer_domain": "placement.optimizer",
    "own_scores": "standing.scores",
    "raise_pending_error": "_parts.update.raise_pending_error",
    "read_samples": "_parts.update.read_samples",
    "reduces_gradients": "window.reduces",
    "rewrap_if_trainables_changed": "_parts.wrapping.rewrap_if_trainables_changed",
    "scheduler_interval": "_parts.scheduler_interval",
    "scoreboard": "standing.board",
    "step_sync": "_parts.update.sync",
    "sums_loss": "_parts.sums_loss",
    "update_plan": "_data.plan",
    "write_results": "_parts.driver.write_results",
}
"""Attributes that were a runner's own, and where they are now; the former name is accepted for one version."""

_INSTEAD = {
    "export_model": "Set checkpoint.last_save_model_only=true, which writes the weights at the end, or save `runner.model_state_dict()`.",
    "meter_totals": "Call `runner.meters.totals(runner.placement.metrics)`.",
    "optimized_parameters": "Call `runner.preparation.optimized_parameters(runner.optimizer)`.",
    "prepare_updates": "Leave it out: `train_step` prepares an update where it is called alone.",
}
"""Methods of an earlier version that nothing has taken the place of under the runner, and what is done instead."""

_FORMER_HOOKS = {
    "abandon": "`close`",
    "allows_inexact_resume": "`build_placement`",
    "asked_to_stop": "`stop`, which asks for it",
    "averaged_weights": "`build_preparation`",
    "begin_updates": "`build_reduction`",
    "bind_reduction": "`build_reduction`",
    "boundaries": "`evaluate_step`, which is called between them",
    "check_coverage": "`train`",
    "check_micro_batch_open": "`backward` or `step`",
    "check_optimizer_given": "`build_optimizer`",
    "check_scheduler": "`build_scheduler`",
    "check_settings_are_read": "`train`",
    "check_trainable": "`train`",
    "commit_over_replicas": "`build_reduction`",
    "communication_of_groups": "`build_preparation`",
    "criterion_state_dict": "`component_parts`, with a part called 'criterion'",
    "data_place": "`build_placement`",
    "data_replicas": "`build_placement`",
    "equalize_buffers": "`build_preparation`",
    "evaluated_weights": "`build_preparation`",
    "evaluations_since_best": "`scores` or `best_index`",
    "export_model": "`model_state_dict`",
    "excluded_from_loading": "`config.checkpoint.exclude_from_loading`",
    "figures_domain": "`build_placement`",
    "follow_freezing": "`wrap_model`",
    "forward_communicates": "`build_preparation`",
    "gradient_factor": "`unscale_gradients`",
    "gradient_mean_over": "`build_reduction`",
    "gradientless": "`build_reduction`",
    "heal": "`component_parts` and `progress_parts`, whose parts are taken over when a replica group heals",
    "healing_state": "`component_parts` and `progress_parts`, whose parts are taken over when a replica group heals",
    "keeps_streams": "`build_placement`",
    "load_criterion": "`component_parts`, with a part called 'criterion'",
    "load_run_state": "`progress_parts`",
    "loader_settings": "`build_dataloader`",
    "locate_workspace": "`config.dir` or `config.workspace_root`",
    "meter_totals": "`train_epoch`",
    "needed_components": "`component_parts`",
    "nonfinite_gradients": "`build_reduction`",
    "open_update": "`step`",
    "optimized_parameters": "`build_preparation`",
    "optimizer_domain": "`build_placement`",
    "own_loader_state": "`load_dataloaders`",
    "own_scores": "`scores`",
    "own_stream_place": "`build_placement`",
    "prepare_updates": "`train_step`",
    "raise_pending_error": "`step`",
    "read_samples": "`step`",
    "replica_settings": "`adopt_config`",
    "rewrap_if_trainables_changed": "`wrap_model`",
    "scheduler_interval": "`config.scheduler.interval`",
    "settle": "`step`",
    "stream_layout": "`build_placement`",
    "stream_place": "`build_placement`",
    "sum_over_replicas": "`build_reduction`",
    "sums_loss": "`batch_weight`",
    "training_groups": "`build_placement`",
    "update_averages": "`build_preparation`",
    "update_division": "`build_dataloader`",
    "whole_parameters": "`build_preparation`",
    "write_results": "`add_tracker`",
    "workspace_part": "`config.dir` or `config.workspace_root`",
    "writes_checkpoints": "`save_checkpoint`",
}
"""Methods that the library called in an earlier version, and what is overridden instead. One of that name is never called now."""

_RECORD = "_set_by_library"
_NO_SETTER = re.compile(r"property '(\w+)' of .* has no setter|can't set attribute '?(\w+)")


class LibraryNames:
    """What the library's own `__init__` has set on a runner, and what was there before."""

    def __init__(self, before: dict[str, Any]) -> None:
        self.before = before
        self.owners: dict[str, str] = {}
        self.values: dict[str, Any] = {}

    def note(self, present: dict[str, Any], owner: str) -> None:
        """Note what is there when the `__init__` of one of the library's classes has ended.

        Args:
            present: The runner's attributes.
            owner: Name of that class.
        """
        for name in present:
            self.owners.setdefault(name, owner)
        self.values = dict(present)


def noting(init: Callable[..., None], owner: str) -> Callable[..., None]:
    """Return the `__init__` of one of the library's classes that also notes which attributes it has set; before, there is no component.

    Args:
        init: The function.
        owner: Name of the class.
    """

    @functools.wraps(init)
    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        record = vars(self).get(_RECORD)
        if record is None:
            # On the runner, not on the class: a method that happens to be called so is no component, but a loss may be a method.
            for name in COMPONENTS:
                own = getattr(type(self), name, None)
                if not isinstance(own, property) or own.fset is not None:
                    is_loss = name == "criterion" and callable(own)
                    setattr(self, name, getattr(self, name) if is_loss else None)
            record = vars(self)[_RECORD] = LibraryNames(dict(vars(self)))
        init(self, *args, **kwargs)
        record.note(vars(self), owner)

    return noted


def is_library(kind: type) -> bool:
    """Whether a class in the line of a runner is the library's, not a user's."""
    return kind.__module__.startswith("danling.runners.")


def check_names(runner: object) -> None:
    """Refuse attributes and methods of the user's that stand under a name of the library's. No communication.

    Components, hooks and what has the type of the library's own value may be set; a method may be overridden by a method. What
    the library sets or defines under another name would be replaced, or would break it.

    Args:
        runner: A runner whose `__init__` has ended.

    Raises:
        AttributeError: If there is one, with its owner and another name.
    """
    for sentence in former_hooks(type(runner), vars(runner)):
        warn_user(sentence, FutureWarning)
    record: LibraryNames = vars(runner).pop(_RECORD)
    line: Any = type(runner)
    defined = _defined(line)
    for name, value in vars(runner).items():
        if name in SETTABLE or name == _RECORD:
            continue
        if name in record.values and name not in record.before:
            if value is not record.values[name] and not _fits(name, value, record.values[name]):
                raise _refused(f"self.{name} = {_short(value)}", name, record.owners[name])
        elif name in _CLASS_DATA or (
            name in defined and not (_is_cached(value, defined[name][1]) or _overrides(value, defined[name][1]))
        ):
            raise _refused(f"self.{name} = {_short(value)}", name, defined[name][0])
    for name, kind, value in _of_user(type(runner)):
        owner, original = defined.get(name, (record.owners.get(name), _MISSING))
        if _is_read(original) and name not in SETTABLE and not _is_read(value) and _is_called(value):
            raise AttributeError(
                f"Expected {name!r} to be a property, as that of the library ({owner}) is, which reads it. Received: a method of the class "
                f"{kind.__name__}. Put @property above it, or call it otherwise, such as 'my_{name.strip('_')}'."
            )
        if owner is not None and name not in SETTABLE and not _overrides(value, original, private=name.startswith("_")):
            raise _refused(f"{name} of the class {kind.__name__}", name, owner)


def former_hooks(runner_class: type, attributes: Mapping[str, object] = MappingProxyType({})) -> list[str]:
    """Return a sentence for every method of the user's that an earlier version called and this one does not.

    Args:
        runner_class: Class of the runner.
        attributes: Of the runner, among which a function may stand for a method.
    """
    own = {name: kind.__name__ for name, kind, value in _of_user(runner_class) if not _is_plain(value)}
    own |= {name: "self" for name, value in attributes.items() if inspect.isroutine(value)}
    return [
        f"{owner}.{name} is not called any more: override {_FORMER_HOOKS[name]} instead, or give it another name."
        for name, owner in sorted(own.items())
        if name in _FORMER_HOOKS
    ]


def _is_plain(value: object) -> bool:
    return not (callable(value) or isinstance(value, (property, functools.cached_property, staticmethod, classmethod)))


def by_former_name(runner: object, name: str) -> object:
    """Return an attribute of a runner that was asked for by its former name, with a warning.

    Args:
        runner: The runner, which has no attribute of that name.
        name: The name.

    Raises:
        AttributeError: If it is no former name either, or what the attribute is made of is missing itself.
    """
    now = FORMER_NAMES.get(name, "")
    if not now or (now.startswith("_parts.") and "_parts" not in vars(runner)):
        _refuse_former(runner, name)
        # Once more in the ordinary way, whose error names what is missing.
        return object.__getattribute__(runner, name)
    place = "the library's own" if now.startswith("_") else f"runner.{now}"
    warn_user(f"runner.{name} is {place} now; the former name goes with the next version.", DeprecationWarning)
    return attrgetter(now)(runner)


def _refuse_former(runner: object, name: str) -> None:
    """Say what is done instead of reading a name that an earlier version had."""
    mend = _INSTEAD.get(name) or (f"What it did belongs to {_FORMER_HOOKS[name]} now." if name in _FORMER_HOOKS else "")
    if mend:
        message = (
            f"Expected a name of a {type(runner).__name__}. Received: {name!r}, which an earlier version had. {mend}"
        )
        raise AttributeError(message, name=name, obj=runner)


def explain_property(runner: object, error: AttributeError) -> AttributeError | None:
    """Return what to say instead of Python's error for an attribute that is a property of the library's, `None` for other errors.

    Args:
        runner: The runner whose `__init__` failed.
        error: What it raised.
    """
    found = _NO_SETTER.search(str(error))
    name = next(filter(None, found.groups()), "") if found else ""
    owner = next((kind.__name__ for kind in type(runner).__mro__ if is_library(kind) and name in vars(kind)), None)
    return _refused(f"self.{name} = ...", name, owner) if owner is not None else None


_MISSING = object()


def _fits(name: str, value: object, original: object) -> bool:
    return name in _REPLACEABLE and isinstance(value, type(original))


def _is_cached(value: object, original: object) -> bool:
    """Whether a value is what the library's own cached property has put there."""
    return isinstance(original, functools.cached_property) and type(value).__module__.startswith("danling.")


def _is_read(value: object) -> bool:
    return isinstance(value, (property, functools.cached_property))


def _is_called(value: object) -> bool:
    return inspect.isroutine(value) or isinstance(value, (staticmethod, classmethod, functools.partial))


def _overrides(value: object, original: object, *, private: bool = False) -> bool:
    """Whether a value may stand where the library has one: a property or a method for a method, a property for a property, plain data for
    plain data."""
    if private or original is _MISSING:
        return False
    if _is_read(original):
        return _is_read(value)
    if inspect.isroutine(original):
        return _is_read(value) or _is_called(value)
    return original is not None and isinstance(value, (type(original), property))


@functools.cache
def _defined(runner_class: type) -> dict[str, tuple[str, Any]]:
    """Names that the library's classes in a line define or declare: their owner, and what they are."""
    names: dict[str, tuple[str, Any]] = {}
    for kind in filter(is_library, reversed(runner_class.__mro__)):
        for name in inspect.get_annotations(kind):
            names[name] = (kind.__name__, vars(kind).get(name, _MISSING))
        for name, value in vars(kind).items():
            if not name.startswith("__"):
                names[name] = (kind.__name__, value)
    return names


def _of_user(runner_class: type) -> Iterator[tuple[str, type, Any]]:
    for kind in runner_class.__mro__:
        if not is_library(kind) and kind is not object:
            yield from (
                (name, kind, value)
                for name, value in vars(kind).items()
                if not name.startswith("__") and name != "_unjoined"
            )


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else f"{text[:37]}..."


def _refused(received: str, name: str, owner: str | None) -> AttributeError:
    return AttributeError(
        f"Expected names of your own on a runner. Received: {received}, where {name!r} is a name of the library's ({owner}). Call it "
        f"otherwise, such as 'my_{name.strip('_')}'."
    )

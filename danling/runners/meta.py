"""Construction of a runner: run the user's `__init__`, then finish what it set up. Verbs that a user calls directly: what the loops do
around a verb is done around it then too, also if it is overridden. Names of the library: a user's attribute or method under one of them is
refused where it is set."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any

from danling.checkpoints.errors import CheckpointError
from danling.config.names import READ_ELSEWHERE
from danling.config.sections import make_absent_keys
from danling.data import Batch
from danling.distributed import FAMILIES

from .parts import TorchParts

if TYPE_CHECKING:
    from .torch_runner import TorchRunner

logger = logging.getLogger("danling")

VERBS = ("train_epoch", "train_step", "step", "evaluate_step", "infer_step")
"""Verbs around which the loops prepare something: a session, a micro-batch of the window, an update, evaluation mode."""


class MetaRunner(type):
    """Calls `__post_init__` once after the outermost `__init__` has returned, and closes a runner that failed to come up.

    A subclass puts model, data and optimizer on itself after `super().__init__(config)`; only when all of its `__init__` has run
    can they be moved, wrapped and restored, so no class in the chain could do it from its own `__init__`.

    The `VERBS` of every class may be called directly. A call on all ranks is noted, and waits for them at its beginning.
    """

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any) -> Any:
        # A class made by `type(name, bases, methods)` belongs to the module that asked for it, not to this one.
        namespace.setdefault("__module__", sys._getframe(1).f_globals.get("__name__", "__main__"))
        for verb in VERBS:
            if isinstance(namespace.get(verb), FunctionType):
                namespace[verb] = _preparing(verb, namespace[verb])
        for verb in FAMILIES:
            if isinstance(namespace.get(verb), FunctionType):
                namespace[verb] = _met(verb, namespace[verb])
        return super().__new__(mcs, name, bases, namespace, **kwargs)

    @property
    def __signature__(cls) -> inspect.Signature:
        """What the class is constructed with, as help and notebooks show it: the arguments of its `__init__`."""
        own = inspect.signature(cls.__init__)  # type: ignore[misc]
        return own.replace(parameters=list(own.parameters.values())[1:], return_annotation=inspect.Signature.empty)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        runner: Any = cls.__new__(cls, *args, **kwargs)  # type: ignore[arg-type]
        config, forgotten = args[0] if args else kwargs.get("config"), None
        try:
            try:
                runner.__init__(*args, **kwargs)
            except AttributeError as error:
                if "_parts" in vars(runner) or error.obj is not runner:
                    raise
                forgotten = error  # without the library's `__init__` nothing of it is there
            finally:
                vars(runner).pop(GUARDED, None)
                make_absent_keys(vars(runner).pop("_opened_again", ()))
            if "_parts" not in vars(runner):
                raise TypeError(
                    f"Expected {cls.__name__}.__init__ to call super().__init__(config) first. Received: an __init__ that did not. Add it."
                ) from forgotten
            if isinstance(config, Mapping) and not runner._was_given_config:
                raise TypeError(
                    f"{cls.__name__}.__init__ received a configuration and called super().__init__() without it. Call "
                    "super().__init__(config)."
                )
            check_class(runner)
            runner.__post_init__()
            runner._end_construction()
        except BaseException:
            close_after_error(runner)
            raise
        return runner


def close_after_error(runner: Any) -> None:
    """Close a runner after a failure: nothing that goes wrong here hides the user's exception. Called on every rank that failed."""
    try:
        if "_parts" in vars(runner):
            if runner._parts.calls is not None:
                runner._parts.calls.end(failed=True)
            runner.close()
    except CheckpointError as error:
        # Its message names the problem and the fix; the exception after it may be the end that a signal has asked for.
        logger.error("Closing failed as well: %s", error)
    except Exception:
        logger.exception("Closing after a failure failed as well; the failure itself follows.")


# Direct calls


def _preparing(verb: str, function: Callable[..., object]) -> Callable[..., Any]:
    """Return a verb that prepares itself when no loop has called it. A runner without a loop of the library prepares nothing."""

    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> object:
        parts = self._parts
        session = parts.session
        # The loops are here already: in an update, this wrapper costs no more than that.
        if session.in_step or not isinstance(parts, TorchParts) or (verb == "step" and session.in_update):
            return function(self, *args, **kwargs)
        call = functools.partial(function, self)
        if verb == "step":
            if session.running or parts.calls is None:
                return session.update(call)
            with parts.calls.explaining():
                return session.update(call)
        if verb == "train_epoch" and not session.running:
            return _train_epoch(self, call, *args, **kwargs)
        if verb == "train_step":
            return _train_step(self, call, *args, **kwargs)
        if verb in ("evaluate_step", "infer_step") and self.mode == "train":
            return parts.evaluator.call("evaluate" if verb == "evaluate_step" else "infer", call, *args, **kwargs)
        return call(*args, **kwargs)

    return method


def _met(verb: str, function: Callable[..., object]) -> Callable[..., Any]:
    """Return a verb that all ranks begin together, and whose error says so if they do not."""

    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> object:
        if GUARDED in vars(self):
            raise ValueError(
                f"Expected `{verb}` to be called on a constructed runner: model, optimizer and loaders are prepared when __init__ has "
                f"ended. Received: a call in __init__, which is too early. Call runner.{verb}() after the construction."
            )
        if args and verb == "save_checkpoint" and _is_own(function):
            raise TypeError(
                f"Expected save_checkpoint() without a name: it saves the full state as `latest`, and as history and best where that "
                f"applies. Received: {args[0]!r}. For the weights in a file of your choice call runner.save_pretrained(directory), or run "
                "`danling export CHECKPOINT FILE`."
            )
        calls = self._parts.calls
        if calls is None:
            return function(self, *args, **kwargs)
        return calls.run(verb, functools.partial(function, self, *args, **kwargs))

    return method


def _is_own(function: Callable[..., object]) -> bool:
    return function.__module__.startswith("danling.")


def _train_step(runner: TorchRunner, call: Callable[[Any], Any], data: object) -> Any:
    parts = runner._parts
    parts.checks.check_optimizer_given()
    if not parts.session.running:
        if runner.fault_tolerance is not None:
            raise ValueError(
                "Expected a loop around `train_step` with ft.enabled, which agrees on each update with the other replica groups. "
                "Received: a call of `train_step` alone. Call `train_epoch(split)` or `train()`."
            )
        if runner.window.count == 0:
            if parts.calls is not None:
                parts.calls.note_loop()
            parts.session.start()
            parts.loop.begin_updates()
            if not runner.model.training:
                runner.model.train()
    batch = Batch(data, None, None)
    if parts.calls is None:
        return parts.update.run(batch, call)
    with parts.calls.explaining():
        return parts.update.run(batch, call)


def _train_epoch(runner: TorchRunner, call: Callable[..., Any], split: str = "train", *args: Any, **kwargs: Any) -> Any:
    loop, data = runner._parts.loop, runner._parts.data
    loop.check_trainable()
    data.check(split)
    data.agree_lengths()
    with loop.training(whole=False):
        return loop.train_epoch_directly(split, functools.partial(call, split, *args, **kwargs), runner.train_splits)


# Names of the library

SETTABLE = frozenset(
    {"model", "ema", "criterion", "optimizer", "scheduler", "datasets", "dataloaders", "metrics", "meters", "config"}
    | {"carry", "shifts_labels"}
)
"""Components, which the library takes over as they were set."""

COMPONENTS = ("model", "ema", "criterion", "optimizer", "scheduler", "metrics")
"""Components of which a run has none until the user sets one."""

_REPLACEABLE = frozenset({"state", "device", "workspace", "seed", "id", "timestamp", "code_id", "config_id"})
"""What a user may replace by another value of the same type."""

GUARDED = "_guarded"
"""Attribute of a runner whose `__init__` is under way: names are checked as they are set."""
_MISSING = object()


def begin(runner: object) -> dict[str, object]:
    """Give a runner its components, of which there are none yet; return what the user set before the library's `__init__`."""
    # On the runner, not on the class: a method that happens to be called so is no component, but a loss may be a method.
    for name in COMPONENTS:
        own = getattr(type(runner), name, None)
        if not isinstance(own, property) or own.fset is not None:
            setattr(runner, name, getattr(runner, name) if name == "criterion" and callable(own) else None)
    return dict(vars(runner))


def guard(runner: Any, early: Mapping[str, object]) -> None:
    """Guard the names of the library from now on, and check those that the user set early."""
    held = vars(runner)
    set_here = {name for name, value in held.items() if early.get(name, _MISSING) is not value}
    held["library_names"] = frozenset({*SETTABLE, *defined(runner.__class__), *set_here})
    for name in early.keys() - set_here:
        check_assignment(runner, name, held[name], {})
    held[GUARDED] = True


def check_assignment(runner: Any, name: str, value: object, present: Mapping[str, object] | None = None) -> None:
    """Refuse an attribute of the user's under a name of the library's.

    Components, hooks and what has the type of the library's own value may be set; a method may be replaced by a function.
    """
    if name in SETTABLE or name not in runner.library_names:
        return
    owner, original = defined(runner.__class__).get(name, ("BaseRunner", _MISSING))
    if isinstance(original, property) and original.fset is not None:
        return
    present = vars(runner) if present is None else present
    if original is _MISSING and name in present:
        original = present[name]
        is_allowed = value is original or (name in _REPLACEABLE and isinstance(value, type(original)))
    else:
        # `mode` is a value of the class that the library changes while it runs.
        is_allowed = name != "mode" and _kind(original) != "property" and _may_replace(original, value)
    if not is_allowed:
        text = " ".join(repr(value).split())
        raise _refused(f"self.{name} = {text if len(text) <= 40 else f'{text[:37]}...'}", name, owner)


def check_method(runner: Any, name: str, value: object) -> None:
    """Refuse a value under the name of a method of the library's, which the loops call, on a constructed runner."""
    owner, original = defined(runner.__class__).get(name, ("", _MISSING))
    if original is not _MISSING and _kind(original) == "method":
        text = " ".join(repr(value).split())
        received = f"self.{name} = {text if len(text) <= 40 else f'{text[:37]}...'}"
        raise AttributeError(f"{_refused(received, name, owner)} To call the method, write self.{name}(...).")


def instead_of(name: str) -> str:
    """Return what is read here instead of an attribute of another trainer's, as a sentence."""
    answer = READ_ELSEWHERE.get(name)
    return f" Other trainers have it; use {answer} here." if answer else ""


def check_class(runner: Any) -> None:
    """Refuse methods and values in the classes of a user under names of the library's. Called when `__init__` has ended."""
    known = defined(runner.__class__)
    of_user = [each for each in type(runner).__mro__ if not _is_library(each) and each is not object]
    for kind, name, value in ((each, *item) for each in of_user for item in vars(each).items()):
        is_free = name in SETTABLE or name not in runner.library_names or name == "_unjoined"
        if is_free or name.startswith("__"):
            continue
        owner, original = known.get(name, ("BaseRunner", _MISSING))
        if _kind(original) == "property" and _kind(value) == "method":
            raise AttributeError(
                f"Expected {name!r} to be a property, as that of the library ({owner}) is, which reads it. Received: a method of the class "
                f"{kind.__name__}. Put @property above it, or call it otherwise, such as 'my_{name.strip('_')}'."
            )
        if name.startswith("_") or not _may_replace(original, value):
            raise _refused(f"{name} of the class {kind.__name__}", name, owner)


@functools.cache
def defined(runner_class: Any) -> dict[str, tuple[str, Any]]:
    """Return the names that the library's classes in a line define or declare: their owner, and what they are."""
    names: dict[str, tuple[str, Any]] = {}
    for kind in filter(_is_library, reversed(runner_class.__mro__)):
        for name in inspect.get_annotations(kind):
            names[name] = (kind.__name__, vars(kind).get(name, _MISSING))
        for name, value in vars(kind).items():
            if not name.startswith("__"):
                names[name] = (kind.__name__, value)
    return names


def _is_library(kind: type) -> bool:
    return kind.__module__.startswith("danling.runners.")


def _kind(value: object) -> str:
    if isinstance(value, (property, functools.cached_property)):
        return "property"
    if inspect.isroutine(value) or isinstance(value, (staticmethod, classmethod, functools.partial)):
        return "method"
    return "value"


def _may_replace(original: object, value: object) -> bool:
    """Whether a value may be where the library has one: a property or a method for a method, a property for a property, plain data for
    plain data."""
    if original is _MISSING or original is None:
        return False
    if _kind(original) == "value":
        return isinstance(value, (type(original), property))
    return _kind(value) == "property" or _kind(original) == _kind(value) == "method"


def _refused(received: str, name: str, owner: str) -> AttributeError:
    return AttributeError(
        f"Expected another name for an attribute of a runner. Received: {received}, where {name!r} is a name "
        f"of the library's ({owner}). Call it otherwise, such as 'my_{name.strip('_')}'."
    )

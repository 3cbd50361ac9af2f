"""Construction of a runner: run the user's `__init__`, then finish what it set up."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Mapping
from types import FunctionType
from typing import Any

from danling.checkpoints.errors import CheckpointError
from danling.config.sections import make_absent_keys
from danling.distributed import FAMILIES

from .direct_calls import VERBS, met, preparing
from .reserved_names import GUARDED, check_class

logger = logging.getLogger("danling")


class MetaRunner(type):
    """Calls `__post_init__` once after the outermost `__init__` has returned, and closes a runner that failed to come up.

    A subclass puts model, data and optimizer on itself after `super().__init__(config)`; only when all of its `__init__` has run
    can they be moved, wrapped and restored, so no class in the chain could do it from its own `__init__`.

    The `VERBS` of every class may be called directly. A call on all ranks is noted, and waits for them at its beginning. Overrides of a
    program are wrapped for that.
    """

    def __new__(
        mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any
    ) -> Any:
        # A class made by `type(name, bases, methods)` belongs to the module that asked for it, not to this one.
        namespace.setdefault("__module__", sys._getframe(1).f_globals.get("__name__", "__main__"))
        # The runners of the library do it themselves, so that a call in an update has no frame more.
        if not namespace["__module__"].startswith("danling.runners."):
            for verbs, wrapped in ((VERBS, preparing), (FAMILIES, met)):
                for verb in verbs:
                    if isinstance(namespace.get(verb), FunctionType):
                        namespace[verb] = wrapped(verb, namespace[verb])
        return super().__new__(mcs, name, bases, namespace, **kwargs)

    @property
    def __signature__(cls) -> inspect.Signature:
        """What the class is constructed with, as help and notebooks show it: the arguments of its `__init__`."""
        own = inspect.signature(cls.__init__)  # type: ignore[misc]
        return own.replace(
            parameters=list(own.parameters.values())[1:], return_annotation=inspect.Signature.empty
        )

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        runner: Any = cls.__new__(cls, *args, **kwargs)  # type: ignore[arg-type]
        config = args[0] if args else kwargs.get("config")
        forgotten: AttributeError | None = None
        try:
            try:
                runner.__init__(*args, **kwargs)
            except AttributeError as error:
                if "_parts" in vars(runner) or error.obj is not runner:
                    note_unbuilt(runner, error)
                    raise
                forgotten = error  # without the library's `__init__` nothing of it is there
            except TypeError as error:
                note_unbuilt(runner, error)
                raise
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
        # An interrupt as well: files, threads and process groups may be open by now.
        except BaseException as error:
            close_after_error(runner, error)
            raise
        return runner


def note_unbuilt(runner: Any, error: AttributeError | TypeError) -> None:
    """Say in an error of the user's `__init__` about `None` as an optimizer that this is made later."""
    # The second text is that of torch's schedules.
    is_about_optimizer = getattr(
        error, "name", None
    ) == "param_groups" or "NoneType is not an Optimizer" in str(error)
    if is_about_optimizer and getattr(runner, "optimizer", runner) is None:
        error.add_note(
            "In __init__, self.optimizer is None: the runner makes it of `optim.type` afterwards. Make it there, or make the schedule "
            "in an override of `build_scheduler`, or by `scheduler.type`."
        )


def close_after_error(runner: Any, failure: BaseException) -> None:
    """Close a runner after a failure: nothing that goes wrong here hides the user's exception. Called on every rank that failed."""
    try:
        if "_parts" in vars(runner):
            runner._parts.session.note_error(failure)
            if runner._parts.calls is not None:
                runner._parts.calls.end(failed=True)
            runner.close()
    except CheckpointError as error:
        # Its message names the problem and the fix; the exception after it may be the end that a signal has asked for.
        logger.error("Closing failed as well: %s", error)
    except Exception:
        logger.exception("Closing after a failure failed as well; the failure itself follows.")

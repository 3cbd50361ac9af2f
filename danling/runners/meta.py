"""Construction of a runner: run the user's `__init__`, then finish what it set up."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Mapping
from typing import Any

from danling.checkpoints.errors import CheckpointError

from .direct_call import prepare_direct_calls
from .names import GUARDED, check_class

logger = logging.getLogger("danling")


class MetaRunner(type):
    """Calls `__post_init__` once after the outermost `__init__` has returned, and closes a runner that failed to come up.

    A subclass puts model, data and optimizer on itself after `super().__init__(config)`; only when all of its `__init__` has run
    can they be moved, wrapped and restored, so no class in the chain could do it from its own `__init__`.

    The verbs of every class may be called directly; see `danling.runners.direct_call`.
    """

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any) -> Any:
        # A class made by `type(name, bases, methods)` belongs to the module that asked for it, not to this one.
        namespace.setdefault("__module__", sys._getframe(1).f_globals.get("__name__", "__main__"))
        prepare_direct_calls(namespace)
        return super().__new__(mcs, name, bases, namespace, **kwargs)

    @property
    def __signature__(cls) -> inspect.Signature:
        """What the class is constructed with, as help and notebooks show it: the arguments of its `__init__`."""
        own = inspect.signature(cls.__init__)  # type: ignore[misc]
        return own.replace(parameters=list(own.parameters.values())[1:], return_annotation=inspect.Signature.empty)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        runner: Any = cls.__new__(cls, *args, **kwargs)  # type: ignore[arg-type]
        try:
            _initialize(runner, *args, **kwargs)
            check_class(runner)
            runner.__post_init__()
        except BaseException:
            close_after_error(runner)
            raise
        return runner


def _initialize(runner: Any, *args: Any, **kwargs: Any) -> None:
    """Run the user's `__init__`; without that of the library nothing of it is there."""
    forgotten = None
    try:
        runner.__init__(*args, **kwargs)
    except AttributeError as error:
        if "_closers" in vars(runner) or error.obj is not runner:
            raise
        forgotten = error
    finally:
        vars(runner).pop(GUARDED, None)
    if "_closers" not in vars(runner):
        name = type(runner).__name__
        raise TypeError(
            f"Expected {name}.__init__ to call super().__init__(config) first. Received: an __init__ that did not. Add it."
        ) from forgotten
    config = args[0] if args else kwargs.get("config")
    if isinstance(config, Mapping) and not runner._was_given_config:
        raise TypeError(
            f"{type(runner).__name__}.__init__ received a configuration and called super().__init__() without it. Call "
            "super().__init__(config)."
        )


def close_after_error(runner: Any) -> None:
    """Close a runner after a failure: nothing that goes wrong here hides the user's exception. Called on every rank that failed."""
    try:
        if "_closers" in vars(runner):
            runner.close()
    except CheckpointError as error:
        # It says itself what is wrong and what to do; what follows may be the end that a signal has asked for.
        logger.error("Closing failed as well: %s", error)
    except Exception:
        logger.exception("Closing after a failure failed as well; the failure itself follows.")

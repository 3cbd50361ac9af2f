"""Construction of a runner: choose the class, run the user's `__init__`, then finish what it set up."""

from __future__ import annotations

import inspect
from typing import Any


class MetaRunner(type):
    """Calls `__post_init__` once after the outermost `__init__` has returned, and closes a runner that failed to come up.

    A subclass puts model, data and optimizer on itself after `super().__init__(config)`; only when all of its `__init__` has run
    can they be moved, wrapped and restored, so no class in the chain could do it from its own `__init__`.
    """

    @property
    def __signature__(cls) -> inspect.Signature:
        """What the class is constructed with, as help and notebooks show it: the arguments of its `__init__`."""
        own = inspect.signature(cls.__init__)  # type: ignore[misc]
        return own.replace(parameters=list(own.parameters.values())[1:], return_annotation=inspect.Signature.empty)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        target = cls.select_class(*args, **kwargs)  # type: ignore[attr-defined]
        runner = target.__new__(target, *args, **kwargs)
        try:
            runner.__init__(*args, **kwargs)
            runner.__post_init__()
        except BaseException:
            runner.abandon()
            raise
        return runner

"""What the rooms ask of each other."""

from __future__ import annotations

from typing import Any, Protocol


class SteppedOptimizer(Protocol):
    """An optimizer as an update uses it: of torch, of an engine, or several in one."""

    param_groups: list[dict[str, Any]]

    def step(self) -> object:
        """Update the parameters."""

    def zero_grad(self) -> object:
        """Drop the gradients."""

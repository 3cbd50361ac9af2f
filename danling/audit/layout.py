"""A layout that a program is checked on, as it is typed, and what it imposes on the program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from danling.mesh.axes import AXES, axes_with
from danling.utils.suggest import did_you_mean

_STACKS = ("ddp", "accelerate")
"""Stacks other than that of a mesh, of which the gradients can be had as they are."""


@dataclass(frozen=True)
class Layout:
    """A layout to check.

    Attributes:
        stack: Its stack.
        degrees: Ranks along each axis, of those above 1.
    """

    stack: str
    degrees: Mapping[str, int]

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read a layout such as `shard=2,tensor=2`, or `ddp=2`.

        Raises:
            ValueError: If it is none, or one process.
        """
        degrees: dict[str, int] = {}
        known = (*AXES, *_STACKS)
        for word in text.split(","):
            name, sign, degree = word.strip().partition("=")
            if name == "deepspeed":
                raise ValueError(
                    "Expected a layout whose gradients can be had as they are. Received: deepspeed, whose engine keeps shares of flat "
                    "buffers, in float32. Check the model with shard=2 or ddp=2."
                )
            if name not in known or not sign or not degree.isdigit() or int(degree) < 1 or name in degrees:
                raise ValueError(
                    f"Expected a layout of axes and their degrees, such as shard=2,tensor=2, of {', '.join(AXES)}; or ddp=2, "
                    f"accelerate=2. Received: {text!r}.{did_you_mean(name, known)} Write each axis once."
                )
            degrees[name] = int(degree)
        above = {name: degree for name, degree in degrees.items() if degree > 1}
        stacks = [name for name in degrees if name in _STACKS]
        if not above or (stacks and len(degrees) > 1):
            raise ValueError(
                f"Expected a layout of several processes, of axes or of one stack. Received: {text!r}. Write shard=2,tensor=2, or ddp=2."
            )
        return cls(stacks[0], {"replicate": above[stacks[0]]}) if stacks else cls("parallel", above)

    def __str__(self) -> str:
        if self.stack != "parallel":
            return f"{self.stack}={self.processes}"
        return ",".join(f"{axis}={degree}" for axis, degree in self.degrees.items())

    @property
    def processes(self) -> int:
        """Number of processes."""
        return prod(self.degrees.values())

    @property
    def replicas(self) -> int:
        """Number of ranks that read different samples."""
        return prod(degree for axis, degree in self.degrees.items() if axis in axes_with(reads_data=True))

    def settings(self, *, alone: bool) -> dict[str, object]:
        """Return what is imposed on a program.

        Args:
            alone: On one process rather than on the layout.
        """
        if self.stack != "parallel":
            return {"stack": "ddp" if alone else self.stack}
        degrees = {} if alone else self.degrees
        axes = {f"parallel.axes.{axis}": degrees.get(axis, 1) for axis in AXES}
        return {"stack": "parallel", "fsdp.enabled": False, **axes}

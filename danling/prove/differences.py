"""How tensors on several processes differ from those of one process: by which ratio, and along which axis of a layout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from torch import Tensor

from danling.utils.messages import table_lines

_SHOWN = 30
_FITS = 1e-3
"""Relative residual below which a tensor counts as a multiple of another one."""


class NotChecked(ValueError):
    """The program did not make the updates, or not of the same samples."""


class Part(NamedTuple):
    """A rank's part of a tensor: where it begins, the shape of the whole, and the part."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    tensor: Tensor

    def of(self, whole: Tensor) -> Tensor:
        """Return the same part of a whole tensor of shape `self.shape`."""
        return whole[
            tuple(
                slice(start, start + length)
                for start, length in zip(self.offset, self.tensor.shape)
            )
        ]


@dataclass(frozen=True)
class Finding:
    """A tensor that is not that of one process.

    Attributes:
        name: Its name.
        what: What differs, in a few words.
        one: 2-norm on one process; `None` where there is none.
        layout: 2-norm on the layout; `None` where there is none.
        error: Norm of the difference by `one`.
        ratio: The layout has this many times the tensor of one process; `None` where it has no multiple of it.
        axis: Axes along which ranks with copies differ, or whose number of ranks explains the ratio.
    """

    name: str
    what: str
    one: float | None
    layout: float | None
    error: float | None = None
    ratio: float | None = None
    axis: str | None = None


def finding_lines(what: str, found: Sequence[Finding], parameters: int) -> Iterator[str]:
    """Yield the table of the tensors that differ; nothing where none does."""
    if not found:
        return
    yield f"{len(found)} of {parameters} {what} differ"
    rows = [[e.name, e.one, e.layout, e.error, e.ratio, e.axis, e.what] for e in found[:_SHOWN]]
    yield from table_lines(
        ("parameter", "one process", "layout", "error", "ratio", "axis", "what differs"), rows
    )
    if len(found) > _SHOWN:
        yield f"... and {len(found) - _SHOWN} more; --json lists all"


@dataclass(frozen=True)
class Rounding:
    """How far rounding reaches: a share of the norm of a tensor, and a norm of a difference that is rounding for any tensor."""

    relative: float
    absolute: float

    def covers(self, error: float, norm: float) -> bool:
        """Whether a difference of norm `error` to a tensor of norm `norm` is rounding; NaN is not."""
        return error <= max(self.relative * norm, self.absolute)


def compare(
    name: str,
    one: Tensor | None,
    held: Sequence[tuple[Mapping[str, int], Part]],
    degrees: Mapping[str, int],
    rounding: Rounding,
) -> Finding | None:
    """Compare a tensor on a layout with that of one process; `None` where they are the same but for rounding."""
    norm = None if one is None else float(one.double().norm())
    if one is None or norm is None or not held:
        largest = max((float(part.tensor.double().norm()) for _, part in held), default=None)
        where = "in one process" if one is None else "on the layout"
        # A tensor of zeros but for rounding counts as none: one side may leave it out.
        nothing = rounding.covers(norm or largest or 0.0, 0.0)
        return (
            None if nothing else Finding(name, f"no parameter of this name {where}", norm, largest)
        )
    if held[0][1].shape != tuple(one.shape):
        shape = list(held[0][1].shape)
        return Finding(
            name, f"shape {shape} on the layout, {list(one.shape)} in one process", norm, None
        )
    copies: dict[tuple[int, ...], list[tuple[Mapping[str, int], Tensor]]] = {}
    targets: dict[tuple[int, ...], Tensor] = {}
    for coordinate, part in held:
        # An uneven shard may leave a rank without any element, which is no copy of anything.
        if part.tensor.numel():
            copies.setdefault(part.offset, []).append((coordinate, part.tensor.double()))
            targets[part.offset] = part.of(one).double()
    error = math.hypot(
        *(
            # Copies count once, by the one that is furthest off.
            max(norm_of_difference(value, targets[at]) for _, value in ranks)
            for at, ranks in copies.items()
        )
    )
    if rounding.covers(error, norm):
        return None
    pairs = [(ranks[0][1], targets[at]) for at, ranks in copies.items()]
    layout = math.hypot(*(float(value.norm()) for value, _ in pairs))
    share = error / norm if norm else math.inf
    if not math.isfinite(error):
        return Finding(name, "not finite", norm, layout, share)
    differing = set()
    for ranks in copies.values():
        for (first, mine), (second, other) in combinations(ranks, 2):
            apart = [axis for axis in degrees if first.get(axis) != second.get(axis)]
            # Ranks that differ on one axis alone have copies along it.
            if len(apart) == 1 and not rounding.covers(
                norm_of_difference(mine, other), float(other.norm())
            ):
                differing.add(apart[0])
    if differing:
        over = " x ".join(axis for axis in degrees if axis in differing)
        return Finding(name, f"differs between ranks of {over}", norm, layout, share, axis=over)
    # The factor that fits best, by least squares.
    ratio = sum(float((value * target).sum()) for value, target in pairs) / norm**2 if norm else 0.0
    near = max(_FITS, rounding.relative)
    if norm and all(
        norm_of_difference(v, ratio * t) <= max(near * float(t.norm()), rounding.absolute)
        for v, t in pairs
    ):
        ratio = 0.0 if abs(ratio) < _FITS else ratio
        axes = [
            axis
            for axis, n in degrees.items()
            if abs(ratio / n - 1) < _FITS or abs(ratio * n - 1) < _FITS
        ]
        what = f"{ratio:.6g} times that of one process"
        return Finding(name, what, norm, layout, share, ratio, " or ".join(axes) or None)
    return Finding(name, "other values, the same on all ranks with copies", norm, layout, share)


def norm_of_difference(value: Tensor, target: Tensor) -> float:
    """Return the norm of a difference; infinity where it is NaN, which no comparison finds to be large."""
    error = float((value - target).norm())
    return error if math.isfinite(error) else math.inf

"""Why a gradient on a layout is not that of one process: a few known mistakes leave a pattern each, which is looked for here.

Nothing is communicated and no process is needed: what the ranks hold is handed in as tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod

import torch
from torch import Tensor

from .gradient_record import Part

_FITS = 1e-3
"""Relative residual below which a pattern explains a difference: other mistakes may add small ones to it."""


@dataclass(frozen=True)
class Held:
    """What one rank holds of a gradient.

    Attributes:
        rank: Global rank.
        coordinate: Its coordinate on each axis.
        part: The part.
    """

    rank: int
    coordinate: Mapping[str, int]
    part: Part


@dataclass(frozen=True)
class Tolerance:
    """How far rounding reaches.

    Attributes:
        relative: Share of the norm of the tensor.
        absolute: Norm of a difference that is rounding whatever the tensor is, such as of one whose gradient is 0 by its mathematics.
    """

    relative: float
    absolute: float

    def covers(self, error: float, norm: float) -> bool:
        """Whether a difference of norm `error` to a tensor of norm `norm` is rounding; NaN is not."""
        return error <= max(self.relative * norm, self.absolute)


@dataclass(frozen=True)
class Finding:
    """A tensor that is not that of one process.

    Attributes:
        name: Its name.
        kind: What was recognized, one word.
        cause: The likely cause, a sentence.
        one: 2-norm on one process; `None` where there is none.
        layout: 2-norm on the layout; `None` where there is none.
        error: Norm of the difference by `one`.
        ratio: What the tensor of one process is multiplied by, if it is; else `None`.
    """

    name: str
    kind: str
    cause: str
    one: float | None
    layout: float | None
    error: float | None = None
    ratio: float | None = None


def compare(
    name: str, one: Tensor | None, held: Sequence[Held], degrees: Mapping[str, int], tolerance: Tolerance
) -> Finding | None:
    """Compare a gradient on a layout with that of one process; `None` where they are the same but for rounding.

    Args:
        name: Of the parameter.
        one: The gradient of one process, whole; `None` where there is none.
        held: What the ranks that have the parameter hold of it; empty where the layout has no such parameter.
        degrees: Ranks along each axis.
        tolerance: What is rounding.
    """
    return _Comparison(name, one, held, degrees, tolerance).finding()


class _Comparison:
    def __init__(
        self,
        name: str,
        one: Tensor | None,
        held: Sequence[Held],
        degrees: Mapping[str, int],
        tolerance: Tolerance,
    ) -> None:
        self.name = name
        self.one = None if one is None else one.double()
        self.held = held
        self.present = [each for each in held if each.part.tensor is not None]
        self.degrees = {axis: degree for axis, degree in degrees.items() if degree > 1}
        self.tolerance = tolerance

    def finding(self) -> Finding | None:
        norm = None if self.one is None else float(self.one.norm())
        if not self.held:
            return Finding(self.name, "absent", "the model on the layout has no parameter of this name", norm, None)
        layout = self._norm()
        if self.one is None:
            if not self.present or self.tolerance.covers(layout or 0.0, 0.0):
                return None
            cause = "has a gradient on the layout only: it is frozen, or not used, in one process"
            return Finding(self.name, "extra", cause, None, layout)
        assert norm is not None
        if not self.present:
            if self.tolerance.covers(norm, 0.0):
                return None
            cause = (
                "no gradient on the layout: its forward does not use this parameter, it was replaced, or it is cut off"
            )
            return Finding(self.name, "missing", cause, norm, None)
        if any(each.part.shape != tuple(self.one.shape) for each in self.present):
            shape = list(self.present[0].part.shape)
            cause = f"has the shape {shape} on the layout and {list(self.one.shape)} in one process"
            return Finding(self.name, "shape", cause, norm, layout)
        self.parts = {each.rank: self._values(each) for each in self.held}
        self.wanted = {each.rank: self._wanted(each) for each in self.held}
        error = self._error()
        if self.tolerance.covers(error, norm):
            return None
        kind, cause, ratio = self._cause()
        return Finding(self.name, kind, cause, norm, layout, error / norm if norm else float("inf"), ratio)

    # What the ranks hold

    def _values(self, each: Held) -> Tensor:
        tensor = each.part.tensor
        return torch.zeros_like(self._wanted(each)) if tensor is None else tensor.double()

    def _wanted(self, each: Held) -> Tensor:
        assert self.one is not None
        # A rank without a gradient stands where one with it stands.
        like = (
            each
            if each.part.tensor is not None
            else next((other for other in self.present if other.part.offset == each.part.offset), self.present[0])
        )
        return like.part.of(self.one)

    def _places(self) -> dict[tuple[int, ...], list[Held]]:
        """Return the ranks that hold the same part, by where it begins."""
        places: dict[tuple[int, ...], list[Held]] = {}
        for each in self.held:
            if each.part.tensor is None or each.part.tensor.numel():
                places.setdefault(each.part.offset, []).append(each)
        return places

    def _norm(self) -> float | None:
        if not self.present:
            return None
        firsts = [each[0].part.tensor for each in self._places().values()]
        return float(sum(float(part.double().norm()) ** 2 for part in firsts if part is not None) ** 0.5)

    def _error(self) -> float:
        squares = 0.0
        for ranks in self._places().values():
            worst = torch.tensor([float((self.parts[r.rank] - self.wanted[r.rank]).norm()) for r in ranks]).max()
            squares += float(worst) ** 2
        return float(squares**0.5)

    # Patterns

    def _cause(self) -> tuple[str, str, float | None]:
        if not all(bool(torch.isfinite(part).all()) for part in self.parts.values()):
            ranks = [rank for rank, part in self.parts.items() if not bool(torch.isfinite(part).all())]
            return "nonfinite", f"not finite on {_ranks(ranks)}", None
        if all(not part.any() for part in self.parts.values()):
            return "zero", "zero on all ranks: something detaches it, or multiplies it by zero", 0.0
        axes = self._drifting_axes()
        if axes:
            return (*self._replicas(axes), None)
        return self._alike()

    def _drifting_axes(self) -> list[str]:
        """Return the axes along which ranks hold the same part of the parameter and have different gradients."""
        found = set()
        for ranks in self._places().values():
            for first, second in combinations(ranks, 2):
                apart = [axis for axis in self.degrees if first.coordinate.get(axis) != second.coordinate.get(axis)]
                if len(apart) == 1 and not self._same(self.parts[first.rank], self.parts[second.rank]):
                    found.add(apart[0])
        return [axis for axis in self.degrees if axis in found]

    def _same(self, value: Tensor, wanted: Tensor) -> bool:
        return self.tolerance.covers(float((value - wanted).norm()), float(wanted.norm()))

    def _fits(self, value: Tensor, wanted: Tensor) -> bool:
        return float((value - wanted).norm()) <= max(
            max(_FITS, self.tolerance.relative) * float(wanted.norm()), self.tolerance.absolute
        )

    def _replicas(self, axes: Sequence[str]) -> tuple[str, str]:
        """Return the cause of gradients that differ between ranks that hold copies."""
        right = [rank for rank, part in self.parts.items() if self._fits(part, self.wanted[rank])]
        empty = [each.rank for each in self.held if not self.parts[each.rank].any()]
        over = " x ".join(axes)
        for subset in _subsets(axes):
            sums = list(self._sums_over(subset))
            number = prod(self.degrees[axis] for axis in subset)
            among = " x ".join(subset)
            if all(self._fits(total, wanted) for total, wanted in sums):
                if right and set(right) | set(empty) == set(self.parts):
                    return (
                        "one_rank",
                        f"whole on {_ranks(right)} and zero on {_ranks(empty)}: only some ranks of {among} compute it, and it is not "
                        f"summed over {among}",
                    )
                return (
                    "partial",
                    f"each rank of {among} has a part of it, and these are not summed over {among}",
                )
            if all(self._fits(total / number, wanted) for total, wanted in sums):
                return (
                    "not_averaged",
                    f"each rank of {among} has a gradient of its own, and these are not averaged over {among}",
                )
        if right:
            wrong = [rank for rank in self.parts if rank not in right]
            scaled = self._common_ratio(wrong)
            what = "wrong" if scaled is None else "zero" if scaled == 0 else f"{_times(scaled)}"
            return (
                "some_ranks",
                f"right on {_ranks(right)} and {what} on {_ranks(wrong)}, which hold copies over {over}",
            )
        return (
            "replicas",
            f"ranks of {over} hold copies of it and have different gradients: something behind it in the forward pass does not sum the "
            f"gradient of its input over {over}",
        )

    def _sums_over(self, axes: Sequence[str]) -> Iterator[tuple[Tensor, Tensor]]:
        for ranks in self._places().values():
            groups: dict[tuple[int | None, ...], list[Held]] = {}
            for each in ranks:
                others = tuple(each.coordinate.get(axis) for axis in self.degrees if axis not in axes)
                groups.setdefault(others, []).append(each)
            for group in groups.values():
                yield torch.stack([self.parts[each.rank] for each in group]).sum(0), self.wanted[group[0].rank]

    def _common_ratio(self, ranks: Sequence[int]) -> float | None:
        ratios = [_ratio(self.parts[rank], self.wanted[rank]) for rank in ranks]
        first = ratios[0]
        fits = all(self._fits(self.parts[rank], first * self.wanted[rank]) for rank in ranks)
        return (0.0 if abs(first) < _FITS else first) if fits else None

    def _alike(self) -> tuple[str, str, float | None]:
        """Return the cause where ranks that hold copies have the same."""
        places = [each[0] for each in self._places().values()]
        ratio = self._common_ratio([each.rank for each in places])
        if ratio is not None:
            return "scaled", self._scaled(ratio), ratio
        if len(places) > 1:
            found = self._of_shards(places)
            if found is not None:
                return (*found, None)
        whole = self._assembled(places)
        assert self.one is not None
        return (*(self._of_rows(whole, self.one) or self._otherwise(whole, self.one)), None)

    def _scaled(self, ratio: float) -> str:
        if abs(ratio - 1) < _FITS:
            return "the same but for a small difference: rounding in a coarser dtype (see --tolerance), or a small term"
        if abs(ratio + 1) < _FITS:
            return "has the other sign: it is subtracted somewhere, or reversed"
        for axes in _subsets(list(self.degrees)):
            number = prod(self.degrees[axis] for axis in axes)
            others = [axis for axis in self.degrees if len(axes) == 1 and self.degrees[axis] == number]
            over = " or ".join(others) if others else " x ".join(axes)
            if abs(ratio / number - 1) < _FITS:
                return f"{_times(number)}: summed over {over} although each rank has all of it, or not divided by its {number} ranks"
            if abs(ratio * number - 1) < _FITS:
                part = "half" if number == 2 else f"1/{number}"
                return f"{part} of the gradient: not summed over {over}, or divided twice by its {number} ranks"
        return _times(ratio)

    def _of_shards(self, places: Sequence[Held]) -> tuple[str, str] | None:
        right = [each for each in places if self._fits(self.parts[each.rank], self.wanted[each.rank])]
        wrong = [each for each in places if each not in right]
        if not wrong:
            return None
        moved = {each.rank: self._taken_from(each, places) for each in wrong}
        if all(source is not None for source in moved.values()):
            listed = ", ".join(f"rank {rank} has the part of rank {source}" for rank, source in list(moved.items())[:3])
            return "permuted", f"parts are in another order: {listed}"
        ratios = {each.rank: self._common_ratio([each.rank]) for each in wrong}
        if right and all(ratio is not None for ratio in ratios.values()):
            told = sorted({round(float(ratio or 0.0), 6) for ratio in ratios.values()})
            what = "zero" if told == [0.0] else " or ".join(_times(value) for value in told[:3])
            return (
                "shards",
                f"right in the part of {_ranks([e.rank for e in right])}, {what} in that of {_ranks(list(ratios))}",
            )
        if right:
            return (
                "shards",
                f"right in the part of {_ranks([e.rank for e in right])}, wrong in that of {_ranks([e.rank for e in wrong])}",
            )
        if all(ratio is not None for ratio in ratios.values()):
            listed = ", ".join(f"{float(ratio or 0.0):.6g} on rank {rank}" for rank, ratio in list(ratios.items())[:4])
            return "shards", f"multiplied by another number in each part: {listed}"
        return None

    def _taken_from(self, each: Held, places: Sequence[Held]) -> int | None:
        """Return the rank whose part this one has, `None` where it has none of another."""
        mine = self.parts[each.rank]
        others = (o.rank for o in places if o.rank != each.rank and self.wanted[o.rank].shape == mine.shape)
        return next((rank for rank in others if self._fits(mine, self.wanted[rank]) and bool(mine.any())), None)

    def _assembled(self, places: Sequence[Held]) -> Tensor:
        assert self.one is not None
        whole = torch.zeros_like(self.one)
        for each in places:
            part = self.parts[each.rank]
            whole[tuple(slice(a, a + n) for a, n in zip(each.part.offset, part.shape))] = part
        return whole

    def _of_rows(self, whole: Tensor, one: Tensor) -> tuple[str, str] | None:
        """Return the cause where only some rows or columns are wrong, or all are in another order."""
        for dim, word in enumerate(("rows", "columns")[: one.dim()]):
            count = one.shape[dim]
            mine, wanted = whole.movedim(dim, 0).reshape(count, -1), one.movedim(dim, 0).reshape(count, -1)
            limit = torch.clamp(wanted.norm(dim=1) * max(_FITS, self.tolerance.relative), min=self.tolerance.absolute)
            bad = ((mine - wanted).norm(dim=1) > limit).nonzero().flatten().tolist()
            if bad and len(bad) <= count // 2 and count > 2:
                zero = not bool(mine[bad].any())
                ratio = _ratio(mine[bad], wanted[bad])
                fits = float((mine[bad] - ratio * wanted[bad]).norm()) <= _FITS * float(wanted[bad].norm())
                what = "zero" if zero else _times(ratio) if fits else "wrong"
                return word, f"{what} in {len(bad)} of {count} {word}: {_stretches(bad)}; right in the others"
            if count > 1 and self._reordered(mine, wanted):
                return "order", f"its {word} are those of one process in another order"
        return None

    def _reordered(self, mine: Tensor, wanted: Tensor) -> bool:
        first, second = (rows[rows.norm(dim=1).argsort()] for rows in (mine, wanted))
        return self._fits(first, second) and not self._fits(mine, wanted)

    def _otherwise(self, whole: Tensor, one: Tensor) -> tuple[str, str]:
        norms = float(whole.norm() * one.norm())
        cosine = float((whole * one).sum()) / norms if norms else 0.0
        return (
            "other",
            f"another direction (cosine {cosine:.6f}), the same on all ranks: none of the known mistakes of this parameter itself",
        )


def _subsets(axes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the sets of axes, single ones first."""
    for number in range(1, len(axes) + 1):
        yield from combinations(axes, number)


def _ratio(value: Tensor, wanted: Tensor) -> float:
    square = float((wanted * wanted).sum())
    return float((value * wanted).sum()) / square if square else 0.0


def _times(ratio: float) -> str:
    return f"{ratio:.6g} times the gradient"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_stretches(ranks)}"


def _stretches(numbers: Sequence[int]) -> str:
    """Return ascending numbers as stretches: `0 to 3, 7`; of many the first few."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    shown = [str(each[0]) if len(each) == 1 else f"{each[0]} to {each[-1]}" for each in found[:4]]
    return ", ".join(shown) + (", ..." if len(found) > 4 else "")

"""Compares what the ranks of a layout recorded of the first updates with what one process recorded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from danling.mesh.axes import axes_with
from danling.utils.messages import table_lines

from .layout_record import Part, RankRecord, UpdateRecord

if TYPE_CHECKING:
    from .layout_check import Layout

_SHOWN = 30
_FITS = 1e-3
"""Relative residual below which a tensor counts as a multiple of another one."""


class NotChecked(ValueError):
    """The program did not make the updates, or not of the same samples."""


@dataclass(frozen=True)
class Tolerance:
    """How far rounding reaches: a share of the norm of a tensor, and a norm of a difference that is rounding for any tensor."""

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


@dataclass(frozen=True)
class LayoutReport:
    """The result of a check.

    Attributes:
        layout: The layout.
        updates: Updates that were compared.
        samples: Samples of the first update.
        parameters: Number of parameters that were compared.
        step: The update that differs, the first being 1; `None` where none does.
        losses: The losses of that update, or of the last one: in one process, and on the layout.
        moved: Parameters whose weights `parallelize` has changed.
        gradients: Parameters whose gradients differ, in the order of the model.
        weights: Parameters whose weights differ after the update, though the gradients do not.
        buffers: Buffers that differ after the update.
        layer: The first module, in the order of the calls, whose output differs; `None` where none does.
        summary: A sentence on all of it; `None` where there is no difference.
        undecided: Whether the loss differs on every layout because of what the model is, so that nothing can be said of this one.
        notes: What else to know of the comparison.
    """

    layout: Layout
    updates: int
    samples: int
    parameters: int
    step: int | None
    losses: tuple[float, float]
    moved: Sequence[str] = ()
    gradients: Sequence[Finding] = ()
    weights: Sequence[Finding] = ()
    buffers: Sequence[str] = ()
    layer: str | None = None
    summary: str | None = None
    undecided: bool = False
    notes: Sequence[str] = ()

    @property
    def is_same(self) -> bool:
        """Whether the layout trains as one process does."""
        return self.step is None and not self.moved

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def compare_records(
    one: RankRecord, ranks: Sequence[RankRecord], layout: Layout, tolerance: float | None = None
) -> LayoutReport:
    """Compare the records of the ranks of a layout with that of one process."""
    eps = max(rank.eps for rank in (one, *ranks))
    relative = tolerance if tolerance is not None else eps**0.5
    count = min(one.updates, *(rank.updates for rank in ranks))
    for number in range(1, count + 1):
        report = _compare_update(number, one, ranks, layout, relative, eps)
        if not report.is_same or number == count:
            return report
    raise NotChecked(f"Expected recorded updates. Received: {one.updates} in one process, {count} on every rank.")


def _compare_update(
    number: int, one: RankRecord, ranks: Sequence[RankRecord], layout: Layout, relative: float, eps: float
) -> LayoutReport:
    wanted, made = one.update(number), [rank.update(number) for rank in ranks]
    if not math.isfinite(wanted.norm) or not wanted.weights:
        raise NotChecked(
            f"Expected updates that are finite in one process. Received: update {number} with loss {wanted.loss:.6g} and gradient norm "
            f"{wanted.norm:.6g}. Mend that first; a precision of fp16 skips its first updates, which --dtype float64 does not."
        )
    degrees = {axis: degree for axis, degree in ranks[0].degrees.items() if degree > 1}
    tolerance = Tolerance(relative, 32 * eps * wanted.norm)
    names = list(dict.fromkeys([*wanted.gradients, *(name for update in made for name in update.gradients)]))
    gradients = _findings(names, wanted.gradients, [(r, u.gradients) for r, u in zip(ranks, made)], degrees, tolerance)
    held_weights = [(r, u.weights) for r, u in zip(ranks, made)]
    there = [name for name in wanted.weights if any(name in held for _, held in held_weights)]
    weights = []
    if not gradients:
        weights = _findings(there, wanted.weights, held_weights, degrees, Tolerance(relative, 32 * eps))
    buffers = [] if gradients else _buffers(wanted, made, relative)
    same_loss = abs(made[0].loss - wanted.loss) <= max(relative * abs(wanted.loss), 32 * eps)
    # Ranks that all read the same samples come to the same mean.
    same_weight = abs(made[0].weight - wanted.weight) <= 1e-9 * abs(wanted.weight)
    differs = bool(gradients or weights or buffers) or not (same_loss and same_weight)
    if differs:
        _check_samples(number, wanted, made)
    why = _why_undecided(one, ranks, layout) if differs and not same_loss and same_weight else None
    layer = _first_layer(wanted, made, ranks, relative) if differs else None
    moved = _moved(ranks) if number == 1 else []
    return LayoutReport(
        layout=layout,
        updates=number,
        samples=int(one.update(1).samples),
        parameters=len(names),
        step=number if differs else None,
        losses=(wanted.loss, made[0].loss),
        moved=moved,
        gradients=gradients,
        weights=weights,
        buffers=buffers,
        layer=layer,
        summary=_summary(wanted, made[0], gradients, weights, len(names), same_loss, moved, layer, why)
        if differs or moved
        else None,
        undecided=why is not None,
        notes=_notes(one, ranks),
    )


# One tensor


def compare(
    name: str,
    one: Tensor | None,
    held: Sequence[tuple[RankRecord, Part]],
    degrees: Mapping[str, int],
    tolerance: Tolerance,
) -> Finding | None:
    """Compare a tensor on a layout with that of one process; `None` where they are the same but for rounding."""
    norm = None if one is None else float(one.double().norm())
    present = [part for _, part in held if part.tensor is not None]
    if not held:
        return Finding(name, "no parameter of this name on the layout", norm, None)
    if one is None or norm is None:
        largest = max((float(part.tensor.double().norm()) for part in present if part.tensor is not None), default=0.0)
        same = tolerance.covers(largest, 0.0)
        return None if same else Finding(name, "a gradient on the layout only", None, largest)
    if not present:
        return None if tolerance.covers(norm, 0.0) else Finding(name, "no gradient on the layout", norm, None)
    if any(part.shape != tuple(one.shape) for part in present):
        shape = list(present[0].shape)
        return Finding(name, f"shape {shape} on the layout, {list(one.shape)} in one process", norm, None)
    copies: dict[tuple[int, ...], list[tuple[RankRecord, Tensor]]] = {}
    targets: dict[tuple[int, ...], Tensor] = {}
    for rank, part in held:
        # A rank without a gradient has zeros where another rank with the same part has one.
        known = part if part.tensor is not None else next((p for p in present if p.offset == part.offset), present[0])
        if known.tensor is not None and known.tensor.numel():
            target = targets.setdefault(known.offset, known.of(one).double())
            value = torch.zeros_like(target) if part.tensor is None else part.tensor.double()
            copies.setdefault(known.offset, []).append((rank, value))
    error = math.sqrt(sum(max(_error(v, targets[at]) for _, v in ranks) ** 2 for at, ranks in copies.items()))
    if tolerance.covers(error, norm):
        return None
    layout = math.sqrt(sum(float(ranks[0][1].norm()) ** 2 for ranks in copies.values()))
    what, ratio, axis = _describe(copies, targets, degrees, tolerance)
    return Finding(name, what, norm, layout, error / norm if norm else math.inf, ratio, axis)


def _error(value: Tensor, target: Tensor) -> float:
    error = float((value - target).norm())
    return error if math.isfinite(error) else math.inf


def _describe(
    copies: Mapping[tuple[int, ...], Sequence[tuple[RankRecord, Tensor]]],
    targets: Mapping[tuple[int, ...], Tensor],
    degrees: Mapping[str, int],
    tolerance: Tolerance,
) -> tuple[str, float | None, str | None]:
    """Return what differs, the ratio, and the axis."""
    bad = sorted({rank.rank for ranks in copies.values() for rank, value in ranks if not value.isfinite().all()})
    if bad:
        return f"not finite on rank{'s' * (len(bad) > 1)} {', '.join(map(str, bad[:8]))}", None, None
    differing = set()
    for ranks in copies.values():
        for (first, mine), (second, other) in combinations(ranks, 2):
            apart = [axis for axis in degrees if first.coordinate.get(axis) != second.coordinate.get(axis)]
            if len(apart) == 1 and not tolerance.covers(_error(mine, other), float(other.norm())):
                differing.add(apart[0])
    if differing:
        over = " x ".join(axis for axis in degrees if axis in differing)
        return f"differs between ranks of {over}", None, over
    pairs = [(ranks[0][1], targets[at]) for at, ranks in copies.items()]
    square = sum(float((target * target).sum()) for _, target in pairs)
    ratio = sum(float((value * target).sum()) for value, target in pairs) / square if square else 0.0
    near = max(_FITS, tolerance.relative)
    fits = (_error(v, ratio * t) <= max(near * float(t.norm()), tolerance.absolute) for v, t in pairs)
    if not square or not all(fits):
        return "other values, the same on all ranks with copies", None, None
    ratio = 0.0 if abs(ratio) < _FITS else ratio
    matching = [axis for axis, n in degrees.items() if abs(ratio / n - 1) < _FITS or abs(ratio * n - 1) < _FITS]
    return f"{ratio:.6g} times that of one process", ratio, " or ".join(matching) or None


# One update


def _findings(
    names: Iterable[str],
    wanted: Mapping[str, Part],
    made: Sequence[tuple[RankRecord, Mapping[str, Part]]],
    degrees: Mapping[str, int],
    tolerance: Tolerance,
) -> list[Finding]:
    """Return which of the named tensors are not those of one process."""
    found = []
    for name in names:
        one = wanted[name].tensor if name in wanted else None
        found.append(compare(name, one, [(r, held[name]) for r, held in made if name in held], degrees, tolerance))
    return [each for each in found if each is not None]


def _buffers(wanted: UpdateRecord, made: Sequence[UpdateRecord], relative: float) -> list[str]:
    """Return the names of floating buffers that differ on the first rank that has them."""
    found = []
    for name, value in wanted.buffers.items():
        mine: Tensor | None = next((update.buffers[name] for update in made if name in update.buffers), None)
        if mine is None or not value.is_floating_point() or mine.shape != value.shape:
            continue
        if not torch.allclose(mine, value, rtol=relative, atol=relative, equal_nan=True):
            found.append(name)
    return found


def _moved(ranks: Sequence[RankRecord]) -> list[str]:
    """Return the weights that dividing the model has changed, of those that all ranks began with alike."""
    names = dict.fromkeys(name for rank in ranks for name in rank.moved)
    return [name for name in names if len({rank.before[name] for rank in ranks if name in rank.before}) == 1]


def _first_layer(
    wanted: UpdateRecord, made: Sequence[UpdateRecord], ranks: Sequence[RankRecord], relative: float
) -> str | None:
    """Return the first module whose output differs by its sums."""
    degrees = ranks[0].degrees
    divided = [axis for axis in axes_with(reads_data=True) if axis in degrees]
    others = [axis for axis in degrees if axis not in divided and degrees[axis] > 1]
    for name, sums in wanted.outputs.items():
        held = [(rank.coordinate, update.outputs[name]) for rank, update in zip(ranks, made) if name in update.outputs]
        scale = max(math.sqrt(sums[1]), abs(sums[0]), 1e-30)
        ways = product((False, True), repeat=len(others))
        if held and not any(
            _adds_up(held, sums, [axis for axis, copies in zip(others, way) if copies], relative, scale) for way in ways
        ):
            return name or "the model itself"
    return None


def _adds_up(
    held: Sequence[tuple[Mapping[str, int], tuple[float, float]]],
    wanted: tuple[float, float],
    copied: Sequence[str],
    relative: float,
    scale: float,
) -> bool:
    """Whether the sums of ranks, of which those along the axes `copied` have copies, add up to those of one process."""
    firsts = [value for coordinate, value in held if all(coordinate.get(axis, 0) == 0 for axis in copied)]
    total, squares = (math.fsum(value[index] for value in firsts) for index in (0, 1))
    near = max(relative, 1e-7) * scale
    return abs(total - wanted[0]) <= near and abs(math.sqrt(squares) - math.sqrt(wanted[1])) <= near


def _check_samples(number: int, wanted: UpdateRecord, made: Sequence[UpdateRecord]) -> None:
    """Refuse to call a difference one of the layout where the samples were others."""
    if (sum(update.digest for update in made) - wanted.digest) % (1 << 64) == 0:
        return
    raise NotChecked(
        f"Expected update {number} to be made of the same samples in one process and on the layout. Received: {wanted.samples:g} "
        f"samples and {made[0].samples:g}, whose contents are not the same. Look for a batch size that depends on the number of "
        "processes, your own loader that does not divide its data over the ranks, data that is drawn before `super().__init__`, "
        "and padding to the longest sample of a batch: pad to one length."
    )


def _summary(
    wanted: UpdateRecord,
    made: UpdateRecord,
    gradients: Sequence[Finding],
    weights: Sequence[Finding],
    parameters: int,
    same_loss: bool,
    moved: Sequence[str],
    layer: str | None,
    why_undecided: str | None,
) -> str:
    """Return one sentence on everything that differs."""
    if moved:
        shown = ", ".join(moved[:3]) + (", ..." if len(moved) > 3 else "")
        return (
            f"`parallelize` has changed the weights of {len(moved)} parameters ({shown}): what is saved on this layout under a name is not "
            "what the model has under that name"
        )
    if wanted.weight and abs(made.weight / wanted.weight - 1) > 1e-9:
        return f"the weights of the batches add up to {made.weight / wanted.weight:.6g} times those of one process"
    if why_undecided is not None:
        return f"the loss differs, and may do so: {why_undecided}"
    if layer is not None:
        return f"the first layer whose output differs is {layer}"
    if not same_loss:
        return "the outputs of all layers are those of one process, and the loss is not"
    ratios = [each.ratio for each in gradients if each.ratio is not None]
    if len(ratios) == len(gradients) == parameters and max(ratios) - min(ratios) < 1e-6 * abs(ratios[0] or 1.0):
        return f"every gradient is {ratios[0]:.6g} times that of one process, and the loss is the same"
    if gradients:
        return f"the forward pass is that of one process, the backward pass is not; nearest to the loss is {gradients[-1].name}"
    if weights:
        return "the gradients are those of one process, the step of the optimizer or the clipping is not"
    return "buffers differ after the update"


def _why_undecided(one: RankRecord, ranks: Sequence[RankRecord], layout: Layout) -> str | None:
    """Return what in the model makes the loss depend on the layout rightly; `None` where nothing does."""
    if one.draws or any(rank.draws for rank in ranks):
        return "the forward pass draws random numbers also in evaluation mode; switch that off for the check"
    if one.batch_norms and (layout.replicas > 1 or "pipeline" in layout.degrees):
        return "batch normalization without running statistics depends on the samples that a rank has at once"
    return None


def _notes(one: RankRecord, ranks: Sequence[RankRecord]) -> list[str]:
    notes = [
        "The model ran in evaluation mode: without dropout, and with the running statistics of batch normalization."
    ]
    if one.draws or any(rank.draws for rank in ranks):
        notes.append("The forward pass draws random numbers all the same.")
    initial = sorted({name for rank in ranks for name in rank.initial})
    if initial:
        shown = ", ".join(initial[:3]) + (", ..." if len(initial) > 3 else "")
        notes.append(
            f"The initial weights of {len(initial)} parameters ({shown}) depend on the layout; both sides began with those of one process."
        )
    coarse = max((rank.eps for rank in (one, *ranks) if rank.coarse), default=0.0)
    if coarse:
        notes.append(
            f"Some layers compute in a coarser dtype than their weights: differences up to {coarse**0.5:.1g} count as rounding."
        )
    return notes


# What people read


def _lines(found: LayoutReport) -> Iterator[str]:
    first, second = found.losses
    if found.is_same:
        yield (
            f"{found.layout}: the first {found.updates} updates are those of one process, in losses, weights, and gradients of "
            f"{found.parameters} parameters; {found.samples} samples each"
        )
    elif found.step is None:
        yield f"{found.layout}: the weights are not those of the model"
        yield found.summary or ""
    else:
        verdict = (
            "not checked, since the losses" if found.undecided else f"update {found.step} is not that of one process"
        )
        yield f"{found.layout}: {verdict}" + (f" of update {found.step} cannot be the same" if found.undecided else "")
        yield f"loss {first:.10g} in one process, {second:.10g} on the layout; {found.samples} samples"
        yield found.summary or ""
        if found.gradients and not found.undecided:
            yield f"{len(found.gradients)} of {found.parameters} gradients differ"
            yield from _table(found.gradients)
        if found.weights:
            yield f"{len(found.weights)} of {found.parameters} weights differ after the update, though no gradient does"
            yield from _table(found.weights)
        if found.buffers:
            yield f"buffers that differ after the update: {', '.join(found.buffers[:5])}"
    for note in found.notes:
        yield f"note: {note}"


def _table(findings: Sequence[Finding]) -> Iterator[str]:
    rows = [[e.name, e.one, e.layout, e.error, e.ratio, e.axis, e.what] for e in findings]
    yield from table_lines(
        ["parameter", "one process", "layout", "error", "ratio", "axis", "what differs"], rows[:_SHOWN]
    )
    if len(rows) > _SHOWN:
        yield f"... and {len(rows) - _SHOWN} more; --json lists all"

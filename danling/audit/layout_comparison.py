"""Compares what the ranks of a layout have recorded of the first updates with what one process has, and says what is likely wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from danling.utils.tables import table_lines

from .gradient_causes import Finding, Held, Tolerance, compare
from .gradient_record import RankRecord, UpdateRecord
from .layout import Layout

_SHOWN = 30


@dataclass(frozen=True)
class LayoutReport:
    """What came of a check.

    Attributes:
        layout: The layout.
        updates: Updates that were compared.
        samples: Samples of the first update.
        parameters: Number of parameters that were compared.
        step: The update that differs, the first being 1; `None` where none does.
        losses: The losses of that update, or of the last one: in one process, and on the layout.
        gradients: Parameters whose gradients differ, in the order of the model.
        weights: Parameters whose weights differ after the update, though the gradients do not.
        buffers: Buffers that differ after the update.
        cause: What explains all of it; `None` where there is no difference, or each parameter has a cause of its own.
        undecided: Whether the loss differs, and does so on every other layout by what the model is: nothing can be said of this one.
        notes: What else is to be known of the comparison.
    """

    layout: Layout
    updates: int
    samples: int
    parameters: int
    step: int | None
    losses: tuple[float, float]
    gradients: Sequence[Finding] = ()
    weights: Sequence[Finding] = ()
    buffers: Sequence[str] = ()
    cause: str | None = None
    undecided: bool = False
    notes: Sequence[str] = ()

    @property
    def is_same(self) -> bool:
        """Whether the layout trains as one process does."""
        return self.step is None

    def __str__(self) -> str:
        return "\n".join(_lines(self))


class NotChecked(ValueError):
    """The program could not be brought to make the updates, or not the same ones."""


def compare_records(
    one: RankRecord, ranks: Sequence[RankRecord], layout: Layout, tolerance: float | None = None
) -> LayoutReport:
    """Compare what the ranks of a layout have recorded with what one process has.

    Args:
        one: Of the run on one process.
        ranks: Of the runs on the layout, by rank.
        layout: The layout.
        tolerance: See `CheckOptions`.

    Raises:
        NotChecked: If the updates are not of the same samples, or not made in one process.
    """
    eps = max(rank.eps for rank in (one, *ranks))
    relative = tolerance if tolerance is not None else eps**0.5
    notes = _notes(one, ranks)
    report: LayoutReport | None = None
    count = min(one.updates, *(rank.updates for rank in ranks))
    for number in range(1, count + 1):
        report = _compared(number, one, ranks, layout, (relative, eps), notes)
        if not report.is_same:
            break
    assert report is not None
    return report


def _compared(
    number: int,
    one: RankRecord,
    ranks: Sequence[RankRecord],
    layout: Layout,
    rounding: tuple[float, float],
    notes: Sequence[str],
) -> LayoutReport:
    """Compare one update."""
    relative, eps = rounding
    wanted, made = one.update(number), [rank.update(number) for rank in ranks]
    if not torch.isfinite(torch.tensor(wanted.norm)) or not wanted.weights:
        raise NotChecked(
            f"Expected updates that are finite in one process. Received: update {number} with loss {wanted.loss:.6g} and gradient norm "
            f"{wanted.norm:.6g}. Mend that first; a precision of fp16 skips its first updates, which --dtype float64 does not."
        )
    strict = Tolerance(relative, 32 * eps * wanted.norm)
    names = list(dict.fromkeys([*wanted.gradients, *(name for update in made for name in update.gradients)]))
    found = [_finding(name, wanted, made, ranks, strict) for name in names]
    gradients = _with_ties([each for each in found if each is not None], one, ranks)
    same_loss = abs(made[0].loss - wanted.loss) <= max(relative * abs(wanted.loss), 32 * eps)
    weights, buffers = (
        ([], [])
        if gradients
        else (_weights(number, wanted, made, ranks, relative, eps), _buffers(wanted, made, relative))
    )
    # Ranks that all read the same samples come to the same mean.
    same_weight = abs(made[0].weight - wanted.weight) <= 1e-9 * abs(wanted.weight)
    differs = bool(gradients or weights or buffers) or not (same_loss and same_weight)
    if differs:
        _check_samples(number, wanted, made)
    differing = _differing(one, ranks, layout)
    return LayoutReport(
        layout=layout,
        updates=number,
        samples=int(one.update(1).samples),
        parameters=len(names),
        step=number if differs else None,
        losses=(wanted.loss, made[0].loss),
        gradients=gradients,
        weights=weights,
        buffers=buffers,
        cause=explain(
            wanted,
            made[0],
            gradients,
            len(names),
            layout,
            same_loss=same_loss,
            differing=differing,
        ),
        undecided=differs and not same_loss and same_weight and differing is not None,
        notes=notes,
    )


def _finding(
    name: str,
    wanted: UpdateRecord,
    made: Sequence[UpdateRecord],
    ranks: Sequence[RankRecord],
    tolerance: Tolerance,
) -> Finding | None:
    part = wanted.gradients.get(name)
    held = [
        Held(rank.rank, rank.coordinate, update.gradients[name])
        for rank, update in zip(ranks, made)
        if name in update.gradients
    ]
    return compare(name, None if part is None else part.tensor, held, ranks[0].degrees, tolerance)


def _with_ties(found: Sequence[Finding], one: RankRecord, ranks: Sequence[RankRecord]) -> list[Finding]:
    """Say of parameters that are one in one process, and several on the layout, that this is what is wrong."""
    tied = {name for rank in ranks for name in rank.tied}
    loose = {other: name for other, name in one.tied.items() if other not in tied}
    partners = {**loose, **{name: other for other, name in loose.items()}}
    result = []
    for each in found:
        partner = partners.get(each.name)
        if partner is not None and any(partner in rank.trained and each.name in rank.trained for rank in ranks):
            cause = f"untied: it is one parameter with {partner} in one process and one of its own on the layout; tie them again"
            each = Finding(each.name, "untied", cause, each.one, each.layout, each.error, each.ratio)
        result.append(each)
    return result


def _weights(
    number: int,
    wanted: UpdateRecord,
    made: Sequence[UpdateRecord],
    ranks: Sequence[RankRecord],
    relative: float,
    eps: float,
) -> list[Finding]:
    """Return the weights that differ after an update whose gradients do not."""
    found = []
    for name, part in wanted.weights.items():
        held = [Held(r.rank, r.coordinate, u.weights[name]) for r, u in zip(ranks, made) if name in u.weights]
        if part.tensor is None or not held:
            continue
        each = compare(name, part.tensor, held, ranks[0].degrees, Tolerance(relative, 32 * eps))
        if each is not None:
            cause = (
                "its gradient is that of one process, and its weight after the update is not: clipping by a norm of this rank alone, or an "
                "optimizer that looks at a whole tensor and is given a part"
            )
            found.append(Finding(name, "weight", cause, each.one, each.layout, each.error))
    return found


def _buffers(wanted: UpdateRecord, made: Sequence[UpdateRecord], relative: float) -> list[str]:
    """Return the names of floating buffers of the first rank that has them, which differ."""
    found = []
    for name, value in wanted.buffers.items():
        mine: Tensor | None = next((update.buffers[name] for update in made if name in update.buffers), None)
        if mine is None or not value.is_floating_point() or mine.shape != value.shape:
            continue
        if not torch.allclose(mine, value, rtol=relative, atol=relative, equal_nan=True):
            found.append(name)
    return found


def _check_samples(number: int, wanted: UpdateRecord, made: Sequence[UpdateRecord]) -> None:
    """Refuse to call a difference one of the layout where the samples were others."""
    digest = sum(update.digest for update in made)
    if (digest - wanted.digest) % (1 << 64) == 0:
        return
    few = made[0].samples
    raise NotChecked(
        f"Expected update {number} to be made of the same samples in one process and on the layout. Received: {wanted.samples:g} "
        f"samples and {few:g}, whose contents are not the same. Look for a batch size that depends on the number of processes, a loader of "
        "your own that is not divided over the ranks that read different samples, data that is drawn before `super().__init__`, and "
        "padding to the longest sample of a batch, which --batch does not change: pad to one length."
    )


def explain(
    wanted: UpdateRecord,
    made: UpdateRecord,
    gradients: Sequence[Finding],
    parameters: int,
    layout: Layout,
    *,
    same_loss: bool,
    differing: str | None = None,
) -> str | None:
    """Return the one sentence that explains what differs in an update, `None` where each parameter has a cause of its own.

    Args:
        wanted: The update in one process.
        made: The same on the layout.
        gradients: Those that differ.
        parameters: Number of parameters that were compared.
        layout: The layout.
        same_loss: Whether the loss is the same.
        differing: What in the model makes layouts differ rightly; `None` where nothing does.
    """
    if wanted.weight and abs(made.weight / wanted.weight - 1) > 1e-9:
        ratio = made.weight / wanted.weight
        return (
            f"the weights of the batches add up to {ratio:.6g} times those of one process: `batch_weight` counts samples that other ranks "
            "count too, or a part of them"
        )
    ratios = [each.ratio for each in gradients if each.ratio is not None]
    if len(ratios) == len(gradients) == parameters and max(ratios) - min(ratios) < 1e-6 * abs(ratios[0] or 1.0):
        what = "and the loss is the same: it is scaled on its way to `backward`" if same_loss else "and so is the loss"
        if not same_loss and abs(made.loss / wanted.loss - ratios[0]) > 1e-6 * abs(ratios[0]):
            what = "and the loss differs otherwise"
        return f"every gradient is {ratios[0]:.6g} times that of one process, {what}: {gradients[0].cause}"
    if not same_loss and differing is not None:
        return f"the loss differs already, and may do so: {differing}"
    if not same_loss:
        return (
            "the loss differs already: the forward pass on the layout is not that of one process. Look for a bias or a residual that every "
            "rank adds before a sum, a part of a layer (heads, rows) that is not that of its weights, an output that is not gathered, and "
            "a mean over a part of the batch"
        )
    if (
        gradients
        and any(each.kind in ("replicas", "partial", "other", "shards") for each in gradients)
        and len(gradients) > 1
    ):
        return f"the loss is the same, and the backward pass is not; nearest to the loss is {gradients[-1].name}: begin there"
    return None


def _differing(one: RankRecord, ranks: Sequence[RankRecord], layout: Layout) -> str | None:
    """Return what in the model makes the loss depend on the layout without a mistake of it; `None` where nothing does."""
    if one.draws or any(rank.draws for rank in ranks):
        return "the forward pass draws random numbers, other ones on each layout; switch that off for the check"
    if one.batch_norms and (layout.replicas > 1 or "pipeline" in layout.degrees):
        return (
            "batch normalization without running statistics takes those of the samples that a rank has at once; check the model without "
            "it"
        )
    return None


def _notes(one: RankRecord, ranks: Sequence[RankRecord]) -> list[str]:
    """Return what else is to be known of a comparison, a sentence each."""
    notes = []
    if one.dropped or one.drops_in_calls:
        modules = f"{one.dropped} {'module' if one.dropped == 1 else 'modules'}" if one.dropped else ""
        dropped = " and ".join([*filter(None, [modules]), *(["calls of functions"] if one.drops_in_calls else [])])
        notes.append(f"Dropout of {dropped} was switched off: layouts draw other random numbers.")
    if one.draws or any(rank.draws for rank in ranks):
        notes.append(
            "The forward pass draws random numbers that are no dropout of a module; layouts draw others, and differ by that."
        )
    initial = sorted({name for rank in ranks for name in rank.initial})
    if initial:
        shown = ", ".join(initial[:3]) + (", ..." if len(initial) > 3 else "")
        notes.append(
            f"The initial weights of {len(initial)} {'parameter' if len(initial) == 1 else 'parameters'} ({shown}) depend on the layout; "
            "those of one process were taken on both sides."
        )
    if one.held_norms:
        notes.append(
            f"Batch normalization ({one.held_norms}) was given its running statistics: those of the samples that a rank has at once differ "
            "from layout to layout."
        )
    coarse = max((rank.eps for rank in (one, *ranks) if rank.coarse), default=0.0)
    if coarse:
        notes.append(
            "A part of it is computed in a coarser dtype than its weights have, as by a call of float(): differences up to "
            f"{coarse**0.5:.1g} are taken for rounding."
        )
    return notes


def _lines(found: LayoutReport) -> Iterator[str]:
    """Yield what people read of a check."""
    if found.is_same:
        yield (
            f"{found.layout}: the first {found.updates} updates are those of one process, in losses, weights, and gradients of "
            f"{found.parameters} parameters; {found.samples} samples each"
        )
    else:
        first, second = found.losses
        if found.undecided:
            yield f"{found.layout}: not checked, since the losses of update {found.step} cannot be the same"
        else:
            yield f"{found.layout}: update {found.step} is not that of one process"
        yield f"loss {first:.10g} in one process, {second:.10g} on the layout; {found.samples} samples"
        if found.cause is not None:
            yield f"likely cause: {found.cause}"
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
    rows = [[each.name, each.one, each.layout, each.error, each.ratio, each.cause] for each in findings]
    yield from table_lines(["parameter", "one process", "layout", "error", "ratio", "likely cause"], rows[:_SHOWN])
    if len(rows) > _SHOWN:
        yield f"... and {len(rows) - _SHOWN} more; --json lists all"

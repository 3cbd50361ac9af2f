"""Whether the first updates of a script on several processes are those of one process.

The gradient of an update has three references: that of one process with the joined batches, the same with the rows in reverse order (which
measures rounding), and those of each rank's batches alone. A layout's gradient is a sum of the ranks' own ones, each with a weight: N
numbers for all parameters. The joined batch has such weights too. Gradients that are no such sum, or whose weights are others, differ.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from danling.utils.messages import first_of

from .differences import Finding, NotChecked, Part, Rounding, compare, finding_lines
from .inside.stacks import assembled, placed

_RELATIVE = 1e-5
"""Relative difference of a gradient in float32 that is rounding."""
_NOISE = 10.0
"""Rounding is up to this many times what another order of the rows does."""
_EPS = 1.2e-7
_LINEAR = 1e-3
"""Residual up to which the gradient of the joined batch counts as a sum of those of the ranks, in float32; see `Fit`."""
_WEIGHTS = 1e-2
"""Share of the change of a tensor by an update that is rounding: optimizers that divide by small numbers amplify it."""


@dataclass(frozen=True)
class Update:
    """An update as all ranks of a start have recorded it."""

    ranks: Sequence[Mapping[str, Any]]

    @classmethod
    def read(cls, directory: Path, number: int) -> Update | None:
        """Read an update, counted from 1; `None` where there is none."""
        files = sorted(
            directory.glob(f"rank-*.update-{number}.pt"),
            key=lambda file: int(file.name[5:].partition(".")[0]),
        )
        if not files:
            return None
        return cls([torch.load(file, weights_only=True, mmap=True) for file in files])

    @property
    def first(self) -> Mapping[str, Any]:
        """What the first rank has recorded."""
        return self.ranks[0]

    def names(self, kind: str) -> list[str]:
        """Return the names of the tensors that any rank has."""
        return list(dict.fromkeys(name for rank in self.ranks for name in rank[kind]))

    def whole(self, kind: str, name: str, shape: Sequence[int]) -> Tensor | None:
        """Return a whole tensor of a shape from the parts of the ranks; `None` where they make none."""
        pieces = [rank[kind][name] for rank in self.ranks if name in rank[kind]]
        whole = assembled(pieces, shape)
        return None if whole is None else whole.double()

    def held(
        self, kind: str, name: str, shape: Sequence[int]
    ) -> list[tuple[Mapping[str, int], Part]]:
        """Return what each rank has of a tensor."""
        ranks = [at for at, rank in enumerate(self.ranks) if name in rank[kind]]
        pieces = placed([self.ranks[at][kind][name] for at in ranks], shape)
        return [({"rank": at}, Part(*piece)) for at, piece in zip(ranks, pieces)]

    def columns(self) -> list[dict[str, Tensor]]:
        """Return the gradient of each backward pass of a start in one process; that of all where it is not known."""
        whole = self.of_one("gradients")
        found = []
        before = dict[str, Tensor]()
        for kept in self.first["parts"]:
            own = {
                name: kept[name][2] if name in kept else torch.zeros_like(tensor)
                for name, tensor in whole.items()
            }
            found.append({name: tensor - before.get(name, 0.0) for name, tensor in own.items()})
            before = own
        # Parts count only where they add up: a script may change gradients between passes.
        is_whole = len(found) == len(self.first["losses"]) > 1 and all(
            float((tensor - before[name]).norm()) <= 1e-5 * float(tensor.norm())
            for name, tensor in whole.items()
        )
        return found if is_whole else [whole]

    def of_one(self, kind: str) -> dict[str, Tensor]:
        """Return the whole tensors of a start in one process."""
        return {name: tensor for name, (_, _, tensor) in self.first[kind].items()}

    def norm(self, kind: str = "gradients") -> float:
        """Return the norm of all tensors of a start in one process."""
        return math.sqrt(
            math.fsum(float(t.double().square().sum()) for t in self.of_one(kind).values())
        )


@dataclass(frozen=True)
class Fit:
    """Gradients as sums of those of the ranks alone, or of each of their micro-batches.

    Attributes:
        ranks: Number of ranks.
        layout: Weights of these gradients in that of the layout.
        joined: Their weights in that of the joined batch.
        left: For each parameter, the norm of what these sums leave of the layout's gradient, and of the joined one's.
        residual: Share of the layout's gradient that no sum has.
        joined_residual: The same of the joined batch.
        apart: Relative difference of the two sums.
        norm: Norm of the joined one's sum.
    """

    ranks: int
    layout: list[float]
    joined: list[float]
    left: Mapping[str, tuple[float, float]]
    residual: float
    joined_residual: float
    apart: float
    norm: float

    @classmethod
    def of(
        cls,
        layout: Mapping[str, Tensor],
        joined: Mapping[str, Tensor],
        alone: Sequence[Mapping[str, Tensor]],
        ranks: int,
    ) -> Fit:
        """Find the weights by least squares over all parameters together."""
        names = [name for name in layout if name in joined and all(name in each for each in alone)]
        columns = {
            name: torch.stack([each[name].double().flatten() for each in alone], 1)
            for name in names
        }
        gram = sum(
            (columns[name].T @ columns[name] for name in names),
            torch.zeros(len(alone), len(alone)).double(),
        )

        def weights(target: Mapping[str, Tensor]) -> Tensor:
            right = sum(
                (columns[n].T @ target[n].double().flatten() for n in names),
                torch.zeros(len(alone)).double(),
            )
            # By singular values, since gradients of ranks may be multiples of each other.
            solved: Tensor = torch.linalg.lstsq(gram, right[:, None], driver="gelsd").solution[:, 0]
            return solved

        own, wanted = weights(layout), weights(joined)
        left = {
            name: tuple(
                float((columns[name] @ by - target[name].double().flatten()).norm())
                for by, target in ((own, layout), (wanted, joined))
            )
            for name in names
        }
        norm = math.hypot(*(float((columns[name] @ wanted).norm()) for name in names))
        made = math.hypot(*(float(layout[name].double().norm()) for name in names))
        difference = own - wanted
        apart = math.sqrt(max(float(difference @ gram @ difference), 0.0))
        return cls(
            ranks=ranks,
            layout=own.tolist(),
            joined=wanted.tolist(),
            left=left,  # type: ignore[arg-type]
            residual=math.hypot(*(mine for mine, _ in left.values())) / (made or 1.0),
            joined_residual=math.hypot(*(other for _, other in left.values())) / (norm or 1.0),
            apart=apart / (norm or 1.0),
            norm=norm,
        )

    def sentence(self) -> str | None:
        """Name the fault that the weights show; `None` where they show no known one."""
        number = self.ranks
        ratios = [
            own / wanted if wanted else math.inf for own, wanted in zip(self.layout, self.joined)
        ]
        shown = (
            f"{_numbers(self.layout)} on the layout, {_numbers(self.joined)} in the joined batch"
        )
        # All ranks are off by one factor: a wrong divisor, or a gradient that is added where its mean is wanted.
        if max(ratios) - min(ratios) <= 0.01 * abs(max(ratios)):
            return f"the gradient is {_ratio(sum(ratios) / len(ratios), number)} that of one process; the ranks count {shown}"
        # All ranks weigh the same, and the joined batch weighs them by their samples.
        if max(self.layout) - min(self.layout) <= 2e-3 * abs(max(self.layout)):
            times = sum(self.layout) / (sum(self.joined) or 1.0)
            more = "" if abs(times - 1) < 0.02 else f", {times:.4g} times"
            return f"mean of means{more}: every rank counts the same, though their samples or tokens do not: the ranks count {shown}"
        return f"the ranks count {shown}"

    @property
    def has_constant_divisor(self) -> bool:
        """Whether the script divides its loss by a constant, or by nothing: the joined batch has the sum of the ranks' gradients."""
        number = self.ranks
        is_sum = number > 1 and all(abs(weight - 1) < 1e-2 for weight in self.joined)
        return is_sum and all(abs(weight * number - 1) < 1e-2 for weight in self.layout)


def _numbers(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values)


def _ratio(ratio: float, number: int) -> str:
    if abs(ratio * number - 1) < 1e-2:
        return f"1/{number} of"
    return f"{ratio:.4g} times"


@dataclass
class Report:
    """The result of `danling prove` for layouts.

    Attributes:
        verdict: `same`, `different`, or `not checked`.
        processes: Number of processes.
        updates: Updates that were compared.
        samples: Samples of the first update.
        parameters: Parameters that were compared.
        step: The update that differs.
        summary: A sentence on what differs, or why nothing was compared.
        losses: Losses of the update, in one process and on the layout.
        gradients: Parameters whose gradients differ.
        weights: Parameters whose weights differ after the update, though no gradient does.
        facts: Sentences about what differs.
        notes: Sentences that change no verdict.
        rank_weights: Weights of the ranks on the layout and in the joined batch, where they were computed.
        noise: Relative difference that another order of the rows makes, where it was measured.
        starts: Seconds of each start.
    """

    processes: int = 0
    verdict: str = "same"
    updates: int = 0
    samples: int = 0
    parameters: int = 0
    step: int | None = None
    summary: str | None = None
    losses: tuple[float, float] | None = None
    gradients: list[Finding] = field(default_factory=list)
    weights: list[Finding] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    rank_weights: tuple[list[float], list[float]] | None = None
    noise: float | None = None
    starts: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        head = f"{self.processes} process{'es' if self.processes != 1 else ''}"
        if self.verdict == "same":
            compared = (
                f"the first {self.updates} updates are those"
                if self.updates > 1
                else "the first update is that"
            )
            yield (
                f"{head}: {compared} of one process, in losses, weights, and whole gradients of {self.parameters} parameters; "
                f"{self.samples} samples each"
            )
        elif self.verdict == "different":
            yield f"{head}: update {self.step} is not that of one process"
        else:
            yield f"{head}: not checked"
        if self.summary is not None:
            yield self.summary
        if self.losses is not None and self.verdict == "different":
            yield f"loss {self.losses[0]:.7g} in one process, {self.losses[1]:.7g} on the layout; {self.samples} samples"
        yield from self.facts
        if self.verdict == "different":
            yield from finding_lines("gradients", self.gradients, self.parameters)
            yield from finding_lines("weights", self.weights, self.parameters)
        yield from (f"note: {note}" for note in self.notes)


# Of one start


def distinct_ranks(rows: Sequence[Sequence[int]]) -> list[int]:
    """Return the ranks that have read other batches than those before them."""
    seen: dict[tuple[int, ...], int] = {}
    for rank, own in enumerate(rows):
        seen.setdefault(tuple(own), rank)
    return list(seen.values())


def sample_notes(rows: Sequence[Sequence[int]]) -> Iterator[str]:
    """Say that several ranks have read the same samples."""
    number = len(rows)
    if not any(rows):
        return
    distinct = distinct_ranks(rows)
    if len(distinct) < number:
        yield (
            f"{number} ranks read {len(distinct)} different sequences of batches: right for tensor and context parallelism, else a sampler "
            "is missing"
        )
        return
    counts = Counter(row for rank in distinct for row in set(rows[rank]))
    repeated = sum(1 for count in counts.values() if count > 1)
    if repeated:
        yield f"{repeated} samples were read by several ranks"


def layout_notes(updates: Sequence[Update]) -> Iterator[str]:
    """Yield what is noticed about the updates of a layout, and may be wrong in one process too."""
    for number, update in enumerate(updates, 1):
        # With a rate of 0, as in the first update of many warm-ups, no weight is to change.
        frozen = all(not group.get("lr", 1.0) for group in update.first["groups"])
        unchanged = dict.fromkeys(name for rank in update.ranks for name in rank["unchanged"])
        if unchanged and not frozen:
            shown = first_of(list(unchanged), 3)
            yield f"update {number} changed nothing in {len(unchanged)} parameters whose gradient is not zero: {shown}"
        dropped = update.first["dropped"]
        if dropped:
            yield f"{dropped} backward passes before update {number} have no effect: their gradients were deleted before a step"
    for (number, one), two in zip(enumerate(updates, 2), updates[1:]):
        before = one.first["divisors"]
        after = two.first["divisors"]
        full = len(before)
        is_divided = all(
            any(math.isclose(each, full, rel_tol=1e-5) for each in own) for own in (*before, *after)
        )
        if 0 < len(after) < full and is_divided:
            yield (
                f"update {number} has {len(after)} micro-batches instead of {full}, and divides their losses by {full}: a short window of "
                "accumulation is divided by the length of a full one"
            )
    first = updates[0].first
    if len(updates[0].ranks) > 1 and not first["has_group"]:
        yield "the script has no process group of torch.distributed: its ranks train apart"
    if first["switched"]:
        yield (
            f"batch normalization ({', '.join(first['switched'])}) uses its running statistics for the check: those of a batch are not the "
            "same on several processes and on one"
        )
    alike = next(_alike({name: part for name, (_, _, part) in first["start"].items()}), None)
    if alike is not None:
        yield f"{alike[0]} and {alike[1]} begin with the same values"


def _alike(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    seen: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        # Zeros and ones, as biases and norms begin, say nothing.
        if tensor.numel() < 2 or bool((tensor == tensor.flatten()[0]).all()):
            continue
        key = (
            tuple(tensor.shape),
            float(tensor.double().sum()),
            float(tensor.double().square().sum()),
        )
        if key in seen:
            yield seen[key], name
        seen.setdefault(key, name)


def refuse(layout: Update, distinct: int) -> None:
    """Raise where several processes cannot compute the same as one by definition.

    Raises:
        NotChecked: With the reason.
    """
    if layout.first["has_runner"]:
        raise NotChecked(
            "the script trains by a runner of danling, which divides the samples over its ranks by itself. Check it by "
            f"`danling check-layout ddp={len(layout.ranks)} -- python ...`, or with the axes that it trains on, such as "
            f"shard={len(layout.ranks)}"
        )
    norms = sorted({name for rank in layout.ranks for name in rank["batch_norm"]})
    if norms and distinct > 1:
        raise NotChecked(
            f"batch normalization without running statistics ({', '.join(norms)}) uses those of each rank's own batch: several processes "
            "differ from one by definition. Use SyncBatchNorm, or `track_running_stats=True`, for the check"
        )
    if not layout.first["batches"]:
        raise NotChecked(
            "no batch of a torch DataLoader was seen, so one process cannot be given the same samples. Write "
            "`for batch in prove.batches(...)` around what the script iterates over, with `from danling import prove`"
        )


# Of two


class Comparison:
    """A layout and one process with the same batches."""

    def __init__(
        self, layout: Update, one: Update, *, number: int, tolerance: float | None = None
    ) -> None:
        self.layout, self.one, self.number = layout, one, number
        self.relative = tolerance or _RELATIVE
        self.degrees = {"rank": len(layout.ranks)}
        self.noise: dict[str, dict[str, float]] = {"gradients": {}, "weights": {}}
        self.coarse = 0.0
        """Relative difference that the precision of the script makes, beyond the order of rows."""
        self.extra: Mapping[str, float] = {}
        self.notes: list[str] = []
        self.norm = one.norm()
        if not math.isfinite(self.norm):
            raise NotChecked(
                f"the gradient of update {number} in one process is not finite (loss {_loss(one.first)})"
            )

    @property
    def eps(self) -> float:
        """Precision of what modules return, and of the weights."""
        found = [float(rank["eps"]) for rank in (*self.layout.ranks, self.one.first)]
        found += [
            torch.finfo(t.dtype).eps
            for t in self.one.of_one("weights").values()
            if t.is_floating_point()
        ]
        return max(found, default=_EPS)

    @property
    def is_coarse(self) -> bool:
        """Whether the script computes in less than float32."""
        return self.eps > 1e-6

    @property
    def relative_noise(self) -> float:
        """Share of the gradient that the reverse order of rows changes, where it was measured."""
        return math.hypot(*self.noise["gradients"].values()) / (self.norm or 1.0)

    def measure_noise(self, reverse: Update) -> None:
        """Take what the reverse order of rows changes as rounding."""
        for kind, noise in self.noise.items():
            other = reverse.of_one(kind)
            for name, tensor in self.one.of_one(kind).items():
                if name in other:
                    noise[name] = float((tensor.double() - other[name].double()).norm())

    def gradients(self) -> list[Finding]:
        """Return the parameters whose gradients differ from those of one process."""
        # A small gradient has the rounding of the large ones that it is computed from.
        floor = 4 * _EPS * self.norm

        def rounding(name: str, norm: float) -> Rounding:
            noise = _NOISE * self.noise["gradients"].get(name, 0.0)
            return Rounding(
                self.relative, max(floor, noise, self.coarse * norm, self.extra.get(name, 0.0))
            )

        return self._findings("gradients", self.one.of_one("gradients"), rounding)

    def weights(self) -> list[Finding]:
        """Return the parameters whose weights differ after the update."""
        start = self.one.of_one("start")
        own = self.one.of_one("weights")
        # A step smaller than the precision of a weight is rounded away on one side and made on the other.
        share = 0.5 if self.is_coarse else _WEIGHTS

        def rounding(name: str, norm: float) -> Rounding:
            change = (
                float((own[name].double() - start[name].double()).norm()) if name in start else 0.0
            )
            eps = torch.finfo(own[name].dtype).eps if own[name].is_floating_point() else 0.0
            noise = _NOISE * self.noise["weights"].get(name, 0.0)
            return Rounding(4 * eps, max(share * change, noise, 1e-30))

        return self._findings("weights", own, rounding)

    def starts(self) -> list[Finding]:
        """Return the parameters that do not begin alike on all ranks, or in one process."""
        return self._findings(
            "start", self.one.of_one("start"), lambda name, norm: Rounding(1e-6, 0.0)
        )

    def _findings(self, kind: str, wanted: Mapping[str, Tensor], rounding: Any) -> list[Finding]:
        found, skipped = [], []
        for name in dict.fromkeys([*wanted, *self.layout.names(kind)]):
            one = wanted.get(name)
            if one is None or name not in self.layout.names(kind):
                where = "in one process" if one is None else "on the layout"
                raise NotChecked(f"{name} is no parameter {where}, so that it cannot be compared")
            held = self.layout.held(kind, name, one.shape)
            # Parts that do not make up a tensor of this shape, as where a stack flattens what it divides.
            if held[0][1].shape != tuple(one.shape):
                skipped.append(name)
                continue
            found.append(
                compare(name, one, held, self.degrees, rounding(name, float(one.double().norm())))
            )
        if skipped:
            note = f"{len(skipped)} parameters are divided in a way that is not known, and were not compared: {', '.join(skipped[:3])}"
            if note not in self.notes:
                self.notes.append(note)
            if len(skipped) == len(wanted):
                raise NotChecked(note)
        return [each for each in found if each is not None]

    def clip_facts(self) -> Iterator[str]:
        """Yield what differs of the norms by which gradients were clipped."""
        norms = [rank["norms"] for rank in self.layout.ranks]
        # Clippings of another number cannot be paired with those of one process.
        if any(len(each) != len(self.one.first["norms"]) for each in norms):
            return
        share = max(1e-3, 4 * self.eps if self.is_coarse else 0.0)
        for at, wanted in enumerate(self.one.first["norms"]):
            own = [each[at] for each in norms]
            if max(own) - min(own) > share * abs(max(own)):
                yield f"clipping: the ranks divide by different norms: {', '.join(f'{norm:.5g}' for norm in own)}"
            elif abs(own[0] - wanted) > share * abs(wanted):
                yield f"clipping: the norm is {own[0]:.5g} on the layout and {wanted:.5g} in one process"

    def losses(self) -> tuple[float, float]:
        """Return the loss in one process and on the layout: ranks have a mean over their samples, or a part of a sum."""
        own = [_loss(rank) for rank in self.layout.ranks]
        wanted = _loss(self.one.first)
        # What the script back-propagates on a rank is a mean over its samples, its part of a sum, or the whole on each rank.
        nearest = min(
            (sum(own) / len(own), sum(own), own[0]), key=lambda value: abs(value - wanted)
        )
        return wanted, nearest if abs(nearest - wanted) <= 1e-2 * abs(wanted) else sum(own) / len(
            own
        )

    def refuse_other_samples(self) -> None:
        """Raise where a difference may come from other samples, or from random numbers.

        Raises:
            NotChecked: With the reason.
        """
        draws = any(rank["draws"] for rank in (*self.layout.ranks, self.one.first))
        if draws:
            raise NotChecked(
                f"update {self.number} differs, and its forward draws random numbers, which are not the same on several processes and on "
                "one. Switch that off for the check"
            )
        # Where other modules were called, their inputs say nothing about the samples.
        if self.one.first["models"] != self.layout.first["models"]:
            return
        # A set, since ranks of tensor parallelism read the same samples.
        amounts = {(rank["amount"], tuple(rank["inputs"])) for rank in self.layout.ranks}
        amount, wanted = math.fsum(amount for amount, _ in amounts), float(self.one.first["amount"])
        rows = sum(sum(inputs) for _, inputs in amounts)
        own = sum(self.one.first["inputs"])
        if abs(amount - wanted) > 1e-3 * abs(wanted) or rows != own:
            raise NotChecked(
                f"update {self.number} differs, and it is not made of the same samples: the model gets {rows} rows on the layout and {own} "
                "in one process, with other values. Look for samples that come from no DataLoader, and show them by prove.batches(...)"
            )


def _loss(record: Mapping[str, Any]) -> float:
    return math.fsum(record["losses"])

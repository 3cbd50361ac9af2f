"""`danling prove`: starts a script on several processes and on one, and compares their updates."""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from .comparison import (
    Comparison,
    Fit,
    Report,
    Update,
    distinct_ranks,
    layout_notes,
    refuse,
    sample_notes,
)
from .differences import NotChecked
from .inside.tape import Job
from .program import announce
from .starts import Script, reason_of

_OTHER_STARTS = "the ranks begin with different weights"


class LayoutProof:
    """Compares several processes with one."""

    def __init__(self, script: Script, job: Job, tolerance: float | None = None) -> None:
        self.script, self.job, self.tolerance = script, job, tolerance
        self.report = Report()
        self.ranks: list[int] = []
        self.layout: list[Update] = []

    def run(self) -> Report:
        """Start the script as often as needed. A report that says `not checked` has the reason."""
        try:
            with self.script.guarded():
                self._run()
        except Exception as error:
            # An error of the comparison is no verdict on the script.
            self.report.verdict = "not checked"
            self.report.summary = reason_of(error)
            self.report.step = None
            self.report.gradients, self.report.weights, self.report.facts = [], [], []
        return self.report

    def _run(self) -> None:
        report = self.report
        report.processes = self._start("layout", self.job, "on its processes")
        directory = self.script.scratch / "layout"
        self.layout = _updates(directory)
        rows = [_rows(directory / f"rank-{rank}.batches") for rank in range(report.processes)]
        self.ranks = distinct_ranks(rows)
        report.notes += [*sample_notes(rows), *layout_notes(self.layout)]
        refuse(self.layout[0], len(self.ranks))
        samples = {tuple(rank["inputs"]): sum(rank["inputs"]) for rank in self.layout[0].ranks}
        inputs = [sum(self.layout[0].ranks[rank]["inputs"]) for rank in self.ranks]
        report.samples = sum(inputs) or sum(samples.values())
        how, one = self._start_one()
        comparisons = self._comparisons(one)
        # Before rounding is measured: random numbers in the forward would count as rounding.
        if self._judge(comparisons) is None or report.summary == _OTHER_STARTS:
            return
        self._start(
            "reversed",
            self._replay(how="reversed" if how == "joined" else how, ranks=self.ranks[::-1]),
            "in one process, with the rows in reverse order",
        )
        reverse = _updates(self.script.scratch / "reversed")
        for each, other in zip(comparisons, reverse):
            each.measure_noise(other)
        at = self._differs_at(comparisons)
        # Where nothing differs, the noise of the first update is reported.
        report.noise = comparisons[(at or 1) - 1].relative_noise
        if at is None:
            return
        if len(self.ranks) > 1 and how == "joined":
            self._judge_by_fit(comparisons, at)
        else:
            for each in comparisons:
                each.coarse = 4 * each.eps if each.is_coarse else 0.0
            self._judge(comparisons)

    def _replay(self, *, how: str, ranks: Sequence[int], updates: int | None = None) -> Job:
        source = str(self.script.scratch / "layout")
        return replace(
            self.job, source=source, how=how, ranks=list(ranks), updates=updates or self.job.updates
        )

    def _start(self, name: str, job: Job, where: str) -> int:
        announce(
            f"the script makes {job.updates} updates {where}, within {self.script.timeout:g} s"
        )
        began = time.monotonic()
        ranks = self.script.start(name, job, alone=job.replays)
        self.report.starts[name] = round(time.monotonic() - began, 1)
        return ranks

    def _start_one(self) -> tuple[str, list[Update]]:
        """Start one process with the joined batches; with one after the other, where it divides its batch into more micro-batches."""
        wanted = len(self.layout[0].first["losses"])
        of_ranks = wanted * len(self.ranks)
        for how, name, passes in (("joined", "one", wanted), ("micro", "one-micro", of_ranks)):
            self._start(
                name, self._replay(how=how, ranks=self.ranks), "in one process, of the same samples"
            )
            updates = _updates(self.script.scratch / name)
            made = len(updates[0].first["losses"])
            if made == passes:
                return how, updates
            # Only a script that makes the passes of all ranks itself can be given their batches one after the other.
            if made != of_ranks:
                break
        raise NotChecked(
            f"update 1 has {wanted} backward passes on each rank of the layout, and {made} in one process"
        )

    def _comparisons(self, one: Sequence[Update]) -> list[Comparison]:
        if len(one) != len(self.layout):
            raise NotChecked(
                f"the script makes {len(self.layout)} updates on the layout, and {len(one)} in one process: the order of its optimizers "
                "depends on the number of processes"
            )
        pairs = zip(self.layout, one)
        found = [
            Comparison(a, b, number=n, tolerance=self.tolerance)
            for n, (a, b) in enumerate(pairs, 1)
        ]
        # Zeros on both sides would agree, and prove nothing.
        if not any(each.norm for each in found):
            raise NotChecked(
                "the gradients of all updates are zero, or are not in `grad` of the parameters"
            )
        self.report.updates = len(found)
        self.report.parameters = len(found[0].layout.names("gradients"))
        starts = found[0].starts()
        if starts and not any(each.axis for each in starts):
            names = ", ".join(each.name for each in starts[:3])
            raise NotChecked(
                f"one process begins with other values of {len(starts)} parameters ({names}): no module has them, so that they cannot be "
                "copied. Set a seed in the script"
            )
        if starts and not self.layout[0].first["has_group"]:
            raise NotChecked(
                "the ranks begin with different weights, and the script has no process group of torch.distributed: its ranks train apart. "
                "Call `init_process_group`, or set a seed"
            )
        return found

    def _differs_at(self, comparisons: Sequence[Comparison]) -> int | None:
        """Return the number of the first update that differs, with all of its differences in the report."""
        report = self.report
        report.gradients, report.weights, report.facts, report.step = [], [], [], None
        for each in comparisons:
            report.losses = each.losses()
            starts = each.starts() if each.number == 1 else []
            if starts:
                report.weights, report.summary = starts, _OTHER_STARTS
                report.step, report.verdict = 1, "different"
                return 1
            report.gradients = each.gradients()
            # Other gradients make other weights, which are no second finding.
            report.weights = [] if report.gradients else each.weights()
            report.facts = list(each.clip_facts())
            if report.gradients or report.weights or report.facts:
                report.step = each.number
                report.verdict = "different"
                report.summary = self._summary(each)
                return each.number
        report.verdict, report.summary = "same", None
        report.notes += [
            note for each in comparisons for note in each.notes if note not in report.notes
        ]
        return None

    def _summary(self, each: Comparison) -> str:
        report = self.report
        if any("between ranks" in found.what for found in report.gradients):
            return "ranks with copies of a parameter have different values: a sum over ranks is missing"
        if any("between ranks" in found.what for found in report.weights):
            return "the gradients are those of one process, and the ranks make different steps: their copies of a parameter differ"
        ratios = {found.ratio for found in report.gradients}
        if report.gradients and None not in ratios and len(report.gradients) == report.parameters:
            known = [ratio for ratio in ratios if ratio is not None]
            if max(known) - min(known) <= 0.01 * abs(max(known)):
                return f"the whole gradient is {known[0]:.4g} times that of one process"
        if report.gradients:
            return f"{len(report.gradients)} of {report.parameters} gradients are not those of one process"
        if report.weights:
            return "the gradients are those of one process, the step of the optimizer is not"
        return "the gradients are those of one process, their clipping is not"

    def _judge(self, comparisons: Sequence[Comparison]) -> int | None:
        """Decide by the joined batch alone."""
        at = self._differs_at(comparisons)
        if at is not None and self.report.summary != _OTHER_STARTS:
            comparisons[at - 1].refuse_other_samples()
        return at

    def _judge_by_fit(self, comparisons: Sequence[Comparison], at: int) -> None:
        """Decide by the gradients of the ranks alone, in the first update that differs."""
        report = self.report
        first = comparisons[at - 1]
        is_unequal = any(
            "between ranks" in found.what for found in (*report.gradients, *report.weights)
        )
        if is_unequal:
            self._judge(comparisons)
            return
        first.refuse_other_samples()
        alone: list[dict[str, Tensor]] = []
        for rank in self.ranks:
            self._start(
                f"alone-{rank}-{at}",
                replace(self._replay(how="joined", ranks=[rank], updates=at), parts=True),
                f"in one process, of the samples of rank {rank}",
            )
            alone += _updates(self.script.scratch / f"alone-{rank}-{at}")[at - 1].columns()
        joined = first.one.of_one("gradients")
        whole: dict[str, Tensor] = {}
        for name, tensor in joined.items():
            found = first.layout.whole("gradients", name, tensor.shape)
            if found is not None:
                whole[name] = found
        fit = Fit.of(whole, joined, alone, len(self.ranks))
        report.rank_weights = (fit.layout, fit.joined)
        noise = first.relative_noise
        near = max(4 * first.eps, 0.03) if first.is_coarse else max(1e-3, 10 * noise)
        if fit.joined_residual > near:
            raise NotChecked(
                f"the gradient of the joined batch is no sum of those of the ranks' batches ({fit.joined_residual:.2g} is left over): "
                "the loss is not a sum over samples, or rows are not along the first dimension. The layout's gradient "
                + (
                    "is the sum with "
                    if fit.residual <= near
                    else "is no such sum either; nearest is "
                )
                + ", ".join(f"{weight:.3g}" for weight in fit.layout)
            )
        for each in comparisons:
            each.coarse = 4 * fit.joined_residual if each.is_coarse else 0.0
            each.extra = {name: 4 * left for name, (_, left) in fit.left.items()}
        exact = max(1e-5, 2 * _gradient_eps(joined) if first.is_coarse else 0.0)
        unfit = [
            name
            for name, (left, _) in fit.left.items()
            if left
            > max(exact * float(whole[name].norm()), first.extra.get(name, 0.0), 4e-7 * fit.norm)
        ]
        # In bf16 the weights of the joined batch are as exact as its gradient is.
        near = max(1e-3, 2 * fit.joined_residual) if first.is_coarse else max(1e-5, 10 * noise)
        is_apart = fit.apart > near
        if not unfit and not is_apart:
            later = self._judge(comparisons)
            if later is not None and later > at:
                self._judge_by_fit(comparisons, later)
            return
        if not unfit and fit.has_constant_divisor:
            report.notes.append(
                "the script divides its loss by a constant, or by nothing: its gradient of the joined batch is the sum of the ranks' own, "
                "and the gradient of the layout is their mean"
            )
            report.verdict, report.summary, report.step = "same", None, None
            report.gradients, report.weights, report.facts = [], [], []
            # By another scale, the weights of later updates are others.
            report.updates = at
            return
        if unfit:
            self._differs_at(comparisons)
            return
        report.step = at
        report.verdict = "different"
        report.summary = fit.sentence()
        report.weights = []
        report.gradients = first.gradients()


def _gradient_eps(gradients: dict[str, Tensor]) -> float:
    return max((torch.finfo(tensor.dtype).eps for tensor in gradients.values()), default=0.0)


def _updates(directory: Path) -> list[Update]:
    found: list[Update] = []
    while (update := Update.read(directory, len(found) + 1)) is not None:
        found.append(update)
    if not found:
        raise NotChecked("no update of a torch optimizer was seen")
    return found


def _rows(file: Path) -> list[int]:
    # Safe to unpickle: the tape of this check wrote the file, in a directory of its owner.
    kept = pickle.loads(file.read_bytes())
    return [row for entries in kept for entry in entries if entry is not None for row in entry[0]]

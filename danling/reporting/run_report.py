"""What the reporter is told of a training: where it begins, its updates, its results, and how it ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from danling.utils.protocols import ReductionDomain

from .rank_times import RankTimes
from .reporter import Reporter, StepProfiler

if TYPE_CHECKING:
    import torch
    from torch import Tensor

logger = logging.getLogger("danling")


class TrainedSoFar(Protocol):
    """Counters of a training."""

    global_step: int
    epoch: int
    samples: int


class ReportedUpdate(Protocol):
    """What is shown of an update."""

    loss_sum: float | Tensor
    grad_norm: float | Tensor | None

    @property
    def loss(self) -> float | Tensor:
        """The mean loss, 0-dim."""


@dataclass(frozen=True)
class ReportFacts:
    """What is shown of a run, read anew each time, since it may be changed while it trains.

    Attributes:
        counters: Returns the progress.
        count_samples: Brings the count of samples up to date with what is counted on the device.
        epochs: Returns the number of epochs after which training ends, `None` in step mode.
        steps: Returns the number of updates after which training ends, `None` when it is not known.
        by_steps: Returns whether the budget counts updates instead of epochs.
        index: Returns the epoch or update that results go under.
        trained: Returns the splits that are trained on.
        learning_rates: Returns those that the update which is logged was made with.
        sums_loss: Returns whether the loss is a sum.
        flops_per_token: Returns the model's FLOPs for a token, `None` when not known.
        flops_per_sample: Returns the model's FLOPs for a sample, `None` when not known.
        ended: Returns whether the run is at its end.
        of_loaders: Returns by split what the loaders have to show; called on the main process.
        summary: Returns what is said at the end beside the speed, a line each; called on the main process.
    """

    counters: Callable[[], TrainedSoFar]
    count_samples: Callable[[], None]
    epochs: Callable[[], int | None]
    steps: Callable[[], int | None]
    by_steps: Callable[[], bool]
    index: Callable[[], int]
    trained: Callable[[], Sequence[str]]
    learning_rates: Callable[[], Sequence[float]]
    sums_loss: Callable[[], bool]
    flops_per_token: Callable[[], float | None]
    flops_per_sample: Callable[[], float | None]
    ended: Callable[[], bool]
    of_loaders: Callable[[], Mapping[str, Mapping[str, float]]] = dict
    summary: Callable[[], Sequence[str]] = tuple


class RunReport:
    """Tells a reporter of one training after the other."""

    def __init__(
        self,
        reporter: Reporter,
        facts: ReportFacts,
        *,
        domain: ReductionDomain,
        counts_samples: bool,
        device: torch.device,
    ) -> None:
        self.reporter = reporter
        self._facts = facts
        self._domain = domain
        self._counts_samples = counts_samples
        self._device = device

    def begin(
        self,
        *,
        name: str,
        peak_flops: float | None,
        countable: bool,
        seconds_between_lines: float,
        profiler: StepProfiler | None,
        description: Callable[[], Sequence[str]],
        rank_times: RankTimes | None = None,
    ) -> None:
        """Begin to report a training."""
        facts, reporter, counters = self._facts, self.reporter, self._facts.counters()
        known = (facts.flops_per_token() or facts.flops_per_sample()) is not None
        reporter.flops.begin(peak_flops, known=known, countable=countable)
        # It may have been changed since a tracker was added, which made the reporter.
        reporter.seconds_between_lines = seconds_between_lines
        reporter.begin(
            step=counters.global_step,
            samples=counters.samples,
            total_steps=facts.steps(),
            device=self._device,
            name=name,
            epoch=self._epoch(),
            profiler=profiler,
            rank_times=rank_times,
        )
        if reporter.is_main:
            for line in description():
                logger.info("%s", line)

    def log_update(self, update: ReportedUpdate) -> None:
        """Log the metrics of an update and the speed since the last line. One collective."""
        facts, counters = self._facts, self._facts.counters()
        facts.count_samples()
        self.reporter.log_update(
            counters.global_step,
            # On an accelerator a window without any weight is noticed only here.
            loss=update.loss_sum if facts.sums_loss() else update.loss,
            samples=counters.samples,
            grad_norm=update.grad_norm,
            learning_rates=facts.learning_rates(),
            epoch=self._epoch(),
            domain=self._domain,
            counts_samples=self._counts_samples,
            per_token=facts.flops_per_token,
            per_sample=facts.flops_per_sample,
            of_loaders=facts.of_loaders,
        )

    def log_result(self, result: Mapping[str, Mapping[str, float]]) -> None:
        """Log the metrics of an epoch or an evaluation."""
        facts = self._facts
        self.reporter.log_result(
            result,
            step=facts.counters().global_step,
            title=f"{'step' if facts.by_steps() else 'epoch'} {facts.index()}",
            trained=facts.trained(),
            last=facts.ended(),
            epoch=self._epoch(),
        )

    def say_ending(self, ending: str) -> None:
        """Say how the training ended, and what it did."""
        counters = self._facts.counters()
        self.reporter.log_ending(
            ending, step=counters.global_step, samples=counters.samples, summary=self._facts.summary
        )

    def _epoch(self) -> str:
        """Return what stands behind the name on the bar."""
        epochs = self._facts.epochs()
        if self._facts.by_steps():
            return ""
        return f"epoch {min(self._facts.counters().epoch + 1, epochs or 1)}/{epochs}"

"""Whether the objects in `self.metrics` are those that evaluations compute, and are updated in evaluations only."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from danling.metrics.collection import metrics_by_name
from danling.utils.messages import listed
from danling.utils.observers import Observer

if TYPE_CHECKING:
    from danling.metrics import MetricSet
    from danling.runners.torch_runner import TorchRunner

    from .session import TrainingSession

logger = logging.getLogger("danling")


class GivenMetrics:
    """The metrics that the program has set, of which those of evaluations were made."""

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner
        self._given = metrics_by_name(runner.metrics)

    def have_changed(self) -> bool:
        """Whether the program has set others since. May be called on one rank."""
        if "metrics" not in vars(self._runner):
            # A property of the program's, which may make new objects each time.
            return False
        now = metrics_by_name(self._runner.metrics)
        return self._given.keys() != now.keys() or any(
            self._given[name] is not metric for name, metric in now.items()
        )

    def check(self) -> None:
        """Refuse metrics that were set after construction: nothing would compute them. May be called on one rank."""
        if self.have_changed():
            raise ValueError(
                "Expected self.metrics as it was when the runner was constructed, which evaluations compute. Received: "
                f"{sorted(metrics_by_name(self._runner.metrics))} instead of {sorted(self._given)}, or other objects under "
                "these names. Set all metrics in __init__ or in build_dataloaders."
            )


class MetricsInTraining(Observer):
    """Warns once of objects in `self.metrics` that the program updates in training: evaluations reset them, and no checkpoint has them."""

    def __init__(self, session: TrainingSession, metrics: MetricSet, *, is_main: bool) -> None:
        self._session = session
        self._metrics = metrics
        self._is_main = is_main
        self._noted: dict[str, object] = {}
        self._named: set[str] = set()

    def training_started(self) -> None:
        self._note()

    def pass_started(self, split: str) -> None:
        self._note()

    def evaluation_started(self, split: str) -> None:
        self._check()

    def evaluation_ended(self, split: str) -> None:
        self._note()

    def save_started(self) -> None:
        self._check()

    def _note(self) -> None:
        self._noted = self._metrics.counts()

    def _check(self) -> None:
        if not self._session.running:
            return  # a loop by hand may evaluate by hand too
        now = self._metrics.counts()
        # One that the program has reset since has nothing to lose.
        changed = {
            name for name, count in now.items() if count and count != self._noted.get(name, count)
        } - self._named
        self._named |= changed
        if changed and self._is_main:
            names = listed(
                [f"self.metrics[{name!r}]" if name else "self.metrics" for name in sorted(changed)]
            )
            logger.warning(
                "%s had updates outside of an evaluation. Evaluations reset the objects in self.metrics, and no checkpoint has them. Set "
                "train_metrics for metrics of training, or keep another object in another attribute, such as self.trained, which is "
                "saved.",
                names,
            )

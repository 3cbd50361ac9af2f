"""When the learning-rate schedule of a run advances: after updates, epochs, passes or evaluations, and by which metric."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, OneCycleLR, SequentialLR

from danling.metrics.scores import infer_mode, metric_of
from danling.optim import JointScheduler, needs_metric
from danling.optim.arguments_of_step import takes_position
from danling.optim.registry import refuse_new_groups, scheduler_interval

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner

logger = logging.getLogger("danling")

Boundary = Literal["epoch", "validation", "pass", "alone"]
"""The end of an epoch, a validation of step mode, the end of a pass of step mode, or the end of an epoch that the user trains directly,
without an evaluation."""


def interval_of(runner: TorchRunner) -> str:
    """Return when the scheduler advances: `"step"`, `"epoch"` or `"validation"`."""
    # The section has no default: without it, the program sets the schedule, if there is one.
    config = runner.config
    section = config.scheduler if "scheduler" in config else {}
    return scheduler_interval(section, runner.scheduler)


def _steps_by_itself(scheduler: OneCycleLR) -> bool:
    """Return whether a class of the program has replaced what of torch's raises after the end of the cycle."""
    kind = type(scheduler)
    return kind.step is not LRScheduler.step or kind.get_lr is not OneCycleLR.get_lr


def _cycles(
    scheduler: Any, left: int, at: int | None = None
) -> Iterator[tuple[OneCycleLR, int, int]]:
    """Yield each cycle of torch's in a schedule, with its position and how often it advances.

    Args:
        scheduler: The schedule.
        left: How often the schedule advances.
        at: Its position, if that is not its `last_epoch`.
    """
    kind = type(scheduler)
    if isinstance(scheduler, OneCycleLR):
        # One whose class makes its steps in another way may go on after the end of the cycle.
        if not _steps_by_itself(scheduler):
            yield scheduler, scheduler.last_epoch if at is None else at, left
    elif isinstance(scheduler, JointScheduler):
        for part in scheduler:
            yield from _cycles(part, left)
    elif issubclass(kind, ChainedScheduler) and kind.step is ChainedScheduler.step:
        for part in scheduler._schedulers:
            yield from _cycles(part, left)
    elif issubclass(kind, SequentialLR) and kind.step is SequentialLR.step:
        now = scheduler.last_epoch
        end = now + left
        milestones = scheduler._milestones
        for part, first, next_first in zip(
            scheduler._schedulers, [0, *milestones], [*milestones, end + 1]
        ):
            last = min(end, next_first - 1)
            if now < first <= last:
                yield from _cycles(part, last - first, 0)  # reaching the milestone begins it
            elif first <= now < last:
                yield from _cycles(part, last - now)


def monitor_of(runner: TorchRunner) -> str | None:
    """Return the path of the metric that `scheduler.monitor` names."""
    return (runner.config.get("scheduler", None) or {}).get("monitor", None)


def score_path(runner: TorchRunner) -> str:
    """Return the dotted path of the score, such as `val.loss`."""
    return f"{runner.score_split}.{metric_of(runner.config.score_name, runner.score_split)}"


def mode_of_schedule(runner: TorchRunner) -> str:
    """Return which value of the metric that a schedule follows is the better one: that of the score, or by the name of another one."""
    monitor, path = monitor_of(runner), score_path(runner)
    if monitor and monitor != path:
        return infer_mode(monitor.partition(".")[2])
    mode = runner.config.score_mode
    return mode.lower() if mode else infer_mode(path.partition(".")[2])


class Schedule:
    """Advances the schedule of a run, and refuses a program that advances it too.

    Attributes:
        by_update: Whether the schedule advances after every update.

    Args:
        runner: The runner, whose present `scheduler` is advanced.
    """

    def __init__(self, runner: TorchRunner) -> None:
        self.by_update = False
        self._passes_step = False
        """Whether the schedule takes the number of the update, as those of timm do."""
        self._runner = runner
        self._at: int | None = None
        """Where the schedule was when the open window began, and where the library has moved it since; `None` if it does not say."""
        self._left: tuple[object, int, int] | None = None
        """The schedule, the number of updates and the schedule's position, when the library advanced it last."""

    def begin(self) -> None:
        """Look at the schedule that a training begins with."""
        scheduler = self._runner.scheduler
        self.by_update = scheduler is not None and interval_of(self._runner) == "step"
        self._passes_step = takes_position(scheduler)
        left = self._advances_left()
        # Those of several optimizers advance as their optimizers do: see `check_length_of`.
        by_optimizer = self.by_update and isinstance(scheduler, JointScheduler)
        if left is not None and not by_optimizer:
            self._check_length(scheduler, left)

    def _check_length(self, scheduler: Any, left: int) -> None:
        """Refuse a cycle that ends before the run, where torch would raise in the middle of the training."""
        for cycle, at, steps in _cycles(scheduler, left):
            if at + steps <= cycle.total_steps:
                continue
            received = f"total_steps={cycle.total_steps} for the {at} made and {steps} to come"
            if cycle is not scheduler:
                raise ValueError(
                    f"Expected a {type(cycle).__name__} within the {type(scheduler).__name__} that is as long as its part of the run. "
                    f"Received: {received}. Make it with total_steps={at + steps}, or more."
                )
            raise ValueError(
                f"Expected a {type(cycle).__name__} that is as long as the run. Received: {received}. Make it with "
                "total_steps=self.steps, or with self.epochs if it advances by epochs. One of torch's keeps the length of the checkpoint "
                "when a run is made longer; one that the runner builds does not: set scheduler.type='onecyclelr' instead."
            )

    def check_length_of(self, name: str, every: int) -> None:
        """Warn of a cycle of one of several optimizers that may end before the run: how often the optimizer steps is not known before.

        Args:
            name: The name of the optimizer, which is about to make its first update.
            every: How many updates of the run it makes one of.
        """
        runner, left = self._runner, self._advances_left()
        schedules = getattr(runner.scheduler, "schedules", {})
        if left is None or not self.by_update or name not in schedules:
            return
        attempted = runner.state.train.attempted
        left = (attempted + left) // every - attempted // every
        for cycle, at, steps in _cycles(schedules[name], left):
            if at + steps > cycle.total_steps and runner.is_main_process:
                logger.warning(
                    "The schedule of the optimizer %r has a %s with total_steps=%d, which raises an error after them, and has %d made and "
                    "up to %d to come. Make it with total_steps=%d. If your train_step leaves optimizing(%r) out of some updates, ignore "
                    "this.",
                    name,
                    type(cycle).__name__,
                    cycle.total_steps,
                    at,
                    steps,
                    at + steps,
                    name,
                )

    def _advances_left(self) -> int | None:
        """Return how often the schedule will advance at most before the run ends; `None` where that is not known."""
        runner, state = self._runner, self._runner.state.train
        epochs = None if runner.epochs is None else runner.epochs - state.epoch
        if not self.by_update:
            return epochs if interval_of(runner) == "epoch" else None
        if runner.steps is None or epochs is None:
            return None if runner.steps is None else runner.steps - state.global_step
        # A run that goes on with another batch size has other updates in an epoch.
        per_epoch = runner.steps // (epochs + state.epoch)
        return min(runner.steps - state.global_step, epochs * per_epoch)

    # An update

    def begin_update(self) -> None:
        """Note the position of the schedule, and refuse one that was advanced between two updates, as in an override of `step`."""
        scheduler = self._runner.scheduler
        self._at = getattr(scheduler, "last_epoch", None)
        if self._left is None or self._at is None:
            return
        known, step, at = self._left
        # A program may set a schedule back, and a restore may set it anywhere.
        if scheduler is known and self._at > at and step == self._runner.state.train.global_step:
            raise self._advanced_by("your program", at)

    def check(self, who: str) -> None:
        """Refuse a schedule that was advanced since the update began; `who` did it."""
        if (
            self._at is not None
            and getattr(self._runner.scheduler, "last_epoch", self._at) != self._at
        ):
            raise self._advanced_by(who, self._at)

    def _advanced_by(self, who: str, before: int) -> ValueError:
        """Return the error of a program that advances the schedule, which every update advances."""
        scheduler = self._runner.scheduler
        return ValueError(
            f"Expected {who} to leave the schedule to the runner, which advances it. Received: a {type(scheduler).__name__} that was "
            f"advanced {scheduler.last_epoch - before} times in an update. Remove scheduler.step(); scheduler.interval says when the "
            "runner advances it."
        )

    def advance_one(self, name: str) -> None:
        """Advance the schedule of one of several optimizers, of which an update was made."""
        scheduler = self._runner.scheduler
        if self.by_update and isinstance(scheduler, JointScheduler):
            before = scheduler.last_epoch
            scheduler.step_of(name)
            if self._at is not None:
                self._at += scheduler.last_epoch - before

    def after_update(self, *, advances: bool) -> None:
        """Advance a schedule that goes by updates, unless each of several optimizers has advanced its own. An update was made."""
        scheduler = self._runner.scheduler
        if scheduler is not None and self.by_update and advances:
            if self._passes_step:
                scheduler.step_update(self._runner.state.train.global_step)
            else:
                self._step(scheduler)
        # As `note_position` has it, without its call in every update.
        at = getattr(scheduler, "last_epoch", None)
        self._left = None if at is None else (scheduler, self._runner.state.train.global_step, at)

    def note_position(self) -> None:
        """Remember where the library leaves the schedule: only an update advances it before the next one."""
        scheduler = self._runner.scheduler
        at = getattr(scheduler, "last_epoch", None)
        self._left = None if at is None else (scheduler, self._runner.state.train.global_step, at)

    def _step(self, scheduler: Any, *arguments: float) -> None:
        try:
            scheduler.step(*arguments)
        except (ValueError, KeyError, IndexError) as error:
            refuse_new_groups(scheduler, error)
            raise

    # Epochs, passes and evaluations

    def advance(self, boundary: Boundary, metrics: Mapping[str, Mapping[str, float]]) -> None:
        """Advance a schedule that goes by epochs or evaluations, where it is due."""
        scheduler = self._runner.scheduler
        if scheduler is None or self.by_update:
            return
        # A schedule by a metric needs one: it moves where an evaluation is, never at the end of a pass alone.
        by_metric = needs_metric(scheduler)
        by_evaluation = by_metric or interval_of(self._runner) == "validation"
        boundaries = ("epoch", "validation") if by_evaluation else ("epoch", "pass", "alone")
        if boundary not in boundaries:
            return
        if by_metric:
            self._step(scheduler, self._metric(metrics))
        elif takes_position(scheduler):
            self._step(scheduler, self._runner.state.train.epoch)
        else:
            self._step(scheduler)
        self.note_position()

    def check_metrics(self, metrics: Mapping[str, Mapping[str, float]]) -> None:
        """Refuse the metrics of an evaluation without the one that the schedule follows."""
        runner = self._runner
        by_metric = (
            runner.scheduler is not None and not self.by_update and needs_metric(runner.scheduler)
        )
        if by_metric and (monitor_of(runner) or not runner.standing.own):
            self._metric(metrics)

    def _metric(self, metrics: Mapping[str, Mapping[str, float]]) -> float:
        """Return the metric that the schedule follows: the score, or what `scheduler.monitor` names."""
        runner, path, scores = self._runner, monitor_of(self._runner), self._runner.standing.scores
        # A score of the program's own may be under no name among the metrics.
        if not path and runner.index in scores:
            return scores[runner.index]
        path = path or score_path(runner)
        split, _, name = path.partition(".")
        if name not in metrics.get(split, {}):
            present = [
                f"{key}.{metric}" for key, of_split in metrics.items() for metric in of_split
            ]
            raise ValueError(
                f"Expected scheduler.monitor to name one of {present}. Received: scheduler.monitor={path!r}."
            )
        return metrics[split][name]

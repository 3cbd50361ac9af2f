"""Attaches audits to a runner: digests, recorded gradients, replays, and the programs that `audit` and `check_layout` start."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from danling.data.splits import DividedSettings
from danling.training.recompute import RunWindow
from danling.training.update import UpdateStep
from danling.utils.tensors import default_dtype, dtype_of

from .layout_check import CheckOptions, check_this_program
from .layout_record import LayoutRecorder, RecordSettings, divided_batch
from .layout_report import LayoutReport
from .replay import UpdateReplay, check_replay
from .rerun import audit_runner
from .update_audit import Until, UpdateAudit

if TYPE_CHECKING:
    from danling.runners.base_runner import BaseRunner
    from danling.runners.torch_runner import TorchRunner

__all__ = ["Audits", "audit_runner", "check_layout", "divide_for_check"]


def divide_for_check(runner: BaseRunner) -> DividedSettings:
    """Prepare this process for a check of layouts, before a model is built, and return how it divides updates.

    Args:
        runner: The runner, in construction, with `audit.gradients.dir` set.
    """
    config, section = runner.config, runner.config.audit.gradients
    if section.dtype is not None:
        # What the forward creates has to be of this dtype as well.
        runner._closers.enter_context(default_dtype(dtype_of(section.dtype)))
    if config.seed is None:
        config.seed = 0
    return lambda settings, divides_itself: divided_batch(
        settings,
        accum_steps=int(config.accum_steps),
        samples=section.samples,
        replicas=int(section.replicas),
        alone=section.weights is None,
        divides_itself=divides_itself,
    )


def check_layout(runner: TorchRunner, layout: str, **options: Any) -> LayoutReport:
    """Check a layout; see `TorchRunner.check_layout`. In a program that records its updates, train and end."""
    if runner.config.audit.gradients.dir is not None:
        runner.train()
        raise SystemExit(0)  # with fewer updates than are wanted
    return check_this_program(layout, CheckOptions(**options), runner.world)


class Audits:
    """Makes what `config.audit` asks for, and puts it into what makes updates.

    Args:
        runner: The runner.
    """

    def __init__(self, runner: TorchRunner) -> None:
        self.runner = runner

    def check(self) -> None:
        """Refuse settings that contradict those of the run; see `check_replay`."""
        check_replay(self.runner)

    @cached_property
    def updates(self) -> UpdateAudit | None:
        """What digests updates and compares replicas; `None` unless that is configured."""
        every = self.runner.config.audit.digest_interval
        return None if every is None else UpdateAudit(self.runner, every)

    @cached_property
    def recorder(self) -> LayoutRecorder | None:
        """What records the first updates; `None` unless a check of layouts has asked for them."""
        settings = RecordSettings.of(self.runner.config.audit.gradients, self.runner.config.precision)
        return None if settings is None else LayoutRecorder(settings, self.runner)

    def see_updates(self, update: UpdateStep) -> None:
        """Let what closes windows tell of each update.

        Args:
            update: What closes windows.
        """
        runner, target = self.runner, self.runner.config.audit.until
        observers = runner.observers
        if self.recorder is not None:
            observers.append(self.recorder)
            update.recorder = self.recorder
        if self.updates is not None:
            observers.append(self.updates)
            update.sync.riders.append(self.updates)
        if target is not None:
            observers.append(Until(runner, target))

    def around(self, run_window: RunWindow) -> RunWindow:
        """Return what runs the micro-batches of an update, and runs them again where that is asked for."""
        if self.runner.config.audit.replay_interval is None:
            return run_window
        return UpdateReplay(self.runner, run_window, self.runner._parts.recompute).run

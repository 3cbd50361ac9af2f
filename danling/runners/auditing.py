"""What checks the updates of a torch runner while they are made, where a run asks for it: digests, gradients that are kept, replays."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from danling.audit.layout_record import LayoutRecorder, RecordSettings
from danling.audit.replay import UpdateReplay
from danling.audit.update_audit import Until, UpdateAudit
from danling.training.micro_batches import Forwards, MicroBatches
from danling.training.update import UpdateStep

if TYPE_CHECKING:
    from .assembly import TorchParts
    from .torch_runner import TorchRunner


class AuditParts:
    """Makes what `config.audit` asks for, and puts it into what makes updates.

    Args:
        runner: The runner.
        parts: Its parts.
    """

    def __init__(self, runner: TorchRunner, parts: TorchParts) -> None:
        self.runner = runner
        self._parts = parts

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
        update.audit, update.recorder = self.updates, self.recorder
        if self.updates is not None:
            update.sync.riders.append(self.updates)
        if target is not None:
            update.audit = Until(runner, target, self.updates)

    def see_samples(self, micro_batches: MicroBatches) -> None:
        """Let what runs single micro-batches tell of their samples.

        Args:
            micro_batches: What runs them.
        """
        micro_batches.audit, micro_batches.recorder = self.updates, self.recorder

    def around(self, forwards: Forwards) -> Forwards:
        """Return what runs the micro-batches of an update, as one that can be made again where that is asked for.

        Args:
            forwards: What runs them.
        """
        if self.runner.config.audit.replay_interval is None:
            return forwards
        return UpdateReplay(self.runner, forwards, self._parts.recompute)

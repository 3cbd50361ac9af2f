"""What checks the updates of a torch runner while they are made, where a run asks for it: digests, gradients that are kept, replays."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from danling.audit.data_files import data_files
from danling.audit.environment import write_environment
from danling.audit.inventory import entries
from danling.audit.layout_record import LayoutRecorder, RecordSettings
from danling.audit.record import DigestFile, DigestLine
from danling.audit.replay import UpdateReplay
from danling.audit.replayed import ReplayedAudit, ReplayedForwards, SeenSamples
from danling.audit.until import Until
from danling.audit.update_audit import UpdateAudit
from danling.config.imposed import end_after
from danling.training.micro_batches import Forwards, MicroBatches
from danling.training.update import UpdateStep
from danling.utils.names import canonical_name

from .replaying import build_replay

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
    def replay(self) -> UpdateReplay | None:
        """What makes updates again and compares them; `None` unless that is configured."""
        return build_replay(self.runner, self._parts) if self.runner.config.audit.replay_interval is not None else None

    @cached_property
    def updates(self) -> UpdateAudit | None:
        """What digests updates and compares replicas; `None` unless that is configured."""
        runner = self.runner
        every = runner.config.audit.digest_interval
        if every is None:
            return None
        placement = runner.placement
        return UpdateAudit(
            every=every,
            entries=lambda: entries(
                named_parameters=runner.named_parameters(),
                optimizer=runner.optimizer,
                averages=runner.ema.weights if runner.ema is not None else {},
                buffers=self._named_buffers(),
            ),
            part_of=runner.preparation.held_part,
            domain=placement.optimizer,
            device=runner.device,
            step=lambda: runner.state.train.global_step,
            counts_samples=placement.counts_samples,
            write=self._write_digests,
        )

    @cached_property
    def recorder(self) -> LayoutRecorder | None:
        """What records the first updates; `None` unless a check of layouts has asked for them."""
        settings = RecordSettings.of(self.runner.config.audit.gradients, self.runner.config.precision)
        return None if settings is None else LayoutRecorder(settings, self.runner)

    def _named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        criterion = self.runner.criterion
        for name, buffer in self.runner.unwrapped_model.named_buffers():
            yield canonical_name(name), buffer
        for name, buffer in criterion.named_buffers() if isinstance(criterion, nn.Module) else ():
            yield f"criterion.{name}", buffer

    def _write_digests(self, line: DigestLine) -> None:
        self._digest_file.write(line)

    @cached_property
    def _digest_file(self) -> DigestFile:
        assert self.updates is not None
        write_environment(self.runner.workspace.metadata_dir, data_files(self._data()))
        file = DigestFile(self.runner.workspace.digests_file, resume_step=self.updates.began_at)
        self.runner._closers.callback(file.close)
        return file

    def _data(self) -> Iterator[object]:
        """Yield what may name files of data: the data sets, and paths in the user's own settings."""
        runner = self.runner
        yield from runner.datasets.values()
        yield from (getattr(loader, "dataset", None) for loader in runner.dataloaders.values())
        usual = runner.config.completed({}).keys() - {"pretrained"}
        yield {name: value for name, value in runner.config.plain().items() if name not in usual}

    # Where it is put

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
            until = Until(
                target, at=lambda: runner.saver.at, session=runner._session, ended=end_after, inner=self.updates
            )
            runner.saver.saved.append(until.saved)
            update.audit = until
        if self.replay is not None:
            update.audit = ReplayedAudit(self.replay, update.audit)
            update.judge = partial(self.replay.judged, update.judge)

    def see_samples(self, micro_batches: MicroBatches) -> None:
        """Let what runs single micro-batches tell of their samples.

        Args:
            micro_batches: What runs them.
        """
        micro_batches.audit, micro_batches.recorder = self.updates, self.recorder
        if self.replay is not None:
            micro_batches.audit = SeenSamples(self.replay.witness, self.updates)

    def around(self, forwards: Forwards) -> Forwards:
        """Return what runs the micro-batches of an update, as one that can be made again where that is asked for.

        Args:
            forwards: What runs them.
        """
        return forwards if self.replay is None else ReplayedForwards(forwards, self.replay)

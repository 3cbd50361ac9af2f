"""Each replica group's own position in its data, saved with every full checkpoint, which another group may write."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from danling.checkpoints import CheckpointSettings, FileCheckpointManager
from danling.checkpoints.manifest import is_history
from danling.checkpoints.torch_files import FORMAT_VERSION
from danling.config import RunnerConfig
from danling.training.run_state import loader_states, share_of_rank

if TYPE_CHECKING:
    from danling.runners.base_runner import BaseRunner


def position_owner(config: RunnerConfig) -> str | None:
    """Return the name of the replica group that saves its own position: each one does; `None` without groups."""
    settings, ft = config.checkpoint, config.ft
    if (ft.enabled or settings.enable_ft_dataloader_checkpoints) and settings.ft_replica_id is not None:
        return str(settings.ft_replica_id)
    return str(ft.replica_id) if ft.enabled else None


class OwnPositions:
    """The loader states of one replica group, as file checkpoints by global step that are kept as long as full ones.

    They are in `{checkpoints}/{checkpoint.ft_dataloader_checkpoint_prefix}-{replica}/`. Call every method on all ranks of the group.
    """

    def __init__(self, runner: BaseRunner, replica: str) -> None:
        settings = runner.config.checkpoint
        self._runner = runner
        self.manager = FileCheckpointManager(
            runner.workspace.checkpoints / f"{settings.ft_dataloader_checkpoint_prefix}-{replica}",
            domain=runner.world,
            run_id=runner.id,
            # They are small, and a position that is written later than the weights would be of no use.
            settings=replace(CheckpointSettings.from_config(settings), async_mode="disabled"),
            step_mode=True,
        )

    def save(self) -> None:
        """Save the loader states that belong to the state that is saved next."""
        runner, train = self._runner, self._runner.state.train
        sources = runner._data.trained_sources()
        payload = {
            "format_version": FORMAT_VERSION,
            "dataloaders": loader_states(runner, sources, read_only=False),
            "global_step": train.global_step,
        }
        self.manager.save_checkpoint(payload, epoch=train.epoch, global_step=train.global_step, history=True)

    def load(self) -> None:
        """Restore the position that this group saved last, at or before the step of the run.

        A position that belongs to an earlier step than the weights is taken only for loaders that keep their own state on each
        rank: groups whose common position differed would end their passes at different updates.
        """
        runner, step = self._runner, self._runner.state.train.global_step
        name = self.manager.on_main(lambda: self._newest(step))
        if name is None:
            return
        payload = self.manager.load_checkpoint(name)
        self.manager.begin(name)
        for split, source in runner.sources.items():
            skipped = runner.run_state.excluded.leaves_out(f"dataloaders.{split}")
            if split not in payload["dataloaders"] or skipped:
                continue
            if source.is_rank_local or payload["global_step"] == step:
                own = share_of_rank(runner, split, payload["dataloaders"][split])
                if own is not None:
                    source.load_state_dict(own)

    def _newest(self, step: int) -> str | None:
        records = self.manager.store.records(complete=True)
        fitting = [record for record in records if is_history(record.name) and record.step <= step]
        newest = max(fitting, key=lambda record: (record.step, record.sequence), default=None)
        return newest.name if newest is not None else None

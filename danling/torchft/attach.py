"""Attaches TorchFT to a runner: its processes join the replica groups, and each group saves its position in the data."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from danling.checkpoints import CheckpointSettings, FileCheckpointManager
from danling.checkpoints.manifest import is_history
from danling.checkpoints.torch_files import FORMAT_VERSION
from danling.config import RunnerConfig
from danling.mesh.axes import axes_with
from danling.training.run_state import loader_states, share_of_rank

from .member import ReplicaMember as ReplicaMember
from .member import position_owner

if TYPE_CHECKING:
    from contextlib import ExitStack

    from danling.data.run_data import RunData
    from danling.runners.base_runner import BaseRunner


def check_config(config: RunnerConfig, stack: str) -> None:
    """Refuse a configuration with replica groups whose layout they do not support."""
    ft = config.ft
    if not ft.enabled:
        return
    shared = axes_with(reads_data=True)
    axes = {} if stack == "ddp" else dict(config.parallel.axes.items())
    others = {name: size for name, size in axes.items() if name not in shared and size != 1}
    if stack not in ("ddp", "parallel") or others:
        listed = ", ".join(
            [f"stack={stack!r}", *(f"parallel.axes.{name}={size}" for name, size in others.items())]
        )
        raise ValueError(
            f"Expected ft.enabled with stack 'ddp', or with stack 'parallel' and no axes but {' and '.join(shared)}. Received: "
            f"{listed}. Change the layout, or unset ft.enabled."
        )
    if ft.replica_id >= ft.group_size:
        raise ValueError(
            f"Expected 0 <= ft.replica_id < ft.group_size. Received: ft.replica_id={ft.replica_id}, ft.group_size={ft.group_size}. "
            "Set ft.group_size to the number of replica groups, the same for all of them."
        )


def keep_own_positions(runner: BaseRunner, data: RunData, closers: ExitStack) -> None:
    """Save the loader states of a replica group with every checkpoint, and resume from them. Called on all ranks of the group."""
    if position_owner(runner.config) is not None:
        positions = OwnPositions(runner, data)
        closers.callback(positions.manager.close)
        runner.saver.before.append(positions.save)
        runner.saver.loaded.append(positions.load)


class OwnPositions:
    """The loader states of one replica group, as file checkpoints by global step that are kept as long as full ones.

    They are in `{checkpoints}/{checkpoint.ft_dataloader_checkpoint_prefix}-{replica}/`. Call every method on all ranks of the group.
    """

    def __init__(self, runner: BaseRunner, data: RunData) -> None:
        settings, replica = runner.config.checkpoint, position_owner(runner.config)
        self._runner = runner
        self._data = data
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
        sources = self._data.trained_sources()
        payload = {
            "format_version": FORMAT_VERSION,
            "dataloaders": loader_states(
                runner, sources, self._data.named_changes, read_only=False
            ),
            "global_step": train.global_step,
        }
        self.manager.save_checkpoint(
            payload, epoch=train.epoch, global_step=train.global_step, history=True
        )

    def load(self) -> None:
        """Restore the position that this group saved last, at or before the step of the run.

        A position that belongs to an earlier step than the weights is taken only for loaders that keep their own state on each
        rank: groups whose common position differed would end their passes at different updates.
        """
        runner, step = self._runner, self._runner.state.train.global_step
        # One rank looks, so that all of the group load the same position.
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

"""Attaches TorchFT to a runner: its processes join the replica groups, and each group saves its position in the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from danling.checkpoints import CheckpointSettings
from danling.config import RunnerConfig
from danling.mesh.axes import axes_with
from danling.training.reduction import normalization_statistics

from .groups import ReplicaGroups
from .healing import Healing
from .loader_checkpoints import OwnPositions, ReplicaLoaderCheckpoints
from .member import ReplicaMember
from .settings import ReplicaSettings, check_layout, position_owner

if TYPE_CHECKING:
    from danling.runners.base_runner import BaseRunner
    from danling.runners.torch_runner import TorchRunner


def check_config(config: RunnerConfig, stack: str) -> None:
    """Refuse a configuration with replica groups whose layout they do not support.

    Args:
        config: The configuration.
        stack: Name of the stack.

    Raises:
        ValueError: If `ft.enabled` with a stack other than `ddp` and `parallel`, with an axis other than `replicate` and `shard`, or with
            a `ft.replica_id` outside the groups.
    """
    if config.ft.enabled:
        axes = {} if stack == "ddp" else dict(config.parallel.axes.items())
        shared = axes_with(reads_data=True)
        check_layout(stack, axes, shared=shared, replica_id=config.ft.replica_id, group_size=config.ft.group_size)


def join_replica_groups(runner: TorchRunner, *, remember: Callable[[], Callable[[], None]]) -> ReplicaMember:
    """Return this process's replica group as a member of those that train the run together.

    Args:
        runner: The runner.
        remember: Returns what takes the micro-batches of the next update back.
    """
    healing = Healing(
        run_state=runner.run_state,
        counters=lambda: runner.state,
        sources=lambda: runner.sources.among(runner.train_splits),
        keeps_positions=lambda: position_owner(runner.config) is not None,
        model=lambda: runner.unwrapped_model,
        named_parameters=lambda: runner.named_parameters(),
        window=lambda: runner.window,
        meters=lambda: runner.meters,
        is_main=runner.is_main_process,
    )
    groups = ReplicaGroups(
        ReplicaSettings.from_config(runner.config),
        group=runner.world,
        state_dict=lambda: healing.state(),
        load_state_dict=lambda state: healing.take(state),
        asked_to_stop=runner._session.asked_to_stop,
    )
    train = runner.state.train
    return ReplicaMember(
        groups,
        healing,
        world=runner.world,
        copies=lambda: runner.preparation.copies(
            runner.model, runner.ema.weights.values() if runner.ema is not None else ()
        ),
        remember=remember,
        statistics=lambda: normalization_statistics(runner.unwrapped_model),
        resumes=lambda: bool(runner.config.auto_resume),
        checkpoints=lambda: runner.checkpoint_manager,
        directory=lambda: runner.workspace.checkpoints,
        step=lambda: train.global_step,
        tried=lambda: train.global_step + train.skipped_updates,
        load=lambda source: runner.load_checkpoint(source),
    )


def keep_own_positions(runner: BaseRunner) -> None:
    """Save the loader states of a replica group with every checkpoint, and resume from them. Called on all ranks of the group.

    Args:
        runner: The runner.
    """
    replica, settings = position_owner(runner.config), runner.config.checkpoint
    if replica is None:
        return
    checkpoints = ReplicaLoaderCheckpoints(
        runner.workspace.checkpoints,
        replica=replica,
        prefix=settings.ft_dataloader_checkpoint_prefix,
        domain=runner.world,
        run_id=runner.id,
        settings=CheckpointSettings.from_config(settings),
    )
    runner._closers.callback(checkpoints.close)
    positions = OwnPositions(
        checkpoints,
        sources=lambda: runner.sources,
        trained=lambda: runner.sources.among(runner.train_splits),
        position=lambda: runner.state.train,
        share=runner._positions().share,
        leaves_out=lambda split: runner.run_state.excluded.leaves_out(f"dataloaders.{split}"),
        world=runner.world,
        data_rank=lambda: runner.data_domain.rank,
    )
    runner.saver.before.append(positions.save)
    runner.saver.loaded.append(positions.load)

"""Attaches TorchFT to a runner: its processes join the replica groups, and each group saves its position in the data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from danling.config import RunnerConfig
from danling.mesh.axes import axes_with

from .member import ReplicaMember as ReplicaMember
from .positions import OwnPositions, position_owner

if TYPE_CHECKING:
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
        listed = ", ".join([f"stack={stack!r}", *(f"parallel.axes.{name}={size}" for name, size in others.items())])
        raise ValueError(
            f"Expected ft.enabled with stack 'ddp', or with stack 'parallel' and no axes but {' and '.join(shared)}. Received: "
            f"{listed}. Change the layout, or unset ft.enabled."
        )
    if ft.replica_id >= ft.group_size:
        raise ValueError(
            f"Expected 0 <= ft.replica_id < ft.group_size. Received: ft.replica_id={ft.replica_id}, ft.group_size={ft.group_size}. "
            "Set ft.group_size to the number of replica groups, the same for all of them."
        )


def keep_own_positions(runner: BaseRunner) -> None:
    """Save the loader states of a replica group with every checkpoint, and resume from them. Called on all ranks of the group."""
    replica = position_owner(runner.config)
    if replica is not None:
        positions = OwnPositions(runner, replica)
        runner._closers.callback(positions.manager.close)
        runner.saver.before.append(positions.save)
        runner.saver.loaded.append(positions.load)

"""Where a replica group stands among the others, and the layouts in which groups can be."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from danling.config import RunnerConfig


@dataclass(frozen=True)
class ReplicaSettings:
    """Where this group stands among the replica groups.

    Attributes:
        replica_id: This group, from 0.
        group_size: Number of groups when all are there.
        min_replica_size: Groups that an update needs.
        process_group: Backend between the groups: `"gloo"` or `"nccl"`.
        timeout: Seconds that a collective between the groups, and the transfer of a state, may take.
        quorum_timeout: Seconds to wait for the other groups before an update.
        max_failures: Updates in a row that may fail to be committed; `None` for any number.
    """

    replica_id: int = 0
    group_size: int = 1
    min_replica_size: int = 1
    process_group: str = "gloo"
    timeout: float = 10.0
    quorum_timeout: float = 60.0
    max_failures: int | None = 100

    @classmethod
    def from_config(cls, config: RunnerConfig) -> ReplicaSettings:
        """Return what `config.ft`, `config.comm` and `config.max_skipped_updates` say."""
        ft = config.ft
        timeout = ft.process_group_timeout_ms / 1000
        return cls(
            replica_id=ft.replica_id,
            group_size=ft.group_size,
            min_replica_size=ft.min_replica_size,
            process_group=ft.process_group,
            timeout=timeout,
            # The other groups may be evaluating or saving.
            quorum_timeout=max(timeout, config.comm.train_timeout_seconds or 60.0),
            max_failures=config.max_skipped_updates,
        )


def position_owner(config: RunnerConfig) -> str | None:
    """Return the replica group that saves its own place in the data beside full checkpoints: each one does; `None` without groups.

    Args:
        config: Configuration of the run.
    """
    settings, ft = config.checkpoint, config.ft
    if not (ft.enabled or settings.enable_ft_dataloader_checkpoints):
        return None
    if settings.ft_replica_id is not None:
        return str(settings.ft_replica_id)
    return str(ft.replica_id) if ft.enabled else None


def check_layout(
    stack: str, axes: Mapping[str, int], *, shared: Collection[str], replica_id: int, group_size: int
) -> None:
    """Refuse a layout that replica groups do not support, and a `replica_id` outside the groups.

    Args:
        stack: Name of the stack.
        axes: Degrees of its mesh by axis; empty without one.
        shared: Axes along which ranks read different samples, over which a gradient can be summed group by group.
        replica_id: The group of this process.
        group_size: Number of groups.

    Raises:
        ValueError: If the stack is neither `ddp` nor `parallel`, another axis is used, or `replica_id` is not one of the groups.
    """
    others = {name: size for name, size in axes.items() if name not in shared and size != 1}
    if stack not in ("ddp", "parallel") or others:
        listed = ", ".join(f"parallel.axes.{name}={size}" for name, size in others.items())
        raise ValueError(
            f"Expected ft.enabled with stack 'ddp', or with stack 'parallel' and no axes but {' and '.join(shared)}. Received: "
            f"stack={stack!r}{', ' if listed else ''}{listed}. Change the layout, or unset ft.enabled."
        )
    if replica_id >= group_size:
        raise ValueError(
            f"Expected 0 <= ft.replica_id < ft.group_size. Received: ft.replica_id={replica_id}, ft.group_size={group_size}. "
            "Set ft.group_size to the number of replica groups, the same for all of them."
        )

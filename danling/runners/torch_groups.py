"""Where a torch runner stands among replica groups that die and come back: its group, its share of the data, its streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from danling.checkpoints import CheckpointSettings
from danling.config import RunnerConfig
from danling.data import derive_seed
from danling.mesh import axes_with
from danling.torchft import ReplicaGroups, ReplicaLoaderCheckpoints, ReplicaSettings
from danling.utils.locks import FileLock

from .torch_evaluation import TorchEvaluation


class TorchGroups(TorchEvaluation):
    """Joins one replica group, of one rank or several, to the others; without `ft.enabled` nothing of it is used."""

    def __init__(self, config: RunnerConfig | Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self.fault_tolerance: ReplicaGroups | None = None
        self.replica_loaders: ReplicaLoaderCheckpoints | None = None
        self._writer: FileLock | None = None

    def adopt_config(self, config: RunnerConfig | Mapping[str, Any] | None) -> RunnerConfig:
        """Return a validated copy of `config`.

        Called on all ranks.

        Args:
            config: What the user passed.

        Raises:
            ValueError: If `ft.enabled` with a stack other than `ddp` and `parallel`, or with an axis other than `replicate` and `shard`,
                or the place among the groups is wrong.
        """
        own = super().adopt_config(config)
        if own.ft.enabled:
            self._check_replica_layout(own)
        return own

    def _check_replica_layout(self, config: RunnerConfig) -> None:
        ft = config.ft
        axes = {} if self.stack == "ddp" else dict(config.parallel.axes.items())
        others = {name: size for name, size in axes.items() if name not in axes_with(reads_data=True) and size != 1}
        if self.stack not in ("ddp", "parallel") or others:
            shared = " and ".join(axes_with(reads_data=True))
            listed = ", ".join(f"parallel.axes.{name}={size}" for name, size in others.items())
            raise ValueError(
                f"Expected ft.enabled with stack 'ddp', or with stack 'parallel' and no axes but {shared}. Received: "
                f"stack={self.stack!r}{', ' if listed else ''}{listed}. Change the layout, or unset ft.enabled."
            )
        if ft.replica_id >= ft.group_size:
            raise ValueError(
                f"Expected 0 <= ft.replica_id < ft.group_size. Received: ft.replica_id={ft.replica_id}, ft.group_size={ft.group_size}. "
                "Set ft.group_size to the number of replica groups, the same for all of them."
            )

    def replica_settings(self) -> ReplicaSettings:
        """Return where this group stands among the others.

        No communication: may be called on one rank.
        """
        ft = self.config.ft
        timeout = ft.process_group_timeout_ms / 1000
        return ReplicaSettings(
            replica_id=ft.replica_id,
            group_size=ft.group_size,
            min_replica_size=ft.min_replica_size,
            process_group=ft.process_group,
            timeout=timeout,
            # The other groups may be evaluating or saving.
            quorum_timeout=max(timeout, self.config.comm.train_timeout_seconds or 60.0),
            max_failures=self.config.max_skipped_updates,
        )

    def set_seed(self) -> None:
        """Seed as usual; without `seed`, all replica groups derive the same one from the configuration.

        Called on all ranks.
        """
        if self.config.ft.enabled and self.config.seed is None:
            # They must read one order of samples, and cannot speak to each other yet.
            self.config.seed = derive_seed("replica groups", self.config_id) % 2**31
        super().set_seed()

    @property
    def workspace_part(self) -> str | None:
        """A directory for each replica group: logs and figures of several processes must not meet in one file."""
        ft = self.config.ft
        return f"{self.config.checkpoint.ft_dataloader_checkpoint_prefix}-{ft.replica_id}" if ft.enabled else None

    def init_checkpoint_manager(self) -> None:
        """Build the manager of full checkpoints, and that of this group's loaders when it is asked for. Call on all ranks."""
        settings, directory = self.config.checkpoint, self.workspace.checkpoints
        if self.fault_tolerance is not None:
            # Groups that do not share the directory each have a right of their own, and each write.
            self._writer = FileLock(directory / "writer.lock")
            # Before the manager is made: closers run from the last to the first, and it is given back when all is written.
            self._closers.callback(self._writer.release)
        super().init_checkpoint_manager()
        named = settings.ft_replica_id is not None or self.config.ft.enabled
        if settings.enable_ft_dataloader_checkpoints and named:
            own = settings.ft_replica_id if settings.ft_replica_id is not None else self.config.ft.replica_id
            self.replica_loaders = ReplicaLoaderCheckpoints(
                directory,
                replica=str(own),
                prefix=settings.ft_dataloader_checkpoint_prefix,
                domain=self.world,
                run_id=self.id,
                settings=CheckpointSettings.from_config(settings),
            )
            self._closers.callback(self.replica_loaders.close)

    # Data and streams over the groups

    @property
    def data_replicas(self) -> int:
        """Number of ranks that read different samples to train on, over all replica groups."""
        return super().data_replicas * self._num_groups

    @property
    def _num_groups(self) -> int:
        return self.config.ft.group_size if self.config.ft.enabled else 1

    def data_place(self, split: str) -> tuple[int, int]:
        """Return which share of a split this rank reads, and how many there are.

        No communication: may be called on one rank.

        Training data is divided over all groups; each group evaluates all of a split, so that no death makes a figure wrong.

        Args:
            split: The split.
        """
        rank, size = super().data_place(split)
        ft = self.config.ft
        if not ft.enabled or self.mode != "train" or split not in self.train_splits:
            return rank, size
        return ft.replica_id * size + rank, ft.group_size * size

    @property
    def stream_place(self) -> tuple[int, int]:
        """Index and number of the random streams of a forward, over all replica groups."""
        index, number = self.placement.rng_stream
        ft = self.config.ft
        return (ft.replica_id * number + index, ft.group_size * number) if ft.enabled else (index, number)

"""One replica group as a member of the groups that train a run together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from danling.distributed import Domain
from danling.training.reduction import GradientReduction
from danling.training.run_state import StatePart
from danling.utils.locks import FileLock

from .healing import Healing
from .update import Quorum, ReplicatedReduction, ReplicatedUpdate

Totals = dict[str, tuple[float, float]]
"""Sums and weights by name."""


class Groups(Quorum, Protocol):
    """The replica groups; `ReplicaGroups` is the real one."""

    @property
    def num_participants(self) -> int:
        """Groups that take part in the open update, or took part in the last one; 0 before the first."""

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the counts of a checkpoint."""

    def sum_totals(self, totals: Mapping[str, tuple[float, float]]) -> Totals:
        """Add sums and weights by name over the groups that took part in the last update."""

    def leave(self) -> None:
        """Leave the other groups."""


class Checkpoints(Protocol):
    """The full checkpoints of the run, which all groups share; see `danling.checkpoints.CheckpointManager`."""

    def find_latest(self) -> Path | None:
        """Return the newest checkpoint."""

    def step_of(self, source: Path) -> int:
        """Return the updates that a checkpoint has seen."""

    def begin(self, source: Path) -> None:
        """Go on from a checkpoint."""


class ReplicaMember:
    """Agrees on updates with the other replica groups, heals, and shares one set of checkpoints with them.

    It is built only with `ft.enabled`. Call every method on all ranks of the group.

    Args:
        groups: Communicates with the other groups.
        healing: Takes over the state of another group.
        world: All ranks of this group.
        copies: Returns the tensors of which every rank of this group has a copy, in the same order on all ranks.
        remember: Returns a function that undoes the micro-batches of the next update.
        statistics: Returns the running means and variances of normalisation, which every forward changes.
        resumes: Returns whether this group may resume from a checkpoint that another group wrote.
        checkpoints: Returns the manager of the full checkpoints.
        directory: Returns where they lie.
        step: Returns how many updates were committed.
        tried: Returns how many were committed or skipped.
        load: Restores a full checkpoint.
    """

    def __init__(
        self,
        groups: Groups,
        healing: Healing,
        *,
        world: Domain,
        copies: Callable[[], Iterable[Tensor]],
        remember: Callable[[], Callable[[], None]],
        statistics: Callable[[], Sequence[Tensor]],
        resumes: Callable[[], bool],
        checkpoints: Callable[[], Any],
        directory: Callable[[], Path],
        step: Callable[[], int],
        tried: Callable[[], int],
        load: Callable[[Path], None],
    ) -> None:
        self.groups = groups
        self.healing = healing
        self.update = ReplicatedUpdate(
            groups,
            remember=remember,
            statistics=statistics,
            begin_alike=self._begin_alike,
            catch_up=self._catch_up,
        )
        self._world = world
        self._copies = copies
        self._resumes = resumes
        self._checkpoints = checkpoints
        self._directory = directory
        self._step = step
        self._tried = tried
        self._load = load
        self._writer: FileLock | None = None

    # One update

    def begin_training(self) -> None:
        """Forget an update that an earlier training has left open."""
        self.update.is_open = False

    def open_update(self) -> bool:
        """Agree on the next update, once, before its forward; see `ReplicatedUpdate.open`."""
        return self.update.open()

    def around(self, reduction: GradientReduction) -> ReplicatedReduction:
        """Return the reduction of this group's stack, extended by the sum over the groups."""
        return self.update.around(reduction)

    def _begin_alike(self, healed: bool) -> bool:
        # At step 0 TorchFT lets each rank copy weights from any group, so ranks of one group may copy from different ones.
        if not any(self._world.gather_objects(healed)):
            return False
        with torch.no_grad():
            for tensor in self._copies():
                self._world.broadcast(tensor)
        return True

    def _catch_up(self) -> bool:
        """Load a checkpoint that the others have written since this process started, if none of them is there when it joins."""
        if not self._resumes() or self.groups.num_participants > 1:
            return False
        manager: Checkpoints = self._checkpoints()
        source = manager.find_latest()
        if source is None or manager.step_of(source) <= self._step():
            return False
        self._load(source)
        return True

    def sum_totals(self, totals: Totals) -> Totals:
        """Add sums and weights by name over the groups that take part.

        Args:
            totals: Those of this group.
        """
        if not self.groups.num_participants:
            return totals
        # All ranks of the group use rank 0's result, since they may meet different errors.
        shared: Totals = self._world.broadcast_object(self.groups.sum_totals(totals))
        return shared

    # Checkpoints

    def progress_part(self) -> StatePart:
        """Return what a checkpoint of the run holds of the groups: how many updates they have made."""
        return StatePart(
            "replicas",
            lambda: self.groups.state_dict(),
            lambda state, _: self.groups.load_state_dict(state),
            default=self._fresh_counts,
        )

    def _fresh_counts(self) -> dict[str, int]:
        # A run whose checkpoint was made without groups counts from there: at 0 all groups would copy the state of one of them.
        tried = self._tried()
        return {"step": tried, "batches_committed": tried}

    def writes(self) -> bool:
        """Whether this group writes the full checkpoints: one of the participating groups does, until it fails."""
        held, mine = self._world.on_first(self._acquire)
        if mine and not held:
            # Continue the history of saves of the group that wrote before.
            manager: Checkpoints = self._checkpoints()
            source = manager.find_latest()
            if source is not None:
                manager.begin(source)
        return mine

    def _acquire(self) -> tuple[bool, bool]:
        if self._writer is None:
            # Groups that do not share the directory each have a lock of their own, and each write.
            self._writer = FileLock(self._directory() / "writer.lock")
        return self._writer.held, self._writer.acquire()

    # Leaving

    def leave(self) -> None:
        """Leave the other groups, which continue without this one; the next update joins them again."""
        self.groups.leave()

    def close(self) -> None:
        """Release the lock for writing, and leave the other groups. A second call does nothing."""
        if self._writer is not None:
            self._writer.release()
        self.leave()

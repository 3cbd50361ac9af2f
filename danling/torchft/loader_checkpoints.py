"""Checkpoints of a run that trains in replica groups: one of them writes, and each keeps its own position in the data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from danling.checkpoints import CheckpointSettings, FileCheckpointManager
from danling.checkpoints.policy import is_history
from danling.checkpoints.torch_files import FORMAT_VERSION
from danling.data import BatchSource
from danling.training import loader_states
from danling.utils.protocols import ReductionDomain

logger = logging.getLogger("danling")


class ReplicaLoaderCheckpoints:
    """The loader states of one replica group, saved beside the full checkpoints that another group may write.

    They lie in `{directory}/{prefix}-{replica}/` as file checkpoints by global step, and are kept as long as full ones. Every method
    is called on all ranks of the group.

    Args:
        directory: Where the full checkpoints of the run lie.
        replica: Name of the group.
        prefix: What stands before it.
        domain: All ranks of the group.
        run_id: Identity of the run.
        settings: Policy of the full checkpoints.
    """

    def __init__(
        self,
        directory: Path,
        *,
        replica: str,
        prefix: str,
        domain: ReductionDomain,
        run_id: str,
        settings: CheckpointSettings,
    ) -> None:
        self.manager = FileCheckpointManager(
            directory / f"{prefix}-{replica}",
            domain=domain,
            run_id=run_id,
            # They are small, and a position that is written later than the weights would be of no use.
            settings=replace(settings, async_mode="disabled"),
            step_mode=True,
        )

    def save(self, states: Mapping[str, object], *, epoch: int, global_step: int) -> None:
        """Save the loader states that belong to a global step.

        Args:
            states: By split.
            epoch: Completed epochs.
            global_step: Committed updates.

        Raises:
            CheckpointError: If they could not be written.
        """
        payload = {"format_version": FORMAT_VERSION, "dataloaders": dict(states), "global_step": global_step}
        self.manager.save_checkpoint(payload, epoch=epoch, global_step=global_step, history=True)

    def load(self, global_step: int) -> tuple[dict[str, Any], int] | None:
        """Return the newest loader states that are not ahead of a global step, with their own step; `None` when there are none.

        Saves go on from there.

        Args:
            global_step: Committed updates of the full checkpoint that was loaded.

        Raises:
            CheckpointDamaged: If a file is not what was written.
        """
        name = self.manager.on_main(lambda: self._newest(global_step))
        if name is None:
            return None
        payload = self.manager.load_checkpoint(name)
        self.manager.begin(name)
        return dict(payload["dataloaders"]), int(payload["global_step"])

    def _newest(self, global_step: int) -> str | None:
        records = self.manager.store.records(complete=True)
        fitting = [record for record in records if is_history(record.name) and record.step <= global_step]
        newest = max(fitting, key=lambda record: (record.step, record.sequence), default=None)
        return newest.name if newest is not None else None

    def close(self) -> None:
        """Let go of what is held."""
        self.manager.close()


class Position(Protocol):
    """Counters of a run."""

    global_step: int
    epoch: int


class OwnPositions:
    """Each replica group's own place in its data, saved with every full checkpoint, and preferred when a run goes on from one.

    Args:
        checkpoints: Where it is saved.
        sources: Returns the batches of all splits.
        trained: Returns those of the splits to train on.
        position: Returns the counters of the run.
        share: Returns this rank's share of the state of the loader of a split; `None` where it is to start from its beginning.
        leaves_out: Whether the loader of a split is left out of what is loaded.
        world: All ranks of the group.
        data_rank: Returns which share of the data this rank reads.
    """

    def __init__(
        self,
        checkpoints: ReplicaLoaderCheckpoints,
        *,
        sources: Callable[[], Mapping[str, BatchSource]],
        trained: Callable[[], Mapping[str, BatchSource]],
        position: Callable[[], Position],
        share: Callable[[str, Mapping[str, Any]], Mapping[str, Any] | None],
        leaves_out: Callable[[str], bool],
        world: ReductionDomain,
        data_rank: Callable[[], int],
    ) -> None:
        self.checkpoints = checkpoints
        self.sources = sources
        self.trained = trained
        self.position = position
        self.share = share
        self.leaves_out = leaves_out
        self.world = world
        self.data_rank = data_rank

    def save(self) -> None:
        """Save the loader states that belong to the state that is saved next."""
        sources, at = self.trained(), self.position()
        ranks = self.world.gather_objects((self.data_rank(), loader_states.own_states(sources, read_only=False)))
        states = {split: loader_states.state_of(split, source, ranks) for split, source in sources.items()}
        self.checkpoints.save(states, epoch=at.epoch, global_step=at.global_step)

    def load(self) -> None:
        """Restore what this group has saved at the position of the run.

        A position that belongs to another step than the weights is taken only for loaders that keep a state of their own on each
        rank: groups whose common position differed would end their passes at different updates.

        Raises:
            CheckpointDamaged: If a file is not what was written.
        """
        step = self.position().global_step
        found = self.checkpoints.load(step)
        if found is None:
            return
        states, saved_at = found
        for split, source in self.sources().items():
            if split not in states or self.leaves_out(split) or not (source.is_rank_local or saved_at == step):
                continue
            own = self.share(split, states[split])
            if own is not None:
                source.load_state_dict(own)

"""Checkpoints of a run that trains in replica groups: one of them writes, and each keeps its own position in the data."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from danling.checkpoints import CheckpointSettings, FileCheckpointManager
from danling.checkpoints.torch_files import FORMAT_VERSION
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

    def save(self, states: Mapping[str, Any], *, epoch: int, global_step: int) -> None:
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
        fitting = [record for record in records if record.name.startswith("ckpt-") and record.step <= global_step]
        newest = max(fitting, key=lambda record: (record.step, record.sequence), default=None)
        return newest.name if newest is not None else None

    def close(self) -> None:
        """Let go of what is held."""
        self.manager.close()

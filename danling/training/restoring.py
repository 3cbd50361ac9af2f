"""Finds the checkpoint that a run begins from, and checks that the run may continue from it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from danling.checkpoints import CheckpointDamaged, CheckpointDiskError, CheckpointNotFound
from danling.config import RunnerConfig
from danling.distributed import Placement
from danling.reporting import format_number

from . import loader_states
from .run_state import RunState, check_same_run, warn_of_compilation

logger = logging.getLogger("danling")

_ATTEMPTS_TO_READ = 3


class Manager(Protocol):
    """Finds checkpoints; see `danling.checkpoints.CheckpointManager`."""

    def tidy(self) -> None:
        """Remove the unfinished files of a killed save."""

    def check_directory(self) -> None:
        """Refuse a directory that holds checkpoints of another run."""

    def find_latest(self) -> str | None:
        """Return the newest checkpoint."""

    def refuse_lost(self) -> None:
        """Refuse to start from scratch where checkpoints were damaged."""

    def skip(self, source: str, error: Exception) -> None:
        """Leave out what `find_latest` has found."""


class RestoredRun(Protocol):
    """What is asked of a run that begins. It is looked up anew each time, since a user may override it."""

    @property
    def config(self) -> RunnerConfig: ...
    @property
    def checkpoint_manager(self) -> Any: ...
    @property
    def run_state(self) -> RunState: ...
    @property
    def placement(self) -> Placement: ...
    @property
    def dataloaders(self) -> Mapping[str, Any]: ...
    @property
    def train_splits(self) -> list[str]: ...

    def load_checkpoint(self, checkpoint: str | Path) -> None:
        """Restore the full state."""

    def load_pretrained(self, checkpoint: str | Path) -> None:
        """Load the model only."""

    def config_differences(self, payload: Mapping[str, object]) -> list[str]:
        """Return how the configuration of a checkpoint differs in what changes the result."""


class RunRestorer:
    """Finds the checkpoint that the configuration asks for, loads it and checks its contents. Called on all ranks."""

    def __init__(self, run: RestoredRun) -> None:
        self._run = run

    def restore(self, directory: Path) -> None:
        """Load what the configuration names: `resume`, else `auto_resume`, else `pretrained`."""
        config = self._run.config
        manager: Manager = self._run.checkpoint_manager
        if not config.checkpoint.load_only:
            # Check now rather than at the first save. Replica groups share the directory, where another group may be writing: no tidying.
            if not config.ft.enabled:
                manager.tidy()
            manager.check_directory()
        for _ in range(_ATTEMPTS_TO_READ - 1 if config.ft.enabled and config.auto_resume else 0):
            with suppress(CheckpointDamaged, CheckpointNotFound):
                # Another replica group may replace a checkpoint between finding and reading it; then there is a newer one.
                return self._load(directory)
        self._load(directory)

    def _load(self, directory: Path) -> None:
        config = self._run.config
        manager: Manager = self._run.checkpoint_manager
        source = config.resume or (manager.find_latest() if config.auto_resume else None)
        while source:
            try:
                self._run.load_checkpoint(source)
                return
            except (CheckpointDamaged, CheckpointDiskError) as error:
                if config.resume:
                    raise
                # It is the newest whose files are as they were written, and still cannot be read.
                manager.skip(source, error)
            source = manager.find_latest()
        if config.auto_resume:
            manager.refuse_lost()
            logger.info("auto_resume: no checkpoint of this run in %s yet; starting from scratch.", directory)
        if config.pretrained:
            self._run.load_pretrained(config.pretrained)

    def check(self, payload: Mapping[str, Any]) -> None:
        """Refuse a checkpoint from which this run could not continue as the same run."""
        run, excluded = self._run, self._run.run_state.excluded
        differences = run.config_differences(payload)
        if not differences and not excluded.allows_setting("dataloader.drop_last"):
            loaders = {split: run.dataloaders[split] for split in run.train_splits if split in run.dataloaders}
            differences = loader_states.differences_of_passes(payload.get("dataloaders", {}), loaders)
        check_same_run(differences, excluded)
        if run.placement.optimizer.rank == 0:
            warn_of_compilation(run.config.compile_differences(payload.get("runner", {})))


def best_left_behind(
    directory: Path,
    index: int | None,
    score: float | None,
    source: object,
    *,
    is_stored: Callable[[], bool] = lambda: False,
    speaks: bool = True,
) -> int | None:
    """Return the index of the best score if its checkpoint lies beside the one that was loaded, not among the run's own, and log it."""
    if index is None or any((directory / name).exists() for name in ("best", "best.pth")) or is_stored():
        return None
    if speaks:
        logger.info(
            "The best score so far, %s at %d, was kept beside %s; here a best is kept from the next better one on.",
            format_number(score or 0.0),
            index,
            source,
        )
    return index

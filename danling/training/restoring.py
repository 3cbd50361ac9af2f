"""Finds the checkpoint that a run begins from, and checks that the run may continue from it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from danling.checkpoints import CheckpointDamaged, CheckpointDiskError, CheckpointNotFound
from danling.reporting import format_number

from . import loader_states
from .run_state import check_same_run, warn_of_compilation

if TYPE_CHECKING:
    from danling.runners.base_runner import BaseRunner

logger = logging.getLogger("danling")

_ATTEMPTS_TO_READ = 3


class RunRestorer:
    """Finds the checkpoint that the configuration asks for, loads it and checks its contents. Called on all ranks."""

    def __init__(self, runner: BaseRunner) -> None:
        self._runner = runner

    def restore(self, directory: Path) -> None:
        """Load what the configuration names: `resume`, else `auto_resume`, else `pretrained`."""
        config, manager = self._runner.config, self._runner.checkpoint_manager
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
        config, manager = self._runner.config, self._runner.checkpoint_manager
        source = config.resume or (manager.find_latest() if config.auto_resume else None)
        while source:
            try:
                self._runner.load_checkpoint(source)
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
            self._runner.load_pretrained(config.pretrained)

    def check(self, payload: Mapping[str, Any]) -> None:
        """Refuse a checkpoint from which this run could not continue as the same run."""
        runner, excluded = self._runner, self._runner.run_state.excluded
        differences = runner.config_differences(payload)
        if not differences and not excluded.allows_setting("dataloader.drop_last"):
            loaders = {split: runner.dataloaders[split] for split in runner.train_splits if split in runner.dataloaders}
            differences = loader_states.differences_of_passes(payload.get("dataloaders", {}), loaders)
        check_same_run(differences, excluded)
        if runner.placement.optimizer.rank == 0:
            warn_of_compilation(runner.config.compile_differences(payload.get("runner", {})))

    def warn_if_best_is_elsewhere(self, directory: Path, source: object) -> int | None:
        """Return the index of the best score if its checkpoint is beside the one that was loaded, not among the run's own, and log it.

        May be called on one rank, which asks the object store.
        """
        runner = self._runner
        index = runner.best_index
        here = any((directory / name).exists() for name in ("best", "best.pth"))
        if index is None or here or (runner._has_remote() and runner._remote.has("best")):
            return None
        if runner.is_main_process:
            logger.info(
                "The best score so far, %s at %d, was kept beside %s; here a best is kept from the next better one on.",
                format_number(runner.best_score or 0.0),
                index,
                source,
            )
        return index

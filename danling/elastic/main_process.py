"""What the main process writes: each rank keeps what it needs to do so in the place of one that has ended."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from danling.checkpoints.directory import newest_record
from danling.reporting import Reporter
from danling.training.results import RunResults
from danling.workspace.workspace import RunLocation

from .coordinator import describe_death
from .member import Membership
from .metrics_file import missing_records, recent_records, without_later

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner

logger = logging.getLogger("danling")


class MainProcess:
    """Writes what the main process of a run writes, where that is this process now."""

    def __init__(
        self,
        runner: TorchRunner,
        reporter: Reporter,
        run_location: RunLocation,
        results: RunResults,
    ) -> None:
        self._runner = runner
        self._reporter = reporter
        self._run_location = run_location
        self._results = results
        # Between two updates there is no collective, in which a rank could end.
        reporter.telemetry.adds_ranks = False
        # On all ranks: any of them may become the main process.
        reporter.trackers.recent = recent_records()

    def take_over(self) -> None:
        """Do from here on what the main process does, in the place of one that has ended."""
        runner, saver = self._runner, self._runner.saver
        self._run_location.inherit(runner.workspace)
        self._reporter.become_main(runner.workspace.log_file if runner.config.log else None)
        manager = runner.checkpoint_manager
        if not runner.config.checkpoint.load_only:
            # The process that has ended may have left a save half-way.
            manager.checkpoints.tidy()
            record = newest_record(manager.checkpoints.path)
            if record is not None:
                manager.checkpoints.continue_from(record)
            # What it had left to write is lost.
            if saver.saved_at is not None and saver.open is None:
                saver.saved_at = None
        without_later(runner.workspace.jsonl_file, runner.state.train.global_step, self._recent())
        self._reporter.trackers.resume_as_main()
        self.write_missing()
        self._results.write()

    def _recent(self) -> list[tuple[dict[str, float], int]]:
        return list(self._reporter.trackers.recent or ())

    def write_missing(self) -> None:
        """Write the lines of metrics that another main process, or this one before it took over a state, has not written."""
        trackers = self._reporter.trackers
        # What is written here is among the recent records already.
        recent, trackers.recent = self._recent(), None
        for values, step in missing_records(self._runner.workspace.jsonl_file, recent):
            trackers.log(values, step)
        trackers.recent = recent_records(recent)

    def log_change(self, now: Membership, *, is_same: bool, repeats: bool, seconds: float) -> None:
        """Log who has ended or joined, and what it has cost; `is_same` where neither has happened."""
        trackers, step = self._reporter.trackers, self._runner.state.train.global_step
        lost = [describe_death(each) for each in now.lost]
        what = "; ".join(lost) or (
            "A collective failed, though no rank has ended" if is_same else "A rank joins"
        )
        again = f"; update {step + 1} is made again" if repeats else ""
        logger.warning(
            "%s: %s after update %d, %.2f s later%s. Nothing was read from a checkpoint.",
            what,
            "1 rank continues" if now.size == 1 else f"{now.size} ranks continue",
            step,
            seconds,
            again,
        )
        figures = {
            "elastic/ranks": float(now.size),
            "elastic/gap_seconds": seconds,
            "elastic/repeated": float(repeats),
        }
        # Another main process must not write them again: only this one has measured them.
        recent, trackers.recent = trackers.recent, None
        trackers.log(figures, step)
        trackers.recent = recent

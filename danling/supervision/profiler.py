"""Traces of some updates by `torch.profiler`, on a schedule."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from danling.utils.files import staged_path
from danling.utils.observers import Observer

if TYPE_CHECKING:
    from danling.runners.base_runner import BaseRunner
    from danling.training.outcome import UpdateOutcome

logger = logging.getLogger("danling")


class Profiler(Observer):
    """Profiles updates in cycles of `wait`, `warmup` and `active` updates and exports one Chrome trace a cycle and
    rank.

    Profiling starts at construction, at whatever step the run is: a resumed run is profiled like a new one. When the
    cycles are done the profiler is shut down. Files are called
    `rank-00000-step-000000000005.pt.trace.json`, after the last update in them; Perfetto, `chrome://tracing` and the
    TensorBoard plugin read them.

    Args:
        runner: The runner, whose `config.profiling` says which updates are profiled and what is recorded of them.
    """

    def __init__(self, runner: BaseRunner) -> None:
        settings = dict(runner.config.profiling.items())
        settings.pop("enabled")
        self.directory = runner.workspace.dir / settings.pop("trace_dir")
        self.directory.mkdir(parents=True, exist_ok=True)
        self._runner = runner
        self.traces: list[Path] = []
        """Files that were written, in order."""
        cycle = {name: settings.pop(name) for name in ("wait", "warmup", "active")}
        repeat = settings.pop("repeat")
        # 0 cycles have no end, as in `torch.profiler.schedule`.
        cycles = 1 if repeat is None else repeat
        self._left = cycles * sum(cycle.values()) or None
        if settings["profile_memory"] and runner.device.type == "cuda":
            # Where blocks were allocated, for the snapshot of a run that is out of memory.
            torch.cuda.memory._record_memory_history(max_entries=100_000)
        schedule = torch.profiler.schedule(**cycle, repeat=cycles)
        self._profile: Any = torch.profiler.profile(
            schedule=schedule, on_trace_ready=self._export, **settings
        )
        self._profile.start()

    def update_ended(self, outcome: UpdateOutcome) -> None:
        if self._profile is None:
            return
        self._profile.step()
        if self._left is not None:
            self._left -= 1
            if self._left <= 0:
                self.close()

    def training_ended(self) -> None:
        self.close()

    def close(self) -> None:
        """Stop profiling; updates of a cycle that is not full are exported as well. A second call does nothing."""
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stop()

    def _export(self, profile: torch.profiler.profile) -> None:
        name = f"rank-{self._runner.rank:05d}-step-{self._runner.state.train.global_step:012d}.pt.trace.json"
        path = self.directory / name
        # A trace of many updates takes a while to write, and a viewer may be open on the directory.
        staged = staged_path(path)
        profile.export_chrome_trace(str(staged))
        os.replace(staged, path)
        self.traces.append(path)
        logger.info("Profiler trace written: %s", path)

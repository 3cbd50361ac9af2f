"""An observer that measures what the ranks spend their time on in a training, and detects hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from danling.distributed import Board, collective_timeout, default_store
from danling.reporting.rank_times import RankTimes
from danling.reporting.telemetry import Telemetry
from danling.supervision import ActivitySampler, HangWatch, RankWatch, StackReader
from danling.supervision.rank_watch import SECONDS_BETWEEN_LOOKS
from danling.training.evaluation import Evaluator
from danling.training.loop import TrainingLoop
from danling.training.observers import Observer
from danling.training.saving import RunSaver

if TYPE_CHECKING:
    from .torch_runner import TorchRunner


class RankWatching(Observer):
    """Watches this rank for the others in each training of the library's loops."""

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner
        self._watch: RankWatch | None = None

    def training_started(self) -> None:
        """Start to watch where there are other ranks, and the configuration asks for it."""
        runner, settings = self._runner, self._runner.config.comm
        share = settings.slow_rank_share
        alone = runner.placement.optimizer.size == 1 or not runner._session.running
        if alone or (share is None and settings.hang_warning_seconds is None):
            return
        watch = self._watch = build_rank_watch(runner, samples=share is not None)
        watch.start()
        if share is not None:
            times = RankTimes(sampled=watch.sampler.take, hosts=watch.hosts, share=share)
            runner._reporter.rank_times = times

    def training_ended(self) -> None:
        """Stop to watch."""
        watch, self._watch, self._runner._reporter.rank_times = self._watch, None, None
        if watch is not None:
            watch.stop()


def build_rank_watch(runner: TorchRunner, *, samples: bool) -> RankWatch:
    """Return what looks at the thread that calls this while it trains, for the other ranks."""
    domain, train = runner.placement.optimizer, runner.state.train
    saves = (type(runner).save_checkpoint, RunSaver.save, RunSaver.export)
    parts: dict[Callable[..., object], str] = {
        **dict.fromkeys(saves, "checkpointing"),
        **dict.fromkeys((Evaluator.evaluate, Evaluator.try_once), "evaluating"),
        **TrainingLoop.parts(),
        Telemetry.timed: "data",
    }
    on_accelerator = runner.device.type != "cpu"
    reader = StackReader(parts, on_accelerator=on_accelerator)
    thread, native_id = threading.get_ident(), threading.get_native_id()
    stacks = runner.workspace.dir / "hangs"
    board = Board(default_store, f"{runner._session.training}", directory=lambda: stacks)
    hangs = HangWatch(
        reader,
        thread=thread,
        native_id=native_id,
        progress=lambda: (train.global_step, train.skipped_updates),
        step=lambda: train.global_step,
        board=board,
        rank=domain.rank,
        size=domain.size,
        place=domain.rank,
        least=runner.config.comm.hang_warning_seconds,
        limit=lambda: collective_timeout(runner.device),
        directory=lambda: stacks,
        waits_on_device=on_accelerator,
    )
    return RankWatch(
        ActivitySampler(reader, thread=thread, native_id=native_id),
        board=board,
        rank=domain.rank,
        size=domain.size,
        gathers=runner.is_main_process,
        checks=[hangs],
        seconds=SECONDS_BETWEEN_LOOKS if samples else 1.0,
    )

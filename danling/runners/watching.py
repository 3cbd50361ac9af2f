"""What looks at a rank of a torch runner while it trains, and what of it is what: waiting for data, evaluating, saving."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from danling.distributed import Board, collective_timeout, default_store
from danling.reporting.telemetry import Telemetry
from danling.supervision import ActivitySampler, HangWatch, RankWatch, StackReader
from danling.supervision.rank_watch import SECONDS_BETWEEN_LOOKS
from danling.training.ending import TrainingEnd
from danling.training.evaluation import Evaluator
from danling.training.loop import TrainingLoop
from danling.training.saving import RunSaver

if TYPE_CHECKING:
    from .torch_runner import TorchRunner


def build_rank_watch(runner: TorchRunner, *, samples: bool) -> RankWatch:
    """Return what looks at the thread that calls this while it trains, for the other ranks."""
    domain, train = runner.placement.optimizer, runner.state.train
    saves = (type(runner).save_checkpoint, RunSaver.save, RunSaver.export)
    parts: dict[Callable[..., object], str] = {
        **dict.fromkeys(saves, "checkpointing"),
        **dict.fromkeys((Evaluator.evaluate, Evaluator.try_once), "evaluating"),
        **TrainingLoop.parts(),
        **TrainingEnd.parts(),
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

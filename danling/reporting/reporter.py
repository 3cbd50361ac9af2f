"""Everything that is seen of a training: its speed, its metrics in log lines and trackers, and its progress bar."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from danling.config.names import STACKS
from danling.utils.messages import Paced, format_count
from danling.utils.observers import Observer

from .logging import Printer, RunLog, close_run_log, open_run_log, speaking_for
from .progress import Progress, format_scores
from .rank_times import RankTimes
from .summary import describe_end, describe_training
from .telemetry import ModelFlops, Telemetry
from .tracker_services import BUILT_IN_TRACKERS
from .trackers import TrackerSet

if TYPE_CHECKING:
    from danling.runners.base_runner import BaseRunner
    from danling.runners.torch_runner import TorchRunner
    from danling.training.update import UpdateOutcome

logger = logging.getLogger("danling")

_SHOWN = {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "lr", "stream_in_flight": "in_flight"}
"""Metrics of an update that are printed, and what they are called there."""

_SINGLE_UPDATES = "updates"
"""What the loss of single updates is called among the curves of a notebook."""

_RESULT_LINES = 100
"""Results of epochs or evaluations that are printed at any pace."""


class Reporter(Observer):
    """Measures a training and reports it by trackers, log lines and a progress bar.

    One reporter serves a runner for its whole life, as the first of its observers. Between `begin` and `end` a training runs; trackers stay
    open until they are closed.

    Attributes:
        trackers: Where metrics are sent to.
        flops: What the model computes for a sample.
        telemetry: Speed of the training that runs, or ran last; `None` before the first one.
        rank_times: Collects the times of the ranks in the training that runs; `None` where they are not watched.
        bar: The progress bar of the training that runs; `None` on other processes than the main one.
        print: Prints on the main process, next to the bar.
    """

    critical = True

    def __init__(self, runner: BaseRunner) -> None:
        self.is_main = runner.is_main_process
        self.trackers = TrackerSet(is_main=self.is_main)
        self.flops = ModelFlops()
        self.telemetry: Telemetry | None = None
        self.rank_times: RankTimes | None = None
        self.bar: Progress | None = None
        self.print = Printer(self.is_main)
        self._owner = runner
        self._runner: TorchRunner | None = None
        """The runner while it trains."""
        self._log: RunLog | None = None
        self._doing: list[str] = []
        self._update_began: tuple[float, bool] | None = None
        self._result_lines = self._stream_lines = Paced(0.0)
        self._samples_at_begin = self._samples_at_log = 0

    # The log

    def open_log(self, file: Path | None, *, rank: int) -> None:
        """Open the log of the run.

        Args:
            file: Where it is kept, `None` for nowhere.
            rank: Number of this process, which its lines have where it is not the main one.
        """
        self._log = open_run_log(file, is_main=self.is_main, rank=rank)

    def close_log(self) -> None:
        """Close the log of the run."""
        if self._log is not None:
            close_run_log(self._log)

    def speaking(self) -> AbstractContextManager[None]:
        """Return the context in which log messages belong to this run alone."""
        return speaking_for(self._log) if self._log is not None else nullcontext()

    # Trackers

    def add_built_in(self, name: str) -> None:
        """Add one of the library's own trackers if the configuration asks for it.

        Args:
            name: A key of `BUILT_IN_TRACKERS`.
        """
        tracker = BUILT_IN_TRACKERS[name](self._owner) if self.is_main else None
        if tracker is not None:
            self.trackers.add(tracker)

    def open_trackers(self) -> None:
        """Open what was added, and the library's own trackers that the configuration asks for, each by its hook `init_<name>` if there is
        one; a second call does nothing."""
        if self.trackers.is_open:
            return
        self.trackers.open()
        for name in BUILT_IN_TRACKERS:
            hook = getattr(self._owner, f"init_{name}", None)
            if hook is None:
                self.add_built_in(name)
            else:
                hook()

    def flush(self) -> None:
        """Flush what a training has logged, however it ended; a tracker that fails here must not hide how."""
        try:
            self.trackers.flush()
        except Exception:
            logger.exception("A tracker could not be flushed.")

    # One training

    def begin(self, runner: TorchRunner) -> None:
        """Begin to measure and to show a training. Called on all ranks."""
        self._runner = runner
        train, seconds = runner.state.train, runner.config.log_seconds
        known = (runner.flops_per_token() or runner.flops_per_sample()) is not None
        countable = runner.stack in STACKS and STACKS[runner.stack].counts_flops and not runner.config.compile.enable
        self.flops.begin(runner.peak_flops(), known=known, countable=countable)
        self.telemetry = Telemetry(total_steps=runner.steps, global_step=train.global_step, device=runner.device)
        self._samples_at_begin = self._samples_at_log = train.samples
        self._result_lines, self._stream_lines = Paced(seconds, burst=_RESULT_LINES), Paced(seconds)
        self._doing, self._update_began = [], None
        self._write_streams()
        if self.is_main:
            self.bar = Progress(
                runner.steps,
                initial=train.global_step,
                desc=runner.config.experiment,
                seconds_between_lines=seconds,
            )
            self.bar.epoch = self._epoch()
            for line in describe_training(runner):
                logger.info("%s", line)

    def say_ending(self, ending: str) -> None:
        """Log on the main process how a training ended, and what it did.

        Files that cannot be looked up, such as in a working directory that was removed, are no error: the training is over.

        Args:
            ending: Such as `Finished`.
        """
        runner = self._runner
        if self.is_main and runner is not None and self.telemetry is not None:
            if self.bar is not None:
                self.bar.write_last()
            train = runner.state.train
            speed = self.telemetry.summary(train.global_step, train.samples - self._samples_at_begin)
            try:
                more = describe_end(runner)
            except OSError as error:
                more = [f"(what there is to go on with cannot be looked up: {error})"]
            logger.info("%s", "\n  ".join([f"{ending}: {speed}", *more]))
        try:
            self._write_streams()
        except Exception:
            logger.exception("How far the streams of this run came could not be read; its end follows.")

    def end(self) -> None:
        """Let go of the terminal and flush the trackers. A second call does nothing."""
        bar, self.bar = self.bar, None
        if bar is not None:
            bar.close()
        if self._runner is not None:
            self._runner = None
            self.flush()

    def _pause(self, doing: str) -> None:
        if self._runner is not None and self.telemetry is not None:
            self._doing.append(doing)
            self.telemetry.pause()
            self._show_doing(doing)

    def _resume(self) -> None:
        if self._doing and self.telemetry is not None:
            self._doing.pop()
            self.telemetry.resume()
            self._show_doing(self._doing[-1] if self._doing else "")

    def _show_doing(self, what: str) -> None:
        if self.bar is not None:
            self.bar.doing(what)

    # Events

    def batch_wait_started(self) -> None:
        if self._runner is not None and self.telemetry is not None:
            self.telemetry.wait_started()

    def batch_wait_ended(self) -> None:
        if self._runner is not None and self.telemetry is not None:
            self.telemetry.wait_ended()

    def update_started(self) -> None:
        if self.telemetry is None:
            return
        if self._update_began is not None:
            self.telemetry.tokens, self.flops.counts_next = self._update_began
        self._update_began = self.telemetry.tokens, self.flops.counts_next

    def micro_batch_started(self, data: object, *, read: object, samples: float) -> None:
        if self._runner is not None and self.telemetry is not None:
            self.telemetry.tokens += self._runner.count_tokens(read)
            self.flops.micro_batch_started(samples)

    def micro_batch_ended(self) -> None:
        self.flops.micro_batch_ended()

    def update_ended(self, outcome: UpdateOutcome) -> None:
        runner, self._update_began = self._runner, None
        if runner is None or self.telemetry is None:
            return
        step = runner.state.train.global_step
        self.telemetry.stepped(committed=outcome.committed)
        if outcome.committed and step % runner.log_interval == 0:
            self._log_update(runner, self.telemetry, outcome)
        if self.bar is not None:
            self.bar.update(step)

    def evaluation_started(self, split: str) -> None:
        self._pause(split)

    def evaluation_batch_started(self, split: str, number: int) -> None:
        self._show_doing(f"{split} {number}")

    def evaluation_ended(self, split: str) -> None:
        self._resume()

    def save_started(self) -> None:
        self._pause("checkpoint")

    def save_ended(self) -> None:
        self._resume()
        if self._owner._session.running:  # else they are flushed at the end
            self.flush()

    # Metrics

    def forget_samples(self, samples: int) -> None:
        """Count the samples of the next log line from here, since the counter has jumped."""
        self._samples_at_log = samples

    def _log_update(self, runner: TorchRunner, telemetry: Telemetry, update: UpdateOutcome) -> None:
        """Log the metrics of an update and the speed since the last line. One collective."""
        runner._parts.update.read_samples()
        train, placement, ranks = runner.state.train, runner.placement, self.rank_times
        new, self._samples_at_log = train.samples - self._samples_at_log, train.samples
        own = ranks.own(telemetry.waited) if ranks is not None else ()
        shared = telemetry.share(placement.optimizer, counts=placement.counts_samples, own=own)
        if not self.is_main:
            telemetry.open_window()
            return
        # On an accelerator a window without any weight is noticed only here.
        values = {"loss": float(update.loss_sum if runner._parts.sums_loss else update.loss)}
        rates = runner._parts.update.rates
        pace = telemetry.report(
            train.global_step, samples=new, shared=shared, learning_rates=rates, grad_norm=update.grad_norm
        )
        per_token, per_sample = runner.flops_per_token(), runner.flops_per_sample()
        usage = self.flops.usage(pace, per_token=per_token, per_sample=per_sample, devices=runner.world_size)
        values |= pace | usage
        named, totals = {f"train/{name}": value for name, value in values.items()}, dict[str, float]()
        for split, found in self._figures_of_parts(runner).items():
            named |= {f"{split}/{name}": value for name, value in found.items()}
            totals |= {name: totals.get(name, 0) + value for name, value in found.items()}
        slow = ranks.judge(shared.own) if ranks is not None and shared.own else ""
        beside = {"ranks": ranks.record(shared.own)} if ranks is not None and shared.own else None
        self.trackers.log(named, train.global_step, beside=beside)
        if self.bar is not None:
            self.bar.epoch = self._epoch()
            self.bar.curve(train.global_step, {_SINGLE_UPDATES: {"loss": values["loss"]}})
            known = {**totals, **values}
            shown = {_SHOWN[name]: known[name] for name in _SHOWN if name in known}
            speed = f"{format_count(pace['samples_per_second'])} samples/s" if "samples_per_second" in pace else ""
            note = f"slow: {slow}" if slow else ""
            self.bar.show(train.global_step, shown, speed=speed, note=note)
        if self._stream_lines.due():
            self._write_streams()

    def log_result(self, runner: TorchRunner, result: Mapping[str, Mapping[str, float]], *, last: bool) -> None:
        """Log the metrics of an epoch or an evaluation, on the main process.

        Args:
            runner: The runner.
            result: Metrics by split.
            last: Whether it is the last one, which is printed at any pace.
        """
        if not self.is_main:
            return
        step, bar = runner.state.train.global_step, self.bar
        if self._result_lines.due() or last:
            metrics = "  ".join(f"{split} {format_scores(values)}" for split, values in result.items())
            logger.info("%s %d: %s", "step" if runner.is_step_mode else "epoch", runner.index, metrics)
            if bar is not None:
                bar.forget_last()
        if bar is not None:
            bar.set_epoch(self._epoch())
            bar.curve(step, result)
        # Its own key: `train/loss` is the loss of single updates.
        named = {f"{split}_mean" if split in runner.train_splits else split: values for split, values in result.items()}
        flat = {f"{split}/{name}": value for split, values in named.items() for name, value in values.items()}
        self.trackers.log(flat, step)

    def _figures_of_parts(self, runner: TorchRunner) -> Mapping[str, Mapping[str, float]]:
        """Return the logged figures of the loaders, by split, and of the copy of the run in an object store."""
        copied = runner._remote.figures(runner.state.train.global_step) if runner._has_remote() else {}
        return {**runner._data.metrics(), **copied}

    def _write_streams(self) -> None:
        streams = self._runner._data.streams() if self.is_main and self._runner is not None else {}
        if streams and self._runner is not None:
            self._runner.workspace.write_streams(streams)

    def _epoch(self) -> str:
        """Return the text after the name on the bar, such as `epoch 2/5`."""
        runner = self._runner
        if runner is None or runner.is_step_mode:
            return ""
        return f"epoch {min(runner.state.train.epoch + 1, runner.epochs or 1)}/{runner.epochs}"

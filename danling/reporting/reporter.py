"""Everything that is seen of a training: its speed, its metrics in log lines and trackers, its progress bar, its profile."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from danling.utils.messages import Paced, format_count
from danling.utils.protocols import ReductionDomain

from .builtin import BUILT_IN_TRACKERS, TrackerPlace
from .flops import ModelFlops
from .logging import RunLog, close_run_log, open_run_log, speaking_for
from .printing import Printer
from .progress import Progress, format_scores
from .rank_times import RankTimes
from .telemetry import Telemetry
from .trackers import TrackerSet

if TYPE_CHECKING:
    import torch
    from torch import Tensor

logger = logging.getLogger("danling")

_T = TypeVar("_T")

_SHOWN = {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "lr", "stream_in_flight": "in_flight"}
"""Metrics of an update that are printed, and what they are called there."""

_SINGLE_UPDATES = "updates"
"""What the loss of single updates is called among the curves of a notebook."""

_RESULT_LINES = 100
"""Results of epochs or evaluations that are printed at any pace."""


class StepProfiler(Protocol):
    """What profiles some of the updates."""

    def step(self, global_step: int) -> None:
        """Count an update."""

    def close(self) -> None:
        """Write what is pending."""


class Reporter:
    """Collects what a training has to say, and says it: by trackers, log lines, a progress bar and a profile.

    One reporter serves a runner for its whole life. Between `begin` and `end` a training runs; trackers stay open until they are closed.

    Args:
        is_main: Whether this process speaks.
        world_size: Number of processes, each with a device.
        seconds_between_lines: Seconds at least from one log line of updates, or of results, to the next.

    Attributes:
        trackers: Where metrics are sent to.
        flops: What the model computes for a sample.
        telemetry: Speed of the training that runs, or ran last; `None` before the first one.
        rank_times: What the ranks spend their time with in the training that runs; `None` where nobody looks.
        bar: The progress bar of the training that runs; `None` on other processes than the main one.
        print: Prints on the main process, beside the bar.
    """

    def __init__(self, *, is_main: bool, world_size: int, seconds_between_lines: float) -> None:
        self.is_main = is_main
        self.world_size = world_size
        self.seconds_between_lines = seconds_between_lines
        self.trackers = TrackerSet(is_main=is_main)
        self.flops = ModelFlops()
        self.telemetry: Telemetry | None = None
        self.rank_times: RankTimes | None = None
        self.bar: Progress | None = None
        self.print = Printer(is_main)
        self._log: RunLog | None = None
        self._profiler: StepProfiler | None = None
        self._result_lines = Paced(seconds_between_lines, burst=_RESULT_LINES)
        self._samples_at_begin = self._samples_at_log = 0

    # The log

    def open_log(self, file: Path | None, *, rank: int) -> None:
        """Open the log of the run.

        Args:
            file: Where it is kept, `None` for nowhere.
            rank: What other processes than the main one are called in it.
        """
        self._log = open_run_log(file, is_main=self.is_main, rank=rank)

    def close_log(self) -> None:
        """Close the log of the run."""
        if self._log is not None:
            close_run_log(self._log)

    def speaking(self) -> AbstractContextManager[None]:
        """Return the context in which what is logged belongs to this run alone."""
        return speaking_for(self._log) if self._log is not None else nullcontext()

    # Trackers

    def add_built_in(self, name: str, place: TrackerPlace) -> None:
        """Add one of the library's own trackers if the configuration asks for it.

        Args:
            name: A key of `BUILT_IN_TRACKERS`.
            place: What it is opened with.
        """
        row = BUILT_IN_TRACKERS[name]
        if row.wanted(place.config):
            self.trackers.add(lambda: row.open(place))

    def open_trackers(
        self, hook: Callable[[str], Callable[[], None] | None], place: Callable[[], TrackerPlace]
    ) -> None:
        """Open what was added, and those of the library that the configuration asks for; a second call does nothing.

        Args:
            hook: Returns what opens one of the library's by its name, in the place of `add_built_in`; `None` where nothing does.
            place: Returns what they are opened with.
        """
        if self.trackers.is_open:
            return
        self.trackers.open()
        for name in BUILT_IN_TRACKERS:
            opening = hook(name)
            if opening is None:
                self.add_built_in(name, place())
            else:
                opening()

    def flush(self) -> None:
        """Flush what a training has logged, however it ended; a tracker that fails here must not hide how."""
        try:
            self.trackers.flush()
        except Exception:
            logger.exception("A tracker could not be flushed.")

    # One training

    def begin(
        self,
        *,
        step: int,
        samples: int,
        total_steps: int | None,
        device: torch.device,
        name: str,
        epoch: str,
        profiler: StepProfiler | None,
    ) -> None:
        """Begin to measure and to show a training.

        Args:
            step: Updates committed before.
            samples: Samples of all ranks trained on before.
            total_steps: Updates of the whole run, `None` when not known.
            device: Device whose memory is reported.
            name: What stands in front of the bar.
            epoch: What stands behind the name, such as `epoch 2/5`.
            profiler: What profiles some updates.
        """
        self._samples_at_begin = self._samples_at_log = samples
        self.telemetry = Telemetry(total_steps=total_steps, global_step=step, device=device)
        self._profiler = profiler
        if self.is_main:
            self.bar = Progress(total_steps, initial=step, desc=name, seconds_between_lines=self.seconds_between_lines)
            self.bar.epoch = epoch

    def end(self) -> None:
        """Finish the profile and let go of the terminal. A second call does nothing."""
        profiler, self._profiler = self._profiler, None
        bar, self.bar = self.bar, None
        if profiler is not None:
            profiler.close()
        if bar is not None:
            bar.close()

    def timed(self, batches: Iterator[_T]) -> Iterator[_T]:
        """Return the batches to train on; the time that the loop waits for them is counted.

        Args:
            batches: Where they come from.
        """
        return batches if self.telemetry is None else self.telemetry.timed(batches)

    def stepped(self, step: int) -> None:
        """Show that an update was made or skipped.

        Args:
            step: Updates committed.
        """
        if self.bar is not None:
            self.bar.update(step)
        if self._profiler is not None:
            self._profiler.step(step)

    @contextmanager
    def aside(self, doing: str = "") -> Iterator[None]:
        """Leave what happens inside, such as a save, out of the speed of training, and show it on the bar.

        Args:
            doing: What it is, in a word.
        """
        with self.telemetry.aside() if self.telemetry is not None else nullcontext():
            self.doing(doing)
            yield
        self.doing("")

    def doing(self, what: str) -> None:
        """Show on the bar what goes on besides updates; an empty text when it is over.

        Args:
            what: In a few words.
        """
        if self.bar is not None:
            self.bar.doing(what)

    def forget_samples(self, samples: int) -> None:
        """Count the samples of the next log line from here, since the counter has jumped.

        Args:
            samples: Samples of all ranks trained on.
        """
        self._samples_at_log = samples

    def log_update(
        self,
        step: int,
        *,
        loss: float | Tensor,
        samples: int,
        grad_norm: float | Tensor | None,
        learning_rates: Sequence[float],
        epoch: str,
        domain: ReductionDomain,
        counts_samples: bool,
        per_token: Callable[[], float | None],
        per_sample: Callable[[], float | None],
        of_loaders: Callable[[], Mapping[str, Mapping[str, float]]] = dict,
    ) -> None:
        """Log the metrics of an update and the speed since the last line. One collective over the domain.

        Args:
            step: Updates committed.
            loss: Mean loss of the update, 0-dim; on the main process it waits for the device.
            samples: Samples of all ranks trained on so far.
            grad_norm: Norm of its gradient before clipping.
            learning_rates: Of the parameter groups, as the update was made with them.
            epoch: What stands behind the name on the bar.
            domain: Ranks that train together.
            counts_samples: Whether the tokens of this rank count: of several ranks that read the same data, one does.
            per_token: Gives the FLOPs of a token, `None` when not known.
            per_sample: Gives the FLOPs of a sample, `None` when not known.
            of_loaders: Gives by split what the loaders have to show; called on the main process.
        """
        telemetry = self.telemetry
        assert telemetry is not None
        new, self._samples_at_log = samples - self._samples_at_log, samples
        ranks = self.rank_times
        own = ranks.own(telemetry.waited) if ranks is not None else ()
        shared = telemetry.share(domain, counts=counts_samples, own=own)
        if not self.is_main:
            telemetry.open_window()
            return
        values = {"loss": float(loss)}
        pace = telemetry.report(step, samples=new, shared=shared, learning_rates=learning_rates, grad_norm=grad_norm)
        values |= pace | self.flops.usage(pace, per_token=per_token(), per_sample=per_sample(), devices=self.world_size)
        named, totals = {f"train/{name}": value for name, value in values.items()}, dict[str, float]()
        for split, found in of_loaders().items():
            named |= {f"{split}/{name}": value for name, value in found.items()}
            totals |= {name: totals.get(name, 0) + value for name, value in found.items()}
        slow = ranks.judge(shared.own) if ranks is not None and shared.own else None
        beside = {"ranks": ranks.record(shared.own)} if ranks is not None and shared.own else None
        self.trackers.log(named, step, beside=beside)
        values = {**totals, **values}
        if self.bar is not None:
            self.bar.epoch = epoch
            speed = f"{format_count(pace['samples_per_second'])} samples/s" if "samples_per_second" in pace else ""
            self.bar.curve(step, {_SINGLE_UPDATES: {"loss": values["loss"]}})
            shown = {_SHOWN[name]: values[name] for name in _SHOWN if name in values}
            self.bar.show(step, shown, speed=speed, note=f"slow: {slow}" if slow is not None else "")

    def log_result(
        self,
        result: Mapping[str, Mapping[str, float]],
        *,
        step: int,
        title: str,
        trained: Sequence[str],
        last: bool,
        epoch: str = "",
    ) -> None:
        """Log the metrics of an epoch or an evaluation, on the main process.

        Args:
            result: Metrics by split.
            step: Updates committed.
            title: What they are of, such as `epoch 3`.
            trained: Splits that are trained on, whose losses are those of a whole pass.
            last: Whether it is the last one, which is printed at any pace.
            epoch: Text behind the name on the bar.
        """
        if not self.is_main:
            return
        if self._result_lines.due() or last:
            metrics = "  ".join(f"{split} {format_scores(values)}" for split, values in result.items())
            logger.info("%s: %s", title, metrics)
            if self.bar is not None:
                self.bar.forget_last()
        if self.bar is not None:
            self.bar.set_epoch(epoch)
            self.bar.curve(step, result)
        # A key of its own: `train/loss` is the loss of single updates.
        named = {f"{split}_mean" if split in trained else split: values for split, values in result.items()}
        flat = {f"{split}/{name}": value for split, values in named.items() for name, value in values.items()}
        self.trackers.log(flat, step)

    def log_ending(self, ending: str, *, step: int, samples: int, summary: Callable[[], Sequence[str]] = tuple) -> None:
        """Say on the main process how a training ended, and what it did.

        Args:
            ending: Such as `Finished`.
            step: Updates committed.
            samples: Samples of all ranks trained on so far.
            summary: Returns what else there is to say, a line each; called on the main process. Files that it cannot look at, such as in a
                working directory that was removed, are no error: the training is over.
        """
        if self.is_main and self.telemetry is not None:
            if self.bar is not None:
                self.bar.write_last()
            speed = self.telemetry.summary(step, samples - self._samples_at_begin)
            try:
                more = list(summary())
            except OSError as error:
                more = [f"(what there is to go on with cannot be looked up: {error})"]
            logger.info("%s", "\n  ".join([f"{ending}: {speed}", *more]))

"""Everything that is seen of a training: its log lines and progress bar, what trackers get, and the messages at its beginning and end."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from danling.config.schema import TopLevelConfig
from danling.utils.lazy import is_installed
from danling.utils.messages import Paced, format_count
from danling.utils.observers import Observer
from danling.utils.process import arithmetic, launch_command
from danling.utils.secrets import hide_secrets, names_secret, secret_values

from .logging import EarlyLog, RunLog, beside_bar
from .progress import Progress, format_number, format_scores
from .rank_times import RankTimes
from .telemetry import Telemetry
from .trackers import TrackerSet

if TYPE_CHECKING:
    from danling.data import Division
    from danling.data.run_data import RunData
    from danling.runners.base_runner import BaseRunner
    from danling.runners.torch_runner import TorchRunner
    from danling.training.outcome import UpdateOutcome
    from danling.training.session import TrainingSession
    from danling.training.update import UpdateStep

logger = logging.getLogger("danling")

_SHOWN = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "lr",
    "stream_in_flight": "in_flight",
}
"""Metrics of an update that are printed, and what they are called there."""
_RESULT_LINES = 100
"""Results of epochs or evaluations that are printed at any pace."""
_WIDTH = 98
"""A line of the log has a time before it, and a terminal 120 columns."""
_CHOSEN = ("dir", "auto_resume", "resume", "pretrained")
"""Settings that the command to resume sets itself."""


class Reporter(Observer):
    """Reports a training by trackers, log lines and a progress bar.

    One reporter serves a runner for its whole life. Between `begin` and `end` a training runs; trackers stay open until they are closed.

    Attributes:
        trackers: Where metrics are sent to.
        telemetry: Measures the training.
        rank_times: Collects the times of the ranks in the training that runs; `None` where they are not watched.
        bar: The progress bar of the training that runs; `None` on other processes than the main one.
    """

    critical = True

    def __init__(
        self, runner: BaseRunner, session: TrainingSession, data: RunData, closers: ExitStack
    ) -> None:
        self.trackers = TrackerSet(runner)
        self.telemetry = Telemetry(runner)
        self.rank_times: RankTimes | None = None
        self.bar: Progress | None = None
        self.figures: list[Callable[[int], Mapping[str, Mapping[str, float]]]] = []
        """Further metrics of each log line by group, given the number of updates."""
        self._owner = runner
        self._session = session
        self._data = data
        self._closers = closers
        self._update: UpdateStep | None = None
        self._sums_loss = False
        self._runner: TorchRunner | None = None
        """The runner while it trains."""
        self._early: EarlyLog | None = None
        self._log: RunLog | None = None
        self._result_lines = self._stream_lines = Paced(0.0)

    def begin_log(self) -> None:
        """Show warnings from here on, and keep them until the log of the run is open."""
        # The directory of the log is known later, and what is wrong with a configuration is said before.
        self._early = EarlyLog(None if self._owner.is_main_process else self._owner.rank)
        self._closers.callback(self._early.end)

    def open_log(self, file: Path | None) -> None:
        """Open the log of the run, in a file if there is one."""
        early = self._early.end() if self._early is not None else []
        self._log = RunLog(
            file, is_main=self._owner.is_main_process, rank=self._owner.rank, early=early
        )
        self._closers.callback(self._log.close)

    def become_main(self, file: Path | None) -> None:
        """Log and show from here on what the main process does, in the place of one that has ended."""
        if self._log is not None:
            self._log.become_main(file)
        if self._runner is not None:
            self._open_bar(self._runner)

    def _open_bar(self, runner: TorchRunner) -> None:
        self.bar = Progress(
            runner.steps,
            initial=runner.state.train.global_step,
            desc=_experiment(runner),
            seconds_between_lines=runner.config.log_seconds,
        )
        self.bar.epoch = _epoch(runner)

    def speaking(self) -> AbstractContextManager[None]:
        """Return the context in which log messages belong to this run alone."""
        return self._log.speaking() if self._log is not None else nullcontext()

    def print(self, *values: object, file: Any = None, **kwargs: Any) -> None:
        """Print as the builtin does, on the main process only, without tearing the bar."""
        if self._owner.is_main_process:
            with beside_bar(file if file is not None else sys.stdout) as stream:
                print(*values, file=stream, **kwargs)

    # One training

    def begin(self, runner: TorchRunner, update: UpdateStep, *, sums_loss: bool) -> None:
        """Begin to measure and to show a training. Called on all ranks.

        Args:
            runner: The runner.
            update: What makes its updates.
            sums_loss: Whether the criterion sums, so that the loss of an update is shown as a sum.
        """
        self._runner = runner
        self._update = update
        self._sums_loss = sums_loss
        self.telemetry.begin(runner)
        seconds = runner.config.log_seconds
        self._result_lines, self._stream_lines = Paced(seconds, burst=_RESULT_LINES), Paced(seconds)
        if runner.is_main_process:
            self._write_streams(runner)
            self._open_bar(runner)
            for line in describe_training(runner, self._data.division()):
                logger.info("%s", line)

    def log_end(self, ending: str) -> None:
        """Log on the main process how a training ended, such as `Finished`, and what it did.

        Files that cannot be looked up, such as in a working directory that was removed, are no error: the training is over.
        """
        runner = self._runner
        if runner is None or not runner.is_main_process:
            return
        if self.bar is not None:
            self.bar.write_last()
        try:
            more = describe_end(runner, self._session.stop_reason)
        except OSError as error:
            more = [f"(the checkpoints to continue from cannot be read: {error})"]
        logger.info("%s", "\n  ".join([f"{ending}: {self.telemetry.summary(runner)}", *more]))
        try:
            self._write_streams(runner)
        except Exception:
            logger.exception(
                "How far the streams of this run came could not be read; its end follows."
            )

    def end(self) -> None:
        """Let go of the terminal and flush the trackers. A second call does nothing."""
        bar, self.bar = self.bar, None
        if bar is not None:
            bar.close()
        if self._runner is not None:
            self._runner = None
            self._update = None
            self.telemetry.end()
            self.trackers.flush()

    # Events

    def pass_started(self, split: str) -> None:
        if self.bar is not None and self._runner is not None:
            # Not before: an epoch is evaluated and saved under its own number.
            self.bar.set_epoch(_epoch(self._runner))

    def update_ended(self, outcome: UpdateOutcome) -> None:
        runner, update = self._runner, self._update
        if runner is None or update is None:
            return
        step = runner.state.train.global_step
        if outcome.committed and step % update.log_every == 0:
            self._log_update(runner, update, outcome)
        bar = self.bar
        if bar is not None:
            bar.step = step
            if bar.draws_bar:
                bar.draw()

    def evaluation_started(self, split: str) -> None:
        self._show_doing(split)

    def evaluation_batch_started(self, split: str, number: int) -> None:
        self._show_doing(f"{split} {number}")

    def evaluation_ended(self, split: str) -> None:
        self._show_doing("")

    def save_started(self) -> None:
        self._show_doing("checkpoint")

    def save_ended(self) -> None:
        self._show_doing("")
        if self._session.running:  # else they are flushed at the end
            self.trackers.flush()

    def _show_doing(self, what: str) -> None:
        if self.bar is not None:
            self.bar.doing(what)

    # Metrics

    def forget_samples(self, samples: int) -> None:
        """Count the samples of the next log line from here, since the counter has jumped."""
        self.telemetry.samples_at_log = samples

    def _log_update(self, runner: TorchRunner, update: UpdateStep, outcome: UpdateOutcome) -> None:
        """Log the metrics of an update and the speed since the last line. One collective."""
        train, ranks = runner.state.train, self.rank_times
        update.read_samples()
        own = ranks.own(self.telemetry.waited_since_report) if ranks is not None else ()
        pace, rows = self.telemetry.report(runner, own)
        # Only here, since all ranks make the collective of `report`.
        if not runner.is_main_process and self.trackers.recent is None:
            return
        # On an accelerator a window without any weight is noticed only here.
        values = {"loss": float(outcome.loss_sum if self._sums_loss else outcome.loss)}
        for index, rate in enumerate(update.rates):
            name = "learning_rate" if index == 0 else f"learning_rate.{index}"
            if rate is not None:
                values[name] = rate
        if outcome.grad_norm is not None:
            values["grad_norm"] = float(outcome.grad_norm)
        values |= pace
        named = {f"train/{name}": value for name, value in values.items()}
        # For the line on the terminal, which has one number a name: that of all splits together.
        known: dict[str, float] = {}
        groups: dict[str, Mapping[str, float]] = {
            split: loader.metrics() for split, loader in self._data.update_loaders().items()
        }
        for further in self.figures:
            groups.update(further(train.global_step))
        for split, found in groups.items():
            named |= {f"{split}/{name}": value for name, value in found.items()}
            known |= {name: known.get(name, 0) + value for name, value in found.items()}
        slow, beside = "", None
        if ranks is not None and rows:
            slow, beside = ranks.judge(rows), {"ranks": ranks.record(rows)}
        self.trackers.log(named, train.global_step, beside=beside)
        if self.bar is not None:
            known |= values
            self.bar.epoch = _epoch(runner)
            shown = {text: known[name] for name, text in _SHOWN.items() if name in known}
            speed = ""
            if "samples_per_second" in pace:
                speed = f"{format_count(pace['samples_per_second'])} samples/s"
            note = f"slow: {slow}" if slow else ""
            self.bar.show(train.global_step, shown, speed=speed, note=note)
        if self._stream_lines.due():
            self._write_streams(runner)

    def log_result(
        self, runner: TorchRunner, result: Mapping[str, Mapping[str, float]], *, last: bool
    ) -> None:
        """Log the metrics of an epoch or an evaluation by split, on the main process; the last ones are printed at any pace."""
        is_main = runner.is_main_process
        if not is_main and self.trackers.recent is None:
            return
        step, bar = runner.state.train.global_step, self.bar
        if is_main and (self._result_lines.due() or last):
            metrics = "  ".join(
                f"{split} {format_scores(values)}" for split, values in result.items()
            )
            logger.info("%s %d: %s", _unit(runner), runner.index, metrics)
            if bar is not None:
                bar.forget_last()
        # Its own key: `train/loss` is the loss of single updates.
        named = {
            f"{split}_mean" if split in runner.train_splits else split: values
            for split, values in result.items()
        }
        flat = {
            f"{split}/{name}": value
            for split, values in named.items()
            for name, value in values.items()
        }
        self.trackers.log(flat, step)

    def _write_streams(self, runner: TorchRunner) -> None:
        streams = {
            split: found
            for split, loader in self._data.update_loaders().items()
            if (found := loader.standing())
        }
        if streams:
            runner.workspace.write_streams(streams)


def _experiment(runner: TorchRunner) -> str:
    """Return the name of the experiment, nothing if the program has given none."""
    name = runner.config.experiment
    return "" if name == TopLevelConfig.experiment else name


def _unit(runner: TorchRunner) -> str:
    """Return in what the run counts: `step` or `epoch`."""
    return "step" if runner.is_step_mode else "epoch"


def _budget(runner: TorchRunner) -> int | None:
    return runner.steps if runner.is_step_mode else runner.epochs


def _epoch(runner: TorchRunner) -> str:
    """Return the text after the name on the bar, such as `epoch 2/5`."""
    if runner.is_step_mode:
        return ""
    return f"epoch {min(runner.state.train.epoch + 1, runner.epochs or 1)}/{runner.epochs}"


# The messages at the beginning and at the end of a training


def describe_training(runner: TorchRunner, division: Division | None) -> list[str]:
    """Describe the training, in lines of at most 100 columns; a path alone may be longer."""
    train, size = runner.state.train, runner.world_size
    budget = f"{_unit(runner)} {_budget(runner)}"
    processes = f"{size} {runner.device.type} process{'es' if size > 1 else ''}"
    stack = f"{runner.stack}, {runner.config.precision or 'fp32'}"
    head = f"Training from step {train.global_step} (epoch {train.epoch}) to {budget} on {processes} ({stack})"
    parameters = [parameter for _, parameter in runner.named_parameters()]
    whole = sum(p.numel() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    sizes = f"{whole:,} parameters" + (f", {trained:,} trained" if trained != whole else "")
    batch = runner.batch_size
    accumulated = f" x {runner.accum_steps} micro-batches" if runner.accum_steps > 1 else ""
    each = " on each" if runner.distributed else ""
    if division is not None:
        most = "" if division.is_even else "at most "
        sizes += f", {division.samples} samples an update, {most}{batch}{accumulated}{each}"
    elif batch:
        sizes += f", batch {batch}{accumulated}{each}"
    first = [f"{head}: {sizes}"] if len(head) + len(sizes) <= _WIDTH else [head, sizes]
    try:
        load = os.getloadavg()[0]
    except OSError:
        load = 0.0
    # The load is that of the machine, and so are its cores, of which this process may have a few.
    threads = int(arithmetic(runner.device)["threads"]) if runner.device.type == "cpu" else 1
    return [
        *first,
        f"Run directory: {runner.workspace.dir}",
        *hints_of_threads(threads, load=load, cores=os.cpu_count() or 1),
    ]


def hints_of_threads(threads: int, *, load: float, cores: int) -> list[str]:
    """Say that threads of a training on the CPU wait for each other, where other programs leave them no core each."""
    if threads < 2 or load <= cores:
        return []
    return [
        f"Load {load:.1f} on {cores} cores: {threads} threads wait for each other. OMP_NUM_THREADS=1 is faster for a small model."
    ]


def describe_end(runner: TorchRunner, reason: str | None) -> list[str]:
    """Return the best score, and the commands to resume, to draw and to export, a line each. No communication.

    Args:
        runner: The runner.
        reason: Why the training ended; `None` at the end of its budget.
    """
    directory, checkpoints = runner.workspace.dir, runner.workspace.checkpoints
    # A file without a suffix is the pointer to a directory.
    places = [
        (name, checkpoints / f"{name}{suffix}")
        for name in ("best", "latest")
        for suffix in ("", ".pth")
    ]
    kept = {name: path for name, path in places if path.is_file()}
    lines = []
    if runner.best_index is not None and runner.best_score is not None:
        board, unit = runner.standing.board, _unit(runner)
        score = runner.config.score_name if board is None else f"{board.split}.{board.name}"
        place = f": {_shown(kept['best'])}" if "best" in kept else ""
        lines.append(
            f"best     {score} {format_number(runner.best_score)} at {unit} {runner.best_index}{place}"
        )
    if "latest" in kept:
        lines.append(f"resume   {_how_to_resume(runner, kept['latest'], reason)}")
    if (directory / "metrics.jsonl").is_file():
        needs = "" if is_installed("matplotlib") else "  # needs pip install matplotlib"
        lines.append(f"curves   danling plot {shlex.quote(_shown(directory))} -o curves.png{needs}")
    if kept:
        weights = shlex.quote(_shown(next(iter(kept.values()))))
        # The other format needs no further package.
        suffix = "safetensors" if is_installed("safetensors") else "pth"
        trust = " --trust" if runner.stack == "deepspeed" else ""
        lines.append(f"weights  danling export {weights} model.{suffix}{trust}")
    return lines


def _how_to_resume(runner: TorchRunner, latest: Path, reason: str | None) -> str:
    """Return what continues a run, with larger values of the settings that have ended it: its budget, and the patience that is used up."""
    done = _budget(runner)
    more: dict[str, int] = {}
    # With the budget that is used up, the command would do nothing.
    if runner.progress >= 1 and done and reason in (None, "patience"):
        more[f"{_unit(runner)}s"] = 2 * done
    if reason == "patience":
        more["patience"] = runner.standing.evaluations_since_best + max(
            1, int(runner.config.patience)
        )
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    # Only a program whose configuration has read the command line takes these options.
    given = runner.config.__dict__.get("_command_line")
    if given is None or (spec is None and file is None):  # as in a notebook
        changed = f", {more}" if more else ""
        return f"{type(runner).__name__}.from_checkpoint({_shown(latest)!r}{changed}).train()"
    # On several machines without the other options of torchrun, which its processes do not know.
    command = launch_command(runner.world_size)
    command += ["-m", spec.name] if spec is not None else [_shown(Path(str(file)))]
    listed = runner.config.secret_keys or ()
    secrets = secret_values(runner.config.plain(), listed)
    for name, words in given:
        key = name.replace("-", "_")
        if key not in (*_CHOSEN, *more):
            is_secret = names_secret(key, listed) or any(
                secret in word for word in words for secret in secrets
            )
            shown = ["..."] if is_secret else [hide_secrets(word, listed) for word in words]
            # A value such as `-1` would be read as an option.
            is_joined = bool(shown) and shown[0].startswith("-")
            command += [f"--{name}={shown[0]}", *shown[1:]] if is_joined else [f"--{name}", *shown]
    command += ["--dir", _shown(runner.workspace.dir), "--auto_resume", "true"]
    return shlex.join(
        command + [word for key, value in more.items() for word in (f"--{key}", str(value))]
    )


def _shown(path: Path) -> str:
    """Return a path as it is shortest: relative to the working directory where it is below it."""
    below = os.path.relpath(path)
    return str(path) if below.startswith("..") else below

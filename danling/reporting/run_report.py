"""What the reporter is told of a training: where it begins, its updates, its results, and how it ends."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from danling.config.names import counts_flops
from danling.config.parse import command_line_of
from danling.utils.messages import Paced
from danling.utils.secrets import hide_secret_words, secret_values

from .description import describe_batches, describe_parameters, describe_training
from .summary import Launch, describe_end

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner
    from danling.training import UpdateOutcome

logger = logging.getLogger("danling")


class RunReport:
    """Tells the reporter of one training after the other."""

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner
        self._reporter = runner._reporter
        self._stream_lines = Paced(runner.config.log_seconds)

    def begin(self) -> None:
        """Begin to report a training. Called on all ranks."""
        runner, reporter, config, train = self._runner, self._reporter, self._runner.config, self._runner.state.train
        # It may have been changed since the runner was constructed.
        reporter.seconds_between_lines = config.log_seconds
        self._stream_lines = Paced(config.log_seconds)
        self._write_streams()
        known = (runner.flops_per_token() or runner.flops_per_sample()) is not None
        countable = counts_flops(runner.stack) and not config.compile.enable
        reporter.flops.begin(runner.peak_flops(), known=known, countable=countable)
        reporter.begin(
            step=train.global_step,
            samples=train.samples,
            total_steps=runner.steps,
            device=runner.device,
            name=config.experiment,
            epoch=self._epoch(),
            profiler=runner.build_profiler(),
        )
        if not runner.is_main_process:
            return
        size = runner.world_size
        for line in describe_training(
            step=train.global_step,
            epoch=train.epoch,
            budget=f"step {runner.steps}" if runner.is_step_mode else f"epoch {runner.epochs}",
            processes=f"{size} {runner.device.type} process{'es' if size > 1 else ''}",
            stack=f"{runner.stack}, {config.precision or 'fp32'}",
            parameters=describe_parameters((p.numel(), p.requires_grad) for _, p in runner.named_parameters()),
            batches=describe_batches(
                runner.batch_size, runner.accum_steps, runner._data.splits.division(), distributed=runner.distributed
            ),
            directory=runner.workspace.dir,
        ):
            logger.info("%s", line)

    def log_update(self, update: UpdateOutcome) -> None:
        """Log the metrics of an update, the speed since the last line, and how far the streams are. One collective."""
        runner, train = self._runner, self._runner.state.train
        runner._parts.update.read_samples()
        self._reporter.log_update(
            train.global_step,
            # On an accelerator a window without any weight is noticed only here.
            loss=update.loss_sum if runner._parts.sums_loss else update.loss,
            samples=train.samples,
            grad_norm=update.grad_norm,
            learning_rates=runner._parts.update.rates,
            epoch=self._epoch(),
            domain=runner.placement.optimizer,
            counts_samples=runner.placement.counts_samples,
            per_token=runner.flops_per_token,
            per_sample=runner.flops_per_sample,
            of_loaders=self._metrics_of_data,
        )
        if self._stream_lines.due():
            self._write_streams()

    def log_result(self, result: Mapping[str, Mapping[str, float]]) -> None:
        """Log the metrics of an epoch or an evaluation."""
        runner = self._runner
        ended = runner.progress >= 1 or runner._parts.loop.data_ended or runner._session.stop_reason is not None
        self._reporter.log_result(
            result,
            step=runner.state.train.global_step,
            title=f"{'step' if runner.is_step_mode else 'epoch'} {runner.index}",
            trained=runner.train_splits,
            last=ended,
            epoch=self._epoch(),
        )

    def say_ending(self, ending: str) -> None:
        """Say how the training ended, what it did, and how far its streams came."""
        train = self._runner.state.train
        self._reporter.log_ending(ending, step=train.global_step, samples=train.samples, summary=self._summary)
        try:
            self._write_streams()
        except Exception:
            logger.exception("How far the streams of this run came could not be read; its end follows.")

    def _epoch(self) -> str:
        """Return the text behind the name on the bar."""
        epochs = self._runner.epochs
        if self._runner.is_step_mode:
            return ""
        return f"epoch {min(self._runner.state.train.epoch + 1, epochs or 1)}/{epochs}"

    def _metrics_of_data(self) -> Mapping[str, Mapping[str, float]]:
        """Return the metrics of the loaders, by split, and of the copy of the run in an object store."""
        runner = self._runner
        copied = runner._remote.figures(runner.state.train.global_step) if runner._has_remote() else {}
        return {**runner._data.metrics(), **copied}

    def _write_streams(self) -> None:
        """Write how far the streams are that the run trains on, on the main process."""
        streams = self._runner._data.streams() if self._runner.is_main_process else {}
        if streams:
            self._runner.workspace.write_streams(streams)

    def _summary(self) -> list[str]:
        """Return what is said at the end besides the speed: the best score, and what to do next. No communication."""
        runner, board = self._runner, self._runner.standing.board
        unit = "step" if runner.is_step_mode else "epoch"
        best = None
        if runner.best_index is not None and runner.best_score is not None:
            name = runner.config.score_name if board is None else f"{board.split}.{board.name}"
            best = (name, runner.best_score, f"{unit} {runner.best_index}")
        words, listed = command_line_of(runner.config), runner.config.secret_keys or ()
        if words is not None:
            words = tuple(hide_secret_words(words, secret_values(runner.config.plain(), listed), listed))
        # Larger values of the settings that have ended the run.
        more, reason = {}, runner._session.stop_reason
        done = runner.steps if runner.is_step_mode else runner.epochs
        if runner.progress >= 1 and done and reason in (None, "patience"):
            more[f"{unit}s"] = 2 * done
        if reason == "patience":
            more["patience"] = runner.standing.evaluations_since_best + max(1, int(runner.config.patience))
        return describe_end(
            Launch.of_this_program(words, runner.world_size, type(runner).__name__),
            directory=runner.workspace.dir,
            checkpoints=runner.workspace.checkpoints,
            best=best,
            more=more,
            trust=runner.stack == "deepspeed",
        )

"""What is seen of a run: its speed, its figures in log lines and trackers, its progress bar, its profile, its results."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from danling.config import RunnerConfig
from danling.data import Batch
from danling.reporting import Progress, Telemetry, counted, device_peak_flops
from danling.supervision import Profiler
from danling.training import UpdateOutcome, count_tokens
from danling.utils.numbers import Paced, format_count

from .torch_update import TorchUpdate

logger = logging.getLogger("danling")

_SHOWN = {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "lr"}
"""Figures of an update that are printed, and what they are called there."""

_RESULT_LINES = 100
"""Results of epochs or evaluations that are printed at any pace."""


class TorchFigures(TorchUpdate):
    """Telemetry and figures of a torch runner."""

    def __init__(self, config: RunnerConfig | Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self.telemetry: Telemetry | None = None
        self._logged_samples = self._session_samples = 0
        self._profiler: Profiler | None = None
        self._peak_flops: float | None = None
        self._measured_flops: float | None = None
        self._result_lines = Paced(self.config.log_seconds, burst=_RESULT_LINES)

    def count_tokens(self, data: Any) -> float:
        """Return the tokens of a batch for the figures of speed, 0 for data that has none; override it for batches of your own.

        No communication: may be called on one rank.

        The default counts the elements of an integer input of two dimensions `(batch, sequence)`. Called for every micro-batch on
        the host's side: look at shapes, not at values, which would wait for the device.

        Args:
            data: The batch, before it is moved to the device.
        """
        return count_tokens(data)

    def flops_per_token(self) -> float | None:
        """Return the model's FLOPs for a token, forward and backward, such as `6 * parameters`; `None` leaves it to the others.

        No communication: may be called on one rank.
        """
        return None

    def flops_per_sample(self) -> float | None:
        """Return the model's FLOPs for a sample, forward and backward.

        No communication: may be called on one rank.

        The default is what torch counted in the first micro-batch of training, where the peak of the device is known and the
        model runs as plain operations: matrix products, convolutions and attention.

        Returns:
            `None` when it is not known; then neither FLOPs nor their share of the peak is reported.
        """
        return self._measured_flops

    def peak_flops(self) -> float | None:
        """Return what one device could do at most, in FLOP/s; `None` when it is not known, as on a CPU. Never a guess.

        No communication: may be called on one rank.
        """
        return device_peak_flops(self.device, self.config.precision)

    def _alone_train_step(self, call: Callable[[Any], Any], data: Any) -> Any:
        self.prepare_updates()
        returned: list[Any] = []
        self._micro_step(Batch(data, None, None), lambda moved: returned.append(call(moved)))
        return returned[0]

    def _micro_step(self, batch: Batch, train_step: Callable[[Any], Any] | None = None) -> None:
        run = self.train_step if train_step is None else train_step
        data = self.to_device(batch.data)
        weight, samples = self._weigh(batch, data)
        self.window.open(weight, samples)
        if batch.samples != 0 and self.telemetry is not None:
            self.telemetry.tokens += self.count_tokens(batch.data)
        self._in_train_step = True
        try:
            if self._measures_flops and samples:
                self._measures_flops = False
                self._measured_flops = counted(lambda: run(data)) / samples
            else:
                run(data)
        finally:
            self._in_train_step = False
        self.state.train.micro_step += 1

    _measures_flops: bool = False
    """Whether the next micro-batch is run with its operations counted."""

    def _can_count_flops(self) -> bool:
        plain = self.stack == "ddp" and not self.config.compile.enable
        return plain and self._peak_flops is not None

    def _log(self, outcome: UpdateOutcome) -> None:
        """Write the figures of the update and the pace since the last line. One collective; called on all ranks."""
        telemetry = self.telemetry
        assert telemetry is not None
        self.read_samples()
        samples, self._logged_samples = self.state.train.samples - self._logged_samples, self.state.train.samples
        shared = telemetry.share(self.optimizer_domain, counts=self.reports[1])
        if not self.is_main_process:
            telemetry.open_window()
            return
        step = self.state.train.global_step
        # On an accelerator a window without any weight is noticed only here.
        loss = float(outcome.loss_sum if self.sums_loss else outcome.loss)
        pace = telemetry.report(
            step, samples=samples, shared=shared, learning_rates=self._rates, grad_norm=outcome.grad_norm
        )
        values = {"train/loss": loss, **{f"train/{name}": value for name, value in (pace | self._usage(pace)).items()}}
        self._track_values(values)
        if self.progress_bar is not None:
            self.progress_bar.epoch = self._epoch_shown()
            shown = {short: values[f"train/{name}"] for name, short in _SHOWN.items() if f"train/{name}" in values}
            speed = f"{format_count(pace['samples_per_second'])} samples/s" if "samples_per_second" in pace else ""
            self.progress_bar.show(step, shown, speed=speed)

    def _usage(self, pace: Mapping[str, float]) -> dict[str, float]:
        """Model FLOPs a second over all ranks, and their share of the peak, where they are known."""
        for per_unit, speed in (
            (self.flops_per_token(), pace.get("tokens_per_second")),
            (self.flops_per_sample(), pace.get("samples_per_second")),
        ):
            if per_unit and speed:
                figures = {"model_flops_per_second": per_unit * speed}
                if self._peak_flops:
                    figures["mfu"] = per_unit * speed / (self._peak_flops * self.world_size)
                return figures
        return {}

    def _track_values(self, values: dict[str, float]) -> None:
        self._trackers.log(values, self.state.train.global_step)

    # Opening and closing

    def _open_progress(self) -> None:
        self._logged_samples = self._session_samples = self.state.train.samples
        step = self.state.train.global_step
        self.telemetry = Telemetry(total_steps=self.steps, global_step=step, device=self.device)
        self._peak_flops = self.peak_flops()
        own = self.flops_per_token() or self.flops_per_sample()
        self._measures_flops = own is None and self._can_count_flops()
        self._profiler = self.build_profiler()
        if self.is_main_process:
            self.progress_bar = Progress(
                self.steps,
                initial=step,
                desc=self.config.experiment,
                seconds_between_lines=self.config.log_seconds,
            )
            self.progress_bar.epoch = self._epoch_shown()
            logger.info("%s", self._opening())

    def _epoch_shown(self) -> str:
        return "" if self.is_step_mode else f"epoch {min(self.state.train.epoch + 1, self.epochs or 1)}/{self.epochs}"

    def _opening(self) -> str:
        """Return what is going to be trained, in one line."""
        sizes = [(p.numel(), p.requires_grad) for _, p in self.named_parameters()]
        whole, trained = sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)
        parameters = f"{whole:,} parameters" + (f", {trained:,} trained" if trained != whole else "")
        budget = f"epoch {self.epochs}" if not self.is_step_mode else f"step {self.steps}"
        accumulated = f" x {self.accum_steps} micro-batches" if self.accum_steps > 1 else ""
        division = self._first_division()
        each = " on each" if self.distributed else ""
        batch = f", batch {self.batch_size}{accumulated}{each}" if self.batch_size else ""
        if division is not None:
            most = "at most " if not division.is_even else ""
            batch = f", {division.samples} samples an update, {most}{self.batch_size}{accumulated}{each}"
        train = self.state.train
        return (
            f"Training from step {train.global_step} (epoch {train.epoch}) to {budget} on {self.world_size} "
            f"{self.device.type} process{'es' if self.world_size > 1 else ''} ({self.stack}, {self.config.precision or 'fp32'}): "
            f"{parameters}{batch}, in {self.workspace.dir}"
        )

    def _summarize(self, ending: str) -> None:
        if self.is_main_process and self.telemetry is not None:
            train = self.state.train
            if self.progress_bar is not None:
                self.progress_bar.write_last()
            logger.info(
                "%s: %s", ending, self.telemetry.summary(train.global_step, train.samples - self._session_samples)
            )

    def build_profiler(self) -> Profiler | None:
        """Return the profiler of `config.profiling`, `None` when it is off. Called on all ranks."""
        settings = dict(self.config.profiling.items())
        if not settings.pop("enabled"):
            return None
        directory = self.workspace.dir / settings.pop("trace_dir")
        if settings["profile_memory"] and self.device.type == "cuda":
            # Where blocks were allocated, for the snapshot of a run that is out of memory.
            torch.cuda.memory._record_memory_history(max_entries=100_000)
        return Profiler(directory, rank=self.rank, **settings)

    def _close_progress(self) -> None:
        if self._profiler is not None:
            self._profiler.close()
            self._profiler = None
        if self.progress_bar is not None:
            self.progress_bar.close()
            self.progress_bar = None

    def write_results(self) -> None:
        """Write the figures of the run, its last ones and its best ones, on the main process."""
        if self.is_main_process:
            weights = self.evaluated_weights
            latest = {"index": self.index, "weights": weights, "result": self.latest_result}
            best = {"index": self.best_index, "weights": weights, "score": self.best_score, "result": self.best_result}
            is_here = self.best_index is None or self.best_index != self._best_elsewhere
            self.workspace.write_results(self.results, latest, best if is_here else None)

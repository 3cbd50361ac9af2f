"""What is seen of a run: its speed, its figures in log lines and trackers, its progress bar, its profile, its results."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from danling.data import Batch
from danling.reporting import describe_batches, describe_parameters, describe_training, device_peak_flops
from danling.supervision import Profiler
from danling.training import UpdateOutcome, count_tokens, model_loss, peek_target, prediction_of

from .torch_update import TorchUpdate

logger = logging.getLogger("danling")


class TorchFigures(TorchUpdate):
    """Telemetry and figures of a torch runner."""

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
        return self._reporter.flops.counted

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
        if self.window.count == 0:
            self.reduction.begin(first=not self._looked)
        data = self.to_device(batch.data)
        weight, samples = self._batch_weights.weigh(
            batch, data, self.batch_weight, training=True, criterion=self.criterion
        )
        self.window.open(weight, samples)
        reporter = self._reporter
        if batch.samples != 0 and reporter.telemetry is not None:
            reporter.telemetry.tokens += self.count_tokens(batch.data)
        self._in_train_step = True
        try:
            if reporter.flops.counts_next and samples:
                reporter.flops.count(lambda: run(data), samples)
            else:
                returned = run(data)
                if self.criterion is None and self._observes_labels and self._overrides("train_step"):
                    self._observe_late(returned, peek_target(data))
        finally:
            self._in_train_step = False
        self.state.train.micro_step += 1

    def _observe_late(self, returned: Any, target: Any) -> None:
        """Look at what a `train_step` of the user's returned, which has not asked for the loss."""
        found = model_loss(returned[0]) if isinstance(returned, tuple) and returned else None
        if found is None or self._overrides("batch_weight") or self._overrides("compute_loss"):
            return
        self.label_shift.observe_afterwards(found, prediction_of(returned[0]), target)
        self._say_of_labels()

    def _log_update(self, outcome: UpdateOutcome) -> None:
        """Log the metrics of the update and the speed since the last line. One collective."""
        self.read_samples()
        train = self.state.train
        self._reporter.log_update(
            train.global_step,
            # On an accelerator a window without any weight is noticed only here.
            loss=outcome.loss_sum if self.sums_loss else outcome.loss,
            samples=train.samples,
            grad_norm=outcome.grad_norm,
            learning_rates=self._rates,
            epoch=self._epoch_shown(),
            domain=self.placement.optimizer,
            counts_samples=self.placement.counts_samples,
            per_token=self.flops_per_token,
            per_sample=self.flops_per_sample,
        )

    # Opening and closing

    def _begin_report(self) -> None:
        train, reporter = self.state.train, self._reporter
        known = (self.flops_per_token() or self.flops_per_sample()) is not None
        countable = self.stack == "ddp" and not self.config.compile.enable
        reporter.flops.begin(self.peak_flops(), known=known, countable=countable)
        # It may have been changed since a tracker was added, which made the reporter.
        reporter.seconds_between_lines = self.config.log_seconds
        reporter.begin(
            step=train.global_step,
            samples=train.samples,
            total_steps=self.steps,
            device=self.device,
            name=self.config.experiment,
            epoch=self._epoch_shown(),
            profiler=self.build_profiler(),
        )
        if self.is_main_process:
            logger.info("%s", self._description())

    def _epoch_shown(self) -> str:
        return "" if self.is_step_mode else f"epoch {min(self.state.train.epoch + 1, self.epochs or 1)}/{self.epochs}"

    def _description(self) -> str:
        """Return what is going to be trained, in one line."""
        train = self.state.train
        return describe_training(
            step=train.global_step,
            epoch=train.epoch,
            budget=f"step {self.steps}" if self.is_step_mode else f"epoch {self.epochs}",
            processes=f"{self.world_size} {self.device.type} process{'es' if self.world_size > 1 else ''}",
            stack=f"{self.stack}, {self.config.precision or 'fp32'}",
            parameters=describe_parameters((p.numel(), p.requires_grad) for _, p in self.named_parameters()),
            batches=describe_batches(
                self.batch_size, self.accum_steps, self.update_plan.division(), distributed=self.distributed
            ),
            directory=self.workspace.dir,
        )

    def _say_ending(self, ending: str) -> None:
        self._reporter.log_ending(ending, step=self.state.train.global_step, samples=self.state.train.samples)

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

    def write_results(self) -> None:
        """Write the figures of the run, its last ones and its best ones, on the main process."""
        if self.is_main_process:
            weights = "trained" if self.ema is None else "averaged"
            latest = {"index": self.index, "weights": weights, "result": self.latest_result}
            best = {"index": self.best_index, "weights": weights, "score": self.best_score, "result": self.best_result}
            is_here = self.best_index is None or self.best_index != self.saver.best_elsewhere
            self.workspace.write_results(self.results, latest, best if is_here else None)

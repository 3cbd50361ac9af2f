"""The training core: two loops, one batch loop, one accumulation, one place that decides an update."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from danling.data import Batch, BatchSource
from danling.distributed import Verdict, agree
from danling.metrics import Meters
from danling.optim import needs_metric
from danling.supervision import EXIT_CODES
from danling.training import (
    NonFiniteError,
    UpdateOutcome,
    call_model,
    clip_by_norm,
    gradients_of,
    nonfinite_parameters,
    scale_gradients,
    unpack_batch,
)
from danling.workspace import Progress, format_scores

from .base_runner import Results
from .config import RunnerConfig
from .torch_evaluation import TorchEvaluation

logger = logging.getLogger("danling")

_NOTHING: frozenset[str] = frozenset()
_PRECEDENCE = ("terminate", "interrupt", "user_signal", "stop")
_BY_SIGNAL = ("terminate", "interrupt", "user_signal")


class TorchRunner(TorchEvaluation):
    """Trains on one process, or on several with DistributedDataParallel.

    Subclass it, set `model`, `criterion`, `datasets` (and, if you like, `optimizer`, `scheduler`, `dataloaders`) in `__init__` after
    `super().__init__(config)`, override what you want, and call `train()`. Construct and train on all ranks.

    Example:
        >>> class MyRunner(TorchRunner):
        ...     def __init__(self, config):
        ...         super().__init__(config)
        ...         self.model = nn.Linear(4, 2)
        ...         self.criterion = nn.CrossEntropyLoss()
        ...         self.datasets = {"train": train_set, "val": val_set}
        >>> MyRunner({"epochs": 3, "optim": {"type": "adamw"}}).train()  # doctest: +SKIP
    """

    def __init__(self, config: RunnerConfig | dict[str, Any] | None = None) -> None:
        super().__init__(config)
        self.losses = Meters()
        """Loss of the open epoch, or since the last evaluation in step mode; weighted over all ranks."""
        self.open_result: dict[str, dict[str, float]] = {}
        """Figures of the epoch that is not finished yet."""
        self._asked: set[str] = set()
        self._stop_for: str | None = None
        self._pending_check: tuple[int, Tensor] | None = None
        self._parameters: list[nn.Parameter] | None = None
        self._deadline = math.inf
        self._rates: list[float] = []
        """Learning rates of the update that is logged next: those it was made with."""
        self._log_every = 1024
        self._save_asked = False
        self._steps_scheduler = False

    # Train

    def train(
        self, train_splits: str | Sequence[str] | None = None, evaluate_splits: str | Sequence[str] | None = None
    ) -> Results:
        """Train to the end of the budget: by epochs when `epochs` is set, else by steps. Call on all ranks.

        A run that is at its end returns at once, before it touches data, and writes nothing.

        Args:
            train_splits: Splits to train on; `None` is `self.train_splits`.
            evaluate_splits: Splits to evaluate; `None` is `self.evaluate_splits`.

        Returns:
            `self.results`: figures by completed epoch or global step, then by split.

        Raises:
            ValueError: If there is no budget, no optimizer, or nothing to train on.
            NonFiniteError: If an update is not finite and must not be skipped.
            SystemExit: After a signal that asked the run to stop; its full state has been saved.
        """
        return (self.train_steps if self.is_step_mode else self.train_epochs)(train_splits, evaluate_splits)

    def train_epochs(
        self, train_splits: str | Sequence[str] | None = None, evaluate_splits: str | Sequence[str] | None = None
    ) -> Results:
        """Train epoch by epoch until `epochs` are completed. Call on all ranks."""
        to_train, to_evaluate = self._check_ready(train_splits, evaluate_splits)
        state = self.state.train
        if state.epoch >= (self.epochs or 0) or self._gave_up():
            return self.results
        with self._session():
            while state.epoch < (self.epochs or 0) and not self._stop_for:
                for split in to_train:
                    if split not in self.open_result:
                        self.train_epoch(split)
                    if self._stop_for:
                        break
                else:
                    for split in to_evaluate:
                        self.open_result[split] = self.evaluate_epoch(split)
                    for split in to_train:
                        self.sources[split].finish_pass()
                    state.epoch += 1
                    self._close_result("epoch")
                    self._checkpoint_when_due(state.epoch, final=state.epoch == self.epochs)
        return self.results

    def train_epoch(self, split: str = "train") -> dict[str, float]:
        """Train what is left of one pass over one split. Call on all ranks.

        Returns:
            The weighted mean loss of the pass over all ranks, and what was put into `meters`; empty when it was stopped half-way.
        """
        for outcome in self._updates(split):
            self._after_update(outcome)
            if self._stop_for:
                return {}
        self.open_result[split] = self._training_figures()
        return self.open_result[split]

    def train_steps(
        self, train_splits: str | Sequence[str] | None = None, evaluate_splits: str | Sequence[str] | None = None
    ) -> Results:
        """Train update by update until `steps` are committed, pass after pass over the data. Call on all ranks."""
        to_train, to_evaluate = self._check_ready(train_splits, evaluate_splits)
        state = self.state.train
        if state.global_step >= (self.steps or 0) or self._gave_up():
            return self.results
        with self._session():
            while state.global_step < (self.steps or 0) and not self._stop_for:
                for split in to_train:
                    for outcome in self._updates(split):
                        self._after_update(outcome)
                        if outcome.committed and self._evaluation_due():
                            self.open_result[split] = self._training_figures()
                            for name in to_evaluate:
                                self.open_result[name] = self.evaluate_steps(name)
                            self._close_result("validation")
                        if outcome.committed:
                            self._checkpoint_when_due(state.global_step, final=state.global_step == self.steps)
                        if self._stop_for or state.global_step == self.steps:
                            break
                    else:
                        self.sources[split].finish_pass()
                        continue
                    break
                else:
                    state.epoch += 1
        return self.results

    def _gave_up(self) -> bool:
        return self.scoreboard is not None and self.scoreboard.should_stop

    def _check_ready(self, train_splits: Any, evaluate_splits: Any) -> tuple[list[str], list[str]]:
        if self.epochs is None and self.steps is None:
            raise ValueError(
                "Expected a budget: `steps` (optimizer updates) or `epochs`. Received: steps=None, epochs=None. Set one of them."
            )
        if self.optimizer is None:
            raise ValueError(
                "Expected an optimizer. Received: optimizer=None. Assign `self.optimizer` in __init__, or set `optim.type`."
            )
        to_train = self._named_splits(train_splits, self.train_splits, "train on")
        if evaluate_splits is None and not self.evaluate_splits:
            return to_train, []
        return to_train, self._named_splits(evaluate_splits, self.evaluate_splits, "evaluate")

    @contextmanager
    def _session(self) -> Iterator[None]:
        """Signals watched, the bar open; a stop that was asked for ends in a full checkpoint."""
        self._stop_for = None
        self._parameters = None
        self.window.sum_reduced = self.sums_loss
        limit = self.config.max_time_seconds()
        self._deadline = time.monotonic() + limit if limit is not None else math.inf
        self.model.train()
        self.open_trackers()
        self.init_signal_handlers()
        self._open_progress()
        try:
            yield
            self._finish_session()
        finally:
            if self.signals is not None:
                self.signals.uninstall()
            self._close_progress()

    def _finish_session(self) -> None:
        self.settle()
        train = self.state.train
        if self._saved_at != (train.global_step, train.epoch):
            self.save_checkpoint()
        if self._stop_for is None and self.config.checkpoint.last_save_model_only:
            self.export_model()
        self._write_results()
        if self._stop_for in _BY_SIGNAL:
            logger.info("Stopped by a signal at step %d; the full state is saved.", train.global_step)
            self.checkpoint_manager.wait()
            raise SystemExit(EXIT_CODES[self._stop_for])

    # One update

    def _updates(self, split: str) -> Iterator[UpdateOutcome]:
        """The one batch loop: yield the outcome of every update of what is left of the pass over `split`."""
        source = self.sources[split]
        batches = source.batches()
        accum_steps = self.accum_steps
        found = source.consumed > 0
        while True:
            batch = next(batches, None)
            if not self._all_have(source, batch):
                break
            found = True
            consumed: list[Batch] = []
            while batch is not None:
                consumed.append(batch)
                upcoming = next(batches, None) if len(consumed) < accum_steps else None
                self.reduces_gradients = upcoming is None
                self._micro_step(batch)
                batch = upcoming
            outcome = self.step()
            source.commit(consumed)
            yield outcome
        if not found:
            raise ValueError(
                f"Expected at least one batch on every rank in split {split!r}. Received: an empty loader on some rank. Check the "
                "dataset, and `drop_last` against the batch size."
            )

    def _all_have(self, source: BatchSource, batch: Batch | None) -> bool:
        if source.even or self.data_domain.size == 1:
            return batch is not None
        # A rank that ran out would leave the others waiting in the gradient reduction, so the pass ends for all of them.
        ended = agree(self.data_domain, () if batch is not None else ("exhausted",))
        if ended and batch is not None:
            logger.warning("Another rank has no batch left in split %r: this pass ends early on rank %d.", source.split, self.rank)
        return not ended

    def _micro_step(self, batch: Batch) -> None:
        data = self.to_device(batch.data)
        self.window.open(*self._weigh(batch, data))
        self.train_step(data)
        self.state.train.micro_step += 1

    def train_step(self, data: Any) -> tuple[Any, Tensor]:
        """Run one micro-batch forward and backward. Called on all ranks, `accum_steps` times an update.

        Override it for a loop of your own; call `self.backward(loss)` with the mean-reduced loss of the batch.

        Args:
            data: The batch, on the device.

        Returns:
            The prediction and the loss.
        """
        inputs, target = unpack_batch(data)
        with self.train_context():
            with self.forward_context():
                pred = call_model(self.model, inputs)
                loss = self.compute_loss(pred, target)
            self.backward(loss)
        return pred, loss

    def backward(self, loss: Tensor) -> None:
        """Back-propagate the loss of the open micro-batch with its weight.

        Args:
            loss: 0-dim, as the criterion reduced it.
        """
        scaled = self.window.scale(loss)
        if self.precision.scaler is not None:
            scaled = self.precision.scaler.scale(scaled)
        scaled.backward()

    def step(self) -> UpdateOutcome:
        """Close the window: agree on its weight and health, mend the gradient, and decide the update. Called on all ranks."""
        verdict = self.ballot.cast(
            weight=self.window.weight,
            loss=self.window.loss,
            samples=self.window.samples,
            nonfinite=self.window.nonfinite,
            requests=self._requests(),
        )
        gradients = self.unscale_gradients(verdict)
        grad_norm = self.gradient_norm(gradients)
        reason = self._objection(verdict, grad_norm)
        if reason is None:
            self.clip_gradients(grad_norm)
            self.optimizer_step()
        outcome = UpdateOutcome(reason is None, verdict.weight, verdict.loss, verdict.samples, grad_norm, reason)
        self._conclude(outcome)
        self._heed(verdict.requests)
        return outcome

    def unscale_gradients(self, verdict: Verdict) -> list[Tensor]:
        """Divide the accumulated gradient by the global weight of the window, and by the scale of float16.

        Returns:
            The gradients of the parameters that have one.
        """
        if self.precision.scaler is not None:
            self.precision.scaler.unscale_(self.optimizer)
        gradients = gradients_of(self.parameters)
        scale_gradients(gradients, self.window.gradient_factor(verdict.weight, self.gradient_mean_over))
        return gradients

    @property
    def gradient_mean_over(self) -> int:
        """Number of ranks over which the gradient reduction takes a mean, as DistributedDataParallel does."""
        return self.data_domain.size if self.model is not self.unwrapped_model else 1

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters that the optimizer updates, read once a session."""
        if self._parameters is None:
            self._parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        return self._parameters

    def gradient_norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the 2-norm of the whole gradient, 0-dim; the same on all ranks of the optimizer domain."""
        return nn.utils.get_total_norm(gradients)

    def clip_gradients(self, grad_norm: Tensor) -> None:
        """Clip by `max_grad_norm`, then by `max_grad_value`."""
        if self.config.max_grad_norm is not None:
            clip_by_norm(self.parameters, self.config.max_grad_norm, grad_norm)
        if self.config.max_grad_value is not None:
            nn.utils.clip_grad_value_(self.parameters, self.config.max_grad_value)

    def _objection(self, verdict: Verdict, grad_norm: Tensor) -> str | None:
        """Why the update must not be made; `None` commits it. The same answer on all ranks."""
        if isinstance(verdict.weight, float) and verdict.weight == 0.0:
            return "weightless"
        if self._is_finite(verdict, grad_norm):
            return None
        if self.precision.scaler is not None:
            return "overflow"
        if self.config.skip_nonfinite_grad:
            return "nonfinite"
        raise self._nonfinite_error(self.state.train.global_step + 1)

    def _is_finite(self, verdict: Verdict, grad_norm: Tensor) -> bool:
        if self.device.type == "cpu":
            return not verdict.nonfinite and math.isfinite(grad_norm.item())
        healthy = torch.isfinite(grad_norm) & (torch.as_tensor(verdict.nonfinite, device=self.device) == 0)
        if self.precision.scaler is not None or self.config.skip_nonfinite_grad:
            return bool(healthy)
        # A run that may not skip has nothing to decide before the optimizer steps: it looks one update later, when the answer has
        # long arrived, and in any case before anything is saved.
        self.settle()
        self._pending_check = (self.state.train.global_step + 1, healthy)
        return True

    def settle(self) -> None:
        """Raise now what an update on an accelerator left to be checked. Called before anything is saved or evaluated."""
        pending, self._pending_check = self._pending_check, None
        if pending is not None and not bool(pending[1]):
            raise self._nonfinite_error(pending[0])

    def _nonfinite_error(self, step: int) -> NonFiniteError:
        names = nonfinite_parameters((n, p) for n, p in self.named_parameters())
        bad_ranks = self.optimizer_domain.gather_objects(bool(self.window.nonfinite))
        ranks = [rank for rank, bad in enumerate(bad_ranks) if bad]
        return NonFiniteError(
            f"Expected a finite loss and gradient at step {step}. Received: a loss that is not finite on ranks {ranks}, and "
            f"gradients that are not finite for {names or 'no parameter'}. Lower the learning rate, set max_grad_norm, or set "
            "skip_nonfinite_grad to leave such updates out."
        )

    def optimizer_step(self) -> None:
        """Apply a committed update to the weights."""
        if self.precision.scaler is not None:
            self.precision.scaler.step(self.optimizer)
        else:
            self.optimizer.step()

    def _conclude(self, outcome: UpdateOutcome) -> None:
        """Advance everything that moves with an update, or nothing."""
        self.optimizer.zero_grad()
        train = self.state.train
        if self.precision.scaler is not None and outcome.reason != "weightless":
            self.precision.scaler.update()
        train.samples += int(outcome.samples)
        if outcome.committed:
            train.global_step += 1
            train.consecutive_skips = 0
            if train.global_step % self._log_every == 0:
                self._rates = [float(group["lr"]) for group in self.optimizer.param_groups]
            if self.scheduler is not None and self._steps_scheduler:
                self.scheduler.step()
            if self.ema is not None:
                self.ema.update()
            self.losses.add_totals("loss", outcome.loss, outcome.weight)
        else:
            self._count_skip(outcome)
        self.window.reset()

    def _count_skip(self, outcome: UpdateOutcome) -> None:
        train = self.state.train
        train.skipped_updates += 1
        train.consecutive_skips += 1
        logger.warning("Update %d was skipped (%s).", train.global_step + 1, outcome.reason)
        limit = self.config.max_skipped_updates
        if limit is not None and train.consecutive_skips > limit:
            raise NonFiniteError(
                f"Expected at most {limit} skipped updates in a row. Received: {train.consecutive_skips} before step "
                f"{train.global_step + 1} (the last one: {outcome.reason}). Look at the data and the learning rate, or raise "
                "max_skipped_updates."
            )

    # Requests

    def stop(self) -> None:
        """Ask all ranks to stop after an update: at the next boundary they save the full state and `train` returns.

        May be called on one rank or on several, at any time.
        """
        self._asked.add("stop")

    def request_checkpoint(self) -> None:
        """Ask all ranks for a checkpoint at the next update boundary. May be called on one rank."""
        self._asked.add("save")

    def _requests(self) -> frozenset[str]:
        signalled = self.signals.request if self.signals is not None and self.signals.received is not None else None
        if signalled is None and not self._asked and time.monotonic() < self._deadline:
            return _NOTHING
        asked = set(self._asked)
        if signalled is not None:
            asked.add(signalled)
        if time.monotonic() >= self._deadline:
            asked.add("stop")
        self._asked.clear()
        return frozenset(asked)

    def _heed(self, requests: frozenset[str]) -> None:
        if not requests:
            return
        self._stop_for = next((name for name in _PRECEDENCE if name in requests), None)
        self._save_asked = "save" in requests

    # Boundaries

    def _after_update(self, outcome: UpdateOutcome) -> None:
        """What happens at every update boundary, besides evaluation and periodic checkpoints."""
        step = self.state.train.global_step
        if outcome.committed:
            if step % self._log_every == 0:
                self._log(outcome)
            if self.progress_bar is not None:
                self.progress_bar.update(step)
            if self.heartbeat is not None:
                self.heartbeat.beat(step, self.state.train.epoch)
            if self.gc_pacer is not None:
                self.gc_pacer.step()
        if self._save_asked:
            self._save_asked = False
            self.save_checkpoint()

    def _log(self, outcome: UpdateOutcome) -> None:
        """Write one line of figures of the update; called on all ranks, written on the main process."""
        if not self.is_main_process:
            return
        values = {"train/loss": float(outcome.loss) / float(outcome.weight)}
        if outcome.grad_norm is not None:
            values["train/grad_norm"] = float(outcome.grad_norm)
        for index, rate in enumerate(self._rates):
            values["train/lr" if index == 0 else f"train/lr.{index}"] = rate
        self._emit(values)

    def _emit(self, values: dict[str, float]) -> None:
        step = self.state.train.global_step
        for tracker in self.trackers or ():
            tracker.log(values, step)
        if self.progress_bar is not None:
            self.progress_bar.show(step, values)

    def _training_figures(self) -> dict[str, float]:
        self.settle()
        figures = self.losses.averages()
        if self.meters:
            figures.update(self.meters.averages(self.data_domain))
        self.losses.reset()
        self.meters.reset()
        return figures

    def _evaluation_due(self) -> bool:
        step, budget = self.state.train.global_step, self.steps
        interval = self.config.evaluate_interval or self.checkpoint_interval
        return step % interval == 0 or step == budget

    def _close_result(self, boundary: str) -> None:
        """Record the figures of an epoch or an evaluation, and decide what follows from them; the same on all ranks."""
        result, self.open_result = self.open_result, {}
        self.results[self.index] = result
        evaluated = self.scoreboard is not None and self.scoreboard.split in result
        if evaluated:
            self.scoreboard.record(self.index, result)
        if self.scheduler is not None and not self._steps_scheduler:
            self._advance_scheduler(boundary, result)
        if evaluated and self.scoreboard.should_stop:
            self._stop_for = "patience"
            logger.info("Stopping early: no better score than %s since %s.", self.best_score, self.best_index)
        self._write_results()
        self._report(result)

    def _advance_scheduler(self, boundary: str, result: dict[str, dict[str, float]]) -> None:
        interval = self.scheduler_interval()
        if interval == "epoch" and boundary == "validation" and not needs_metric(self.scheduler):
            return
        if needs_metric(self.scheduler):
            self.scheduler.step(self.monitored(result))
        else:
            self.scheduler.step()

    def monitored(self, result: dict[str, dict[str, float]]) -> float:
        """Return the figure that a metric scheduler watches: `scheduler.monitor`, else the score.

        Raises:
            ValueError: If it is not among the figures.
        """
        default = f"{self.score_split}.{self.config.score_name}"
        path = str(self.config.scheduler.get("monitor", None) or default)
        split, _, name = path.partition(".")
        if name not in result.get(split, {}):
            present = [f"{key}.{figure}" for key, figures in result.items() for figure in figures]
            raise ValueError(f"Expected scheduler.monitor to name one of {present}. Received: scheduler.monitor={path!r}.")
        return result[split][name]

    def _report(self, result: dict[str, dict[str, float]]) -> None:
        if not self.is_main_process:
            return
        figures = "  ".join(f"{split} {format_scores(values)}" for split, values in result.items())
        unit = "step" if self.is_step_mode else "epoch"
        logger.info("%s %d: %s", unit, self.index, figures)
        flat = {f"{split}/{name}": value for split, values in result.items() for name, value in values.items()}
        self._emit({key: value for key, value in flat.items() if not key.startswith("train/loss") or not self.is_step_mode})

    def _checkpoint_when_due(self, index: int, *, final: bool) -> None:
        due = index % self.checkpoint_interval == 0
        if due or final:
            self.save_checkpoint(history=due)
        elif self.is_best and next(reversed(self.scores)) == self.index:
            self.save_checkpoint()

    def _write_results(self) -> None:
        if self.is_main_process:
            latest = {"index": self.index, "result": self.latest_result}
            best = {"index": self.best_index, "score": self.best_score, "result": self.best_result}
            self.workspace.write_results(self.results, latest, best)

    def _open_progress(self) -> None:
        self._log_every = self.log_interval
        self._save_asked = False
        self._steps_scheduler = self.scheduler is not None and self.scheduler_interval() == "step"
        if self.is_main_process:
            self.progress_bar = Progress(total=self.steps, initial=self.state.train.global_step, desc=self.config.experiment)

    def _close_progress(self) -> None:
        if self.progress_bar is not None:
            self.progress_bar.close()
            self.progress_bar = None

"""The training core: two loops, one batch loop, one accumulation, one place that decides an update."""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from danling.data import Batch, BatchSource
from danling.distributed import agree, set_collective_timeout
from danling.optim import needs_metric
from danling.supervision import EXIT_CODES, Profiler, Telemetry
from danling.training import UpdateOutcome
from danling.workspace import Progress, format_scores

from .base_runner import Results
from .config import RunnerConfig
from .torch_update import TorchUpdate

logger = logging.getLogger("danling")


def takes_closure(optimizer: Any) -> bool:
    """Whether `optimizer.step` cannot be called without a closure, as that of LBFGS."""
    parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


_SHOWN = ("loss", "grad_norm", "learning_rate", "samples_per_second")
_PRECEDENCE = ("terminate", "interrupt", "user_signal", "stop")
_BY_SIGNAL = ("terminate", "interrupt", "user_signal")


class TorchRunner(TorchUpdate):
    """Trains on one process, or on several with DistributedDataParallel.

    Subclass it, set `model`, `criterion`, `datasets` (and, if you like, `optimizer`, `scheduler`, `dataloaders`) in `__init__` after
    `super().__init__(config)`, override what you want, and call `train()`. Construct and train on all ranks.

    Examples:
        >>> class MyRunner(TorchRunner):
        ...     def __init__(self, config):
        ...         super().__init__(config)
        ...         self.model = nn.Linear(4, 2)
        ...         self.criterion = nn.CrossEntropyLoss()
        ...         self.datasets = {"train": train_set, "val": val_set}
        >>> MyRunner({"epochs": 3, "optim": {"type": "adamw"}}).train()  # doctest: +SKIP
    """

    def __init__(self, config: RunnerConfig | Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self._logged_samples = 0
        self._first_update_done = False
        self._stop_for: str | None = None
        self._deadline = math.inf
        self._save_asked = False
        self._profiler: Profiler | None = None
        self.telemetry: Telemetry | None = None

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
        if takes_closure(self.optimizer):
            raise ValueError(
                f"Expected an optimizer whose step takes the gradient as it is. Received: {type(self.optimizer).__name__}, whose "
                "step calls a closure again and again. Override `step` and `optimizer_step` for it, or choose another."
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
        # On all ranks, so that an error of the background writer is raised on all of them.
        self.checkpoint_manager.wait()
        if self._stop_for in _BY_SIGNAL:
            logger.info("Stopped by a signal at step %d; the full state is saved.", train.global_step)
            raise SystemExit(EXIT_CODES[self._stop_for])

    # One update

    def _updates(self, split: str) -> Iterator[UpdateOutcome]:
        """The one batch loop: yield the outcome of every update of what is left of the pass over `split`."""
        source = self.sources[split]
        batches = source.batches()
        accum_steps = self.accum_steps
        telemetry = self.telemetry
        assert telemetry is not None
        clock = telemetry.clock
        found = source.consumed > 0
        while True:
            asked_at = clock()
            batch = next(batches, None)
            telemetry.loaded(asked_at, clock())
            if not self._all_have(source, batch):
                break
            found = True
            consumed: list[Batch] = []
            while batch is not None:
                consumed.append(batch)
                upcoming = self._upcoming(source, batches) if len(consumed) < accum_steps else None
                self.reduces_gradients = upcoming is None
                self._micro_step(batch)
                batch = upcoming
            outcome = self.step()
            source.commit(consumed)
            telemetry.stepped(1.0, committed=outcome.committed)
            yield outcome
        if not found:
            raise ValueError(
                f"Expected at least one batch on every rank in split {split!r}. Received: an empty loader on some rank. Check the "
                "dataset, and `drop_last` against the batch size."
            )

    def _all_have(self, source: BatchSource, batch: Batch | None) -> bool:
        if self._ends_together(source):
            return batch is not None
        # A rank that ran out would leave the others waiting in the gradient reduction, so the pass ends for all of them.
        ended = agree(self.optimizer_domain, () if batch is not None else ("exhausted",))
        if ended and batch is not None:
            logger.warning(
                "Another rank has no batch left in split %r: this pass ends early on rank %d.", source.split, self.rank
            )
        return not ended

    def _ends_together(self, source: BatchSource) -> bool:
        """Whether every rank is known to see the end of a pass at the same batch; the same answer on all ranks."""
        return source.even or self.optimizer_domain.size == 1

    def _upcoming(self, source: BatchSource, batches: Iterator[Batch]) -> Batch | None:
        """Return the next batch of the open window, `None` where the pass ends."""
        return next(batches, None)

    def _micro_step(self, batch: Batch) -> None:
        data = self.to_device(batch.data)
        self.window.open(*self._weigh(batch, data))
        self.train_step(data)
        self.state.train.micro_step += 1

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
        if signalled is not None:
            self._asked.add(signalled)
        if time.monotonic() >= self._deadline:
            self._asked.add("stop")
        return super()._requests()

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
            if not self._first_update_done:
                self._tighten_timeout()
            if step % self._log_every == 0:
                self._log(outcome)
            if self.progress_bar is not None:
                self.progress_bar.update(step)
            if self.heartbeat is not None:
                self.heartbeat.beat(step, self.state.train.epoch)
            if self.gc_pacer is not None:
                self.gc_pacer.step()
            if self._profiler is not None:
                self._profiler.step(step)
        if self._save_asked:
            self._save_asked = False
            self.save_checkpoint()

    def _tighten_timeout(self) -> None:
        # Compilation and the first data make the first update slow; the limit that catches a hang begins after it, everywhere.
        self._first_update_done = True
        limit = self.config.comm.train_timeout_seconds
        if limit is not None and self.distributed:
            self.world.barrier()
            set_collective_timeout(limit, self.training_groups())

    def training_groups(self) -> Sequence[Any]:
        """Return the process groups that training communicates over; `None` is the default one.

        No communication: may be called on one rank.
        """
        return [None]

    def _log(self, outcome: UpdateOutcome) -> None:
        """Write the figures of the update and the pace since the last line, on the main process; no communication."""
        samples, self._logged_samples = self.state.train.samples - self._logged_samples, self.state.train.samples
        if not self.is_main_process:
            return
        assert self.telemetry is not None
        step = self.state.train.global_step
        loss = float(outcome.loss) / (float(outcome.weight) if not self.sums_loss else 1.0)
        values = {"train/loss": loss}
        pace = self.telemetry.report(step, learning_rates=self._rates, grad_norm=outcome.grad_norm, samples=samples)
        values.update({f"train/{name}": value for name, value in pace.items()})
        self._track_values(values)
        if self.progress_bar is not None:
            shown = {name: values[f"train/{name}"] for name in _SHOWN if f"train/{name}" in values}
            self.progress_bar.show(step, shown)

    def _track_values(self, values: dict[str, float]) -> None:
        for tracker in self.trackers or ():
            tracker.log(values, self.state.train.global_step)

    def _training_figures(self) -> dict[str, float]:
        self.settle()
        figures = self.losses.averages()
        if self.meters:
            figures.update(self.meters.averages(self.figures_domain))
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
        scores = self.scoreboard if self.scoreboard is not None and self.scoreboard.split in result else None
        if scores is not None:
            scores.record(self.index, result)
        if self.scheduler is not None and not self._steps_scheduler:
            self._advance_scheduler(boundary, result)
        if scores is not None and scores.should_stop:
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

        No communication: may be called on one rank.

        Raises:
            ValueError: If it is not among the figures.
        """
        default = f"{self.score_split}.{self.config.score_name}"
        path = str(self.config.scheduler.get("monitor", None) or default)
        split, _, name = path.partition(".")
        if name not in result.get(split, {}):
            present = [f"{key}.{figure}" for key, figures in result.items() for figure in figures]
            raise ValueError(
                f"Expected scheduler.monitor to name one of {present}. Received: scheduler.monitor={path!r}."
            )
        return result[split][name]

    def _report(self, result: dict[str, dict[str, float]]) -> None:
        if not self.is_main_process:
            return
        figures = "  ".join(f"{split} {format_scores(values)}" for split, values in result.items())
        unit = "step" if self.is_step_mode else "epoch"
        logger.info("%s %d: %s", unit, self.index, figures)
        # A key of its own: `train/loss` is the loss of single updates.
        named = {
            split if split not in self.train_splits else f"{split}_mean": values for split, values in result.items()
        }
        self._track_values(
            {f"{split}/{name}": value for split, values in named.items() for name, value in values.items()}
        )

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
        self._logged_samples = self.state.train.samples
        step = self.state.train.global_step
        self.telemetry = Telemetry(total_steps=self.steps, global_step=step, device=self.device)
        self._profiler = self.build_profiler()
        self._steps_scheduler = self.scheduler is not None and self.scheduler_interval() == "step"
        if self.is_main_process:
            self.progress_bar = Progress(self.steps, initial=step, desc=self.config.experiment)

    def build_profiler(self) -> Profiler | None:
        """Return the profiler of `config.profiling`, `None` when it is off. Called on all ranks."""
        settings = dict(self.config.profiling.items())
        if not settings.pop("enabled"):
            return None
        directory = self.workspace.dir / settings.pop("trace_dir")
        return Profiler(directory, rank=self.rank, **settings)

    def _close_progress(self) -> None:
        if self._profiler is not None:
            self._profiler.close()
            self._profiler = None
        if self.progress_bar is not None:
            self.progress_bar.close()
            self.progress_bar = None

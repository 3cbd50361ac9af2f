"""The training core: two loops, one batch loop, one accumulation, one place that decides an update."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from danling.config import RunnerConfig
from danling.data import PLACEHOLDER, Batch, BatchSource, DataLoader
from danling.distributed import agree
from danling.optim import needs_metric
from danling.torchft import WaitAbandonedError
from danling.training import UpdateOutcome, checked_figures, keeping_trained

from .torch_replicas import UNCOMMITTED
from .torch_watch import EvaluationStopped, TorchWatch
from .verbs import Results

logger = logging.getLogger("danling")


def takes_closure(optimizer: Any) -> bool:
    """Whether `optimizer.step` cannot be called without a closure, as that of LBFGS."""
    parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


class TorchRunner(TorchWatch):
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
        self._compared: set[str] = set()

    _moved: bool = False
    """Whether another replica group's state was taken over that stands in another pass than the loops."""

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
        """Train epoch by epoch until `epochs` are completed. Call on all ranks.

        Args:
            train_splits: Splits to train on; `None` is `self.train_splits`.
            evaluate_splits: Splits to evaluate; `None` is `self.evaluate_splits`.

        Returns:
            `self.results`.

        Raises:
            ValueError: If there is no budget, no optimizer, or nothing to train on.
            NonFiniteError: If an update is not finite and must not be skipped.
            SystemExit: After a signal that asked the run to stop; its full state has been saved.
        """
        to_train, to_evaluate = self._check_ready(train_splits, evaluate_splits)
        if self.is_step_mode:
            raise ValueError(
                f"Expected a budget of epochs for `train_epochs`. Received: steps={self.steps}. Call `train()` or `train_steps()`, or set "
                "`epochs` instead."
            )
        state = self.state.train
        if state.epoch >= (self.epochs or 0) or self._gave_up():
            return self.results
        with self._session():
            if not self.open_result:
                self._try_evaluations(to_evaluate)
            while state.epoch < (self.epochs or 0) and not self._stop_for:
                self._moved = False
                for split in to_train:
                    if not self._is_trained(split):
                        figures = self.train_epoch(split)
                        self._keep_figures(split, figures)
                    if self._stop_for or self._moved:
                        break
                else:
                    saves_next = self._is_checkpoint_due(state.epoch + 1, final=state.epoch + 1 == self.epochs)
                    self._evaluate_trained(to_evaluate, "evaluate_epoch", saves_next=saves_next)
                    for split in to_train:
                        self.source(split).finish_pass()
                    state.epoch += 1
                    self._close_result("epoch")
                    self._checkpoint_when_due(state.epoch, final=state.epoch == self.epochs)
        return self.results

    def train_epoch(self, split: str = "train") -> dict[str, float]:
        """Train what is left of one pass over one split. Call on all ranks.

        What an override returns are the figures of the split. Called alone, it trains the next pass, and closes the epoch when every
        split to train on has had its pass: `epoch` is counted, the figures go into `results`, a schedule by epochs advances. Evaluating and
        saving are left to the caller; a signal, `stop()` and `max_time` end it as they end `train`.

        Args:
            split: The split, of a dataset or a loader to train on.

        Returns:
            The weighted mean loss of the pass over all ranks, and what was put into `meters`; empty when it was stopped half-way.
        """
        for outcome in self._updates(split):
            self._after_update(outcome)
            if self._stop_for:
                return {}
        if self._moved:
            return {}
        self.open_result[split] = self._training_figures()
        return self.open_result[split]

    def _keep_figures(self, split: str, figures: Any) -> None:
        if self._stop_for or self._moved:
            return  # half-way through the pass
        if figures is None:
            self.open_result.setdefault(split, {})
        else:
            self.open_result[split] = checked_figures("train_epoch", split, figures)

    def _called_alone(self, verb: str) -> bool:
        """Whether no loop has called one of the verbs of `danling.runners.alone`."""
        if verb == "train_epoch":
            return not self._in_session
        return not self._in_train_step if verb == "train_step" else super()._called_alone(verb)

    def _alone_train_epoch(self, call: Callable[..., Any], split: str = "train", *args: Any, **kwargs: Any) -> Any:
        self.check_trainable()
        self._splits.check(split)
        self._splits.agree_lengths(self.train_splits, self.optimizer_domain)
        with self._session(whole=False):
            self._moved = False
            figures = call(split, *args, **kwargs)
            self._keep_figures(split, figures)
            if not (self._stop_for or self._moved):
                self._close_pass(split)
        return figures

    def _close_pass(self, split: str) -> None:
        """Count the epoch, where every split to train on has had its pass."""
        if split not in self.train_splits:
            self.source(split).finish_pass()
            del self.open_result[split]
            return
        if any(other not in self.open_result for other in self.train_splits):
            return
        for other in self.train_splits:
            self.source(other).finish_pass()
        self.state.train.epoch += 1
        self._close_result("alone")

    def train_steps(
        self, train_splits: str | Sequence[str] | None = None, evaluate_splits: str | Sequence[str] | None = None
    ) -> Results:
        """Train update by update until `steps` are committed, pass after pass over the data. Call on all ranks.

        Args:
            train_splits: Splits to train on; `None` is `self.train_splits`.
            evaluate_splits: Splits to evaluate; `None` is `self.evaluate_splits`.

        Returns:
            `self.results`.

        Raises:
            ValueError: If there is no budget, no optimizer, or nothing to train on.
            NonFiniteError: If an update is not finite and must not be skipped.
            SystemExit: After a signal that asked the run to stop; its full state has been saved.
        """
        to_train, to_evaluate = self._check_ready(train_splits, evaluate_splits)
        if not self.is_step_mode:
            raise ValueError(
                f"Expected a budget of steps for `train_steps`. Received: epochs={self.epochs}. Call `train()` or `train_epochs()`, or set "
                "`steps` instead."
            )
        state = self.state.train
        if (state.global_step >= (self.steps or 0) and not self.open_result) or self._gave_up():
            return self.results
        with self._session():
            if self.open_result:
                # The run was stopped in an evaluation, which is made first.
                self._validate(to_evaluate)
            else:
                self._try_evaluations(to_evaluate)
            while state.global_step < (self.steps or 0) and not self._stop_for:
                self._moved = False
                for split in to_train:
                    if self._is_trained(split):
                        continue
                    for outcome in self._updates(split):
                        self._after_update(outcome)
                        if outcome.committed and self.evaluation_due():
                            self.open_result[split] = self._training_figures()
                            self._validate(to_evaluate)
                        elif outcome.committed:
                            self._checkpoint_when_due(state.global_step, final=False)
                        if self._stop_for or state.global_step == self.steps:
                            break
                    else:
                        if not self._moved:
                            self.source(split).finish_pass()
                            continue
                    break
                else:
                    state.epoch += 1
                    if self.scheduler is not None and self.scheduler_interval() == "epoch":
                        self._advance_scheduler("pass", {})
        return self.results

    def _validate(self, splits: list[str]) -> None:
        """Evaluate in step mode, and save what follows from it."""
        step = self.state.train.global_step
        saves_next = self._is_checkpoint_due(step, final=step == self.steps)
        self._evaluate_trained(splits, "evaluate_steps", saves_next=saves_next)
        self._close_result("validation")
        self._checkpoint_when_due(step, final=step == self.steps)

    def _evaluate_trained(self, splits: Sequence[str], verb: str, *, saves_next: bool) -> None:
        """Evaluate what was trained up to here; whatever goes wrong, it is saved, and a run that goes on begins with this evaluation."""
        if not splits:
            return
        passing = (EvaluationStopped, WaitAbandonedError)
        with keeping_trained(self._keeper(saves_next=saves_next), step=self.state.train.global_step, passing=passing):
            for split in splits:
                self.open_result[split] = checked_figures(verb, split, getattr(self, verb)(split))
            self._check_score()

    def _check_score(self) -> None:
        """Refuse figures without the score before anything is counted by them."""
        board = self.scoreboard
        if board is not None and board.split in self.open_result and not self._scores_itself:
            board.check(self.open_result)
        named = not self._scores_itself or "monitor" in self.config.get("scheduler", {})
        if named and self.scheduler is not None and not self._steps_scheduler and needs_metric(self.scheduler):
            self.monitored(self.open_result)

    def _is_trained(self, split: str) -> bool:
        """Whether the pass that the state stands in is over for one of the splits."""
        train = self.state.train
        if self.is_step_mode:
            return train.global_step >= (self.steps or 0) or self.source(split).epoch > train.epoch
        return train.epoch >= (self.epochs or 0) or split in self.open_result

    def _gave_up(self) -> bool:
        since = self.evaluations_since_best if self.scoreboard is not None else 0
        return since > 0 and since >= self.config.patience

    def _check_ready(self, train_splits: Any, evaluate_splits: Any) -> tuple[list[str], list[str]]:
        self.check_trainable()
        if self.epochs is None and self.steps is None:
            raise ValueError(
                "Expected a budget: `steps` (optimizer updates) or `epochs`. Received: steps=None, epochs=None. Set one of them."
            )
        to_train = self._splits.choose(train_splits, self.train_splits, "train on")
        if not (self.evaluate_splits if evaluate_splits is None else evaluate_splits):
            self.check_scheduler(evaluates=False)
            return to_train, []
        return to_train, self._splits.choose(evaluate_splits, self.evaluate_splits, "evaluate")

    def check_trainable(self) -> None:
        """Refuse settings that nobody has read, and an optimizer that does not take the gradient as it is. Called on all ranks.

        Raises:
            ValueError: If there are such settings, or there is no such optimizer.
        """
        if self._closed:
            raise ValueError(
                "Expected a runner that is open. Received: train() after close(), or after its `with` block. Construct it anew; "
                "auto_resume goes on from its last checkpoint."
            )
        self.check_settings_are_read()
        self.check_optimizer_given()
        if takes_closure(self.optimizer):
            raise ValueError(
                f"Expected an optimizer whose step takes the gradient as it is. Received: {type(self.optimizer).__name__}, whose "
                "step calls a closure again and again. Override `step` and `optimizer_step` for it, or choose another."
            )
        self.check_coverage()

    # One update

    def _updates(self, split: str) -> Iterator[UpdateOutcome]:
        """The one batch loop: yield the outcome of every update of what is left of the pass over `split`."""
        source = self.source(split)
        self.bind_reduction()
        batches = self._reporter.timed(source.batches())
        found = source.consumed > 0
        while True:
            batch = next(batches, None)
            if not self._all_have(source, batch):
                break
            assert batch is not None
            found = True
            if split not in self._compared:
                self._compare(source, batch)
            if self.open_update():
                self._reporter.forget_samples(self.state.train.samples)
                if self._is_trained(split):
                    self._moved = True
                    return
                batches = source.batches()
                continue
            consumed: list[Batch] = []
            if not self._make_batches(source, chain([batch], batches), consumed):
                batches = self._reporter.timed(source.batches())
                continue
            outcome = self.step()
            if not isinstance(outcome, UpdateOutcome):
                raise ValueError(
                    f"Expected `step` to return an UpdateOutcome. Received: {outcome!r}. Return that of super().step()."
                )
            if outcome.reason == UNCOMMITTED:
                batches = chain(consumed, batches)
                continue
            source.commit(consumed)
            if self._reporter.telemetry is not None:
                self._reporter.telemetry.stepped(committed=outcome.committed)
            yield outcome
        if not found:
            raise ValueError(
                f"Expected at least one batch on every rank in split {split!r}. Received: an empty loader on some rank. Check the "
                "dataset, and `drop_last` against the batch size."
            )

    def _make_batches(self, source: BatchSource, batches: Iterator[Batch], consumed: list[Batch]) -> bool:
        """Run forward and backward of one update; `False` where memory ran out, and smaller micro-batches are to come."""
        make = partial(self._micro_steps, source, batches, consumed)
        retry, loader = self.memory_retry, source.loader
        held = loader.held_at_once if retry is not None and isinstance(loader, DataLoader) else 0
        if retry is None or held == 0:
            make()
            return True
        self._open_alike(held)
        if held == 1:
            # There is nothing left to halve: the error is the user's, with its traceback.
            make()
            return True
        return retry.attempt(make, self._remembered()) or self._halve(held)

    def _micro_steps(self, source: BatchSource, batches: Iterator[Batch], consumed: list[Batch]) -> None:
        in_update = int(self.config.accum_steps)
        batch = next(batches, None)
        while batch is not None:
            consumed.append(batch)
            closes = len(consumed) == in_update if batch.closes is None else batch.closes
            upcoming = None if closes else self._upcoming(source, batches)
            # A rank that may run out of memory reduces once all have come through.
            self.reduces_gradients = upcoming is None and self.memory_retry is None
            self._micro_step(batch)
            batch = upcoming

    def _open_alike(self, held: int) -> None:
        """Do before an update what ranks otherwise do together within it: all of them have to come through it alone."""
        if self.preparation.broadcasts_buffers:
            self.equalize_buffers()
        if self.window.agreed_reference is None and self.optimizer_domain.size > 1:
            self.window.agreed_reference = float(held)

    def _remembered(self) -> Callable[[], None]:
        """Return what takes the micro-batches of the next update back."""
        telemetry, flops = self._reporter.telemetry, self._reporter.flops
        assert telemetry is not None
        put_back, tokens, counts_next = self._remember_forwards(), telemetry.tokens, flops.counts_next

        def take_back() -> None:
            self.window.reset()
            self.zero_gradients()
            put_back()
            telemetry.tokens, flops.counts_next = tokens, counts_next

        return take_back

    def _halve(self, held: int) -> bool:
        self._hold_at_most(held // 2)
        if self.is_main_process:
            logger.warning(
                "Memory ran out in update %d with micro-batches of %d samples: it is made again with at most %d, which changes nothing "
                "else. The size is kept, also when the run is resumed; dataloader.micro_batch_size=%d begins with it.",
                self.state.train.global_step + 1,
                held,
                held // 2,
                held // 2,
            )
        return False

    def _compare(self, source: BatchSource, batch: Batch | None) -> None:
        """Say once where ranks that should read different data read the same."""
        self._compared.add(source.split)
        if self._ends_together(source) or batch is None or self.data_domain.size == 1:
            return
        seen = self.data_domain.gather_objects(source.described(batch) if batch.data is not PLACEHOLDER else None)
        if seen[0] is not None and seen.count(seen[0]) == len(seen) and self.is_main_process:
            logger.warning(
                "All ranks read the same data in split %r. A loader of your own, or over a stream, is not divided for you: divide "
                "it by self.data_domain.rank and self.data_domain.size, or put a map-style dataset into `self.datasets`.",
                source.split,
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

    # Boundaries

    def _training_figures(self) -> dict[str, float]:
        self.settle()
        figures = self.losses.averages()
        # Always, since what this rank has seen says nothing of the others.
        figures.update({name: total / weight for name, (total, weight) in self.meter_totals().items() if weight})
        self.losses.reset()
        self.meters.reset()
        return figures

    def _close_result(self, boundary: str) -> None:
        """Record the figures of an epoch or an evaluation, and decide what follows from them; the same on all ranks."""
        result, self.open_result = self.open_result, {}
        self.results[self.index] = result
        self._scored_at = self.state.train.global_step
        scores = self.scoreboard if self._is_scored(result) else None
        if scores is not None and scores.split and (scores.finds(result) or not self._scores_itself):
            scores.record(self.index, result)
            self._say_not_finite(scores.scores[self.index])
        if self.scheduler is not None and not self._steps_scheduler:
            self._advance_scheduler(boundary, result)
        if scores is not None and self._gave_up():
            self._stop_for = "patience"
            if self.best_score is None:
                logger.info("Stopping early: no evaluation had a score that can be the best.")
            else:
                logger.info("Stopping early: no better score than %s since %s.", self.best_score, self.best_index)
        self.write_results()
        self._report(result)

    def _is_scored(self, result: Mapping[str, Any]) -> bool:
        board = self.scoreboard
        if board is None or board.split:
            return board is not None and board.split in result
        return self.index in self.own_scores

    _said_not_finite: bool = False
    """Whether a score that is not finite was warned of; once is enough."""

    def _say_not_finite(self, score: float) -> None:
        if self._said_not_finite or math.isfinite(score) or self.scoreboard is None:
            return
        self._said_not_finite = True
        if self.is_main_process:
            logger.warning(
                "Expected the score %s.%s to be finite. Received: %s at %s.%s See to it that the metric is defined on the whole "
                "split, or set score_name to another figure.",
                self.scoreboard.split,
                self.scoreboard.name,
                score,
                self.index,
                " NaN is never the best, and counts against patience." if math.isnan(score) else "",
            )

    def _advance_scheduler(self, boundary: str, result: dict[str, dict[str, float]]) -> None:
        interval = self.scheduler_interval()
        if boundary == "alone" and (interval != "epoch" or needs_metric(self.scheduler)):
            return  # what goes by an evaluation waits for one
        if interval == "epoch" and boundary == ("pass" if needs_metric(self.scheduler) else "validation"):
            return  # without figures a metric scheduler has nothing to go by, and a validation ends no epoch for the others
        if needs_metric(self.scheduler):
            self.scheduler.step(self.monitored(result))
        else:
            self.scheduler.step()

    def monitored(self, result: dict[str, dict[str, float]]) -> float:
        """Return the figure that a metric scheduler watches: `scheduler.monitor`, else the score.

        No communication: may be called on one rank.

        Args:
            result: Figures by split.

        Raises:
            ValueError: If it is not among the figures.
        """
        asked = self.config.scheduler.get("monitor", None)
        if not asked and self.index in self.own_scores:
            return self.own_scores[self.index]
        path = str(asked or f"{self.score_split}.{self.config.score_name}")
        split, _, name = path.partition(".")
        if name not in result.get(split, {}):
            present = [f"{key}.{figure}" for key, figures in result.items() for figure in figures]
            raise ValueError(
                f"Expected scheduler.monitor to name one of {present}. Received: scheduler.monitor={path!r}."
            )
        return result[split][name]

    def _report(self, result: dict[str, dict[str, float]]) -> None:
        self._reporter.log_result(
            result,
            step=self.state.train.global_step,
            title=f"{'step' if self.is_step_mode else 'epoch'} {self.index}",
            trained=self.train_splits,
            last=self.progress >= 1 or self._stop_for is not None,
        )

    def _is_checkpoint_due(self, index: int, *, final: bool) -> bool:
        return final or index % self._checkpoint_every == 0

    def _checkpoint_when_due(self, index: int, *, final: bool) -> None:
        if self._is_checkpoint_due(index, final=final):
            self.save_checkpoint(history=index % self._checkpoint_every == 0)
        elif self._save_asked or (
            index in self.results and self.is_best and next(reversed(self.own_scores), None) == index
        ):
            self.save_checkpoint()
        self._save_asked = False

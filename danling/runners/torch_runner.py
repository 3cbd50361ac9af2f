"""The training core: two loops, one batch loop, one accumulation, one place that decides an update."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from danling.data import Batch, BatchSource, DataLoader
from danling.optim import needs_metric
from danling.torchft import WaitAbandonedError
from danling.training import (
    EvaluationStopped,
    PassAgreement,
    UpdateOutcome,
    checked_figures,
    keeping_trained,
    monitored_metric,
    patience_exhausted,
    run_window,
    schedule_advances,
    updates_of_pass,
    warning_of_score,
)
from danling.training.boundaries import Boundary

from .base_runner import Results
from .meta import check_settings_are_read
from .torch_watch import TorchWatch

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

    _position_jumped: bool = False
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
        if state.epoch >= (self.epochs or 0) or self._patience_exhausted():
            return self.results
        with self._training():
            if not self.open_result:
                self._try_evaluations(to_evaluate)
            while state.epoch < (self.epochs or 0) and not self._session.stop_reason:
                if self._train_splits(to_train):
                    self._evaluate_trained(to_evaluate, "evaluate_epoch")
                    self._finish_epoch(to_train, "epoch")
                    self._save_if_due(state.epoch, final=state.epoch == self.epochs)
        return self.results

    def _train_splits(self, splits: Sequence[str]) -> bool:
        """Train what is left of the pass over each split; `False` where it was left half-way."""
        self._position_jumped = False
        for split in splits:
            if not self._is_trained(split):
                self._keep_metrics(split, self.train_epoch(split))
            if self._is_interrupted():
                return False
        return True

    def _is_interrupted(self) -> bool:
        """Whether the loops are to leave the pass: it is to stop, or the state stands in another one."""
        return self._session.stop_reason is not None or self._position_jumped

    def _finish_epoch(self, splits: Sequence[str], boundary: Boundary) -> None:
        for split in splits:
            self.source(split).finish_pass()
        self.state.train.epoch += 1
        self._close_result(boundary)

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
            if self._session.stop_reason:
                return {}
        if self._position_jumped:
            return {}
        self.open_result[split] = self._training_figures()
        return self.open_result[split]

    def _keep_metrics(self, split: str, metrics: Any) -> None:
        if self._is_interrupted():
            return  # half-way through the pass
        if metrics is None:
            self.open_result.setdefault(split, {})
        else:
            self.open_result[split] = checked_figures("train_epoch", split, metrics)

    def _called_alone(self, verb: str) -> bool:
        """Whether no loop has called one of the verbs of `danling.runners.alone`."""
        if verb == "train_epoch":
            return not self._session.running
        return not self._in_train_step if verb == "train_step" else super()._called_alone(verb)

    def _alone_train_epoch(self, call: Callable[..., Any], split: str = "train", *args: Any, **kwargs: Any) -> Any:
        self.check_trainable()
        self._splits.check(split)
        self._splits.agree_lengths(self.train_splits, self.placement.optimizer)
        with self._training(whole=False):
            self._position_jumped = False
            metrics = call(split, *args, **kwargs)
            self._keep_metrics(split, metrics)
            if not self._is_interrupted():
                self._close_pass(split)
        return metrics

    def _close_pass(self, split: str) -> None:
        """Count the epoch, where every split to train on has had its pass."""
        if split not in self.train_splits:
            self.source(split).finish_pass()
            del self.open_result[split]
        elif all(other in self.open_result for other in self.train_splits):
            self._finish_epoch(self.train_splits, "alone")

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
        if (state.global_step >= (self.steps or 0) and not self.open_result) or self._patience_exhausted():
            return self.results
        with self._training():
            if self.open_result:
                # The run was stopped in an evaluation, which is made first.
                self._validate(to_evaluate)
            else:
                self._try_evaluations(to_evaluate)
            while state.global_step < (self.steps or 0) and not self._session.stop_reason:
                if self._train_pass(to_train, to_evaluate):
                    state.epoch += 1
                    if self.scheduler is not None and self.scheduler_interval() == "epoch":
                        self._advance_scheduler("pass", {})
        return self.results

    def _train_pass(self, splits: Sequence[str], to_evaluate: list[str]) -> bool:
        """Train what is left of one pass over all splits, evaluating on the way; `False` where it was left half-way."""
        self._position_jumped = False
        for split in splits:
            if self._is_trained(split):
                continue
            for outcome in self._updates(split):
                ended = self._after_step(split, outcome, to_evaluate)
                if ended or self._session.stop_reason:
                    return False
            if self._position_jumped:
                return False
            self.source(split).finish_pass()
        return True

    def _after_step(self, split: str, outcome: UpdateOutcome, to_evaluate: list[str]) -> bool:
        """Do what is due at an update boundary of step mode; return whether the budget, which may change at any time, is used up."""
        self._after_update(outcome)
        step = self.state.train.global_step
        final = step == self.steps
        if outcome.committed and self._boundaries.evaluation_due(step, final=final):
            self.open_result[split] = self._training_figures()
            self._validate(to_evaluate)
        elif outcome.committed and (self._boundaries.checkpoint_due(step) or step in self.results):
            self._save_if_due(step, final=False)
        return final

    def _validate(self, splits: list[str]) -> None:
        """Evaluate in step mode, and save what follows from it."""
        step = self.state.train.global_step
        self._evaluate_trained(splits, "evaluate_steps")
        self._close_result("validation")
        self._save_if_due(step, final=step == self.steps)

    def _evaluate_trained(self, splits: Sequence[str], verb: str) -> None:
        """Evaluate what was trained up to here; whatever goes wrong, it is saved, and a run that goes on begins with this evaluation."""
        if not splits:
            return
        passing = (EvaluationStopped, WaitAbandonedError)
        with keeping_trained(self._keeper(), step=self.state.train.global_step, passing=passing):
            for split in splits:
                self.open_result[split] = checked_figures(verb, split, getattr(self, verb)(split))
            self._check_score()

    def _check_score(self) -> None:
        """Refuse figures without the score before anything is counted by them."""
        board = self.standing.board
        if board is not None and board.split in self.open_result and not self.standing.own:
            board.check(self.open_result)
        named = not self.standing.own or "monitor" in self.config.get("scheduler", {})
        if named and self.scheduler is not None and not self._steps_scheduler and needs_metric(self.scheduler):
            self._monitored(self.open_result)

    def _is_trained(self, split: str) -> bool:
        """Whether the pass that the state stands in is over for one of the splits."""
        train = self.state.train
        if self.is_step_mode:
            return train.global_step >= (self.steps or 0) or self.source(split).epoch > train.epoch
        return train.epoch >= (self.epochs or 0) or split in self.open_result

    def _patience_exhausted(self) -> bool:
        since = self.standing.evaluations_since_best if self.standing.board is not None else 0
        return patience_exhausted(since, self.config.patience)

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
        check_settings_are_read(type(self), self.config, self.world, made_of_mapping=self._made_of_mapping)
        self.check_optimizer_given()
        if takes_closure(self.optimizer):
            raise ValueError(
                f"Expected an optimizer whose step takes the gradient as it is. Received: {type(self.optimizer).__name__}, whose "
                "step calls a closure again and again. Override `step` and `optimizer_step` for it, or choose another."
            )
        self.check_coverage()

    # One pass

    @cached_property
    def _passes(self) -> PassAgreement:
        return PassAgreement(self.placement.optimizer, self.data_domain)

    def _updates(self, split: str) -> Iterator[UpdateOutcome]:
        """Return the outcomes of the updates of what is left of the pass over `split`, which are made as they are asked for."""
        source = self.source(split)
        self.bind_reduction()
        return updates_of_pass(
            source,
            agreement=self._passes,
            timed=self._reporter.timed,
            state_replaced=self._takes_state_over if self.fault_tolerance is not None else None,
            is_over=partial(self._jumps_out_of, split),
            run=partial(self._run_window, source),
            step=self.step,
        )

    def _takes_state_over(self) -> bool:
        """Agree with the other replica groups on the next update; tell whether the state is that of another group now."""
        if self.fault_tolerance is None or not self.fault_tolerance.open_update():
            return False
        self._reporter.forget_samples(self.state.train.samples)
        return True

    def _jumps_out_of(self, split: str) -> bool:
        """Note whether the state that was taken over stands behind the pass over `split`."""
        self._position_jumped = self._is_trained(split)
        return self._position_jumped

    def _run_window(self, source: BatchSource, batches: Iterator[Batch], consumed: list[Batch]) -> bool:
        """Run forward and backward of one update; `False` where memory ran out, and smaller micro-batches are to come."""
        retry, loader = self.memory_retry, source.loader

        run = partial(
            run_window,
            batches,
            consumed,
            size=self.update_plan.undivided(),
            following=lambda: self._passes.next_of_window(source, batches),
            run=self._run_microbatch,
        )
        held = loader.held_at_once if retry is not None and isinstance(loader, DataLoader) else 0
        if retry is None or held == 0:
            run()
            return True
        return retry.run(run, held=held, prepare=self._open_alike, remember=self._remembered, shrink=self._shrink)

    def _run_microbatch(self, batch: Batch, closes: bool) -> None:
        # A rank that may run out of memory reduces once all have come through.
        self.reduces_gradients = closes and self.memory_retry is None
        self._micro_step(batch)

    def _open_alike(self, held: int) -> None:
        """Do before an update what ranks otherwise do together within it: all of them have to come through it alone."""
        if self.preparation.broadcasts_buffers:
            self.equalize_buffers()
        if self.window.agreed_reference is None and self.placement.optimizer.size > 1:
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

    def _shrink(self, held: int, samples: int) -> None:
        """Go on with smaller micro-batches, and say so."""
        self.state.elastic.micro_batch_size = samples
        self.update_plan.hold_at_most(samples)
        if self.is_main_process:
            logger.warning(
                "Memory ran out in update %d with micro-batches of %d samples: it is made again with at most %d, which changes nothing "
                "else. The size is kept, also when the run is resumed; dataloader.micro_batch_size=%d begins with it.",
                self.state.train.global_step + 1,
                held,
                samples,
                samples,
            )

    # Boundaries

    def _training_figures(self) -> dict[str, float]:
        self.settle()
        figures = self.losses.averages()
        # Always, since what this rank has seen says nothing of the others.
        figures.update({name: total / weight for name, (total, weight) in self.meter_totals().items() if weight})
        self.losses.reset()
        self.meters.reset()
        return figures

    def _close_result(self, boundary: Boundary) -> None:
        """Record the figures of an epoch or an evaluation, and decide what follows from them; the same on all ranks."""
        result, self.open_result = self.open_result, {}
        self.results[self.index] = result
        self._scored_at = self.state.train.global_step
        scores = self.standing.board if self._is_scored(result) else None
        if scores is not None and scores.split and (scores.finds(result) or not self.standing.own):
            scores.record(self.index, result)
            self._say_not_finite(scores.scores[self.index])
        if self.scheduler is not None and not self._steps_scheduler:
            self._advance_scheduler(boundary, result)
        if scores is not None and self._patience_exhausted():
            self._session.stop_reason = "patience"
            if self.best_score is None:
                logger.info("Stopping early: no evaluation had a score that can be the best.")
            else:
                logger.info("Stopping early: no better score than %s since %s.", self.best_score, self.best_index)
        self.write_results()
        self._report(result)

    def _is_scored(self, result: Mapping[str, Any]) -> bool:
        board = self.standing.board
        if board is None or board.split:
            return board is not None and board.split in result
        return self.index in self.standing.scores

    _said_not_finite: bool = False
    """Whether a score that is not finite was warned of; once is enough."""

    def _say_not_finite(self, score: float) -> None:
        board = self.standing.board
        if board is None or self._said_not_finite:
            return
        warning = warning_of_score(f"{board.split}.{board.name}", score, self.index)
        self._said_not_finite = warning is not None
        if warning is not None and self.is_main_process:
            logger.warning("%s", warning)

    def _advance_scheduler(self, boundary: Boundary, result: dict[str, dict[str, float]]) -> None:
        by_metric = needs_metric(self.scheduler)
        if not schedule_advances(boundary, interval=self.scheduler_interval(), by_metric=by_metric):
            return
        if by_metric:
            self.scheduler.step(self._monitored(result))
        else:
            self.scheduler.step()

    def _monitored(self, result: dict[str, dict[str, float]]) -> float:
        """Return the metric that a schedule watches: `scheduler.monitor`, else the score."""
        asked = self.config.scheduler.get("monitor", None)
        if not asked and self.index in self.standing.scores:
            return self.standing.scores[self.index]
        return monitored_metric(result, str(asked or f"{self.score_split}.{self.config.score_name}"))

    def _report(self, result: dict[str, dict[str, float]]) -> None:
        self._reporter.log_result(
            result,
            step=self.state.train.global_step,
            title=f"{'step' if self.is_step_mode else 'epoch'} {self.index}",
            trained=self.train_splits,
            last=self.progress >= 1 or self._session.stop_reason is not None,
        )

    def _save_if_due(self, index: int, *, final: bool) -> None:
        session = self._session
        self._boundaries.save_if_due(index, final=final, requested=session.save_requested)
        session.save_requested = False

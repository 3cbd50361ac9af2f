"""The training core: two loops, one batch loop, one accumulation, one place that decides an update."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

from danling.config import RunnerConfig
from danling.data import Batch
from danling.reporting import device_peak_flops, speaking_for
from danling.reporting.run_report import RunReport
from danling.supervision import Profiler
from danling.training import PassAgreement, UpdateOutcome, count_tokens, updates_of_pass
from danling.training.ending import TrainingEnd
from danling.training.loop import TrainingLoop
from danling.training.micro_batches import MicroBatches, WindowForwards

from . import assembly
from .base_runner import Results
from .meta import check_settings_are_read
from .torch_update import TorchUpdate


def takes_closure(optimizer: Any) -> bool:
    """Whether `optimizer.step` cannot be called without a closure, as that of LBFGS."""
    parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


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
        self.saver.around = partial(assembly.save_aside, self)
        self._results = assembly.run_results(self)

    # Components

    @cached_property
    def _loop(self) -> TrainingLoop:
        return assembly.training_loop(self)

    @cached_property
    def _micro_batches(self) -> MicroBatches:
        return assembly.micro_batches(self)

    @cached_property
    def _forwards(self) -> WindowForwards:
        return assembly.window_forwards(self)

    @cached_property
    def _report(self) -> RunReport:
        return assembly.run_report(self)

    @cached_property
    def _end(self) -> TrainingEnd:
        return assembly.training_end(self)

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
        if self._loop.is_done():
            return self.results
        with self._training():
            if not self._results.open:
                self._try_evaluations(to_evaluate)
            self._loop.train_epochs(to_train, to_evaluate)
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
        return self._loop.train_epoch(split)

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
        if self._loop.is_done():
            return self.results
        with self._training():
            if not self._results.open:
                self._try_evaluations(to_evaluate)
            self._loop.train_steps(to_train, to_evaluate)
        return self.results

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

    def _updates(self, split: str) -> Iterator[UpdateOutcome]:
        """Return the outcomes of the updates of what is left of the pass over `split`, which are made as they are asked for."""
        source, forwards, reporter = self.source(split), self._forwards, self._reporter
        self.bind_reduction()
        return updates_of_pass(
            source,
            agreement=forwards.agreement,
            timed=reporter.timed,
            state_replaced=self._takes_state_over if self.fault_tolerance is not None else None,
            is_over=partial(self._loop.jumps_out_of, split),
            run=partial(forwards.run, source),
            step=self.step,
        )

    def build_agreement(self) -> PassAgreement:
        """Return what keeps the ranks together in their passes; a stack whose ranks read the same data brings its own."""
        return PassAgreement(self.placement.optimizer, self.data_domain)

    def _takes_state_over(self) -> bool:
        """Agree with the other replica groups on the next update; tell whether the state is that of another group now."""
        if self.fault_tolerance is None or not self.fault_tolerance.open_update():
            return False
        self._reporter.forget_samples(self.state.train.samples)
        return True

    def _try_evaluations(self, splits: Sequence[str]) -> None:
        """Evaluate one batch of each split before the first update; evaluations of the user's own are left out."""
        verb = "evaluate_steps" if self.is_step_mode else "evaluate_epoch"
        if self.config.try_evaluation and not (self._overrides(verb) or self._overrides("evaluate")):
            self._evaluator.try_once(splits, self._results.judge_trial)

    @contextmanager
    def _training(self, *, whole: bool = True) -> Iterator[None]:
        """Train inside: what is logged meanwhile is of this run, signals are watched, and the end is saved.

        Args:
            whole: Whether the run ends here; a verb that was called alone saves only where it was asked to stop.
        """
        session = self._session
        with speaking_for(self._run_log), session.collecting():
            self.begin_updates()
            self.model.train()
            session.begin(max_seconds=self.config.max_time_seconds())
            self._loop.boundaries = assembly.boundaries(self)
            self.open_trackers()
            self.init_signal_handlers()
            assembly.begin_report(self)
            opened = session.opened(self._end.of_session(), domain=self.placement.optimizer, whole=whole)
            with self._evaluator.evaluation.watched(self._between_batches), opened:
                yield

    def _between_batches(self, split: str, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches of an evaluation; in training, all ranks agree before each one whether to go on."""
        return assembly.between_batches(self, split, batches) if self._session.running else batches

    # Called alone

    def _called_alone(self, verb: str) -> bool:
        """Whether no loop has called one of the verbs of `danling.runners.alone`."""
        if verb == "train_epoch":
            return not self._session.running
        return not self._session.in_step and (verb == "train_step" or self.mode == "train")

    def _alone_train_step(self, call: Callable[[Any], Any], data: Any) -> Any:
        self.prepare_updates()
        return self._micro_batches.run_alone(call, data)

    def _alone_train_epoch(self, call: Callable[..., Any], split: str = "train", *args: Any, **kwargs: Any) -> Any:
        self.check_trainable()
        self._splits.check(split)
        self._splits.agree_lengths(self.train_splits, self.placement.optimizer)
        with self._training(whole=False):
            return self._loop.train_epoch_alone(split, partial(call, split, *args, **kwargs), self.train_splits)

    # Asked from outside

    def stop(self) -> None:
        """Ask all ranks to stop after an update: at the next boundary they save the full state and `train` returns.

        May be called on one rank or on several, at any time.
        """
        self._session.request("stop")

    def request_checkpoint(self) -> None:
        """Ask all ranks for a checkpoint at the next update boundary. May be called on one rank."""
        self._session.request("save")

    # What is shown

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

    def build_profiler(self) -> Profiler | None:
        """Return the profiler of `config.profiling`, `None` when it is off. Called on all ranks."""
        return assembly.profiler(self)

    def write_results(self) -> None:
        """Write the figures of the run, its last ones and its best ones, on the main process."""
        if self.is_main_process:
            weights = "trained" if self.ema is None else "averaged"
            latest = {"index": self.index, "weights": weights, "result": self.latest_result}
            best = {"index": self.best_index, "weights": weights, "score": self.best_score, "result": self.best_result}
            is_here = self.best_index is None or self.best_index != self.saver.best_elsewhere
            self.workspace.write_results(self.results, latest, best if is_here else None)

"""Trains from the beginning to the end: the loops, the work that is due between two updates, and the end of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from danling.checkpoints import CheckpointManager
from danling.data import Batch
from danling.data.run_data import RunData
from danling.distributed import CollectiveCalls, agree
from danling.metrics import TrainMetrics
from danling.optim.state import enter_training
from danling.reporting import Reporter
from danling.supervision import RankWatch, is_out_of_memory, write_memory_snapshot
from danling.utils.hooks import is_overridden
from danling.utils.observers import Observer

from .attributes import KeptAttributes
from .batch_weights import BatchLoss
from .checks import check_smoothing
from .component_checks import ComponentChecks
from .due_work import DueWork
from .evaluation import Evaluator
from .extension import Extension, StateReplaced
from .keys import RandomKeys
from .observer_states import ObserverStates
from .outcome import UNCOMMITTED, UpdateOutcome
from .pass_agreement import PassAgreement
from .pass_settings import PassSettings
from .results import RunResults, checked_figures
from .schedule import Boundary
from .session import (
    BY_SIGNAL,
    DataEnded,
    EndOfPass,
    EvaluationStopped,
    IntactStateError,
    TrainingAbandoned,
    TrainingSession,
    first_stop,
)
from .update import RunWindow, UpdateStep

if TYPE_CHECKING:
    from danling.runners.base_runner import SplitNames
    from danling.runners.parts import Closers
    from danling.runners.torch_runner import TorchRunner

logger = logging.getLogger("danling")


class TrainingLoop:
    """Trains epoch by epoch or update by update, from the present state of the run to the end of its budget.

    Attributes:
        extensions: Take part in the training.
        has_jumped: Whether the state was replaced by one of another pass, so that the loops must leave the pass.
    """

    def __init__(
        self,
        runner: TorchRunner,
        session: TrainingSession,
        keys: RandomKeys,
        data: RunData,
        *,
        attributes: KeptAttributes,
        observer_states: ObserverStates,
        pass_settings: PassSettings,
        reporter: Reporter,
        closers: Closers,
        calls: CollectiveCalls | None,
        checks: ComponentChecks,
        loss: BatchLoss,
        train_metrics: TrainMetrics | None,
        agreement: PassAgreement,
        update: UpdateStep,
        run_window: RunWindow,
        evaluator: Evaluator,
        results: RunResults,
        extensions: list[Extension],
    ) -> None:
        self.extensions = extensions
        self.has_jumped = False
        self.run_window = run_window
        self._bind_reduction = runner._bind_reduction
        self.has_pass_hook = True
        """Whether `on_pass_start` may do something."""
        self._runner = runner
        self._session = session
        self._keys = keys
        self._data = data
        self._attributes = attributes
        self._observer_states = observer_states
        self._pass_settings = pass_settings
        self._reporter = reporter
        self._closers = closers
        self._calls = calls
        self._checks = checks
        self._loss = loss
        self._agreement = agreement
        self._update = update
        self._evaluator = evaluator
        self._results = results
        self.due = DueWork(
            runner,
            session,
            keys,
            reporter=reporter,
            train_metrics=train_metrics,
            update=update,
            results=results,
            extensions=extensions,
        )
        self._driver: Extension | None = None
        """The extension that begins the training again where the ranks change."""
        self._train_on: Callable[[], None] = _nothing
        self.is_at_boundary = False
        """Whether the evaluation or the save after the last update is not done yet, in step mode."""
        self.last_split: str | None = None
        """The split that the last update was trained on; `None` before the first one."""
        self.begun_pass: tuple[str, int] | None = None
        """The split and pass of which `on_pass_start` was called last."""
        self.begun_passes = 0
        """How often it was called in the process whose state this is."""

    # One training

    def train(self, unit: str, train_splits: SplitNames, evaluate_splits: SplitNames) -> None:
        """Train to the end of the budget, which is to be of steps or epochs. Called on all ranks."""
        runner = self._runner
        set_unit = "steps" if runner.is_step_mode else "epochs"
        self.check_trainable()
        if runner.epochs is None and runner.steps is None:
            raise ValueError(
                "Expected a budget: `steps` (optimizer updates) or `epochs`. Received: steps=None, epochs=None. Set one of them."
            )
        splits = self._data.choose(train_splits, runner.train_splits, "train on")
        evaluated: list[str] = []
        asked = runner.evaluate_splits if evaluate_splits is None else evaluate_splits
        if asked:
            evaluated = self._data.choose(evaluate_splits, runner.evaluate_splits, "evaluate")
        else:
            self._checks.check_schedule(evaluates=False)
        if unit != set_unit:
            raise ValueError(
                f"Expected a budget of {unit} for `train_{unit}`. Received: {set_unit}={getattr(runner, set_unit)}. Call `train()` or "
                f"`train_{set_unit}()`, or set `{unit}` instead."
            )
        results = self._results
        nothing = None
        # A run by updates that was stopped within its last evaluation makes that evaluation.
        ends_in_evaluation = runner.is_step_mode and results.open
        if self._is_used_up() and not ends_in_evaluation:
            nothing = (
                f"the run has completed {runner.index} of {getattr(runner, unit)} {unit}. Raise {unit} to continue. If this is to be "
                "another run, such as another fold, name in the configuration what differs, such as fold=1: then it gets another directory."
            )
        elif results.patience_exhausted():
            nothing = "the patience of the run is used up. Raise patience to continue."
        if nothing is not None:
            if runner.is_main_process:
                logger.warning("Nothing is left to train: %s", nothing)
            return
        with self.training():
            verb = "evaluate_steps" if runner.is_step_mode else "evaluate_epoch"
            self._checks.check_calls(unit, evaluates=bool(evaluated))
            # One batch of each split before the first update, unless an evaluation is under way.
            if runner.config.try_evaluation and not (is_overridden(runner, verb) or results.open):
                self._evaluator.try_once(evaluated)
            train = self._train_steps if runner.is_step_mode else self._train_epochs
            self._train_on = partial(train, splits, evaluated)
            self.is_at_boundary = False
            if self._driver is None:
                train(splits, evaluated)
            else:
                # Begins again from the state as it is whenever the ranks change, as a resumed run does.
                self._driver.train(self._train_on)

    def check_trainable(self) -> None:
        """Refuse a closed runner, and an optimizer that does not take the gradient as it is. Called on all ranks."""
        runner = self._runner
        if self._closers.closed:
            raise ValueError(
                "Expected a runner that is open. Received: train() after close(), or after its `with` block. Construct it again; "
                "auto_resume continues from its last checkpoint."
            )
        runner._check_settings()
        check_smoothing(runner.criterion)
        self._evaluator.check_metrics()
        # Before the parameters are looked at: a forward without its backward may have put gathered ones in their place.
        self._update.leave_open()
        self._checks.check_optimizer()
        if isinstance(runner.checkpoint_manager, CheckpointManager):
            runner.checkpoint_manager.check_weights(runner.named_parameters())

    def _is_used_up(self) -> bool:
        """Whether the run is at the end of its budget."""
        runner, counters = self._runner, self._runner.state.train
        if runner.is_step_mode:
            return counters.global_step >= (runner.steps or 0)
        return counters.epoch >= (runner.epochs or 0)

    @contextmanager
    def training(self, *, whole: bool = True) -> Iterator[None]:
        """Train inside: log messages belong to this run, signals are watched, and the end, a stop or a failure is saved."""
        runner, session = self._runner, self._session
        for extension in self.extensions:
            extension.check_training(whole=whole)
        self._driver = next((extension for extension in self.extensions if extension.drives), None)
        # The time of the run counts from here: what a program does before its training is its own.
        session.begin(max_seconds=runner.config.max_time_seconds(), whole=whole)
        session.running = True
        with ExitStack() as stack:
            # Also where the training fails before its first update.
            stack.callback(session.leave)
            stack.enter_context(self._reporter.speaking())
            watch = RankWatch.of(runner, session, self._reporter, self._calls)
            attached = [each for each in (runner.build_profiler(), watch) if each is not None]
            runner.observers.extend(attached)
            stack.callback(self._detach, attached)
            stack.enter_context(session.observed())
            # What cannot be trained is refused here, before a tracker is opened and a signal handler installed.
            self.begin_updates()
            runner.model.train()
            runner.open_trackers()
            self._reporter.trackers.begin_training()
            runner.init_signal_handlers()
            self._reporter.begin(runner, self._update, sums_loss=self._loss.sums)
            stack.enter_context(self._reporter.trackers.telling_status(whole=whole))
            try:
                try:
                    yield
                except EndOfPass:
                    logger.debug("A pass was left between two updates.")
                except EvaluationStopped:
                    logger.debug("An evaluation was left; a resumed run makes it again.")
                except TrainingAbandoned:
                    session.apply_requests(
                        agree(runner.placement.optimizer, session.local_requests())
                    )
                session.running = False
                # Before the state is saved: the last update of an accelerator may not have been finite.
                self._update.raise_pending_error()
                # Requests that travelled with the last update: on an accelerator, the next update reads them.
                late = first_stop(self._update.sync.take_pending_requests())
                session.stop_reason = session.stop_reason or late
                if session.stop_reason is not None or whole:
                    if self._driver is None:
                        self._finish()
                    else:
                        self._driver.train(self._train_on, self._finish)
            except Exception as error:
                self._fail(error)
                raise
            finally:
                session.leave()
                # Where torchrun ends the ranks that are left when the first one has gone, they end by the code of the signal too.
                session.uninstall_signals(keep=runner.placement.optimizer.size > 1)
                self._reporter.end()
                for loader in self._data.update_loaders().values():
                    loader.free()
            # At last, when the program's own handlers are back and everything is closed.
            session.redeliver_signal()

    def _detach(self, observers: Sequence[Observer]) -> None:
        # One that failed has been removed.
        for each in [each for each in observers if each in self._runner.observers]:
            self._runner.observers.remove(each)

    def begin_updates(self) -> None:
        """Look at model, criterion, optimizer and scheduler as they are now. Called on all ranks."""
        runner = self._runner
        self._bind_reduction()
        self.has_pass_hook = runner._overrides_any("on_pass_start")
        runner.window.reduces = True
        runner.window.sum_reduced = self._loss.sums
        runner.window.may_divide_by_zero = self._loss.may_divide_by_zero
        self.due.read_intervals()
        self._update.schedule.begin()
        enter_training(runner.optimizer)
        self._attributes.before_training()
        self._observer_states.warn_of_others()

    def _finish(self) -> None:
        """Save the end of the training, wait until that is on the disk, and log how it ended. Called on all ranks."""
        runner, session, manager = self._runner, self._session, self._runner.checkpoint_manager
        saved = runner.saver.save_last(signalled=session.stop_reason in BY_SIGNAL)
        if session.stop_reason is None and runner.config.checkpoint.last_save_model_only:
            # In addition: a budget that is raised later continues from the full state.
            runner.saver.export()
        self._results.write()
        # On all ranks, so that an error of the background writer is raised on all of them.
        manager.wait()
        manager.wait_for_copies()
        self._reporter.log_end(session.apply_late_signals(runner.placement.optimizer))
        session.exit_if_signalled(runner.state.train.global_step, saved=saved)
        for extension in self.extensions:
            extension.training_finished()

    def _fail(self, error: Exception) -> None:
        """Save a state that is whole, and log the failure and, if the memory of a device ran out, a snapshot of that memory."""
        runner, step = self._runner, self._runner.state.train.global_step
        if isinstance(error, IntactStateError) and not runner.saver.is_saved:
            logger.error(
                "Training failed between two updates; saving the state after step %d.", step
            )
            try:
                runner.save_checkpoint()
                runner.checkpoint_manager.wait()
            except Exception:
                logger.exception("That save failed; the error of the training follows.")
        if runner.is_main_process:
            for note in getattr(error, "__notes__", ()):
                logger.error("%s", note)
        if is_out_of_memory(error):
            directory = runner.workspace.dir / runner.config.profiling.trace_dir
            write_memory_snapshot(
                directory, error, rank=runner.rank, global_step=step, device=runner.device
            )
        self._reporter.log_end(f"Failed with {type(error).__name__}")

    # By epochs

    def _train_epochs(self, splits: Sequence[str], evaluated: Sequence[str]) -> None:
        """Train epoch by epoch."""
        runner = self._runner
        counters = runner.state.train
        self._session.data_ended = False
        try:
            while counters.epoch < (runner.epochs or 0) and not self._session.stop_reason:
                self.has_jumped = False
                for split in splits:
                    if not self._is_trained(split):
                        self._keys.begin_pass(split)
                        self._keep(split, runner.train_epoch(split))
                    if self._is_interrupted():
                        break
                else:
                    # Evaluated before the epoch is counted: a run that is stopped here is resumed in this evaluation.
                    self.due.evaluate(evaluated, "evaluate_epoch")
                    self._finish_epoch(splits, "epoch")
                    self.due.save_if_due(counters.epoch, final=counters.epoch == runner.epochs)
                    self.due.note_evaluation_saved()
        except DataEnded:
            # The run has evaluated each finished epoch at its end.
            self._note_end_of_data(f"epoch {counters.epoch} of {runner.epochs}")

    def _finish_epoch(self, splits: Sequence[str], boundary: Boundary) -> None:
        for split in splits:
            self._runner.source(split).finish_pass()
        self._runner.state.train.epoch += 1
        self._results.close(boundary)

    def train_epoch(self, split: str) -> dict[str, float]:
        """Train the rest of one pass over one split, and return its metrics; none where it was left half-way."""
        session = self._session
        for outcome in self._updates(split):
            # Asked here, since a call that has nothing to do would cost every update.
            if session.save_requested or not session.updated_once:
                self.due.after_update(outcome)
            if session.stop_reason:
                return {}
        if self.has_jumped:
            return {}
        metrics = self._results.open[split] = self.due.trained_metrics()
        return metrics

    def train_epoch_directly(
        self, split: str, train_epoch: Callable[[], object], splits: Sequence[str]
    ) -> object:
        """Train a pass that a program asks for by `train_epoch`; the epoch is over when every split to train on has had its pass."""
        runner = self._runner
        results = self._results
        self.has_jumped = False
        self._keys.begin_pass(split)
        metrics = train_epoch()
        self._keep(split, metrics)
        if not self._is_interrupted():
            if split not in splits:
                runner.source(split).finish_pass()
                del results.open[split]
            elif all(other in results.open for other in splits):
                self._finish_epoch(splits, "alone")
        return metrics

    def _keep(self, split: str, metrics: object) -> None:
        results = self._results
        if self._is_interrupted():
            return  # half-way through the pass
        # An override of `train_epoch` may return nothing: the pass counts all the same.
        if metrics is None:
            results.open.setdefault(split, {})
        else:
            results.open[split] = checked_figures("train_epoch", split, metrics)

    def _is_interrupted(self) -> bool:
        """Whether the loops must leave the pass: the run is to stop, or its state was replaced by one of another pass."""
        return self._session.stop_reason is not None or self.has_jumped

    # By updates

    def _train_steps(self, splits: Sequence[str], evaluated: Sequence[str]) -> None:
        """Train update by update, pass after pass over the data. If stopped during an evaluation, resume starts with that evaluation."""
        runner, counters, results = self._runner, self._runner.state.train, self._results
        begun_at = counters.global_step
        is_due = (
            begun_at and begun_at not in runner.results and self.due.evaluation_is_due(begun_at)
        )
        has_begun = results.open or self.is_at_boundary
        if is_due and not has_begun:
            # The state was saved in an override of `step`, before the evaluation that follows its update.
            split = next((split for split in splits if not self._is_trained(split)), splits[-1])
            results.open[split] = self.due.trained_metrics()
        if results.open:
            self.due.validate(evaluated, final=begun_at == runner.steps)
        elif self.is_at_boundary:
            # The ranks have changed there.
            split = self.last_split or splits[-1]
            self.due.reach_boundary(split, evaluated, final=begun_at == runner.steps, again=True)
        self.is_at_boundary = False
        self._session.data_ended = False
        try:
            while counters.global_step < (runner.steps or 0) and not self._session.stop_reason:
                if self._train_pass(splits, evaluated):
                    self._count_pass()
        except DataEnded:
            step = counters.global_step
            self._note_end_of_data(f"update {step} of {runner.steps}")
            if step and step not in runner.results:
                # The run is at its end: what it trained last is evaluated and saved as after the last update of the budget.
                results.open[self.last_split or splits[-1]] = self.due.trained_metrics()
                self.due.validate(evaluated, final=True)

    def _note_end_of_data(self, where: str) -> None:
        self._session.data_ended = True
        if self._runner.is_main_process:
            logger.warning("The stream of samples ended at %s: the run ends there.", where)

    def _train_pass(self, splits: Sequence[str], evaluated: Sequence[str]) -> bool:
        """Train the rest of one pass over all splits, evaluating on the way; `False` where it was left half-way."""
        runner, session, self.has_jumped = self._runner, self._session, False
        for split in splits:
            if self._is_trained(split):
                continue
            self._keys.begin_pass(split)
            for outcome in self._updates(split):
                self.last_split = split
                if session.save_requested or not session.updated_once:
                    self.due.after_update(outcome)
                step = runner.state.train.global_step
                final = step == runner.steps  # the budget may change at any time
                is_last = outcome.committed and final
                if is_last and self._agreement.is_over(runner.source(split)):
                    # Before the last evaluation and save: no loop reaches the end of this pass any more.
                    runner.source(split).finish_pass()
                    if split == splits[-1]:
                        self._count_pass()
                if outcome.committed:
                    self.is_at_boundary = True
                    self.due.reach_boundary(split, evaluated, final=final)
                    self.is_at_boundary = False
                if final or session.stop_reason:
                    return False
            if self.has_jumped:
                return False
            runner.source(split).finish_pass()
        return True

    def _count_pass(self) -> None:
        self._runner.state.train.epoch += 1
        self._update.schedule.advance("pass", {})

    # Both

    def _is_trained(self, split: str) -> bool:
        """Whether the present pass is over for one of the splits."""
        runner = self._runner
        if self._is_used_up():
            return True
        if runner.is_step_mode:
            return runner.source(split).epoch > runner.state.train.epoch
        return split in self._results.open

    def _updates(self, split: str) -> Iterator[UpdateOutcome]:
        """Yield the outcome of every update in the rest of a pass: the one batch loop.

        The position of the source moves when an update is decided, even if it was skipped.
        """
        runner, session, agreement = self._runner, self._session, self._agreement
        run_window, update = self.run_window, self._update
        source = self._data.begin(split)
        source.note_dataset()
        # The program may have replaced model or optimizer between two passes.
        self._bind_reduction()
        update.split = split
        runner.observers.notify("pass_started", split)

        def read() -> Iterator[Batch]:
            """Yield batches, and tell the observers of the waits for them."""
            batches, observers = source.batches(), session.observers
            while True:
                if (begins_wait := observers.calls.get("batch_wait_started")) is not None:
                    begins_wait()
                try:
                    batch = next(batches, None)
                finally:
                    if (ends_wait := observers.calls.get("batch_wait_ended")) is not None:
                        ends_wait()
                if batch is None:
                    return
                yield batch

        def move() -> None:
            if source.reads and source.is_built:
                self._data.check_unchanged(split)
            source.commit(consumed)

        # A change of the ranks in the first update of a pass leads here again.
        is_begun = self._driver is not None and self.begun_pass == (split, source.epoch)
        begins = source.consumed == 0 and not is_begun
        # Only the first batch of a stream shows whether there is one more pass: see below.
        if begins and source.kind != "window":
            given = runner.datasets.get(split)
            self._start_pass(split)
            begins = False
            self.begun_pass = (split, source.epoch)
            self.begun_passes += 1
            source = self._data.begin(split)  # the hook may have replaced or extended the dataset
            source.is_of_hook |= runner.datasets.get(split) is not given
        self._data.agree_lengths()
        batches = read()
        ends_alike = agreement.ends_alike(source)
        is_compared = False
        has_batches = source.consumed > 0
        while True:
            batch = next(batches, None)
            is_over = batch is None if ends_alike else not agreement.all_have(source, batch)
            if is_over:
                break
            assert batch is not None
            has_batches = True
            if not is_compared:
                is_compared = agreement.compare(source, batch)
            replaced = self._replaced_state() if self.extensions else None
            if replaced is not None:
                # Other parameters may be frozen now.
                self._bind_reduction()
                self._reporter.forget_samples(runner.state.train.samples)
                self.has_jumped = self._is_trained(split)
                if self.has_jumped:
                    return
                # The process that made the state began the pass: what was set then is in that state.
                begins = False
                # Batches that were read before do not count, unless this rank has its own loader, which has not moved.
                has_own_position = source.is_rank_local and not replaced.moved_in_data
                batches = chain([batch], batches) if has_own_position else read()
                continue
            if begins:
                self._start_pass(split)
                begins = False
            consumed: list[Batch] = []
            if not run_window(source, chain([batch], batches), consumed):
                # Memory ran out: the batches are read again, in smaller ones.
                batches = read()
                continue
            update.move_source = move
            outcome = session.update(runner.step)
            if outcome.reason == UNCOMMITTED:
                # The replica groups have not agreed: the update is made again from the same batches.
                batches = chain(consumed, batches)
                continue
            # Still set where an override of `step` has not called `super().step()`.
            if update.move_source is not None:
                update.end_batches()
            yield outcome
            # After the evaluation and the save that the caller may make.
            if self.extensions and any(extension.ends_pass() for extension in self.extensions):
                break
        if not has_batches:
            raise ValueError(
                f"Expected at least one batch on every rank in split {split!r}. Received: an empty loader on some rank. Check the "
                "dataset, and `drop_last` against the batch size."
            )
        runner.observers.notify("pass_ended", split)

    def _replaced_state(self) -> StateReplaced | None:
        """Let the extensions begin an update, and return how one of them has replaced the state of the run."""
        found = [extension.before_update() for extension in self.extensions]
        return next((replaced for replaced in found if replaced is not None), None)

    def _start_pass(self, split: str) -> None:
        """Call the hook of the beginning of a pass, which may freeze parameters, unfreeze them, or replace the optimizer."""
        runner, recompute = self._runner, self._update.recompute
        put_back = (
            recompute.remember(window=False, reads_again=True) if self._driver is not None else None
        )
        try:
            with self._pass_settings.watched() if self.has_pass_hook else nullcontext():
                runner.on_pass_start(split)
        except BaseException:
            # An evaluation in it in which the ranks changed: it is called again.
            if put_back is not None:
                put_back()
            raise
        if self.has_pass_hook:
            check_smoothing(runner.criterion)
            self._bind_reduction()


def _nothing() -> None:
    """Do nothing: a loop by hand trains by itself."""

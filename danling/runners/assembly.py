"""What stands behind the short methods of a torch runner: its parts, and what each of them is constructed of.

A part is handed values, callables, or the runner itself as the small protocol that the part asks for. A hook is looked up on the runner at
every call, since a user may override it, and a setting may change while a run trains: nothing of these is bound here.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import cached_property, partial
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from danling.audit.environment import write_environment
from danling.audit.errors import ReplayMismatchError
from danling.audit.gradient_capture import GradientCapture, GradientSettings
from danling.audit.inventory import entries
from danling.audit.record import DigestFile, DigestLine
from danling.audit.replay import UpdateReplay
from danling.audit.replayed import ReplayedAudit, ReplayedForwards, SeenSamples
from danling.audit.until import Until
from danling.audit.update_audit import UpdateAudit
from danling.checkpoints import FileCheckpointManager
from danling.config.effects import endless_streams, idle_settings
from danling.data import derive_seed
from danling.distributed import Board, StepSync, collective_timeout, default_store
from danling.metrics import Meters, MetricSet
from danling.optim.building import scheduler_interval
from danling.optim.modes import evaluation_weights
from danling.reporting.run_report import ReportFacts, RunReport
from danling.reporting.telemetry import Telemetry
from danling.supervision import ActivitySampler, HangWatch, RankWatch, StackReader, is_out_of_memory
from danling.supervision.rank_watch import SECONDS_BETWEEN_LOOKS
from danling.torchft import (
    Healing,
    QuorumError,
    ReplicaGroups,
    ReplicaMember,
    ReplicaSettings,
    WaitAbandonedError,
    position_owner,
)
from danling.training import BatchWeights, Evaluation, MemoryRetry, criterion_setting, written_by_forward
from danling.training.batch_loss import BatchLoss
from danling.training.component_checks import misnamed_overrides
from danling.training.coverage import ungraded, ungraded_names
from danling.training.ending import TrainingEnd
from danling.training.evaluator import EvaluatedRun, EvaluationMode, EvaluationSources, Evaluator
from danling.training.frozen import FrozenWeights
from danling.training.gradients import normalization_statistics
from danling.training.loop import TrainingLoop
from danling.training.micro_batches import Forwards, MicroBatches, RetriedForwards, WindowForwards
from danling.training.readiness import Readiness
from danling.training.results import BoundarySchedule, RunResults, ScoreFacts
from danling.training.rollback import buffers_of, remember_forwards
from danling.training.run_state import StatePart
from danling.training.safeguard import TrainedKeeper
from danling.training.saving import RunSaver
from danling.training.update import UpdateStep
from danling.utils.names import canonical_name

from .alone import LoneVerbs
from .driving import TrainingDriver
from .replaying import build_replay

if TYPE_CHECKING:
    from .torch_runner import TorchRunner

logger = logging.getLogger("danling")


class TorchParts:
    """The parts of a torch runner, each made when it is first asked for, after the user's `__init__`.

    Args:
        runner: The runner.

    Attributes:
        memory_retry: Makes an update again when memory ran out, with `dataloader.micro_batch_size="auto"`.
        metrics: What evaluation computes beside the loss.
    """

    metrics: MetricSet

    def __init__(self, runner: TorchRunner) -> None:
        self.runner = runner
        self.memory_retry: MemoryRetry | None = None

    # Construction

    def choose_memory_retry(self) -> None:
        """Make what is needed to find the size of micro-batches, before the model is wrapped for it.

        Raises:
            ValueError: If a forward communicates, so that a rank that is out of memory would leave the others waiting.
        """
        runner = self.runner
        if not runner._data.plan.finds_micro_batch_size:
            return
        reason = runner.preparation.forward_communicates(runner.unwrapped_model)
        if reason is not None:
            raise ValueError(
                "Expected dataloader.micro_batch_size to be a number where forward or backward communicate: a rank that is out of memory "
                f"would leave the others waiting. Received: dataloader.micro_batch_size='auto' with {reason}. Set the most samples that "
                "fit a rank."
            )
        self.memory_retry = MemoryRetry(runner.placement.optimizer, runner.device, is_out_of_memory)

    def wrap_model(self) -> None:
        """Put the model into the wrapper of the stack. Called on all ranks."""
        runner = self.runner
        # DistributedDataParallel reads the compiler's setting as well.
        with runner.compilation.settings() if runner.compilation is not None else nullcontext():
            runner.model = runner.wrap_model(runner.model)
        runner.preparation.note_wrapped(runner.unwrapped_model)
        if isinstance(runner.model, DistributedDataParallel):
            # As the wrapper does with the model's.
            for parameter in self.criterion_tensors("parameters"):
                runner.world.broadcast(parameter.data)

    def rewrap_if_trainables_changed(self) -> None:
        """Wrap the model anew where other parameters are trained than when it was wrapped. Called on all ranks, between updates.

        DistributedDataParallel reduces what required a gradient when it was made, and nothing else.
        """
        runner = self.runner
        if runner.preparation.trainables_changed(runner.unwrapped_model):
            runner.model = runner.unwrap(runner.model)
            self.wrap_model()
            runner.preparation.note_constructed(runner.model)

    def check_saving(self) -> None:
        """Refuse to leave frozen weights out of checkpoints where what writes them cannot.

        Raises:
            ValueError: If that is asked for.
        """
        runner = self.runner
        if not runner.config.checkpoint.trainable_only:
            return
        several = int(runner.config.parallel.axes.pipeline) != 1 and runner.stack == "parallel"
        if several or runner.stack == "deepspeed":
            received = "parallel.axes.pipeline above 1" if several else "stack='deepspeed'"
            raise ValueError(
                "Expected a stack on which every rank knows all weights for checkpoint.trainable_only=true. Received: "
                f"{received}. Leave it out there; for adapters alone call `runner.save_pretrained(directory)`."
            )

    def note_trained(self) -> None:
        """Count what requires a gradient at construction as trained, also where it is frozen before the first save."""
        if self.runner.config.checkpoint.trainable_only:
            self.frozen.note_trained()

    def load_base(self) -> bool:
        """Load the weights that `config.pretrained` names, from which the run began, and return whether it names some."""
        base = self.runner.config.pretrained
        if base:
            self.runner.load_pretrained(base)
        return bool(base)

    @cached_property
    def frozen(self) -> FrozenWeights:
        runner = self.runner
        return FrozenWeights(
            lambda: ((canonical_name(name), p) for name, p in runner.unwrapped_model.named_parameters())
        )

    @cached_property
    def readiness(self) -> Readiness:
        """What looks at the run before it trains."""
        runner = self.runner
        return Readiness(
            runner,
            world=runner.world,
            preparation=runner.preparation,
            overrides=runner._overrides,
            interval=self.scheduler_interval,
            monitors=lambda: "monitor" in runner.config.get("scheduler", {}),
            bound=runner.distributed or runner.stack != "ddp",
            speaks=runner.is_main_process,
        )

    def idle_settings(self) -> list[str]:
        """Return a sentence for every setting, and every override, that has no effect in this run. May be called on one rank."""
        runner = self.runner
        plan, splits, trained = runner._data.plan, runner._data.splits, runner.train_splits
        built = [runner.sources[split] for split in runner.datasets if split in runner.sources]
        return [
            *idle_settings(
                runner.config,
                evaluates=bool(runner.evaluate_splits),
                step_mode=runner.is_step_mode,
                positioned=all(source.kind in ("position", "sampled") for source in built),
                writes_files=isinstance(runner.checkpoint_manager, FileCheckpointManager),
                divides_updates=not trained or any(plan.division(split) or splits.replaced(split) for split in trained),
            ),
            *splits.idle_settings(),
            *runner.preparation.unused_settings(),
            *([] if runner.is_step_mode else endless_streams(trained, splits.lengths or {})),
            *misnamed_overrides(type(runner), vars(runner), self.readiness.unset()),
        ]

    def criterion_tensors(self, kind: str) -> list[Tensor]:
        """Return the `parameters` or the `buffers` of the criterion, if it is a module."""
        criterion = self.runner.criterion
        return list(getattr(criterion, kind)()) if isinstance(criterion, nn.Module) else []

    def unreduced(self) -> Sequence[Tensor]:
        """Return what DistributedDataParallel does not reduce: the criterion's, and everything where memory may run out in the backward."""
        if self.memory_retry is None:
            return self.criterion_tensors("parameters")
        return [parameter for _, parameter in self.runner.named_parameters()]

    def scheduler_interval(self) -> str:
        """Return when the scheduler advances: `"step"`, `"epoch"` or `"validation"`."""
        config = self.runner.config
        return scheduler_interval(config.scheduler if "scheduler" in config else {}, self.runner.scheduler)

    @property
    def sums_loss(self) -> bool:
        """Whether the criterion sums instead of averaging, so that its gradient is not divided."""
        return criterion_setting(self.runner.criterion, "reduction") == "sum"

    # Batches

    @cached_property
    def weights(self) -> BatchWeights:
        """What weighs the batches."""
        runner = self.runner
        warns = runner.is_main_process and not runner._overrides("batch_weight")
        return BatchWeights(learns=not runner._overrides("train_step"), warns=warns, criterion=lambda: runner.criterion)

    @cached_property
    def loss(self) -> BatchLoss:
        """What knows of losses that the model computes."""
        runner = self.runner
        return BatchLoss(
            runner,
            weights=self.weights,
            glance=lambda: self.weights.look_at_first(
                runner.train_splits,
                sources=runner.sources,
                datasets=runner.datasets,
                settings=runner._data.splits.settings,
                device=runner.device,
            ),
            own_loss=runner._overrides("compute_loss"),
            own_weight=runner._overrides("batch_weight"),
            speaks=runner.is_main_process,
        )

    @cached_property
    def micro_batches(self) -> MicroBatches:
        """What runs single micro-batches."""
        runner = self.runner
        micro_batches = MicroBatches(
            runner,
            window=runner.window,
            weights=self.weights,
            loss=self.loss if runner._overrides("train_step") else None,
            reporter=runner._reporter,
            session=runner._session,
        )
        micro_batches.audit, micro_batches.recorder = self.audit, self.recorder
        if self.replay is not None:
            micro_batches.audit = SeenSamples(self.replay.witness, self.audit)
        return micro_batches

    @cached_property
    def forwards(self) -> Forwards:
        """What runs the micro-batches of an update."""
        return self._forwards() if self.replay is None else ReplayedForwards(self._forwards(), self.replay)

    def _forwards(self) -> Forwards:
        runner, retry, replay, run = self.runner, self.memory_retry, self.replay, self.micro_batches.run
        forwards = WindowForwards(
            agreement=runner.build_agreement(),
            window=runner.window,
            size=runner._data.plan.undivided,
            run=run if replay is None else lambda batch: replay.witness.run(batch, run),
            reduces_later=retry is not None,
        )
        if retry is None:
            return forwards
        return RetriedForwards(
            forwards,
            retry,
            window=runner.window,
            several=runner.placement.optimizer.size > 1,
            alike=(lambda: runner.broadcast_buffers()) if runner.preparation.broadcasts_buffers else None,
            remember=self.remember_forwards,
            zero=lambda: runner.zero_gradients(),
            hold_at_most=self.hold_at_most,
            reporter=runner._reporter,
            step=lambda: runner.state.train.global_step,
            speaks=runner.is_main_process,
        )

    def hold_at_most(self, samples: int) -> None:
        """Cut updates so that a rank holds at most so many samples at once, and remember it."""
        self.runner.state.elastic.micro_batch_size = samples
        self.runner._data.plan.hold_at_most(samples)

    def remember_forwards(self) -> Callable[[], None]:
        """Return what takes the forwards of the next update back."""
        runner = self.runner
        return remember_forwards(
            runner.device,
            counter=runner.state.train,
            meters=runner.meters,
            buffers=lambda: buffers_of(runner.unwrapped_model, self.criterion_tensors("buffers")),
        )

    # One update

    @cached_property
    def losses(self) -> Meters:
        """Loss of the open epoch, or since the last evaluation in step mode; there from the beginning, unlike what makes updates."""
        return Meters()

    @cached_property
    def update(self) -> UpdateStep:
        """What closes windows and decides their updates."""
        runner = self.runner
        placement = runner.placement
        counts = (placement.counts_loss, placement.counts_samples)
        sync = StepSync(placement.optimizer, runner.device, reports=counts)
        sync.rider = self.audit
        update = UpdateStep(
            runner,
            window=runner.window,
            sync=sync,
            session=runner._session,
            preparation=runner.preparation,
            look=self.look_at_gradients,
            losses=self.losses,
            own_backward=runner._overrides("backward"),
        )
        update.audit, update.recorder = self.audit, self.recorder
        target = runner.config.audit.until
        if target is not None:
            until = Until(target, at=lambda: runner.saver.at, session=runner._session, inner=self.audit)
            runner.saver.saved.append(until.saved)
            update.audit = until
        if self.replay is not None:
            update.audit = ReplayedAudit(self.replay, update.audit)
            update.judge = partial(self.replay.judged, update.judge)
        return update

    @cached_property
    def replay(self) -> UpdateReplay | None:
        """What makes updates again and compares them; `None` unless that is configured."""
        return build_replay(self.runner, self) if self.runner.config.audit.replay_interval is not None else None

    @cached_property
    def audit(self) -> UpdateAudit | None:
        """What digests updates and compares replicas; `None` unless that is configured."""
        runner = self.runner
        every = runner.config.audit.digest_interval
        if every is None:
            return None
        placement = runner.placement
        return UpdateAudit(
            every=every,
            entries=lambda: entries(
                named_parameters=runner.named_parameters(),
                optimizer=runner.optimizer,
                averages=runner.ema.weights if runner.ema is not None else {},
                buffers=self._named_buffers(),
            ),
            part_of=runner.preparation.held_part,
            domain=placement.optimizer,
            device=runner.device,
            step=lambda: runner.state.train.global_step,
            counts_samples=placement.counts_samples,
            write=self._write_digests,
        )

    @cached_property
    def recorder(self) -> GradientCapture | None:
        """What records the gradients of the first updates; `None` unless a check of layouts has asked for them."""
        runner = self.runner
        settings = GradientSettings.of(runner.config.audit.gradients, runner.config.precision)
        if settings is None:
            return None
        coordinate, degrees = runner.preparation.place()
        return GradientCapture(
            settings,
            runner,
            criterion=lambda: runner.criterion,
            rank=runner.rank,
            coordinate=coordinate,
            degrees=degrees,
            counts_samples=runner.placement.counts_samples,
        )

    def _named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        criterion = self.runner.criterion
        for name, buffer in self.runner.unwrapped_model.named_buffers():
            yield canonical_name(name), buffer
        for name, buffer in criterion.named_buffers() if isinstance(criterion, nn.Module) else ():
            yield f"criterion.{name}", buffer

    def _write_digests(self, line: DigestLine) -> None:
        self._digest_file.write(line)

    @cached_property
    def _digest_file(self) -> DigestFile:
        assert self.audit is not None
        write_environment(self.runner.workspace.metadata_dir)
        file = DigestFile(self.runner.workspace.digests_file, resume_step=self.audit.began_at)
        self.runner._closers.callback(file.close)
        return file

    def look_at_gradients(self) -> None:
        """Name what is trained and got no gradient, and let all ranks weigh alike where a model returns its loss."""
        runner = self.runner
        optimized = runner.preparation.optimized_parameters(runner.optimizer)
        mine = runner.reduction.without_gradient({id(parameter) for parameter in optimized})
        trained = (name for name, parameter in runner.named_parameters() if parameter.requires_grad)
        names = ungraded_names(mine, trained, runner.world)
        if names and runner.is_main_process:
            logger.warning("%s", ungraded(names))
        self.loss.agree(runner.world.gather_objects)

    # Evaluation

    @cached_property
    def evaluator(self) -> Evaluator:
        """What evaluates and predicts whole splits."""
        runner = self.runner
        run = EvaluatedRun(
            placement=runner.placement,
            weights=self.weights,
            meters=lambda: runner.meters,
            metrics=lambda: self.metrics,
            sums_loss=lambda: self.sums_loss,
            undecided=lambda: self.loss.undecided,
            together=lambda: runner.preparation.evaluates_together,
            written=lambda: written_by_forward(
                runner.unwrapped_model, self.criterion_tensors("buffers"), getattr(runner.ema, "weights", None)
            ),
        )
        sources = EvaluationSources(
            check=runner._data.splits.check,
            trained=lambda: runner.train_splits,
            datasets=lambda: runner.datasets,
            loaders=lambda: runner.dataloaders,
            source=lambda split: runner.source(split),
            open=lambda split, loader: runner.sources.open(split, loader),
            build=lambda split, dataset: runner.build_dataloader(split, dataset),
        )
        return Evaluator(
            runner,
            run=run,
            sources=sources,
            evaluation=Evaluation(runner.device, is_main=runner.is_main_process),
            forward=runner.build_forward(),
            entered=self.evaluating,
            paced=runner._session.paced,
        )

    @contextmanager
    def evaluating(self, split: str, mode: EvaluationMode) -> Iterator[None]:
        """Evaluation mode on the bare model, with averaged weights where there are any and streams of its own."""
        runner, evaluation = self.runner, self.evaluator.evaluation
        preparation, bare, averages = runner.preparation, runner.unwrap(runner.model), runner.ema
        if averages is not None:
            evaluation.announce_averaged(getattr(averages, "decay", None))
        evaluating = evaluation.mode(
            runner.model,
            bare,
            seed=derive_seed(runner.seed, mode, split, runner.placement.stream_index),
            equalize=runner.broadcast_buffers,
            averaged=partial(preparation.averaged, averages) if averages is not None else None,
        )
        modes = evaluation_weights(runner.optimizer)
        with preparation.evaluating(runner.model), runner._session.collecting(), modes, evaluating:
            before = runner.model, runner.mode
            runner.model, runner.mode = bare, mode
            try:
                yield
            finally:
                runner.model, runner.mode = before

    # Loops

    @cached_property
    def driver(self) -> TrainingDriver:
        """What drives a training: where it begins, what is due within it, where it ends."""
        return TrainingDriver(self.runner, self)

    @cached_property
    def loop(self) -> TrainingLoop:
        """The loops of the run."""
        runner = self.runner
        keeper = TrainedKeeper(
            runner.saver,
            manager=lambda: runner.checkpoint_manager,
            state=lambda: runner.checkpoint_state(),
            settle=self.update.raise_pending_error,
            save=lambda: runner.save_checkpoint(save_best=False),
            may_write=lambda: not runner.config.checkpoint.load_only,
            may_save_ahead=lambda: bool(runner.config.checkpoint.before_evaluation),
            several=lambda: runner.world_size > 1 and runner.fault_tolerance is None,
            aside=lambda: runner._reporter.aside("checkpoint"),
        )
        return TrainingLoop(
            runner,
            updates=self.driver.updates,
            session=runner._session,
            results=self.results,
            reporter=runner._reporter,
            save_if_failing=keeper.make_ready,
            trained_metrics=self.driver.trained_metrics,
            first_update=self.driver.first_update,
            log_update=self.driver.log_update,
            passing=(WaitAbandonedError,),
        )

    @cached_property
    def results(self) -> RunResults:
        """What collects and records metrics."""
        runner = self.runner
        facts = ScoreFacts(
            board=lambda: runner.standing.board,
            scores=lambda: runner.standing.scores,
            best_score=lambda: runner.best_score,
            best_index=lambda: runner.best_index,
            is_best=lambda: runner.is_best,
            since_best=lambda: runner.standing.evaluations_since_best,
            patience=lambda: runner.config.patience,
            own=runner.standing.own,
        )
        schedule = BoundarySchedule(
            lambda: runner.scheduler,
            by_updates=lambda: self.update.steps_scheduler,
            interval=self.scheduler_interval,
            monitor=lambda: (runner.config.get("scheduler", None) or {}).get("monitor", None),
            scored=lambda: f"{runner.score_split}.{runner.config.score_name}",
            facts=facts,
            index=lambda: runner.index,
            epochs=lambda: runner.state.train.epoch,
        )
        return RunResults(
            runner,
            facts=facts,
            schedule=schedule,
            session=runner._session,
            write=self.driver.write_results,
            report=lambda result: self.report.log_result(result),
            speaks=runner.is_main_process,
        )

    @cached_property
    def alone(self) -> LoneVerbs:
        """What runs verbs that no loop has called."""
        return LoneVerbs(self.runner, self)

    # Report

    def _figures_of_parts(self) -> Mapping[str, Mapping[str, float]]:
        """Return what is logged of the loaders, by split, and of the copy of the run in an object store."""
        copied = self.runner._elsewhere.figures(self.runner.state.train.global_step)
        return {**self.runner._data.metrics(), **copied}

    @cached_property
    def report(self) -> RunReport:
        """What tells the reporter of the trainings of the run."""
        runner = self.runner
        facts = ReportFacts(
            counters=lambda: runner.state.train,
            count_samples=self.update.read_samples,
            epochs=lambda: runner.epochs,
            steps=lambda: runner.steps,
            by_steps=lambda: runner.is_step_mode,
            index=lambda: runner.index,
            trained=lambda: runner.train_splits,
            learning_rates=lambda: self.update.rates,
            sums_loss=lambda: self.sums_loss,
            flops_per_token=lambda: runner.flops_per_token(),
            flops_per_sample=lambda: runner.flops_per_sample(),
            of_loaders=self._figures_of_parts,
            ended=lambda: runner.progress >= 1 or self.loop.data_ended or runner._session.stop_reason is not None,
            summary=lambda: self.driver.summary(),
        )
        return RunReport(
            runner._reporter,
            facts,
            domain=runner.placement.optimizer,
            counts_samples=runner.placement.counts_samples,
            device=runner.device,
        )

    def rank_watch(self, *, samples: bool) -> RankWatch:
        """Return what looks at the thread that calls this while it trains, for the other ranks.

        Args:
            samples: Whether the other ranks learn what this one spends its time with.
        """
        runner, domain, train = self.runner, self.runner.placement.optimizer, self.runner.state.train
        saves = (type(runner).save_checkpoint, RunSaver.save, RunSaver.export)
        parts: dict[Callable[..., object], str] = {
            **dict.fromkeys(saves, "checkpointing"),
            **dict.fromkeys((Evaluator.sums, Evaluator.try_once), "evaluating"),
            **TrainingLoop.parts(),
            **TrainingEnd.parts(),
            Telemetry.timed: "data",
        }
        on_accelerator = runner.device.type != "cpu"
        reader = StackReader(parts, on_accelerator=on_accelerator)
        thread, native_id = threading.get_ident(), threading.get_native_id()
        stacks = runner.workspace.dir / "hangs"
        board = Board(default_store, f"{runner._session.training}", directory=lambda: stacks)
        hangs = HangWatch(
            reader,
            thread=thread,
            native_id=native_id,
            progress=lambda: (train.global_step, train.skipped_updates),
            step=lambda: train.global_step,
            board=board,
            rank=domain.rank,
            size=domain.size,
            place=domain.rank,
            least=runner.config.comm.hang_warning_seconds,
            limit=lambda: collective_timeout(runner.device),
            directory=lambda: stacks,
            waits_on_device=on_accelerator,
        )
        return RankWatch(
            ActivitySampler(reader, thread=thread, native_id=native_id),
            board=board,
            rank=domain.rank,
            size=domain.size,
            gathers=runner.is_main_process,
            checks=[hangs],
            seconds=SECONDS_BETWEEN_LOOKS if samples else 1.0,
        )

    # Saving and ending

    def progress_parts(self) -> list[StatePart]:
        """Return what a training adds to the entry `state` of a checkpoint, in the order in which it is restored."""
        runner = self.runner

        def load_counters(stored: Mapping[str, object]) -> None:
            runner.state.load_train(stored)
            runner.window.agreed_reference = runner.state.train.weight_reference

        return [
            # Takes the place of the part `train` of `BaseRunner`, which knows no window and so no reference weight.
            StatePart(
                "train",
                lambda: {**asdict(runner.state.train), "weight_reference": runner.window.agreed_reference},
                lambda stored, _: load_counters(stored),
            ),
            StatePart(
                "open_result",
                lambda: dict(self.results.open),
                lambda stored, _: self.results.reopen(stored),
                default=dict,
            ),
            # `bare` is what checkpoints call batches without a target.
            StatePart(
                "bare",
                lambda: self.weights.targetless,
                lambda known, _: setattr(self.weights, "targetless", known),
                default=lambda: None,
            ),
            StatePart(
                "meters",
                lambda: runner.meters.state_dict(),
                # Sums over all ranks were saved, so only one of the ranks whose sums are added may restore them.
                lambda sums, _: runner.meters.load_state_dict(sums if runner.placement.metrics.rank == 0 else {}),
                default=dict,
            ),
            StatePart.stateful("losses", lambda: self.losses, resets=True),
            StatePart.stateful("scores", lambda: runner.standing.board),
            StatePart.stateful("scaler", lambda: runner.precision.scaler),
        ]

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Leave a save in a training out of its speed, and flush the trackers with it."""
        reporter = self.runner._reporter
        if not self.runner._session.running:
            yield
            return
        with reporter.aside("checkpoint"):
            yield
        reporter.trackers.flush()

    @cached_property
    def end(self) -> TrainingEnd:
        """What ends the trainings of the run."""
        runner = self.runner
        return TrainingEnd(
            session=runner._session,
            saver=runner.saver,
            domain=runner.placement.optimizer,
            counters=lambda: runner.state.train,
            manager=lambda: runner.checkpoint_manager,
            pending=self.driver.pending_requests,
            save=lambda: runner.save_checkpoint(),
            export=self.driver.export_at_end,
            write_results=self.driver.write_results,
            say=self.driver.say_ending,
            note=self.driver.note_failure,
            close=self.driver.close_training,
            abandons=(WaitAbandonedError,),
            lost=(QuorumError,),
            stands=lambda error: isinstance(error, ReplayMismatchError) and error.is_taken_back,
        )

    # Replica groups

    def join_replica_groups(self) -> ReplicaMember:
        """Return this process's replica group as a member of those that train the run together."""
        runner = self.runner
        healing = Healing(
            run_state=runner.run_state,
            counters=lambda: runner.state,
            sources=lambda: runner.sources.among(runner.train_splits),
            keeps_positions=lambda: position_owner(runner.config) is not None,
            model=lambda: runner.unwrapped_model,
            named_parameters=lambda: runner.named_parameters(),
            window=lambda: runner.window,
            meters=lambda: runner.meters,
            stream=lambda: (runner.seed, runner.placement.stream_index),
            is_main=runner.is_main_process,
        )
        groups = ReplicaGroups(
            ReplicaSettings.from_config(runner.config),
            group=runner.world,
            state_dict=lambda: healing.state(),
            load_state_dict=lambda state: healing.take(state),
            asked_to_stop=runner._session.asked_to_stop,
        )
        train = runner.state.train
        return ReplicaMember(
            groups,
            healing,
            world=runner.world,
            copies=lambda: runner.preparation.copies(
                runner.model, runner.ema.weights.values() if runner.ema is not None else ()
            ),
            remember=self._remember_update,
            statistics=lambda: normalization_statistics(runner.unwrapped_model),
            resumes=lambda: bool(runner.config.auto_resume),
            checkpoints=lambda: runner.checkpoint_manager,
            directory=lambda: runner.workspace.checkpoints,
            step=lambda: train.global_step,
            tried=lambda: train.global_step + train.skipped_updates,
            load=lambda source: runner.load_checkpoint(source),
        )

    def _remember_update(self) -> Callable[[], None]:
        runner, put_back = self.runner, self.remember_forwards()

        def take_back() -> None:
            runner.optimizer.zero_grad()
            runner.window.reset()
            put_back()

        return take_back

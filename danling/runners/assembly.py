"""What the components of a torch runner are constructed of: values, and hooks that are looked up on the runner each time.

A user may override a hook, or change a setting while a run trains, so nothing of these is bound here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from danling.data import Batch
from danling.distributed import set_collective_timeout
from danling.reporting import describe_batches, describe_parameters, describe_training
from danling.reporting.run_report import ReportFacts, RunReport
from danling.supervision import Profiler, is_out_of_memory, write_memory_snapshot
from danling.torchft import QuorumError, WaitAbandonedError
from danling.training import BatchWeights, Boundaries, Evaluation, written_by_forward
from danling.training.batch_loss import BatchLoss
from danling.training.ending import TrainingEnd
from danling.training.evaluator import EvaluatedRun, EvaluationHooks, EvaluationSources, Evaluator
from danling.training.loop import Budget, LoopHooks, TrainingLoop
from danling.training.micro_batches import MicroBatches, MicroBatchHooks, RetriedForwards, WindowForwards
from danling.training.results import BoundarySchedule, RunResults, ScoreFacts
from danling.training.safeguard import TrainedKeeper

if TYPE_CHECKING:
    from .torch_runner import TorchRunner


# Batches


def batch_weights(runner: TorchRunner) -> BatchWeights:
    """Return what weighs the batches of a run."""
    warns = runner.is_main_process and not runner._overrides("batch_weight")
    return BatchWeights(learns=not runner._overrides("train_step"), warns=warns, criterion=lambda: runner.criterion)


def batch_loss(runner: TorchRunner) -> BatchLoss:
    """Return what knows of losses that the model computes."""
    weights = runner._batch_weights
    return BatchLoss(
        criterion=lambda: runner.criterion,
        model=lambda: runner.unwrapped_model,
        compute_loss=lambda pred, target: runner.compute_loss(pred, target),
        batch_weight=lambda data, target: runner.batch_weight(data, target),
        weights=weights,
        window=lambda: runner.window,
        glance=lambda: weights.look_at_first(
            runner.train_splits,
            sources=runner.sources,
            datasets=runner.datasets,
            settings=runner._splits.settings,
            device=runner.device,
        ),
        own_loss=runner._overrides("compute_loss"),
        own_weight=runner._overrides("batch_weight"),
        speaks=runner.is_main_process,
    )


def micro_batches(runner: TorchRunner) -> MicroBatches:
    """Return what runs single micro-batches."""
    hooks = MicroBatchHooks(
        train_step=lambda data: runner.train_step(data),
        to_device=lambda data: runner.to_device(data),
        batch_weight=lambda data, target: runner.batch_weight(data, target),
        count_tokens=lambda data: runner.count_tokens(data),
        counter=lambda: runner.state.train,
        begin=lambda: runner.reduction.begin(first=not runner._looked),
    )
    return MicroBatches(
        hooks,
        window=runner.window,
        weights=runner._batch_weights,
        loss=runner._batch_loss if runner._overrides("train_step") else None,
        reporter=runner._reporter,
        session=runner._session,
    )


def window_forwards(runner: TorchRunner) -> WindowForwards:
    """Return what runs the micro-batches of an update."""
    retry = runner.memory_retry
    retried = None
    if retry is not None:
        retried = RetriedForwards(
            retry,
            window=runner.window,
            several=runner.placement.optimizer.size > 1,
            alike=(lambda: runner.broadcast_buffers()) if runner.preparation.broadcasts_buffers else None,
            remember=lambda: runner._remember_forwards(),
            zero=lambda: runner.zero_gradients(),
            hold_at_most=lambda samples: hold_at_most(runner, samples),
            reporter=runner._reporter,
            step=lambda: runner.state.train.global_step,
            speaks=runner.is_main_process,
        )
    return WindowForwards(
        agreement=runner.build_agreement(),
        window=runner.window,
        size=lambda: runner.update_plan.undivided(),
        run=runner._micro_batches.run,
        retried=retried,
    )


def hold_at_most(runner: TorchRunner, samples: int) -> None:
    """Cut updates so that a rank holds at most so many samples at once, and remember it."""
    runner.state.elastic.micro_batch_size = samples
    runner.update_plan.hold_at_most(samples)


# Evaluation


def evaluator(runner: TorchRunner) -> Evaluator:
    """Return what evaluates and predicts whole splits."""
    hooks = EvaluationHooks(
        evaluate_step=lambda data: runner.evaluate_step(data),
        infer_step=lambda data: runner.infer_step(data),
        summarize=lambda split, totals: runner.summarize(split, totals),
        to_device=lambda data: runner.to_device(data),
        batch_weight=lambda data, target: runner.batch_weight(data, target),
    )
    run = EvaluatedRun(
        placement=runner.placement,
        weights=runner._batch_weights,
        meters=lambda: runner.meters,
        metrics=lambda: runner.metric_set,
        sums_loss=lambda: runner.sums_loss,
        undecided=lambda: runner._batch_loss.undecided,
        together=lambda: runner.preparation.evaluates_together,
        written=lambda: written_by_forward(
            runner.unwrapped_model, runner._criterion_tensors("buffers"), getattr(runner.ema, "weights", None)
        ),
    )
    sources = EvaluationSources(
        check=lambda split: runner._splits.check(split),
        trained=lambda: runner.train_splits,
        datasets=lambda: runner.datasets,
        loaders=lambda: runner.dataloaders,
        source=lambda split: runner.source(split),
        open=lambda split, loader: runner.sources.open(split, loader),
        build=lambda split, dataset: runner.build_dataloader(split, dataset),
    )
    return Evaluator(
        hooks,
        run=run,
        sources=sources,
        evaluation=Evaluation(runner.device, is_main=runner.is_main_process),
        forward=runner.build_forward(),
        entered=lambda split, mode: runner._evaluating(split, mode),
        paced=lambda batches: runner._session.paced(batches),
    )


# Loops


def budget(runner: TorchRunner) -> Budget:
    """Return how long a run is."""
    return Budget(
        epochs=lambda: runner.epochs,
        steps=lambda: runner.steps,
        by_steps=lambda: runner.is_step_mode,
    )


def training_loop(runner: TorchRunner) -> TrainingLoop:
    """Return the loops of a run."""
    keeper = TrainedKeeper(
        runner.saver,
        manager=lambda: runner.checkpoint_manager,
        state=lambda: runner.checkpoint_state(),
        settle=lambda: runner.raise_pending_error(),
        save=lambda: runner.save_checkpoint(save_best=False),
        may_write=lambda: not runner.config.checkpoint.load_only,
        may_save_ahead=lambda: bool(runner.config.checkpoint.before_evaluation),
        several=lambda: runner.world_size > 1 and runner.fault_tolerance is None,
        aside=lambda: runner._reporter.aside("checkpoint"),
    )
    hooks = LoopHooks(
        train_epoch=lambda split: runner.train_epoch(split),
        evaluate_epoch=lambda split: runner.evaluate_epoch(split),
        evaluate_steps=lambda split: runner.evaluate_steps(split),
        updates=lambda split: runner._updates(split),
        source=lambda split: runner.source(split),
        counters=lambda: runner.state.train,
        save=lambda: runner.save_checkpoint(),
        save_if_failing=keeper.make_ready,
        trained_metrics=lambda: trained_metrics(runner),
        first_update=lambda: first_update(runner),
        log_update=lambda outcome: runner._report.log_update(outcome),
    )
    return TrainingLoop(
        hooks,
        budget=budget(runner),
        session=runner._session,
        results=runner._results,
        reporter=runner._reporter,
        passing=(WaitAbandonedError,),
    )


def boundaries(runner: TorchRunner) -> Boundaries:
    """Return what is due between the updates of one training."""
    every = runner.checkpoint_interval
    return Boundaries(
        log_every=runner.log_interval,
        evaluate_every=runner.config.evaluate_interval or every,
        checkpoint_every=every,
        save=lambda **options: runner.save_checkpoint(**options),
        is_best=runner._results.has_best_at,
    )


def trained_metrics(runner: TorchRunner) -> dict[str, float]:
    """Return the metrics of what was trained since the last call, over all ranks."""
    runner.raise_pending_error()
    metrics = runner.losses.averages()
    # Always, since what this rank has seen says nothing of the others.
    metrics.update({name: total / weight for name, (total, weight) in runner.meter_totals().items() if weight})
    runner.losses.reset()
    runner.meters.reset()
    return metrics


def first_update(runner: TorchRunner) -> None:
    """Do after the first update of a process what it has shown to be due, everywhere."""
    if runner.compilation is not None and runner.is_main_process:
        runner.compilation.warn_without_graph()
    limit = runner.config.comm.train_timeout_seconds
    if limit is not None and runner.distributed:
        runner.world.barrier()
        set_collective_timeout(limit, runner.placement.groups())


def run_results(runner: TorchRunner) -> RunResults:
    """Return what collects and records metrics."""
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
        by_updates=lambda: runner._steps_scheduler,
        interval=lambda: runner.scheduler_interval(),
        monitor=lambda: (runner.config.get("scheduler", None) or {}).get("monitor", None),
        scored=lambda: f"{runner.score_split}.{runner.config.score_name}",
        facts=facts,
        index=lambda: runner.index,
    )
    return RunResults(
        recorded=lambda: runner.results,
        index=lambda: runner.index,
        facts=facts,
        schedule=schedule,
        session=runner._session,
        write=lambda: runner.write_results(),
        report=lambda result: runner._report.log_result(result),
        speaks=runner.is_main_process,
    )


# Report


def run_report(runner: TorchRunner) -> RunReport:
    """Return what tells the reporter of the trainings of a run."""
    facts = ReportFacts(
        counters=lambda: runner.state.train,
        count_samples=lambda: runner.read_samples(),
        epochs=lambda: runner.epochs,
        steps=lambda: runner.steps,
        by_steps=lambda: runner.is_step_mode,
        index=lambda: runner.index,
        trained=lambda: runner.train_splits,
        learning_rates=lambda: runner._rates,
        sums_loss=lambda: runner.sums_loss,
        flops_per_token=lambda: runner.flops_per_token(),
        flops_per_sample=lambda: runner.flops_per_sample(),
        ended=lambda: runner.progress >= 1 or runner._session.stop_reason is not None,
    )
    return RunReport(
        runner._reporter,
        facts,
        domain=runner.placement.optimizer,
        counts_samples=runner.placement.counts_samples,
        device=runner.device,
    )


def begin_report(runner: TorchRunner) -> None:
    """Begin to report a training."""
    runner._report.begin(
        name=runner.config.experiment,
        peak_flops=runner.peak_flops(),
        countable=runner.stack == "ddp" and not runner.config.compile.enable,
        seconds_between_lines=runner.config.log_seconds,
        profiler=runner.build_profiler(),
        description=lambda: description(runner),
    )


def description(runner: TorchRunner) -> str:
    """Return what is going to be trained, in one line."""
    train, size = runner.state.train, runner.world_size
    return describe_training(
        step=train.global_step,
        epoch=train.epoch,
        budget=f"step {runner.steps}" if runner.is_step_mode else f"epoch {runner.epochs}",
        processes=f"{size} {runner.device.type} process{'es' if size > 1 else ''}",
        stack=f"{runner.stack}, {runner.config.precision or 'fp32'}",
        parameters=describe_parameters((p.numel(), p.requires_grad) for _, p in runner.named_parameters()),
        batches=describe_batches(
            runner.batch_size, runner.accum_steps, runner.update_plan.division(), distributed=runner.distributed
        ),
        directory=runner.workspace.dir,
    )


def profiler(runner: TorchRunner) -> Profiler | None:
    """Return the profiler of the configuration, `None` when it is off."""
    settings = dict(runner.config.profiling.items())
    if not settings.pop("enabled"):
        return None
    directory = runner.workspace.dir / settings.pop("trace_dir")
    if settings["profile_memory"] and runner.device.type == "cuda":
        # Where blocks were allocated, for the snapshot of a run that is out of memory.
        torch.cuda.memory._record_memory_history(max_entries=100_000)
    return Profiler(directory, rank=runner.rank, **settings)


def between_batches(runner: TorchRunner, split: str, batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield the batches of an evaluation in training, before each of which all ranks agree whether to go on."""
    session, reporter, train = runner._session, runner._reporter, runner.state.train

    def seen(number: int) -> None:
        reporter.doing(f"{split} {number}")
        session.beat(train.global_step, train.epoch)

    with reporter.aside():
        pending = runner.step_sync.take_pending_requests()
        yield from session.between_batches(batches, domain=runner.placement.optimizer, pending=pending, seen=seen)


# Ending


def training_end(runner: TorchRunner) -> TrainingEnd:
    """Return what ends the trainings of a run."""
    return TrainingEnd(
        session=runner._session,
        saver=runner.saver,
        domain=runner.placement.optimizer,
        counters=lambda: runner.state.train,
        manager=lambda: runner.checkpoint_manager,
        pending=lambda: pending_requests(runner),
        save=lambda: runner.save_checkpoint(),
        export=lambda: export_at_end(runner),
        write_results=lambda: runner.write_results(),
        say=lambda ending: runner._report.say_ending(ending),
        note=lambda error: note_failure(runner, error),
        close=lambda: close_training(runner),
        abandons=(WaitAbandonedError,),
        lost=(QuorumError,),
    )


def pending_requests(runner: TorchRunner) -> frozenset[str]:
    """Raise what the last update left to be raised, and return what was asked for in it."""
    runner.raise_pending_error()
    return runner.step_sync.take_pending_requests()


def export_at_end(runner: TorchRunner) -> None:
    """Write the weights alone, where that is asked for."""
    if runner.config.checkpoint.last_save_model_only:
        runner.export_model()


def note_failure(runner: TorchRunner, error: Exception) -> None:
    """Write down where the memory of a device went that ran out."""
    if is_out_of_memory(error):
        directory = runner.workspace.dir / runner.config.profiling.trace_dir
        step = runner.state.train.global_step
        write_memory_snapshot(directory, error, rank=runner.rank, global_step=step, device=runner.device)


def close_training(runner: TorchRunner) -> None:
    """Close what was opened for a training."""
    runner._reporter.end()
    runner._reporter.flush()
    if runner.fault_tolerance is not None:
        # A group that stays and does not train would hold the others up.
        runner.fault_tolerance.leave()


@contextmanager
def save_aside(runner: TorchRunner) -> Iterator[None]:
    """Leave a save in a training out of its speed, and flush the trackers with it."""
    if not runner._session.running:
        yield
        return
    with runner._reporter.aside("checkpoint"):
        yield
    runner._reporter.trackers.flush()

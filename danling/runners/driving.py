"""How a training of a torch runner is driven: where it begins, what is due within it, where it ends."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from danling.checkpoints import CheckpointManager
from danling.checkpoints.torch_files import FORMAT_VERSION
from danling.config.names import counts_flops
from danling.config.parse import command_line_of
from danling.distributed import set_collective_timeout
from danling.optim.modes import enter_training
from danling.optim.schedulers import is_told_its_place
from danling.reporting import Launch, describe_batches, describe_end, describe_parameters, describe_training
from danling.reporting.rank_times import RankTimes
from danling.reporting.record import RunRecorder
from danling.supervision import Profiler, RankWatch, is_out_of_memory, write_memory_snapshot
from danling.training import Boundaries, UpdateOutcome, updates_of_pass
from danling.training.model_states import weights_to_export
from danling.utils.messages import Paced
from danling.utils.secrets import hide_secret_words, secret_values

from .watching import build_rank_watch

if TYPE_CHECKING:
    from .assembly import TorchParts
    from .base_runner import SplitNames
    from .torch_runner import TorchRunner

logger = logging.getLogger("danling")


class TrainingDriver:
    """Drives one training after the other, by what the parts of a runner do and the hooks that a user may have overridden."""

    def __init__(self, runner: TorchRunner, parts: TorchParts) -> None:
        self.runner = runner
        self.parts = parts
        self._stream_lines = Paced(runner.config.log_seconds)
        self._watch: RankWatch | None = None

    # Before it

    def check_ready(self, train_splits: SplitNames, evaluate_splits: SplitNames) -> tuple[list[str], list[str]]:
        """Return the splits to train on and to evaluate, of a run that is ready to train. Called on all ranks."""
        runner = self.runner
        self.check_trainable()
        if runner.epochs is None and runner.steps is None:
            raise ValueError(
                "Expected a budget: `steps` (optimizer updates) or `epochs`. Received: steps=None, epochs=None. Set one of them."
            )
        to_train = runner._data.splits.choose(train_splits, runner.train_splits, "train on")
        if not (runner.evaluate_splits if evaluate_splits is None else evaluate_splits):
            self.parts.readiness.check_schedule(evaluates=False)
            return to_train, []
        return to_train, runner._data.splits.choose(evaluate_splits, runner.evaluate_splits, "evaluate")

    def check_trainable(self) -> None:
        """Refuse an optimizer that does not take the gradient as it is. Called on all ranks."""
        runner = self.runner
        if runner._closers.closed:
            raise ValueError(
                "Expected a runner that is open. Received: train() after close(), or after its `with` block. Construct it anew; "
                "auto_resume goes on from its last checkpoint."
            )
        self.parts.readiness.check_optimizer()
        if isinstance(runner.checkpoint_manager, CheckpointManager):
            runner.checkpoint_manager.check_weights(runner.named_parameters())

    # One training

    @contextmanager
    def training(self, *, whole: bool = True) -> Iterator[None]:
        """Train inside: what is logged meanwhile is of this run, signals are watched, and the end is saved."""
        runner, parts = self.runner, self.parts
        session = runner._session
        if not any(isinstance(each, RunRecorder) for each in runner.observers):
            runner.observers.append(RunRecorder(runner))
        with runner._reporter.speaking(), session.collecting(), session.observed():
            parts.watch.begin(parts.scheduler_interval())
            self.begin_updates()
            runner.model.train()
            session.begin(max_seconds=runner.config.max_time_seconds())
            parts.loop.boundaries = self.boundaries()
            runner.open_trackers()
            runner.init_signal_handlers()
            self.begin_report()
            opened = session.opened(parts.end.of_session(), domain=runner.placement.optimizer, whole=whole)
            telling = runner._reporter.trackers.telling_status(whole=whole)
            with telling, opened:
                yield

    def try_evaluations(self, splits: Sequence[str]) -> None:
        """Evaluate one batch of each split before the first update, unless an evaluation is under way; evaluations of the user's own
        are left out."""
        runner = self.runner
        if self.parts.results.open:
            return
        verb = "evaluate_steps" if runner.is_step_mode else "evaluate_epoch"
        if runner.config.try_evaluation and not (runner._overrides(verb) or runner._overrides("evaluate")):
            self.parts.evaluator.try_once(splits)

    def updates(self, split: str) -> Iterator[UpdateOutcome]:
        """Return the outcomes of the updates of what is left of the pass over `split`, which are made as they are asked for."""
        runner = self.runner
        source = runner._data.begin_pass(split, runner.placement.optimizer)
        runner._bind_reduction()
        self.parts.watch.look()
        self.parts.update.split = split
        observers = runner.observers
        observers.notify("pass_started", split)
        yield from updates_of_pass(
            source,
            agreement=self.parts.agreement,
            timed=lambda batches: runner._reporter.timed(runner._session.waiting(batches)),
            begin=lambda: runner.on_pass_start(split),
            state_replaced=self.takes_state_over if runner.fault_tolerance is not None else None,
            is_over=partial(self.parts.loop.jumps_out_of, split),
            run=partial(self.parts.run_window, source),
            step=lambda: runner._session.update(runner.step),
        )
        if not self.parts.loop.has_jumped:
            observers.notify("pass_ended", split)

    def takes_state_over(self) -> bool:
        """Agree with the other replica groups on the next update; tell whether the state is that of another group now."""
        runner = self.runner
        if runner.fault_tolerance is None or not runner.fault_tolerance.open_update():
            return False
        runner._reporter.forget_samples(runner.state.train.samples)
        return True

    # Within it

    def begin_updates(self) -> None:
        """Look at model, criterion, optimizer and scheduler as they are now. Called on all ranks."""
        runner, update = self.runner, self.parts.update
        runner._bind_reduction()
        if runner.fault_tolerance is not None:
            runner.fault_tolerance.begin_training()
        runner.window.reduces = True
        runner.window.sum_reduced = self.parts.sums_loss
        update.log_every = runner.log_interval
        update.steps_scheduler = runner.scheduler is not None and self.parts.scheduler_interval() == "step"
        update.tells_place = is_told_its_place(runner.scheduler)
        if not runner.model.training:
            runner.model.train()
        enter_training(runner.optimizer)
        runner._attributes.before_training()

    def boundaries(self) -> Boundaries:
        """Return what is due between the updates of one training."""
        runner = self.runner
        every = runner.checkpoint_interval
        return Boundaries(
            log_every=runner.log_interval,
            evaluate_every=runner.config.evaluate_interval or every,
            checkpoint_every=every,
            save=lambda **options: runner.save_checkpoint(**options),
            is_best=self.parts.results.has_best_at,
        )

    def trained_metrics(self) -> dict[str, float]:
        """Return the metrics of what was trained since the last call, over all ranks, and over the replica groups that take part."""
        runner, losses = self.runner, self.parts.losses
        self.parts.update.raise_pending_error()
        self.parts.watch.look()
        metrics = losses.averages()
        # Always, since what this rank has seen says nothing of the others.
        totals = runner.meters.totals(runner.placement.metrics)
        if runner.fault_tolerance is not None:
            totals = runner.fault_tolerance.sum_totals(totals)
        metrics.update({name: total / weight for name, (total, weight) in totals.items() if weight})
        if self.parts.train_metrics is not None:
            metrics.update(self.parts.train_metrics.compute(runner.placement.metrics))
            self.parts.train_metrics.reset()
        losses.reset()
        runner.meters.reset()
        return metrics

    def first_update(self) -> None:
        """Do after the first update of a process what it has shown to be due, everywhere."""
        runner = self.runner
        if runner.compilation is not None:
            runner.compilation.after_first_update(speaks=runner.is_main_process)
        limit = runner.config.comm.train_timeout_seconds
        if limit is not None and runner.distributed:
            runner.world.barrier()
            set_collective_timeout(limit, runner.placement.groups())

    def write_results(self) -> None:
        """Write the metrics of the run, its last ones and its best ones, on the main process."""
        runner = self.runner
        if runner.is_main_process:
            weights = "trained" if runner.ema is None else "averaged"
            latest = {"index": runner.index, "weights": weights, "result": runner.latest_result}
            best_of_split = (runner.best_result or {}).get(runner.score_split or "", {})
            best = {
                "index": runner.best_index,
                "weights": weights,
                "score": runner.best_score,
                **({"samples": best_of_split["samples"]} if "samples" in best_of_split else {}),
                "result": runner.best_result,
            }
            is_here = runner.best_index is None or runner.best_index != runner.saver.best_elsewhere
            runner.workspace.write_results(runner.results, latest, {**best, "checkpoint_is_here": is_here})

    def log_update(self, outcome: UpdateOutcome) -> None:
        """Log the metrics of an update, and how far the streams are. One collective."""
        self.parts.report.log_update(outcome)
        self.parts.watch.look_at_rate()
        if self._stream_lines.due():
            self.write_streams()

    def say_ending(self, ending: str) -> None:
        """Say how the training ended, and how far its streams came; what is wrong with those does not hide how."""
        self.parts.report.say_ending(ending)
        try:
            self.write_streams()
        except Exception:
            logger.exception("How far the streams of this run came could not be read; its end follows.")

    def write_streams(self) -> None:
        """Write how far the streams are that the run trains on, on the main process."""
        streams = self.runner._data.streams() if self.runner.is_main_process else {}
        if streams:
            self.runner.workspace.write_streams(streams)

    def begin_report(self) -> None:
        """Begin to report a training."""
        runner = self.runner
        self._stream_lines = Paced(runner.config.log_seconds)
        self.write_streams()
        self.parts.report.begin(
            name=runner.config.experiment,
            peak_flops=runner.peak_flops(),
            countable=counts_flops(runner.stack) and not runner.config.compile.enable,
            seconds_between_lines=runner.config.log_seconds,
            profiler=runner.build_profiler(),
            description=self.description,
            rank_times=self.watch_ranks(),
        )

    def watch_ranks(self) -> RankTimes | None:
        """Begin to look at what this rank does, where there are others; return what collects their times, if that is asked for."""
        runner, settings = self.runner, self.runner.config.comm
        share = settings.slow_rank_share
        if runner.placement.optimizer.size == 1 or (share is None and settings.hang_warning_seconds is None):
            return None
        # Of a training that did not even begin.
        self._stop_watching()
        watch = self._watch = build_rank_watch(runner, samples=share is not None)
        watch.start()
        return RankTimes(sampled=watch.sampler.take, hosts=watch.hosts, share=share) if share is not None else None

    def _stop_watching(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()

    def description(self) -> list[str]:
        """Return what is going to be trained, in a few lines."""
        runner = self.runner
        train, size = runner.state.train, runner.world_size
        return describe_training(
            step=train.global_step,
            epoch=train.epoch,
            budget=f"step {runner.steps}" if runner.is_step_mode else f"epoch {runner.epochs}",
            processes=f"{size} {runner.device.type} process{'es' if size > 1 else ''}",
            stack=f"{runner.stack}, {runner.config.precision or 'fp32'}",
            parameters=describe_parameters((p.numel(), p.requires_grad) for _, p in runner.named_parameters()),
            batches=describe_batches(
                runner.batch_size, runner.accum_steps, runner._data.plan.division(), distributed=runner.distributed
            ),
            directory=runner.workspace.dir,
        )

    def summary(self) -> list[str]:
        """Return what is said at the end beside the speed: the best score, and what to do next. No communication."""
        runner, board = self.runner, self.runner.standing.board
        unit = "step" if runner.is_step_mode else "epoch"
        best = None
        if runner.best_index is not None and runner.best_score is not None:
            name = runner.config.score_name if board is None else f"{board.split}.{board.name}"
            best = (name, runner.best_score, f"{unit} {runner.best_index}")
        words, listed = command_line_of(runner.config), runner.config.secret_keys or ()
        if words is not None:
            words = tuple(hide_secret_words(words, secret_values(runner.config.plain(), listed), listed))
        return describe_end(
            Launch.of_this_program(words, runner.world_size, type(runner).__name__),
            directory=runner.workspace.dir,
            checkpoints=runner.workspace.checkpoints,
            best=best,
            more=self._more(f"{unit}s"),
            trust=runner.stack == "deepspeed",
        )

    def _more(self, budget: str) -> dict[str, int]:
        """Return larger values of the settings that have ended the run: of its budget, and of the patience that is used up."""
        runner = self.runner
        reason, done = runner._session.stop_reason, runner.steps if runner.is_step_mode else runner.epochs
        more = {}
        if runner.progress >= 1 and done and reason in (None, "patience"):
            more[budget] = 2 * done
        if reason == "patience":
            more["patience"] = self.parts.results.facts.since_best() + max(1, int(runner.config.patience))
        return more

    def profiler(self) -> Profiler | None:
        """Return the profiler of the configuration, `None` when it is off."""
        runner = self.runner
        settings = dict(runner.config.profiling.items())
        if not settings.pop("enabled"):
            return None
        directory = runner.workspace.dir / settings.pop("trace_dir")
        if settings["profile_memory"] and runner.device.type == "cuda":
            # Where blocks were allocated, for the snapshot of a run that is out of memory.
            torch.cuda.memory._record_memory_history(max_entries=100_000)
        return Profiler(directory, rank=runner.rank, **settings)

    def pending_requests(self) -> frozenset[str]:
        """Raise what the last update left to be raised, and return what was asked for in it."""
        self.parts.update.raise_pending_error()
        return self.parts.update.sync.take_pending_requests()

    def export_at_end(self) -> None:
        """Write the weights, and the averaged ones, cast to `checkpoint.export_dtype`, where that is asked for. Called on all ranks."""
        runner, settings = self.runner, self.runner.config.checkpoint
        if settings.last_save_model_only:
            config = runner.config.public()
            runner.saver.export(
                lambda: weights_to_export(
                    config, runner.model_state_dict(), runner.ema, dtype=settings.export_dtype, version=FORMAT_VERSION
                )
            )

    def note_failure(self, error: Exception) -> None:
        """Log what the failed step received, and write down where the memory of a device went that ran out."""
        runner = self.runner
        for note in getattr(error, "__notes__", ()) if runner.is_main_process else ():
            logger.error("%s", note)
        if is_out_of_memory(error):
            directory = runner.workspace.dir / runner.config.profiling.trace_dir
            step = runner.state.train.global_step
            write_memory_snapshot(directory, error, rank=runner.rank, global_step=step, device=runner.device)

    def close_training(self) -> None:
        """Close what was opened for a training."""
        runner = self.runner
        self._stop_watching()
        runner._reporter.end()
        runner._reporter.flush()
        runner._data.free()
        if runner.fault_tolerance is not None:
            # A group that stays and does not train would hold the others up.
            runner.fault_tolerance.leave()

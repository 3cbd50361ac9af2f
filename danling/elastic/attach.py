"""Attaches elastic ranks to a runner: where a change of the ranks is noticed, what it takes back, and how the ranks continue together.

A change is noticed in the collectives of an update, an evaluation or a save, and where an update begins. What was begun is taken back, the
process group is formed again, ranks that are behind or new take the state of one that is furthest, and all of them enter the loops as a run
does that was resumed there.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous
from torch.optim.optimizer import register_optimizer_step_post_hook

from danling.config import RunnerConfig
from danling.data import DataLoader
from danling.data.run_data import RunData
from danling.distributed import LaunchEnvironment, MembershipChanged
from danling.training.extension import Extension
from danling.training.keys import RandomKeys
from danling.training.loop import TrainingLoop
from danling.training.outcome import UpdateOutcome
from danling.training.session import EndOfPass, EvaluationStopped, TrainingSession
from danling.training.update import UpdateStep
from danling.utils.observers import Observer
from danling.workspace.workspace import JoinedRun

from .domain import ElasticDomain
from .handover import Handover
from .main_process import MainProcess
from .member import Member, TrainingComplete, is_lost_collective, is_started_elastic
from .reconfigure import check_supported
from .shards import Shards
from .unchanged import UnchangedUntilStep

if TYPE_CHECKING:
    from danling.runners.base_runner import BaseRunner
    from danling.runners.torch_runner import TorchRunner

__all__ = [
    "ElasticRanks",
    "ElasticTraining",
    "Handover",
    "MainProcess",
    "OpenUpdate",
    "Shards",
    "UnchangedUntilStep",
    "check_config",
    "check_program",
]

logger = logging.getLogger("danling")

_RUN_KEY = "danling/elastic/run"
_STORE_SECONDS = 300.0
_MOST_FRUITLESS = 3
"""Changes in a row in which no rank has ended or come, and no update is made."""


def check_config(config: RunnerConfig, stack: str) -> None:
    """Refuse a configuration with which ranks cannot be left behind."""
    check_supported()
    checkpoint, audit = config.checkpoint, config.audit
    audits = any(
        value is not None
        for value in (audit.digest_interval, audit.replay_interval, audit.gradients.dir)
    )
    wrong = [
        (stack != "ddp", f"stack={stack!r}", "Train on ddp"),
        (
            config.gradient_sum != "canonical",
            f"gradient_sum={config.gradient_sum!r}",
            "Set gradient_sum='canonical'",
        ),
        (config.ft.enabled, "ft.enabled=True", "Use one of them"),
        (config.backend not in (None, "gloo"), f"backend={config.backend!r}", "Unset it"),
        (config.compile.enable, "compile.enable=True", "Unset it"),
        (config.train_metrics, "train_metrics", "Unset it: the sums of a rank end with it"),
        (checkpoint.backend == "dcp", "checkpoint.backend='dcp'", "Unset it"),
        (
            checkpoint.remote.url is not None,
            f"checkpoint.remote.url={checkpoint.remote.url!r}",
            "Unset it",
        ),
        (audits or audit.quick is not None, "a setting of `audit`", "Unset it"),
    ]
    for is_wrong, received, fix in wrong:
        if is_wrong:
            raise ValueError(
                f"Expected settings that allow a rank to end, as elastic.enabled requires. Received: {received}. {fix}, or unset "
                "elastic.enabled."
            )
    if not is_started_elastic():
        raise ValueError(
            "Expected a program that `danling run` has started, since elastic.enabled is set. Received: one without a coordinator. Start "
            "it with `danling run --ranks N -- python train.py`, or unset elastic.enabled."
        )


def check_program(runner: TorchRunner) -> None:
    """Refuse what is not a function of the place in the run."""
    foreign = [
        split for split, loader in runner.dataloaders.items() if not isinstance(loader, DataLoader)
    ]
    if foreign:
        raise ValueError(
            f"Expected loaders that the library builds with elastic.enabled, which it redivides when the ranks change. Received: a "
            f"{type(runner.dataloaders[foreign[0]]).__name__} for split {foreign[0]!r}. Put a map-style dataset into self.datasets."
        )
    for split in runner.train_splits:
        division = runner.dataloaders[split].division
        if division is None or not division.is_update:
            raise ValueError(
                "Expected updates of one size at any number of ranks with elastic.enabled. Received: dataloader.batch_size, of which "
                f"each rank takes its own, for split {split!r}. Set dataloader.global_batch_size and dataloader.micro_batch_size."
            )
    norms = [
        name
        for name, module in runner.unwrapped_model.named_modules()
        if isinstance(module, torch.nn.modules.batchnorm._NormBase) and module.track_running_stats
    ]
    if norms:
        raise ValueError(
            f"Expected no running statistics with elastic.enabled, which each rank has its own of. Received: {norms[0]!r}. Take "
            "nn.GroupNorm or nn.LayerNorm, or set track_running_stats=False."
        )


class ElasticRanks:
    """This process among the ranks of its run.

    Attributes:
        joins: Whether it has come after the run began.
        joined_run: The run that it joins; `None` for the first ranks.
        member: What agrees with the other ranks who takes part.
        domain: All ranks that there are now.
    """

    _is_made: ClassVar[bool] = False

    def __init__(self, runner: BaseRunner, closers: ExitStack) -> None:
        if ElasticRanks._is_made:
            raise ValueError(
                "Expected one runner for each start of `danling run` with elastic.enabled, at the end of whose training the ranks part. "
                "Received: a second one. Start a program of its own for it, or unset elastic.enabled."
            )
        ElasticRanks._is_made = True
        self._runner = runner
        limit = runner.config.comm.init_timeout_seconds
        timeout = default_pg_timeout if limit is None else timedelta(seconds=limit)
        self.member = Member(self._open_store, timeout=timeout)
        closers.callback(self._close)
        self.joins = self.member.joins
        self.joined_run: JoinedRun | None = None
        self.domain: ElasticDomain
        if self.joins:
            self.joined_run = JoinedRun(**json.loads(self._store.get(_RUN_KEY)))
            # Alone, but never the main process: it writes nothing.
            self.place(rank=self.member.number, size=1)
        else:
            now = self.member.form(0, lambda: "", lambda _: None)
            self.place(now.rank, now.size)

    def _open_store(self) -> Any:
        launch = LaunchEnvironment.read()
        store, _, _ = next(iter(rendezvous("env://", launch.rank, launch.world_size)))
        store.set_timeout(timedelta(seconds=_STORE_SECONDS))
        self._store = store
        return store

    def _close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def place(self, rank: int, size: int) -> None:
        """Put this process at a rank; the one place where the runner learns of it."""
        runner = self._runner
        if "world" not in vars(runner):
            self.domain = vars(runner)["world"] = ElasticDomain(rank=rank, size=size)
        self.domain.rank, self.domain.size, self.domain.is_over = rank, size, False
        # Past `__setattr__`, which guards the names of the library while `__init__` of the program runs.
        vars(runner)["launch"] = replace(LaunchEnvironment.read(), rank=rank, world_size=size)

    def publish_run(self) -> None:
        """Tell ranks that join later where the run is. Called on the main process."""
        runner = self._runner
        run = JoinedRun(
            runner.id,
            str(runner.workspace.dir),
            runner.code_id,
            runner.config_id,
            runner.timestamp,
            runner.seed,
        )
        self._store.set(_RUN_KEY, json.dumps(asdict(run)))


class OpenUpdate:
    """The update that is under way on this rank, which is taken back if another rank ends in it."""

    def __init__(
        self,
        runner: TorchRunner,
        session: TrainingSession,
        keys: RandomKeys,
        update: UpdateStep,
        *,
        loop: TrainingLoop,
        unchanged: UnchangedUntilStep,
        closers: ExitStack,
    ) -> None:
        self.unchanged = unchanged
        """What it must leave as it is until the step."""
        self._runner = runner
        self._session = session
        self._keys = keys
        self._update = update
        self._loop = loop
        self._take_back: Callable[[], None] | None = None
        """What takes the open update back; `None` between two updates."""
        self._remembered_at = -1
        """Updates that were attempted where it began."""
        self._has_stepped = False
        """Whether the optimizer has stepped in it."""
        closers.callback(register_optimizer_step_post_hook(self._note_step).remove)

    def begin(self) -> None:
        """Remember where an update begins. No communication."""
        self._has_stepped = False
        self._take_back = self._update.recompute.remember(reads_again=True)
        self.unchanged.note()
        self._remembered_at = self._runner.state.train.attempted

    def _note_step(self, *_: object) -> None:
        # Any optimizer of the process is heard here; only those of the update count.
        self._has_stepped = self._has_stepped or self._keys.in_update

    def end(self, *, committed: bool) -> None:
        """End the update, which is made or skipped."""
        self._take_back = None
        self._loop.is_at_boundary = committed

    def take_back(self, *, is_torn: bool) -> bool:
        """Take back an update that was begun and not made; return whether there was one.

        Args:
            is_torn: Whether the library has written some weights of the update: the state of another rank is taken over.
        """
        self._update.drop_open()
        take_back, self._take_back = self._take_back, None
        if self._session.concluded is not None:
            raise RuntimeError(
                "Expected no evaluation and no other collective in step() after super().step(), with elastic.enabled. Received: one that "
                f"failed, since a rank has ended: what follows it in step() after update {self._runner.state.train.global_step} cannot be "
                "made again. Call it in `update_ended` of an observer, or let evaluate_interval decide."
            )
        if take_back is None:
            return False
        if self._remembered_at != self._runner.state.train.attempted:
            # It was made: what follows it is due.
            self._loop.is_at_boundary = True
            return False
        if self._has_stepped:
            raise RuntimeError(
                "Expected no collective in optimizer_step() after the step of the optimizer, with elastic.enabled. Received: one that "
                f"failed, since a rank has ended: the step of update {self._runner.state.train.global_step + 1} cannot be taken back. "
                "Call it before super().optimizer_step(), or in update_ended() of an observer."
            )
        if not is_torn:
            self.unchanged.check(is_made_again=True)
        take_back()
        return True


class ElasticTraining(Observer, Extension):
    """Notices that ranks have ended or wait to be taken in, and lets the others continue.

    Attributes:
        repeated: Updates that were made again.
        changes: Changes of the ranks.
        shards: The shards of the optimizer's state that this rank has; `None` unless `elastic.shard_state`.
    """

    critical = True
    drives = True

    def __init__(
        self,
        runner: TorchRunner,
        ranks: ElasticRanks,
        session: TrainingSession,
        data: RunData,
        *,
        update: OpenUpdate,
        handover: Handover,
        main: MainProcess,
        shards: Shards | None,
    ) -> None:
        self.repeated = 0
        self.changes = 0
        self.shards = shards
        self._runner = runner
        self._ranks = ranks
        self._member = ranks.member
        self._domain = ranks.domain
        self._session = session
        self._data = data
        self._update = update
        self._handover = handover
        self._main = main
        self._has_finished = False
        self._has_changed = False
        """Whether the other ranks wait to hear that an update was made after a change."""
        self._is_untold = False
        """Whether the program was not told of the last change."""
        self._told = 0 if ranks.joins else ranks.domain.size
        """Number of ranks that the program was told last."""
        self._asked_in = -1
        """The generation of ranks in which this one has asked the others to take in those that wait."""
        self._fruitless = 0
        """Changes since the last update in which no rank has ended or come: the same on all ranks but new ones."""
        self._failed = False
        """Whether an error of the program on this rank has begun the last of them."""
        if runner.is_main_process:
            ranks.publish_run()
            self._say_what_is_off()

    def _say_what_is_off(self) -> None:
        """Name what other runs of several ranks do in collectives between two updates."""
        watched = self._runner.config.comm
        if watched.slow_rank_share is not None or watched.hang_warning_seconds is not None:
            logger.info(
                "With elastic.enabled, ranks are not timed (comm.slow_rank_share), hangs are not reported (comm.hang_warning_seconds), and "
                "data_share and memory are those of the main process."
            )

    def check_training(self, *, whole: bool) -> None:
        """Refuse a training in which the ranks cannot change. Called on all ranks.

        Args:
            whole: Whether it is one of `train()`.
        """
        if not whole:
            raise ValueError(
                "Expected train() with elastic.enabled, which begins again where the ranks change. Received: a call of train_epoch() by "
                "itself. Call train(), or unset elastic.enabled."
            )
        if self._has_finished:
            raise ValueError(
                "Expected one training for each start of `danling run` with elastic.enabled, at whose end the ranks part. Received: a "
                "second call of train(). Start a program of its own for it, which continues with auto_resume, or unset elastic.enabled."
            )

    def train(self, train: Callable[[], None], then: Callable[[], None] | None = None) -> None:
        """Train, and begin again from the state as it is whenever the ranks change; then do what follows the training."""
        settings = self._runner.config.elastic
        self._member.say_trains(
            least=settings.min_ranks,
            wait_seconds=settings.wait_seconds,
            fence_seconds=settings.fence_seconds,
            replacements=settings.replacements,
        )
        self._domain.may_change = True
        try:
            self._train(train, then)
        finally:
            self._domain.may_change = False
        if then is not None:
            self._finish()

    def _train(self, train: Callable[[], None], then: Callable[[], None] | None) -> None:
        call = then or train
        if not self._handover.has_state:
            self._enter()
            call = train
        while True:
            failure = ""
            try:
                self._tell_change()
                self._redo_save()
                with suppress(EndOfPass, EvaluationStopped) if then is not None else nullcontext():
                    call()
                if call is train and then is not None:
                    then()
                if self.shards is not None and then is not None:
                    # A rank that has not got all weights of the last update needs the others for it.
                    self._domain.barrier()
                break
            except MembershipChanged:
                pass
            except SystemExit:
                # Saved, and stopped by a signal; else the program of this rank ends by itself, and the others continue.
                if self._session.stop_reason is not None:
                    self._finish()
                raise
            except RuntimeError as error:
                if not is_lost_collective(error):
                    raise
                if self._failed:
                    # It has come again, and no rank was lost.
                    error.add_note(
                        "It has come twice in one update, though no other rank had ended. Process groups that the program makes are "
                        "not formed again with elastic.enabled."
                    )
                    raise
                failure = str(error).partition("\n")[0] or type(error).__name__
            # Outside of `except`: see `ElasticDomain.guarded`.
            try:
                self._change(failure)
            except TrainingComplete:
                logger.info("The other ranks have finished the training.")
                break
            call = train

    def _finish(self) -> None:
        """Leave the others at the end of the training."""
        self._has_finished = True
        self._member.say_finished()

    def _enter(self) -> None:
        """Wait until the other ranks take this one in, which has no state of the run yet."""
        try:
            self._change()
            return
        except TrainingComplete:
            pass
        # What the program does after the training needs what was trained.
        self._finish()
        raise SystemExit(0)

    def update_started(self) -> None:
        self._member.check()
        if self.shards is not None:
            self._domain.check()
            self.shards.begin_update()
        if self._session.regroup_requested:
            self._session.regroup_requested = False
            raise MembershipChanged
        membership = self._member.membership
        if (
            self._member.should_regroup
            and membership is not None
            and self._asked_in != membership.generation
        ):
            self._asked_in = membership.generation
            self._session.request("regroup")
        self._update.begin()

    def micro_batch_started(self, data: object, *, read: object, samples: float) -> None:
        self._member.check()

    def gradients_ready(self, totals: object, norm: object) -> None:
        self._update.unchanged.check(is_made_again=False)

    def evaluation_started(self, split: str) -> None:
        self._update.unchanged.note_evaluation()

    def update_ended(self, outcome: UpdateOutcome) -> None:
        self._fruitless, self._failed = 0, False
        self._update.end(committed=outcome.committed)
        if self._has_changed:
            self._has_changed = False
            self._member.say_committed()

    # A change

    def _change(self, failure: str = "") -> None:
        """Form the ranks again, and make the runner one of them.

        Args:
            failure: The error that has begun it, if that was none of the library's own collectives.
        """
        began, runner, handover = time.monotonic(), self._runner, self._handover
        before = self._member.membership
        was_main = handover.has_state and runner.is_main_process
        is_torn = self.shards is not None and self.shards.is_torn
        repeats = self._update.take_back(is_torn=is_torn)
        now = self._member.form(handover.progress(), handover.digest, handover.exchange)
        self._ranks.place(now.rank, now.size)
        if handover.take_over():
            repeats = False  # another rank has made the update
        self.repeated += repeats
        self.changes += 1
        self._data.redivide()
        if runner.is_main_process and not was_main:
            self._main.take_over()
        elif runner.is_main_process:
            self._main.write_missing()
        if now.fewer:
            logger.warning(
                "%d ranks are left, and elastic.min_ranks is %d: the run is saved and ends.",
                now.size,
                runner.config.elastic.min_ranks,
            )
            self._session.stop_reason = "terminate"
        self._has_changed = self._is_untold = True
        is_same = before is not None and before.members == now.members
        if runner.is_main_process:
            self._main.log_change(
                now, is_same=is_same, repeats=repeats, seconds=time.monotonic() - began
            )
        self._note_fruitless(failure, is_same=is_same)

    def _note_fruitless(self, failure: str, *, is_same: bool) -> None:
        """End a run that forms its ranks again and again though none ends: it would never make another update."""
        self._fruitless = self._fruitless + 1 if is_same else 0
        self._failed = bool(failure) and is_same
        if self._failed:
            logger.warning(
                "No rank has ended, but this one has met an error as of a lost connection: %s. The update is made again; if the error "
                "comes again, it ends this rank.",
                failure,
            )
        if self._fruitless > _MOST_FRUITLESS:
            raise RuntimeError(
                f"Expected an update where the ranks were formed again. Received: none in {self._fruitless} times, though no rank has "
                f"ended: collectives fail again after update {self._runner.state.train.global_step}. If a rank takes longer than "
                "comm.train_timeout_seconds (comm.init_timeout_seconds before the first update), raise it; else look at the network."
            )

    def _tell_change(self) -> None:
        """Tell the program of the ranks that there are now, where the loops may be left again if they change meanwhile."""
        before, now = self._told, self._domain.size
        if self._is_untold:
            self._is_untold, self._told = False, now
            self._runner.membership_changed(before, now)
            self._session.observers.notify("membership_changed", before, now)

    def _redo_save(self) -> None:
        """Make a save again in which the ranks changed. Called on all ranks."""
        saver = self._runner.saver
        if saver.open is not None:
            history, best = saver.open
            saver.save(history=history, best=best)
            saver.open = None

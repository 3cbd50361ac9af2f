"""Attaches elastic ranks to a runner: where a change of the ranks is noticed, what it takes back, and how the ranks go on together.

A change is noticed in the collectives of an update, an evaluation or a save, and where an update begins. What was begun is taken back, the
process group is formed again, ranks that are behind or new take the state of one that is furthest, and all of them enter the loops as a run
does that was resumed there.
"""

from __future__ import annotations

import io
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous
from torch.optim.optimizer import register_optimizer_step_post_hook

from danling.checkpoints.directory import newest_record
from danling.config import RunnerConfig
from danling.data import DataLoader
from danling.distributed import Domain, LaunchEnvironment, MembershipChanged, set_collective_timeout
from danling.training.checks import FirstGradients
from danling.training.extension import Extension
from danling.training.session import EndOfPass, EvaluationStopped
from danling.utils.observers import Observer

from .coordinator import describe_death
from .member import Member, Membership, TrainingComplete, is_lost_collective, is_started_elastic
from .metrics_file import missing_records, without_later
from .reconfigure import check_supported
from .shards import Shards

if TYPE_CHECKING:
    from danling.runners.base_runner import BaseRunner
    from danling.runners.torch_runner import TorchRunner
    from danling.training.update import UpdateOutcome

logger = logging.getLogger("danling")

T = TypeVar("T")

_RUN_KEY = "danling/elastic/run"
_RECENT_RECORDS = 16
_STORE_SECONDS = 300.0
_MOST_OPEN = 1024
"""More splits than have results between two evaluations."""


def check_config(config: RunnerConfig, stack: str) -> None:
    """Refuse a configuration with which ranks cannot be left behind."""
    check_supported()
    checkpoint, audit = config.checkpoint, config.audit
    audits = any(value is not None for value in (audit.digest_interval, audit.replay_interval, audit.gradients.dir))
    wrong = [
        (stack not in ("ddp", "base"), f"stack={stack!r}", "Train on ddp"),
        (config.gradient_sum != "canonical", f"gradient_sum={config.gradient_sum!r}", "Set gradient_sum='canonical'"),
        (config.ft.enabled, "ft.enabled=True", "Use one of them"),
        (config.backend not in (None, "gloo"), f"backend={config.backend!r}", "Unset it"),
        (config.compile.enable, "compile.enable=True", "Unset it"),
        (config.train_metrics, "train_metrics", "Unset it: the sums of a rank end with it"),
        (checkpoint.backend == "dcp", "checkpoint.backend='dcp'", "Unset it"),
        (checkpoint.remote.url is not None, f"checkpoint.remote.url={checkpoint.remote.url!r}", "Unset it"),
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


@dataclass(frozen=True)
class JoinedRun:
    """Where the run is that a rank joins."""

    id: str
    dir: str
    code_id: str | None
    config_id: str
    timestamp: str
    seed: int

    @property
    def names(self) -> tuple[str | None, str, str]:
        """The ids of code and configuration, and the time of the attempt."""
        return self.code_id, self.config_id, self.timestamp


class ElasticDomain(Domain):
    """All ranks of the run, of which any may end: a collective that fails so raises `MembershipChanged`."""

    is_over = False
    """Whether the ranks must be formed again before they communicate."""

    def __init__(self, *, rank: int, size: int) -> None:
        self.group, self.device = None, torch.device("cpu")
        self.rank, self.size = rank, size
        self.may_change = False
        """Whether ranks can be left behind. Before and after the training, the error of a collective is that of this rank."""

    def check(self) -> None:
        """Raise `MembershipChanged` if the ranks must be formed again first."""
        if self.is_over:
            raise MembershipChanged

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        return self.guarded(lambda: super(ElasticDomain, self).all_reduce(tensor, op))

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        return self.guarded(lambda: super(ElasticDomain, self).broadcast(tensor, source))

    def gather_objects(self, value: T) -> list[T]:
        return self.guarded(lambda: super(ElasticDomain, self).gather_objects(value))

    def broadcast_object(self, value: T, source: int = 0) -> T:
        return self.guarded(lambda: super(ElasticDomain, self).broadcast_object(value, source))

    def barrier(self) -> None:
        self.guarded(super().barrier)

    def guarded(self, collective: Callable[[], T]) -> T:
        """Make a collective; raise `MembershipChanged` if a rank is gone, or if the ranks must be formed again first."""
        self.check()
        try:
            return collective()
        except RuntimeError as error:
            if not (self.may_change and is_lost_collective(error)):
                raise
        # Outside of `except`: an exception in the context of another one keeps its frames, and they keep the sockets open.
        raise MembershipChanged


class ElasticRanks(Observer, Extension):
    """This rank among the others of its run.

    Attributes:
        joins: Whether it has come after the run began.
        joined_run: The run that it joins; `None` for the first ranks.
    """

    critical = True
    drives = True

    _is_made: ClassVar[bool] = False

    def __init__(self, runner: BaseRunner) -> None:
        if ElasticRanks._is_made:
            raise ValueError(
                "Expected one runner for each start of `danling run` with elastic.enabled, at the end of whose training the ranks part. "
                "Received: a second one. Start a program of its own for it, or unset elastic.enabled."
            )
        ElasticRanks._is_made = True
        self._runner: Any = runner
        limit = runner.config.comm.init_timeout_seconds
        self._timeout = default_pg_timeout if limit is None else timedelta(seconds=limit)
        self._member = Member(self._open_store, timeout=self._timeout)
        runner._parts.closers.callback(self._close)
        self.joins = self._member.joins
        self._has_state = not self.joins
        self._take_back: Callable[[], None] | None = None
        self._remembered_at = -1
        self._has_changed = self._has_finished = self._is_untold = False
        self._has_stepped = False
        """Whether the optimizer has stepped in the open update."""
        self._told = 0
        self._asked_in = -1
        self.repeated = 0
        self.changes = 0
        self.joined_run: JoinedRun | None = None
        self._shards: Shards | None = None
        self._domain: ElasticDomain
        if self.joins:
            self.joined_run = JoinedRun(**json.loads(self._store.get(_RUN_KEY)))
            # Alone, but never the main process: it writes nothing.
            self._place(rank=self._member.number, size=1)
        else:
            now = self._member.form(0, lambda: "", lambda _: None)
            self._place(now.rank, now.size)

    def _open_store(self) -> Any:
        launch = LaunchEnvironment.read()
        store, _, _ = next(iter(rendezvous("env://", launch.rank, launch.world_size)))
        store.set_timeout(timedelta(seconds=_STORE_SECONDS))
        self._store = store
        return store

    def _close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _place(self, rank: int, size: int) -> None:
        """Put this process at a rank; the one place where the runner learns of it."""
        runner = self._runner
        if "world" not in vars(runner):
            self._domain = vars(runner)["world"] = ElasticDomain(rank=rank, size=size)
        self._domain.rank, self._domain.size, self._domain.is_over = rank, size, False
        vars(runner)["launch"] = replace(LaunchEnvironment.read(), rank=rank, world_size=size)

    # Construction

    def begin(self) -> None:
        """Begin to follow the run, at the end of construction. Called on all ranks."""
        runner = self._runner
        self._check_program()
        if runner.config.elastic.shard_state:
            self._shards = Shards(runner, self._member, self._domain)
        runner._parts.reporter.telemetry.adds_ranks = False
        runner._parts.reporter.trackers.recent = deque(maxlen=_RECENT_RECORDS)
        # Before the others, so that they do not hear of an update that is not made.
        runner.observers.insert(0, self)
        runner._parts.extensions.append(self)
        runner._parts.closers.callback(register_optimizer_step_post_hook(self._note_step).remove)
        if runner.is_main_process:
            place = JoinedRun(
                runner.id, str(runner.workspace.dir), runner.code_id, runner.config_id, runner.timestamp, runner.seed
            )
            self._store.set(_RUN_KEY, json.dumps(asdict(place)))
            self._say_what_is_off()
        if self.joins:
            runner._parts.evaluator._has_tried = True
        else:
            self._told = self._domain.size

    def _say_what_is_off(self) -> None:
        """Name what other runs of several ranks do in collectives between two updates."""
        watched = self._runner.config.comm
        if watched.slow_rank_share is not None or watched.hang_warning_seconds is not None:
            logger.info(
                "With elastic.enabled, ranks are not timed (comm.slow_rank_share), hangs are not reported (comm.hang_warning_seconds), and "
                "data_share and memory are those of the main process."
            )

    def _check_program(self) -> None:
        """Refuse what is not a function of the place in the run."""
        runner: TorchRunner = self._runner
        foreign = [split for split, loader in runner.dataloaders.items() if not isinstance(loader, DataLoader)]
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

    # Training

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
        if not self._has_state:
            self._enter()
            call = train
        while True:
            try:
                self._tell_change()
                self._redo_save()
                with suppress(EndOfPass, EvaluationStopped) if then is not None else nullcontext():
                    call()
                if call is train and then is not None:
                    then()
                if self._shards is not None and then is not None:
                    # A rank that has not got all weights of the last update needs the others for it.
                    self._domain.barrier()
                break
            except MembershipChanged:
                pass
            except SystemExit:
                # Saved, and stopped by a signal; else the program of this rank ends by itself, and the others continue.
                if self._runner._parts.session.stop_reason is not None:
                    self._finish()
                raise
            except RuntimeError as error:
                if not is_lost_collective(error):
                    raise
            # Outside of `except`: see `ElasticDomain.guarded`.
            try:
                self._change()
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
        if self._shards is not None:
            self._domain.check()
            self._shards.begin_update()
        session = self._runner._parts.session
        if session.regroup_requested:
            session.regroup_requested = False
            raise MembershipChanged
        membership = self._member.membership
        if self._member.should_regroup and membership is not None and self._asked_in != membership.generation:
            self._asked_in = membership.generation
            session.request("regroup")
        self._has_stepped = False
        self._take_back = self._runner._parts.recompute.remember()
        self._remembered_at = self._runner.state.train.attempted

    def _note_step(self, *_: object) -> None:
        self._has_stepped = self._has_stepped or self._runner._parts.keys.in_update

    def micro_batch_started(self, data: object, *, read: object, samples: float) -> None:
        self._member.check()

    def update_ended(self, outcome: UpdateOutcome) -> None:
        self._take_back = None
        self._runner._parts.loop.is_at_boundary = outcome.committed
        if self._has_changed:
            self._has_changed = False
            self._member.say_committed()

    # A change

    def _change(self) -> None:
        """Form the ranks again, and make the runner one of them."""
        began, runner = time.monotonic(), self._runner
        had_main = self._has_state and runner.is_main_process
        self._drop_open()
        repeats = self._put_back()
        taken: dict[str, Any] = {}

        def take(now: Membership) -> None:
            taken.clear()
            taken.update(self._exchange(now))

        now = self._member.form(self._progress() if self._has_state else None, self._digest, take)
        self._place(now.rank, now.size)
        if "state" in taken:
            with nullcontext() if self._shards is None else self._shards.kept():
                self._take_over(taken["state"])
            self._has_state = True
            repeats = False  # another rank has made the update
        if self._shards is not None:
            self._shards.settle()
        self.repeated += repeats
        self.changes += 1
        self._settle(taken["flags"])
        self._rebuild_loaders()
        if runner.is_main_process and not had_main:
            self._become_main()
        elif runner.is_main_process:
            self._write_missing()
        if now.fewer:
            logger.warning(
                "%d ranks are left, and elastic.min_ranks is %d: the run is saved and ends.",
                now.size,
                runner.config.elastic.min_ranks,
            )
            runner._parts.session.stop_reason = "terminate"
        self._has_changed = self._is_untold = True
        self._log_change(now, repeats=repeats, seconds=time.monotonic() - began)

    def _tell_change(self) -> None:
        """Tell the program of the ranks that there are now, where the loops may be left again if they change meanwhile."""
        before, now = self._told, self._domain.size
        if self._is_untold:
            self._is_untold, self._told = False, now
            self._runner.membership_changed(before, now)
            self._runner._parts.session.observers.notify("membership_changed", before, now)

    def _drop_open(self) -> None:
        """Forget what is under way between ranks."""
        parts, session = self._runner._parts, self._runner._parts.session
        parts.update.sync._in_flight = None
        parts.update.move_source = None
        if parts.update.norms is not None:
            norms = parts.update.norms
            norms._noted = norms._sent = norms._landed = None
        parts.canonical.drop()
        session.in_step = session.in_update = False

    def _put_back(self) -> bool:
        """Take back an update that was begun and not made; return whether there was one."""
        take_back, self._take_back = self._take_back, None
        if take_back is None:
            return False
        if self._remembered_at != self._runner.state.train.attempted:
            # It was made: what follows it is due.
            self._runner._parts.loop.is_at_boundary = True
            return False
        if self._has_stepped:
            raise RuntimeError(
                "Expected no collective in optimizer_step() after the step of the optimizer, with elastic.enabled. Received: one that "
                f"failed, since a rank has ended: the step of update {self._runner.state.train.global_step + 1} cannot be taken back. "
                "Call it before super().optimizer_step(), or in update_ended() of an observer."
            )
        take_back()
        return True

    def _progress(self) -> int:
        """Return a number that grows with everything that is committed, and is the same on ranks with the same state."""
        runner = self._runner
        train = runner.state.train
        closed: int = train.attempted + train.epoch + len(runner.results)
        return closed * _MOST_OPEN + min(len(runner._parts.results.open), _MOST_OPEN - 1)

    def _digest(self) -> str:
        """Return what tells the weights of one state from those of another."""
        if self._shards is not None and self._shards.is_torn:
            return "torn"
        total = 0
        for index, (_, parameter) in enumerate(self._runner.named_parameters()):
            values = parameter.detach().reshape(-1).contiguous().view(torch.uint8)
            total = (total * 31 + int(values.sum(dtype=torch.int64)) + index) % (1 << 62)
        return f"{total:x}"

    def _exchange(self, now: Membership) -> dict[str, Any]:
        """Send the state of the leader to the ranks that are behind, and what all do next. Raises where a rank ends meanwhile."""
        if self._shards is not None:
            self._shards.exchange(now)
        found: dict[str, Any] = {}
        saver = self._runner.saver
        has_save = self._has_state and saver.open is not None
        history, best = saver.open or (False, False)
        flags = torch.tensor([has_save, history, best, self._runner._parts.loop.is_at_boundary], dtype=torch.float64)
        if now.size > 1:
            dist.all_reduce(flags, dist.ReduceOp.MAX)
        found["flags"] = [bool(value) for value in flags.tolist()]
        if not now.behind:
            return found
        sent = self._sent_state() if now.rank == now.leader else b""
        size = torch.tensor([len(sent)])
        dist.broadcast(size, now.leader)
        received = torch.empty(int(size), dtype=torch.uint8)
        if sent:
            received = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
        dist.broadcast(received, now.leader)
        if now.rank in now.behind:
            # Put in only when it is complete, and all have it.
            found["state"] = received.numpy().tobytes()
        return found

    def _sent_state(self) -> bytes:
        runner = self._runner
        session, trackers = runner._parts.session, runner._parts.reporter.trackers
        own = {} if self._shards is None else {"optimizer": self._shards.groups()}
        with runner.run_state.saved_elsewhere(*own):
            state = runner._parts.live_state.read()
        payload = {
            **state,
            # The parts of other ranks are sent by `Shards.exchange`.
            **own,
            "elastic": {
                "stop_reason": session.stop_reason,
                "save_requested": session.save_requested,
                "saved_at": runner.saver.saved_at,
                "scored_at": runner._parts.results.scored_at,
                "begun_pass": runner._parts.loop.begun_pass,
                "last_split": runner._parts.loop._last_split,
                "recent": [list(record) for record in trackers.recent or ()],
            },
        }
        stream = io.BytesIO()
        torch.save(payload, stream)
        return stream.getvalue()

    def _take_over(self, sent: bytes) -> None:
        """Take over the whole state of another rank."""
        runner = self._runner
        state: Mapping[str, Any] = torch.load(io.BytesIO(sent), weights_only=True)
        runner._parts.live_state.load(state)
        session, more = runner._parts.session, state["elastic"]
        session.stop_reason, session.save_requested = more["stop_reason"], more["save_requested"]
        saved_at, begun = more["saved_at"], more["begun_pass"]
        runner.saver.saved_at = None if saved_at is None else tuple(saved_at)
        runner._parts.results.scored_at = more["scored_at"]
        runner._parts.loop.begun_pass = None if begun is None else tuple(begun)
        runner._parts.loop._last_split = more["last_split"]
        trackers = runner._parts.reporter.trackers
        trackers.recent = deque(((dict(values), step) for values, step in more["recent"]), maxlen=_RECENT_RECORDS)
        runner._parts.reporter.forget_samples(runner.state.train.samples)

    def _settle(self, flags: list[bool]) -> None:
        """Bring what each process does once, with the others, to where the run is."""
        runner = self._runner
        session, parts, made = runner._parts.session, runner._parts, runner.state.train.global_step > 0
        session.regroup_requested = False
        has_save, history, best, runner._parts.loop.is_at_boundary = flags
        runner.saver.open = (history, best) if has_save else None
        if has_save:
            session.save_requested = False
        session._requested.discard("regroup")
        runner._parts.keys.between_updates()
        runner.meters.reset()
        session.updated_once = made
        parts.update.sync._in_flight = None
        if made:
            runner.window.is_first = False
            for observer in [each for each in runner.observers if isinstance(each, FirstGradients)]:
                runner.observers.remove(observer)
            limit = runner.config.comm.train_timeout_seconds
            if limit is not None:
                set_collective_timeout(limit)
        runner.state.elastic.world_size = self._domain.size
        runner.state.elastic.data_replicas = self._domain.size

    def _rebuild_loaders(self) -> None:
        """Divide the loaders over the ranks that there are now."""
        runner = self._runner
        data = runner._parts.data
        trained = data.trained_sources()
        states = {split: source.state_dict() for split, source in trained.items()}
        passes = {split: source.epoch for split, source in data.sources.items()}
        for split, source in list(data.sources.items()):
            source.close()
            del data.sources[split]
            runner.dataloaders.pop(split, None)
        runner.build_dataloaders()
        for split in list(runner.dataloaders):
            # The noise of an evaluation follows from it, too.
            data.of(split).set_epoch(passes.get(split, 0))
        for split, state in states.items():
            data.restore(split, state)

    def _redo_save(self) -> None:
        """Make a save again in which the ranks changed. Called on all ranks."""
        saver = self._runner.saver
        if saver.open is not None:
            history, best = saver.open
            saver.save(history=history, best=best)
            saver.open = None

    # The main process

    def _become_main(self) -> None:
        """Do from here on what the main process does, in the place of one that has ended."""
        runner = self._runner
        runner._parts.run_location.inherit(runner.workspace)
        runner._parts.reporter.become_main(runner.workspace.log_file if runner.config.log else None)
        manager = runner.checkpoint_manager
        if not runner.config.checkpoint.load_only:
            manager.checkpoints.tidy()
            record = newest_record(manager.checkpoints.path)
            if record is not None:
                manager.checkpoints.continue_from(record)
            # What it had left to write is lost.
            if runner.saver.saved_at is not None and runner.saver.open is None:
                runner.saver.saved_at = None
        without_later(runner.workspace.jsonl_file, runner.state.train.global_step, self._recent())
        trackers = runner._parts.reporter.trackers
        trackers.resume_as_main()
        self._write_missing()
        runner._parts.results.write()

    def _recent(self) -> list[tuple[dict[str, float], int]]:
        return list(self._runner._parts.reporter.trackers.recent or ())

    def _write_missing(self) -> None:
        """Write the lines of metrics that another main process, or this one before it took over a state, has not written."""
        runner = self._runner
        trackers = runner._parts.reporter.trackers
        recent, trackers.recent = self._recent(), None
        for values, step in missing_records(runner.workspace.jsonl_file, recent):
            trackers.log(values, step)
        trackers.recent = deque(recent, maxlen=_RECENT_RECORDS)

    # What is said

    def _log_change(self, now: Membership, *, repeats: bool, seconds: float) -> None:
        runner = self._runner
        step = runner.state.train.global_step
        if not runner.is_main_process:
            return
        lost = [describe_death(each) for each in now.lost]
        what = "; ".join(lost) if lost else "A rank joins"
        again = f"; update {step + 1} is made again" if repeats else ""
        logger.warning(
            "%s: %s after update %d, %.2f s later%s. Nothing was read from a checkpoint.",
            what,
            "1 rank continues" if now.size == 1 else f"{now.size} ranks continue",
            step,
            seconds,
            again,
        )
        figures = {"elastic/ranks": float(now.size), "elastic/gap_seconds": seconds, "elastic/repeated": float(repeats)}
        recent, runner._parts.reporter.trackers.recent = runner._parts.reporter.trackers.recent, None
        runner._parts.reporter.trackers.log(figures, step)
        runner._parts.reporter.trackers.recent = recent

"""The state that a rank hands over to those that are behind or new, so that all continue where one is furthest."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from danling.distributed import set_collective_timeout
from danling.reporting import Reporter
from danling.training.first_gradients import FirstGradients
from danling.training.keys import RandomKeys
from danling.training.live_state import LiveState
from danling.training.loop import TrainingLoop
from danling.training.results import RunResults
from danling.training.session import TrainingSession

from .member import Membership
from .metrics_file import recent_records
from .shards import Shards

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner

logger = logging.getLogger("danling")

_MOST_OPEN = 1024
"""More splits than have results between two evaluations."""


class Handover:
    """Sends the state of the rank that is furthest while the ranks form, and takes it over when they have formed.

    Attributes:
        has_state: Whether this rank has a state of the run. One that joins has none before the first change.
    """

    def __init__(
        self,
        runner: TorchRunner,
        session: TrainingSession,
        keys: RandomKeys,
        live_state: LiveState,
        *,
        loop: TrainingLoop,
        results: RunResults,
        reporter: Reporter,
        shards: Shards | None,
        has_state: bool,
    ) -> None:
        self.has_state = has_state
        self._runner = runner
        self._session = session
        self._keys = keys
        self._live_state = live_state
        self._loop = loop
        self._results = results
        self._reporter = reporter
        self._shards = shards
        self._received: bytes | None = None
        """The state of another rank, which is complete and not taken over yet."""
        self._open_save: tuple[bool, bool] | None = None
        """The save that a rank has begun and not ended: whether it has a history name, and whether it is the best."""
        self._is_at_boundary = False
        self._loses_means = False
        """Whether a rank has ended, or takes over a state: what it had added to the means since they were logged is lost."""

    # While the ranks form

    def progress(self) -> int | None:
        """Return a number that grows with everything that is committed, and is the same on ranks with the same state."""
        if not self.has_state:
            return None
        train = self._runner.state.train
        closed = train.attempted + train.epoch + len(self._runner.results) + self._loop.begun_passes
        return closed * _MOST_OPEN + min(len(self._results.open), _MOST_OPEN - 1)

    def digest(self) -> str:
        """Return what tells the weights of one state from those of another."""
        if self._shards is not None and self._shards.is_torn:
            return "torn"
        total = 0
        for index, (_, parameter) in enumerate(self._runner.named_parameters()):
            values = parameter.detach().reshape(-1).contiguous().view(torch.uint8)
            # Sums of bytes are exact: they do not depend on how many threads add.
            total = (total * 31 + int(values.sum(dtype=torch.int64)) + index) % (1 << 62)
        return f"{total:x}"

    def exchange(self, now: Membership) -> None:
        """Send the state of the leader to the ranks that are behind, and what all do next. Raises where a rank ends meanwhile."""
        self._received = None
        if self._shards is not None:
            self._shards.exchange(now)
        open_save = self._runner.saver.open if self.has_state else None
        history, best = open_save or (False, False)
        is_behind = self.has_state and now.rank in now.behind
        loses_means = bool(now.lost) or is_behind
        flags = torch.tensor(
            [open_save is not None, history, best, self._loop.is_at_boundary, loses_means],
            dtype=torch.float64,
        )
        if now.size > 1:
            dist.all_reduce(flags, dist.ReduceOp.MAX)
        has_save, history, best, self._is_at_boundary, self._loses_means = map(bool, flags.tolist())
        self._open_save = (history, best) if has_save else None
        if not now.behind:
            return
        sent = self._packed() if now.rank == now.leader else b""
        # The other ranks do not know how long it is.
        size = torch.tensor([len(sent)])
        dist.broadcast(size, now.leader)
        received = torch.empty(int(size), dtype=torch.uint8)
        if sent:
            received = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
        dist.broadcast(received, now.leader)
        if now.rank in now.behind:
            # Put in only when it is complete, and all have it.
            self._received = received.numpy().tobytes()

    def _packed(self) -> bytes:
        """Return the whole state of this rank."""
        session, loop = self._session, self._loop
        own = {} if self._shards is None else {"optimizer": self._shards.groups()}
        with self._runner.run_state.saved_elsewhere(*own):
            state = self._live_state.read()
        payload = {
            **state,
            # The shards of other ranks are sent by `Shards.exchange`.
            **own,
            "elastic": {
                "stop_reason": session.stop_reason,
                "save_requested": session.save_requested,
                "saved_at": self._runner.saver.saved_at,
                "scored_at": self._results.scored_at,
                "begun_pass": loop.begun_pass,
                "begun_passes": loop.begun_passes,
                "last_split": loop.last_split,
                "recent": [list(record) for record in self._reporter.trackers.recent or ()],
            },
        }
        stream = io.BytesIO()
        torch.save(payload, stream)
        return stream.getvalue()

    # When the ranks have formed

    def take_over(self) -> bool:
        """Take over what `exchange` has brought, and begin where all ranks are; return whether it was the state of another rank."""
        received, self._received = self._received, None
        if received is not None:
            with nullcontext() if self._shards is None else self._shards.kept():
                self._unpack(received)
            self.has_state = True
        if self._shards is not None:
            self._shards.settle()
        self._settle()
        return received is not None

    def _unpack(self, received: bytes) -> None:
        """Take over the whole state of another rank."""
        runner, session, loop = self._runner, self._session, self._loop
        state: Mapping[str, Any] = torch.load(io.BytesIO(received), weights_only=True)
        self._live_state.load(state)
        more = state["elastic"]
        session.stop_reason, session.save_requested = more["stop_reason"], more["save_requested"]
        runner.saver.saved_at = more["saved_at"]
        self._results.scored_at = more["scored_at"]
        loop.begun_pass = more["begun_pass"]
        loop.begun_passes = more["begun_passes"]
        loop.last_split = more["last_split"]
        self._reporter.trackers.recent = recent_records(
            (dict(values), step) for values, step in more["recent"]
        )
        self._reporter.forget_samples(runner.state.train.samples)

    def _settle(self) -> None:
        """Bring what each process does once, with the others, to where the run is."""
        runner, session = self._runner, self._session
        has_made_updates = runner.state.train.global_step > 0
        self._loop.is_at_boundary = self._is_at_boundary
        runner.saver.open = self._open_save
        if self._open_save is not None:
            session.save_requested = False
        session.drop_regroup()
        session.updated_once = has_made_updates
        self._keys.between_updates()
        self._drop_means()
        if has_made_updates:
            runner.window.is_first = False
            # They look at the first update of a run, which is over.
            for observer in [each for each in runner.observers if isinstance(each, FirstGradients)]:
                runner.observers.remove(observer)
            limit = runner.config.comm.train_timeout_seconds
            if limit is not None:
                set_collective_timeout(limit)
        runner.state.elastic.world_size = runner.world.size
        runner.state.elastic.data_replicas = runner.world.size

    def _drop_means(self) -> None:
        """Begin the means of the program anew where a rank has lost its part of them."""
        runner = self._runner
        if not self._loses_means:
            return
        names = sorted(runner.meters)
        if names and runner.is_main_process:
            logger.warning(
                "The next means of %s leave out the updates up to %d that were not logged yet: what a rank had added to self.meters has "
                "ended with it.",
                ", ".join(names),
                runner.state.train.global_step,
            )
        runner.meters.reset()

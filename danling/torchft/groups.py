"""Replica groups that may come and go: quorum, commit, healing, and sums over those that take part, by TorchFT."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils._pytree import tree_map_only

from danling.distributed.domain import Domain
from danling.training.session import IntactStateError
from danling.utils.tensors import bucketed, flattened, local_part, scatter

from .lighthouse import (
    LIGHTHOUSE,
    Membership,
    OtherSizeMet,
    ReplicaSizeError,
    WaitAbandonedError,
    lighthouse_address,
    reach,
    require_torchft,
)
from .settings import ReplicaSettings

logger = logging.getLogger("danling")

_PAUSE = 0.1
_LONGEST_PAUSE = 1.0
"""Seconds before an update is tried again."""


class QuorumError(IntactStateError):
    """The replica groups could not agree on who takes part, or on any update."""


class ReplicaGroups:
    """What a process says to the processes of its rank in the other replica groups.

    An update is `open`, forward and backward, `all_reduce` and `reduce_gradients`, `commit`. Until `commit` returns True nothing may
    change. Errors of a collective are kept until then: they make this update fail, on all ranks of the group. Which groups take
    part is agreed anew, and before the forward begins, in each `open`: a healed group takes part at once with the weights of the
    others, and the state that is sent is not being changed.

    Construct, and call every method, on all ranks of the group.

    Attributes:
        settings: The settings.
        failures: Updates in a row that were not committed.

    Args:
        settings: Where this group stands.
        group: All ranks of this group.
        state_dict: Returns the state that another group heals from: of this rank, without communication. Called in a thread while
            `open` waits.
        load_state_dict: Takes such a state of the same rank of another group. Called in `open`.
        asked_to_stop: Whether this rank is to stop, as after a signal. Called while `open` waits.

    Raises:
        ImportError: If torchft is not installed.
        ValueError: If the environment does not name a lighthouse.
        QuorumError: If nothing answers at its address.
    """

    def __init__(
        self,
        settings: ReplicaSettings,
        *,
        group: Domain,
        state_dict: Callable[[], object],
        load_state_dict: Callable[[Any], None],
        asked_to_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        require_torchft()
        self.settings = settings
        self.failures = 0
        self._lighthouse = lighthouse_address()
        try:
            reach(self._lighthouse, settings.timeout)
        except OSError as error:
            raise self._unreached(error) from error
        self._group = group
        self._state_dict = state_dict
        self._load = load_state_dict
        self._asked_to_stop = asked_to_stop
        self._healed = False
        self._healing = False
        self._device = group.device if settings.process_group == "nccl" else torch.device("cpu")
        self._membership: Membership | None = None
        self._counts = {"step": 0, "batches_committed": 0}

    def _unreached(self, error: Exception) -> QuorumError:
        return QuorumError(
            f"Expected a lighthouse of TorchFT at {self._lighthouse}. Received: {error}. Start one with "
            f"`torchft_lighthouse --min_replicas 1`, and set {LIGHTHOUSE} to its address."
        )

    @property
    def _manager(self) -> Any:
        assert self._membership is not None, "open() comes first"
        return self._membership.manager

    def _join(self) -> None:
        # Not before the first update: the lighthouse waits for a group that is there and does not ask, and so do the others.
        if self._membership is not None:
            return
        settings = self.settings
        try:
            self._membership = Membership(
                self._lighthouse,
                self._group,
                backend=settings.process_group,
                timeout=settings.timeout,
                quorum_timeout=settings.quorum_timeout,
                replica_id=f"replica-{settings.replica_id:06d}",
                min_replica_size=settings.min_replica_size,
                state_dict=self._state_dict,
                load_state_dict=self._heal,
                asked_to_stop=self._asked_to_stop,
            )
        except Exception as error:
            raise self._unreached(error) from error
        self._manager.load_state_dict(dict(self._counts))

    # One update

    def open(self) -> bool:
        """Agree with the other groups on who takes part in the next update, and heal where this group is behind.

        Returns:
            Whether this rank was given the state of another group.

        Raises:
            QuorumError: If there is no agreement in time, as when the lighthouse is gone.
            ReplicaSizeError: If this group has another number of ranks than the others, which go on without it.
            WaitAbandonedError: On all ranks, when one of them is asked to stop while they wait; this group has left the others.
        """
        self._healed = False
        end = time.monotonic() + self.settings.quorum_timeout
        while not self._met(may_wait=time.monotonic() < end):
            time.sleep(_LONGEST_PAUSE)
        return self._healed

    def _met(self, *, may_wait: bool) -> bool:
        """Return whether there is a quorum; not where a group of another size is about to leave it."""
        self._join()
        try:
            self._manager.start_quorum()
        except (WaitAbandonedError, ReplicaSizeError):
            self.leave()
            raise
        except OtherSizeMet as error:
            # It ends with an error of its own; without it this group would wait for ranks that are not there.
            self.leave()
            logger.warning("A replica group of another size has come, and is refused; trying again without it.")
            if self._group.size > 1:
                may_wait = bool(self._group.all_reduce(torch.tensor([float(may_wait)]), "min").item())
            if not may_wait:
                raise QuorumError(
                    "Expected replica groups of one size. Received: a group of another size that does not leave. Stop it, and "
                    "start it again with as many processes as the others have."
                ) from error
            return False
        except Exception as error:
            if self._healing:
                raise
            asked = "the lighthouse" if self._group.rank == 0 else "rank 0 of this group, which asks the lighthouse"
            raise QuorumError(
                f"Expected {asked} at {self._lighthouse}, to name the replica groups of the next update within "
                f"{self.settings.quorum_timeout:g} seconds. Received: {error}. See that the lighthouse runs and that "
                "all ranks of this group do, and start what has ended again: it goes on from the last checkpoint."
            ) from error
        return True

    def _heal(self, state: object) -> None:
        self._healing = True
        # The tensors lie in the bytes that were received, which must not be written to.
        self._load(tree_map_only(Tensor, torch.clone, state))
        self._healing, self._healed = False, True

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the groups that take part, in place, and return it; after an error it holds anything.

        Args:
            tensor: Contiguous, of any shape.
        """
        moved = tensor.to(self._device)
        self._manager.allreduce(moved, reduce_op=dist.ReduceOp.SUM).wait()
        return tensor if moved is tensor else tensor.copy_(moved)

    def reduce_gradients(
        self, parameters: Sequence[nn.Parameter], present: Sequence[bool], factor: float | Tensor = 1.0
    ) -> None:
        """Sum gradients, or the shards of them that this rank holds, over the groups that take part.

        Args:
            parameters: The same ones in every group.
            present: Which of them have a gradient in any group; where this one has none, it is zero.
            factor: What the gradients of this group are multiplied with first.
        """
        gradients = [_local_gradient(p) for p, there in zip(parameters, present, strict=True) if there]
        for bucket in bucketed(gradients):
            flat = flattened(bucket)
            if not (isinstance(factor, float) and factor == 1.0):
                flat.mul_(factor)
            scatter(self.all_reduce(flat), bucket)

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their means over the groups that take part."""
        for bucket in bucketed(tensors):
            scatter(self.all_reduce(flattened(bucket)).div_(self.num_participants), bucket)

    def sum_totals(self, totals: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        """Add sums and weights by name over the groups that took part in the last update. Between two updates.

        Returns:
            The sums; those of this group where a group has gone meanwhile, or they have other names.
        """
        names = sorted(totals)
        mine = [1.0, float(len(names)), float(crc32("\0".join(names).encode()))]
        groups, *shared = self.all_reduce(torch.tensor(mine, dtype=torch.float64)).tolist()
        if not names or self._manager.errored() or shared != [groups * figure for figure in mine[1:]]:
            return dict(totals)
        figures = torch.tensor([totals[name] for name in names], dtype=torch.float64)
        self.all_reduce(figures)
        if self._manager.errored():
            return dict(totals)
        return {name: (total, weight) for name, (total, weight) in zip(names, figures.tolist())}

    def commit(self) -> bool:
        """Whether the update may be made: no rank of this group met an error, and enough groups took part.

        Raises:
            QuorumError: If it has failed too often in a row.
        """
        if self._manager.should_commit():
            self.failures = 0
            return True
        self.failures += 1
        limit = self.settings.max_failures
        if limit is not None and self.failures > limit:
            raise QuorumError(
                f"Expected an update to be committed after at most {limit} attempts. Received: {self.failures} failures in a row, the "
                f"last one: {self._last_error()}. Look at the network between the replica groups, raise "
                "ft.process_group_timeout_ms, or lower ft.min_replica_size."
            )
        # The next attempt is of no use before the lighthouse has noticed a death, or a group has come.
        time.sleep(min(_PAUSE * self.failures, _LONGEST_PAUSE))
        return False

    def _last_error(self) -> str:
        error = self._manager.errored()
        reason = f"{self.num_participants} replica groups of {self.settings.min_replica_size}"
        return str(error.original_exception) if error is not None else reason

    # Standing

    @property
    def num_participants(self) -> int:
        """Groups that take part in the open update, or took part in the last one; 0 before the first."""
        return int(self._manager.num_participants()) if self._membership is not None else 0

    def state_dict(self) -> dict[str, int]:
        """Return how many updates were committed, and how many by one group each: `{"step": ..., "batches_committed": ...}`."""
        if self._membership is not None:
            self._counts = {name: int(value) for name, value in self._manager.state_dict().items()}
        return dict(self._counts)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from a checkpoint. Groups at different steps heal from one that is ahead."""
        self._counts = dict(state)
        if self._membership is not None:
            self._manager.load_state_dict(dict(state))

    def leave(self) -> None:
        """Leave the other groups, which go on without this one; the next `open` joins them again."""
        self.state_dict()
        membership, self._membership = self._membership, None
        if membership is not None:
            membership.close()


def _local_gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local_part(parameter.grad)

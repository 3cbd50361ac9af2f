"""A runner's replica group among the others: it agrees on each update, heals, and shares one set of checkpoints with them."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast
from zlib import crc32

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.utils._pytree import tree_map_only

from danling.checkpoints.snapshot import convert
from danling.config import RunnerConfig
from danling.distributed import StepTotals
from danling.training.extension import Extension, StateReplaced, Totals
from danling.training.live_state import LiveState
from danling.training.recompute import Recompute
from danling.training.reduction import GradientReduction
from danling.training.run_state import StatePart
from danling.training.session import TrainingSession
from danling.utils.locks import FileLock
from danling.utils.observers import Observer
from danling.utils.tensors import bucketed, flattened, local_part, scatter, with_local_part

from .groups import (
    LIGHTHOUSE,
    OtherSizeMet,
    QuorumError,
    ReplicaSizeError,
    WaitAbandonedError,
    address_towards,
    host_and_port,
    make_manager,
    process_group,
    transport,
)

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner

logger = logging.getLogger("danling")

_SECONDS_BETWEEN_REQUESTS = 2.0
"""How often a lighthouse that does not answer is asked."""
_PAUSE = 0.1
_LONGEST_PAUSE = 1.0
"""Seconds before an update is tried again."""


def position_owner(config: RunnerConfig) -> str | None:
    """Return the name of the replica group that saves its own position: each one does; `None` without groups."""
    settings, ft = config.checkpoint, config.ft
    if (
        ft.enabled or settings.enable_ft_dataloader_checkpoints
    ) and settings.ft_replica_id is not None:
        return str(settings.ft_replica_id)
    return str(ft.replica_id) if ft.enabled else None


class GroupAttendance(Observer):
    """Has a replica group take part from the beginning of a training to its end: one that stays and does not train would hold others up."""

    critical = True

    def __init__(self, member: ReplicaMember) -> None:
        self._member = member

    def training_started(self) -> None:
        self._member.begin_training()

    def training_ended(self) -> None:
        self._member.leave()


class ReplicaMember(Extension):
    """The replica group of a runner with `ft.enabled`: what a process says to the processes of its rank in the other groups.

    An update is `before_update`, forward and backward, the sums over the groups, and `commit_update`. Until that returns True nothing may
    change. Errors of a collective are kept until then: they make this update fail, on all ranks of the group. Which groups take
    part is agreed anew, and before the forward begins, in each `before_update`: a healed group takes part at once with the weights of the
    others, and the state that is sent is not being changed.

    Construct, and call every method, on all ranks of the group.

    Attributes:
        failures: Updates in a row that were not committed.

    Raises:
        ImportError: If torchft is not installed.
        ValueError: If the environment does not name a lighthouse.
        QuorumError: If nothing answers at its address.
    """

    def __init__(
        self,
        runner: TorchRunner,
        session: TrainingSession,
        live_state: LiveState,
        recompute: Recompute,
    ) -> None:
        try:
            import torchft  # noqa: F401
        except ImportError as error:
            raise ImportError(
                f"Expected torchft to be installed for ft.enabled. Received: {error}. Install it with `pip install torchft-nightly`."
            ) from error
        self._runner = runner
        self._session = session
        self._live_state = live_state
        self._recompute = recompute
        ft = self.settings = runner.config.ft
        if ft.process_group == "nccl" and not (
            dist.is_nccl_available() and torch.cuda.is_available()
        ):
            raise ValueError(
                "Expected NCCL and a CUDA device for ft.process_group='nccl'. Received: a build of torch, or a machine, without them. Set "
                "ft.process_group=gloo."
            )
        # The other groups may be evaluating or saving.
        self.timeout = ft.process_group_timeout_ms / 1000
        self.quorum_timeout = max(self.timeout, runner.config.comm.train_timeout_seconds or 60.0)
        self.failures = 0
        self._lighthouse = os.environ.get(LIGHTHOUSE, "")
        if not self._lighthouse:
            raise ValueError(
                f"Expected {LIGHTHOUSE} to be the address of a lighthouse, such as http://127.0.0.1:29510. Received: nothing. Start one "
                f"with `torchft_lighthouse --min_replicas 1` and set {LIGHTHOUSE} for every replica group."
            )
        try:
            socket.create_connection(host_and_port(self._lighthouse), timeout=self.timeout).close()
        except OSError as error:
            raise self._unreached(error) from error
        self._device = runner.world.device if ft.process_group == "nccl" else torch.device("cpu")
        self._manager: Any = None
        self._process_group: Any = None
        self._store: TCPStore | None = None
        self._counts = {"step": 0, "batches_committed": 0}
        self._healed = self._healing = self._is_open = self._has_joined = False
        self._take_back: Callable[[], None] | None = None
        self._writer: FileLock | None = None

    def _unreached(self, error: Exception) -> QuorumError:
        return QuorumError(
            f"Expected a lighthouse of TorchFT at {self._lighthouse}. Received: {error}. Start one with "
            f"`torchft_lighthouse --min_replicas 1`, and set {LIGHTHOUSE} to its address."
        )

    def _join(self) -> None:
        # Not before the first update: the lighthouse waits for a group that is there and does not ask, and so do the others.
        settings, group = self.settings, self._runner.world
        timeout, patience = timedelta(seconds=self.timeout), timedelta(seconds=self.quorum_timeout)
        try:
            host = address_towards(self._lighthouse)

            def open_store() -> tuple[str, int]:
                # Its own store for every attempt: that of the launcher may still hold the addresses of an earlier one.
                self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
                return host, self._store.port

            address, port = group.on_first(open_store)
            self._process_group = process_group(settings.process_group, timeout)
            self._manager = make_manager(
                self.keeps_waiting,
                pg=self._process_group,
                load_state_dict=self._heal,
                state_dict=lambda: self.sent_state(),
                min_replica_size=settings.min_replica_size,
                # Before the forward: a healed group then takes part at once, and a state that is sent is not being changed.
                use_async_quorum=False,
                timeout=timeout,
                quorum_timeout=patience,
                # A lighthouse that was restarted is asked again, over a new connection, until the time is over.
                quorum_retries=max(int(self.quorum_timeout / _SECONDS_BETWEEN_REQUESTS), 1),
                connect_timeout=timeout,
                rank=group.rank,
                world_size=group.size,
                store_addr=address,
                store_port=port,
                lighthouse_addr=self._lighthouse,
                replica_id=f"replica-{settings.replica_id:06d}-ranks-{group.size}",
                hostname=host,
                checkpoint_transport=transport(host, patience),
            )
        except Exception as error:
            raise self._unreached(error) from error
        self._manager.load_state_dict(dict(self._counts))

    def keeps_waiting(self, waits: bool) -> bool:
        """Return whether a rank of this group still waits for the quorum. Call on all ranks of the group."""
        stops = waits and self._session.asked_to_stop()
        votes = torch.tensor([float(waits), float(stops)], dtype=torch.float64)
        waiting, stopping = self._runner.world.all_reduce(votes).tolist()
        if stopping:
            raise WaitAbandonedError
        return bool(waiting)

    # A training

    def join_training(self, extensions: list[Extension]) -> None:
        """Have the loop of the runner ask this group before each update, and leave the other groups where a training ends."""
        extensions.append(self)
        self._runner.observers.append(GroupAttendance(self))

    def begin_training(self) -> None:
        """Forget an update that an earlier training has left open."""
        self._is_open = False

    # One update

    def before_update(self) -> StateReplaced | None:
        """Agree with the other groups on the next update, once, before its forward.

        Returns:
            How the state of this run was replaced by that of another group, or of a checkpoint; `None` where it was not.
        """
        if self._is_open:
            return None
        moved_in_data = False
        begins = self.state_dict()["step"] == 0
        replaced = self._meet()
        self._is_open = True
        if begins:
            replaced = self._begin_alike(replaced)
        if not self._has_joined:
            self._has_joined = True
            moved_in_data = self._catch_up()
            replaced = moved_in_data or replaced
        self._take_back = self._recompute.remember()
        return StateReplaced(moved_in_data) if replaced else None

    def _meet(self) -> bool:
        """Agree with the other groups on who takes part in the next update; return whether this rank was given the state of another."""
        self._healed = False
        end = time.monotonic() + self.quorum_timeout
        while True:
            may_wait = time.monotonic() < end
            try:
                if self._manager is None:
                    self._join()
                self._manager.start_quorum()
                return self._healed
            except (WaitAbandonedError, ReplicaSizeError):
                self.leave()
                raise
            except OtherSizeMet as error:
                # It ends with its own error; without it this group would wait for ranks that are not there.
                self.leave()
                logger.warning(
                    "A replica group of another size has come, and is refused; trying again without it."
                )
                # Together: a rank that gave up alone would leave the others of its group in the next quorum.
                if not self._runner.world.all_reduce(torch.tensor([float(may_wait)]), "min").item():
                    raise QuorumError(
                        "Expected replica groups of one size. Received: a group of another size that does not leave. Stop it, and "
                        "start it again with as many processes as the others have."
                    ) from error
            except Exception as error:
                # What fails while a state is taken over has its own message.
                if self._healing or isinstance(error, QuorumError):
                    raise
                asked = (
                    "the lighthouse"
                    if self._runner.world.rank == 0
                    else "rank 0 of this group, which asks the lighthouse"
                )
                raise QuorumError(
                    f"Expected {asked} at {self._lighthouse}, to name the replica groups of the next update within "
                    f"{self.quorum_timeout:g} seconds. Received: {error}. See that the lighthouse runs and that "
                    "all ranks of this group do, and start again those that have ended: they continue from the last checkpoint."
                ) from error
            time.sleep(_LONGEST_PAUSE)

    def _heal(self, state: object) -> None:
        self._healing = True
        # The tensors are in the bytes that were received, which must not be written to.
        self.take_over(tree_map_only(Tensor, torch.clone, state))
        self._healing, self._healed = False, True

    def _begin_alike(self, healed: bool) -> bool:
        # At step 0 TorchFT lets each rank copy weights from any group, so ranks of one group may copy from different ones.
        runner = self._runner
        if not any(runner.world.gather_objects(healed)):
            return False
        averages = runner.ema.weights.values() if runner.ema is not None else ()
        with torch.no_grad():
            for tensor in runner.preparation.copies(runner.model, averages):
                runner.world.broadcast(tensor)
        return True

    def _catch_up(self) -> bool:
        """Load a checkpoint that the others have written since this process started, if none of them is there when it joins."""
        runner, manager = self._runner, self._runner.checkpoint_manager
        if not runner.config.auto_resume or self.num_participants > 1:
            return False
        source = manager.find_latest()
        if source is None or manager.step_of(source) <= runner.state.train.global_step:
            return False
        runner.load_checkpoint(source)
        return True

    def around(self, reduction: GradientReduction) -> GradientReduction:
        """Return the reduction of this group's stack, extended by the sum over the groups."""
        return cast(GradientReduction, ReplicatedReduction(reduction, self))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the groups that take part, in place, and return it; after an error it holds anything.

        Args:
            tensor: Contiguous, of any shape.
        """
        moved = tensor.to(self._device)
        self._manager.allreduce(moved, reduce_op=dist.ReduceOp.SUM).wait()
        return tensor if moved is tensor else tensor.copy_(moved)

    def reduce_gradients(
        self,
        parameters: Sequence[nn.Parameter],
        present: Sequence[bool],
        factor: float | Tensor = 1.0,
    ) -> None:
        """Sum gradients, or the shards of them that this rank holds, over the groups that take part.

        Args:
            parameters: The same ones in every group.
            present: Which of them have a gradient in any group; where this one has none, it is zero.
            factor: What the gradients of this group are multiplied with first.
        """
        given = [parameter for parameter, there in zip(parameters, present, strict=True) if there]
        for parameter in given:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [
            local_part(parameter.grad) for parameter in given if parameter.grad is not None
        ]
        for bucket in bucketed(gradients):
            flat = flattened(bucket)
            # A tensor is not compared: the host would wait for the device.
            if not (isinstance(factor, float) and factor == 1.0):
                flat.mul_(factor)
            scatter(self.all_reduce(flat), bucket)

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their means over the groups that take part."""
        for bucket in bucketed(tensors):
            scatter(self.all_reduce(flattened(bucket)).div_(self.num_participants), bucket)

    def sum_totals(self, totals: Totals) -> Totals:
        """Add sums and weights by name over the groups that took part in the last update. Between two updates.

        Returns:
            The sums; those of this group where a group has gone meanwhile, or they have other names.
        """
        if not self.num_participants:
            return totals
        names, found = sorted(totals), totals
        # Of the other groups, some may have other metrics: sums of other names must not be added.
        mine = [1.0, float(len(names)), float(crc32("\0".join(names).encode()))]
        groups, *shared = self.all_reduce(torch.tensor(mine, dtype=torch.float64)).tolist()
        if (
            names
            and not self._manager.errored()
            and shared == [groups * figure for figure in mine[1:]]
        ):
            figures = self.all_reduce(
                torch.tensor([totals[name] for name in names], dtype=torch.float64)
            )
            if not self._manager.errored():
                found = {
                    name: (total, weight) for name, (total, weight) in zip(names, figures.tolist())
                }
        # All ranks of the group use rank 0's result, since they may meet different errors.
        shared_by_all: dict[str, tuple[float, float]] = self._runner.world.broadcast_object(found)
        return shared_by_all

    def commit_update(self, step: int) -> bool:
        """Return whether the open update may be made; if not, everything is as it was before it.

        It may where no rank of this group met an error, and enough groups took part.
        """
        self._is_open, committed = False, False
        try:
            committed = bool(self._manager.should_commit())
        finally:
            if not committed and self._take_back is not None:
                self._take_back()
        if committed:
            self.failures = 0
            return True
        self.failures += 1
        limit = self._runner.config.max_skipped_updates
        if limit is not None and self.failures > limit:
            error = self._manager.errored()
            reason = f"{self.num_participants} replica groups of {self.settings.min_replica_size}"
            last = error.original_exception if error is not None else reason
            raise QuorumError(
                f"Expected an update to be committed after at most {limit} attempts. Received: {self.failures} failures in a row, the "
                f"last one: {last}. Look at the network between the replica groups, raise "
                "ft.process_group_timeout_ms, or lower ft.min_replica_size."
            )
        logger.warning(
            "The replica groups did not commit update %d (failure %d); again.", step, self.failures
        )
        # The next attempt is of no use before the lighthouse has noticed a death, or a group has come.
        time.sleep(min(_PAUSE * self.failures, _LONGEST_PAUSE))
        return False

    # Membership

    @property
    def num_participants(self) -> int:
        """Groups that take part in the open update, or took part in the last one; 0 before the first."""
        return int(self._manager.num_participants()) if self._manager is not None else 0

    def state_dict(self) -> dict[str, int]:
        """Return how many updates were committed, and how many by one group each: `{"step": ..., "batches_committed": ...}`."""
        if self._manager is not None:
            self._counts = {name: int(value) for name, value in self._manager.state_dict().items()}
        return dict(self._counts)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from a checkpoint. Groups at different steps heal from one that is ahead."""
        self._counts = dict(state)
        if self._manager is not None:
            self._manager.load_state_dict(dict(state))

    def leave(self) -> None:
        """Leave the other groups, which go on without this one; the next `open` joins them again."""
        # The counts go with the manager: they are read before.
        self.state_dict()
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.shutdown(wait=False)
            self._process_group.shutdown()
            self._process_group = self._store = None

    # Checkpoints

    def progress_parts(self) -> list[StatePart]:
        """Return what a checkpoint of the run has of the groups: how many updates they have made."""

        def fresh() -> dict[str, int]:
            # A run whose checkpoint was made without groups counts from there: at 0 all groups would copy the state of one of them.
            train = self._runner.state.train
            tried = train.global_step + train.skipped_updates
            return {"step": tried, "batches_committed": tried}

        return [
            StatePart(
                "replicas",
                self.state_dict,
                lambda state, _: self.load_state_dict(state),
                default=fresh,
            )
        ]

    def saves(self) -> bool:
        """Return whether this group writes the full checkpoints: one of the participating groups does, until it fails."""
        had, mine = self._runner.world.on_first(self._acquire)
        if mine and not had:
            # Continue the history of saves of the group that wrote before.
            manager = self._runner.checkpoint_manager
            source = manager.find_latest()
            if source is not None:
                manager.begin(source)
        return mine

    def _acquire(self) -> tuple[bool, bool]:
        if self._writer is None:
            # Groups that do not share the directory each have their own lock, and each write.
            self._writer = FileLock(self._runner.workspace.checkpoints / "writer.lock")
        return self._writer.held, self._writer.acquire()

    def close(self) -> None:
        """Release the lock for writing, and leave the other groups. A second call does nothing."""
        if self._writer is not None:
            self._writer.release()
        self.leave()

    # Healing

    def sent_state(self) -> dict[str, Any]:
        """Return what another group heals from: the state of this rank, shards as plain tensors, without communication."""
        changing = {buffer.data_ptr() for buffer in self._runner.unwrapped_model.buffers()}

        def plain(tensor: Tensor) -> Tensor:
            local = local_part(tensor)
            # A forward changes buffers.
            return local.clone() if local.data_ptr() in changing else local

        converted: dict[str, Any] = convert(self._live_state.read(), plain)
        return converted

    def take_over(self, state: Mapping[str, Any]) -> None:
        """Take over what `sent_state` returned on the same rank of another group. Called on every rank of the group that heals."""
        runner = self._runner
        reference = runner.window.agreed_reference
        saves_position = position_owner(runner.config) is not None
        self._live_state.load(
            state,
            lay_out=self._laid_out,
            keeps_position=lambda source: source.is_rank_local and saves_position,
        )
        # The reference is one of the group, whose ranks may heal from different groups.
        runner.window.agreed_reference = reference
        if runner.is_main_process:
            logger.info(
                "Healed from another replica group at step %d.", runner.state.train.global_step
            )

    def _laid_out(self, state: Mapping[str, Any]) -> dict[str, object]:
        """Return a state with tensors divided as this rank divides them."""
        own = self._runner.run_state.components()
        laid_out = dict(state)
        laid_out["model"] = laid_out_like(state["model"], own["model"])
        if "ema" in own:
            laid_out["ema"] = {
                **state["ema"],
                "weights": laid_out_like(state["ema"]["weights"], own["ema"]["weights"]),
            }
        if "optimizer" in own:
            named = {
                name: parameter.detach() for name, parameter in self._runner.named_parameters()
            }
            moments = {
                name: {
                    key: laid_out_like({name: value}, named)[name] for key, value in entry.items()
                }
                for name, entry in state["optimizer"]["state"].items()
            }
            laid_out["optimizer"] = {**state["optimizer"], "state": moments}
        return laid_out


def laid_out_like(state: Mapping[str, object], own: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return plain tensors divided as those of the same name and shape are divided on this rank; anything else as it is."""
    found = dict(state)
    for name, value in state.items():
        if name in own and isinstance(value, Tensor) and value.shape == local_part(own[name]).shape:
            found[name] = with_local_part(own[name], value)
    return found


class ReplicatedReduction:
    """The gradient of a replica group, summed over the groups that take part; in all else the reduction of its stack."""

    def __init__(self, inner: GradientReduction, member: ReplicaMember) -> None:
        self.inner = inner
        self.member = member
        self._divides = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def agree(self, totals: StepTotals) -> StepTotals | None:
        """Add totals and gradients of the groups that take part, and ask whether the update may be made.

        Returns:
            The totals over all groups; `None` where the update is not made and was taken back.
        """
        runner = self.member._runner
        window = runner.window
        self._divides = not window.sum_reduced
        groups, parameters = self.member, self.inner.parameters
        present = [float(parameter.grad is not None) for parameter in parameters]
        mine = (totals.weight, totals.loss, totals.samples, totals.nonfinite)
        shared = torch.tensor([*(float(value) for value in mine), *present], dtype=torch.float64)
        weight, loss, samples, nonfinite, *holders = groups.all_reduce(shared).tolist()
        # Each group has scaled by its own reference, and divided by its number of ranks: undone before the sum.
        factor = window.gradient_factor(1.0, self.inner.mean_over)
        groups.reduce_gradients(parameters, [count > 0 for count in holders], factor)
        norms = [
            m
            for m in runner.unwrapped_model.modules()
            if isinstance(m, nn.modules.batchnorm._NormBase)
        ]
        statistics = [
            each for m in norms if m.track_running_stats for each in (m.running_mean, m.running_var)
        ]
        groups.average([each for each in statistics if each is not None])
        # Asked before anything is decided: after an error between the groups these figures mean nothing.
        if not self.member.commit_update(runner.state.train.global_step + 1):
            return None
        return StepTotals(weight, loss, samples, nonfinite, totals.requests)

    def unscale(self, factor: float | Tensor, weight: float | Tensor) -> list[Tensor]:
        """Divide the gradient by the weight, whatever the factor of one group alone: groups can be added as plain sums only."""
        return self.inner.unscale(1.0 / float(weight) if weight and self._divides else 1.0, weight)

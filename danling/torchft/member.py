"""A runner's replica group among the others: it agrees on each update, heals, and shares one set of checkpoints with them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from copy import copy
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from danling.checkpoints.manager import convert
from danling.distributed import StepTotals
from danling.training.reduction import GradientReduction
from danling.training.run_state import StatePart
from danling.utils.locks import FileLock
from danling.utils.tensors import local_part, with_local_part

from .groups import ReplicaGroups
from .positions import position_owner

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner

logger = logging.getLogger("danling")


class ReplicaMember(ReplicaGroups):
    """The replica group of a runner with `ft.enabled`. Construct, and call every method, on all ranks of the group."""

    def __init__(self, runner: TorchRunner) -> None:
        super().__init__(runner.config, runner.world)
        self._runner = runner
        self._is_open = self._has_joined = False
        self._take_back: Callable[[], None] | None = None
        self._writer: FileLock | None = None

    def asked_to_stop(self) -> bool:
        return self._runner._session.asked_to_stop()

    # One update

    def begin_training(self) -> None:
        """Forget an update that an earlier training has left open."""
        self._is_open = False

    def open_update(self) -> bool:
        """Agree with the other groups on the next update, once, before its forward.

        Returns:
            Whether the state of this run was replaced by that of another group: batches read before do not count.
        """
        if self._is_open:
            return False
        begins = self.state_dict()["step"] == 0
        replaced = self.open()
        self._is_open = True
        if begins:
            replaced = self._begin_alike(replaced)
        if not self._has_joined:
            self._has_joined = True
            replaced = self._catch_up() or replaced
        self._take_back = self._runner._parts.recompute.remember()
        return replaced

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

    def commit_update(self, step: int) -> bool:
        """Return whether the open update may be made; if not, everything is as it was before it."""
        self._is_open, committed = False, False
        try:
            committed = self.commit()
        finally:
            if not committed and self._take_back is not None:
                self._take_back()
        if not committed:
            logger.warning("The replica groups did not commit update %d (failure %d); again.", step, self.failures)
        return committed

    def sum_totals(self, totals: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        """Add sums and weights by name over the groups that take part, alike on all ranks of the group."""
        if not self.num_participants:
            return dict(totals)
        # All ranks of the group use rank 0's result, since they may meet different errors.
        shared: dict[str, tuple[float, float]] = self._runner.world.broadcast_object(super().sum_totals(totals))
        return shared

    # Checkpoints

    def progress_part(self) -> StatePart:
        """Return what a checkpoint of the run has of the groups: how many updates they have made."""

        def fresh() -> dict[str, int]:
            # A run whose checkpoint was made without groups counts from there: at 0 all groups would copy the state of one of them.
            train = self._runner.state.train
            tried = train.global_step + train.skipped_updates
            return {"step": tried, "batches_committed": tried}

        return StatePart("replicas", self.state_dict, lambda state, _: self.load_state_dict(state), default=fresh)

    def writes(self) -> bool:
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
        runner = self._runner
        progress = {**runner.state.state_dict(), **runner.run_state.progress()}
        payload: dict[str, Any] = {
            **runner.run_state.components(),
            "state": {name: part for name, part in progress.items() if name != "rng"},
            "dataloaders": {split: source.state_dict() for split, source in runner._data.trained_sources().items()},
        }
        changing = {buffer.data_ptr() for buffer in runner.unwrapped_model.buffers()}

        def plain(tensor: Tensor) -> Tensor:
            local = local_part(tensor)
            # A forward changes buffers.
            return local.clone() if local.data_ptr() in changing else local

        converted: dict[str, Any] = convert(payload, plain)
        return converted

    def take_over(self, state: Mapping[str, Any]) -> None:
        runner = self._runner
        elastic, reference = copy(runner.state.elastic), runner.window.agreed_reference
        runner.run_state.load_components(self._laid_out(state), frozenset())
        sources = runner._data.trained_sources()
        for split, position in state["dataloaders"].items():
            if not (sources[split].is_rank_local and position_owner(runner.config) is not None):
                sources[split].load_state_dict(position)
        runner.state.load_state_dict(state["state"])
        runner.run_state.load_progress(state["state"])
        # What the other group has counted is added by the other group.
        runner.meters.reset()
        # Those are of the group: ranks of one group may heal from different ones.
        runner.state.elastic, runner.window.agreed_reference = elastic, reference
        if runner.is_main_process:
            logger.info("Healed from another replica group at step %d.", runner.state.train.global_step)

    def _laid_out(self, state: Mapping[str, Any]) -> dict[str, object]:
        """Return a state with tensors divided as this rank divides them."""
        own, laid_out = self._runner.run_state.components(), dict(state)
        laid_out["model"] = laid_out_like(state["model"], own["model"])
        if "ema" in own:
            laid_out["ema"] = {**state["ema"], "weights": laid_out_like(state["ema"]["weights"], own["ema"]["weights"])}
        if "optimizer" in own:
            named = {name: parameter.detach() for name, parameter in self._runner.named_parameters()}
            moments = {
                name: {key: laid_out_like({name: value}, named)[name] for key, value in entry.items()}
                for name, entry in state["optimizer"]["state"].items()
            }
            laid_out["optimizer"] = {**state["optimizer"], "state": moments}
        return laid_out


def laid_out_like(state: Mapping[str, Any], own: Mapping[str, Tensor]) -> dict[str, Any]:
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
        norms = [m for m in runner.unwrapped_model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
        statistics = [each for m in norms if m.track_running_stats for each in (m.running_mean, m.running_var)]
        groups.average([each for each in statistics if each is not None])
        # Asked before anything is decided: after an error between the groups these figures mean nothing.
        if not self.member.commit_update(runner.state.train.global_step + 1):
            return None
        return StepTotals(weight, loss, samples, nonfinite, totals.requests)

    def unscale(self, factor: float | Tensor, weight: float | Tensor) -> list[Tensor]:
        """Divide the gradient by the weight, whatever the factor of one group alone: groups can be added as plain sums only."""
        return self.inner.unscale(1.0 / float(weight) if weight and self._divides else 1.0, weight)

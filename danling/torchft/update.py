"""One update of a replica group among others: opened before its forward, summed over the groups, committed or taken back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from danling.distributed import StepTotals
from danling.training.reduction import GradientReduction
from danling.training.update import Window

logger = logging.getLogger("danling")


class Quorum(Protocol):
    """What an update asks of the replica groups; `ReplicaGroups` is the real one."""

    failures: int

    def state_dict(self) -> dict[str, int]:
        """Return how many updates were committed, as `{"step": ..., "batches_committed": ...}`."""

    def open(self) -> bool:
        """Agree on who takes part; return whether this rank was given the state of another group."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the groups that take part, in place."""

    def reduce_gradients(
        self, parameters: Sequence[nn.Parameter], present: Sequence[bool], factor: float | Tensor = 1.0
    ) -> None:
        """Sum gradients over the groups that take part."""

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their means over the groups that take part."""

    def commit(self) -> bool:
        """Return whether the update may be made."""


class ReplicatedUpdate:
    """What a replica group does around each update. Call every method on all ranks of the group.

    Args:
        groups: What is agreed on with the other groups.
        remember: Returns what takes the micro-batches of the next update back: gradients, window, buffers.
        statistics: Returns the running means and variances of normalisation, which every forward changes.
        begin_alike: Called at step 0 with whether this rank was given the state of another group; makes the ranks of this group equal
            and returns whether any of them was.
        catch_up: Called once, when this process joins; returns whether it went on from a newer checkpoint.
    """

    def __init__(
        self,
        groups: Quorum,
        *,
        remember: Callable[[], Callable[[], None]],
        statistics: Callable[[], Sequence[Tensor]],
        begin_alike: Callable[[bool], bool],
        catch_up: Callable[[], bool],
    ) -> None:
        self.groups = groups
        self.remember = remember
        self.statistics = statistics
        self.begin_alike = begin_alike
        self.catch_up = catch_up
        self.is_open = False
        self._has_joined = False
        self._take_back: Callable[[], None] = lambda: None

    def open(self) -> bool:
        """Agree with the other groups on the next update, once, before its forward.

        Returns:
            Whether the state of this run was replaced by that of another group: batches read before do not count.

        Raises:
            QuorumError: If there is no agreement.
        """
        if self.is_open:
            return False
        begins = self.groups.state_dict()["step"] == 0
        replaced = self.groups.open()
        self.is_open = True
        if begins:
            replaced = self.begin_alike(replaced)
        if not self._has_joined:
            self._has_joined = True
            replaced = self.catch_up() or replaced
        self._take_back = self.remember()
        return replaced

    def around(self, reduction: GradientReduction) -> ReplicatedReduction:
        """Return the reduction of this group's stack, extended by the sum over the groups."""
        return ReplicatedReduction(reduction, self)

    def commit(self, step: int) -> bool:
        """Ask whether the open update may be made; if not, everything is as it was before it.

        Args:
            step: Number of the update, for the log.

        Raises:
            QuorumError: If too many in a row may not; everything is as it was before this one.
        """
        self.is_open = False
        committed = False
        try:
            committed = self.groups.commit()
        finally:
            if not committed:
                self._take_back()
        if not committed:
            logger.warning(
                "The replica groups did not commit update %d (failure %d); again.", step, self.groups.failures
            )
        return committed


class ReplicatedReduction:
    """The gradient of a replica group, summed over the groups that take part; each enters by its weight.

    Args:
        inner: The reduction within this group.
        update: What the group does around an update.
    """

    def __init__(self, inner: GradientReduction, update: ReplicatedUpdate) -> None:
        self.inner = inner
        self.update = update
        self.optimizer: Any = inner.optimizer
        self.mean_over = inner.mean_over
        self._divides = True

    def agree(self, totals: StepTotals, window: Window, step: int) -> StepTotals | None:
        """Add totals and gradients of the groups that take part, and ask whether the update may be made.

        Args:
            totals: Those of this group. Requests stay within it.
            window: The open window, by whose reference this group has scaled its losses.
            step: Number of the update.

        Returns:
            The totals over all groups; `None` where the update is not made and was taken back.

        Raises:
            QuorumError: If too many updates in a row were not made.
        """
        self._divides = not window.sum_reduced
        groups, parameters = self.update.groups, self.inner.parameters
        present = [float(parameter.grad is not None) for parameter in parameters]
        mine = (totals.weight, totals.loss, totals.samples, totals.nonfinite)
        shared = torch.tensor([*(float(value) for value in mine), *present], dtype=torch.float64)
        weight, loss, samples, nonfinite, *holders = groups.all_reduce(shared).tolist()
        # Each group has scaled by a reference of its own, and divided by its number of ranks: undone before the sum.
        groups.reduce_gradients(
            parameters, [count > 0 for count in holders], window.gradient_factor(1.0, self.inner.mean_over)
        )
        groups.average(self.update.statistics())
        # Asked before anything is judged: after an error between the groups there is nothing to judge.
        if not self.update.commit(step):
            return None
        return StepTotals(weight, loss, samples, nonfinite, totals.requests)

    def unscale(self, factor: float | Tensor, weight: float | Tensor) -> list[Tensor]:
        """Divide the gradient by the weight, whatever the factor of one group alone: groups can be added as plain sums only."""
        return self.inner.unscale(1.0 / float(weight) if weight and self._divides else 1.0, weight)

    # What the groups change nothing of

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters that the optimizer updates."""
        return self.inner.parameters

    def begin(self, *, first: bool) -> None:
        """See `GradientReduction.begin`."""
        self.inner.begin(first=first)

    def context(self, *, last: bool) -> AbstractContextManager[object]:
        """See `GradientReduction.context`."""
        return self.inner.context(last=last)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """See `GradientReduction.backward`."""
        self.inner.backward(loss, last=last)

    def complete(self) -> None:
        """See `GradientReduction.complete`."""
        self.inner.complete()

    def without_gradient(self, trained: set[int]) -> list[str]:
        """See `GradientReduction.without_gradient`."""
        return self.inner.without_gradient(trained)

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """See `GradientReduction.norm`."""
        return self.inner.norm(gradients)

    def clip(self, norm: Tensor, max_norm: float | None, max_value: float | None) -> None:
        """See `GradientReduction.clip`."""
        self.inner.clip(norm, max_norm, max_value)

    def apply(self, step: int) -> None:
        """See `GradientReduction.apply`."""
        self.inner.apply(step)

    def zero(self) -> None:
        """See `GradientReduction.zero`."""
        self.inner.zero()

    def nonfinite(self) -> list[str]:
        """See `GradientReduction.nonfinite`."""
        return self.inner.nonfinite()

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """See `GradientReduction.named_gradients`."""
        return self.inner.named_gradients()

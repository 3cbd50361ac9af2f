"""How the gradient of an update is made complete, measured, clipped and applied: what one stack does otherwise than another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from danling.distributed import StepTotals
from danling.utils.protocols import ReductionDomain, SteppedOptimizer

from .gradients import (
    average_gradients,
    clip_by_norm,
    clip_by_value,
    gradients_of,
    nonfinite_parameters,
    scale_gradients,
    total_norm,
)
from .window import Window

NamedParameters = Callable[[], Iterable[tuple[str, nn.Parameter]]]
"""Returns the names, free of wrapper prefixes, and parameters of model and criterion."""

_NO_CONTEXT: AbstractContextManager[object] = nullcontext()


class GradientReduction(Protocol):
    """What an update asks of a stack, in the order in which it asks. Called on all ranks, unless a method says otherwise.

    The window has scaled each loss by its weight, so that the gradient is a weighted sum. It is divided once, in `unscale`.

    Attributes:
        optimizer: The optimizer that the update steps.
        mean_over: Number of ranks over which the reduction takes a mean; 1 where it takes a sum.
    """

    optimizer: Any
    mean_over: int

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters that the optimizer updates; the same list as long as no group is added to the optimizer."""

    def begin(self, *, first: bool) -> None:
        """Do what has to be done before the first forward of an update; `first` is the first update of the run in this process."""

    def context(self, *, last: bool) -> AbstractContextManager[object]:
        """Return the context of forward and backward of a micro-batch; `last` is the one on which gradients are reduced."""

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Back-propagate a loss that is scaled already."""

    def complete(self) -> None:
        """Finish the reduction over the ranks of what the backward has left."""

    def agree(self, totals: StepTotals, window: Window, step: int) -> StepTotals | None:
        """Return the totals of all that the gradient is summed over, `None` where the update must not be made and was taken back.

        Args:
            totals: Weight, loss, samples and health of the window over the ranks of the optimizer domain.
            window: The open window.
            step: Number of the update, for messages.
        """

    def without_gradient(self, trained: set[int]) -> list[str]:
        """Return the names of parameters without a gradient on this rank; called before the first update is applied.

        Args:
            trained: `id` of every parameter that the optimizer updates.
        """

    def unscale(self, factor: float | Tensor, weight: float | Tensor) -> list[Tensor]:
        """Multiply the gradient by a factor, take the scale of float16 out of it, and return what this rank holds of it.

        Args:
            factor: What makes the gradient the weighted mean.
            weight: Global weight of the window; a window without any has no gradient.
        """

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the 2-norm of the whole gradient, 0-dim; the same on all ranks. `gradients` is what `unscale` returned."""

    def clip(self, norm: Tensor, max_norm: float | None, max_value: float | None) -> None:
        """Clip by norm, then by value; `None` leaves that out. `norm` is the 2-norm of the whole gradient, 0-dim."""

    def apply(self, step: int) -> None:
        """Update the weights; `step` is the number of the update, for messages."""

    def zero(self) -> None:
        """Drop the gradient of the window, whether it was applied or not."""

    def nonfinite(self) -> list[str]:
        """Return the names of the first parameters whose gradient is not finite."""

    # What an update that is made again asks for

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what this rank holds of the gradient, by name."""


class LocalReduction:
    """The gradient of one process, or of ranks that somebody else reduces.

    Args:
        optimizer: The optimizer.
        named_parameters: Names and parameters of model and criterion.
        scaler: The gradient scaler of float16.
    """

    def __init__(
        self, optimizer: SteppedOptimizer, named_parameters: NamedParameters, scaler: torch.amp.GradScaler | None = None
    ) -> None:
        self.optimizer = optimizer
        self.named_parameters = named_parameters
        self.scaler = scaler
        self.stepped: Any = optimizer
        """What is stepped: the optimizer, or what a stack has made of it."""
        self.mean_over = 1
        self._list_parameters()
        own = getattr(getattr(optimizer, "zero_grad", None), "__func__", None)
        self._zeroes_plainly = own is torch.optim.Optimizer.zero_grad

    def _list_parameters(self) -> None:
        groups = self.optimizer.param_groups
        self._group_sizes = [len(group["params"]) for group in groups]
        self._parameters: list[nn.Parameter] = [parameter for group in groups for parameter in group["params"]]
        owned = {id(parameter) for parameter in self._parameters}
        # They get a gradient, which nobody applies and which must not pile up.
        self._unowned = [p for _, p in self.named_parameters() if p.requires_grad and id(p) not in owned]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters that the optimizer updates; groups may be added while training goes on."""
        for group, size in zip(self.optimizer.param_groups, self._group_sizes):
            if len(group["params"]) != size:
                self._list_parameters()
                break
        else:
            if len(self.optimizer.param_groups) != len(self._group_sizes):
                self._list_parameters()
        return self._parameters

    def begin(self, *, first: bool) -> None:
        """Nothing has to be done."""

    def context(self, *, last: bool) -> AbstractContextManager[object]:
        """Return an empty context."""
        return _NO_CONTEXT

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Back-propagate a loss that is scaled already."""
        loss.backward()  # type: ignore[no-untyped-call]

    def complete(self) -> None:
        """Nothing is left to be reduced."""

    def agree(self, totals: StepTotals, window: Window, step: int) -> StepTotals | None:
        """Return the totals as they are: there is nobody else."""
        return totals

    def without_gradient(self, trained: set[int]) -> list[str]:
        """Return the names of trained parameters that have no gradient on this rank."""
        return [n for n, p in self.named_parameters() if p.requires_grad and p.grad is None and id(p) in trained]

    def held(self) -> list[Tensor]:
        """Return what this rank holds of the gradient: the tensors that are scaled and clipped in place."""
        return gradients_of(self.parameters)

    def unscale(self, factor: float | Tensor, weight: float | Tensor) -> list[Tensor]:
        """Multiply the gradient by a factor and take the scale of float16 out of it; see `GradientReduction.unscale`."""
        # A window of padding or ignored targets has no gradient, and is not made: it must not count as unscaled.
        if self.scaler is not None and weight:
            self.scaler.unscale_(self.stepped)
        gradients = self.held()
        scale_gradients(gradients, factor)
        return gradients

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the 2-norm of the gradients, 0-dim."""
        return total_norm(gradients)

    def clip(self, norm: Tensor, max_norm: float | None, max_value: float | None) -> None:
        """Clip by norm, then by value."""
        if max_norm is not None:
            clip_by_norm(self.held, max_norm, norm)
        if max_value is not None:
            clip_by_value(self.held(), max_value)

    def apply(self, step: int) -> None:
        """Step the optimizer; in float16 through the scaler, which leaves out a step that is not finite."""
        if self.scaler is not None:
            self.scaler.step(self.stepped)
        else:
            self.stepped.step()

    def zero(self) -> None:
        """Drop the gradients, also those of parameters that the optimizer does not have."""
        if self._zeroes_plainly:
            # What it does, without its entry in a profile, which costs as much as a small layer. A group that was added in this update
            # has no gradient yet.
            for parameter in self._parameters:
                parameter.grad = None
        else:
            self.optimizer.zero_grad()
        for parameter in self._unowned:
            parameter.grad = None

    def nonfinite(self) -> list[str]:
        """Return the names of the first parameters whose gradient is not finite."""
        return nonfinite_parameters(self.named_parameters())

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the gradients by name, also of parameters that nobody but the optimizer has."""
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        others = (p for p in self.parameters if id(p) not in names)
        for parameter in (*(p for _, p in self.named_parameters()), *others):
            if parameter.grad is not None:
                yield names.setdefault(id(parameter), f"optimizer.{len(names)}"), parameter.grad


class DDPReduction(LocalReduction):
    """The gradient of a model in DistributedDataParallel, which takes the mean over the ranks in the last backward of a window.

    Args:
        optimizer: The optimizer.
        named_parameters: Names and parameters of model and criterion.
        scaler: The gradient scaler of float16.
        model: The wrapped model.
        domain: The ranks.
        unreduced: Returns what the backward does not reduce: the parameters of the criterion, which is not wrapped; all of them where
            memory may run out in the backward, so that it must not communicate.
    """

    def __init__(
        self,
        optimizer: SteppedOptimizer,
        named_parameters: NamedParameters,
        scaler: torch.amp.GradScaler | None = None,
        *,
        model: DistributedDataParallel,
        domain: ReductionDomain,
        unreduced: Callable[[], Sequence[Tensor]],
    ) -> None:
        super().__init__(optimizer, named_parameters, scaler)
        self.model = model
        self.domain = domain
        self.mean_over = domain.size
        self.unreduced = unreduced

    def context(self, *, last: bool) -> AbstractContextManager[object]:
        """Return the context in which gradients stay on this rank, but for the last micro-batch."""
        return _NO_CONTEXT if last else self.model.no_sync()

    def complete(self) -> None:
        """Average what the backward has not reduced."""
        average_gradients([parameter for parameter in self.unreduced() if parameter.requires_grad], self.domain)

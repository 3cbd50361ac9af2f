"""How gradients are added, measured, clipped and applied: what one stack does otherwise than another, and the arithmetic they share."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from ctypes import c_float
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from danling.distributed import UNUSED_PARAMETER, ReplicaDriftError, StepTotals
from danling.utils.tensors import bucketed, flattened

from .precision import NO_CONTEXT

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner


logger = logging.getLogger("danling")


class GradientReduction:
    """The gradient of one process, or of ranks whose gradient another part reduces; the base of what other stacks do.

    An update calls these methods on all ranks, in this order. The window has scaled each loss by its weight, so that the gradient is a
    weighted sum. It is divided once, in `unscale`.

    Attributes:
        optimizer: The optimizer that the update steps.
        stepped: The optimizer, or a stack's replacement for it.
        scaler: The gradient scaler of float16, else `None`.
        mean_over: Number of ranks over which the reduction takes a mean; 1 where it takes a sum.
    """

    keeps_gradients = True
    """Whether the gradients of a window add up in the parameters' `grad`; else the reduction takes them from there."""

    def __init__(self, runner: TorchRunner) -> None:
        self.runner = runner
        self.optimizer: Any = runner.optimizer
        self.stepped: Any = runner.optimizer
        self.scaler: torch.amp.GradScaler | None = runner.precision.scaler
        self.mean_over = 1
        self._list_parameters()
        own = getattr(getattr(self.optimizer, "zero_grad", None), "__func__", None)
        self._zeroes_plainly = own is torch.optim.Optimizer.zero_grad

    def _list_parameters(self) -> None:
        groups = self.optimizer.param_groups
        self._group_sizes = [len(group["params"]) for group in groups]
        self._parameters: list[nn.Parameter] = [
            parameter for group in groups for parameter in group["params"]
        ]
        owned = {id(parameter) for parameter in self._parameters}
        # They get a gradient that is not applied and must not pile up.
        self._unowned = [
            p for _, p in self.runner.named_parameters() if p.requires_grad and id(p) not in owned
        ]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters that the optimizer updates; the same list as long as no group is added to the optimizer."""
        groups, sizes = self.optimizer.param_groups, self._group_sizes
        # A loop and no comprehension: this is read several times in an update, most of which have one group.
        if len(groups) != len(sizes):
            self._list_parameters()
            return self._parameters
        for group, size in zip(groups, sizes):
            if len(group["params"]) != size:
                self._list_parameters()
                break
        return self._parameters

    @property
    def kept_parameters(self) -> list[nn.Parameter]:
        """Parameters in whose `grad` the gradients of a window add up, where `keeps_gradients`."""
        return self.parameters

    def begin(self) -> None:
        """Do what has to be done before the first forward of an update."""

    def context(self, *, last: bool) -> AbstractContextManager[object]:
        """Return the context of forward and backward of a micro-batch; `last` is the one on which gradients are reduced."""
        return NO_CONTEXT

    def communication(self, *, last: bool) -> AbstractContextManager[object]:
        """Return what of the context concerns the ranks; a program may enter the whole context within it."""
        return self.context(last=last)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Back-propagate a loss that is scaled already."""
        loss.backward()  # type: ignore[no-untyped-call]

    def check_backward(self) -> None:
        """Refuse a window whose backwards were not those of the other ranks; called before the collective of the update."""

    def complete(self) -> None:
        """Finish the reduction over the ranks of what the backward has left."""

    def agree(self, totals: StepTotals) -> StepTotals | None:
        """Return the totals of all that the gradient is summed over, `None` where the update must not be made and was taken back.

        Args:
            totals: Weight, loss, samples and health of the window over the ranks of the optimizer domain.
        """
        return totals

    def held(self) -> list[Tensor]:
        """Return this rank's part of the gradient: the tensors that are scaled and clipped in place; of a sparse one its values."""
        found = []
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.is_sparse:
                # Without an index twice, the norm of the values is that of the gradient.
                parameter.grad = gradient.coalesce()
                gradient = parameter.grad._values()
            found.append(gradient)
        return found

    def unscale(self, factor: float | Tensor, weight: float | Tensor) -> list[Tensor]:
        """Multiply the gradient by a factor, take the scale of float16 out of it, and return this rank's part of it.

        Args:
            factor: What makes the gradient the weighted mean.
            weight: Global weight of the window; a window without any has no gradient, and must not count as unscaled.
        """
        if self.scaler is not None and (isinstance(weight, Tensor) or weight):
            self.scaler.unscale_(self.stepped)
        gradients = self.held()
        scale_gradients(gradients, factor)
        return gradients

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the 2-norm of the whole gradient, 0-dim; the same on all ranks. `gradients` is what `unscale` returned."""
        return total_norm(gradients)

    def clip(self, norm: Tensor, max_norm: float | None, max_value: float | None) -> None:
        """Clip by norm, then by value, as torch does; `None` leaves that out. `norm` is the 2-norm of the whole gradient, 0-dim."""
        # Below, the coefficient is 1 however it is rounded.
        if max_norm is not None and (not norm.is_cpu or norm.item() > 0.999 * max_norm):
            gradients, coefficient = self.held(), clip_coefficient(max_norm, norm)
            # Offloaded gradients are in the memory of the host, and their norm is on the accelerator.
            if gradients and _are_alike((*gradients, norm)):
                torch._foreach_mul_(gradients, coefficient)
            else:
                # As a tensor it is twice as fast as a number, of which foreach makes a tensor for each gradient; a number is not rounded
                # first.
                scale_gradients(gradients, coefficient.item() if norm.is_cpu else coefficient)
        if max_value is not None and (gradients := self.held()):
            torch._foreach_clamp_min_(gradients, -max_value)
            torch._foreach_clamp_max_(gradients, max_value)

    def apply(self) -> None:
        """Update the weights; in float16 through the scaler, unless an update has asked it about the gradient, for which a device waits."""
        if self.scaler is not None and not self.scaler._per_optimizer_states:
            self.scaler.step(self.stepped)
        else:
            self.stepped.step()

    def zero(self) -> None:
        """Drop the gradient of the window, whether it was applied or not, also of parameters that the optimizer does not have."""
        if self._zeroes_plainly:
            # What it does, without its entry in a profile, which costs as much as a small layer. A group that was added in this update
            # has no gradient yet.
            for parameter in self._parameters:
                parameter.grad = None
        else:
            self.optimizer.zero_grad()
        for parameter in self._unowned:
            parameter.grad = None

    def drop_open(self) -> None:
        """Drop what the micro-batches of an update that is left half-way have put elsewhere than into `grad`. No communication."""

    # What errors, warnings and replays ask for

    def without_gradient(self, trained: set[int]) -> list[str]:
        """Return the names of parameters without a gradient on this rank; called before the first update is applied.

        Args:
            trained: `id` of every parameter that the optimizer updates.
        """
        named = self.runner.named_parameters()
        return [
            name for name, p in named if p.requires_grad and p.grad is None and id(p) in trained
        ]

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's part of each gradient, by name."""
        names = {id(parameter): name for name, parameter in self.runner.named_parameters()}
        others = (p for p in self.parameters if id(p) not in names)
        for parameter in (*(p for _, p in self.runner.named_parameters()), *others):
            if parameter.grad is not None:
                yield names.setdefault(id(parameter), f"optimizer.{len(names)}"), parameter.grad


class DDPReduction(GradientReduction):
    """The gradient of a model in DistributedDataParallel, which takes the mean over the ranks in the last backward of a window.

    Args:
        runner: The runner.
        averages: Whose gradients the wrapper leaves to `complete`: those of the criterion's parameters, of the optimizer's, or all.
    """

    def __init__(
        self, runner: TorchRunner, *, averages: Literal["criterion", "optimizer", "all"]
    ) -> None:
        super().__init__(runner)
        self.averages = averages
        self.model: Any = runner.model
        self.domain = runner.data_domain
        self.mean_over = self.domain.size

    def context(self, *, last: bool) -> AbstractContextManager[object]:
        if last:
            return NO_CONTEXT
        self.check_accumulates()
        context: AbstractContextManager[object] = self.model.no_sync()
        return context

    def check_accumulates(self) -> None:
        """Refuse several micro-batches with a wrapper that cannot add them up."""
        if self.averages == "criterion" and self.model.static_graph:
            raise ValueError(
                "Expected DistributedDataParallel without a static graph in an update of several micro-batches, which torch ends with an "
                "internal error. Received: static_graph=True from ddp_kwargs. Leave it out, or set accum_steps=1."
            )

    def check_backward(self) -> None:
        """Refuse an update in which the wrapper could not reduce all gradients, before this rank goes on to another collective.

        Ranks that have used other parameters wait in reductions that this rank has not begun. Its next collective would meet them: with
        numbers of another meaning, or of another size, which ends a process in native code.
        """
        if not isinstance(self.model, DistributedDataParallel):
            return
        try:
            self.model.reducer._check_reducer_finalized()
        except RuntimeError as error:
            runner = self.runner
            raise ReplicaDriftError(
                "Expected a gradient for every trained parameter in the last micro-batch of an update. Received in update "
                f"{runner.state.train.global_step + 1}: none for some of them on rank {runner.rank}; the error of torch above lists "
                f"them. {UNUSED_PARAMETER}"
            ) from error

    def drop_open(self) -> None:
        """Refuse to repeat an update whose last backward an exception has ended: the wrapper waits for the gradients that it lacks."""
        if not isinstance(self.model, DistributedDataParallel):
            return
        try:
            self.model.reducer._check_reducer_finalized()
        except RuntimeError as error:
            raise RuntimeError(
                "An exception has ended the backward in which DistributedDataParallel reduces the gradients of update "
                f"{self.runner.state.train.global_step + 1}. It cannot repeat that backward. Construct the runner again with "
                "auto_resume=true."
            ) from error

    def complete(self) -> None:
        """Average what the wrapper does not: gradients of the criterion's parameters, of the optimizer's, or all.

        A gradient that some ranks lack is zero there; one that all lack stays away.
        """
        runner = self.runner
        if self.averages == "optimizer":
            left = self.parameters
        elif self.averages == "all":
            left = [parameter for _, parameter in runner.named_parameters()]
        else:
            criterion = runner.criterion
            left = list(criterion.parameters()) if isinstance(criterion, nn.Module) else []
        parameters = [parameter for parameter in left if parameter.requires_grad]
        if not parameters or self.domain.size == 1:
            return
        if any(p.grad is not None and p.grad.is_sparse for p in parameters):
            raise ValueError(
                "Expected dense gradients to average in one piece. Received: a sparse one. Set sparse=False in the embedding."
            )
        # The ranks must reduce the same tensors. A gradient of zeros where all lack one would let momentum and decay move the weight.
        present = torch.tensor([float(p.grad is not None) for p in parameters], dtype=torch.float64)
        counts = self.domain.all_reduce(present).tolist()
        for bucket in bucketed([p for p, count in zip(parameters, counts) if count]):
            pieces = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
            flat = self.domain.all_reduce(flattened(pieces)) / self.domain.size
            for parameter, piece, mean in zip(
                bucket, pieces, torch.split(flat, [piece.numel() for piece in pieces])
            ):
                parameter.grad = mean.view_as(piece).clone()


# Arithmetic of gradients


def scale_gradients(gradients: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiply gradients in place; a factor of exactly 1.0 costs nothing.

    Args:
        gradients: Gradients of any shape, dtype and device.
        factor: A float, or a 0-dim tensor on any device: gradients that are offloaded are in the memory of the host, and their factor
            is computed on the accelerator.
    """
    if not gradients or (isinstance(factor, float) and factor == 1.0):
        return
    if isinstance(factor, Tensor):
        # foreach takes one dtype and device for the factor, and it must not promote the gradients.
        left = list(gradients)
        while left:
            dtype, device, on_host = left[0].dtype, left[0].device, left[0].is_cpu
            # `is_cpu` instead of devices, whose comparison takes four times as long: a process has one accelerator.
            alike = [
                gradient
                for gradient in left
                if gradient.dtype is dtype and gradient.is_cpu is on_host
            ]
            torch._foreach_mul_(alike, factor.to(device=device, dtype=dtype))
            if len(alike) == len(left):
                break
            left = [
                gradient
                for gradient in left
                if gradient.dtype is not dtype or gradient.is_cpu is not on_host
            ]
    else:
        torch._foreach_mul_(list(gradients), factor)


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of all gradients together, 0-dim: bit for bit that of `torch.nn.utils.get_total_norm`.

    Args:
        gradients: Plain tensors of any shape. Those of one dtype and device are not grouped by these first, which for a small
            model takes longer than the norm.
    """
    if _are_alike(gradients):
        norm: Tensor = torch.linalg.vector_norm(
            torch.stack(torch._foreach_norm(list(gradients), 2.0)), 2.0
        )
    else:
        norm = nn.utils.get_total_norm(gradients)
    # Only gradients that have a graph of their own have a norm with one: without it, entering `no_grad` costs half as much as the norm.
    return norm.detach() if norm.requires_grad else norm


def _are_alike(gradients: Sequence[Tensor]) -> bool:
    """Whether there are gradients, all of one dtype and device."""
    if not gradients:
        return False
    dtype, on_host = gradients[0].dtype, gradients[0].is_cpu
    for gradient in gradients:
        if gradient.dtype is not dtype or gradient.is_cpu is not on_host:
            return False
    # Devices take four times as long to compare.
    return on_host or len({gradient.device for gradient in gradients}) == 1


def clip_coefficient(max_norm: float, total_norm: Tensor) -> Tensor:
    """Return what gradients are multiplied with so that their norm is at most `max_norm`: torch's rule, 0-dim, at most 1.

    Bit for bit what `torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)` gives.
    """
    if total_norm.is_cpu and total_norm.dtype is torch.float32:
        # The four operations of torch take 20 us between the others of an update. Each result is rounded as torch rounds it,
        # and a double has enough digits for that to be exact.
        inverse = c_float(1.0 / c_float(total_norm.item() + _EPSILON).value).value
        coefficient = c_float(inverse * c_float(max_norm).value).value
        return torch.scalar_tensor(min(coefficient, 1.0), dtype=torch.float32, device="cpu")
    return torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)


_EPSILON = c_float(1e-6).value
"""What torch adds to a norm, in float32."""

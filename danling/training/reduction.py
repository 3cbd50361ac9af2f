"""How gradients are added, measured, clipped and applied: what one stack does otherwise than another, and the arithmetic they share."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from danling.distributed import StepTotals
from danling.utils.protocols import ReductionDomain, SteppedOptimizer
from danling.utils.tensors import bucketed, flattened, local_part

if TYPE_CHECKING:
    from .update import Window

NamedParameters = Callable[[], Iterable[tuple[str, nn.Parameter]]]
"""Returns the names, free of wrapper prefixes, and parameters of model and criterion."""

_NO_CONTEXT: AbstractContextManager[object] = nullcontext()


class GradientReduction(Protocol):
    """What an update asks of a stack, in the order in which it asks. Called on all ranks, unless a method says otherwise.

    The window has scaled each loss by its weight, so that the gradient is a weighted sum. It is divided once, in `unscale`.

    Attributes:
        optimizer: The optimizer that the update steps.
        scaler: The gradient scaler of float16, else `None`.
        mean_over: Number of ranks over which the reduction takes a mean; 1 where it takes a sum.
    """

    optimizer: Any
    scaler: torch.amp.GradScaler | None
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
        """Multiply the gradient by a factor, take the scale of float16 out of it, and return this rank's part of it.

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
        """Yield this rank's part of each gradient, by name."""


class LocalReduction(GradientReduction):
    """The gradient of one process, or of ranks whose gradient another part reduces.

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
        """The optimizer, or a stack's replacement for it."""
        self.mean_over = 1
        self._list_parameters()
        own = getattr(getattr(optimizer, "zero_grad", None), "__func__", None)
        self._zeroes_plainly = own is torch.optim.Optimizer.zero_grad

    def _list_parameters(self) -> None:
        groups = self.optimizer.param_groups
        self._group_sizes = [len(group["params"]) for group in groups]
        self._parameters: list[nn.Parameter] = [parameter for group in groups for parameter in group["params"]]
        owned = {id(parameter) for parameter in self._parameters}
        # They get a gradient that is not applied and must not pile up.
        self._unowned = [p for _, p in self.named_parameters() if p.requires_grad and id(p) not in owned]

    @property
    def parameters(self) -> list[nn.Parameter]:
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
        return _NO_CONTEXT

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def complete(self) -> None:
        """Nothing is left to be reduced."""

    def agree(self, totals: StepTotals, window: Window, step: int) -> StepTotals | None:
        return totals

    def without_gradient(self, trained: set[int]) -> list[str]:
        return [n for n, p in self.named_parameters() if p.requires_grad and p.grad is None and id(p) in trained]

    def held(self) -> list[Tensor]:
        """Return this rank's part of the gradient: the tensors that are scaled and clipped in place."""
        return gradients_of(self.parameters)

    def unscale(self, factor: float | Tensor, weight: float | Tensor) -> list[Tensor]:
        # A window of padding or ignored targets has no gradient, and is not made: it must not count as unscaled.
        if self.scaler is not None and weight:
            self.scaler.unscale_(self.stepped)
        gradients = self.held()
        scale_gradients(gradients, factor)
        return gradients

    def norm(self, gradients: list[Tensor]) -> Tensor:
        return total_norm(gradients)

    def clip(self, norm: Tensor, max_norm: float | None, max_value: float | None) -> None:
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
        return nonfinite_parameters(self.named_parameters())

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
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
        return _NO_CONTEXT if last else self.model.no_sync()

    def complete(self) -> None:
        average_gradients([parameter for parameter in self.unreduced() if parameter.requires_grad], self.domain)


# Arithmetic of gradients


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the gradients that exist; of a sparse one its values, which it shares."""
    found = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            # Without an index twice, the norm of the values is that of the gradient.
            parameter.grad = gradient.coalesce()
            gradient = parameter.grad._values()
        if gradient is not None:
            found.append(gradient)
    return found


def average_gradients(parameters: Sequence[Tensor], domain: ReductionDomain) -> None:
    """Average gradients over a domain, as DistributedDataParallel does. Call on all its members.

    Args:
        parameters: The same on all members; one without a gradient counts as zero, unless no member has one.
        domain: The ranks.

    Raises:
        ValueError: If a gradient is sparse.
    """
    if not parameters or domain.size == 1:
        return
    if any(p.grad is not None and p.grad.is_sparse for p in parameters):
        raise ValueError(
            "Expected dense gradients to average in one piece. Received: a sparse one. Set sparse=False in the embedding."
        )
    present = domain.all_reduce(torch.tensor([float(p.grad is not None) for p in parameters], dtype=torch.float64))
    for bucket in bucketed([p for p, count in zip(parameters, present.tolist()) if count]):
        pieces = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        flat = domain.all_reduce(flattened(pieces)) / domain.size
        for parameter, piece, mean in zip(bucket, pieces, torch.split(flat, [piece.numel() for piece in pieces])):
            parameter.grad = mean.view_as(piece).clone()


def scale_gradients(gradients: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiply gradients in place; a factor of exactly 1.0 costs nothing.

    Args:
        gradients: Gradients of any shape and dtype.
        factor: A float, or a 0-dim tensor on the gradients' device.
    """
    if not gradients or (isinstance(factor, float) and factor == 1.0):
        return
    if isinstance(factor, Tensor):
        # foreach takes one dtype for the factor, and it must not promote the gradients.
        for dtype in {gradient.dtype for gradient in gradients}:
            torch._foreach_mul_([g for g in gradients if g.dtype == dtype], factor.to(dtype))
        return
    torch._foreach_mul_(list(gradients), factor)


@torch.no_grad()
def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of all gradients together, 0-dim: bit for bit that of `torch.nn.utils.get_total_norm`.

    Args:
        gradients: Plain tensors of any shape. Those of one dtype and device are not grouped by these first, which for a small
            model takes longer than the norm.
    """
    kinds = set()
    for gradient in gradients:
        kinds.add((gradient.dtype, gradient.device))
    if len(kinds) != 1:
        return nn.utils.get_total_norm(gradients)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(gradients), 2.0)), 2.0)
    return norm


def clip_by_norm(held: Callable[[], Sequence[Tensor]], max_norm: float, norm: Tensor) -> None:
    """Scale the gradients so that their norm is at most `max_norm`, as `torch.nn.utils.clip_grad_norm_` does: bit for bit
    where they are of one dtype; on the CPU the factor is applied to others without rounding it to theirs.

    Args:
        held: Returns the gradients that are scaled; called where they have to be.
        max_norm: The largest norm.
        norm: Norm of all gradients, 0-dim.
    """
    if norm.device.type != "cpu":
        scale_gradients(held(), clip_coefficient(max_norm, norm))
    elif norm.item() > 0.999 * max_norm:  # below, the coefficient is 1 however it is rounded
        gradients, coefficient = held(), clip_coefficient(max_norm, norm)
        # As a tensor it is twice as fast as a number: foreach makes a tensor of a number for each gradient.
        alike = all(gradient.dtype == norm.dtype for gradient in gradients)
        scale_gradients(gradients, coefficient if alike else coefficient.item())


def clip_by_value(gradients: Sequence[Tensor], max_value: float) -> None:
    """Clamp every element into `[-max_value, max_value]`, in place, as `torch.nn.utils.clip_grad_value_` does."""
    if gradients:
        torch._foreach_clamp_min_(list(gradients), -max_value)
        torch._foreach_clamp_max_(list(gradients), max_value)


def clip_coefficient(max_norm: float, total_norm: Tensor) -> Tensor:
    """Return what gradients are multiplied with so that their norm is at most `max_norm`: torch's rule, 0-dim, at most 1.

    Bit for bit what `torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)` gives.
    """
    if total_norm.device.type == "cpu" and total_norm.dtype == torch.float32:
        # The four operations of torch take 20 us between the others of an update. Each result is rounded as torch rounds it,
        # and a double has enough digits for that to be exact.
        inverse = _single(1.0 / _single(total_norm.item() + _single(1e-6)))
        return torch.scalar_tensor(min(_single(inverse * _single(max_norm)), 1.0), dtype=torch.float32, device="cpu")
    return torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)


def _single(value: float) -> float:
    """Round to float32; values that are too large become infinite."""
    return ctypes.c_float(value).value


def nonfinite_parameters(named_parameters: Iterable[tuple[str, nn.Parameter]], limit: int = 5) -> list[str]:
    """Return the names of the first parameters whose gradient has a NaN or an infinity in this rank's part.

    Args:
        named_parameters: Names and parameters in model order.
        limit: How many names at most.
    """
    names = []
    for name, parameter in named_parameters:
        if parameter.grad is not None and not bool(torch.isfinite(local_part(parameter.grad)).all()):
            names.append(name)
            if len(names) == limit:
                break
    return names


def normalization_statistics(model: nn.Module) -> list[Tensor]:
    """Return the running means and variances of normalisation in a model, which every forward changes."""
    found = []
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            found += [buffer for buffer in (module.running_mean, module.running_var) if buffer is not None]
    return found


# Precision

_DTYPES = {
    "fp16": torch.float16,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}
_FULL = (None, "fp32", "float32", "none", "no")


class Precision:
    """Forward context and gradient scaler of one precision.

    Attributes:
        dtype: Autocast dtype, `None` for full precision.
        autocast: Returns the context of a forward.
        scaler: `torch.amp.GradScaler` for float16, else `None`.

    Args:
        name: `"fp16"`, `"bf16"`, or `None`.
        device: Device of the forward.

    Raises:
        ValueError: If the name is unknown.
    """

    def __init__(self, name: str | None, device: torch.device) -> None:
        key = name.lower() if isinstance(name, str) else name
        if key not in _FULL and key not in _DTYPES:
            raise ValueError(f"Expected precision to be 'fp16', 'bf16' or none. Received: precision={name!r}.")
        self.device = device
        self.dtype = _DTYPES.get(key) if key is not None else None
        self.autocast: Callable[[], AbstractContextManager[object]] = nullcontext
        if self.dtype is not None:
            self.autocast = partial(torch.autocast, device.type, dtype=self.dtype)
        self.scaler = torch.amp.GradScaler(device.type) if self.dtype is torch.float16 else None

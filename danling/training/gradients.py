"""Norm, scaling, clipping and finiteness of the gradient of an update."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from danling.utils.protocols import ReductionDomain
from danling.utils.tensors import bucketed, flattened, local_part


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the gradients that exist; of a sparse one its values, which it shares."""
    found = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            found.append(_dense(parameter) if gradient.is_sparse else gradient)
    return found


def _dense(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    # Without an index twice, the norm of the values is that of the gradient.
    parameter.grad = parameter.grad.coalesce()
    return parameter.grad._values()


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
        _average_bucket(bucket, domain)


def _average_bucket(parameters: Sequence[Tensor], domain: ReductionDomain) -> None:
    pieces = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = domain.all_reduce(flattened(pieces)) / domain.size
    start = 0
    for parameter, piece in zip(parameters, pieces):
        parameter.grad = flat[start : start + piece.numel()].view_as(piece).clone()
        start += piece.numel()


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
    """Round to float32; what is too large becomes infinite."""
    return ctypes.c_float(value).value


def nonfinite_parameters(named_parameters: Iterable[tuple[str, nn.Parameter]], limit: int = 5) -> list[str]:
    """Return the names of the first parameters whose gradient has a NaN or an infinity in what this rank holds of it.

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

"""Copies of parameters over a mesh: which ranks hold the same, started equal, summed, and measured as one vector.

A parameter lies somewhere between two cases. As a DTensor it is divided over the axes that its placements shard, and copied over
the others; as a plain tensor it is copied over all axes but `pipeline`, whose ranks hold other parts of the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from danling.utils.tensors import bucketed, flattened, is_sharded, local_part, scatter, with_local_part

from .axes import axes_with
from .topology import Topology


def divided_axes(tensor: Tensor) -> tuple[str, ...]:
    """Return the axes over which a tensor is divided: none for a plain tensor."""
    if not is_sharded(tensor):
        return ()
    sharded: Any = tensor
    names = sharded.device_mesh.mesh_dim_names
    # Not `is_shard()`: it is false for the strided shards of FSDP over tensor parallelism.
    return tuple(n for n, p in zip(names, sharded.placements) if not p.is_replicate() and not p.is_partial())


def mesh_axes(tensor: Tensor) -> tuple[str, ...]:
    """Return the axes of the mesh of a DTensor; none for a plain tensor."""
    sharded: Any = tensor
    return tuple(sharded.device_mesh.mesh_dim_names) if is_sharded(tensor) else ()


@torch.no_grad()
def equalize(topology: Topology, tensors: Iterable[Tensor]) -> None:
    """Copy parameters or buffers from the first of the ranks that share them. Call on all ranks."""
    shared = topology.active(*axes_with(cuts_modules=False))

    def copied_over(tensor: Tensor) -> tuple[str, ...]:
        divided = divided_axes(tensor)
        return tuple(axis for axis in shared if axis not in divided)

    for bucket in bucketed((tensor for tensor in tensors if copied_over(tensor)), copied_over):
        locals_ = [local_part(tensor) for tensor in bucket]
        flat = flattened(locals_)
        flat = flat.to(torch.uint8) if flat.dtype is torch.bool else flat
        dist.broadcast(flat, group_src=0, group=topology.group(*copied_over(bucket[0])))
        scatter(flat, locals_)


class ParameterCopies:
    """The parameters of this rank, and the ranks that hold copies of them."""

    def __init__(self, topology: Topology, parameters: Iterable[nn.Parameter]) -> None:
        self.topology = topology
        self.parameters = list(parameters)
        self._copies = [self._copies_of(parameter) for parameter in self.parameters]
        trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        axes = self._axes_to_sum
        self._buckets = bucketed((parameter for parameter in trained if axes(parameter)), axes)

    def _copies_of(self, parameter: Tensor) -> int:
        axes = self.topology.axes
        return axes.world_size // axes.degree(*axes_with(cuts_modules=True), *divided_axes(parameter))

    def _axes_to_sum(self, parameter: Tensor) -> tuple[str, ...]:
        # FSDP sums over its own mesh, which is the one with `shard`.
        axes = mesh_axes(parameter)
        reduced = axes if "shard" in axes else ()
        return tuple(axis for axis in self.topology.active(*axes_with(sums_gradient=True)) if axis not in reduced)

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Complete the gradients: sum them over the ranks that saw other samples or positions. Call on all ranks.

        A parameter that got a gradient on some of the ranks gets the sum of these; one that got none keeps none.
        """
        self._complete_partial()
        for parameters in self._buckets:
            self._sum_bucket(self._axes_to_sum(parameters[0]), parameters)

    def _complete_partial(self) -> None:
        # Tensor parallelism may leave sums that are still to be made, such as those of norms between stretches of a sequence. They are
        # made together; a gradient that lies otherwise than its parameter for another reason is moved by itself.
        waiting: dict[Any, list[Any]] = {}
        for parameter in self.parameters:
            grad: Any = parameter.grad
            if grad is None or not is_sharded(grad) or not is_sharded(parameter) or not _differs(grad, parameter):
                continue
            dim = _open_sum(grad, parameter)
            if dim is None:
                parameter.grad = grad.redistribute(placements=_placements(parameter))
            else:
                waiting.setdefault((grad.device_mesh, dim, grad.dtype), []).append(parameter)
        for (mesh, dim, _), parameters in waiting.items():
            locals_ = [local_part(parameter.grad) for parameter in parameters]
            flat = flattened(locals_)
            dist.all_reduce(flat, group=mesh.get_group(dim))
            scatter(flat, locals_)
            for parameter, part in zip(parameters, locals_):
                parameter.grad = with_local_part(parameter, part)

    def _sum_bucket(self, axes: tuple[str, ...], parameters: list[nn.Parameter]) -> None:
        # How many ranks have a gradient travels with the gradients.
        present = torch.tensor([float(p.grad is not None) for p in parameters])
        pieces = [torch.zeros_like(local_part(p)) if p.grad is None else local_part(p.grad) for p in parameters]
        dtype, device = pieces[0].dtype, pieces[0].device
        flat = torch.cat([*(piece.reshape(-1) for piece in pieces), present.to(device=device, dtype=dtype)])
        dist.all_reduce(flat, group=self.topology.group(*axes))
        if any(p.grad is None for p in parameters):
            counts = flat[-len(parameters) :].tolist()
            for parameter, count in zip(parameters, counts):
                if parameter.grad is None and count:
                    parameter.grad = torch.zeros_like(parameter)
        scatter(flat, [piece if p.grad is None else local_part(p.grad) for p, piece in zip(parameters, pieces)])

    def gradients(self) -> list[Tensor]:
        """Return what this rank holds of the gradients that exist."""
        return [local_part(p.grad) for p in self.parameters if p.grad is not None]

    def gradient_norm(self) -> Tensor:
        """Return the 2-norm of the gradient of the whole model, 0-dim float64. Call on all ranks.

        Every rank adds the squares of what it holds, divided by the number of ranks that hold the same, in one collective over
        all of them; so no mixture of meshes matters, and a NaN on one rank is a NaN on all.
        """
        grads = [(local_part(p.grad), copies) for p, copies in zip(self.parameters, self._copies) if p.grad is not None]
        domain = self.topology.optimizer
        total = torch.zeros((), dtype=torch.float64, device=self.topology.device)
        if grads:
            norms = torch._foreach_norm([grad for grad, _ in grads])
            squares = torch.stack([norm.to(total.device, torch.float64) for norm in norms]).square_()
            shares = torch.tensor([1.0 / copies for _, copies in grads], dtype=torch.float64, device=total.device)
            total = (squares * shares).sum()
        return domain.all_reduce(total).sqrt()


def _placements(tensor: Any) -> object:
    return tensor.placements


def _differs(grad: Any, parameter: Any) -> bool:
    return bool(grad.placements != parameter.placements)


def _open_sum(grad: Any, parameter: Any) -> int | None:
    """Return the one mesh dimension along which a gradient is a sum still to be made, else `None`."""
    dims = [i for i, (own, wanted) in enumerate(zip(grad.placements, parameter.placements)) if own != wanted]
    if len(dims) != 1 or grad.device_mesh != parameter.device_mesh:
        return None
    own, wanted = grad.placements[dims[0]], parameter.placements[dims[0]]
    return dims[0] if own.is_partial("sum") and wanted.is_replicate() else None

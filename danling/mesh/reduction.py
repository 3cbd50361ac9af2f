"""The gradient of a model that is divided over a mesh, and the copies that its ranks hold of parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.amp.grad_scaler import OptState
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor.parallel import loss_parallel

from danling.data.sampler import part
from danling.distributed import Domain, StepTotals
from danling.training.canonical_sum import CanonicalSum, Tree, order_free_norm
from danling.training.precision import NO_CONTEXT
from danling.training.reduction import GradientReduction, scale_gradients
from danling.utils.devices import sent
from danling.utils.messages import listed
from danling.utils.tensors import (
    bucketed,
    flattened,
    has_strided_values,
    is_sharded,
    local_part,
    scatter,
    with_local_part,
)

from .axes import axes_with
from .fsdp import UseBesideForward, reshard, set_gradient_sync, sharded_modules
from .model_parts import is_meta
from .topology import Topology

if TYPE_CHECKING:
    from danling.runners.parallel_runner import ParallelRunner


def divided_axes(tensor: Tensor) -> tuple[str, ...]:
    """Return the axes over which a tensor is divided: none for a plain tensor."""
    if not is_sharded(tensor):
        return ()
    sharded: Any = tensor
    names = sharded.device_mesh.mesh_dim_names
    # Not `is_shard()`: it is false for the strided shards of FSDP over tensor parallelism.
    return tuple(
        n for n, p in zip(names, sharded.placements) if not p.is_replicate() and not p.is_partial()
    )


def mesh_axes(tensor: Tensor) -> tuple[str, ...]:
    """Return the axes of the mesh of a DTensor; none for a plain tensor."""
    sharded: Any = tensor
    return tuple(sharded.device_mesh.mesh_dim_names) if is_sharded(tensor) else ()


def copied_axes(topology: Topology, tensor: Tensor) -> tuple[str, ...]:
    """Return the axes whose ranks share a tensor, or this rank's part of it."""
    divided = divided_axes(tensor)
    return tuple(
        axis for axis in topology.active(*axes_with(cuts_modules=False)) if axis not in divided
    )


@torch.no_grad()
def equalize(topology: Topology, tensors: Iterable[Tensor]) -> None:
    """Copy parameters or buffers from the first of the ranks that share them. Call on all ranks."""

    def copied_over(tensor: Tensor) -> tuple[str, ...]:
        return copied_axes(topology, tensor)

    for bucket in bucketed((tensor for tensor in tensors if copied_over(tensor)), copied_over):
        _copy_first(topology.domain(*copied_over(bucket[0])), bucket)


@torch.no_grad()
def equalize_built(topology: Topology, model: nn.Module, *, before_cut: bool = False) -> None:
    """Copy a model that the ranks have built, and are about to divide, from the first of them. Call on all ranks.

    Each rank takes its shard, or its stage, of what it has built, and a rank that drew or loaded other values would add a part of another
    model.

    Args:
        topology: The mesh.
        model: The model, or a part of it. One on the meta device has no values yet.
        before_cut: Whether it is cut into stages next, not into shards.
    """
    if is_meta(model):
        return
    # Other classes of tensors, such as quantized ones, may have no values that can be copied one by one.
    tensors = [
        tensor
        for tensor in (*model.parameters(), *model.buffers())
        if has_strided_values(tensor)
        and type(local_part(tensor)).__torch_dispatch__ is Tensor.__torch_dispatch__
    ]
    if not before_cut:
        equalize(topology, tensors)
        return
    for bucket in bucketed(tensors):
        _copy_first(topology.domain(*axes_with(cuts_modules=True)), bucket)


def _copy_first(domain: Domain, bucket: Sequence[Tensor]) -> None:
    locals_ = [local_part(tensor) for tensor in bucket]
    flat = flattened(locals_)
    # As bytes, since a backend need not know the kind of numbers.
    domain.broadcast(flat.view(torch.uint8))
    scatter(flat, locals_)


def check_built_alike(topology: Topology, model: nn.Module, *, before_cut: bool) -> None:
    """Refuse a model that ranks have built with other tensors. Call on all ranks.

    Ranks of `expert` and the like may have built other parts.

    Args:
        topology: The mesh.
        model: The model as a whole.
        before_cut: Whether all stages have it as a whole.
    """
    named = (*model.named_parameters(), *model.named_buffers())
    own = [
        f"{name} {tuple(t.shape)} {'on the meta device' if t.is_meta else t.dtype}"
        for name, t in named
    ]
    axes = ("replicate", "shard", "context", *(axes_with(cuts_modules=True) if before_cut else ()))
    domain = topology.domain(*topology.active(*axes))
    # A digest first: the lists of many ranks with many experts take gigabytes.
    if len(set(domain.gather_objects(hashlib.sha256("\n".join(own).encode()).digest()))) == 1:
        return
    found = domain.gather_objects(own)
    for number, other in enumerate(found):
        if other != found[0]:
            here = next((text for text in found[0] if text not in other), "nothing more")
            there = next((text for text in other if text not in found[0]), "nothing more")
            raise ValueError(
                f"Expected one model on all ranks. Received: {here} on the first of them, {there} on number {number}. Build the same "
                "layers in __init__ on all ranks, on the same device."
            )


def _open_sum(grad: Any, parameter: Any) -> int | None:
    """Return the one mesh dimension along which a gradient is a sum still to be made, else `None`."""
    dims = [
        i
        for i, (own, wanted) in enumerate(zip(grad.placements, parameter.placements))
        if own != wanted
    ]
    if len(dims) != 1 or grad.device_mesh != parameter.device_mesh:
        return None
    own, wanted = grad.placements[dims[0]], parameter.placements[dims[0]]
    return dims[0] if own.is_partial("sum") and wanted.is_replicate() else None


def loss_context(topology: Topology) -> AbstractContextManager[object]:
    """Return the context of a loss of logits that tensor parallelism divides over the classes; other losses do not notice it."""
    return loss_parallel() if topology.degree("tensor") > 1 else nullcontext()


class MeshReduction(GradientReduction):
    """The gradient of a model that is divided over a mesh."""

    runner: ParallelRunner

    def __init__(self, runner: ParallelRunner) -> None:
        super().__init__(runner)
        self.topology = runner.topology
        self.model = runner.model
        syncs = self.topology.degree("shard") > 1 and runner.pipeline is None
        self.gradient_sync = runner.config.fsdp.gradient_sync if syncs else None
        self.order = runner.preparation.order
        holders = [
            holder for holder in (runner.model, runner.criterion) if isinstance(holder, nn.Module)
        ]
        self._has_buffers = any(next(holder.buffers(), None) is not None for holder in holders)
        self._noted: tuple[list[nn.Parameter], int] | None = None
        self._copies: dict[nn.Parameter, int] = {}
        self._buckets: list[list[nn.Parameter]] = []
        self._places: list[frozenset[int]] = []
        self._shared: list[float] = []
        self._shares = torch.empty(0)
        """The share of this rank in each of its gradients, on the device."""
        shards = (parameter for parameter in self.parameters if "shard" in divided_axes(parameter))
        UseBesideForward.watch(shards, is_canonical=not self.keeps_gradients)

    def begin(self) -> None:
        """Copy the buffers of the first rank to the others, as DistributedDataParallel does.

        Otherwise each rank would keep its own until the next save or evaluation, which would change the run.
        """
        if self._has_buffers:
            self.runner.broadcast_buffers()

    @property
    def copies(self) -> dict[nn.Parameter, int]:
        """The parameters that the optimizer updates, each once, with the number of ranks that have the same part of it."""
        parameters = self.parameters
        # Some may be unfrozen while training goes on.
        trained = sum(parameter.requires_grad for parameter in parameters)
        if self._noted is None or self._noted[0] is not parameters or self._noted[1] != trained:
            self._noted, own = (parameters, trained), dict.fromkeys(parameters)
            degrees, cut, axes = self.topology.axes, axes_with(cuts_modules=True), self._axes_to_sum
            self._copies = {
                p: degrees.world_size // degrees.degree(*cut, *divided_axes(p)) for p in own
            }
            self._places = [] if self.order is None else self.order.places_of(own)
            self._buckets = bucketed((p for p in own if p.requires_grad and axes(p)), axes)
        return self._copies

    def _axes_to_sum(self, parameter: Tensor) -> tuple[str, ...]:
        # FSDP sums over its own mesh, which is the one with `shard`.
        axes = mesh_axes(parameter)
        reduced = axes if "shard" in axes else ()
        return tuple(
            axis
            for axis in self.topology.active(*axes_with(sums_gradient=True))
            if axis not in reduced
        )

    def context(self, *, last: bool) -> AbstractContextManager[object]:
        """Tell FSDP2 whether to reduce the gradients of this micro-batch, and return the context of its loss."""
        self.communication(last=last)
        return loss_context(self.topology)

    def communication(self, *, last: bool) -> AbstractContextManager[object]:
        """Tell FSDP2 whether to reduce the gradients of this micro-batch."""
        if self.gradient_sync is not None:
            set_gradient_sync(self.model, self.gradient_sync, last=last)
        # Not the context of the loss: torch's cannot be entered within itself.
        return NO_CONTEXT

    def drop_open(self) -> None:
        """Drop what FSDP2 keeps of a forward or a backward that has not ended, and its sums of earlier micro-batches."""
        reshard(self.model)
        if self.order is not None:
            self.order.drop_open()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Back-propagate a loss that is scaled already; in a pipeline, whose schedule runs the backward, hand it on."""
        handed_on = self.runner._handed_on
        if handed_on is None:
            super().backward(loss, last=last)
        else:
            handed_on.append(loss)

    @torch.no_grad()
    def complete(self) -> None:
        """Sum the gradient over the ranks with other samples or positions, where the backward has not.

        A parameter that got a gradient on some of the ranks gets the sum of these; one that got none keeps none.
        """
        # Before the sums: a parameter that no rank has used must have no gradient that they count.
        self._complete_units()
        self._complete_partial(self.copies)
        for parameters in self._buckets:
            # How many ranks have a gradient travels with the gradients.
            present = torch.tensor([float(p.grad is not None) for p in parameters])
            pieces = [
                torch.zeros_like(local_part(p)) if p.grad is None else local_part(p.grad)
                for p in parameters
            ]
            dtype, device = pieces[0].dtype, pieces[0].device
            flat = torch.cat(
                [*(piece.reshape(-1) for piece in pieces), present.to(device=device, dtype=dtype)]
            )
            self.topology.domain(*self._axes_to_sum(parameters[0])).all_reduce(flat)
            if any(p.grad is None for p in parameters):
                # Only then: the host waits for the numbers.
                counts = flat[-len(parameters) :].tolist()
                for parameter, count in zip(parameters, counts):
                    if parameter.grad is None and count:
                        parameter.grad = torch.zeros_like(parameter)
            scatter(
                flat,
                [
                    piece if p.grad is None else local_part(p.grad)
                    for p, piece in zip(parameters, pieces)
                ],
            )

    def _complete_units(self) -> None:
        if self.order is not None and self.copies:
            self.order.complete(self._places)

    def _complete_partial(self, parameters: Iterable[nn.Parameter]) -> None:
        # Tensor parallelism may leave sums that are still to be made, such as those of norms between stretches of a sequence. They are
        # made together; a gradient that is placed differently for another reason is moved by itself.
        waiting: dict[Any, list[Any]] = {}
        sharded: list[Any] = [
            p for p in parameters if p.grad is not None and is_sharded(p.grad) and is_sharded(p)
        ]
        for parameter in sharded:
            grad = parameter.grad
            if grad.placements == parameter.placements:
                continue
            dim = _open_sum(grad, parameter)
            if dim is None:
                parameter.grad = grad.redistribute(placements=parameter.placements)
            else:
                waiting.setdefault((grad.device_mesh, dim, grad.dtype), []).append(parameter)
        for (mesh, dim, _), together in waiting.items():
            locals_ = [local_part(parameter.grad) for parameter in together]
            flat = flattened(locals_)
            dist.all_reduce(flat, group=mesh.get_group(dim))
            scatter(flat, locals_)
            for parameter, piece in zip(together, locals_):
                parameter.grad = with_local_part(parameter, piece)

    def held(self) -> list[Tensor]:
        return [local_part(p.grad) for p in self.copies if p.grad is not None]

    def unscale(self, factor: float | Tensor, weight: float | Tensor) -> list[Tensor]:
        gradients = self.held()
        if self.scaler is not None:
            # `get_scale` would wait for the device.
            scale = self.scaler.scale(
                torch.ones((), dtype=torch.float64, device=self.topology.device)
            )
            scale_gradients(gradients, scale.reciprocal())
        scale_gradients(gradients, factor)
        return gradients

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the 2-norm of the gradient of the whole model, 0-dim float64. Call on all ranks.

        Every rank adds the squares of its parts, divided by the number of ranks with the same part, in one collective over
        all of them; so no mixture of meshes matters, and a NaN on one rank is a NaN on all.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.topology.device)
        if held := self.held():
            shared = [
                1.0 / number
                for parameter, number in self.copies.items()
                if parameter.grad is not None
            ]
            squares = torch.stack(
                [n.to(total.device, torch.float64) for n in torch._foreach_norm(held)]
            ).square_()
            if self._shared != shared:
                # Once in a pass, and again where a parameter has a gradient for the first time.
                self._shared = shared
                self._shares = sent(torch.tensor(shared, dtype=torch.float64), total.device)
            total = (squares * self._shares).sum()
        norm = self.topology.optimizer.all_reduce(total).sqrt()
        if self.scaler is not None:
            self._record_overflow(self.scaler, norm)
        return norm

    def _record_overflow(self, scaler: torch.amp.GradScaler, norm: Tensor) -> None:
        # The scaler would look at the gradients of this rank only, and scales that differ would never meet again.
        scaler.scale(norm)  # the scale begins with the first loss, which other stages have
        scaler._per_optimizer_states[id(self.optimizer)] = {
            "stage": OptState.UNSCALED,
            "found_inf_per_device": {norm.device: (~torch.isfinite(norm)).float()},
        }


class CanonicalReduceScatter(ReduceScatter):
    """Takes the place of a reduce-scatter: all ranks exchange their micro-batches, and each adds its shard of them in tree order.

    The result comes with the last micro-batch of an update; before, it is zero.
    """

    def __init__(self, sums: CanonicalSum, parameters: dict[str, nn.Parameter]) -> None:
        self.sums = sums
        self.parameters = parameters
        self.calls = 0
        self._tree = Tree[Tensor](torch.Tensor.add_)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Exchange a micro-batch of each rank. Called on all ranks of the group."""
        ranks = group.size()
        trained = [p for p in self.parameters.values() if p.requires_grad]
        # FSDP2 leaves out parameters without a gradient, so that the buffer is shorter; it pads rows to a multiple of the ranks.
        padded = sum(
            -(-p.shape[0] // ranks) * ranks * (p.numel() // max(p.shape[0], 1)) for p in trained
        )
        if input_tensor.numel() != padded:
            raise self.without_gradient()
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        self.calls += 1
        shares = [part(self.sums.number, ranks, rank) for rank in range(ranks)]
        for (first, count), shard in zip(shares, received.chunk(ranks)):
            if self.sums.slot < count:
                self._tree.add(0, first + self.sums.slot, shard.clone())
        if self.sums.slot + 1 == max(count for _, count in shares):
            output_tensor.copy_(self._tree.take_total())
        else:
            output_tensor.zero_()
        return None

    def end_micro_batch(self) -> None:
        """Refuse a micro-batch in which FSDP2 has reduced nothing of the module, or more than once."""
        calls, self.calls = self.calls, 0
        if calls != 1 and any(parameter.requires_grad for parameter in self.parameters.values()):
            raise self.without_gradient()

    def drop_open(self) -> None:
        """Forget the open update, which is made again."""
        self.calls = 0
        self._tree.blocks = {}

    def without_gradient(self) -> ValueError:
        """Return the error for a micro-batch that leaves parameters without a gradient."""
        names = [name for name, parameter in self.parameters.items() if parameter.requires_grad]
        return ValueError(
            "Expected each block that FSDP2 gathers in the forward of each micro-batch with gradient_sum='canonical' on "
            f"parallel.axes.shard. Received: no gradient for {listed(names)}, which are one block. Freeze it, use it in each forward, name "
            "the module around it in fsdp.blocks, or train on ddp."
        )


def exchange_shards(model: nn.Module, sums: CanonicalSum) -> list[CanonicalReduceScatter]:
    """Let the modules that FSDP2 wraps add gradients in one order, and return what does it. Call on all ranks."""
    owners: dict[int, Any] = {}
    for module in sharded_modules(
        model
    ):  # outer ones come before inner ones, which own their parameters
        owners.update({id(parameter): module for parameter in cast(nn.Module, module).parameters()})
    named: dict[Any, dict[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) in owners:
            named.setdefault(owners[id(parameter)], {})[name] = parameter
    exchanges = []
    for module, parameters in named.items():
        exchanges.append(CanonicalReduceScatter(sums, parameters))
        module.set_custom_reduce_scatter(exchanges[-1])
        sums.ended.append(exchanges[-1].end_micro_batch)
    return exchanges


class CanonicalMeshReduction(MeshReduction):
    """The gradient of replicas, or of shards, in one order of addition."""

    keeps_gradients = False

    def __init__(
        self,
        runner: ParallelRunner,
        sums: CanonicalSum,
        exchanges: Sequence[CanonicalReduceScatter],
    ) -> None:
        super().__init__(runner)
        self.sums = sums
        self.exchanges = exchanges

    def begin(self) -> None:
        """Refuse a loop of the user's own."""
        self.sums.check_open()

    def communication(self, *, last: bool) -> AbstractContextManager[object]:
        """Let FSDP2 reduce every micro-batch, and drop the gradients of earlier ones: the last one brings the sum."""
        if self.order is not None:
            # The gradient of an empty micro-batch is dropped.
            self.order.counts = self.runner.window.current_samples > 0
        for exchange in self.exchanges:
            for parameter in exchange.parameters.values():
                parameter.grad = None
        return super().communication(last=True)

    def drop_open(self) -> None:
        """Drop the micro-batches that were exchanged, too."""
        super().drop_open()
        for exchange in self.exchanges:
            exchange.drop_open()

    def complete(self) -> None:
        """Add the gradients of parameters that are not sharded."""
        self._complete_units()
        self.sums.complete()

    def agree(self, totals: StepTotals) -> StepTotals | None:
        """Return the totals, added in order."""
        return self.sums.totals(totals)

    def norm(self, gradients: list[Tensor]) -> Tensor:
        present = [parameter for parameter in self.copies if parameter.grad is not None]
        domain, sizes = None, [parameter.numel() for parameter in present]
        if self.exchanges:
            # The first rank counts the gradients that every rank has whole.
            domain, first = self.topology.optimizer, self.topology.optimizer.rank == 0
            pairs = zip(gradients, present)
            gradients = [g if first or is_sharded(p) else g.new_empty(0) for g, p in pairs]
        norm = order_free_norm(gradients, sizes, domain)
        if self.scaler is not None:
            self._record_overflow(self.scaler, norm)
        return norm

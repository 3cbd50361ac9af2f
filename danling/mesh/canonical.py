"""`gradient_sum: canonical` on a mesh: FSDP2 exchanges the gradients of micro-batches, and each rank adds its shard in tree order."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from danling.data.shares import part
from danling.distributed import StepTotals
from danling.training.canonical import CanonicalSum, Tree, order_free_norm
from danling.training.update import Window
from danling.utils.tensors import is_sharded

from .fsdp import sharded_modules
from .reduction import MeshReduction


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
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Exchange a micro-batch of each rank. Called on all ranks of the group."""
        ranks = group.size()
        trained = [p for p in self.parameters.values() if p.requires_grad]
        padded = sum(-(-p.shape[0] // ranks) * ranks * (p.numel() // max(p.shape[0], 1)) for p in trained)
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

    def without_gradient(self) -> ValueError:
        """Return the error for a micro-batch that leaves parameters without a gradient."""
        return ValueError(
            "Expected a gradient for each trained parameter in each micro-batch with gradient_sum='canonical' on parallel.axes.shard. "
            f"Received: none for some of {', '.join(list(self.parameters)[:5])}. Freeze unused ones, use them in each forward, or train "
            "on ddp."
        )


def exchange_shards(model: nn.Module, sums: CanonicalSum) -> list[CanonicalReduceScatter]:
    """Let the modules that FSDP2 wraps add gradients in one order, and return what does it. Call on all ranks."""
    owners: dict[int, Any] = {}
    for module in sharded_modules(model):  # outer ones come before inner ones, which own their parameters
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

    def __init__(
        self, *args: Any, sums: CanonicalSum, exchanges: Sequence[CanonicalReduceScatter], **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.sums = sums
        self.exchanges = exchanges

    def begin(self, *, first: bool) -> None:
        """Refuse a loop of the user's own."""
        self.sums.check_open()

    def context(self, *, last: bool) -> AbstractContextManager[object]:
        """Let FSDP2 reduce every micro-batch, and drop the gradients of earlier ones: the last one brings the sum."""
        for exchange in self.exchanges:
            for parameter in exchange.parameters.values():
                parameter.grad = None
        return super().context(last=True)

    def complete(self) -> None:
        """Add the gradients of parameters that are not sharded."""
        self.sums.complete()

    def agree(self, totals: StepTotals, window: Window, step: int) -> StepTotals | None:
        """Return the totals, added in order."""
        return self.sums.totals(totals)

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the 2-norm of the gradient of the whole model, 0-dim float64."""
        present = [parameter for parameter in self.copies.parameters if parameter.grad is not None]
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

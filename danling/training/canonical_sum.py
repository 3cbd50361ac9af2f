"""One order of addition at any number of processes, `gradient_sum: canonical`.

The gradient of each micro-batch is a leaf of a binary tree over the numbers of the micro-batches in their update. The tree does not
depend on which rank computes which leaf, so neither do the bits of the sum. `docs/guides/any_size.md` explains it.
"""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, reduce
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist

from danling.data import Batch, DataLoader
from danling.data.sampler import WholeMicroBatches, part
from danling.distributed import Domain, StepTotals
from danling.optim import JointOptimizer
from danling.utils.devices import total_memory
from danling.utils.tensors import bucketed, flattened, is_sharded, local_part, scatter

from .reduction import GradientReduction

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner

    from .attributes import KeptAttributes
    from .recompute import Recompute
    from .update import UpdateStep

logger = logging.getLogger("danling")

T = TypeVar("T")
Block = tuple[int, int]
"""Level and place of a node of the tree: the leaves `place * 2**level` and following, `2**level` of them."""

_MIXES_ELEMENTS = ("Adafactor", "LBFGS", "Muon")
"""Optimizers of torch whose step of an element depends on others, so that it depends on where tensors are cut."""


class Tree(Generic[T]):
    """Adds leaves in the order of a fixed binary tree, whenever they come.

    Args:
        merge: Returns the sum of a left and a right node; it may reuse the left one.
    """

    def __init__(self, merge: Callable[[T, T], T]) -> None:
        self.blocks: dict[Block, T] = {}
        self._merge = merge

    def add(self, level: int, place: int, value: T) -> None:
        """Add a node; it merges with its sibling as soon as both are there."""
        # The sibling of a node has the other last bit in its place; their parent has the place without that bit.
        while (level, place ^ 1) in self.blocks:
            other = self.blocks.pop((level, place ^ 1))
            value = self._merge(other, value) if place & 1 else self._merge(value, other)
            level, place = level + 1, place >> 1
        self.blocks[level, place] = value

    def take_total(self) -> T:
        """Return the sum of all leaves and forget them: what has no sibling merges from the right."""
        # In the order of their first leaves.
        left = sorted(self.blocks.items(), key=lambda item: item[0][1] << item[0][0])
        self.blocks = {}
        total = left.pop()[1]
        while left:
            total = self._merge(left.pop()[1], total)
        return total


@lru_cache(maxsize=1024)
def blocks_of(first: int, count: int) -> tuple[tuple[Block, ...], int]:
    """Return the nodes that a rank keeps of the leaves from `first` on, in order, and the most that it keeps on the way."""
    tree = Tree[None](lambda left, right: None)
    most = 0
    for leaf in range(first, first + count):
        tree.add(0, leaf, None)
        most = max(most, len(tree.blocks) + 1)  # the next leaf is there before it merges
    return tuple(sorted(tree.blocks)), most


def add_gradients(left: list[Tensor | None], right: list[Tensor | None]) -> list[Tensor | None]:
    """Return the sums of two lists of gradients, in the memory of the left ones where possible. One without a partner adds a zero."""
    both = [(a, b) for a, b in zip(left, right) if a is not None and b is not None]
    alone = [a for a, b in zip(left, right) if a is not None and b is None]
    alone += [b for a, b in zip(left, right) if a is None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    if alone:
        torch._foreach_add_(alone, 0.0)  # as a rank does that sends a zero: -0.0 becomes 0.0
    return [b if a is None else a for a, b in zip(left, right)]


_PIECE_ON_HOST = 1 << 15
"""Elements that fit the cache of a processor in float64."""
_PIECE_ON_DEVICE = 1 << 22
"""Elements of 32 MB in float64: each piece launches eight kernels, whatever its size."""


def order_free_norm(
    gradients: Sequence[Tensor], sizes: Sequence[int], domain: Domain | None = None
) -> Tensor:
    """Return the 2-norm of gradients, 0-dim float64, the same bits however their elements are divided over ranks, threads and kernels.

    Each square becomes a multiple of a unit that follows from the largest element and the size of its tensor; multiples are added as
    integers, which have no order. The result is as accurate as a norm in float32. A gradient that is not finite gives infinity.
    """
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    # Offloaded gradients are in the memory of the host, others on the accelerator, where all sums meet.
    device = next(
        (gradient.device for gradient in gradients if gradient.device.type != "cpu"),
        gradients[0].device,
    )
    some = [index for index, gradient in enumerate(gradients) if gradient.numel()]
    peaks = torch.zeros(len(gradients), dtype=torch.float64, device=device)
    sums = torch.zeros(len(gradients), dtype=torch.int64, device=device)
    if some:
        # Quicker than their infinity norms.
        largest = [torch.stack(torch.aminmax(gradients[index])).abs().max() for index in some]
        peaks[some] = torch.stack([value.to(device, torch.float64) for value in largest])
    # A maximum over ranks may lose a NaN, but no infinity.
    peaks.nan_to_num_(nan=torch.inf)
    if domain is not None:
        domain.all_reduce(peaks, "max")
    bits = torch.tensor([max(size - 1, 1).bit_length() for size in sizes], device=device)
    exponents = 2 * torch.frexp(peaks).exponent  # squares are below 2 to this power
    # A double between 2**top and 2**(top + 1) has a unit of 2**(top - 52): at most 2**62 units in a sum of all squares.
    tops = torch.maximum(exponents + 1, exponents + bits - 10).clamp_min_(-900)
    bases = torch.ldexp(torch.full_like(peaks, 1.5), tops)
    for index in some:
        gradient = gradients[index]
        base = bases[index].to(gradient.device)
        whole = torch.zeros((), dtype=torch.int64, device=gradient.device)
        most = _PIECE_ON_HOST if gradient.is_cpu else _PIECE_ON_DEVICE
        for piece in torch.split(gradient.reshape(-1), most):
            # Of a gradient in float64, `double` is no copy.
            wide = piece.double().square().add_(base)
            whole += wide.view(torch.int64).sum() - base.view(torch.int64) * piece.numel()
        sums[index] = whole
    if domain is not None:
        domain.all_reduce(sums)
    # Sorted, so that the sum does not depend on the order of the tensors either.
    squares = torch.ldexp(sums.double(), tops - 52).sort().values.sum()
    # The squares of larger elements do not fit a double.
    return torch.where(peaks.max() < 1e150, squares.sqrt(), torch.inf)


class CanonicalSum:
    """Runs the micro-batches of an update and adds what comes of them in the order of the tree, within this rank and between ranks."""

    def __init__(
        self, runner: TorchRunner, attributes: KeptAttributes, recompute: Recompute
    ) -> None:
        self.domain: Domain = runner.data_domain
        self.slot = -1
        """Number of the open micro-batch among those of this rank; -1 outside."""
        self.number = 0
        """Micro-batches of the open update over all ranks."""
        self.ended: list[Callable[[], None]] = []
        """Called after each micro-batch, empty ones included."""
        self._runner = runner
        self._attributes = attributes
        self._recompute = recompute
        self._tree = Tree(add_gradients)
        self._losses: dict[int, tuple[float | Tensor, float | Tensor]] = {}
        self._sums: Tensor | None = None
        self._parameters: list[nn.Parameter] = []
        self._micro_step = 0
        self._checked = False

    # Before training

    def check(self) -> None:
        """Refuse what cannot have one order, and say what the partial sums take. Called on all ranks, once there are loaders."""
        runner = self._runner
        divisions = []
        for split in runner.train_splits:
            loader = runner.dataloaders.get(split)
            division = loader.division if isinstance(loader, DataLoader) else None
            if not isinstance(division, WholeMicroBatches):
                raise ValueError(
                    f"Expected a loader that the library builds for split {split!r} with gradient_sum='canonical', whose micro-batches "
                    f"do not depend on the ranks. Received: {type(loader).__name__}. Put a map-style dataset into self.datasets, or set "
                    "gradient_sum='fast'."
                )
            divisions.append(division)
        self._check_optimizer()
        # The reference must depend on neither ranks nor batches.
        runner.window.fixed_reference = 1.0
        if not divisions:
            return
        runner.window.fixed_reference = float(divisions[0].micro_batch_size)
        number = max(division.number(division.samples) for division in divisions)
        first, count = part(number, self.domain.size, self.domain.rank)
        size = sum(local_part(p).nbytes for _, p in runner.named_parameters() if p.requires_grad)
        most = max(blocks_of(first, count)[1], 1)
        threads = torch.get_num_threads()
        logger.info(
            "gradient_sum: canonical adds %d micro-batches an update in one order; this rank keeps at most %d gradients, %.1f MB. The bits "
            "are those of %d thread(s) a process.",
            number,
            most,
            most * size / 1e6,
            threads,
        )
        of_host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        memory = total_memory(runner.device) or of_host
        if most * size > memory / 10:
            logger.warning(
                "The partial sums of gradient_sum='canonical' take %.1f GB of %.1f GB on rank %d. Raise dataloader.micro_batch_size or the "
                "number of processes, or train on parallel.axes.shard, which divides them.",
                most * size / 1e9,
                memory / 1e9,
                self.domain.rank,
            )

    def _check_optimizer(self) -> None:
        optimizer = self._runner.optimizer
        joint = isinstance(optimizer, JointOptimizer)
        members = optimizer.optimizers if joint else (optimizer,)
        names = [type(each).__name__ for each in members]
        mixing = [name for name in names if name in _MIXES_ELEMENTS]
        received = None
        if joint and optimizer.named:
            received = "several optimizers that are stepped one after another. Take one"
        elif any(group.get("fused") for group in getattr(optimizer, "param_groups", ())):
            received = f"{names[-1]}(fused=True), whose bits depend on where tensors are cut. Set fused=False"
        elif mixing and any(is_sharded(p) for _, p in self._runner.named_parameters()):
            received = (
                f"{mixing[0]} on shards, whose step of an element depends on others. Train on ddp, take AdamW, or let "
                "optim.type='muon' build a Muon that gathers matrices"
            )
        if received:
            raise ValueError(
                f"Expected one optimizer that treats each element by itself with gradient_sum='canonical'. Received: {received}, or set "
                "gradient_sum='fast'."
            )

    # An update

    def run(self, update: UpdateStep, batch: Batch, step: Callable[[Any], object]) -> None:
        """Run a micro-batch and take its gradient and loss; an empty one changes nothing. Called on all ranks, equally often."""
        runner, window = self._runner, self._runner.window
        assert batch.ordinal is not None
        leaf, self.number = batch.ordinal
        self.slot = window.count
        if self.slot == 0:
            self._micro_step = runner.state.train.micro_step
        put_back = self._recompute.remember(window=False) if batch.samples == 0 else None
        buffers: dict[str, Tensor] = {}
        values: dict[str, object] = {}
        if not self._checked:
            # Looked at once in a process. Batch normalization does not increase the version of what it changes.
            buffers = {name: b.clone() for name, b in runner.unwrapped_model.named_buffers()}
            values = self._values_of_program()
        # The window adds up losses as they come, but that of this micro-batch is a separate leaf.
        before, window.loss = window.loss, 0.0
        try:
            update.run(batch, step)
        finally:
            self.slot = -1
        own, window.loss = window.loss, before + window.loss
        for check in self.ended:
            check()
        self._parameters = [p for p in runner.reduction.parameters if not is_sharded(p)]
        gradients = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        if put_back is not None:
            put_back()
            return
        if runner.carry is not None:
            raise ValueError(
                "self.carry cannot be used with gradient_sum='canonical': the micro-batch before may be another rank's. Set "
                "gradient_sum='fast'."
            )
        if not self._checked:
            self._checked = True
            self._check_buffers(buffers)
            self._check_values(values)
        if any(gradient is not None and gradient.is_sparse for gradient in gradients):
            raise ValueError(
                "Expected dense gradients with gradient_sum='canonical'. Received: a sparse one. Set sparse=False in the embedding."
            )
        self._losses[leaf] = own, window.current
        self._tree.add(0, leaf, gradients)

    def check_open(self) -> None:
        """Refuse a micro-batch that no loop has read: its place in the update is not known."""
        if self.slot < 0:
            raise ValueError(
                "train_step() and step() of your own loop have no order over ranks. Call train() or train_epoch(split) with "
                "gradient_sum='canonical', or set gradient_sum='fast'."
            )

    def _check_buffers(self, before: Mapping[str, Tensor]) -> None:
        found = dict(self._runner.unwrapped_model.named_buffers())
        changed = [
            name
            for name, buffer in before.items()
            if name in found and not buffer.equal(found[name])
        ]
        if changed:
            raise ValueError(
                f"Expected buffers that a forward leaves as they are with gradient_sum='canonical': their changes have no order over "
                f"ranks. Received: {', '.join(changed[:5])}, changed by train_step. Replace batch normalization by nn.GroupNorm or "
                "nn.LayerNorm, or freeze it in evaluation mode; or set gradient_sum='fast'."
            )

    def _values_of_program(self) -> dict[str, object]:
        """Return what tells whether attributes of the runner, and plain ones of the model's modules and of datasets, change."""
        runner = self._runner
        found: dict[str, object] = {
            f"self.{name}": value for name, value in self._attributes.digests().items()
        }
        for path, module in runner.unwrapped_model.named_modules():
            found |= _plain_values(f"self.model.{path}".removesuffix("."), vars(module))
        for split, dataset in runner.datasets.items():
            found |= _plain_values(f"self.datasets[{split!r}]", getattr(dataset, "__dict__", {}))
        return found

    def _check_values(self, before: Mapping[str, object]) -> None:
        """Warn of attributes that a micro-batch has changed; refuse those that the program has declared to be part of the run."""
        runner = self._runner
        after = self._values_of_program()
        changed = [
            name
            for name, value in after.items()
            if before.get(name) != value and not name.startswith("self.metrics")
        ]
        declared = [
            name
            for name in changed
            if name.removeprefix("self.") in getattr(type(runner), "saved", ())
        ]
        if declared:
            raise ValueError(
                "Expected attributes in `saved` that train_step leaves as they are with gradient_sum='canonical': each rank changes its "
                f"own. Received: {', '.join(declared[:5])}. Change them in `step`, which all ranks call once an update, or set "
                "gradient_sum='fast'."
            )
        if changed and runner.is_main_process:
            logger.warning(
                "%s changed within the first update: each rank changes its own. If the loss reads it, the result depends on the number of "
                "processes in spite of gradient_sum='canonical'. Change it in `step`, which all ranks call once an update.",
                ", ".join(changed[:5]),
            )

    def drop(self) -> None:
        """Forget the open update, which is made again."""
        self._tree.blocks = {}
        self._losses = {}
        self._sums = None
        self.slot = -1

    def values(self) -> Tensor | None:
        """Return losses and weights by micro-batch, and which parameters have a gradient, for the one collective of an update."""
        if self.domain.size == 1:
            return None
        size = 2 * self.number + len(self._parameters)
        values = torch.zeros(size, dtype=torch.float64, device=self._runner.device)
        for leaf, (loss, weight) in self._losses.items():
            values[leaf], values[self.number + leaf] = loss, weight
        present = {
            index
            for gradients in self._tree.blocks.values()
            for index, gradient in enumerate(gradients)
            if gradient is not None
        }
        for index in present:
            values[2 * self.number + index] = 1.0
        return values

    def take(self, sums: Tensor) -> None:
        """Take their sums over the ranks: each of the first has one rank's value and zeros, so that nothing is rounded."""
        self._sums = sums

    def totals(self, totals: StepTotals) -> StepTotals:
        """Return the totals of an update with loss and weight added in the order of the micro-batches."""
        sums, self._sums, self._losses = self._sums, None, {}
        if sums is None:
            return totals  # one process has added them in this order
        on_host = sums.device.type == "cpu"
        figures = sums[: 2 * self.number]
        listed = figures.tolist() if on_host else list(figures.unbind())
        # Not `sum`, which corrects what it rounds from Python 3.12 on.
        totals.loss = reduce(operator.add, listed[: self.number], 0.0)
        totals.weight = reduce(operator.add, listed[self.number :], 0.0)
        return totals

    @torch.no_grad()
    def complete(self) -> None:
        """Give every rank the sum of the gradients of all micro-batches. Called on all ranks, after the collective of the update."""
        # Over all ranks, so that checkpoints do not depend on their number either.
        self._runner.state.train.micro_step = self._micro_step + self.number
        if self.domain.size == 1:
            for parameter, gradient in zip(self._parameters, self._tree.take_total()):
                parameter.grad = gradient
            return
        assert self._sums is not None
        present = self._sums[2 * self.number :].tolist()
        mine, self._tree.blocks = self._tree.blocks, {}
        places = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        shares = [part(self.number, self.domain.size, rank) for rank in range(self.domain.size)]
        kept = [blocks_of(first, count)[0] for first, count in shares]
        for bucket in bucketed([p for p, count in zip(self._parameters, present) if count]):
            sent = []
            # All ranks send the same parameters, though a block of this rank may lack some gradients.
            for block in kept[self.domain.rank]:
                found = [mine[block][places[id(parameter)]] for parameter in bucket]
                sent.append(
                    flattened(
                        [torch.zeros_like(p) if g is None else g for p, g in zip(bucket, found)]
                    )
                )
            total = self._exchange(
                sent, kept, bucket[0], sum(parameter.numel() for parameter in bucket)
            )
            gradients = [torch.empty_like(parameter) for parameter in bucket]
            scatter(total, gradients)
            for parameter, gradient in zip(bucket, gradients):
                parameter.grad = gradient

    def _exchange(
        self, sent: list[Tensor], kept: list[tuple[Block, ...]], like: Tensor, size: int
    ) -> Tensor:
        """Return the sum of flat nodes over all ranks: each rank adds one part of them in the order of the tree."""
        ranks = self.domain.size
        piece = -(-size // ranks)  # rounded up: the last part is filled with zeros
        parts = like.new_zeros(ranks, len(sent), piece)
        for index, flat in enumerate(sent):
            for rank, values in enumerate(torch.split(flat, piece)):
                parts[rank, index, : values.numel()] = values
        # Every rank knows which nodes each of the others has kept, so no sizes travel.
        counts = [len(blocks) for blocks in kept]
        received = like.new_empty(sum(counts) * piece)
        dist.all_to_all_single(
            received,
            parts.view(-1),
            [count * piece for count in counts],
            [len(sent) * piece] * ranks,
            self.domain.group,
        )
        tree = Tree[Tensor](torch.Tensor.add_)
        for (level, place), values in zip(
            [block for blocks in kept for block in blocks], torch.split(received, piece)
        ):
            tree.add(level, place, values)
        whole = like.new_empty(ranks * piece)
        dist.all_gather(list(torch.split(whole, piece)), tree.take_total(), self.domain.group)
        return whole[:size]


def _plain_values(place: str, attributes: Mapping[str, object]) -> dict[str, object]:
    return {
        f"{place}.{name}": value
        for name, value in attributes.items()
        if not name.startswith("_") and isinstance(value, (bool, int, float, str))
    }


class CanonicalReduction(GradientReduction):
    """The gradient of one process, or of several that hold the whole model, in one order of addition."""

    keeps_gradients = False

    def __init__(self, runner: TorchRunner, sums: CanonicalSum) -> None:
        super().__init__(runner)
        self.sums = sums

    def begin(self) -> None:
        self.sums.check_open()

    def complete(self) -> None:
        self.sums.complete()

    def agree(self, totals: StepTotals) -> StepTotals | None:
        return self.sums.totals(totals)

    def norm(self, gradients: list[Tensor]) -> Tensor:
        return order_free_norm(gradients, [gradient.numel() for gradient in gradients])

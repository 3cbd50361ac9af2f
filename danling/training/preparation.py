"""Prepares the user's model for a stack: wraps it, and knows which weights are trained and which are divided."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from danling.distributed import Domain, ExtraReduction
from danling.utils.tensors import local_part

from .ema import EMA

NamedParameters = Iterable[tuple[str, nn.Parameter]]


class ModelPreparation:
    """The model as one process, or DistributedDataParallel over several, trains it.

    A stack whose model is prepared otherwise hands over a subclass: a device mesh, an engine. The model is passed to each method, since
    a user may replace it.
    """

    in_pipeline = False
    """Whether this rank has stages of a pipeline, and not the whole model."""

    def __init__(self, world: Domain, *, communication: str | None = None) -> None:
        self.world = world
        self.communication = communication
        """The setting for which every forward waits for other ranks, for an error text; `None` where there is none."""
        self.wrapper = DistributedDataParallel
        self.extra_reductions: list[ExtraReduction] = []
        """What travels with the one collective of an update."""
        self.broadcasts_buffers = False
        """Whether the buffers of the first rank go to the others before an update, where the wrapper must not do it."""
        self._trained_when_wrapped: set[int] | None = None
        self._constructed: ReferenceType[nn.Module] | None = None

    # Wrapping

    def wrap(
        self, model: nn.Module, options: Mapping[str, object], *, reduces_later: bool = False
    ) -> nn.Module:
        """Return the model in DistributedDataParallel when there are several ranks and something to train."""
        if self.world.size == 1 or not any(
            parameter.requires_grad for parameter in model.parameters()
        ):
            return model
        return self.wrapper(model, **self.wrapper_options(options, reduces_later=reduces_later))

    def wrapper_options(self, options: Mapping[str, Any], *, reduces_later: bool) -> dict[str, Any]:
        """Return the arguments of DistributedDataParallel, as `wrap` is to use them."""
        if not reduces_later:
            return dict(options)
        if options.get("static_graph"):
            raise ValueError(
                "Expected DistributedDataParallel without a static graph: with dataloader.micro_batch_size='auto' gradients are "
                "reduced after the backward. Received: static_graph=True from ddp_kwargs. Set a number, or leave static_graph out."
            )
        # The wrapper would broadcast in each forward, where a rank that is out of memory leaves the others waiting.
        self.broadcasts_buffers = options.get("broadcast_buffers", True)
        return {**options, "broadcast_buffers": False}

    def unwrap(self, model: object) -> Any:
        """Return the user's module out of the model that training calls. May be called on one rank."""
        return model.module if isinstance(model, DistributedDataParallel) else model

    def held_part(self, tensor: Tensor) -> tuple[str, tuple[int, ...]]:
        """Return how a tensor is divided over the ranks, and which part of it this rank holds; ranks of one part hold copies.

        May be called on one rank.
        """
        return "whole", ()

    def place(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Return the coordinate of this rank on each axis, and the number of ranks along each. May be called on one rank."""
        return {"replicate": self.world.rank}, {"replicate": self.world.size}

    def note_wrapped(self, model: nn.Module) -> None:
        """Note what of a model is trained when it is wrapped: the wrapper reduces that and nothing else."""
        self._trained_when_wrapped = _trained(model)

    def trainables_changed(self, model: nn.Module) -> bool:
        """Return whether the model must be wrapped anew, because other parameters are trained than when it was wrapped."""
        noted = self._trained_when_wrapped
        return self.world.size > 1 and noted is not None and _trained(model) != noted

    def check_reduced(self, model: object, *, trains: bool, reduced_by_user: bool) -> None:
        """Refuse a model whose gradients would not be reduced."""
        reduced = (
            isinstance(model, DistributedDataParallel) or self._trained_when_wrapped is not None
        )
        is_reduced = reduced or reduced_by_user
        if self.world.size > 1 and trains and not is_reduced:
            raise ValueError(
                "Expected `materialize_model` to wrap the model for the gradients of several ranks. Received: a model that is not wrapped. "
                "Call super().materialize_model() in it, or self.model = self.wrap_model(self.model)."
            )

    def note_constructed(self, model: nn.Module) -> None:
        """Note the model that optimizer, EMA and gradient reduction belong to."""
        self._constructed = ref(model)

    def check_constructed(self, model: nn.Module) -> None:
        """Refuse another model than that of construction."""
        if self._constructed is not None and model is not self._constructed():
            raise ValueError(
                f"Expected the model that the runner was constructed with, which gradients are reduced and averaged weights kept for. "
                f"Received: another one, a {type(model).__name__}. Assign `self.model` in __init__."
            )

    # What a forward and an update find

    def forward_communicates(self, model: nn.Module) -> str | None:
        """Return what makes a forward or a backward communicate, other than DistributedDataParallel; `None` where nothing does."""
        if self.communication is not None:
            return self.communication
        synced = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
        return "SyncBatchNorm" if synced and self.world.size > 1 else None

    def communicated_module(self) -> str:
        """Return the module whose weights or gradients were communicated last; empty if unknown. May be called from another thread."""
        return ""

    def optimized_parameters(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """Return what the optimizer updates of the user's model, and any others. May be called on one rank."""
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def whole_parameters(self, named: NamedParameters) -> dict[str, bool] | None:
        """Return all parameter names of a model that this rank holds a part of, and whether they are trained; else `None`."""
        return None

    @contextmanager
    def whole_weights(self, model: nn.Module, *, modify: bool) -> Iterator[None]:
        """Return a context in which every rank has the weights whole."""
        yield
        # Each rank has changed its own copy, maybe with random numbers: that of the first rank counts.
        if modify and self.world.size > 1:
            for parameter in model.parameters():
                self.world.broadcast(parameter.data)

    def broadcast_buffers(self, model: object, more: Sequence[Tensor] = ()) -> None:
        """Give all ranks the buffers of the first one, which DistributedDataParallel does at the next training forward only."""
        if isinstance(model, DistributedDataParallel):
            for buffer in (*model.module.buffers(), *more):
                self.world.broadcast(buffer)

    def copies(self, model: Any, averaged: Iterable[Tensor] = ()) -> list[Tensor]:
        """Return what every rank has a copy of, in the same order on all of them. May be called on one rank."""
        whole = isinstance(model, DistributedDataParallel)
        return [*model.module.parameters(), *model.module.buffers(), *averaged] if whole else []

    def held(self, parameter: Tensor) -> Tensor:
        """Return what this rank holds of a parameter. No communication."""
        return local_part(parameter.detach())

    # Evaluation and EMA

    @property
    def evaluates_together(self) -> bool:
        """Whether a forward is a collective, so that all ranks must make equally many in an evaluation."""
        return False

    def evaluating(self, model: object) -> AbstractContextManager[None]:
        """Return the context of an evaluation, entered before the EMA weights are put into the model and left after they are taken out."""
        return nullcontext()

    def averaged(self, ema: EMA) -> AbstractContextManager[None]:
        """Return the context in which the model has the EMA weights."""
        return ema.applied()

    def update_averages(self, ema: EMA, model: nn.Module) -> None:
        """Update the EMA of the weights after an update."""
        ema.update()

    def idle_settings(self) -> list[str]:
        """Return a sentence for every setting of the stack that has no effect in this run. May be called on one rank."""
        return []


def _trained(model: nn.Module) -> set[int]:
    return {id(parameter) for parameter in model.parameters() if parameter.requires_grad}


class _Parameters(nn.Module):
    """Takes the place of a model whose parameters only are to get a gradient."""

    def forward(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        return [parameter.view_as(parameter) for parameter in parameters]


def settle_buckets(model: DistributedDataParallel, world: Domain) -> None:
    """Let the wrapper lay out its buckets before the first update. Called on all ranks.

    It does so after the first backward of each process. Three and more ranks add a gradient in an order that depends on its place in its
    bucket, so the first update after a resume would not have the bits of the uninterrupted run.
    """
    module = model.module
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    # Hooks of the user's are not to be called with a gradient of zeros, and a sparse gradient has no zeros. The ranks decide together:
    # only one of them may have hooks, such as the one that logs.
    has_hooks = any(each._backward_hooks or each._post_accumulate_grad_hooks for each in parameters)
    gives_sparse = any(getattr(each, "sparse", False) for each in module.modules())
    is_changed = bool(model._comm_hooks) or model.mixed_precision is not None
    lays_out_later = model.find_unused_parameters or model.static_graph
    is_left = torch.tensor(
        [float(has_hooks or gives_sparse or is_changed or lays_out_later)], dtype=torch.float64
    )
    if world.all_reduce(is_left, "max").item():
        return
    gradients = [parameter.grad for parameter in parameters]
    broadcasts = model.broadcast_buffers
    # What takes the place of the model has no buffers, and the wrapper broadcasts no empty list.
    model.broadcast_buffers = False
    model.module = _Parameters()
    try:
        outputs = model(parameters)
    finally:
        model.module = module
        model.broadcast_buffers = broadcasts
    for parameter in parameters:
        parameter.grad = None  # else the ranks would average what is there
    # The last parameter's gradient comes first, as in a backward.
    torch.autograd.backward(outputs, [torch.zeros_like(output) for output in outputs])
    for parameter, gradient in zip(parameters, gradients):
        parameter.grad = gradient

"""The model as the graph stack trains it: one function with its loss, in DistributedDataParallel where there are several ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from danling.distributed import Domain
from danling.training.preparation import ModelPreparation

from .whole_loss import WholeLoss


class GraphPreparation(ModelPreparation):
    """The model beside the function that trains it."""

    def __init__(self, world: Domain, *, whole_loss: Callable[[nn.Module], WholeLoss]) -> None:
        super().__init__(world)
        self._whole_loss = whole_loss
        self._function: WholeLoss | None = None

    def wrap(self, model: nn.Module, options: Mapping[str, object], *, reduces_later: bool = False) -> nn.Module:
        """Return the model, or the function that trains it in DistributedDataParallel when there are several ranks."""
        self._function = self._whole_loss(model)
        wrapped = super().wrap(self._function, options, reduces_later=reduces_later)
        return model if wrapped is self._function else wrapped

    def unwrap(self, model: object) -> Any:
        """Return the user's module out of the model that training calls. May be called on one rank."""
        bare = super().unwrap(model)
        return bare.model if isinstance(bare, WholeLoss) else bare

    def function(self, model: nn.Module) -> Callable[[Any, Any], Any]:
        """Return what a micro-batch is run with: `(inputs, target) -> (prediction, loss)`."""
        if isinstance(model, DistributedDataParallel):
            if isinstance(model.module, WholeLoss):
                return model
            raise ValueError(
                "Expected the graph stack to wrap the model together with its loss. Received: a model in DistributedDataParallel. Hand "
                "options of it over in `ddp_kwargs`, or choose stack='ddp'."
            )
        if self._function is None or self._function.model is not model:
            self._function = self._whole_loss(model)
        return self._function

"""How Accelerate prepares the user's model and optimizer, which it takes together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from danling.distributed import Domain
from danling.training.preparation import ModelPreparation


class WrapperOptions:
    """The arguments of DistributedDataParallel, as Accelerate asks its handlers for them."""

    def __init__(self, options: Mapping[str, Any], given: Any = None) -> None:
        # Accelerate names the device itself.
        self.options = {name: value for name, value in options.items() if name not in ("device_ids", "output_device")}
        self.given = given

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments."""
        return {**(self.given.to_kwargs() if self.given is not None else {}), **self.options}

    def register_comm_hook(self, model: nn.Module) -> None:
        """Do to the wrapped model what the user's handler does."""
        if self.given is not None:
            self.given.register_comm_hook(model)


class AcceleratePreparation(ModelPreparation):
    """The model as Accelerate wraps it: in DistributedDataParallel on several ranks.

    The user's optimizer stays the runner's, with its state, its keys and its scheduler; the one that Accelerate makes of it steps it.
    Until `bind` the model is as it is. Loaders and schedulers are never prepared: a prepared loader repeats samples to fill up the ranks,
    and a prepared scheduler moves by their number.
    """

    def __init__(self, world: Domain, *, accelerator: Any) -> None:
        super().__init__(world)
        self.accelerator = accelerator
        self._given_handler = accelerator.ddp_handler
        self._is_bound = False
        self._optimizer: Any = None
        self._stepped: Any = None

    def bind(self, optimizer: object) -> None:
        """Take the optimizer that is prepared together with the model; `None` where nothing is trained."""
        self._optimizer, self._is_bound = optimizer, True

    def wrap(self, model: nn.Module, options: Mapping[str, Any], *, reduces_later: bool = False) -> nn.Module:
        """Return the model as Accelerate prepares it, together with the optimizer; see `ModelPreparation.wrap`."""
        trains = any(parameter.requires_grad for parameter in model.parameters())
        if not self._is_bound or (self.world.size > 1 and not trains):
            return model
        asked = self.wrapper_options(options, reduces_later=reduces_later) if self.world.size > 1 else {}
        self.accelerator.ddp_handler = WrapperOptions(asked, self._given_handler)
        if self._stepped is not None:
            # It would keep a reference to every model that was ever wrapped.
            self.accelerator.free_memory()
        if self._optimizer is None:
            alone: nn.Module = self._prepared(model)[0]
            return alone
        wrapped: nn.Module
        wrapped, self._stepped = self._prepared(model, self._optimizer)
        return wrapped

    def _prepared(self, *objects: Any) -> tuple[Any, ...]:
        # The optimizer's state goes where it belongs when it is loaded.
        placed = [None if isinstance(item, nn.Module) else False for item in objects]
        prepared = self.accelerator.prepare(*objects, device_placement=placed)
        return tuple(prepared) if len(objects) > 1 else (prepared,)

    def stepped(self, optimizer: object) -> Any:
        """Return what Accelerate steps in place of an optimizer, which may have been exchanged since it was bound."""
        if not self._is_bound:
            raise ValueError(
                "Expected `bind_optimizer` to let Accelerate prepare model and optimizer. Received: neither prepared. Call "
                "super().bind_optimizer() in it."
            )
        if self._stepped is None or optimizer is not self._optimizer:
            self._optimizer, self._stepped = optimizer, self._prepared(optimizer)[0]
        return self._stepped

"""How an engine prepares the user's model, and what it refuses of a model, a criterion and an optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from danling.distributed import Domain
from danling.training.checks import listed
from danling.training.ema import EMA
from danling.training.preparation import ModelPreparation
from danling.utils.protocols import SteppedOptimizer
from danling.utils.tensors import canonical_name

from . import engine as engines
from .engine_config import zero_stage

_LOOKS_AT_SHAPES = ("Adafactor", "Muon")


class EnginePreparation(ModelPreparation):
    """The model in a DeepSpeed engine, which reduces gradients within the backward and may divide weights and optimizer.

    Until `adopt` there is no engine, and the model is as it is.
    """

    def __init__(self, world: Domain, data: Domain, *, stack: str, async_mode: str | None = None) -> None:
        super().__init__(world, communication=f"stack={stack!r}")
        self.data = data
        self.async_mode = async_mode
        self.engine: Any = None
        self.stage = 0
        self.group_names: list[list[str]] = []
        """Names of the parameters in each group of the optimizer; none where DeepSpeed has built it."""
        self._trained: set[str] = set()

    def adopt(self, engine: object, *, stage: int, trained: Iterable[str]) -> None:
        """Take the engine that was built around the model."""
        self.engine, self.stage, self._trained = engine, stage, set(trained)

    def release(self) -> None:
        """Take the engine down. May be called twice."""
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.destroy()

    @property
    def divides_weights(self) -> bool:
        """Whether the weights are divided over the ranks."""
        return self.engine is not None and engines.divides_weights(self.engine)

    def wrap(self, model: nn.Module, options: Mapping[str, object], *, reduces_later: bool = False) -> nn.Module:
        """Return the model as it is: the engine takes it together with the optimizer."""
        return model

    def unwrap(self, model: object) -> Any:
        """Return the user's module out of the engine. May be called on one rank."""
        return model.module if self.engine is not None and model is self.engine else model

    def trainables_changed(self, model: nn.Module) -> bool:
        """Refuse parameters that were frozen or unfrozen since the engine was built, where it divides the optimizer."""
        if self.engine is None or not engines.is_divided(self.engine):
            return False
        changed = sorted(self._trained ^ trained_names(model))
        if changed:
            raise ValueError(
                f"Expected the parameters that required a gradient when the engine was built, which are what ZeRO {self.stage} "
                f"divides. Received: {', '.join(changed[:5])} frozen or unfrozen since ({len(changed)} in all). Set "
                "deepspeed.zero_optimization.stage=0, or begin another run with them so in __init__, from these weights by `pretrained`."
            )
        return False

    def optimized_parameters(self, optimizer: SteppedOptimizer) -> list[nn.Parameter]:
        """Return the parameters that the engine updates, of which ZeRO's optimizer holds flat pieces. May be called on one rank."""
        if self.engine is None:
            return super().optimized_parameters(optimizer)
        updated = {name for names in self.group_names for name in names} or self._trained
        named = {canonical_name(name): parameter for name, parameter in self.engine.module.named_parameters()}
        return [parameter for name, parameter in named.items() if name in updated]

    @contextmanager
    def whole_weights(self, model: nn.Module, *, modify: bool) -> Iterator[None]:
        """Return a context in which ZeRO's weights are gathered."""
        with engines.gathered(self.engine, modify=modify):
            yield
        if not modify:
            return
        if self.world.size > 1 and not self.divides_weights:
            for parameter in model.parameters():
                self.world.broadcast(parameter.data)
        if self.engine is not None and engines.is_divided(self.engine):
            # ZeRO updates its own float32 copy of the weights, which would otherwise overwrite these at the next update.
            self.engine.optimizer.refresh_fp32_params()

    def broadcast_buffers(self, model: object, more: Sequence[Tensor] = ()) -> None:
        """Broadcast the buffers of the first rank, which an engine does not do."""
        if self.data.size > 1:
            for buffer in (*self.unwrap(model).buffers(), *more):
                self.world.broadcast(buffer)

    @property
    def evaluates_together(self) -> bool:
        """Whether a forward is a collective: under ZeRO 3, on several ranks."""
        return self.divides_weights and self.world.size > 1

    @contextmanager
    def averaged(self, ema: EMA) -> Iterator[None]:
        """Put the EMA weights into the model, and the trained ones back on exit."""
        applied = ema.applied()
        with engines.gathered(self.engine, modify=True):
            applied.__enter__()
        try:
            yield
        finally:
            with engines.gathered(self.engine, modify=True):
                applied.__exit__(None, None, None)

    def update_averages(self, ema: EMA, model: nn.Module) -> None:
        """Update the EMA of the weights after an update, for which the weights are gathered."""
        with self.whole_weights(model, modify=False):
            ema.update()

    def unused_settings(self) -> list[str]:
        """Return a sentence for every setting of the stack that has no effect in this run. May be called on one rank."""
        if self.async_mode not in ("async", "async_with_pinned_mem"):
            return []
        return [
            f"checkpoint.async_mode={self.async_mode!r} has no effect: an engine's save is finished when it returns."
        ]


def trained_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters that require a gradient."""
    return {canonical_name(name) for name, parameter in model.named_parameters() if parameter.requires_grad}


def check_criterion(criterion: object) -> None:
    """Refuse a criterion that is trained, of which an engine knows nothing."""
    parameters = criterion.parameters() if isinstance(criterion, nn.Module) else ()
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if trained:
        raise ValueError(
            f"Expected a criterion without parameters to train: a DeepSpeed engine reduces and updates those of the model only. "
            f"Received: {type(criterion).__name__} with {len(trained)}. Make them part of the model, or freeze them."
        )


def check_dtype(model: nn.Module) -> None:
    """Refuse tensors in float64, which an engine makes float32."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    wide = [canonical_name(name) for name, tensor in tensors if tensor.dtype is torch.float64]
    if wide:
        raise ValueError(
            f"Expected a model in float32, in which a DeepSpeed engine keeps weights and buffers. Received: float64 in "
            f"{listed(wide)}. Call self.model.float() in __init__ where that is precise enough, or set stack='ddp', "
            "which trains in float64."
        )


def check_optimizer(optimizer: object, settings: Mapping[str, object]) -> None:
    """Refuse an optimizer whose update depends on the shape of a parameter, of which ZeRO makes flat pieces."""
    kind = type(optimizer).__name__
    if zero_stage(settings) and kind in _LOOKS_AT_SHAPES:
        raise ValueError(
            f"Expected an optimizer that treats every element of a parameter alike, since ZeRO divides flat parameters. Received: "
            f"{kind} with deepspeed.zero_optimization.stage={zero_stage(settings)}. Set the stage to 0, or choose another optimizer."
        )

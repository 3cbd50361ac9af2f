"""The state that one replica group sends to another: shards as plain tensors, laid out again where they arrive."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from typing import Any, Protocol

from torch import Tensor, nn

from danling.checkpoints.snapshot import convert
from danling.data import BatchSource
from danling.metrics import Meters
from danling.training.run_state import RunState
from danling.training.update import Window
from danling.utils.tensors import is_sharded, local_part, with_local_part

logger = logging.getLogger("danling")


class Counters(Protocol):
    """Counters and attempts of a run; see `danling.runners.state.RunnerState`."""

    train: Any
    elastic: Any

    def state_dict(self) -> dict[str, Any]:
        """Return plain values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""


class Healing:
    """Sends the state of this rank to the same rank of another replica group, and takes such a state over.

    What is handed in are callables where a run may replace what they return.

    Args:
        run_state: What the run saves and restores.
        counters: Returns counters and attempts.
        sources: Returns the batches of the splits to train on.
        keeps_positions: Whether loaders that keep a state of their own on each rank stay where they are.
        model: Returns the bare model.
        named_parameters: Returns its parameters, and those of the criterion, by name.
        window: The accumulation window, whose reference belongs to the group.
        meters: What the other group has counted is added by the other group, so these are emptied.
        is_main: Whether this process says that it has healed.
    """

    def __init__(
        self,
        *,
        run_state: RunState,
        counters: Callable[[], Counters],
        sources: Callable[[], Mapping[str, BatchSource]],
        keeps_positions: Callable[[], bool],
        model: Callable[[], nn.Module],
        named_parameters: Callable[[], Iterable[tuple[str, nn.Parameter]]],
        window: Callable[[], Window],
        meters: Callable[[], Meters],
        is_main: bool,
    ) -> None:
        self.run_state = run_state
        self.counters = counters
        self.sources = sources
        self.keeps_positions = keeps_positions
        self.model = model
        self.named_parameters = named_parameters
        self.window = window
        self.meters = meters
        self.is_main = is_main

    def state(self) -> dict[str, Any]:
        """Return what another group heals from: the state of this rank, shards as plain tensors, without communication.

        Called on each rank by itself.
        """
        progress = {**self.counters().state_dict(), **self.run_state.progress()}
        payload: dict[str, Any] = {
            **self.run_state.components(),
            "state": {name: part for name, part in progress.items() if name != "rng"},
            "dataloaders": {split: source.state_dict() for split, source in self.sources().items()},
        }
        return packed(payload, self.model().buffers())

    def take(self, state: Mapping[str, Any]) -> None:
        """Take over the state of the same rank of another group. Called on every rank of the group that heals.

        Args:
            state: What `state` returned there.
        """
        counters, window = self.counters(), self.window()
        elastic, reference = copy(counters.elastic), window.agreed_reference
        self.run_state.load_components(self._laid_out(state), frozenset())
        sources = self.sources()
        for split, position in state["dataloaders"].items():
            if not (self.keeps_positions() and sources[split].is_rank_local):
                sources[split].load_state_dict(position)
        counters.load_state_dict(state["state"])
        self.run_state.load_progress(state["state"])
        self.meters().reset()
        # Those are of the group: ranks of one group may heal from different ones.
        counters.elastic, window.agreed_reference = elastic, reference
        if self.is_main:
            logger.info("Healed from another replica group at step %d.", counters.train.global_step)

    def _laid_out(self, state: Mapping[str, Any]) -> dict[str, object]:
        """Return a state with tensors divided as this rank holds them."""
        own, laid_out = self.run_state.components(), dict(state)
        laid_out["model"] = laid_out_like(state["model"], own["model"])
        if "ema" in own:
            weights = laid_out_like(state["ema"]["weights"], own["ema"]["weights"])
            laid_out["ema"] = {**state["ema"], "weights": weights}
        if "optimizer" in own:
            laid_out["optimizer"] = sharded_optimizer_state(state["optimizer"], dict(self.named_parameters()))
        return laid_out


def packed(payload: Mapping[str, object], buffers: Iterable[Tensor]) -> dict[str, object]:
    """Return a state with the shards of this rank as plain tensors, without communication."""
    changing = {buffer.data_ptr() for buffer in buffers}

    def plain(tensor: Tensor) -> Tensor:
        local = local_part(tensor)
        return local.clone() if local.data_ptr() in changing else local

    converted: dict[str, Any] = convert(dict(payload), plain)
    return converted


def laid_out_like(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return plain tensors as tensors of the layout that this rank has under the same names."""
    return {name: with_local_part(own[name], tensor) if name in own else tensor for name, tensor in state.items()}


def sharded_optimizer_state(state: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]) -> dict[str, object]:
    """Return the state of an optimizer by parameter name, with moments divided as the parameters of this rank are."""
    entries = {
        name: {key: _shard_like(value, parameters.get(name)) for key, value in own.items()}
        for name, own in state["state"].items()
    }
    return {**state, "state": entries}


def _shard_like(value: object, parameter: nn.Parameter | None) -> Any:
    if parameter is None or not isinstance(value, Tensor) or not is_sharded(parameter):
        return value
    return with_local_part(parameter.detach(), value) if value.shape == local_part(parameter).shape else value

"""The state of a run in memory: one rank sends it, and a rank that is behind or new takes it over, without a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import TYPE_CHECKING, Any

from danling.data import BatchSource
from danling.data.run_data import RunData

from .attributes import KeptAttributes
from .observer_states import ObserverStates

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner


class LiveState:
    """Reads and loads all that a checkpoint contains but the seed, between two updates and without communication."""

    def __init__(
        self,
        runner: TorchRunner,
        attributes: KeptAttributes,
        data: RunData,
        observer_states: ObserverStates,
    ) -> None:
        self._runner = runner
        self._attributes = attributes
        self._data = data
        self._observer_states = observer_states

    def read(self) -> dict[str, Any]:
        """Return the state of this rank. Tensors of the components are those of the runner, not copies. May be called on one rank."""
        runner = self._runner
        progress = runner.run_state.progress(alone=True)
        return {
            **self._attributes.of_rank(),
            **self._observer_states.of_rank(),
            **runner.run_state.components(),
            "state": {name: part for name, part in progress.items() if name != "rng"},
            "dataloaders": {
                split: source.state_dict() for split, source in self._data.trained_sources().items()
            },
        }

    def load(
        self,
        state: Mapping[str, Any],
        *,
        lay_out: Callable[[Mapping[str, Any]], Mapping[str, object]] | None = None,
        keeps_position: Callable[[BatchSource], bool] | None = None,
    ) -> None:
        """Take over the state that `read` returned on another rank. May be called on one rank.

        Args:
            state: The state.
            lay_out: Returns the state with the components as this rank divides them; `None` if the other rank divides them so.
            keeps_position: Whether this rank keeps its own position in the batches of a split; `None` is never.
        """
        runner = self._runner
        own = copy(runner.state.elastic)
        # In the order of a resume.
        self._attributes.take_over("requires_grad", state)
        # Which weights a state has follows from those that require a gradient.
        components = state if lay_out is None else lay_out(state)
        runner.run_state.load_components(components, frozenset())
        self._attributes.take_over("buffers", state)
        sources = self._data.trained_sources()
        for split, position in state["dataloaders"].items():
            if keeps_position is None or not keeps_position(sources[split]):
                sources[split].load_state_dict(position)
        self._attributes.take_over("attributes", state)
        runner.run_state.load_progress(state["state"])
        self._observer_states.load(state)
        # Number of ranks, arithmetic and size of micro-batches are those of this process.
        runner.state.elastic = own

"""A batch of graphs, as torch_geometric makes it: one large graph, of which each sample is a part."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

from torch import Tensor

from .targets import TARGET_NAMES


def count_graphs(data: Any) -> int | None:
    """Return how many graphs a batch consists of, `None` where it is no batch of graphs."""
    return told_count(data, "num_graphs")


def told_count(data: Any, name: str) -> int | None:
    """Return a number that a batch tells in an attribute, `None` where it has none."""
    try:
        number = getattr(data, name, None)
    except Exception:
        return None
    return number if isinstance(number, int) and not isinstance(number, bool) else None


def target_of_graphs(data: object) -> object:
    """Return the target of a batch of graphs, `None` where it has no attribute out of `TARGET_NAMES`."""
    held = (getattr(data, name, None) for name in TARGET_NAMES)
    return next((found for found in held if found is not None), None)


def keywords_of_graphs(data: Any, forward: object) -> dict[str, object] | None:
    """Return what a model takes of a batch of graphs by name, `None` where it takes the batch itself.

    Models of layers take tensors, as in `forward(self, x, edge_index, batch)`. One with a single required parameter is given the batch,
    whatever that parameter is called.
    """
    takes, required = _parameters(forward)
    held = set(data.keys()) if callable(getattr(data, "keys", None)) else set()
    if len(required) < 2 or not held.issuperset(required):
        return None
    return {name: data[name] for name in takes if name in held}


def nodes_of_graphs(data: Any) -> list[int] | None:
    """Return the number of nodes of each graph of a batch, `None` where it is no batch of graphs."""
    graphs = count_graphs(data)
    if graphs is None:
        return None
    begins = getattr(data, "ptr", None)
    return begins.diff().tolist() if isinstance(begins, Tensor) and begins.ndim == 1 else [0] * graphs


@lru_cache(maxsize=64)
def _parameters(forward: Any) -> tuple[tuple[str, ...], frozenset[str]]:
    if forward is None:
        return (), frozenset()
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return tuple(p.name for p in named), frozenset(p.name for p in named if p.default is p.empty)

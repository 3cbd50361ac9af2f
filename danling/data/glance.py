"""Reading the first batches of a loader that is read from its beginning later on, as if nobody had looked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader as TorchDataLoader

from .source import BatchSource
from .user_loader import generator_states, set_generator_states


def can_glance(source: BatchSource) -> bool:
    """Whether a pass can be begun, left and begun anew with the same batches.

    An iterator, and a loader over one, give each batch once; and a loader with a state of its own that torch does not know keeps
    its place.

    Args:
        source: The source of a split. Nothing is read.
    """
    loader = source.loader
    if source.kind == "stateful" and not isinstance(loader, TorchDataLoader):
        return False
    return not any(hasattr(part, "__next__") for part in (loader, getattr(loader, "dataset", None)))


@contextmanager
def glanced(loader: Any) -> Iterator[None]:
    """Put the generators that the user gave a loader or its samplers back on exit, also after an error.

    Args:
        loader: The loader whose first batches are read inside; the streams that all share are the caller's to keep.
    """
    states = generator_states(loader)
    try:
        yield
    finally:
        set_generator_states(loader, states)

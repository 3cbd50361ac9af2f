"""Reading the first batches of a loader that is read from its beginning later on, as if nobody had looked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

from .dataset_state import get_states, set_states, stateful_parts
from .generators import Generators
from .plain_state import is_stateful
from .sampled_loader import SampledLoader
from .sampler_state import SamplerState
from .source import BatchSource


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
def glanced(loader: object) -> Iterator[None]:
    """Put what reading a loader changes in this process back on exit, also after an error.

    That is the generators that the loader, its samplers and its dataset hold, the attributes that samplers and iterable
    datasets change, and the state that a dataset has of its own.

    Args:
        loader: The loader whose first batches are read inside; the streams that all share are the caller's to keep.
    """
    dataset = getattr(loader, "dataset", None)
    generators = Generators({"loader": loader} if type(loader) not in (list, tuple, range) else {})
    states = generators.states()
    orders = [SamplerState(holder, None if holder is dataset else dataset) for holder in _holders_of_order(loader)]
    found = [order.capture() for order in orders]
    parts = stateful_parts(dataset)
    own = get_states(parts)
    try:
        yield
    finally:
        set_states(parts, own)
        for order, state in zip(orders, found, strict=True):
            order.restore(state)
        generators.set_states(states)


def _holders_of_order(loader: object) -> list[object]:
    if isinstance(loader, SampledLoader):
        return [loader.order.sampler]
    dataset = getattr(loader, "dataset", None)
    batches = getattr(loader, "batch_sampler", None)
    # No truth of a sampler is asked for: it may have no length.
    holders = [getattr(loader, "sampler", None) if batches is None else batches]
    if isinstance(dataset, IterableDataset) and not is_stateful(dataset):
        holders.append(dataset)
    return [holder for holder in holders if holder is not None]

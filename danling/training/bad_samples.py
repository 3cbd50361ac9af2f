"""Which sample of an update has NaN or infinity in its data; looked for only when an update is found not to be finite."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Subset

from danling.data import PLACEHOLDER, Batch, BatchSource
from danling.utils.trees import dotted, tensors

from .batches import is_pair
from .sample_count import find_samples

_NAMING = ("path", "file", "name", "url", "key", "id")
"""Parts of the keys under which a batch has texts that say where a sample is from."""


class GivenBatches(NamedTuple):
    """The micro-batches of an update on this rank, and the pass that they are of.

    Attributes:
        batches: The micro-batches as their source gave them.
        source: Their source, `None` where the program calls `train_step` with its own batches.
        epoch: The pass of the source.
    """

    batches: Sequence[Batch]
    source: BatchSource | None
    epoch: int

    def bad_sample(self) -> str | None:
        """Return where these batches have NaN, or else infinity: an empty text if all is finite, `None` if nothing is known."""
        # Batches may be of any class, and a look at them must not hide the error that it is for.
        with suppress(Exception):
            parts = [
                (number, batch, name, tensor)
                for number, batch in enumerate(self.batches, 1)
                if batch.samples != 0 and batch.data is not PLACEHOLDER
                for name, tensor in _tensors(batch.data)
            ]
            # NaN first: infinity may be meant, as in a mask.
            for is_bad, called in ((torch.isnan, "NaN"), (torch.isinf, "infinity")):
                for number, batch, name, tensor in parts:
                    bad = is_bad(tensor)
                    if bad.any():
                        return f"{called} in {name!r} of {self._samples(number, batch, bad)}"
            return "" if self.batches else None
        return None

    def _samples(self, number: int, batch: Batch, bad: Tensor) -> str:
        """Return which sample of a batch it is, and of how many more it is so."""
        samples = batch.samples
        if samples is None:
            samples, _ = find_samples(batch.data, batch.read)
        rows: list[int] = []
        row, which = None, f"micro-batch {number}"
        # Else the rows are no samples, such as where the time is first.
        if bad.ndim and len(bad) == samples:
            rows = bad.reshape(samples, -1).any(1).nonzero().flatten().tolist()
            row = rows[0]
            which = f"row {row} of micro-batch {number}"
        index = self._index(batch, row)
        if index is not None:
            which = f"sample {index}"
        of_split = f" of split {self.source.split!r}" if self.source is not None else ""
        file = _file(batch.data, row, samples, self.source, index)
        more = f", and of {len(rows) - 1} more samples" if len(rows) > 1 else ""
        return f"{which}{of_split}{file}{more}"

    def _index(self, batch: Batch, row: int | None) -> int | None:
        """Return the index in the dataset, `None` where the library does not make the order."""
        source = self.source
        if source is None or source.kind != "position" or not batch.place:
            return None
        if source.read.batch_size is None:
            row = 0  # an item of the dataset is a batch
        if row is None:
            return None
        index: int = source.position.order(self.epoch).indices(batch.place[0] + row, 1)[0]
        return index


def _tensors(data: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that may have NaN, with what they are called in the batch."""
    called = {"input": data[0], "target": data[1]} if is_pair(data) else data
    for path, tensor in tensors(called):
        if tensor.is_floating_point() or tensor.is_complex():
            yield dotted(path) or "input", tensor


def _file(
    data: Any, row: int | None, samples: int, source: BatchSource | None, index: int | None
) -> str:
    """Return what a batch, or a dataset with the list `samples` of torchvision, says of the file of a sample."""
    if isinstance(data, Mapping) and row is not None:
        for key, values in data.items():
            is_name = isinstance(key, str) and any(part in key.lower() for part in _NAMING)
            if (
                is_name
                and isinstance(values, (list, tuple))
                and len(values) == samples
                and isinstance(values[row], str)
            ):
                return f" ({key}={values[row][:200]!r})"
    dataset: Any = getattr(getattr(source, "loader", None), "dataset", None)
    while type(dataset) is Subset and index is not None:
        dataset, index = dataset.dataset, int(dataset.indices[index])
    listed = getattr(dataset, "samples", None)
    if isinstance(listed, list) and index is not None and index < len(listed):
        # `(path, class)` in the folders of torchvision.
        entry = listed[index]
        first = entry[0] if isinstance(entry, tuple) and entry else entry
        if isinstance(first, (str, os.PathLike)):
            return f" ({os.fspath(first)})"
    return ""

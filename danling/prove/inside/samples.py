"""The batches of a script: kept on a layout, and given to one process, joined or one after the other."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import json
import pickle
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Kept = list["tuple[list[int], bytes] | None"]
"""What an iterator has returned: the digests of the rows of each batch and the batch; `None` where it ended."""

_AHEAD = 64
"""Batches that an iterator may read beyond those of the layout: it gets the last one again."""
_PAD = {"labels": -100, "label_ids": -100, "decoder_labels": -100}


class CannotCompare(Exception):
    """The script does something that cannot be compared; the message says what."""


def leaves(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value; arrays of NumPy as tensors."""
    if isinstance(value, Tensor):
        yield value
    # By name, so that scripts without NumPy need not have it.
    elif type(value).__name__ == "ndarray" and value.dtype.kind in "biuf":
        yield torch.from_numpy(value)
    elif isinstance(value, (str, bytes)):
        return
    elif callable(getattr(value, "keys", None)):
        for key in sorted(value.keys(), key=str):
            yield from leaves(value[key])
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from leaves(each)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name))


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, and any other tensor as it is."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.detach()


def digest(tensors: Sequence[Tensor]) -> int:
    """Return a number for every bit of some tensors."""
    found = hashlib.blake2b(digest_size=7)
    for tensor in map(local_of, tensors):
        host = tensor.cpu().resolve_conj().contiguous().flatten()
        found.update(str((host.dtype, tuple(tensor.shape))).encode())
        found.update(host.view(torch.uint8).numpy().tobytes() if host.numel() else b"")
    return int.from_bytes(found.digest(), "little")


def rows_of(batch: Any) -> list[int]:
    """Return the digest of each row of a batch; of the whole where the tensors have no common first dimension."""
    found = [tensor for tensor in leaves(batch) if tensor.dim()]
    if found and len({len(tensor) for tensor in found}) == 1:
        return [digest([tensor[row] for tensor in found]) for row in range(len(found[0]))]
    if not found and isinstance(batch, (list, tuple)):
        return [hash_of(pickle.dumps(row)) for row in batch]
    return [digest(found)]


def hash_of(data: bytes) -> int:
    """Return a number for some bytes."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "little")


def join(batches: Sequence[Any], *, reverse: bool = False, key: object = None) -> Any:
    """Put batches together along the first dimension; the rows of shorter ones are padded at their ends."""
    first = batches[0]
    if isinstance(first, Tensor):
        return _joined(batches, reverse, key)
    if type(first).__name__ == "ndarray":
        return _joined([torch.from_numpy(each) for each in batches], reverse, key).numpy()
    if callable(getattr(first, "to_data_list", None)):  # graphs of PyTorch Geometric
        graphs = [graph for batch in batches for graph in batch.to_data_list()]
        return type(first).from_data_list(graphs[::-1] if reverse else graphs)
    if callable(getattr(first, "keys", None)):
        names = list(first.keys())
        return type(first)(
            {
                name: join([batch[name] for batch in batches], reverse=reverse, key=name)
                for name in names
            }
        )
    if isinstance(first, (list, tuple)):
        if next(leaves(first), None) is None:
            rows = [row for batch in batches for row in batch]
            return type(first)(rows[::-1] if reverse else rows)
        parts = [
            join(list(each), reverse=reverse, key=at)
            for at, each in enumerate(zip(*batches, strict=True))
        ]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        return dataclasses.replace(
            first,
            **{n: join([getattr(b, n) for b in batches], reverse=reverse, key=n) for n in names},
        )
    if all(
        each is None or (isinstance(each, (str, int, float, bool)) and each == first)
        for each in batches
    ):
        return first
    raise CannotCompare(
        f"batches with {type(first).__name__} at {key!r} cannot be joined: the ranks have other values"
    )


def _joined(parts: Sequence[Tensor], reverse: bool, key: object) -> Tensor:
    first = parts[0]
    if not first.dim():
        if not all(torch.equal(first, each) for each in parts):
            raise CannotCompare(
                f"batches with a number at {key!r} cannot be joined: the ranks have other values. Compute it from the rows of the batch"
            )
        return first
    size = [max(each.shape[dim] for each in parts) for dim in range(1, first.dim())]
    is_label = not first.is_floating_point() and any(bool((each == -100).any()) for each in parts)
    fill = _PAD.get(str(key), -100 if is_label else 0)
    padded = []
    for each in parts:
        room = each.new_full((len(each), *size), fill)
        # Sequences of the ranks are padded to their own longest one.
        room[tuple(slice(0, length) for length in each.shape)] = each
        padded.append(room)
    whole = torch.cat(padded)
    return whole.flip(0) if reverse else whole


class Loaders:
    """Keeps what the iterators of a script return, in the order in which they are first used; or returns what a layout has kept."""

    def __init__(self, source: Path | None, ranks: Sequence[int], how: str) -> None:
        self.how = how
        self.kept: list[Kept] = []
        self.lengths: dict[int, int] = {}
        self.seen = 0
        # Counted, since those that have ended leave the dictionaries.
        self._next_iterator, self._next_loader = itertools.count(), itertools.count()
        self._iterators: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        self._loaders: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._ranks: list[list[Kept]] | None = None
        if source is not None:
            self._ranks = [
                pickle.loads((source / f"rank-{rank}.batches").read_bytes()) for rank in ranks
            ]
            self.lengths = {
                int(at): length
                for at, length in json.loads((source / "lengths.json").read_text()).items()
            }

    def fetch(self, iterator: Any, original: Callable[[], Any]) -> Any:
        """Return the next batch of an iterator."""
        if iterator not in self._iterators:
            self._iterators[iterator] = [next(self._next_iterator), 0]
        entry = self._iterators[iterator]
        at, number = entry
        entry[1] += 1
        if self._ranks is not None:
            batch = self._replayed(self._ranks, at, number)
            self.seen += 1
            return batch
        while len(self.kept) <= at:
            self.kept.append([])
        try:
            batch = original()
        except StopIteration:
            self.kept[at].append(None)
            raise
        self.seen += 1
        # As bytes: the script may change a batch in place.
        room = io.BytesIO()
        torch.save(batch, room)
        self.kept[at].append((rows_of(batch), room.getvalue()))
        return batch

    def _replayed(self, ranks: Sequence[Sequence[Kept]], at: int, number: int) -> Any:
        step, which = divmod(number, len(ranks)) if self.how == "micro" else (number, 0)
        read = min((len(kept[at]) for kept in ranks if at < len(kept)), default=0)
        # Loaders read ahead, and in one process further than on a layout; what is trained on is counted.
        if read and step < read + _AHEAD:
            step = min(step, read - 1)
        else:
            raise CannotCompare(
                "one process needs more batches than the layout has read up to its last update: the number of micro-batches of an update, "
                "or the order in which loaders are used, depends on the number of processes"
            )
        entries = [
            entry
            for entry in (kept[at][step] for kept in ranks if at < len(kept))
            if entry is not None
        ]
        if not entries:
            raise StopIteration
        if self.how == "micro":
            entries = [entries[min(which, len(entries) - 1)]]
        batches = [torch.load(io.BytesIO(data), weights_only=False) for _, data in entries]
        # As it was, also where its kind of batch cannot be joined.
        if len(batches) == 1 and self.how != "reversed":
            return batches[0]
        return join(batches, reverse=self.how == "reversed")

    def made(self, loader: Any) -> None:
        """Count a loader."""
        if loader not in self._loaders:
            self._loaders[loader] = next(self._next_loader)

    def length(self, loader: Any, original: Callable[[], int]) -> int:
        """Return the number of batches of a loader: that of the layout, since schedules and last windows depend on it."""
        at = self._loaders.get(loader, -1)
        if self._ranks is not None and at in self.lengths:
            return self.lengths[at]
        length = original()
        if self._ranks is None:
            self.lengths[at] = length
        return length

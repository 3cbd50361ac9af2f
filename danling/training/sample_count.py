"""How many samples a batch has: as many as the loader has read, unless all parts of the batch have another length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from danling.utils.trees import tensors

from .batches import told_count

_Lengths = tuple[int, ...]
"""The numbers of samples that a part of a batch may have, the likelier one first."""

_PLAIN = (str, bytes, int, float)
"""Types of values that have no length of samples."""
_PAIR = 2
"""Entries of a batch that are input and target, and not two samples."""


def count_samples(data: object) -> int:
    """Return the number of samples of a batch, the first dimension of its tensors; 1 for an object in which nothing can be counted.

    A list of tensors of different lengths, or of mappings, has a sample in each entry. Where the parts of a batch have different lengths,
    the first part counts.

    A batch of another library says by itself how many it has: of graphs `num_graphs`, of neighbours that were sampled around some
    nodes `batch_size`, the number of these.
    """
    return find_samples(data)[0]


def left_samples(data: object, read: float) -> float:
    """Return how many of the samples that were read for a batch are in it; see `find_samples`. Padding has none."""
    return find_samples(data, read)[0] if read else 0


def find_samples(data: object, read: float | None = None) -> tuple[int, bool]:
    """Return the number of samples of a batch, and whether that is certain.

    The loader knows how many samples it has read. A collate function may leave some out, or make several rows of each: then all parts
    of the batch have another length than that, and the same one.

    Args:
        data: The batch.
        read: How many samples the loader has read for it; `None` where it does not know.
    """
    parts = _lengths(data, read)
    if not parts:
        is_one = data is None or isinstance(data, (*_PLAIN, Tensor))
        return (1, is_one) if read is None else (int(read), True)
    shared = [length for length in parts[0] if all(length in part for part in parts)]
    common = list(dict.fromkeys(shared))
    if read is None:
        return (common or parts[0])[0], len(common) == 1
    if read in common:
        return int(read), True
    if not common:
        # Sequences with the time first, or joined ones, together with a tensor that has a row for each sample.
        return int(read), any(read in part for part in parts) or _has_columns(data, read)
    if _has_columns(data, read, rows=common[0]):
        # Sequences with the time first, or what is left of other samples: only the user knows.
        return int(read), False
    # Documents that are joined in one row, or the one sample that is left.
    is_row = common[0] == 1 and all(tensor.dim() > 1 for _, tensor in tensors(data))
    return common[0], len(common) == 1 and not is_row


def lengths_of(data: object, read: float | None = None) -> list[int]:
    """Return the lengths that the parts of a batch have, for a message."""
    return sorted({length for part in _lengths(data, read) for length in part})


def _lengths(data: object, read: float | None, *, is_inner: bool = False) -> list[_Lengths]:
    """Return for each part of a batch that has a length which numbers of samples it may have."""
    if isinstance(data, Tensor):
        return [(data.size(0),)] if data.dim() else []
    if data is None or isinstance(data, (*_PLAIN, type)):
        return []
    if isinstance(data, PackedSequence):
        return [(int(data.batch_sizes[0]),)]
    if isinstance(data, Mapping):
        return _lengths_of_all(list(data.values()), read)
    if isinstance(data, Sequence):
        return _lengths_of_list(data, read, is_inner)
    told = told_count(data, "num_graphs", "batch_size")
    if told is not None:
        return [(told,)]
    if is_dataclass(data):
        return _lengths_of_all([getattr(data, field.name, None) for field in fields(data)], read)
    shape = getattr(data, "shape", None)  # an array of NumPy
    return [(shape[0],)] if isinstance(shape, tuple) and shape else []


def _lengths_of_all(values: Sequence[object], read: float | None) -> list[_Lengths]:
    return [length for value in values for length in _lengths(value, read, is_inner=True)]


def _lengths_of_list(items: Sequence[object], read: float | None, is_inner: bool) -> list[_Lengths]:
    """Return the lengths of a list: it has a sample in each entry, as `tuple(zip(*samples))` has, or columns with a row for each sample.

    Entries of another kind than each other are columns. So are those of a pair, which is input and target.
    """
    are_alike = _are_alike(items)
    if are_alike and (len(items) == read or (is_inner and all(map(_is_plain, items)))):
        return [(len(items),)]
    is_pair = len(items) <= _PAIR and not is_inner and not _are_as_read(items)
    if not are_alike or is_pair:
        return _lengths_of_all(items, read)
    rows = [_lengths(item, read, is_inner=True) for item in items]
    columns = [length for each in rows for length in each]
    if read is not None and columns:
        have_read = all(any(read in length for length in each) for each in rows)
        if have_read or (not is_inner and _has_columns(items, read)):
            return columns
    common = set.intersection(*map(set, columns)) if columns else set()
    if not any(isinstance(item, Tensor) for item in items):
        return [(len(items), *common)]
    if is_inner:
        return [(*common, len(items)) if read is None else (len(items), *common)]
    if not common:
        of_first = columns[0] if columns else ()
        return [(len(items), *of_first)]
    # Three columns and more of equal length are usual; three samples of another length than was read are not.
    return [tuple(common) if read is None else (*common, len(items))]


def _are_as_read(items: Sequence[object]) -> bool:
    """Whether a batch is a list of mappings, tuples or texts, which is what a loader hands to its collate function."""
    return isinstance(items, list) and all(
        isinstance(item, (Mapping, tuple, str)) for item in items
    )


def _is_plain(item: object) -> bool:
    """Whether an entry has no length of samples: a value, or a list of values, such as the tokens of a sample."""
    return isinstance(item, _PLAIN) or (
        isinstance(item, (tuple, list)) and all(isinstance(value, _PLAIN) for value in item)
    )


def _are_alike(items: Sequence[object]) -> bool:
    """Whether entries may be samples of one dataset: of one type, and tensors of as many dimensions. Any may be missing."""
    kinds = set(map(type, items)) - {type(None)}
    if all(issubclass(kind, _PLAIN) for kind in kinds):
        return True
    if len(kinds) > 1:
        return False
    present = [item for item in items if item is not None]
    return all(_is_alike(present[0], item) for item in present)


def _is_alike(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dim() == other.dim() and one.dtype == other.dtype
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        if len(one) != len(other):
            return isinstance(one, list)  # such as the words of a sentence
        return isinstance(next(iter(one), 0), _PLAIN) or all(map(_is_alike, one, other))
    return type(one) is type(other)


def _has_columns(data: object, read: float, *, rows: int | None = None) -> bool:
    """Whether all tensors have a column for each sample that was read, and so many rows: those of sequences with the time first."""
    found = [tensor for _, tensor in tensors(data)]
    return bool(found) and all(
        not each.is_nested
        and each.dim() > 1
        and each.size(1) == read
        and rows in (None, each.size(0))
        for each in found
    )

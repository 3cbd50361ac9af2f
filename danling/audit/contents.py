"""How the contents of two checkpoints differ: where, and by how much of the stored value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_NOT_COMPARED = frozenset({"runner", "format_version"})
_NOT_COMPARED_OF_STATE = frozenset({"elastic", "attempts"})
_OF_RANKS = ("state/rng", "state/train/weight_reference")
"""What a checkpoint holds for each rank, so that it is another one where the number of ranks is."""

_OF_IMPLEMENTATION = frozenset({"params", "param_names", "fused", "foreach", "capturable", "differentiable"})


@dataclass(frozen=True)
class Difference:
    """An entry that two checkpoints do not have bitwise alike.

    Attributes:
        path: Where it is, such as `model/0.weight`.
        share: The norm of the difference as a share of that of the stored value, infinite where this is 0; `None` where an entry is missing
            or is nothing that has one, such as a text, integers, or tensors of two shapes.
    """

    path: str
    share: float | None

    @property
    def is_of_ranks(self) -> bool:
        """Whether it is another one where the number of ranks is."""
        return f"{self.path}/".startswith(tuple(f"{name}/" for name in _OF_RANKS))

    @property
    def is_of_implementation(self) -> bool:
        """Whether it says how an optimizer computes and calls its parameters, which each layout does in its own way."""
        parts = self.path.split("/")
        return parts[:2] == ["optimizer", "param_groups"] and bool(_OF_IMPLEMENTATION.intersection(parts[2:]))


def differences_of(stored: Mapping[str, Any], trained: Mapping[str, Any]) -> list[Difference]:
    """Return what two checkpoints do not have bitwise alike, less what says by whom and how they were made.

    Args:
        stored: Contents of a checkpoint.
        trained: Those that they are compared with.
    """
    return [Difference(path.lstrip("/"), share) for path, share in _found(_compared(stored), _compared(trained), "")]


def ranks_of(payload: Mapping[str, Any]) -> int | None:
    """Return how many ranks made a checkpoint, `None` where it does not say.

    Args:
        payload: Its contents.
    """
    state = payload.get("state")
    elastic = state.get("elastic") if isinstance(state, Mapping) else None
    size = elastic.get("world_size") if isinstance(elastic, Mapping) else None
    return int(size) if size is not None else None


def share_of(first: Tensor, second: Tensor) -> float:
    """Return the norm of the difference of two tensors as a share of that of the first one, in float64; infinite where this is 0.

    Args:
        first: A tensor of floating-point or complex numbers.
        second: One of the same shape.
    """
    kind = torch.complex128 if first.is_complex() or second.is_complex() else torch.float64
    before, after = (value.detach().to("cpu", kind) for value in (first, second))
    whole, apart = float(torch.linalg.vector_norm(before)), float(torch.linalg.vector_norm(after - before))
    return apart / whole if whole else float("inf") if apart else 0.0


def _compared(payload: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in payload.items() if name not in _NOT_COMPARED}
    state = kept.get("state")
    if isinstance(state, Mapping):
        kept["state"] = {name: value for name, value in state.items() if name not in _NOT_COMPARED_OF_STATE}
    return kept


def _found(first: Any, second: Any, path: str) -> Iterator[tuple[str, float | None]]:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if not _same_bits(first, second):
            is_measured = first.shape == second.shape and _has_fractions(first) and _has_fractions(second)
            yield path, share_of(first, second) if is_measured else None
    elif isinstance(first, Mapping) and isinstance(second, Mapping):
        keys = [*first, *(key for key in second if key not in first)]
        for key in sorted(keys, key=lambda key: key in first and key in second):
            if key in first and key in second:
                yield from _found(first[key], second[key], f"{path}/{key}")
            else:
                yield f"{path}/{key}", None
    elif isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)) and len(first) == len(second):
        for number, pair in enumerate(zip(first, second)):
            yield from _found(*pair, f"{path}/{number}")
    elif not (first == second or (first != first and second != second)):
        is_measured = isinstance(first, float) and isinstance(second, (int, float))
        yield (
            path,
            share_of(*(torch.tensor(float(each), dtype=torch.float64) for each in (first, second)))
            if is_measured
            else None,
        )


def _has_fractions(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _same_bits(first: Tensor, second: Tensor) -> bool:
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    # Zeros of two signs are equal, and NaNs are not.
    return torch.equal(
        first.contiguous().reshape(-1).view(torch.uint8), second.contiguous().reshape(-1).view(torch.uint8)
    )

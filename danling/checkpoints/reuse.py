"""Finds the tensors that a save need not write again, by comparing checksums with those of the save before it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from danling.utils.tensors import local_part

from .dcp_plans import flatten


@dataclass(frozen=True)
class Reuse:
    """Tensors that are not written again.

    Attributes:
        target: Name of the target beside the new one that holds them.
        names: Their dotted names.
    """

    target: str
    names: frozenset[str]


@dataclass(frozen=True)
class SavedAhead:
    """A target that was written before an evaluation, whose metrics belong to the same state.

    Attributes:
        target: Its name.
        step: Committed updates.
        sums: SHA-256 of this rank's part of each tensor, by dotted name.
    """

    target: str
    step: int
    sums: dict[str, str]

    def reuse(
        self, payload: Mapping[str, object], exchange: Callable[[Any], list[Any]], *, exists: bool
    ) -> Reuse | None:
        """Return the tensors that are unchanged in a later payload on every rank, `None` if there are none. Call on all ranks.

        The contents are compared, so that a tensor that the evaluation has changed, such as a buffer, is saved again.
        """
        sums = tensor_sums(payload)
        same = {name for name, value in sums.items() if exists and self.sums.get(name) == value}
        ranks = exchange((same, sums.keys() - same))
        names = frozenset().union(*(kept for kept, _ in ranks)).difference(*(changed for _, changed in ranks))
        return Reuse(self.target, names) if names else None


def tensor_sums(payload: Mapping[str, object]) -> dict[str, str]:
    """Return the SHA-256 of this rank's part of each dense tensor of a state, with dtype and shape, by dotted name."""
    tensors = {name: leaf for name, leaf in flatten(payload)[0].items() if isinstance(leaf, Tensor)}
    return {name: _sum(tensor) for name, tensor in tensors.items() if local_part(tensor).layout == torch.strided}


def _sum(tensor: Tensor) -> str:
    local = local_part(tensor)
    about = f"{tensor.dtype} {tuple(tensor.shape)} {tuple(local.shape)}"
    plain = local.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    content = plain.view(torch.uint8).numpy()
    digest = hashlib.sha256(about.encode())
    digest.update(content.data)
    return digest.hexdigest()

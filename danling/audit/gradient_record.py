"""What each rank writes of the first updates of a run, so that another process can compare it with a run on one process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from danling.utils.tensors import is_sharded, local_part

WEIGHTS = "weights.pt"
"""File with the weights that the run on one process began with."""


@dataclass(frozen=True)
class Part:
    """What a rank holds of a tensor.

    Attributes:
        offset: Where it begins in the whole tensor, along each dimension.
        shape: Of the whole tensor.
        tensor: The part; `None` for a gradient that there is not.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    tensor: Tensor | None

    def of(self, whole: Tensor) -> Tensor:
        """Return the same part of another whole tensor.

        Args:
            whole: A tensor of the shape `self.shape`.
        """
        assert self.tensor is not None
        return whole[tuple(slice(start, start + length) for start, length in zip(self.offset, self.tensor.shape))]


@dataclass(frozen=True)
class UpdateRecord:
    """One update, as a rank saw it.

    Attributes:
        loss: Weighted mean over all ranks.
        weight: What the gradient was divided by: the weights of all ranks together.
        samples: Samples of all ranks together.
        digest: Sum of the digests of the samples that this rank counts, an integer modulo 2^64.
        norm: 2-norm of the whole gradient, before it is clipped.
        gradients: By name, before they are clipped.
        weights: By name, after the update.
        buffers: By name, after the update.
    """

    loss: float
    weight: float
    samples: float
    digest: int
    norm: float
    gradients: Mapping[str, Part]
    weights: Mapping[str, Part]
    buffers: Mapping[str, Tensor]


@dataclass(frozen=True)
class RankRecord:
    """A rank of a run whose first updates were recorded.

    Attributes:
        rank: Global rank.
        coordinate: Its coordinate on each axis; `data` where ranks differ by their samples only.
        degrees: Number of ranks along each axis.
        trained: Names of the parameters that the optimizer updates.
        tied: Further names of parameters that have several, by these names: the name under which they are listed.
        initial: Names of weights that were not those of one process before they were replaced by these.
        dropped: Modules whose dropout was switched off.
        drops_in_calls: Whether that of calls of functions was.
        draws: Whether forward or backward drew random numbers all the same.
        held_norms: Modules of batch normalization that were given their running statistics.
        batch_norms: Modules that normalize by the statistics of a batch all the same.
        eps: Relative precision of the coarsest dtype that gradients were computed in.
        coarse: Whether that is coarser than those of the parameters.
        updates: Number of updates that are recorded.
    """

    rank: int
    coordinate: Mapping[str, int]
    degrees: Mapping[str, int]
    trained: Sequence[str]
    tied: Mapping[str, str]
    initial: Sequence[str]
    dropped: int
    drops_in_calls: bool
    draws: bool
    held_norms: int
    batch_norms: int
    eps: float
    coarse: bool
    updates: int
    directory: Path = field(default_factory=Path)

    def update(self, number: int) -> UpdateRecord:
        """Read what was recorded of an update, which is mapped into memory.

        Args:
            number: Counted from 1.
        """
        found = torch.load(_update_file(self.directory, self.rank, number), weights_only=True, mmap=True)
        parts = {
            kind: {
                name: Part(tuple(offset), tuple(shape), value) for name, (offset, shape, value) in found[kind].items()
            }
            for kind in ("gradients", "weights")
        }
        return UpdateRecord(**{**found, **parts})


def part_of(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return where this rank's part of a tensor begins, and the shape of the whole. No communication.

    Args:
        tensor: A plain tensor, or a DTensor.
    """
    if not is_sharded(tensor):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    held: Any = tensor
    _, offset = compute_local_shape_and_global_offset(tensor.shape, held.device_mesh, held.placements)
    return tuple(offset), tuple(tensor.shape)


def recorded(tensor: Tensor, value: Tensor | None) -> tuple[tuple[int, ...], tuple[int, ...], Tensor | None]:
    """Return the place of a tensor, and a copy in host memory of what this rank holds of it.

    Args:
        tensor: Has the place.
        value: Is copied: the tensor or its gradient; `None` where there is none.
    """
    offset, shape = part_of(tensor if value is None else value)
    return offset, shape, None if value is None else local_part(value.detach()).to("cpu", copy=True)


def write_update(directory: Path, rank: int, number: int, values: Mapping[str, Any]) -> None:
    """Write an update of a rank; `values` are those of `UpdateRecord`, with parts as `recorded` returns them."""
    torch.save(dict(values), _update_file(directory, rank, number))


def write_rank(record: RankRecord) -> None:
    """Write what is known of a rank, which says that all of its updates are there."""
    values = {key: value for key, value in asdict(record).items() if key != "directory"}
    target = _rank_file(record.directory, record.rank)
    torch.save(values, target.with_suffix(".new"))
    os.replace(target.with_suffix(".new"), target)


def is_complete(directory: Path, ranks: int) -> bool:
    """Whether all ranks have written all that they record."""
    return all(has_recorded(directory, rank) for rank in range(ranks))


def has_recorded(directory: Path, rank: int) -> bool:
    """Whether a rank has written all that it records."""
    return _rank_file(directory, rank).exists()


def count_updates(directory: Path, rank: int) -> int:
    """Return how many updates a rank has written."""
    return len(list(directory.glob(f"rank-{rank}.update-*.pt")))


def read_ranks(directory: Path, ranks: int) -> list[RankRecord]:
    """Return what all ranks have written, by rank."""
    found = (torch.load(_rank_file(directory, rank), weights_only=True) for rank in range(ranks))
    return [RankRecord(**values, directory=directory) for values in found]


def _update_file(directory: Path, rank: int, number: int) -> Path:
    return directory / f"rank-{rank}.update-{number}.pt"


def _rank_file(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.pt"

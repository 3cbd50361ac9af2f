"""Reads the weights that `torch_checkpointing` wrote: a directory with `model_0.pt`, `model_1.pt` and so on, of one rank each.

Its `metadata.pkl` is a pickle and is not read: a divided tensor itself says how it is divided.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from danling.utils.tensors import is_sharded

from .errors import CheckpointDamaged, CheckpointMismatch

_FILE = re.compile(r"model_(\d{1,9})\.pt")


def rank_files(directory: Path) -> dict[int, Path]:
    """Return the file of each rank.

    Raises:
        CheckpointMismatch: If the weights are in other files.
    """
    # Torch's safe reader knows divided tensors after this import only.
    import_module("torch.distributed.tensor")
    found = {int(match[1]): path for path in directory.iterdir() if (match := _FILE.fullmatch(path.name))}
    if not found:
        raise CheckpointMismatch(
            f"Expected weights in model_0.pt and so on. Received: {directory}, a directory of torch_checkpointing without such files; its "
            "metadata.pkl is a pickle, and is not read. Load it with torch_checkpointing, and save `model.state_dict()` with torch.save."
        )
    return dict(sorted(found.items()))


def join_ranks(weights: Mapping[int, Mapping[str, Tensor]], source: Path) -> dict[str, Tensor]:
    """Return the whole weights out of those of the ranks.

    Raises:
        CheckpointDamaged: If a share is missing.
        CheckpointMismatch: If ranks have different tensors that are not divided.
    """
    names = dict.fromkeys(name for of_rank in weights.values() for name in of_rank)
    joined = {}
    for name in names:
        shares = {rank: of_rank[name] for rank, of_rank in weights.items() if name in of_rank}
        first = next(iter(shares.values()))
        if any(map(is_sharded, shares.values())):
            try:
                joined[name] = _whole(shares)
            except Exception as error:  # of what a file claims
                raise CheckpointDamaged(
                    f"Expected every share of {name}. Received: the files of {len(weights)} ranks in {source}, which do not come to one "
                    f"tensor ({error}). Copy all files of the directory."
                ) from error
        elif all(torch.equal(_bits(first), _bits(share)) for share in shares.values()):
            joined[name] = first
        else:
            raise CheckpointMismatch(
                f"Expected DTensors, or the same tensor on all ranks. Received: {name} in {source}, which differs between ranks. If rank 0 "
                f"has the whole model, load {source / 'model_0.pt'}."
            )
    return joined


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().flatten().view(torch.uint8)


def _whole(shares: Mapping[int, Any]) -> Tensor:
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    first = next(iter(shares.values()))
    shape, stored = first.shape, sum(share._local_tensor.numel() for share in shares.values())
    if stored < math.prod(shape):
        raise ValueError(f"{stored} of {math.prod(shape)} elements are there")
    result: Tensor = first._local_tensor.new_empty(shape)
    is_filled = torch.zeros(shape, dtype=torch.bool)
    for rank, share in shares.items():
        mesh = share.device_mesh
        ranks = mesh.mesh.flatten().tolist() if math.prod(mesh.shape) <= len(shares) else []
        if share.shape != shape or ranks.count(rank) != 1:
            raise ValueError(f"rank {rank} has another shape or is not in its mesh {tuple(mesh.shape)}")
        if any(placement.is_partial() for placement in share.placements):
            raise ValueError("they are partial sums")
        coordinate = [int(place) for place in torch.unravel_index(torch.tensor(ranks.index(rank)), mesh.shape)]
        size, offset = _compute_local_shape_and_global_offset(shape, mesh.shape, coordinate, share.placements)
        region = tuple(slice(start, start + length) for start, length in zip(offset, size))
        if share._local_tensor.shape != size:
            raise ValueError(f"rank {rank} has {tuple(share._local_tensor.shape)} instead of {tuple(size)}")
        result[region], is_filled[region] = share._local_tensor, True
    if not is_filled.all():
        raise ValueError(f"{int((~is_filled).sum())} elements are missing")
    return result

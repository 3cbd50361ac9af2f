"""Which of the ranks that hold equal parts of a tensor writes one, settled by each of them for itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor


def own_share(items: Sequence[WriteItem], state: Mapping[str, object]) -> list[WriteItem]:
    """Return what this rank writes of the parts that it and its replicas hold.

    Along the axes of a mesh that do not divide a tensor, ranks hold equal parts of it and plan the same. Every one of them gives the
    next part to the replica that has the fewest bytes so far, and comes to the same division as the others without a word between
    them, so that rank 0 is sent each part once, however many replicas there are. A number beside a sharded tensor, such as
    the count of steps in the state of an optimizer, goes with it. Other plain tensors are left to rank 0: which ranks have
    them is not known here.
    """
    beside = {name.rpartition(".")[0]: leaf for name, leaf in state.items() if isinstance(leaf, DTensor)}
    written: dict[object, list[int]] = {}
    places: dict[object, tuple[int, int, object]] = {}
    mine = []
    for item in items:
        leaf = state[item.index.fqn]
        if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor) and not leaf.ndim:
            leaf = beside.get(item.index.fqn.rpartition(".")[0])
        layout = (leaf.device_mesh, leaf.placements) if isinstance(leaf, DTensor) else None
        if layout not in places:
            places[layout] = _replicas(leaf) if isinstance(leaf, DTensor) else (1, 0, None)
        replicas, place, group = places[layout]
        load = written.setdefault(group, [0] * replicas)
        writer = load.index(min(load))
        load[writer] += _nbytes(item)
        if writer == place:
            mine.append(item)
    return mine


def _replicas(tensor: DTensor) -> tuple[int, int, object]:
    """Return how many ranks hold the same part, which of them this one is, and a key that is the same for tensors of the same ranks."""
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    axes = tuple(axis for axis, placement in enumerate(tensor.placements) if placement.is_replicate())
    if coordinate is None:
        return 1, 0, None
    place = 0
    for axis in axes:
        place = place * mesh.size(axis) + coordinate[axis]
    return math.prod(mesh.size(axis) for axis in axes), place, (mesh, axes)


def _nbytes(item: WriteItem) -> int:
    data = item.tensor_data
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize if data is not None else 0

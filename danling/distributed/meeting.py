"""Finding out without a collective whether all ranks have come to the same place."""

from __future__ import annotations

import time

from torch import distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

_PAUSE_SECONDS = 0.02


def all_arrive(name: str, *, seconds: float) -> bool:
    """Return whether every rank of the job comes here within some seconds; each is told the same.

    A collective would hang, or pair with another one, where some ranks wait for each other elsewhere. May be called on some
    ranks only.

    Args:
        name: What the ranks come here for; used once.
        seconds: How long to wait for the others.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return True
    store, size = _get_default_store(), dist.get_world_size()
    arrived, left = f"danling/{name}/arrived", f"danling/{name}/left"
    store.add(arrived, 1)
    end = time.monotonic() + seconds
    while store.add(arrived, 0) < size:
        if time.monotonic() > end:
            # Who comes now is told as well.
            store.add(left, 1)
            return False
        time.sleep(_PAUSE_SECONDS)
    return store.add(left, 0) == 0

"""Repeats the micro-batches of an update in smaller ones when memory runs out, before anything was updated."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from danling.utils.protocols import ReductionDomain


class MemoryRetry:
    """Runs the forwards and backwards of an update, and undoes them on all ranks if memory ran out on any.

    They must not communicate: a rank that ran out would leave the others waiting. Afterwards the ranks agree in one collective
    whether one of them did.

    Args:
        domain: Ranks that share an update.
        device: Where they compute.
        ran_out: Tells whether an error says that memory ran out.
    """

    def __init__(self, domain: ReductionDomain, device: torch.device, ran_out: Callable[[BaseException], bool]) -> None:
        self.domain = domain
        self.device = device
        self.ran_out = ran_out

    def attempt(self, make: Callable[[], object], take_back: Callable[[], None]) -> bool:
        """Return whether all ranks succeeded; if one did not, undo the changes on all. Call on all ranks.

        Args:
            make: Makes all micro-batches of this rank, without communication.
            take_back: Undoes the changes of `make`, even if it stopped half-way.

        Raises:
            Exception: What `make` raises, unless memory ran out.
        """
        failed = self._fails(make)
        # Not in the `except` block: the traceback would keep the tensors of the forward alive.
        if self.domain.size > 1:
            failed = bool(self.domain.all_reduce(torch.tensor(float(failed), dtype=torch.float64), "max").item())
        if failed:
            take_back()
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        return not failed

    def _fails(self, make: Callable[[], object]) -> bool:
        try:
            make()
        except Exception as error:
            if not self.ran_out(error):
                raise
            return True
        return False

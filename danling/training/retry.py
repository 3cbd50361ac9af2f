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

    def run(
        self,
        make: Callable[[], object],
        *,
        held: int,
        prepare: Callable[[int], None],
        remember: Callable[[], Callable[[], None]],
        shrink: Callable[[int, int], None],
    ) -> bool:
        """Make the micro-batches of an update; if memory ran out on any rank, halve their size. Call on all ranks.

        Args:
            make: Makes all micro-batches of this rank, without communication.
            held: Samples that a rank holds at once.
            prepare: Called with `held` before the update; does what ranks otherwise do together during it.
            remember: Returns a function that undoes the changes of `make`.
            shrink: Called with the number of samples held so far and the number to hold from now on.

        Returns:
            Whether they were made; `False` where they are to be read again in smaller ones.

        Raises:
            Exception: What `make` raises, including that memory ran out if one sample is already the size.
        """
        prepare(held)
        if held == 1:
            # Nothing is left to halve: the user gets the error with its traceback.
            make()
            return True
        if self.attempt(make, remember()):
            return True
        shrink(held, held // 2)
        return False

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

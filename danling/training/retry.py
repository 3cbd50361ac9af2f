"""Making the micro-batches of an update again when memory ran out: nothing has been updated yet."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from danling.utils.protocols import ReductionDomain


class MemoryRetry:
    """Runs the forwards and backwards of an update, and takes them back on all ranks when memory ran out on any.

    They must not communicate: a rank that ran out would leave the others waiting. Whether one did is agreed afterwards, in
    one collective.

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
        """Make the micro-batches of an update; where memory ran out on any rank, have them halved. Call on all ranks.

        Args:
            make: Makes all micro-batches of this rank, without communication.
            held: Samples that a rank holds at once.
            prepare: Does before the update, and is told `held`, what ranks otherwise do together within it.
            remember: Returns what puts back what `make` changes.
            shrink: Is told how many samples were held and how many are to be held from now on.

        Returns:
            Whether they were made; `False` where they are to be read again in smaller ones.

        Raises:
            Exception: What `make` raises; also that memory ran out, where there is nothing left to halve.
        """
        prepare(held)
        if held == 1:
            # The error is the user's, with its traceback.
            make()
            return True
        if self.attempt(make, remember()):
            return True
        shrink(held, held // 2)
        return False

    def attempt(self, make: Callable[[], object], take_back: Callable[[], None]) -> bool:
        """Return whether all ranks have made it; where one has not, it is taken back on all. Call on all ranks.

        Args:
            make: Makes all micro-batches of this rank, without communication.
            take_back: Puts back what `make` has changed, also where it was left in the middle.

        Raises:
            Exception: What `make` raises, unless memory ran out.
        """
        failed = self._fails(make)
        # Here and not where it is caught: the traceback would keep the tensors of the forward alive.
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

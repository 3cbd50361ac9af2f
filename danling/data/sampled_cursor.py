"""The position in a loader that reads in the order of a sampler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data.distributed import DistributedSampler

from .cursors import Batch, Cursor
from .sampled_loader import SampledLoader


class SampledCursor(Cursor):
    """Position in a loader that reads in the order of a sampler: `consumed` counts batches of this rank."""

    kind = "sampled"
    is_rank_local = True
    loader: SampledLoader

    @property
    def epoch(self) -> int:  # type: ignore[override]
        """Pass of the position."""
        return self.loader.epoch

    @property
    def consumed(self) -> int:  # type: ignore[override]
        """Batches of the pass that are consumed on this rank."""
        return self.loader.consumed

    @property
    def even(self) -> bool:
        """Whether there is one rank only, or a sampler that gives each the same number."""
        sampler = self.loader.order.sampler
        divided = isinstance(getattr(sampler, "sampler", sampler), DistributedSampler)
        return self.world_size == 1 or divided

    def num_batches(self) -> int | None:
        """Return the batches of a whole pass on this rank, `None` where the sampler has no length."""
        return None if self.loader.order.length is None else len(self.loader)

    def remaining_batches(self) -> int | None:
        """Return the batches from the position on, `None` where the sampler has no length."""
        return self.loader.order.remaining()

    def batches(self) -> Iterator[Batch]:
        """Yield the batches from the position on."""
        if self.remaining_batches() == 0:
            return
        for data in self.loader:
            yield Batch(data, None, None)

    def commit(self, batches: int) -> None:
        """Move the position by so many batches."""
        self.loader.advance(batches)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of a pass."""
        self.loader.order.set_epoch(epoch)

    def finish_pass(self) -> None:
        """Go to the beginning of the next pass."""
        self.set_epoch(self.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and how the pass found the sampler."""
        return dict(self.loader.state_dict())

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go to a position."""
        self.check_world_size(state)
        self.loader.load_state_dict(dict(state))

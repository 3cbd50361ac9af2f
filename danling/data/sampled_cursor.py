"""The position in a loader that reads in the order of a sampler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch.utils.data.distributed import DistributedSampler

from .cursors import Batch, KeptCursor
from .sampled_loader import SampledLoader


class SampledCursor(KeptCursor):
    """Position in a loader that reads in the order of a sampler: `consumed` counts batches of this rank."""

    kind = "sampled"
    is_rank_local = True
    loader: SampledLoader

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
        for number, data in enumerate(self.loader, self.consumed):
            yield Batch(data, None, None, place=(self.rank, number))

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of a pass."""
        self.loader.order.set_epoch(epoch)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go to a position."""
        self.check_world_size(state)
        super().load_state_dict(state)

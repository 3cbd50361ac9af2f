"""How the samples of an update, or of a global batch, are divided over ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


def part(total: int, parts: int, index: int) -> tuple[int, int]:
    """Return offset and size of one of the parts of a whole that is divided as evenly as can be, larger parts first."""
    size, larger = divmod(total, parts)
    return index * size + min(index, larger), size + (index < larger)


@dataclass(frozen=True)
class Division:
    """Which samples of a stretch of the order each rank takes, and in which micro-batches.

    A rank takes a contiguous share, which it cuts into micro-batches. Shares differ by at most one sample, and so do
    the micro-batches of a rank. All ranks make equally many micro-batches, so that what they do together, such as the
    reduction of gradients, stays in step; where a share has fewer samples than that, some micro-batches are empty.

    Attributes:
        samples: Samples of a full stretch, over all ranks.
        world_size: Number of ranks.
        micro_batch_size: The most samples that a rank holds at once.
        micro_batches: Micro-batches of a full stretch on each rank.
        is_update: Whether a stretch is a whole update; else an update is made of several, as `accum_steps` says.
    """

    samples: int
    world_size: int
    micro_batch_size: int
    micro_batches: int
    is_update: bool

    @classmethod
    def of_batch(cls, batch_size: int, world_size: int) -> Division:
        """Divide a global batch of `batch_size` samples on each rank."""
        return cls(batch_size * world_size, world_size, batch_size, 1, is_update=False)

    @classmethod
    def of_update(
        cls, samples: int, world_size: int, *, micro_batches: int = 1, micro_batch_size: int | None = None
    ) -> Division:
        """Divide a whole update.

        Args:
            samples: Samples of the update over all ranks.
            world_size: Number of ranks.
            micro_batches: Micro-batches of each rank; never more than it has samples.
            micro_batch_size: The most samples that a rank holds at once; decides the number of micro-batches.

        Raises:
            ValueError: If there are fewer samples than ranks.
        """
        if samples < world_size:
            raise ValueError(
                f"Expected dataloader.global_batch_size to be at least the number of ranks that read different "
                f"samples, {world_size}. Received: dataloader.global_batch_size={samples}. Raise it, or start fewer "
                "processes."
            )
        share = -(-samples // world_size)
        if micro_batch_size is None:
            micro_batches = min(micro_batches, share)
            return cls(samples, world_size, -(-share // micro_batches), micro_batches, is_update=True)
        held = min(micro_batch_size, share)
        return cls(samples, world_size, held, -(-share // held), is_update=True)

    @property
    def is_even(self) -> bool:
        """Whether all micro-batches of a full stretch have one size, on all ranks."""
        return self.samples == self.world_size * self.micro_batches * self.largest(self.samples)

    def share(self, samples: int, rank: int) -> tuple[int, int]:
        """Return offset and size of a rank's share of a stretch of so many samples."""
        return part(samples, self.world_size, rank)

    def count(self, samples: int) -> int:
        """Return how many micro-batches every rank makes of a stretch of so many samples."""
        if samples == self.samples:
            return self.micro_batches
        return -(-self.share(samples, 0)[1] // self.micro_batch_size)

    def largest(self, samples: int) -> int:
        """Return the most samples that a rank holds at once of a stretch of so many samples."""
        return part(self.share(samples, 0)[1], self.count(samples), 0)[1] if samples else 0

    def cut(self, samples: int, rank: int) -> list[tuple[int, int]]:
        """Return offset, from the beginning of the stretch, and size of each micro-batch of a rank; a size may be 0."""
        start, size = self.share(samples, rank)
        count = self.count(samples)
        parts = (part(size, count, index) for index in range(count))
        return [(start + offset, held) for offset, held in parts]

    def totals(self, samples: int) -> list[int]:
        """Return the samples of each micro-batch over all ranks."""
        # Shares have two sizes at most, so the work does not grow with the number of ranks.
        size, larger = divmod(samples, self.world_size)
        count = self.count(samples)
        kinds = ((size + 1, larger), (size, self.world_size - larger))
        return [sum(part(held, count, index)[1] * ranks for held, ranks in kinds) for index in range(count)]

    def capped(self, micro_batch_size: int) -> Division:
        """Return a division with at most so many samples at once; this one if it already has no more."""
        if micro_batch_size >= self.micro_batch_size:
            return self
        return Division.of_update(self.samples, self.world_size, micro_batch_size=micro_batch_size)


class WholeMicroBatches(Division):
    """Cuts a stretch into the same micro-batches at any number of ranks: all of one size but the last, which may be shorter.

    A rank takes a contiguous range of them, none where there are more ranks than micro-batches. All ranks count equally many, so that some
    end with an empty one.
    """

    @classmethod
    def of(cls, samples: int, world_size: int, micro_batch_size: int, *, is_update: bool) -> WholeMicroBatches:
        """Divide a stretch of so many samples."""
        number = -(-samples // micro_batch_size)
        return cls(samples, world_size, min(micro_batch_size, samples), -(-number // world_size), is_update)

    def number(self, samples: int) -> int:
        """Return the micro-batches of a stretch of so many samples over all ranks."""
        return -(-samples // self.micro_batch_size)

    def share(self, samples: int, rank: int) -> tuple[int, int]:
        """Return offset and size of a rank's share of a stretch of so many samples."""
        first, count = part(self.number(samples), self.world_size, rank)
        start, end = (min(index * self.micro_batch_size, samples) for index in (first, first + count))
        return start, end - start

    def count(self, samples: int) -> int:
        """Return how many micro-batches every rank makes of a stretch of so many samples."""
        return -(-self.number(samples) // self.world_size)

    def largest(self, samples: int) -> int:
        """Return the most samples that a rank holds at once of a stretch of so many samples."""
        return min(self.micro_batch_size, samples)

    def cut(self, samples: int, rank: int) -> list[tuple[int, int]]:
        """Return offset, from the beginning of the stretch, and size of each micro-batch of a rank; a size may be 0."""
        start, size = self.share(samples, rank)
        held = range(start, start + self.count(samples) * self.micro_batch_size, self.micro_batch_size)
        return [(min(place, start + size), max(min(self.micro_batch_size, start + size - place), 0)) for place in held]

    def totals(self, samples: int) -> list[int]:
        """Return the samples of each micro-batch over all ranks."""
        full, rest = divmod(self.number(samples), self.world_size)
        totals = [self.micro_batch_size * ranks for ranks in (*[self.world_size] * full, *([rest] if rest else []))]
        # The last rank with a micro-batch has the short one, as its last.
        totals[max(full - 1, 0)] -= self.number(samples) * self.micro_batch_size - samples
        return totals


# Settings

AUTO = "auto"
"""The `micro_batch_size` that is found by trying: it is halved when memory runs out."""
SIZES = frozenset({"global_batch_size", "micro_batch_size"})
OWN = SIZES | {"keyed"}
"""Settings of a split that are not arguments of a loader."""
OF_WORKERS = frozenset({"persistent_workers", "prefetch_factor", "timeout", "multiprocessing_context"})
"""Settings of worker processes, which are errors without workers."""


def merge_settings(common: Mapping[str, object], own: Mapping[str, object]) -> dict[str, object]:
    """Return the settings of one split over those that all splits share.

    A batch size in the split's own section replaces the other kind of batch size in the common section. Settings of workers in
    the common section do not apply to a split without workers.
    """
    replaced: set[str] = set(OF_WORKERS) if own.get("num_workers") == 0 else set()
    if own.get("batch_size") is not None:
        replaced |= SIZES
    if own.get("global_batch_size") is not None:
        replaced.add("batch_size")
    return {**{name: value for name, value in common.items() if name not in replaced}, **own}


def divide_updates(
    settings: Mapping[str, Any],
    *,
    split: str,
    train: bool,
    world_size: int,
    accum_steps: int,
    canonical: bool = False,
) -> tuple[dict[str, Any], Division | None]:
    """Return the arguments of a loader, and with `global_batch_size` how an update is divided over ranks and micro-batches.

    A split that is not trained on has no updates. It may have a `batch_size` in addition to `global_batch_size`; without one, a
    rank holds as many samples at once as in training, which are known to fit into memory.

    Args:
        settings: The settings of the split.
        split: Its name, for messages.
        train: Whether it is trained on.
        world_size: Ranks that read different samples.
        accum_steps: Micro-batches of an update, unless `micro_batch_size` decides.
        canonical: Whether micro-batches, and the batches of an evaluation, are the same at any number of ranks.

    Raises:
        ValueError: If the settings contradict one another, or there are more ranks than samples.
    """
    samples, held = settings.get("global_batch_size"), settings.get("micro_batch_size")
    check_sizes(settings if train else {**settings, "batch_size": None}, f"dataloader.{split}")
    loading = {name: value for name, value in settings.items() if name not in OWN}
    if canonical:
        return _whole_micro_batches(settings, loading, split=split, train=train, world_size=world_size)
    if samples is None:
        if held is not None and train:
            raise ValueError(
                f"Expected dataloader.global_batch_size together with dataloader.micro_batch_size, which divides it. "
                f"Received: micro_batch_size={held!r} and no global_batch_size for split {split!r}. Set it, or leave "
                "micro_batch_size out: batch_size is what a rank holds at once."
            )
        return loading, None
    if isinstance(held, int) and accum_steps > 1:
        raise ValueError(
            f"Expected accum_steps or dataloader.micro_batch_size to say into how many micro-batches an update is cut. "
            f"Received: accum_steps={accum_steps}, micro_batch_size={held} for split {split!r}. Leave one of them out."
        )
    division = Division.of_update(
        samples, world_size, micro_batches=accum_steps, micro_batch_size=held if isinstance(held, int) else None
    )
    if train:
        return {name: value for name, value in loading.items() if name != "batch_size"}, division
    if loading.get("batch_size") is None:
        loading["batch_size"] = division.micro_batch_size
    return loading, None


def _whole_micro_batches(
    settings: Mapping[str, Any], loading: dict[str, Any], *, split: str, train: bool, world_size: int
) -> tuple[dict[str, Any], Division | None]:
    samples, held = settings.get("global_batch_size"), settings.get("micro_batch_size")
    if train:
        if samples is None or not isinstance(held, int):
            raise ValueError(
                f"Expected dataloader.global_batch_size and an integer dataloader.micro_batch_size for split {split!r} with "
                f"gradient_sum='canonical', which adds micro-batches in one order. Received: global_batch_size={samples!r}, "
                f"micro_batch_size={held!r}. Set both, or gradient_sum='fast'."
            )
        loading.pop("batch_size", None)
        return loading, WholeMicroBatches.of(samples, world_size, held, is_update=True)
    batch_size = loading["batch_size"] = loading.get("batch_size") or (held if isinstance(held, int) else 1)
    return loading, WholeMicroBatches.of(batch_size * world_size, world_size, batch_size, is_update=False)


def check_sizes(section: Mapping[str, object], place: str) -> None:
    """Refuse sizes that are not positive integers, or that exclude one another."""
    batch, samples = section.get("batch_size"), section.get("global_batch_size")
    for name in sorted(SIZES):
        value = section.get(name)
        if value is None or (name == "micro_batch_size" and value == AUTO):
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            wanted = "a positive integer" + (f" or {AUTO!r}" if name == "micro_batch_size" else "")
            raise ValueError(
                f"Expected {place}.{name} to be {wanted}. Received: {name}={value!r} ({type(value).__name__})."
            )
    if batch is not None and samples is not None:
        raise ValueError(
            f"Expected dataloader.batch_size (samples of a batch on each rank) or dataloader.global_batch_size (samples "
            f"of an update over all ranks), not both. Received: batch_size={batch!r}, global_batch_size={samples!r} in "
            f"{place}. Set one of them to none."
        )

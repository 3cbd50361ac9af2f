"""Interprets the batch sizes under `dataloader`: how many samples an update has, and how they are divided."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .shares import Division, WholeMicroBatches

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

    A split that is not trained on has no updates. It may have a `batch_size` beside `global_batch_size`; without one, a
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
                f"Expected dataloader.global_batch_size beside dataloader.micro_batch_size, which says how it is cut. "
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

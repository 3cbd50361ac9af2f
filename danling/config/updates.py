"""How many samples an update has, read off a configuration: part of what a run is, however it is cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

SIZES = ("batch_size", "global_batch_size", "micro_batch_size")
"""Keys under `dataloader` that say how samples make batches and updates."""


@dataclass(frozen=True)
class UpdateSize:
    """Samples of an update, and what they follow from.

    Attributes:
        samples: Over all ranks and micro-batches.
        key: The key that says so, dotted.
        source: What they are the product of, in words.
    """

    samples: int
    key: str
    source: str

    def __str__(self) -> str:
        return f"{self.samples} samples an update ({self.source})"


def update_sizes(settings: Mapping[str, Any], replicas: int) -> dict[str, UpdateSize]:
    """Return the samples of an update by section: `dataloader`, or `dataloader.<split>` for splits with sizes of their own.

    Empty where the configuration does not say, as for a loader of the user's.

    Args:
        settings: A whole configuration as plain values.
        replicas: Ranks that read different samples.
    """
    common = settings.get("dataloader")
    if not isinstance(common, Mapping):
        return {}
    accum_steps = settings.get("accum_steps", 1)
    own = {f"dataloader.{name}": section for name, section in train_sections(settings)}
    found = {place: _size_of(section, place, accum_steps, replicas) for place, section in own.items()}
    named = settings.get("train_splits") or ()
    # What all splits share is that of an update where some split that is trained on has no size of its own.
    if not any(found.values()) or any(found.get(f"dataloader.{split}") is None for split in named):
        found["dataloader"] = _size_of(common, "dataloader", accum_steps, replicas)
    sizes = {place: size for place, size in found.items() if size is not None}
    if len({size.samples for size in sizes.values()}) == 1:
        # In which section one size for all stands is a matter of writing.
        return {"dataloader": next(iter(sizes.values()))}
    return sizes


def train_sections(settings: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield name and settings of the sections under `dataloader` of splits that are trained on.

    Args:
        settings: A whole configuration as plain values.
    """
    named = settings.get("train_splits")
    for name, section in settings["dataloader"].items():
        trained = name in named if named is not None else name.startswith("train")
        if isinstance(section, Mapping) and trained:
            yield name, section


def _size_of(section: Mapping[str, object], place: str, accum_steps: object, replicas: int) -> UpdateSize | None:
    samples, batch = section.get("global_batch_size"), section.get("batch_size")
    if isinstance(samples, int):
        return UpdateSize(samples, f"{place}.global_batch_size", f"global_batch_size={samples}")
    if not isinstance(batch, int) or not isinstance(accum_steps, int):
        return None
    ranks = f"{replicas} rank{'s' if replicas != 1 else ''}"
    source = f"batch_size={batch} x accum_steps={accum_steps} x {ranks}"
    return UpdateSize(batch * accum_steps * replicas, f"{place}.batch_size", source)


def with_update_sizes(settings: Mapping[str, object], replicas: int) -> dict[str, Any]:
    """Return settings with the samples of an update as `global_batch_size`, in the place of all that they follow from.

    Batch sizes of splits that are only evaluated are left out: metrics do not depend on them.

    Args:
        settings: A whole configuration as plain values.
        replicas: Ranks that read different samples.
    """
    sizes = update_sizes(settings, replicas)
    loading = settings.get("dataloader")
    if not isinstance(loading, Mapping):
        return dict(settings)
    kept = {name: value for name, value in settings.items() if name != "accum_steps" or not sizes}
    trained = {name for name, _ in train_sections(settings)}
    sections = {
        name: _with_size(section, sizes.get(f"dataloader.{name}"), is_known=bool(sizes) or name not in trained)
        for name, section in loading.items()
        if isinstance(section, Mapping)
    }
    return {**kept, "dataloader": _with_size(loading, sizes.get("dataloader"), is_known=bool(sizes)) | sections}


def _with_size(section: Mapping[str, object], size: UpdateSize | None, *, is_known: bool) -> dict[str, object]:
    if not is_known:
        return {name: value for name, value in section.items() if name != "micro_batch_size"}
    kept = {name: value for name, value in section.items() if name not in SIZES}
    return kept if size is None else {**kept, "global_batch_size": size.samples}


def is_update_key(key: str) -> bool:
    """Return whether a dotted key is one that the samples of an update follow from."""
    return key == "accum_steps" or (key.startswith("dataloader.") and key.rpartition(".")[2] in SIZES)


def size_differences(
    stored: Mapping[str, object], now: Mapping[str, object], *, stored_replicas: int, replicas: int
) -> list[str]:
    """Return in which sections two configurations make updates of another number of samples, a line each.

    Args:
        stored: The settings of a checkpoint, as plain values.
        now: The settings of this run, as plain values.
        stored_replicas: Ranks that read different samples when the checkpoint was made.
        replicas: The same of this run.
    """
    before, after = update_sizes(stored, stored_replicas), update_sizes(now, replicas)
    common = [place for place in before if place in after]
    return [
        f"{after[place].key}: stored {before[place]}, now {after[place]}"
        for place in common
        if before[place].samples != after[place].samples
    ]

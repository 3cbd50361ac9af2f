"""Leaving parts of a checkpoint out of a load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_ALIASES = {"data_loader": "dataloaders", "dataloader": "dataloaders", "lr_scheduler": "scheduler"}


def exclude(payload: Mapping[str, Any], entries: str | Iterable[str] | None) -> tuple[dict[str, Any], set[str]]:
    """Return the payload without the excluded parts, and what was excluded.

    Args:
        payload: A checkpoint.
        entries: Components (`"optimizer"`) or dotted paths within one (`"model.head"`); `data_loader`, `dataloader` and
            `lr_scheduler` are understood as `dataloaders` and `scheduler`.

    Raises:
        ValueError: If an entry matches nothing.
    """
    listed = [entries] if isinstance(entries, str) else list(entries or [])
    kept = dict(payload)
    excluded = set()
    for entry in listed:
        name, dot, rest = _canonical(entry)
        if name not in kept or (dot and not _drop(kept, name, rest)):
            raise ValueError(
                f"Expected every entry of checkpoint.exclude_from_loading to match a part of the checkpoint, whose components are "
                f"{sorted(payload)}. Received: {entry!r}, which matches nothing."
            )
        if not dot:
            del kept[name]
        excluded.add(f"{name}{dot}{rest}")
    return kept, excluded


def leaves_out(entries: str | Iterable[str] | None, path: str) -> bool:
    """Whether an entry names a dotted path or what it lies in; see `exclude` for the entries."""
    listed = [entries] if isinstance(entries, str) else list(entries or [])
    return any(f"{path}.".startswith(f"{''.join(_canonical(entry))}.") for entry in listed)


def _canonical(entry: str) -> tuple[str, str, str]:
    head, dot, rest = entry.partition(".")
    return _ALIASES.get(head, head), dot, rest


def _drop(holder: dict[str, Any], name: str, path: str) -> bool:
    """Remove `path` below `holder[name]` in copies; names below may have dots of their own."""
    section = holder[name]
    if not isinstance(section, Mapping):
        return False
    matching = [key for key in section if key == path or str(key).startswith(f"{path}.")]
    if matching:
        holder[name] = {key: value for key, value in section.items() if key not in matching}
        return True
    head, dot, rest = path.partition(".")
    if not dot or head not in section:
        return False
    holder[name] = dict(section)
    return _drop(holder[name], head, rest)

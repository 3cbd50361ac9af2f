"""Parses `checkpoint.exclude_from_loading`: which parts of a checkpoint are not loaded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from danling.config.identity import is_update_key

_ALIASES = {"data_loader": "dataloaders", "dataloader": "dataloaders", "lr_scheduler": "scheduler"}
_SETTINGS = "runner"
"""Component of the stored configuration, which is never loaded, only compared with that of the run."""
_MADE_OF: dict[str, frozenset[str]] = {
    "optimizer": frozenset({"optim"}),
    "scheduler": frozenset({"scheduler", "optim", "steps", "epochs"}),
}
"""Settings of which a component is made, where they are not a section of its name."""
USERS_OWN = "users' own"
"""In a set of changed sections: any of the user's own, of which every component may be made."""


class ExcludedFromLoading:
    """The parsed entries: components (`"optimizer"`), dotted paths within one (`"model.head"`), and settings (`"runner.optim.lr"`)
    that may differ from those of the checkpoint.

    Examples:
        >>> excluded = ExcludedFromLoading(["model.head", "runner.optim.lr"])
        >>> excluded.mentions("model"), excluded.leaves_out("model"), excluded.leaves_out("model.head.weight")
        (True, False, True)
        >>> excluded.allows_setting("optim.lr")
        True
    """

    def __init__(self, entries: str | Iterable[str] | None) -> None:
        self._all = [entries] if isinstance(entries, str) else list(entries or [])

    @property
    def entries(self) -> list[str]:
        """Entries that name parts of the payload, as they were written."""
        return [entry for entry in self._all if entry.partition(".")[0] != _SETTINGS]

    def apply(self, payload: Mapping[str, object], *, section: str | None = None) -> tuple[dict[str, Any], set[str]]:
        """Return the payload without the excluded parts, and the dotted paths that were left out."""
        counting = [e for e in self.entries if section is None or e.partition(".")[0] == section]
        return exclude(payload, counting)

    def loaded_since(self, before: ExcludedFromLoading, changed: Collection[str]) -> list[str]:
        """Return the entries that do not count for a checkpoint, since they did when its run began, and it has trained the parts since.

        A new head, say, is left out of the checkpoint that a run is finetuned from, and belongs to the checkpoints of the run itself.
        `dataloaders` and `optimizer.param_groups` always count: they take the data and the options of the program as these are at each
        start, and leave out nothing that was trained.
        """
        if USERS_OWN in changed:
            return []
        named = {entry: _canonical(entry) for entry in self.entries}
        return [
            entry
            for entry, (name, dot, rest) in named.items()
            if name != "dataloaders"
            and entry != "optimizer.param_groups"
            and before.leaves_out(f"{name}{dot}{rest}")
            and not _MADE_OF.get(name, frozenset({name})).intersection(changed)
        ]

    def without(self, entries: Collection[str]) -> ExcludedFromLoading:
        """Return this without some of its entries."""
        return ExcludedFromLoading([entry for entry in self._all if entry not in entries])

    def mentions(self, component: str) -> bool:
        """Whether an entry names a component, or anything in it."""
        return any(_canonical(entry)[0] == component for entry in self.entries)

    def parts_of(self, component: str) -> list[str]:
        """Return the entries that name something in a component, rather than all of it."""
        return [entry for entry in self.entries if entry.startswith(f"{component}.")]

    def leaves_out(self, path: str) -> bool:
        """Whether an entry names a dotted path, or something that contains it."""
        return any(f"{path}.".startswith(f"{''.join(_canonical(entry))}.") for entry in self.entries)

    def allows_setting(self, key: str) -> bool:
        """Whether the value of a dotted key of the configuration may differ from that of the checkpoint."""
        # Several keys together determine the samples of an update: naming one of them is enough.
        if is_update_key(key) and any(is_update_key(entry.removeprefix(f"{_SETTINGS}.")) for entry in self._all):
            return True
        return any(f"{_SETTINGS}.{key}.".startswith(f"{entry}.") for entry in self._all)


def exclude(payload: Mapping[str, object], entries: str | Iterable[str] | None) -> tuple[dict[str, Any], set[str]]:
    """Return the payload without the excluded parts, and what was excluded.

    Args:
        payload: A checkpoint.
        entries: Components or dotted paths within one; see `ExcludedFromLoading`.

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


def _canonical(entry: str) -> tuple[str, str, str]:
    head, dot, rest = entry.partition(".")
    return _ALIASES.get(head, head), dot, rest


def _drop(holder: dict[str, Any], name: str, path: str) -> bool:
    """Remove `path` below `holder[name]` in copies; names below may contain dots."""
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

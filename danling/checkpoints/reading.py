"""Reads a checkpoint of any kind, or parts of it, without a runner: its payload, its outline, and what is left out of it."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from danling.config.identity import is_update_key
from danling.utils.trees import dotted, tensors

from .checkpoint_store import SUFFIX, CheckpointStore
from .directory import advice_about, stores_in
from .errors import CheckpointError, CheckpointMismatch, CheckpointNotFound
from .storage import sampled_digest
from .target_store import is_engine_target

if TYPE_CHECKING:
    from .manager import CheckpointManager

logger = logging.getLogger("danling")

READERS = {
    "file": "danling.checkpoints.torch_files",
    "dcp": "danling.checkpoints.dcp_target",
    "deepspeed": "danling.deepspeed.checkpoints",
}
"""By the kind of a checkpoint: the module whose `read_payload` and `read_outline` read it. They are named and not imported: torch takes
its time, to verify a checkpoint needs none of it, and the core imports no extension."""


def manager_named(backend: str) -> type[CheckpointManager]:
    """Return the manager that writes checkpoints of a backend."""
    import danling.checkpoints as managers

    return (
        managers.FileCheckpointManager
        if backend == "file"
        else managers.TorchDistributedCheckpointManager
    )


def _reader(path: Path) -> Any:
    kind = "file"
    if path.is_dir():
        kind = "deepspeed" if is_engine_target(path) else "dcp"
    return import_module(READERS[kind])


def locate(source: str | Path) -> tuple[CheckpointStore, Path]:
    """Return the checkpoint that a path means: a file, a pointer, a target, or `latest` of a checkpoint or run directory."""
    # Only the name of the directory matters here: it is looked for in a run directory.
    for store in stores_in(Path("checkpoints")):
        found = store.locate(Path(source))
        if found is not None:
            return store, found
    raise CheckpointNotFound(
        f"Expected a checkpoint file or directory. Received: {str(source)!r}, where there is none.{advice_about(Path(source))}"
    )


def read_payload(
    path: Path,
    *,
    template: Mapping[str, object] | None = None,
    sections: Iterable[str] | None = None,
    mmap: bool = False,
    trust: bool = False,
) -> dict[str, Any]:
    """Read a checkpoint, a file or a target, onto the CPU, without running anything that is in it. Verifies nothing."""
    wanted = None if sections is None else frozenset({*sections, "format_version"})
    payload: dict[str, Any] = _reader(path).read_payload(
        path, template=template, sections=wanted, mmap=mmap, trust=trust
    )
    return payload


def read_outline(path: Path) -> Outline:
    """Return the content of a file or a target; the values of its tensors stay on disk."""
    outline: Outline = _reader(path).read_outline(path)
    return outline


def read_sections(source: str | Path, sections: Iterable[str]) -> dict[str, Any]:
    """Return components of a checkpoint, found as `read_config` finds it; the tensors of a file stay on disk until they are used."""
    store, found = locate(source)
    store.verify(found, "size")
    return read_payload(store.target(found), sections=sections, mmap=True)


def read_config(source: str | Path) -> dict[str, Any]:
    """Return the configuration stored in a checkpoint; its tensors are not read.

    Args:
        source: A checkpoint, or a checkpoint or run directory with a `latest`.
    """
    config = read_sections(source, ["runner"]).get("runner")
    if not isinstance(config, Mapping):
        raise CheckpointMismatch(
            f"Expected a checkpoint with the configuration of a run. Received: {source}, without one."
        )
    return dict(config)


def stored_seed(directory: Path, asked: str | Path | None) -> int | None:
    """Return the seed of the checkpoint that a run will resume from, so that construction draws the same random numbers again."""
    sources = (
        _usual(directory)
        if asked is None
        else [Path(asked), directory / asked, directory / f"{asked}{SUFFIX}"]
    )
    for source in sources:
        # What cannot be read is named when the run is restored.
        try:
            seed = read_config(source).get("seed")
        except (CheckpointError, OSError):
            continue
        return int(seed) if seed is not None else None
    return None


def content_of(source: str | Path, directory: Path, *, sampled: bool = False) -> str | None:
    """Return text that is the same for every copy of a source, whatever its path; `None` where there is none. Verifies nothing.

    Args:
        source: A name in a checkpoint directory, or a path, also of files of another program.
        directory: The checkpoint directory.
        sampled: Whether blocks of the files count, and not the checksums of a checkpoint, which are not next to each copy.
    """
    path = Path(source)
    for store in stores_in(directory):
        found = store.find(source)
        if found is None:
            continue
        with suppress(CheckpointError, OSError):
            path = store.target(found)
            if not sampled:
                manifest, _ = store.examine(found, "none")
                # Without names, since a copy may have another one.
                digest = hashlib.sha256(repr(sorted(manifest.files.values())).encode()).hexdigest()
                return f"run {manifest.record.run}, step {manifest.record.step}, {CHECKSUMS} {digest[:12]}"
    with suppress(CheckpointError, OSError):
        return f"content {sampled_digest(path)[:12]}" if path.exists() else None
    return None


CHECKSUMS = "checksums"
"""In the text of a source: it has a manifest."""


def stored_settings(directory: Path) -> tuple[Mapping[str, Any], int] | None:
    """Return the configuration in the newest readable checkpoint of a directory, and how many ranks with different samples made it."""
    for source in _usual(directory):
        try:
            payload = read_sections(source, ["runner", "state"])
        except (CheckpointError, OSError):
            continue
        elastic = (payload.get("state") or {}).get("elastic") or {}
        # Earlier versions have saved the number of ranks alone.
        replicas = elastic.get("data_replicas", elastic.get("world_size", 1))
        return payload.get("runner") or {}, int(replicas)
    return None


def _usual(directory: Path) -> list[Path]:
    return [directory / name for name in ("latest", f"latest{SUFFIX}", "best", f"best{SUFFIX}")]


# A file must not declare itself trusted. Compiled code runs when it is loaded, and options of a compiler can name programs that it runs.
_NEVER_OBEYED = frozenset({"checkpoint.trust", "compile.precompile_artifact_dir"})
_COMPILER = "compile.options."


def without_untrusted_settings(stored: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return the settings of a checkpoint without those by which a file could declare itself trusted or name code to run."""
    kept: dict[str, Any] = {}
    for name, value in stored.items():
        key = f"{prefix}{name}"  # a name may be dotted itself
        if isinstance(value, Mapping):
            kept[name] = without_untrusted_settings(value, f"{key}.")
        elif key.startswith(_COMPILER) and not isinstance(value, (bool, int, float, type(None))):
            logger.warning(
                "%s of the checkpoint is left out, since it could name a program to run. Set it again if you want it.",
                key,
            )
        elif key not in _NEVER_OBEYED:
            kept[name] = value
    return kept


def moment(payload: Mapping[str, object]) -> str:
    """Return the step and epoch of a payload as readable text."""
    state = payload.get("state")
    train = state.get("train") if isinstance(state, Mapping) else None
    if not isinstance(train, Mapping):
        return "a step that is not recorded"
    return f"step {train.get('global_step')}, epoch {train.get('epoch')}"


# The content of a checkpoint without the values of its tensors

READ_WHOLE = ("format_version", "runner", "state")
"""Sections of a checkpoint that are read with their tensors, such as states of random generators: they are small."""


@dataclass(frozen=True)
class Entry:
    """One tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    chunks: int = 1

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass
class Outline:
    """A checkpoint without its tensors' values."""

    kind: str
    path: Path
    entries: list[Entry] = field(default_factory=list)
    plain: dict[str, Any] = field(default_factory=dict)
    record: dict[str, Any] | None = None

    @property
    def is_own(self) -> bool:
        """Whether it was written by this library, so that names begin with a component."""
        return self.kind not in ("safetensors", "torch file")

    def sections(self) -> dict[str, dict[str, Any]]:
        """Return, for each first component, the number of tensors, elements and bytes, and the dtypes."""
        table: dict[str, dict[str, Any]] = {}
        for entry in self.entries:
            section = entry.name.partition(".")[0] if self.is_own else "tensors"
            row = table.setdefault(section, {"tensors": 0, "elements": 0, "bytes": 0, "dtypes": {}})
            row["tensors"] += 1
            row["elements"] += entry.numel
            row["bytes"] += entry.size
            row["dtypes"][entry.dtype] = row["dtypes"].get(entry.dtype, 0) + entry.numel
        return table


def tensors_in(value: object) -> Iterator[Entry]:
    """Yield the tensors of a nested state by dotted name."""
    for path, tensor in tensors(value):
        dtype = str(tensor.dtype).removeprefix("torch.")
        yield Entry(
            dotted(path), dtype, tuple(tensor.shape), tensor.numel() * tensor.element_size()
        )


def without_tensors(value: object) -> Any:
    """Return a nested state less its tensors, with keys that are strings."""
    from torch import Tensor  # what is read from headers alone needs no torch

    if isinstance(value, Mapping):
        return {str(k): without_tensors(v) for k, v in value.items() if not isinstance(v, Tensor)}
    if isinstance(value, (list, tuple)):
        return [without_tensors(item) for item in value if not isinstance(item, Tensor)]
    return value


# What is not loaded

_ALIASES = {"data_loader": "dataloaders", "dataloader": "dataloaders", "lr_scheduler": "scheduler"}
_OPTIONAL = frozenset({"attributes", "buffers", "observers", "requires_grad"})
"""Components that a checkpoint has only where they have changed, or the program has them."""
_SETTINGS = "runner"
"""Component of the stored configuration, which is never loaded, only compared with that of the run."""
_MADE_OF: dict[str, frozenset[str]] = {
    "optimizer": frozenset({"optim"}),
    "scheduler": frozenset({"scheduler", "optim", "steps", "epochs"}),
}
"""Settings of which a component is made, where they are not a section of its name."""
_SWITCHED_BY = {"ema": "ema.enabled"}
"""The setting that switches a component on."""
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

    def apply(
        self,
        payload: Mapping[str, object],
        *,
        section: str | None = None,
        needed: Collection[str] = (),
        here: Collection[str] = (),
    ) -> tuple[dict[str, Any], set[str]]:
        """Return the payload without the excluded parts, and the dotted paths that were left out.

        Args:
            payload: A checkpoint.
            section: The component whose entries count; `None` for all.
            needed: Components of the run. One that the checkpoint lacks may be named, and is left out where the setting that switches it
                on may differ.
            here: Dotted paths of the run's own weights; see `exclude`.
        """
        lacking = {name for name in needed if name not in payload}
        begun = {
            name
            for name in lacking
            if name in _SWITCHED_BY and self.allows_setting(_SWITCHED_BY[name])
        }
        counting = [e for e in self.entries if section is None or e.partition(".")[0] == section]
        named = [entry for entry in counting if "".join(_canonical(entry)) in lacking]
        kept, excluded = exclude(
            payload, [entry for entry in counting if entry not in named], here=here
        )
        return kept, excluded | begun | {_canonical(entry)[0] for entry in named}

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

    def and_also(self, *entries: str) -> list[str]:
        """Return the entries as they were written, with more of them."""
        return list(dict.fromkeys([*self._all, *entries]))

    def mentions(self, component: str) -> bool:
        """Whether an entry names a component, or anything in it."""
        return any(_canonical(entry)[0] == component for entry in self.entries)

    def parts_of(self, component: str) -> list[str]:
        """Return the entries that name something in a component, rather than all of it."""
        return [entry for entry in self.entries if entry.startswith(f"{component}.")]

    def leaves_out(self, path: str) -> bool:
        """Whether an entry names a dotted path, or something that contains it."""
        return any(
            f"{path}.".startswith(f"{''.join(_canonical(entry))}.") for entry in self.entries
        )

    def allows_setting(self, key: str) -> bool:
        """Whether the value of a dotted key of the configuration may differ from that of the checkpoint."""
        # Several keys together determine the samples of an update: naming one of them is enough.
        if is_update_key(key) and any(
            is_update_key(entry.removeprefix(f"{_SETTINGS}.")) for entry in self._all
        ):
            return True
        return any(f"{_SETTINGS}.{key}.".startswith(f"{entry}.") for entry in self._all)


def exclude(
    payload: Mapping[str, object],
    entries: str | Iterable[str] | None,
    *,
    here: Collection[str] = (),
) -> tuple[dict[str, Any], set[str]]:
    """Return the payload without the excluded parts, and what was excluded.

    Args:
        payload: A checkpoint.
        entries: Components or dotted paths within one; see `ExcludedFromLoading`.
        here: Dotted paths of the run's own weights. An entry may name one that the checkpoint lacks, such as a head that is new.

    Raises:
        ValueError: If an entry matches nothing.
    """
    listed = [entries] if isinstance(entries, str) else list(entries or [])
    kept = dict(payload)
    excluded = set()
    for entry in listed:
        name, dot, rest = _canonical(entry)
        # There is nothing to leave out, and the name is no mistake.
        if name in _OPTIONAL and name not in kept and not dot:
            continue
        is_new = name in kept and any(f"{path}.".startswith(f"{name}.{rest}.") for path in here)
        if name not in kept or (dot and not _drop(kept, name, rest) and not is_new):
            raise ValueError(
                "Expected every entry of checkpoint.exclude_from_loading to match a part of the checkpoint, whose components are "
                f"{sorted(payload)}, or a weight of the model. Received: {entry!r}, which matches nothing."
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
    # The keys of a model are dotted names, those of other sections single words: both are tried.
    matching = [key for key in section if key == path or str(key).startswith(f"{path}.")]
    if matching:
        holder[name] = {key: value for key, value in section.items() if key not in matching}
        return True
    head, dot, rest = path.partition(".")
    if not dot or head not in section:
        return False
    holder[name] = dict(section)
    return _drop(holder[name], head, rest)

"""The kinds of checkpoints there are, one row each: where they lie, how one is told from another, who reads and who writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import CheckpointNotFound
from .file_store import FileStore
from .store import CheckpointStore
from .target_store import TargetStore, is_engine_target

if TYPE_CHECKING:
    from .base import CheckpointManager
    from .outline import Outline


@dataclass(frozen=True)
class Backend:
    """A kind of checkpoint.

    Its modules are named and not imported: torch takes its time, and to verify a checkpoint needs none of it.

    Attributes:
        name: As in `checkpoint.backend`, or the stack that writes it.
        store: How checkpoints of this kind lie in a directory.
        matches: Whether what lies at a path, a file or a target of the store, is of this kind.
        reader: Module with functions `read_payload` and `read_outline`, whose arguments are those of the methods here.
        writer: Module and name of the manager.
    """

    name: str
    store: type[CheckpointStore]
    matches: Callable[[Path], bool]
    reader: str
    writer: tuple[str, str]

    def read_payload(
        self,
        path: Path,
        *,
        template: Mapping[str, object] | None = None,
        sections: frozenset[str] | None = None,
        mmap: bool = False,
        trust: bool = False,
    ) -> dict[str, Any]:
        """Return the components of a checkpoint, on the CPU, without running anything that is in it. Verifies nothing."""
        payload: dict[str, Any] = import_module(self.reader).read_payload(
            path, template=template, sections=sections, mmap=mmap, trust=trust
        )
        return payload

    def read_outline(self, path: Path) -> Outline:
        """Return what is in a checkpoint; the values of its tensors stay on disk."""
        outline: Outline = import_module(self.reader).read_outline(path)
        return outline

    def manager(self) -> type[CheckpointManager]:
        """Return the class that writes checkpoints of this kind."""
        module, name = self.writer
        found: type[CheckpointManager] = getattr(import_module(module), name)
        return found


_ROOM = "danling.checkpoints"

BACKENDS: tuple[Backend, ...] = (
    Backend(
        "file",
        FileStore,
        lambda path: not path.is_dir(),
        f"{_ROOM}.torch_files",
        (f"{_ROOM}.file", "FileCheckpointManager"),
    ),
    Backend(
        "deepspeed",
        TargetStore,
        is_engine_target,
        f"{_ROOM}.deepspeed_files",
        (f"{_ROOM}.deepspeed", "DeepSpeedCheckpointManager"),
    ),
    Backend(
        "dcp",
        TargetStore,
        lambda path: path.is_dir(),
        f"{_ROOM}.dcp_files",
        (f"{_ROOM}.torch_distributed", "TorchDistributedCheckpointManager"),
    ),
)
"""All kinds. The first one that matches counts."""


def backend_of(path: Path) -> Backend:
    """Return the kind of what lies at a path: a file, or a target."""
    return next(backend for backend in BACKENDS if backend.matches(path))


def backend_named(name: str) -> Backend:
    """Return the kind of a name."""
    for backend in BACKENDS:
        if backend.name == name:
            return backend
    raise ValueError(
        f"Expected one of {[backend.name for backend in BACKENDS]}. Received: checkpoint.backend={name!r}."
    )


def stores() -> list[type[CheckpointStore]]:
    """Return every way in which checkpoints lie in a directory, once."""
    return list(dict.fromkeys(backend.store for backend in BACKENDS))


def stores_in(
    directory: Path, *, first: type[CheckpointStore] | None = None, run_id: str = ""
) -> list[CheckpointStore]:
    """Return a store of every kind for one directory."""
    kinds: Iterable[type[CheckpointStore]] = dict.fromkeys([*([first] if first is not None else []), *stores()])
    return [kind(directory, run_id=run_id) for kind in kinds]


def locate(source: str | Path) -> tuple[CheckpointStore, Path]:
    """Return the checkpoint that a path means: a file, a pointer, a target, or `latest` of a checkpoint or run directory."""
    # Only the name of the directory matters here: it is looked for in a run directory.
    for store in stores_in(Path("checkpoints")):
        found = store.locate(Path(source))
        if found is not None:
            return store, found
    raise CheckpointNotFound(
        f"Expected a checkpoint file or directory. Received: {str(source)!r}, where there is none."
    )

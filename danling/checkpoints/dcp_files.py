"""The files of a `torch.distributed.checkpoint` target: hashed while they are written, read without running anything.

The writer comes first, then the reader, then how a nested state becomes the flat one of torch, and back.
"""

from __future__ import annotations

import io
import os
import re
import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan
from torch.distributed.checkpoint.planner import SavePlanner as TorchSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from danling.utils.tensors import is_sharded

from . import storage
from .directory import SUMS
from .errors import CheckpointDamaged, CheckpointError
from .manifest import Manifest, Record, archive_complaints, read_manifest
from .outline import READ_WHOLE, Entry, Outline, without_tensors
from .shard_index import INDEX, index_text, read_index
from .torch_files import check_format, check_values

METADATA = ".metadata"
_OF_RANK = re.compile(r"(?:\d+)?__(\d+)_\d+\.distcp")


@dataclass(frozen=True)
class Reuse:
    """Tensors that are not written again.

    Attributes:
        target: Name of the target, next to the new one, that has them.
        names: Their dotted names.
    """

    target: str
    names: frozenset[str]


# Writing


class HashingFileSystem(FileSystem):
    """Files whose sizes and checksums are known when they have been written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[str, tuple[int, str]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        """Open a file whose content is durable when the context ends."""
        if mode != "wb":
            with os.fdopen(storage.open_regular(Path(path)), mode) as stream:
                yield stream
            return
        with storage.open_new(Path(path)) as writer:
            yield writer
        self.written[Path(path).name] = (writer.size, writer.sha256)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        storage.replace(Path(path), Path(new_path))

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Make a directory that may be there already: every rank does."""
        storage.make_directory(Path(path))


@dataclass(frozen=True)
class HashedResult(WriteResult):
    """A result that also carries the sums of the files of its rank to the coordinator."""

    written: dict[str, tuple[int, str]] = field(default_factory=dict)


class TargetWriter(FileSystemWriter):
    """Writes one target: files of all ranks, `.metadata`, the index, and last the manifest, which makes it complete."""

    def __init__(self, path: Path, record: Record, *, reuse: Reuse | None = None) -> None:
        super().__init__(path, overwrite=False)
        self.fs: HashingFileSystem = HashingFileSystem()
        self.record = record
        self.reuse = reuse

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name the files of all ranks, otherwise than those that are taken over."""
        named = super().prepare_global_plan(plans)
        if self.reuse is None:
            return named
        prefixes = (_StoragePrefix(f"{self.record.sequence}__{rank}_") for rank in range(len(named)))
        return [replace(plan, storage_data=prefix) for plan, prefix in zip(named, prefixes)]

    def write_data(self, plan: SavePlan, planner: TorchSavePlanner) -> Future[list[WriteResult]]:
        """Write the share of this rank."""
        future: Future[list[WriteResult]] = Future()
        results: list[WriteResult] = []
        if plan.items:
            results = super().write_data(plan, planner).value()
            storage.sync_directory(Path(self.path))
            first = results[0]
            hashed = HashedResult(first.index, first.size_in_bytes, first.storage_data, dict(self.fs.written))
            results = [hashed, *results[1:]]
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write `.metadata`, the index and the manifest; on the coordinator, when all ranks have written."""
        path = Path(self.path)
        metadata, kept, files = (
            _taken_over(metadata, path, self.reuse) if self.reuse is not None else (metadata, [], {})
        )
        super().finish(metadata, [*results, kept])
        files[METADATA] = self.fs.written[f"{METADATA}.tmp"]
        for result in (result for of_rank in results for result in of_rank):
            files.update(result.written if isinstance(result, HashedResult) else {})
        files[INDEX] = storage.write_new_text(path / INDEX, index_text(metadata))
        storage.sync_directory(path)
        storage.sync_directory(path.parent)
        storage.write_text(path / SUMS, Manifest(self.record, files).text())

    def storage_meta(self) -> StorageMeta:
        """Return what `.metadata` says of this place: its name, not the path that it has on this machine."""
        return StorageMeta(checkpoint_id=Path(self.path).name, save_id=self.save_id)


def _taken_over(
    metadata: Metadata, path: Path, reuse: Reuse
) -> tuple[Metadata, list[WriteResult], dict[str, tuple[int, str]]]:
    """Link the tensor files of another target into a new one; return the index with their entries, their places, and their checksums."""
    source = path.parent / reuse.target
    manifest, other = read_manifest(source / SUMS, f"{reuse.target}/{SUMS}"), _metadata(source)
    assert metadata.planner_data is not None and other.planner_data is not None and other.storage_data is not None
    about = {name: other.state_dict_metadata[name] for name in reuse.names}
    paths = {name: other.planner_data[name] for name in reuse.names}
    places = {index: place for index, place in other.storage_data.items() if index.fqn in reuse.names}
    files = {place.relative_path: manifest.files[place.relative_path] for place in places.values()}
    for name in files:
        storage.link(source / name, path / name)
    whole = replace(
        metadata,
        state_dict_metadata={**metadata.state_dict_metadata, **about},
        planner_data={**metadata.planner_data, **paths},
    )
    return whole, [WriteResult(index, place.length, place) for index, place in places.items()], files


def written_by(file: str) -> int:
    """Return the rank that has written a file of a target, as its name tells; files of no single rank are those of rank 0."""
    found = _OF_RANK.fullmatch(file)
    return int(found[1]) if found else 0


class TargetReader(FileSystemReader):
    """Reads a target of which the index is known: torch's own would unpickle `.metadata`."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self.fs: HashingFileSystem = HashingFileSystem()
        self.metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata


def read_target(
    path: Path,
    *,
    template: Mapping[str, object] | None = None,
    sections: Iterable[str] | None = None,
    trust: bool = False,
) -> dict[str, object]:
    """Return the state in a target. Communicates nothing."""
    metadata = _metadata(path, trust=trust)
    reader = TargetReader(path, metadata)
    flat = destinations(metadata, template, None if sections is None else frozenset(sections))
    elsewhere = {name: value for name, value in flat.items() if isinstance(value, Tensor) and value.is_meta}
    flat = {name: value for name, value in flat.items() if name not in elsewhere}
    planner = LoadPlanner()
    if flat:
        try:
            with quiet():
                load(flat, storage_reader=reader, planner=planner, no_dist=True)
        except CheckpointException as error:
            reason = "; ".join(str(failure) for failure, _ in error.failures.values())
            raise CheckpointDamaged(
                f"Expected a readable checkpoint. Received: {path}: {reason}. Use another checkpoint."
            ) from None
    payload = nest({**(planner.state_dict if flat else {}), **elsewhere}, metadata.planner_data)
    check_values(payload, path)
    return payload


def save_target(
    payload: dict[str, Any],
    writer: TargetWriter,
    *,
    group: dist.ProcessGroup | None = None,
    alone: bool = False,
) -> None:
    """Write a target. Call on all ranks of the group."""
    planner = SavePlanner(frozenset() if writer.reuse is None else writer.reuse.names)
    with quiet():
        save(payload, storage_writer=writer, planner=planner, process_group=group, no_dist=alone)


def _metadata(path: Path, *, trust: bool = False) -> Metadata:
    metadata = read_index(path, trust=trust)
    places = (metadata.storage_data or {}).values()
    sizes = {place.relative_path: storage.size_of(path / place.relative_path) for place in places}
    # A read would wait for a pipe: files that are not regular count as missing.
    missing = sorted(file for file, size in sizes.items() if size is None)
    if missing:
        raise CheckpointDamaged(
            f"Expected the files of {path}. Received: no {', '.join(missing[:5])}. Use another checkpoint."
        )
    # Memory is allocated for what the index names: together not more than there is in the files.
    if sum(place.length for place in places) > sum(size or 0 for size in sizes.values()):
        raise CheckpointDamaged(
            f"Expected the files of {path}. Received: an index that names more bytes than they have. Use another checkpoint."
        )
    return metadata


def read_payload(
    path: Path,
    *,
    template: Mapping[str, object] | None = None,
    sections: frozenset[str] | None = None,
    mmap: bool = False,
    trust: bool = False,
) -> dict[str, Any]:
    """Return the payload of a target; see `reading.read_payload`."""
    return check_format(read_target(path, template=template, sections=sections, trust=trust), path)


def read_outline(path: Path) -> Outline:
    """Return the content of a target: plain values, and the tensors that the index lists; see `reading.read_outline`."""
    plain = read_target(path, sections=READ_WHOLE)
    outline = Outline("sharded", path, plain=without_tensors(plain))
    for name, about in sorted(read_index(path).state_dict_metadata.items()):
        if isinstance(about, TensorStorageMetadata):
            dtype, size = about.properties.dtype, about.size.numel() * about.properties.dtype.itemsize
            outline.entries.append(
                Entry(name, str(dtype).removeprefix("torch."), tuple(about.size), size, len(about.chunks))
            )
    return outline


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out torch's remark that one process saves or loads alone: the caller intends that."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


# A nested state, and the flat one of torch

Place = tuple[Any, ...]
"""The keys of a leaf, from the outside."""


def flatten(state: Mapping[str, object]) -> tuple[dict[str, Any], dict[str, Place]]:
    """Return the leaves of a state by dotted name, and the path of each.

    A leaf is a tensor, or the largest part that holds none: settings and results go into one entry each instead of one a value, keep
    their empty parts and their integer keys, and come back as they were.
    """
    flat: dict[str, Any] = {}
    paths: dict[str, Place] = {}
    for path, leaf in _leaves(state, ()):
        name = ".".join(map(str, path))
        if name in flat:
            raise CheckpointError(
                f"Expected one value for each name. Received: two parts of the state named {name!r}. Rename one."
            )
        flat[name], paths[name] = leaf, path
    return flat, paths


def _leaves(value: Any, path: Place) -> list[tuple[Place, Any]]:
    if (path and not _holds_tensor(value)) or isinstance(value, Tensor):
        return [(path, value)]
    if isinstance(value, Mapping):
        strange = next((key for key in value if not isinstance(key, str)), None)
        if strange is not None:
            raise CheckpointError(
                f"Expected string keys above tensors. Received: {'.'.join(map(str, path))}[{strange!r}]. Key it by a string."
            )
        return [leaf for key, item in value.items() for leaf in _leaves(item, (*path, key))]
    return [leaf for index, item in enumerate(value) for leaf in _leaves(item, (*path, index))]


def _holds_tensor(value: object) -> bool:
    if isinstance(value, Tensor):
        return True
    if isinstance(value, Mapping):
        return any(_holds_tensor(item) for item in value.values())
    return isinstance(value, (list, tuple)) and any(_holds_tensor(item) for item in value)


def nest(flat: Mapping[str, object], paths: Mapping[str, Place]) -> dict[str, object]:
    """Return the state that `flatten` was given; tuples with tensors come back as lists."""
    root: dict[Any, Any] = {}
    for name, leaf in flat.items():
        *parents, last = paths[name]
        holder = root
        for key in parents:
            holder = holder.setdefault(key, {})
        holder[last] = leaf
    nested: dict[str, Any] = _with_lists(root)
    return nested


def _with_lists(value: object) -> Any:
    # Look only into the dictionaries that `nest` has built: a plain leaf may be a dictionary with integer keys.
    if isinstance(value, _Leaf):
        return value.content
    if type(value) is not dict:
        return value
    if value and all(type(key) is int for key in value):
        return [_with_lists(value[index]) for index in sorted(value)]
    return {key: _with_lists(item) for key, item in value.items()}


class _Leaf:
    """A plain leaf on its way back."""

    def __init__(self, content: object) -> None:
        self.content = content


class SavePlanner(DefaultSavePlanner):
    """Plans a save of a nested state, flattened by `flatten`; the stock loaders and converters restore the nesting."""

    def __init__(self, left_out: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.left_out = left_out

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.mappings = flatten(state_dict)
        for name in self.left_out & self.state_dict.keys():
            del self.state_dict[name], self.mappings[name]
        self.is_coordinator = is_coordinator


class LoadPlanner(DefaultLoadPlanner):
    """Fills a flat state; plain values are read by torch's safe reader only."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        problems = archive_complaints(value)
        if problems:
            raise CheckpointDamaged(f"Expected a readable entry. Received: {name}: {'; '.join(problems)}")
        value.seek(0)
        try:
            self.state_dict[name] = _Leaf(torch.load(value, weights_only=True))
        except Exception as error:
            raise CheckpointDamaged(
                f"Expected a readable entry. Received: {name}, on which torch.load fails: {error}"
            ) from error


def destinations(
    metadata: Metadata, template: Mapping[str, object] | None, sections: frozenset[str] | None
) -> dict[str, object]:
    """Return fresh memory for everything that a checkpoint holds, by dotted name: nothing of it is skipped in silence."""
    layouts = flatten(template)[0] if template is not None else {}
    found: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if sections is not None and metadata.planner_data[name][0] not in sections:
            continue
        if not isinstance(entry, TensorStorageMetadata):
            found[name] = None
            continue
        # The state of an optimizer is laid out as its parameter is: `optimizer.state.NAME.exp_avg` as `optimizer.state.NAME`.
        like, dtype = layouts.get(name, layouts.get(name.rpartition(".")[0])), entry.properties.dtype
        if like is None and template is not None and metadata.planner_data[name][0] in template:
            found[name] = torch.empty(entry.size, dtype=dtype, device="meta")
        elif isinstance(like, Tensor) and is_sharded(like) and like.shape == entry.size:
            found[name] = torch.empty_like(like, dtype=dtype, requires_grad=False)
        else:
            found[name] = torch.empty(entry.size, dtype=dtype)
    return found

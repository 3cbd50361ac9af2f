"""Checkpoints of `torch.distributed.checkpoint`: their manager, the files of a target, and its index.

Files are hashed while they are written, and read without running anything.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
import os
import re
import socket
import warnings
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
    _StoragePrefix,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItemType
from torch.distributed.checkpoint.planner import SavePlanner as TorchSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from danling.distributed import Domain
from danling.utils.files import plain_name
from danling.utils.plain import parse_json
from danling.utils.tensors import dtype_of, is_sharded, local_part
from danling.utils.trees import tensors

from . import storage
from .directory import SUMS
from .errors import CheckpointDamaged, CheckpointDiskError, CheckpointError
from .manager import CollectiveCheckpointManager
from .manifest import Manifest, Record, archive_complaints, find_problems, read_manifest
from .reading import READ_WHOLE, Entry, Outline, without_tensors
from .snapshot import SnapshotBuffers, count_bytes, to_host
from .torch_files import check_format, check_values, why_unreadable
from .writer_process import Address, WriterProcess

logger = logging.getLogger("danling")

METADATA = ".metadata"
INDEX = "index.json"
FORMAT = "danling-index 1"

_OF_RANK = re.compile(r"(?:\d+)?__(\d+)_\d+\.distcp")
_DEEPEST = 200
_LARGEST_INDEX = 1 << 30
_MOST_CUTS = 8
"""Dimensions of a tensor that may be cut; each doubles the corners that are compared."""


@dataclass(frozen=True)
class SavedAhead:
    """A target that was written before an evaluation, and the SHA-256 of this rank's part of each tensor in it, by dotted name."""

    target: str
    step: int
    sums: dict[str, str]


class TorchDistributedCheckpointManager(CollectiveCheckpointManager):
    """Targets that are written once by all ranks together, and pointer files with the names; see `TargetStore`.

    Every rank passes its own payload: ranks write the DTensors that they hold, one rank writes each value that is
    equal everywhere, and values that differ from rank to rank have a key for each rank. Saves never overlap, since two at a time
    hang: one that finds another in progress waits until that is written.

    The stock `python -m torch.distributed.checkpoint.format_utils dcp_to_torch TARGET FILE` converts a target.
    """

    _ahead: SavedAhead | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        distributed = self.domain.size > 1
        self._background = self.settings.is_async
        self._group: dist.ProcessGroup | None = None
        if distributed and self.settings.dedicated_async_process_group:
            self._group = dist.new_group(backend=self.settings.async_process_group_backend)
        elif distributed and self._background:
            logger.warning(
                "checkpoint.dedicated_async_process_group is off: saves wait until they are written, since collectives of training and "
                "of a background save on one group abort the process."
            )
            self._background = False
        ranks = self.domain if self._group is None else Domain(self._group)
        self._exchange = ranks.gather_objects
        """Gathers a value of every rank on all of them, over the group that nothing but saves uses."""
        # Saves never overlap.
        self._buffers = SnapshotBuffers(most=1)
        self._process: WriterProcess | None = None
        if self._background and self.settings.async_mode == "async_with_pinned_mem" and not self.settings.load_only:
            # Now, and not at the first save: it takes seconds until it is ready, and where it cannot be started that is told at once.
            self._process = self.on_all(WriterProcess)
            self._buffers = SnapshotBuffers(shared=True, most=1)
            self._meeting = self.on_main(self._open_store) if distributed else None
            self._meetings = 0

    def _open_store(self) -> Address:
        """Open the store over which the processes of all ranks meet, and return where it is."""
        host = os.environ.get("MASTER_ADDR") or socket.getfqdn()
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        return host, int(self._store.port)

    def check_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Refuse weights that are made of several tensors, such as quantised ones: torch writes them, and cannot read them again.

        Raises:
            ValueError: If there is such a one.
        """
        for name, weight in weights:
            local = local_part(weight.detach())
            if is_traceable_wrapper_subclass(local):
                raise ValueError(
                    f"Expected weights that a sharded checkpoint can hold. Received: {name}, of the class {type(local).__name__}. Set "
                    "checkpoint.backend='file', which keeps it as it is, or quantize the model after the training."
                )

    def _save(
        self, payload: Mapping[str, object], names: list[str], *, epoch: int, global_step: int, ahead: bool = False
    ) -> None:
        if self.settings.load_only:
            return
        self._executor.wait()
        self._surface()
        record = self.on_main(lambda: self._open_target(count_bytes(payload), epoch, global_step))
        if not self._background:
            plain = self.on_all(lambda: to_host(payload))
            self.on_all(lambda: self._write(plain, record, names, ahead))
            return
        # A rank that cannot copy keeps all of them from writing, which takes all.
        copied, release = self.on_all(lambda: self._buffers.copy(payload))
        self._executor.submit(partial(self._write, copied, record, names, ahead), reliable=True, release=release)

    def _write(self, payload: dict[str, object], record: Record, names: list[str], ahead: bool) -> None:
        """Write a target together with the other ranks; then, on rank 0, let the names lead to it and prune."""
        # Another process may have another working directory by then.
        path = self.store.path(record.name).absolute()
        before = self._ahead
        self._ahead = None
        try:
            writer = TargetWriter(path, record)
            if before is not None and before.step == record.step and "latest" in names:
                writer.reuse(before.target, self._unchanged(payload, before))
            if self._process is None:
                save_target(payload, writer, group=self._group, alone=self.domain.size == 1)
            else:
                rank, size = self.domain.rank, self.domain.size
                if not all(self._exchange(self._process.is_ready)):
                    self._meetings += 1
                    # One that dies as it starts is told on all ranks: the others would wait for it.
                    problems = [problem for problem in self._exchange(self._process.renew(__name__)) if problem]
                    if problems:
                        raise CheckpointError(problems[0])
                    self._process.join(self._meeting, self._meetings, rank=rank, size=size)
                # The copy is in shared memory, so that the process takes it over without another one.
                self._process.write(partial(save_target, alone=size == 1), payload, writer)
            if ahead:
                self._ahead = SavedAhead(record.name, record.step, tensor_sums(payload))
        except BaseException as error:
            if self.domain.rank == 0:
                self.store.give_up(record.name)
            if isinstance(error, CheckpointException):
                raise _explained(error, path) from None
            raise
        put_off = self._is_mirror_behind(self._exchange)
        files = () if self.mirror is None else storage.names(path) - {SUMS}
        own = [name for name in files if written_by(name) == self.domain.rank]
        self._publish(record, names, payload, own, put_off=put_off)
        self._follow(record.sequence, self._exchange)

    def _unchanged(self, payload: dict[str, object], before: SavedAhead) -> frozenset[str]:
        """Return the tensors that the last save has written and that are unchanged on every rank."""
        target, earlier = self.store.path(before.target), before.sums
        try:
            problems = find_problems(read_manifest(target / SUMS, f"{before.target}/{SUMS}"), target, "size")
        except (CheckpointError, OSError) as error:
            problems = [str(error)]
        # The contents are compared, so that a tensor that the evaluation has changed, such as a buffer, is saved again.
        sums = tensor_sums(payload)
        same = {name for name, value in sums.items() if not problems and earlier.get(name) == value}
        ranks = self._exchange((same, sums.keys() - same))
        return frozenset().union(*(kept for kept, _ in ranks)).difference(*(changed for _, changed in ranks))

    def _end(self, timeout: float | None) -> None:
        super()._end(timeout)
        if self._process is not None:
            self._process.end()
        if self._group is not None and not self._executor.busy:
            dist.destroy_process_group(self._group)
            self._group = None


def _explained(error: CheckpointException, path: object) -> CheckpointError:
    """Return what went wrong on which ranks, as an error of the disk where it was nothing else."""
    failures = {rank: failure for rank, (failure, _) in error.failures.items()}
    kind = CheckpointDiskError if all(isinstance(found, OSError) for found in failures.values()) else CheckpointError
    texts = {}
    for rank, failure in failures.items():
        texts[rank] = str(failure) if isinstance(failure, CheckpointError) else repr(failure)
    reasons = "; ".join(f"rank {rank}: {text}" for rank, text in texts.items())
    return kind(f"Expected {path} to be written. Received: {reasons}")


def tensor_sums(payload: Mapping[str, object]) -> dict[str, str]:
    """Return the SHA-256 of this rank's part of each dense tensor of a state, with dtype and shape, by dotted name."""
    sums = {}
    for name, leaf in flatten(payload)[0].items():
        if not isinstance(leaf, Tensor) or local_part(leaf).layout != torch.strided:
            continue
        local = local_part(leaf)
        digest = hashlib.sha256(f"{leaf.dtype} {tuple(leaf.shape)} {tuple(local.shape)}".encode())
        plain = local.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        digest.update(plain.view(torch.uint8).numpy().data)
        sums[name] = digest.hexdigest()
    return sums


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

    def __init__(self, path: Path, record: Record) -> None:
        super().__init__(path, overwrite=False)
        self.fs: HashingFileSystem = HashingFileSystem()
        self.record = record
        self.earlier = ""
        self.taken_over: frozenset[str] = frozenset()

    def reuse(self, target: str, names: frozenset[str]) -> None:
        """Link tensors of these dotted names from another target, next to the new one, instead of writing them again."""
        self.earlier, self.taken_over = target, names

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name the files of all ranks, otherwise than those that are taken over."""
        named = super().prepare_global_plan(plans)
        if not self.taken_over:
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
        files: dict[str, tuple[int, str]] = {}
        if self.taken_over:
            metadata, kept, files = self._take_over(metadata, path)
            results = [*results, kept]
        # Filled here: torch 2.11 fills a copy of the metadata, torch 2.13 the one that it is given.
        metadata = replace(
            metadata, storage_data={result.index: result.storage_data for of_rank in results for result in of_rank}
        )
        super().finish(metadata, results)
        files[METADATA] = self.fs.written[f"{METADATA}.tmp"]
        for result in (result for of_rank in results for result in of_rank):
            if isinstance(result, HashedResult):
                files.update(result.written)
        files[INDEX] = storage.write_new_text(path / INDEX, index_text(metadata))
        storage.sync_directory(path)
        storage.sync_directory(path.parent)
        storage.write_text(path / SUMS, Manifest(self.record, files).text())

    def _take_over(
        self, metadata: Metadata, path: Path
    ) -> tuple[Metadata, list[WriteResult], dict[str, tuple[int, str]]]:
        """Link the tensor files of the earlier target; return the index with their entries, their places, and their checksums."""
        source = path.parent / self.earlier
        names = self.taken_over
        manifest, other = read_manifest(source / SUMS, f"{self.earlier}/{SUMS}"), read_index(source)
        assert metadata.planner_data is not None and other.planner_data is not None and other.storage_data is not None
        places = {index: place for index, place in other.storage_data.items() if index.fqn in names}
        files = {place.relative_path: manifest.files[place.relative_path] for place in places.values()}
        for name in files:
            storage.link(source / name, path / name)
        entries = {name: other.state_dict_metadata[name] for name in names}
        paths = {name: other.planner_data[name] for name in names}
        whole = replace(
            metadata,
            state_dict_metadata={**metadata.state_dict_metadata, **entries},
            planner_data={**metadata.planner_data, **paths},
        )
        return whole, [WriteResult(index, place.length, place) for index, place in places.items()], files

    def storage_meta(self) -> StorageMeta:
        """Return what `.metadata` says of this place: its name, not the path that it has on this machine."""
        return StorageMeta(checkpoint_id=Path(self.path).name, save_id=self.save_id)


class SavePlanner(DefaultSavePlanner):
    """Plans a save of a nested state, flattened by `flatten`; the stock loaders and converters restore the nesting."""

    def __init__(self, left_out: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.left_out = left_out

    def set_up_planner(
        self, state_dict: dict[str, object], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.mappings = flatten(state_dict)
        for name in self.left_out & self.state_dict.keys():
            del self.state_dict[name], self.mappings[name]
        self.is_coordinator = is_coordinator

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Take values that are no tensors from the first rank that has them: others do not know what the first one alone has written.

        torch takes each from the rank that has the least to write.
        """
        taken: set[MetadataIndex] = set()
        plans = []
        for plan in all_plans:
            values = {item.index for item in plan.items if item.type is WriteItemType.BYTE_IO}
            others = values & taken
            plans.append(replace(plan, items=[item for item in plan.items if item.index not in others]))
            taken |= values
        return super().create_global_plan(plans)


def save_target(
    payload: dict[str, object], writer: TargetWriter, *, group: dist.ProcessGroup | None = None, alone: bool = False
) -> None:
    """Write a target. Call on all ranks of the group."""
    with quiet():
        save(
            payload,
            storage_writer=writer,
            planner=SavePlanner(writer.taken_over),
            process_group=group,
            no_dist=alone,
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out torch's remark that one process saves or loads alone: the caller intends that."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def written_by(file: str) -> int:
    """Return the rank that has written a file of a target, as its name tells; files of no single rank are those of rank 0."""
    found = _OF_RANK.fullmatch(file)
    return int(found[1]) if found else 0


# Reading


class TargetReader(FileSystemReader):
    """Reads a target of which the index is known: torch's own would unpickle `.metadata`."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self.fs: HashingFileSystem = HashingFileSystem()
        self.metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata


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
            self.state_dict[name] = torch.load(value, weights_only=True)
        except Exception as error:
            raise CheckpointDamaged(f"Expected a readable entry. Received: {name}, {why_unreadable(error)}") from error


def read_target(
    path: Path,
    *,
    template: Mapping[str, object] | None = None,
    sections: Iterable[str] | None = None,
    trust: bool = False,
) -> dict[str, object]:
    """Return the state in a target. Communicates nothing."""
    metadata = read_index(path, trust=trust)
    wanted = None if sections is None else frozenset(sections)
    flat = destinations(metadata, template, wanted)
    elsewhere = {name: value for name, value in flat.items() if isinstance(value, Tensor) and value.is_meta}
    flat = {name: value for name, value in flat.items() if name not in elsewhere}
    planner = LoadPlanner()
    if flat:
        try:
            with quiet():
                load(flat, storage_reader=TargetReader(path, metadata), planner=planner, no_dist=True)
        except CheckpointException as error:
            reason = "; ".join(str(failure) for failure, _ in error.failures.values())
            raise CheckpointDamaged(
                f"Expected a readable checkpoint. Received: {path}: {reason}. Use another checkpoint."
            ) from None
    payload: dict[str, object] = nest({**(planner.state_dict if flat else {}), **elsewhere}, metadata.planner_data)
    check_values(payload, path)
    return payload


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
        like = layouts.get(name, layouts.get(name.rpartition(".")[0]))
        dtype = entry.properties.dtype
        if like is None and template is not None and _is_of_another_rank(metadata.planner_data[name], template):
            found[name] = torch.empty(entry.size, dtype=dtype, device="meta")
        elif isinstance(like, Tensor) and is_sharded(like) and like.shape == entry.size:
            found[name] = torch.empty_like(like, dtype=dtype, requires_grad=False)
        else:
            found[name] = torch.empty(entry.size, dtype=dtype)
    return found


def _is_of_another_rank(path: Place, template: Mapping[str, Any]) -> bool:
    """Whether a tensor that the template lacks is one of those by name of which the template has this rank's."""
    section = template.get(path[0])
    if not isinstance(section, Mapping):
        return False
    if len(path) > 2 and isinstance(section.get(path[1]), Mapping):
        return True
    return not section or any(isinstance(value, Tensor) for value in section.values())


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
    is_plain = bool(path) and not any(tensors(value))
    if is_plain or isinstance(value, Tensor):
        return [(path, value)]
    if isinstance(value, Mapping):
        strange = next((key for key in value if not isinstance(key, str)), None)
        if strange is not None:
            raise CheckpointError(
                f"Expected string keys above tensors. Received: {'.'.join(map(str, path))}[{strange!r}]. Key it by a string."
            )
        return [leaf for key, item in value.items() for leaf in _leaves(item, (*path, key))]
    return [leaf for index, item in enumerate(value) for leaf in _leaves(item, (*path, index))]


def nest(flat: Mapping[str, object], paths: Mapping[str, Place]) -> Any:
    """Return the state that `flatten` was given; tuples with tensors come back as lists."""
    below: dict[Any, dict[str, Place]] = {}
    for name in flat:
        key, *rest = paths[name]
        below.setdefault(key, {})[name] = tuple(rest)
    nested: dict[Any, Any] = {}
    for key, inner in below.items():
        leaves = [name for name, rest in inner.items() if not rest]
        if leaves and len(inner) > 1:
            raise CheckpointDamaged(f"Expected one value at each path. Received: {leaves[0]}, and values below it.")
        nested[key] = flat[leaves[0]] if leaves else nest({name: flat[name] for name in inner}, inner)
    if nested and all(type(key) is int for key in nested):
        return [nested[index] for index in sorted(nested)]
    return nested


# The index: which file has which part of each tensor, in plain JSON. torch keeps the same in `.metadata`, a pickle, for its own reader.


def index_text(metadata: Metadata) -> str:
    """Return the index as JSON. A chunk is `[offsets, sizes, file, offset, length]`, where `file` counts in `files`."""
    _check_index(metadata)
    stored, paths = metadata.storage_data or {}, metadata.planner_data or {}
    files = sorted({str(place.relative_path) for place in stored.values()})
    number = {file: index for index, file in enumerate(files)}

    def place(name: str, offsets: torch.Size | None = None) -> list[int]:
        found = stored[MetadataIndex(name, offsets)]
        return [number[str(found.relative_path)], int(found.offset), int(found.length)]

    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for name, about in metadata.state_dict_metadata.items():
        path = list(paths.get(name, (name,)))
        if isinstance(about, TensorStorageMetadata):
            tensors[name] = {
                "path": path,
                "dtype": str(about.properties.dtype).removeprefix("torch."),
                "shape": list(about.size),
                "chunks": [[list(c.offsets), list(c.sizes), *place(name, c.offsets)] for c in about.chunks],
            }
        else:
            values[name] = {"path": path, "place": place(name)}
    content = {"format": FORMAT, "files": files, "tensors": tensors, "values": values}
    return json.dumps(content, separators=(",", ":")) + "\n"


def parse_index(text: str) -> Metadata:
    """Read an index into what torch's reader takes. What is wrong with it is a `ValueError`."""
    content = parse_json(text)
    if not isinstance(content, Mapping) or content.get("format") != FORMAT:
        raise ValueError(f"it is no {FORMAT}")
    entries: dict[str, Any] = {}
    paths: dict[str, Place] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    try:
        files = [plain_name(file) for file in content["files"]]

        def stored(place: object) -> _StorageInfo:
            file, offset, length = _numbers(place)
            return _StorageInfo(files[file], offset, length)

        for name, about in content["tensors"].items():
            chunks = []
            for offsets, sizes, *place in about["chunks"]:
                chunks.append(ChunkStorageMetadata(_numbers(offsets), _numbers(sizes)))
                places[MetadataIndex(name, chunks[-1].offsets)] = stored(place)
            properties = TensorProperties(dtype=dtype_of(str(about["dtype"])))
            entries[name] = TensorStorageMetadata(properties, _numbers(about["shape"]), chunks)
            paths[name] = _keys(about["path"])
        for name, about in content["values"].items():
            entries[name] = BytesStorageMetadata()
            paths[name] = _keys(about["path"])
            places[MetadataIndex(name)] = stored(about["place"])
    except (KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise ValueError(f"a part of it is missing or of another kind: {error!r}") from error
    metadata = Metadata(entries, planner_data=paths, storage_data=places)
    _check_index(metadata)
    return metadata


def _check_index(metadata: Metadata) -> None:
    """Refuse tensors whose chunks do not come to their shape, or to the bytes in the files."""
    for name, tensor in metadata.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata):
            continue
        for chunk in tensor.chunks:
            fits = len(chunk.offsets) == len(chunk.sizes) == len(tensor.size)
            ends = zip(chunk.offsets, chunk.sizes, tensor.size)
            if not fits or any(offset + size > whole for offset, size, whole in ends):
                raise ValueError(f"a chunk of {name} is not within its shape {list(tensor.size)}")
            length = (metadata.storage_data or {})[MetadataIndex(name, chunk.offsets)].length
            if math.prod(chunk.sizes) * tensor.properties.dtype.itemsize > length:
                raise ValueError(f"a chunk of {name} has {length} bytes, fewer than its elements take")
        # What no chunk covers would stay memory that nothing was read into.
        if not _tile(tensor.size, tensor.chunks):
            raise ValueError(f"the chunks of {name} do not make up its shape {list(tensor.size)}")


def _tile(shape: torch.Size, chunks: list[ChunkStorageMetadata]) -> bool:
    """Whether chunks within a tensor cover each element once: then their corners, with signs, are those of the whole."""
    cut = [dim for dim, whole in enumerate(shape) if any(chunk.sizes[dim] != whole for chunk in chunks)]
    if 0 in shape or len(cut) > _MOST_CUTS:
        return 0 in shape
    boxes = [([(chunk.offsets[dim], chunk.sizes[dim]) for dim in cut], 1) for chunk in chunks]
    corners = Counter[tuple[int, ...]]()
    for box, sign in [*boxes, ([(0, shape[dim]) for dim in cut], -1)]:
        for corner in product(*([(start, 1), (start + size, -1)] for start, size in box)):
            corners[tuple(place for place, _ in corner)] += sign * math.prod(factor for _, factor in corner)
    return not any(corners.values())


def _numbers(values: Any) -> torch.Size:
    strange = next((value for value in values if type(value) is not int or not 0 <= value < 1 << 62), None)
    if strange is not None:
        raise TypeError(f"{strange!r} is no whole number from 0 to 2^62")
    return torch.Size(values)


def _keys(values: Any) -> Place:
    if not 0 < len(values) < _DEEPEST or any(type(key) not in (str, int) for key in values):
        raise TypeError(f"{values!r:.80} is no path of keys")
    return tuple(values)


def read_index(directory: Path, *, trust: bool = False) -> Metadata:
    """Return the index of a target, whose files are there and have as many bytes as it names."""
    path = directory / INDEX
    if storage.size_of(path) is not None:
        try:
            metadata = parse_index(storage.read_text(path, limit=_LARGEST_INDEX))
        except (ValueError, RecursionError, MemoryError, OSError) as error:
            raise CheckpointDamaged(f"Expected an index of a sharded checkpoint. Received: {path}: {error}") from error
    elif trust:
        try:
            metadata = parse_index(index_text(FileSystemReader(directory).read_metadata()))
        except Exception as error:
            raise CheckpointDamaged(
                f"Expected the metadata of a sharded checkpoint. Received: {directory}: {error}"
            ) from error
    else:
        raise CheckpointError(
            f"Expected {INDEX} in a sharded checkpoint. Received: {directory}, which another program wrote. Convert it with `python -m "
            "torch.distributed.checkpoint.format_utils dcp_to_torch DIRECTORY FILE`, or set checkpoint.trust=true, which unpickles "
            "`.metadata` and so runs the code in it."
        )
    places = (metadata.storage_data or {}).values()
    sizes = {place.relative_path: storage.size_of(directory / place.relative_path) for place in places}
    # A read would wait for a pipe: files that are not regular count as missing.
    missing = sorted(file for file, size in sizes.items() if size is None)
    if missing:
        raise CheckpointDamaged(
            f"Expected the files of {directory}. Received: no {', '.join(missing[:5])}. Use another checkpoint."
        )
    # Memory is allocated for what the index names: together not more than there is in the files.
    if sum(place.length for place in places) > sum(size or 0 for size in sizes.values()):
        raise CheckpointDamaged(
            f"Expected the files of {directory}. Received: an index that names more bytes than they have. Use another checkpoint."
        )
    return metadata

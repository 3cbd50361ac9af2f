"""How the files of a target are written, by all ranks together, and read, by each rank alone and without running anything of them."""

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
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
    _StoragePrefix,
)
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItemType
from torch.distributed.checkpoint.planner import SavePlanner as TorchSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from danling.utils.tensors import is_sharded

from . import storage
from .dcp_index import INDEX, Place, flatten, index_text, nest, read_index
from .errors import CheckpointDamaged
from .manifest import Manifest, Record, archive_complaints, read_manifest
from .reading import READ_WHOLE, Entry, Outline, without_tensors
from .target_store import SUMS
from .torch_files import check_format, check_values, why_unreadable

METADATA = ".metadata"

_OF_RANK = re.compile(r"(?:\d+)?__(\d+)_\d+\.distcp")


# Writing


class HashingFileSystem(FileSystem):
    """Files whose sizes and checksums are known when they have been written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[str, tuple[int, str]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        """Open a file whose content is durable when the context ends."""
        # torch opens files to read and to write through this method.
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
        # torch calls the files of every save alike: `__0_0.distcp` of rank 0, and so on.
        named = super().prepare_global_plan(plans)
        if not self.taken_over:
            return named
        prefixes = (
            _StoragePrefix(f"{self.record.sequence}__{rank}_") for rank in range(len(named))
        )
        return [replace(plan, storage_data=prefix) for plan, prefix in zip(named, prefixes)]

    def write_data(self, plan: SavePlan, planner: TorchSavePlanner) -> Future[list[WriteResult]]:
        """Write the share of this rank."""
        future: Future[list[WriteResult]] = Future()
        results: list[WriteResult] = []
        if plan.items:
            results = super().write_data(plan, planner).value()
            storage.sync_directory(Path(self.path))
            # torch sends the results to the coordinator, and nothing else: one of them takes the sums.
            first = results[0]
            hashed = HashedResult(
                first.index, first.size_in_bytes, first.storage_data, dict(self.fs.written)
            )
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
            metadata,
            storage_data={
                result.index: result.storage_data for of_rank in results for result in of_rank
            },
        )
        super().finish(metadata, results)
        # torch writes it under this name and renames it.
        files[METADATA] = self.fs.written[f"{METADATA}.tmp"]
        for result in (result for of_rank in results for result in of_rank):
            if isinstance(result, HashedResult):
                files.update(result.written)
        files[INDEX] = storage.write_new_text(path / INDEX, index_text(metadata))
        # All names are on the disk before the manifest, by which the target counts.
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
        assert (
            metadata.planner_data is not None
            and other.planner_data is not None
            and other.storage_data is not None
        )
        places = {index: place for index, place in other.storage_data.items() if index.fqn in names}
        files = {
            place.relative_path: manifest.files[place.relative_path] for place in places.values()
        }
        # Whole files, with what else is in them: the index leads to the tensors that are kept.
        for name in files:
            storage.link(source / name, path / name)
        entries = {name: other.state_dict_metadata[name] for name in names}
        paths = {name: other.planner_data[name] for name in names}
        whole = replace(
            metadata,
            state_dict_metadata={**metadata.state_dict_metadata, **entries},
            planner_data={**metadata.planner_data, **paths},
        )
        return (
            whole,
            [WriteResult(index, place.length, place) for index, place in places.items()],
            files,
        )

    def storage_meta(self) -> StorageMeta:
        """Return what `.metadata` says of this place: its name, not the path that it has on this machine."""
        return StorageMeta(checkpoint_id=Path(self.path).name, save_id=self.save_id)


class SavePlanner(DefaultSavePlanner):
    """Plans a save of a nested state, flattened by `flatten`; the stock loaders and converters restore the nesting."""

    def __init__(self, left_out: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.left_out = left_out

    def set_up_planner(
        self,
        state_dict: dict[str, object],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
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
            plans.append(
                replace(plan, items=[item for item in plan.items if item.index not in others])
            )
            taken |= values
        return super().create_global_plan(plans)


def save_target(
    payload: dict[str, object],
    writer: TargetWriter,
    *,
    group: dist.ProcessGroup | None = None,
    alone: bool = False,
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
        # The state is flat already; see `flatten`.
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        problems = archive_complaints(value)
        if problems:
            raise CheckpointDamaged(
                f"Expected a readable entry. Received: {name}: {'; '.join(problems)}"
            )
        value.seek(0)
        try:
            self.state_dict[name] = torch.load(value, weights_only=True)
        except Exception as error:
            raise CheckpointDamaged(
                f"Expected a readable entry. Received: {name}, {why_unreadable(error)}"
            ) from error


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
    elsewhere = {
        name: value for name, value in flat.items() if isinstance(value, Tensor) and value.is_meta
    }
    flat = {name: value for name, value in flat.items() if name not in elsewhere}
    values: dict[str, object] = {}
    if flat:
        planner = LoadPlanner()
        try:
            with quiet():
                load(
                    flat, storage_reader=TargetReader(path, metadata), planner=planner, no_dist=True
                )
        except CheckpointException as error:
            reason = "; ".join(str(failure) for failure, _ in error.failures.values())
            raise CheckpointDamaged(
                f"Expected a readable checkpoint. Received: {path}: {reason}. Use another checkpoint."
            ) from None
        values = planner.state_dict
    payload: dict[str, object] = nest({**values, **elsewhere}, metadata.planner_data)
    check_values(payload, path)
    return payload


def destinations(
    metadata: Metadata, template: Mapping[str, object] | None, sections: frozenset[str] | None
) -> dict[str, object]:
    """Return fresh memory for everything that a checkpoint holds, by dotted name: nothing of it is skipped in silence."""
    layouts, _ = flatten(template or {})
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
        if (
            like is None
            and template is not None
            and _is_of_another_rank(metadata.planner_data[name], template)
        ):
            # Such as the weights of another stage of a pipeline: this rank knows them by name only.
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
            dtype, shape = about.properties.dtype, tuple(about.size)
            size = about.size.numel() * dtype.itemsize
            short = str(dtype).removeprefix("torch.")
            outline.entries.append(Entry(name, short, shape, size, len(about.chunks)))
    return outline

"""What a checkpoint holds, from its directory of names: tensors stay on disk."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from danling.checkpoints.errors import CheckpointDamaged
from danling.utils.nesting import parse_json

from .source import locate

_HEADER_LIMIT = 100 << 20
_MODEL = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors")


@dataclass(frozen=True)
class Entry:
    """One tensor.

    Attributes:
        name: Its path in the checkpoint, dotted.
        dtype: As torch prints it, less `torch.`.
        shape: Its whole shape, also when it is stored in shards.
        size: Bytes of its elements.
        chunks: Pieces that it is stored in.
    """

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
class Contents:
    """A checkpoint without its tensors' values.

    Attributes:
        kind: `file`, `sharded`, `engine` (what the runner saved beside a DeepSpeed engine), `safetensors` or `torch file` (one that
            another program wrote).
        path: The file or directory that was read.
        entries: Its tensors.
        plain: Everything else, nested as it was saved.
        record: What its manifest says: run, step, epoch, sequence; `None` without one.
    """

    kind: str
    path: Path
    entries: list[Entry] = field(default_factory=list)
    plain: dict[str, Any] = field(default_factory=dict)
    record: dict[str, Any] | None = None

    def sections(self) -> dict[str, dict[str, Any]]:
        """Return, for each first component, the number of tensors, elements and bytes, and the dtypes."""
        table: dict[str, dict[str, Any]] = {}
        for entry in self.entries:
            section = entry.name.partition(".")[0] if self.kind in ("file", "sharded", "engine") else "tensors"
            row = table.setdefault(section, {"tensors": 0, "elements": 0, "bytes": 0, "dtypes": {}})
            row["tensors"] += 1
            row["elements"] += entry.numel
            row["bytes"] += entry.size
            row["dtypes"][entry.dtype] = row["dtypes"].get(entry.dtype, 0) + entry.numel
        return table


def read_contents(source: str | Path) -> Contents:
    """Return what is in a checkpoint, a `.safetensors` file, or any file of `torch.save`.

    Args:
        source: A file, pointer, target, checkpoint directory or run directory.

    Raises:
        CheckpointNotFound: If there is none.
        CheckpointDamaged: If it cannot be read.
    """
    path = Path(source)
    if path.suffix == ".safetensors" and path.is_file():
        return read_safetensors(path)
    exported = _exported(path)
    if exported:
        parts = [read_safetensors(file) for file in exported]
        return Contents("safetensors", path, [entry for part in parts for entry in part.entries], parts[0].plain)
    store, found = locate(path)
    target = store.target(found)
    # Tensors stay unread, so that sizes are enough.
    if target.is_dir():
        store.verify(found, "size")
        contents = _read_directory(target)
    else:
        contents = _read_file(target)
        if contents.kind != "torch file":
            store.verify(found, "size")
    try:
        record = store.record(found)
    except CheckpointDamaged:
        return contents
    names = ("run", "sequence", "step", "epoch")
    contents.record = {name: getattr(record, name) for name in names}
    return contents


def _exported(path: Path) -> list[Path]:
    """Return the files of weights in a directory as `danling export` and the Hugging Face libraries write them."""
    files = sorted(path.glob("model*.safetensors")) if path.is_dir() else []
    return [file for file in files if _MODEL.fullmatch(file.name)]


def read_safetensors(path: Path) -> Contents:
    """Return what the header of a safetensors file says (https://huggingface.co/docs/safetensors): eight bytes with its length,
    then JSON.

    Raises:
        CheckpointDamaged: If there is no such header.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _HEADER_LIMIT:
                raise ValueError(f"a header of {length} bytes")
            header = parse_json(file.read(length))
        plain = {"metadata": header.pop("__metadata__", {})}
        entries = [_safetensors_entry(name, about) for name, about in sorted(header.items())]
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointDamaged(f"Expected a header of safetensors. Received: {path}: {error}") from error
    return Contents("safetensors", path, entries, plain)


def _safetensors_entry(name: str, about: Mapping[str, Any]) -> Entry:
    start, end = about["data_offsets"]
    return Entry(name, str(about["dtype"]), tuple(about["shape"]), end - start)


def _read_file(path: Path) -> Contents:
    from danling.checkpoints.reading import check_foreign, is_own, read_file

    check_foreign(path, "size")
    payload = read_file(path, mmap=True)
    contents = Contents("file" if is_own(payload) else "torch file", path)
    contents.entries = list(_tensors(payload, ""))
    contents.plain = _without_tensors(payload) if isinstance(payload, Mapping) else {}
    return contents


def _tensors(value: Any, name: str) -> Iterator[Entry]:
    from torch import Tensor

    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        yield Entry(name, dtype, tuple(value.shape), value.numel() * value.element_size())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{name}.{index}")


def _without_tensors(value: Any) -> Any:
    from torch import Tensor

    if isinstance(value, Mapping):
        return {str(k): _without_tensors(v) for k, v in value.items() if not isinstance(v, Tensor)}
    if isinstance(value, (list, tuple)):
        return [_without_tensors(item) for item in value if not isinstance(item, Tensor)]
    return value


def _read_directory(path: Path) -> Contents:
    from danling.checkpoints.deepspeed_files import is_engine_target, read_runner_file

    if not is_engine_target(path):
        return _read_sharded(path)
    payload = read_runner_file(path)
    return Contents("engine", path, list(_tensors(payload, "")), _without_tensors(payload))


def _read_sharded(path: Path) -> Contents:
    from danling.checkpoints.dcp_files import read_target
    from danling.checkpoints.shard_index import read_index
    from danling.utils.tensors import dtype_of

    plain = read_target(path, sections=["format_version", "runner", "state"])
    contents = Contents("sharded", path, plain=_without_tensors(plain))
    for name, about in sorted(read_index(path).tensors.items()):
        size = math.prod(about.shape) * dtype_of(about.dtype).itemsize
        contents.entries.append(Entry(name, about.dtype, about.shape, size, len(about.chunks)))
    return contents

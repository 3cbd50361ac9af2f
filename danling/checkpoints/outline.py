"""The entries of a checkpoint, without the values of its tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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


def tensors_in(value: object, name: str = "") -> Iterator[Entry]:
    """Yield the tensors of a nested state by dotted name."""
    # Read from headers alone, as of safetensors, a checkpoint needs no torch.
    from torch import Tensor

    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        yield Entry(name, dtype, tuple(value.shape), value.numel() * value.element_size())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from tensors_in(item, f"{name}.{index}")


def without_tensors(value: object) -> Any:
    """Return a nested state less its tensors, with keys that are strings."""
    # Read from headers alone, as of safetensors, a checkpoint needs no torch.
    from torch import Tensor

    if isinstance(value, Mapping):
        return {str(k): without_tensors(v) for k, v in value.items() if not isinstance(v, Tensor)}
    if isinstance(value, (list, tuple)):
        return [without_tensors(item) for item in value if not isinstance(item, Tensor)]
    return value

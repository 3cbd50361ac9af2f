"""Sizes and SHA-256 checksums beside every checkpoint, in a form that `sha256sum -c` reads."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from danling.utils.files import plain_name

from . import storage
from .errors import CheckpointDamaged, reason
from .policy import Record

HEADER = "# danling-manifest 1"
_INDEX_FILES = ("index.json", ".metadata")
_SELF_CHECKSUM = "# sha256 of the lines above: "
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LARGEST = 1 << 62


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        record: What the checkpoint is.
        files: `(size in bytes, SHA-256)` by path, relative to the manifest.
    """

    record: Record
    files: dict[str, tuple[int, str]] = field(default_factory=dict)

    def text(self) -> str:
        """Return the manifest; what `sha256sum -c` does not know stands in comments."""
        record = self.record
        line = " ".join(f"{branch}:{last}" for branch, last in record.line)
        lines = [HEADER, f"# name: {record.name}", f"# run: {record.run}", f"# sequence: {record.sequence}"]
        lines += [
            f"# branch: {record.branch}",
            f"# continues: {line}",
            f"# step: {record.step}",
            f"# epoch: {record.epoch}",
        ]
        lines += [f"# size: {size} {name}" for name, (size, _) in sorted(self.files.items())]
        lines += [f"{digest}  {name}" for name, (_, digest) in sorted(self.files.items())]
        body = "\n".join(lines) + "\n"
        return f"{body}{_SELF_CHECKSUM}{hashlib.sha256(body.encode()).hexdigest()}\n"

    @classmethod
    def parse(cls, text: str) -> Manifest:
        """Read a manifest: the one place where the names, sizes and checksums in one are taken for what they say."""
        try:
            return cls._parse(text)
        except (KeyError, ValueError) as error:
            raise CheckpointDamaged(f"Expected a whole manifest. Received one that cannot be read: {error}.") from error

    @classmethod
    def _parse(cls, text: str) -> Manifest:
        body, seal, digest = text.rpartition(_SELF_CHECKSUM)
        if not text.startswith(f"{HEADER}\n"):
            raise ValueError("its first line is not a manifest's")
        if not seal or digest != f"{hashlib.sha256(body.encode()).hexdigest()}\n":
            raise ValueError("it is not as it was written")
        fields: dict[str, str] = {}
        sizes: dict[str, int] = {}
        sums: dict[str, str] = {}
        for line in body.splitlines()[1:]:
            if line.startswith("# size: "):
                size, _, name = line[8:].partition(" ")
                sizes[plain_name(name)] = _number(size)
            elif line.startswith("# "):
                key, _, value = line[2:].partition(": ")
                fields[key] = value
            else:
                digest, _, name = line.partition("  ")
                if not _SHA256.fullmatch(digest):
                    raise ValueError(f"{digest[:80]!r} is no SHA-256")
                sums[plain_name(name)] = digest
        return cls(_record(fields), {name: (sizes[name], sums[name]) for name in sums})


def read_manifest(path: Path, shown: str) -> Manifest:
    """Return the manifest in a file."""
    try:
        if storage.size_of(path) is None:
            raise CheckpointDamaged(f"{shown} {storage.absence(path)}")
        text = storage.read_text(path)
    except OSError as error:
        raise CheckpointDamaged(f"{shown} cannot be read: {reason(error)}") from error
    try:
        return Manifest.parse(text)
    except CheckpointDamaged as error:
        raise CheckpointDamaged(f"{shown}: {error}") from error


def _record(fields: dict[str, str]) -> Record:
    pairs = [part.split(":") for part in fields["continues"].split()]
    line = tuple((_number(branch), _number(last)) for branch, last in pairs)
    sequence, branch, step, epoch = (_number(fields[key]) for key in ("sequence", "branch", "step", "epoch"))
    return Record(plain_name(fields["name"]), sequence, branch, line, fields["run"], step, epoch)


def _number(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
    if not 0 <= number < _LARGEST:
        raise ValueError(f"{text[:80]!r} is no number from 0 to 2^62")
    return number


def find_problems(manifest: Manifest, directory: Path, level: str) -> list[str]:
    """Return what is wrong with the files of a checkpoint; empty when they are as written."""

    def problem(name: str) -> str | None:
        try:
            return differs(name)
        except OSError as error:
            return f"{name} cannot be read: {reason(error)}"

    def differs(name: str) -> str | None:
        size, digest = manifest.files[name]
        found = storage.size_of(directory / name)
        if found is None:
            return f"{name} {storage.absence(directory / name)}"
        if level != "none" and found != size:
            return f"{name} has {found} bytes instead of {size}"
        if (level == "full" or (level == "size" and name in _INDEX_FILES)) and storage.hash_file(
            directory / name
        ) != digest:
            return f"{name} has another SHA-256 than was written"
        return None

    if len(manifest.files) == 1 or level != "full":
        found = [problem(name) for name in manifest.files]
    else:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(problem, manifest.files))
    return [problem for problem in found if problem is not None]


def damage_of(source: Path, error: CheckpointDamaged) -> CheckpointDamaged:
    """Return an error that names the checkpoint, whatever part of it an error is about."""
    return error if str(error).startswith("Expected") else damaged([str(error)], source)


def damaged(problems: Iterable[str], source: Path) -> CheckpointDamaged:
    """Return the error for a checkpoint that does not verify."""
    return CheckpointDamaged(
        f"Expected {source} as it was written. Received: {'; '.join(dict.fromkeys(problems))}. Use another checkpoint; a "
        "run with auto_resume finds the newest one that verifies."
    )

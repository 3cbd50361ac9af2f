"""The record of each checkpoint, and how its files are compared with what was written.

A manifest holds sizes and SHA-256 checksums in a form that `sha256sum -c` reads. An archive of `torch.save` also has the CRC-32 of each
of its records, which `torch.load` does not compare.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO
from zipfile import ZIP_STORED, BadZipFile, ZipFile, is_zipfile

from danling.utils.files import plain_name

from . import storage
from .errors import CheckpointDamaged, reason

HEADER = "# danling-manifest 1"
# Read whole by `verify=size` too: they say where in the other files everything is.
_INDEX_FILES = ("index.json", ".metadata")
_SELF_CHECKSUM = "# sha256 of the lines above: "
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LARGEST = 1 << 62
_MOST_FILES = 100_000
"""Files of the largest checkpoint: each rank writes a few."""
_HISTORY = re.compile(r"ckpt-(e\d{6,}|s\d{12,})")
_CHUNK = 4 << 20
# A file that begins so and has lost its end is a damaged archive, which `is_zipfile` denies.
_MAGIC = b"PK\x03\x04"
_LEGACY_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""A pickle of `torch.serialization.MAGIC_NUMBER`."""

# Records


@dataclass(frozen=True)
class Record:
    """The facts about a complete checkpoint, known without reading it.

    Attributes:
        name: `latest`, `best`, `model` or a history name.
        sequence: Number of the save that made it, in the order of saves; names of one save share it.
        branch: Number of its branch of saves. A run that goes back to an older checkpoint begins a new branch.
        ancestors: `(branch, last sequence)` of the branches that this one continues, from the oldest.
        run: Identity of the run.
        step: Committed updates.
        epoch: Completed epochs.
    """

    name: str
    sequence: int
    branch: int
    ancestors: tuple[tuple[int, int], ...]
    run: str
    step: int
    epoch: int


@dataclass(frozen=True)
class Branch:
    """Where the saves of this process belong: the number of their branch, those that it continues, and the last sequence."""

    number: int
    ancestors: tuple[tuple[int, int], ...]
    sequence: int


def history_name(*, step_mode: bool, epoch: int, global_step: int) -> str:
    """Return the history name of a state: `ckpt-s{global_step:012d}` in step mode, else `ckpt-e{epoch:06d}`."""
    return f"ckpt-s{global_step:012d}" if step_mode else f"ckpt-e{epoch:06d}"


def is_history(name: str) -> bool:
    """Whether the library gives such a name to history."""
    return _HISTORY.fullmatch(name) is not None


def is_name(name: str) -> bool:
    """Whether the library gives such a name to a checkpoint."""
    return name in ("latest", "best", "model") or is_history(name)


def newest(records: Iterable[Record]) -> Record | None:
    """Return a record of the last save; `None` when there are no records."""
    return max(records, key=lambda record: record.sequence, default=None)


def is_on_branch(record: Record, branch: int, ancestors: Iterable[tuple[int, int]]) -> bool:
    """Whether a record belongs to a branch of saves or to what it continues, and not to an abandoned one."""
    if record.branch == branch:
        return True
    return any(record.branch == number and record.sequence <= last for number, last in ancestors)


def next_branch(records: Collection[Record], resumed: Record | None) -> Branch:
    """Return where a process saves that goes on from `resumed`, or from scratch."""
    last = newest(records)
    if last is None:
        return Branch(0, (), 0)
    if resumed is not None and resumed.sequence == last.sequence:
        return Branch(resumed.branch, resumed.ancestors, last.sequence)
    # Sequences go on over all branches, so that a number never names two saves.
    number = max(record.branch for record in records) + 1
    ancestors = () if resumed is None else (*resumed.ancestors, (resumed.branch, resumed.sequence))
    return Branch(number, ancestors, last.sequence)


def to_delete(records: Iterable[Record], *, keep: int, protected: Collection[int]) -> list[str]:
    """Return the history names that retention gives up, oldest first."""
    if keep <= 0:
        return []
    history = sorted(
        (record for record in records if is_history(record.name)),
        key=lambda record: record.sequence,
    )
    return [record.name for record in history[:-keep] if record.sequence not in protected]


# Manifests


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of: its record, and `(size in bytes, SHA-256)` of its files by path, relative to the manifest."""

    record: Record
    files: dict[str, tuple[int, str]] = field(default_factory=dict)

    def text(self) -> str:
        """Return the manifest; comments hold what `sha256sum -c` does not know."""
        record = self.record
        files = sorted(self.files.items())
        lines = [
            HEADER,
            f"# name: {record.name}",
            f"# run: {record.run}",
            f"# sequence: {record.sequence}",
            f"# branch: {record.branch}",
            f"# continues: {' '.join(f'{branch}:{last}' for branch, last in record.ancestors)}",
            f"# step: {record.step}",
            f"# epoch: {record.epoch}",
            *(f"# size: {size} {name}" for name, (size, _) in files),
            *(f"{digest}  {name}" for name, (_, digest) in files),
        ]
        body = "\n".join(lines) + "\n"
        return f"{body}{_SELF_CHECKSUM}{hashlib.sha256(body.encode()).hexdigest()}\n"

    @classmethod
    def parse(cls, text: str) -> Manifest:
        """Read a manifest: the one place where names, sizes and checksums in one are accepted."""
        try:
            body, seal, digest = text.rpartition(_SELF_CHECKSUM)
            if not text.startswith(f"{HEADER}\n"):
                raise ValueError("its first line is not a manifest's")
            # A manifest that was cut or edited describes nothing.
            if not seal or digest != f"{hashlib.sha256(body.encode()).hexdigest()}\n":
                raise ValueError("it is not as it was written")
            return cls._of_lines(body.splitlines()[1:])
        except (KeyError, ValueError) as error:
            raise CheckpointDamaged(
                f"Expected a whole manifest. Received one that cannot be read: {error}."
            ) from error

    @classmethod
    def _of_lines(cls, lines: Iterable[str]) -> Manifest:
        fields: dict[str, str] = {}
        sizes: dict[str, int] = {}
        sums: dict[str, str] = {}
        for line in lines:
            if len(sums) > _MOST_FILES:
                raise ValueError(f"it names more than {_MOST_FILES:,} files")
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
        pairs = [part.split(":") for part in fields["continues"].split()]
        ancestors = tuple((_number(branch), _number(last)) for branch, last in pairs)
        sequence, branch, step, epoch = (
            _number(fields[key]) for key in ("sequence", "branch", "step", "epoch")
        )
        record = Record(
            plain_name(fields["name"]), sequence, branch, ancestors, fields["run"], step, epoch
        )
        return cls(record, {name: (sizes[name], sums[name]) for name in sums})


def _number(text: str) -> int:
    # `int` alone takes blanks, underscores and the digits of other scripts, and any length.
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
    if not 0 <= number < _LARGEST:
        raise ValueError(f"{text[:80]!r} is no number from 0 to 2^62")
    return number


def read_manifest(path: Path, shown: str) -> Manifest:
    """Return the manifest in a file, which errors call `shown`."""
    try:
        if storage.size_of(path) is None:
            raise CheckpointDamaged(f"{shown} {storage.absence(path)}")
        return Manifest.parse(storage.read_text(path))
    except CheckpointDamaged as error:
        if str(error).startswith(shown):
            raise
        raise CheckpointDamaged(f"{shown}: {error}") from error
    except OSError as error:
        raise CheckpointDamaged(f"{shown} cannot be read: {reason(error)}") from error


def find_problems(manifest: Manifest, directory: Path, level: str) -> list[str]:
    """Return how the files of a checkpoint differ from its manifest; level `"full"`, `"size"` or `"none"`."""

    def problem(name: str) -> str | None:
        (size, digest), path = manifest.files[name], directory / name
        try:
            found = storage.size_of(path)
            if found is None:
                return f"{name} {storage.absence(path)}"
            if level != "none" and found != size:
                return f"{name} has {found} bytes instead of {size}"
            is_read = level == "full" or (level == "size" and name in _INDEX_FILES)
            if is_read and storage.hash_file(path) != digest:
                return f"{name} has another SHA-256 than was written"
        except OSError as error:
            return f"{name} cannot be read: {reason(error)}"
        return None

    if len(manifest.files) == 1 or level != "full":
        found = [problem(name) for name in manifest.files]
    else:
        # Hashing leaves other threads their turn, and a network disk answers several at once.
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(problem, manifest.files))
    return [each for each in found if each is not None]


def damaged(problems: Iterable[str], source: Path | str) -> CheckpointDamaged:
    """Return the error for a checkpoint that does not verify."""
    return CheckpointDamaged(
        f"Expected {source} as it was written. Received: {'; '.join(dict.fromkeys(problems))}. Use another checkpoint; a "
        "run with auto_resume finds the newest one that verifies."
    )


# Checksums inside of archives


def is_archive(path: Path) -> bool:
    """Whether a file is an archive, maybe a cut one; files of `torch.save` before 1.6 are none, and have no checksums inside."""
    with os.fdopen(storage.open_regular(path), "rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC or is_zipfile(file)


def is_legacy(path: Path) -> bool:
    """Whether a file is one of `torch.save` before 1.6, as some published weights are."""
    with os.fdopen(storage.open_regular(path), "rb") as file:
        return file.read(len(_LEGACY_MAGIC)) == _LEGACY_MAGIC


def archive_complaints(
    source: Path | BinaryIO, *, tensors: bool = True, required: bool = True
) -> list[str]:
    """Return the defects of an archive, without those of its tensors on request; empty when each record has its CRC-32 (`required`)."""
    try:
        opened = (
            os.fdopen(storage.open_regular(source), "rb")
            if isinstance(source, Path)
            else nullcontext(source)
        )
        with opened as file, ZipFile(file) as archive:
            records = archive.infolist()
            size = file.seek(0, os.SEEK_END)
            if any(record.compress_type != ZIP_STORED for record in records):
                return ["its records are compressed, which torch never does"]
            total = sum(record.file_size for record in records)
            if total > size:  # they overlap
                return [f"its records have {total} bytes and the file {size}"]
            # `torch.serialization.set_crc32_options(False)` leaves all of them out.
            if not any(record.CRC for record in records):
                return ["it has no CRC-32 of its records"] if required else []
            problems = []
            for record in (
                record for record in records if tensors or "/data/" not in record.filename
            ):
                try:
                    # zipfile compares the CRC-32 at the end of a record.
                    with archive.open(record) as content:
                        while content.read(_CHUNK):
                            pass
                except BadZipFile:
                    problems.append(
                        f"its record {record.filename} has another CRC-32 than was written"
                    )
            return problems
    # zipfile raises what its parts raise: struct.error, UnicodeDecodeError, NotImplementedError, ...
    except Exception as error:
        return [f"it is no whole archive ({error})"]

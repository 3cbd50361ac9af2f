"""Sizes and SHA-256 sums beside every checkpoint, in a form that `sha256sum -c` reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from .errors import CheckpointDamaged
from .policy import Record
from .storage import hash_file

HEADER = "danling-manifest 1"


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
        lines = [f"# {HEADER}", f"# name: {record.name}", f"# run: {record.run}", f"# sequence: {record.sequence}"]
        lines += [f"# branch: {record.branch}", f"# step: {record.step}", f"# epoch: {record.epoch}"]
        lines += [f"# size: {size} {name}" for name, (size, _) in sorted(self.files.items())]
        lines += [f"{digest}  {name}" for name, (_, digest) in sorted(self.files.items())]
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str) -> Manifest:
        """Read a manifest.

        Raises:
            CheckpointDamaged: If it is cut or is not one.
        """
        fields: dict[str, str] = {}
        sizes: dict[str, int] = {}
        sums: dict[str, str] = {}
        try:
            lines = text.splitlines()
            if not lines or lines[0] != f"# {HEADER}":
                raise ValueError("its first line is not a manifest's")
            for line in lines[1:]:
                if line.startswith("# size: "):
                    size, _, name = line[8:].partition(" ")
                    sizes[name] = int(size)
                elif line.startswith("# "):
                    key, _, value = line[2:].partition(": ")
                    fields[key] = value
                else:
                    digest, _, name = line.partition("  ")
                    if len(digest) != 64:
                        raise ValueError(f"a line of it is not a sum: {line[:80]!r}")
                    sums[name] = digest
            if sizes.keys() != sums.keys() or not sums:
                raise ValueError("its sizes and sums name different files")
            numbers = {key: int(fields[key]) for key in ("sequence", "branch", "step", "epoch")}
            record = Record(name=fields["name"], run=fields["run"], **numbers)
        except (KeyError, ValueError) as error:
            raise CheckpointDamaged(f"Expected a whole manifest. Received one that cannot be read: {error}.") from error
        return cls(record, {name: (sizes[name], sums[name]) for name in sums})


def complaints(manifest: Manifest, directory: Path, level: str) -> list[str]:
    """Return what is wrong with the files of a checkpoint; empty when they are as written.

    Args:
        manifest: What was written.
        directory: Where its files lie.
        level: `"full"` compares sizes and sums, `"size"` sizes only, `"none"` looks whether the files exist.
    """
    found = []
    for name, (size, digest) in manifest.files.items():
        path = directory / name
        if not path.is_file():
            found.append(f"{name} is missing")
        elif level != "none" and path.stat().st_size != size:
            found.append(f"{name} has {path.stat().st_size} bytes instead of {size}")
        elif level == "full" and hash_file(path) != digest:
            found.append(f"{name} has another SHA-256 than was written")
    return found


def describe(problems: Iterable[str], source: Path) -> CheckpointDamaged:
    """Return the error for a checkpoint that does not verify."""
    return CheckpointDamaged(
        f"Expected {source} as it was written. Received: {'; '.join(problems)}. Resume from another checkpoint, or set auto_resume to "
        "find the newest one that verifies."
    )

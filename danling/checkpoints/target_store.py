"""Checkpoints that are directories of several files, with pointers to them."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from danling.utils.files import refuse_link

from . import storage
from .errors import CheckpointDamaged, reason
from .manifest import Manifest, damage_of, damaged, find_problems, read_manifest
from .policy import Record, history_name, is_history, is_name
from .store import CheckpointStore, logger

TARGETS = "targets"
SUMS = "manifest.sha256"
RUNNER_FILE = "runner.pth"
"""In a target of a DeepSpeed engine: everything but model and optimizer, for `torch.load(weights_only=True)`."""

_TARGET = re.compile(r"\d{8,}-[0-9a-f]{8}")
_POINTER_BYTES = 64


def misled(pointer: Path, record: Record) -> list[str]:
    """Return what is wrong with the name of a pointer to a checkpoint; empty when it says no other step or epoch."""
    fitting = [history_name(step_mode=mode, epoch=record.epoch, global_step=record.step) for mode in (True, False)]
    if not is_history(pointer.name) or pointer.name in fitting:
        return []
    return [f"{pointer.name} leads to the checkpoint of step {record.step}, epoch {record.epoch}"]


class TargetStore(CheckpointStore):
    """`targets/{sequence}-{random}/`, written once and never changed, and pointer files `latest`, `best`, `ckpt-*`, `model`.

    A pointer holds the name of a target and nothing else. A target counts when it has its manifest, which is written last.
    """

    def path(self, name: str) -> Path:
        """Return the pointer file of a name, or the target itself when it is the name of one."""
        return self.directory / TARGETS / name if _TARGET.fullmatch(name) else self.directory / name

    def new_target(self, sequence: int) -> str:
        """Return a name that no attempt ever had."""
        return f"{sequence:08d}-{uuid.uuid4().hex[:8]}"

    def give_up(self, target: str) -> None:
        """Remove a target that could not be finished; when that fails as well, the next process that saves does it."""
        try:
            storage.remove_tree(self.path(target))
        except OSError as error:
            logger.warning("Could not remove the unfinished %s: %s", self.path(target), error)

    def publish(self, target: str, names: Sequence[str]) -> None:
        """Let names lead to a complete target, in the order given."""
        for name in names:
            self.moved(self.directory / name, storage.make_way(self.directory / name))
            storage.write_text(self.directory / name, f"{target}\n")

    def locate(self, source: Path) -> Path | None:
        """Return the pointer or target that a path means: itself, or `latest` in a checkpoint or run directory."""
        for candidate in (source, source / "latest", source / self.directory.name / "latest"):
            if is_name(candidate.name) and storage.size_of(candidate) is not None:
                return candidate
        return source if storage.size_of(source / SUMS) is not None else None

    def target(self, path: Path) -> Path:
        """Return the target that a pointer leads to, or the target itself."""
        if os.path.isdir(path) and not is_name(path.name):
            return path
        name = self._pointed(path)
        if not _TARGET.fullmatch(name):
            raise CheckpointDamaged(
                f"Expected {path} to hold the name of a target, such as 00000012-1a2b3c4d. Received: {name[:80]!r}. Use another checkpoint."
            )
        target = path.parent / TARGETS / name
        if not os.path.isdir(target):
            raise CheckpointDamaged(
                f"Expected {path} to lead to a target. Received: {TARGETS}/{name}, which {storage.absence(target)}. Use another checkpoint."
            )
        return target

    def _pointed(self, path: Path) -> str:
        try:
            size = storage.size_of(path)
            if size is None:
                raise damaged([f"{path.name} {storage.absence(path)}"], path)
            return storage.read_text(path).removesuffix("\n") if size <= _POINTER_BYTES else f"{size} bytes"
        except OSError as error:
            raise damaged([f"{path.name} cannot be read: {reason(error)}"], path) from error

    def is_used(self) -> bool:
        """Whether there is a directory of targets."""
        return (self.directory / TARGETS).is_dir()

    def recover(self) -> None:
        """Remove what killed saves have left: unfinished pointers, and targets without a manifest."""
        targets = self.directory / TARGETS
        refuse_link(targets)
        if not os.path.isdir(targets):
            self.moved(targets, storage.set_aside(targets) if os.path.lexists(targets) else None)
        storage.make_directory(targets)
        storage.clean(self.directory)
        for name in storage.names(targets):
            if _TARGET.fullmatch(name) and is_unfinished(targets / name):
                self.give_up(name)

    def records(self, *, complete: bool) -> list[Record]:
        """Return what the manifests record, once for each name that leads there; a target without one goes by its own."""
        found: list[Record] = []
        led_to = set()
        for name in sorted(storage.names(self.directory)):
            if is_name(name):
                record = self._recorded(self.directory / name, complete)
                if record is not None:
                    led_to.add(record.name)
                    found.append(replace(record, name=name))
        for name in sorted(self._targets() - led_to):
            if _TARGET.fullmatch(name) and not is_unfinished(self.path(name)):
                record = self._recorded(self.path(name), complete)
                found += [record] if record is not None else []
        return sorted(found, key=lambda record: (record.sequence, record.name))

    def _targets(self) -> set[str]:
        try:
            return storage.names(self.directory / TARGETS)
        except OSError as error:
            # The other kind of checkpoints in the same directory may be as good as ever.
            self.pass_over(self.directory / TARGETS, error)
            return set()

    def _recorded(self, path: Path, complete: bool) -> Record | None:
        try:
            target = self.target(path)
            manifest = self._manifest(target)
        except CheckpointDamaged as error:
            self.pass_over(path, error)
            return None
        if self.is_part:
            here = storage.names(target)
            manifest = replace(manifest, files={name: of for name, of in manifest.files.items() if name in here})
        problems = find_problems(manifest, target, "size")
        if problems:
            self.pass_over(path, damaged(problems, path))
        return None if complete and problems else manifest.record

    def record(self, path: Path) -> Record:
        """Return what the manifest of a target, or of the one that a pointer leads to, records."""
        try:
            return self._manifest(self.target(path)).record
        except CheckpointDamaged as error:
            raise damage_of(path, error) from error

    def claims(self, path: Path) -> bool:
        """Whether a path has a name that a pointer may have, or is a target."""
        return is_name(path.name) or is_target(path.name) or storage.size_of(path / SUMS) is not None

    def listed(self) -> list[Path]:
        """Return every pointer, and complete targets that none leads to; those without a manifest are unfinished and do not count."""
        if not self.is_used():
            return []
        pointers = sorted(name for name in storage.names(self.directory) if is_name(name))
        led_to = {self._led_to(self.directory / name) for name in pointers}
        targets = [self.directory / TARGETS / name for name in sorted(storage.names(self.directory / TARGETS) - led_to)]
        return [*(self.directory / name for name in pointers), *(path for path in targets if (path / SUMS).is_file())]

    def _led_to(self, pointer: Path) -> str:
        try:
            return self.target(pointer).name
        except CheckpointDamaged:
            # Examined, it says why.
            return ""

    def examine(self, path: Path, level: str) -> tuple[Manifest, list[str]]:
        """Return the manifest of a target, or of the one that a pointer leads to, and how the target differs from it."""
        target = self.target(path)
        manifest = read_manifest(target / SUMS, f"{target.name}/{SUMS}")
        problems = find_problems(manifest, target, level)
        if manifest.record.name != target.name:
            problems.append(f"{target.name}/{SUMS} describes {manifest.record.name}")
        problems += misled(path, manifest.record)
        extra = storage.names(target) - manifest.files.keys() - {SUMS}
        return manifest, problems + [f"{name} is not part of it" for name in sorted(extra)]

    def verify(self, path: Path, level: str) -> None:
        """Compare a target with its manifest; files that are in none of them are named too."""
        target = self.target(path)
        if level == "none":
            return
        try:
            manifest = self._manifest(target)
        except CheckpointDamaged as error:
            raise damaged([str(error)], path) from error
        extra = storage.names(target) - manifest.files.keys() - {SUMS}
        problems = find_problems(manifest, target, level) + [f"{name} is not part of it" for name in sorted(extra)]
        problems += misled(path, manifest.record)
        if problems:
            raise damaged(problems, target)

    def _manifest(self, target: Path) -> Manifest:
        manifest = read_manifest(target / SUMS, f"{target.name}/{SUMS}")
        if manifest.record.name != target.name:
            raise CheckpointDamaged(f"{target.name}/{SUMS} describes {manifest.record.name} instead of {target.name}")
        return manifest

    def delete(self, name: str) -> None:
        """Remove a pointer; its target goes with the next sweep."""
        storage.remove(self.directory / name)

    def sweep(self, protected: set[int]) -> None:
        """Remove complete targets that no name leads to, except the saves with these sequences, and those that the user has moved to
        another place and linked here."""
        for record in self.records(complete=False):
            unused = _TARGET.fullmatch(record.name) and record.sequence not in protected
            if unused and not os.path.islink(self.path(record.name)):
                # The manifest first: without it the target does not count, whatever else is left when this is interrupted.
                storage.remove(self.path(record.name) / SUMS)
                storage.remove_tree(self.path(record.name))

    def held(self) -> set[str]:
        """Return the names of the targets that lie here."""
        return self._targets()

    def follow(self, sequence: int, kept: Collection[str]) -> None:
        """Remove the part of older targets that this machine has, where the main process has removed its own."""
        for name in sorted(self._targets() - {*kept}):
            older = is_target(name) and int(name.partition("-")[0]) < sequence
            if older and not os.path.islink(self.path(name)):
                self._spared(partial(storage.remove_tree, self.path(name)))


def is_unfinished(target: Path) -> bool:
    """Whether a target is what a killed save leaves: a directory without a manifest, which is written last."""
    return os.path.isdir(target) and not os.path.islink(target) and storage.absence(target / SUMS) == storage.MISSING


def is_target(name: str) -> bool:
    """Whether a directory of that name is a target."""
    return _TARGET.fullmatch(name) is not None


def is_engine_target(target: Path) -> bool:
    """Whether a target was written by the DeepSpeed manager."""
    return storage.size_of(target / RUNNER_FILE) is not None

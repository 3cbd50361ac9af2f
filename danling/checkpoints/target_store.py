"""How a checkpoint of several files, a target, is published by pointers that lead to it, and removed when none does."""

from __future__ import annotations

import logging
import os
import re
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from danling.utils.files import refuse_link

from . import storage
from .checkpoint_store import CheckpointStore
from .errors import CheckpointDamaged, reason
from .manifest import (
    Manifest,
    Record,
    damaged,
    find_problems,
    history_name,
    is_history,
    is_name,
    read_manifest,
)

logger = logging.getLogger("danling")

TARGETS = "targets"
SUMS = "manifest.sha256"
"""The manifest of a target."""
RUNNER_FILE = "runner.pth"
"""In a target of a DeepSpeed engine: everything but model and optimizer, for `torch.load(weights_only=True)`."""

_TARGET = re.compile(r"\d{8,}-[0-9a-f]{8}")
# A longer file is no pointer, and is not read.
_POINTER_BYTES = 64


class TargetStore(CheckpointStore):
    """`targets/{sequence}-{random}/`, written once and never changed, and pointer files `latest`, `best`, `ckpt-*`, `model`.

    A pointer holds the name of a target and nothing else. A target counts when it has its manifest, which is written last.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._pinned_targets: storage.Pinned | None = None

    def path(self, name: str) -> Path:
        return self.directory / TARGETS / name if is_target(name) else self.directory / name

    def give_up(self, target: str) -> None:
        """Remove a target that could not be finished; when that fails as well, the next process that saves does it."""
        try:
            with self._opened_targets() as targets:
                storage.remove_tree(self.path(target), within=targets)
        except OSError as error:
            logger.warning("Could not remove the unfinished %s: %s", self.path(target), error)

    def pin(self) -> None:
        super().pin()
        self._pinned_targets = storage.Pinned(self.directory / TARGETS)

    def refuse_links(self) -> None:
        refuse_link(self.directory / TARGETS)

    @contextmanager
    def _opened_targets(self) -> Iterator[int]:
        """Open the directory of the targets to remove some; a link, or another directory than this run has saved in, is refused."""
        path = self.directory / TARGETS
        with (
            storage.opened(self.directory, self._pinned) as here,
            storage.opened(path, self._pinned_targets, within=here) as targets,
        ):
            yield targets

    def publish(self, target: str, names: Sequence[str]) -> None:
        """Let names lead to a complete target, in the order given. Here a save into a directory becomes visible."""
        for name in names:
            storage.make_way(self.directory / name)
            storage.write_text(self.directory / name, f"{target}\n")

    def locate(self, source: Path) -> Path | None:
        # A pointer, a directory of checkpoints, a run directory; at last a target itself.
        for candidate in (source, source / "latest", source / self.directory.name / "latest"):
            if is_name(candidate.name) and storage.size_of(candidate) is not None:
                return candidate
        return source if storage.size_of(source / SUMS) is not None else None

    def target(self, path: Path) -> Path:
        if os.path.isdir(path) and not is_name(path.name):
            return path
        try:
            size = storage.size_of(path)
            if size is None:
                raise damaged([f"{path.name} {storage.absence(path)}"], path)
            name = (
                storage.read_text(path).removesuffix("\n")
                if size <= _POINTER_BYTES
                else f"{size} bytes"
            )
        except OSError as error:
            raise damaged([f"{path.name} cannot be read: {reason(error)}"], path) from error
        if not is_target(name):
            raise CheckpointDamaged(
                f"Expected {path} to hold the name of a target, such as 00000012-1a2b3c4d. Received: {name[:80]!r}. Use another checkpoint."
            )
        target = path.parent / TARGETS / name
        if not os.path.isdir(target):
            raise CheckpointDamaged(
                f"Expected {path} to lead to a target. Received: {TARGETS}/{name}, which {storage.absence(target)}. Use another checkpoint."
            )
        return target

    def recover(self) -> None:
        targets = self.directory / TARGETS
        self.refuse_links()
        if os.path.lexists(targets) and not os.path.isdir(targets):
            storage.set_aside(targets)
        storage.make_directory(targets)
        storage.clean(self.directory)
        for path in self.litter():
            # The others are staged files, which are gone already.
            if path.parent == targets:
                self.give_up(path.name)

    def litter(self) -> list[Path]:
        left = [
            self.directory / name
            for name in storage.names(self.directory)
            if name.startswith(storage.STAGED)
        ]
        targets = self.directory / TARGETS
        names = storage.names(targets) if os.path.isdir(targets) else ()
        return left + [
            targets / name for name in names if is_target(name) and _is_unfinished(targets / name)
        ]

    def listed(self) -> list[Path]:
        pointers = [
            self.directory / name for name in sorted(filter(is_name, storage.names(self.directory)))
        ]
        led_to = set()
        for pointer in pointers:
            with suppress(CheckpointDamaged):  # `examine` says why
                led_to.add(self.target(pointer).name)
        # Kept while retention spares them, and found where a pointer was lost.
        nameless = [self.path(name) for name in sorted(filter(is_target, self.targets() - led_to))]
        return pointers + [path for path in nameless if not _is_unfinished(path)]

    def targets(self) -> set[str]:
        """Return the names of the targets in the directory."""
        try:
            return storage.names(self.directory / TARGETS)
        except OSError as error:
            # The other kind of checkpoints in the same directory may be as good as ever.
            self.skip(self.directory / TARGETS, error)
            return set()

    def examine(self, path: Path, level: str) -> tuple[Manifest, list[str]]:
        target = self.target(path)
        try:
            manifest, names = (
                read_manifest(target / SUMS, f"{target.name}/{SUMS}"),
                storage.names(target),
            )
        except (CheckpointDamaged, OSError) as error:
            raise damaged([str(error)], path) from error
        if manifest.record.name != target.name:
            raise damaged(
                [f"{target.name}/{SUMS} describes {manifest.record.name} instead of {target.name}"],
                path,
            )
        # Of what is spread over machines, those files that are here.
        here = {
            name: of for name, of in manifest.files.items() if not self.is_partial or name in names
        }
        problems = find_problems(replace(manifest, files=here), target, level) + misled(
            path, manifest.record
        )
        extra = sorted(names - manifest.files.keys() - {SUMS})
        return manifest, problems + [f"{name} is not part of it" for name in extra]

    def delete(self, name: str) -> None:
        with storage.opened(self.directory, self._pinned) as here:
            storage.remove(self.directory / name, within=here)

    def sweep(self, protected: set[int], *, run: str) -> None:
        for record in self.records(complete=False):
            path = self.path(record.name)
            # Targets of other runs may be in the same directory.
            unused = (
                is_target(record.name) and record.run == run and record.sequence not in protected
            )
            if unused and not os.path.islink(path):
                with self._opened_targets() as targets:
                    # The manifest first: without it the target does not count, whatever else is left when this is interrupted.
                    with storage.opened(path, None, within=targets) as target:
                        storage.remove(path / SUMS, within=target)
                    storage.remove_tree(path, within=targets)

    def follow(self, sequence: int, kept: Collection[str]) -> None:
        """Remove this machine's part of older targets that the main process has removed."""
        for name in sorted(self.targets() - {*kept}):
            older = is_target(name) and int(name.partition("-")[0]) < sequence
            if older and not os.path.islink(self.path(name)):
                self._try_to(partial(self._remove, name))

    def _remove(self, name: str) -> None:
        with self._opened_targets() as targets:
            storage.remove_tree(self.path(name), within=targets)


def new_target(sequence: int) -> str:
    """Return a name that no attempt ever had."""
    return f"{sequence:08d}-{uuid.uuid4().hex[:8]}"


def is_target(name: str) -> bool:
    return _TARGET.fullmatch(name) is not None


def is_engine_target(target: Path) -> bool:
    """Whether a target was written by the DeepSpeed manager."""
    return storage.size_of(target / RUNNER_FILE) is not None


def misled(pointer: Path, record: Record) -> list[str]:
    """Return the defects of a pointer to a checkpoint of another step or epoch than its name says; empty when nothing is."""
    fitting = [
        history_name(step_mode=mode, epoch=record.epoch, global_step=record.step)
        for mode in (True, False)
    ]
    if not is_history(pointer.name) or pointer.name in fitting:
        return []
    return [f"{pointer.name} leads to the checkpoint of step {record.step}, epoch {record.epoch}"]


def _is_unfinished(target: Path) -> bool:
    """Whether a target is what a killed save leaves: a directory without a manifest, which is written last."""
    return (
        os.path.isdir(target)
        and not os.path.islink(target)
        and storage.absence(target / SUMS) == storage.MISSING
    )

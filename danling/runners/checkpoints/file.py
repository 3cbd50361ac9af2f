"""Checkpoints in single files, written by one process."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from . import storage
from .base import CheckpointManager
from .errors import CheckpointDamaged, CheckpointMismatch, CheckpointNotFound
from .executor import SaveExecutor
from .manifest import Manifest, complaints, describe
from .policy import Branch, Record, belongs, history_name, to_delete
from .snapshot import count_bytes, snapshot

logger = logging.getLogger("danling")

SUFFIX = ".pth"
SUMS = ".pth.sha256"
NEXT = ".pth.sha256.next"
BRANCHES = "branches.json"


class FileCheckpointManager(CheckpointManager):
    """`latest.pth`, `best.pth` and `ckpt-*.pth`, each with its sums in `*.pth.sha256`.

    A save writes one file and gives it its names by hard links, so that several names cost one write. Only rank 0 touches the
    disk; what it finds and what goes wrong is made known to all.

    Each file can be read by `torch.load(path, weights_only=True)`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._executor = SaveExecutor()
        self._sequence: int | None = None
        self._protected: set[int] = set()

    # Saving

    def save_checkpoint(
        self, payload: Mapping[str, Any], *, epoch: int, global_step: int, history: bool = False, best: bool = False
    ) -> None:
        """Save a full state; see `CheckpointManager.save_checkpoint`."""
        names = [history_name(step_mode=self.step_mode, epoch=epoch, global_step=global_step)] if history else []
        names += ["best"] if best else []
        self._save(payload, [*names, "latest"], epoch=epoch, global_step=global_step)

    def export_model(self, payload: Mapping[str, Any], *, epoch: int, global_step: int) -> None:
        """Write weights only, as `model.pth`."""
        self._save(payload, ["model"], epoch=epoch, global_step=global_step)

    def _save(self, payload: Mapping[str, Any], names: list[str], *, epoch: int, global_step: int) -> None:
        if self.settings.load_only:
            return
        self.surface(self._executor.take_error())
        self.on_main(lambda: self._prepare(payload))
        if self.domain.rank == 0:
            sequence = self._next_sequence()
            number = self._branches()[-1].number
            records = [Record(name, sequence, number, self.run_id, global_step, epoch) for name in names]
            held = snapshot(payload) if self.settings.is_async else payload
            if self.settings.is_async:
                self._executor.submit(lambda: self._write(held, records), reliable=names != ["latest"])
        if not self.settings.is_async:
            self.on_main(lambda: self._write(held, records))

    def _prepare(self, payload: Mapping[str, Any]) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        storage.require_space(self.directory, count_bytes(payload))
        if self._sequence is None:
            self._refuse_foreign()
            storage.clean(self.directory)
            for path in sorted(self.directory.glob(f"*{NEXT}")):
                self._settle(path.name.removesuffix(NEXT))

    def _refuse_foreign(self) -> None:
        foreign = next((record for record in self.records() if record.run != self.run_id), None)
        if foreign is not None:
            raise CheckpointMismatch(
                f"Expected {self.directory} to hold checkpoints of this run ({self.run_id}). Received: {foreign.name} of run "
                f"{foreign.run}. Give this run a directory of its own."
            )

    def _next_sequence(self) -> int:
        if self._sequence is None:
            self._sequence = max((record.sequence for record in self.records()), default=0)
        self._sequence += 1
        return self._sequence

    def _write(self, payload: Mapping[str, Any], records: list[Record]) -> None:
        """Write one file and publish it under every name; `latest` last, since it is what a restart looks for first."""
        staged, size, digest = storage.stage(self.directory, lambda file: torch.save(dict(payload), file))  # type: ignore[arg-type]
        try:
            for record in records:
                manifest = Manifest(record, {f"{record.name}{SUFFIX}": (size, digest)})
                self._publish(staged, record.name, manifest)
        finally:
            staged.unlink(missing_ok=True)
        self._prune()

    def _publish(self, staged: Path, name: str, manifest: Manifest) -> None:
        # File and sums cannot change at one instant. The new sums wait under a name of their own while the file is replaced, so that
        # at every instant one of the two describes the file that is there.
        self._settle(name)
        waiting = self.directory / f"{name}{NEXT}"
        storage.write_text(waiting, manifest.text())
        storage.publish(staged, self.directory / f"{name}{SUFFIX}")
        waiting.replace(self.directory / f"{name}{SUMS}")
        storage.sync_directory(self.directory)

    def _settle(self, name: str) -> None:
        """Finish or undo the change of names that a killed save began."""
        waiting = self.directory / f"{name}{NEXT}"
        if not waiting.exists():
            return
        try:
            manifest = Manifest.parse(waiting.read_text(encoding="utf-8"))
            whole = not complaints(manifest, self.directory, "full")
        except CheckpointDamaged:
            whole = False
        if whole:
            waiting.replace(self.directory / f"{name}{SUMS}")
        else:
            waiting.unlink()

    def _prune(self) -> None:
        records = [record for record in self.records() if belongs(record, self._branches())]
        held = {record.sequence for record in records if record.name in ("latest", "best")} | self._protected
        for name in to_delete(records, keep=self.settings.keep_latest_k, protected=held):
            # Sums first: a file without them is no checkpoint, sums without a file are a damaged one.
            (self.directory / f"{name}{SUMS}").unlink(missing_ok=True)
            (self.directory / f"{name}{SUFFIX}").unlink(missing_ok=True)

    # What is there

    def records(self) -> list[Record]:
        """Return what is recorded of every checkpoint in the directory, oldest first; nothing is verified."""
        found = [manifest.record for manifest in self._manifests()]
        return sorted(found, key=lambda record: (record.sequence, record.name))

    def _manifests(self) -> Iterator[Manifest]:
        for path in sorted(self.directory.glob(f"*{SUMS}")) if self.directory.is_dir() else ():
            try:
                yield Manifest.parse(path.read_text(encoding="utf-8"))
            except (CheckpointDamaged, UnicodeDecodeError) as error:
                logger.warning("Passed over %s: %s", path, error)

    def _branches(self) -> list[Branch]:
        path = self.directory / BRANCHES
        if not path.exists():
            return [Branch(0)]
        return [Branch(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]

    def find_latest(self) -> str | None:
        """Return the name of the newest checkpoint that verifies; what is passed over is logged."""
        return self.on_main(self._find_latest)

    def _find_latest(self) -> str | None:
        names = {path.name.removesuffix(SUFFIX) for path in self.directory.glob(f"*{SUFFIX}")} if self.directory.is_dir() else set()
        branches = self._branches()
        candidates = []
        for name in names - {"model"}:
            try:
                record = self._own_record(self.directory / f"{name}{SUFFIX}")
            except (CheckpointDamaged, CheckpointNotFound) as error:
                logger.warning("auto_resume passes over %s: %s", name, error)
                continue
            if belongs(record, branches):
                candidates.append(record)
        for record in sorted(candidates, key=lambda r: (r.sequence, r.name == "latest"), reverse=True):
            try:
                self.verify(self.directory / f"{record.name}{SUFFIX}")
                return record.name
            except CheckpointDamaged as error:
                logger.warning("auto_resume passes over %s: %s", record.name, error)
        return None

    def _own_record(self, path: Path) -> Record:
        manifest = read_manifest(path, "none")
        if manifest.record.run != self.run_id:
            raise CheckpointMismatch(
                f"Expected {path} to belong to this run ({self.run_id}). Received: a checkpoint of run {manifest.record.run}. Give "
                "this run a directory of its own."
            )
        return manifest.record

    # Loading

    def load_checkpoint(self, source: str | Path) -> dict[str, Any]:
        """Return the verified payload of a checkpoint; see `CheckpointManager.load_checkpoint`."""
        self.wait()
        path = self.on_main(lambda: self._checked(source))
        return load_payload(path)

    def _checked(self, source: str | Path) -> Path:
        path = self.resolve(source)
        if path.parent.resolve() == self.directory.resolve():
            self._own_record(path)
        self.verify(path)
        return path

    def verify(self, path: Path) -> None:
        """Check a file against its sums, as thoroughly as `checkpoint.verify` says.

        Raises:
            CheckpointDamaged: If it is not what was written.
        """
        verify_file(path, self.settings.verify)

    def resolve(self, source: str | Path) -> Path:
        """Return the file that a name or a path means.

        Raises:
            CheckpointNotFound: If there is none.
        """
        text = str(source)
        named = self.directory / f"{text}{SUFFIX}"
        if "/" not in text and not text.startswith(".") and named.is_file():
            return named
        path = Path(source)
        if path.is_dir():
            for inside in (path / f"latest{SUFFIX}", path / self.directory.name / f"latest{SUFFIX}"):
                if inside.is_file():
                    return inside
        if path.is_file():
            return path
        present = sorted(p.name.removesuffix(SUFFIX) for p in self.directory.glob(f"*{SUFFIX}")) if self.directory.is_dir() else []
        raise CheckpointNotFound(
            f"Expected a checkpoint: a name in {self.directory} (there are: {present}), or a path. Received: {text!r}."
        )

    def begin(self, source: str | Path) -> None:
        """Hear which checkpoint the run goes on from; see `CheckpointManager.begin`."""
        self.on_main(lambda: self._begin(self.resolve(source)))

    def _begin(self, path: Path) -> None:
        if path.parent.resolve() != self.directory.resolve():
            return
        resumed = self._own_record(path)
        self._protected = {resumed.sequence}
        branches = self._branches()
        line = [record.sequence for record in self.records() if belongs(record, branches)]
        newer = [sequence for sequence in line if sequence > resumed.sequence]
        if not newer and belongs(resumed, branches) or self.settings.load_only:
            return
        branch = Branch(branches[-1].number + 1, base=resumed.sequence, parent=resumed.branch)
        logger.info("Going back to %s: %d newer saves stay on disk and are no longer part of the run.", path.stem, len(set(newer)))
        entries = [vars(entry) for entry in [*branches, branch]]
        storage.write_text(self.directory / BRANCHES, json.dumps(entries) + "\n")

    # Ending

    def wait(self) -> None:
        """Wait until everything is written."""
        self._executor.wait()
        self.surface(self._executor.take_error())

    def close(self, timeout: float | None = None) -> None:
        """Write what is left; see `CheckpointManager.close`."""
        if not self._executor.close(timeout):
            logger.warning("A checkpoint was not written within %s seconds and is given up; complete ones are as they were.", timeout)
        error = self._executor.take_error()
        if error is not None:
            raise describe_failure(error)


def describe_failure(error: BaseException) -> Exception:
    """Return the error to raise at close for one of the background."""
    from .errors import CheckpointError

    failure = CheckpointError(f"Expected the last checkpoint to be written. Received: {type(error).__name__}: {error}.")
    failure.__cause__ = error
    return failure


def read_manifest(path: Path, level: str) -> Manifest:
    """Return the manifest that describes a checkpoint file as it is now.

    Args:
        path: The file.
        level: How thoroughly file and manifest are compared.

    Raises:
        CheckpointNotFound: If there is no file.
        CheckpointDamaged: If there is no manifest, or none that fits.
    """
    if not path.is_file():
        raise CheckpointNotFound(f"Expected a checkpoint file. Received: {str(path)!r}, which does not exist.")
    problems: list[str] = []
    # The sums in waiting count when the file has been replaced and the kill came before they were.
    for suffix in (".sha256", ".sha256.next"):
        beside = path.parent / f"{path.name}{suffix}"
        if beside.is_file():
            try:
                manifest = Manifest.parse(beside.read_text(encoding="utf-8", errors="replace"))
            except CheckpointDamaged as error:
                problems.append(f"{beside.name}: {error}")
                continue
            found = complaints(manifest, path.parent, level) + _named(manifest, path)
            if not found:
                return manifest
            problems += found
    if not problems:
        problems = [f"{path.name}.sha256 is missing"]
    raise describe(dict.fromkeys(problems), path)


def _named(manifest: Manifest, path: Path) -> list[str]:
    return [] if path.name in manifest.files else [f"{path.name}.sha256 describes {sorted(manifest.files)} instead of {path.name}"]


def verify_file(path: Path, level: str) -> None:
    """Check a checkpoint file against its manifest; see `read_manifest`. Level `"none"` needs no manifest."""
    if level != "none":
        read_manifest(path, level)


def load_payload(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """Read a checkpoint file onto the CPU.

    Raises:
        CheckpointDamaged: If torch cannot read it.
        CheckpointMismatch: If it is no checkpoint of this library, or of a format that this version does not know.
    """
    payload = guarded(lambda: torch.load(path, map_location="cpu", weights_only=True, mmap=mmap), path)
    version = payload.get("format_version") if isinstance(payload, Mapping) else None
    if not isinstance(version, int):
        raise CheckpointMismatch(
            f"Expected a checkpoint of this library. Received: {path}, which has no format_version. Load bare weights with `pretrained`."
        )
    if version > 1:
        raise CheckpointMismatch(
            f"Expected a checkpoint of format_version 1. Received: {path} of format_version {version}. Update danling to read it."
        )
    return dict(payload)


def guarded(read: Callable[[], Any], path: Path) -> Any:
    """Run a reader; what it raises becomes a `CheckpointDamaged` that names the file."""
    try:
        return read()
    except Exception as error:
        raise CheckpointDamaged(f"Expected a readable file. Received: {path}, on which torch.load fails: {error}") from error

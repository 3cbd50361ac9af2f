"""Copies the saves of a run to an object store, in a thread of each rank that has written some."""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from danling.checkpoints import storage
from danling.checkpoints.directory import SUFFIX, SUMS, TARGETS
from danling.checkpoints.errors import CheckpointDamaged, CheckpointError
from danling.checkpoints.manager import Saved
from danling.checkpoints.manifest import Manifest, read_manifest
from danling.utils.messages import Paced

from .store import RemoteError, RemoteStore, RemoteUnavailable
from .stored_run import FILE_SUMS, RemoteRun, object_key, target_key

logger = logging.getLogger("danling")

_FIRST_DELAY, _LONGEST_DELAY = 1.0, 60.0
_FIRST_LOOK, _LONGEST_LOOK = 0.05, 2.0
_PATIENCE = 10
"""So many times the longest time of a request a rank may take for a file."""


@dataclass(frozen=True)
class MirrorSettings:
    """Which files are copied, and the meaning of errors."""

    required: bool = False
    keep_latest_k: int = 0
    interval: int = 1
    seconds_between_lines: float = 0.0


@dataclass(frozen=True)
class Part:
    """A file that goes up."""

    file: Path
    size: int
    digest: str | None


@dataclass
class Upload:
    """A save that goes up."""

    saved: Saved
    parts: dict[str, Part]
    manifests: dict[str, Manifest] = field(default_factory=dict)
    links: list[Path] = field(default_factory=list)

    def discard(self) -> None:
        """Give the second names up."""
        for link in self.links:
            storage.discard(link)


class CheckpointMirror:
    """Copies saves in the order in which they were made: one goes up, and of those that may give way one waits.

    Nothing communicates. Each rank puts the files that it has written; rank 0 waits until the store lists all that the manifest names,
    puts the manifest, and then the pointers. An upload that fails is tried again, later and later, until a newer save takes its place.
    """

    def __init__(
        self,
        directory: Path,
        run: RemoteRun,
        *,
        rank: int,
        alone: bool,
        settings: MirrorSettings,
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        self.directory = directory
        self.run = run
        self.rank = rank
        self.settings = settings
        self.lost: Callable[[], RemoteError | None] = lambda: None
        self.on_close: Callable[[], None] = lambda: None
        self.committed_step: int | None = None
        self._alone = alone
        self._before_commit = before_commit
        self._changed = threading.Condition()
        self._waiting: deque[Upload] = deque()
        self._running: Upload | None = None
        self._put_off: Saved | None = None
        self._since_last = 0
        self._thread: threading.Thread | None = None
        self._ending = self._closed = False
        self._final = False
        self._given_up = False
        """Whether `wait` has waited long for a save that could not be copied, and nothing was saved or copied since."""
        self._failure: BaseException | None = None
        self._error: BaseException | None = None
        self._told: set[str] = set()
        self._lines = Paced(settings.seconds_between_lines)
        self._bytes, self._seconds = 0, 0.0

    @property
    def store(self) -> RemoteStore:
        return self.run.store

    # What the manager calls

    @property
    def is_behind(self) -> bool:
        """Whether a save waits while another one is copied."""
        with self._changed:
            return bool(self._waiting)

    def sweep(self, up_to: int | None, spared: Collection[str]) -> None:
        """Remove the history that retention gives up, and what no name leads to; what cannot be removed, after the next save.

        Rank 0 alone, and never while the thread runs.
        """
        try:
            self.run.retire(keep=self.settings.keep_latest_k, up_to=up_to, spared=spared)
        except RemoteError as error:
            self.run.forget()
            if "retire" not in self._told:
                self._told.add("retire")
                logger.warning("An old checkpoint in %s is still there: %s", self.run.url, error)

    def saved(self, saved: Saved, *, put_off: bool = False) -> None:
        """Hear of a save, where it was written; see `danling.checkpoints.manager.Mirror`."""
        self._since_last += 1
        if saved.may_give_way and (put_off or self._since_last < self.settings.interval):
            self._put_off = saved
            return
        self._since_last = 0
        self._put_off = None
        self._enqueue(saved)

    def _enqueue(self, saved: Saved) -> None:
        try:
            upload = self._prepared(saved)
        except (CheckpointError, OSError) as error:
            with self._changed:
                self._failure, self._final, self._put_off = error, True, saved
            self._fail(error)
            return
        dropped: list[Upload] = []
        with self._changed:
            if self._alone:
                dropped = [waiting for waiting in self._waiting if waiting.saved.may_give_way]
                self._waiting = deque(waiting for waiting in self._waiting if not waiting.saved.may_give_way)
            self._waiting.append(upload)
            self._given_up = False
            if self._thread is None:
                # A daemon: an upload that hangs must not keep a process alive that close() has given up waiting for.
                self._thread = threading.Thread(target=self._work, name="danling-remote", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        for upload in dropped:
            upload.discard()

    def pending(self) -> frozenset[int]:
        """Return the sequences of saves that are not copied yet, or are to be if none comes after them."""
        with self._changed:
            uploads = [*self._waiting, *([self._running] if self._running is not None else [])]
            put_off = {self._put_off.sequence} if self._put_off is not None else set()
        return frozenset({upload.saved.sequence for upload in uploads} | put_off)

    def let_go(self) -> list[str]:
        """Give up saves that wait, since the disk has no room for the next one; return their names."""
        with self._changed:
            given_up, self._waiting = self._waiting, deque()
            self._put_off = None
        for upload in given_up:
            upload.discard()
        return [name for upload in given_up for name in upload.saved.names]

    def take_error(self) -> BaseException | None:
        """Return an error by which training is to end, once."""
        with self._changed:
            error, self._error = self._error, None
        return error

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the last save is copied, or an attempt has failed that began after this call."""
        begun = time.monotonic()
        with self._changed:
            self._ending, self._failure, self._final = True, None, False
            put_off, self._put_off = self._put_off, None
            self._changed.notify_all()
        if put_off is not None:
            self._enqueue(put_off)
        with self._changed:
            idle = self._changed.wait_for(lambda: self._is_idle or self._final, timeout)
            failed = not idle or self._failure is not None
            self._given_up = failed and time.monotonic() - begun > self.store.settings.timeout_seconds
            self._ending = False
        if self.rank == 0 and idle and self._failure is None and self._is_idle and self.lost() is None:
            try:
                self._before_commit()
            except (RemoteError, OSError) as error:
                logger.warning("The files of the run are not in %s as they are here: %s", self.run.url, error)

    def close(self, timeout: float | None = None) -> None:
        """Wait, and end."""
        try:
            self._close(timeout)
        finally:
            self.on_close()

    def _close(self, timeout: float | None) -> None:
        if not self._given_up:
            self.wait(timeout)
        with self._changed:
            left, failure = not self._is_idle or self._put_off is not None, self._failure
            given_up, self._waiting = self._waiting, deque()
            self._closed = True
            self._changed.notify_all()
        for upload in given_up:
            upload.discard()
        if not left and failure is None:
            if self._thread is not None:
                self._thread.join()
            return
        safe = "none" if self.committed_step is None else f"step {self.committed_step}"
        why = str(failure) if failure is not None else f"the upload was not done within {timeout} seconds."
        raise RemoteError(
            f"Expected the last save in {self.run.url}. Received: {why} The newest that is safe there: {safe}. The last one is in "
            f"{self.directory}: start again with auto_resume, which uploads it."
        ) from failure

    @property
    def _is_idle(self) -> bool:
        return not self._waiting and self._running is None

    def figures(self, step: int) -> dict[str, float]:
        """Return how far the store is behind, and how fast it is written."""
        values = {"lag_steps": float(step - (self.committed_step or 0)), "bytes": float(self._bytes)}
        return values | ({"bytes_per_second": self._bytes / self._seconds} if self._seconds > 0 else {})

    # Taking hold of files

    def _prepared(self, saved: Saved) -> Upload:
        return self._file(saved) if saved.target is None else self._target(saved, saved.target)

    def _file(self, saved: Saved) -> Upload:
        """Link a single file to a second name, since the next save replaces it under its own."""
        manifests = {}
        for name in saved.names:
            sums = self.directory / f"{name}{FILE_SUMS}"
            manifests[name] = read_manifest(sums, sums.name)
        name = saved.names[-1]
        link = self.directory / f"{storage.UPLOADING}{uuid.uuid4().hex}"
        storage.link(self.directory / f"{name}{SUFFIX}", link)
        size, digest = manifests[name].files[f"{name}{SUFFIX}"]
        return Upload(saved, {digest: Part(link, size, digest)}, manifests, [link])

    def _target(self, saved: Saved, target: str) -> Upload:
        """Name the files of a target, which are never changed, and stay while `pending` has it."""
        path = self.directory / TARGETS / target
        sums = path / SUMS
        # Ranks need not see each other's disks: only rank 0 has the manifest for sure.
        manifest = read_manifest(sums, f"{target}/{SUMS}") if self.rank == 0 or storage.size_of(sums) else None
        known = manifest.files if manifest is not None else {}
        parts = {}
        for file in sorted(saved.own):
            size, digest = known.get(file, (os.path.getsize(path / file), None))
            parts[file] = Part(path / file, size, digest)
        manifests = {target: manifest} if self.rank == 0 and manifest is not None else {}
        return Upload(saved, parts, manifests)

    # The thread

    def _work(self) -> None:
        delay = _FIRST_DELAY
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting) or self._closed)
                if not self._waiting:
                    return
                upload = self._running = self._waiting.popleft()
                awaited = self._ending
            error: BaseException | None = None
            try:
                self._copy(upload)
            except BaseException as raised:  # none may pass unseen
                error = raised
            if error is not None:
                self._fail(error)
            if self._is_done(upload, error, awaited):
                upload.discard()
            if error is None:
                delay = _FIRST_DELAY
                continue
            with self._changed:
                # A call that waits for the end does not wait for the next attempt.
                self._changed.wait_for(lambda: self._closed or (self._ending and not self._final), delay)
            delay = min(2 * delay, _LONGEST_DELAY)

    def _is_done(self, upload: Upload, error: BaseException | None, awaited: bool) -> bool:
        """Note how an upload ended, and return whether nothing more is to be done with it: one that failed comes first again."""
        with self._changed:
            self._running, self._failure = None, error
            self._given_up = self._given_up and error is not None
            self._final = self._final or (error is not None and awaited)
            gives_way = self._alone and upload.saved.may_give_way and bool(self._waiting)
            done = error is None or gives_way or self._closed
            if not done:
                self._waiting.appendleft(upload)
            self._changed.notify_all()
        return done

    def _fail(self, error: BaseException) -> None:
        """Say, once for each reason, that a save could not be copied; where it is required, end the training."""
        if self.settings.required:
            with self._changed:
                self._error = self._error or error
        kind = type(error).__name__ if isinstance(error, RemoteError) else str(error)
        if kind in self._told:
            return
        self._told.add(kind)
        logger.warning("A save is not safe in %s yet, and is tried again: %s", self.run.url, error)

    def _copy(self, upload: Upload) -> None:
        lost = self.lost()
        if lost is not None:
            raise lost
        begun = time.monotonic()
        put = sum(self._put(upload.saved, name, part) for name, part in upload.parts.items())
        if put:
            self._bytes, self._seconds = self._bytes + put, self._seconds + time.monotonic() - begun
        if self.rank != 0:
            return
        if upload.saved.target is not None:
            self._await_others(upload, upload.saved.target)
        self._before_commit()
        lost = self.lost()
        if lost is not None:
            raise lost
        self._commit(upload)
        self._note(upload, time.monotonic() - begun)
        self._retire(upload)

    def _put(self, saved: Saved, name: str, part: Part) -> int:
        """Put a file; return how many bytes went up."""
        key = object_key(name) if saved.target is None else target_key(saved.target, name)
        if key in self.run.keys:
            return 0
        digest = storage.hash_file(part.file)
        if part.digest is not None and digest != part.digest:
            raise CheckpointDamaged(
                f"Expected {part.file} as it was written. Received: another SHA-256, as read to be uploaded. The disk may be failing."
            )
        self.run.put(key, part.file)
        return part.size

    def _await_others(self, upload: Upload, target: str) -> None:
        """Wait until the store lists every file of a target as the manifest has it: other ranks put theirs at their own pace."""
        manifest = upload.manifests[target]
        missing = {name: size for name, (size, _) in manifest.files.items() if name not in upload.parts}
        delay, end = _FIRST_LOOK, time.monotonic() + _PATIENCE * self.store.settings.timeout_seconds
        prefix = f"{self.run.layout.checkpoints}/{TARGETS}/{target}"
        while missing:
            there = {entry.key.removeprefix(f"{prefix}/"): entry.size for entry in self.store.list(prefix)}
            missing = {name: size for name, size in missing.items() if there.get(name) != size}
            if not missing:
                break
            with self._changed:
                closed = self._changed.wait_for(lambda: self._closed, delay)
            if closed or time.monotonic() > end:
                raise RemoteUnavailable(
                    f"Expected the other ranks to put their files of step {upload.saved.step}. Received: not yet "
                    f"{', '.join(sorted(missing)[:4])}. See what these ranks say."
                )
            delay = min(2 * delay, _LONGEST_LOOK)
        self.run.keys.update(target_key(target, name) for name in manifest.files)

    def _commit(self, upload: Upload) -> None:
        """Make a save visible: the manifest of a target and then its pointers, or the manifests of a file, `latest` last."""
        saved = upload.saved
        if saved.target is not None:
            self.run.commit_target(upload.manifests[saved.target], saved.target, saved.names)
            return
        for name in saved.names:
            self.run.commit_file(name, upload.manifests[name])

    def _note(self, upload: Upload, seconds: float) -> None:
        saved = upload.saved
        if "model" not in saved.names:
            self.committed_step = saved.step
        self._told.clear()
        if self._lines.due() or self._ending or not saved.may_give_way:
            size = sum(part.size for part in upload.parts.values())
            names = ", ".join(saved.names)
            logger.info(
                "Step %d is safe in %s (%s): %.1f MB in %.1f s.", saved.step, self.run.url, names, size / 1e6, seconds
            )

    def _retire(self, upload: Upload) -> None:
        with self._changed:
            waiting = [*self._waiting]
        spared = {name for other in waiting for name in (other.saved.target, *other.parts) if name is not None}
        self.sweep(upload.saved.sequence, spared)

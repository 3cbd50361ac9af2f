"""Copies a run to an object store: its saves, and the other files of its directory, in a thread of each rank that has written some."""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from danling.checkpoints import storage
from danling.checkpoints.checkpoint_store import SUFFIX
from danling.checkpoints.copier import SaveCopier, Saved
from danling.checkpoints.errors import CheckpointDamaged, CheckpointError
from danling.checkpoints.manager import CheckpointManager
from danling.checkpoints.manifest import is_name, newest, read_manifest
from danling.checkpoints.target_store import SUMS, TARGETS, TargetStore
from danling.distributed.environment import is_first_on_machine
from danling.utils.files import open_file
from danling.utils.messages import Paced
from danling.utils.process import in_notebook
from danling.workspace.workspace import is_unfinished

from .lease import Lease
from .store import RemoteError, RemoteUnavailable
from .stored_run import OBJECTS, RUN_FILES, StoredRun, owner_of, target_key, visible_key

if TYPE_CHECKING:
    from danling.config.schema import RemoteConfig

logger = logging.getLogger("danling")

# Seconds until a failed upload is tried again, and between looks for the files of other ranks.
_FIRST_DELAY, _LONGEST_DELAY = 1.0, 60.0
_FIRST_LOOK, _LONGEST_LOOK = 0.05, 2.0
_PATIENCE = 10
"""So many times the longest time of a request a rank may take for a file."""
_LOOK_SECONDS = 2.0
_LARGEST_FILE = 1 << 30
"""Bytes of the largest file, apart from checkpoints, that is copied."""
_DIRECTORIES = ("metadata", "logs", "tensorboard")


@dataclass(frozen=True)
class Part:
    """A file that goes up. Its digest is not known on ranks that do not see the manifest."""

    file: Path
    size: int
    digest: str | None


@dataclass
class Upload:
    """A save that goes up: files by key; and what makes it visible, in this order, by key."""

    saved: Saved
    parts: dict[str, Part]
    visible: dict[str, str]
    others: dict[str, int]
    """The sizes of files that other ranks put, by key."""
    link: Path | None = None
    """A second name of a file that the next save replaces."""

    def discard(self) -> None:
        """Give the second name up."""
        if self.link is not None:
            storage.discard(self.link)


class RunMirror(SaveCopier):
    """Copies saves in the order in which they were made: one goes up, and of those that may give way one waits.

    Nothing communicates but `open` and `begin`. Each rank puts the files that it has written; rank 0 alone has the lease, waits until
    the store lists all that the manifest names, puts the manifest, and then the pointers. An upload that fails is tried again, later and
    later, until a newer save takes its place.
    """

    copies = True

    def __init__(
        self,
        run: StoredRun,
        manager: CheckpointManager,
        directory: Path,
        settings: RemoteConfig,
        *,
        seconds_between_lines: float = 0.0,
    ) -> None:
        self.run = run
        self.settings = settings
        self.lease = Lease(run.store, run.layout.lock, again=in_notebook())
        self.committed_step: int | None = None
        self._manager = manager
        self._directory = directory
        self._rank = manager.domain.rank
        self._alone = manager.domain.size == 1 or not issubclass(manager.store_class, TargetStore)
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
        self._warned: set[str] = set()
        self._lines = Paced(seconds_between_lines)
        self._bytes, self._seconds = 0, 0.0
        self._copied: dict[Path, tuple[int, int]] = {}
        self._unread: set[Path] = set()

    # The start, on all ranks

    def open(self) -> None:
        """Become the one writer of the run, and hear of every save from now on."""
        manager = self._manager
        manager.on_main(self._open)
        manager.copier = self
        if manager.domain.size > 1:
            # Whether all ranks see the disk of the main process.
            token = manager.on_main(self._written)
            seen = _is_seen(token)
            all_see = all(manager.domain.gather_objects(seen))
            manager.on_main(lambda: storage.remove(token))
            if not all_see:
                manager.checkpoints.split(follows=not seen and is_first_on_machine())

    def _open(self) -> None:
        self.lease.acquire()
        try:
            self.run.named()
        except BaseException:
            self.lease.release()
            raise

    def _written(self) -> Path:
        storage.make_directory(self._directory)
        path = storage.staged_name(self._directory)
        path.touch()
        return path

    def begin(self) -> None:
        """Copy the checkpoints that the store lacks: the one that the run goes on from is safe before its first save."""
        self._manager.on_main(self._begin)

    def _begin(self) -> None:
        checkpoints = self._manager.checkpoints
        here = [
            store for store in checkpoints.stores if not (store.is_elsewhere or store.is_partial)
        ]
        local = [(record, store) for store in here for record in store.records(complete=True)]
        # Ask the store for everything before the thread begins, which tracks the objects from then on.
        there = {found.record.name: found.record for found in self.run.named()}
        last = newest(there.values())
        if last is not None and not local and checkpoints.resumed is None:
            raise RemoteError(
                f"Expected {self.run.url} to contain no run, since this one begins from scratch. Received: one at step {last.step}. Set "
                "auto_resume=true to continue it, or give this run another lineage."
            )
        # An export is no state to continue from.
        last = newest(record for record in there.values() if record.name != "model")
        self.committed_step = last.step if last is not None else None
        # Targets that no name leads to are recorded under their own.
        missing = [
            (record, store)
            for record, store in local
            if is_name(record.name)
            and (record.name not in there or record.sequence > there[record.name].sequence)
        ]
        missing.sort(key=lambda pair: (pair[0].sequence, pair[0].name == "latest"))
        # A process that was killed may have left files of a save that never became visible, or that retention had given up.
        coming = {
            store.target(store.path(r.name)).name
            for r, store in missing
            if isinstance(store, TargetStore)
        }
        self._sweep(None, coming)
        # The names of one save go up together, as when it was made.
        for _, group in groupby(
            missing, key=lambda pair: (pair[0].sequence, isinstance(pair[1], TargetStore))
        ):
            pairs = list(group)
            record, store = pairs[0]
            names = tuple(r.name for r, _ in pairs)
            if isinstance(store, TargetStore):
                target = store.target(store.path(record.name))
                own = tuple(sorted(storage.names(target) - {SUMS}))
                self.saved(Saved(record.sequence, record.step, names, target.name, own))
            else:
                self.saved(Saved(record.sequence, record.step, names))

    # What the manager calls

    @property
    def is_behind(self) -> bool:
        """Whether a save waits while another one is copied."""
        with self._changed:
            return bool(self._waiting)

    def saved(self, saved: Saved, *, put_off: bool = False) -> None:
        """Hear of a save, on a rank that has written a part of it."""
        # What is put off goes up at the end, unless a later save has taken its place.
        self._since_last += 1
        if saved.may_give_way and (put_off or self._since_last < self.settings.interval):
            self._put_off = saved
            return
        self._since_last = 0
        self._put_off = None
        self._enqueue(saved)

    def _enqueue(self, saved: Saved) -> None:
        try:
            upload = (
                self._file(saved) if saved.target is None else self._target(saved, saved.target)
            )
        except (CheckpointError, OSError) as error:
            with self._changed:
                self._failure = error
                self._final = True
                self._put_off = saved
            self._fail(error)
            return
        dropped: list[Upload] = []
        with self._changed:
            # Ranks that upload parts of a save must all upload the same saves.
            if self._alone:
                dropped = [waiting for waiting in self._waiting if waiting.saved.may_give_way]
                self._waiting = deque(
                    waiting for waiting in self._waiting if not waiting.saved.may_give_way
                )
            self._waiting.append(upload)
            self._given_up = False
            if self._thread is None:
                # A daemon: an upload that hangs must not keep a process alive that close() has given up waiting for.
                self._thread = threading.Thread(
                    target=self._work, name="danling-remote", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()
        for upload in dropped:
            upload.discard()

    def _file(self, saved: Saved) -> Upload:
        """Link a single file to a second name, since the next save replaces it under its own."""
        directory = self._manager.directory
        visible = {}
        for name in saved.names:
            file = f"{name}{SUFFIX}"
            sums = visible_key(file)
            manifest = read_manifest(directory / sums, sums)
            visible[sums] = manifest.text()
        link = directory / f"{storage.UPLOADING}{uuid.uuid4().hex}"
        storage.link(directory / file, link)
        size, digest = manifest.files[file]
        return Upload(saved, {f"{OBJECTS}/{digest}": Part(link, size, digest)}, visible, {}, link)

    def _target(self, saved: Saved, target: str) -> Upload:
        """Name the files of a target, which are never changed, and stay while `pending` has it."""
        path = self._manager.directory / TARGETS / target
        sums = path / SUMS
        known: dict[str, tuple[int, str]] = {}
        visible: dict[str, str] = {}
        # Ranks need not see each other's disks: only rank 0 has the manifest for sure. Another one that
        # has it compares its files by it; `_copy` makes a save visible on rank 0 alone.
        if self._rank == 0 or storage.size_of(sums):
            manifest = read_manifest(sums, f"{target}/{SUMS}")
            known = manifest.files
            visible = {
                visible_key(target): manifest.text(),
                **dict.fromkeys(saved.names, f"{target}\n"),
            }
        parts = {}
        for file in sorted(saved.own):
            size, digest = known.get(file, (os.path.getsize(path / file), None))
            parts[target_key(target, file)] = Part(path / file, size, digest)
        others = {
            target_key(target, file): size
            for file, (size, _) in known.items()
            if file not in saved.own
        }
        return Upload(saved, parts, visible, others)

    def pending(self) -> frozenset[int]:
        """Return the sequences of saves that are not copied yet, or are to be if none comes after them."""
        with self._changed:
            uploads = [*self._waiting, self._running]
            saves = [*(upload.saved for upload in uploads if upload is not None), self._put_off]
        return frozenset(saved.sequence for saved in saves if saved is not None)

    def drop_pending(self) -> list[str]:
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
            self._given_up = (
                failed and time.monotonic() - begun > self.run.store.settings.timeout_seconds
            )
            self._ending = False
        if self._rank == 0 and not failed and self._is_idle and self.lease.lost is None:
            try:
                self._copy_files()
            except (RemoteError, OSError) as error:
                logger.warning(
                    "The files of the run are not in %s as they are here: %s", self.run.url, error
                )

    def close(self, timeout: float | None = None) -> None:
        """Wait, and end."""
        try:
            self._close(timeout)
        finally:
            self.lease.release()

    def _close(self, timeout: float | None) -> None:
        if not self._given_up:
            self.wait(timeout)
        with self._changed:
            left = not self._is_idle or self._put_off is not None
            failure = self._failure
            self.drop_pending()
            self._closed = True
            self._changed.notify_all()
        if not left and failure is None:
            if self._thread is not None:
                self._thread.join()
            return
        safe = "none" if self.committed_step is None else f"step {self.committed_step}"
        why = failure or f"the upload was not done within {timeout} seconds."
        raise RemoteError(
            f"Expected the last save in {self.run.url}. Received: {why} The newest that is safe there: {safe}. The last one is in "
            f"{self._manager.directory}: start again with auto_resume, which uploads it."
        ) from failure

    @property
    def _is_idle(self) -> bool:
        return not self._waiting and self._running is None

    def figures(self, step: int) -> dict[str, float]:
        """Return how far the store is behind, and how fast it is written."""
        values = {
            "lag_steps": float(step - (self.committed_step or 0)),
            "bytes": float(self._bytes),
        }
        return values | (
            {"bytes_per_second": self._bytes / self._seconds} if self._seconds > 0 else {}
        )

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
                self._fail(error)
            # A failed upload is tried again first, in the order of the saves, unless a newer save that
            # waits makes it needless.
            with self._changed:
                self._running = None
                self._failure = error
                gives_way = self._alone and upload.saved.may_give_way and bool(self._waiting)
                is_done = error is None or gives_way or self._closed
                if not is_done:
                    self._waiting.appendleft(upload)
                if error is None:
                    delay = _FIRST_DELAY
                    self._given_up = False
                self._final = self._final or (error is not None and awaited)
                self._changed.notify_all()
            if is_done:
                upload.discard()
            if error is not None:
                with self._changed:
                    # A call that waits for the end does not wait for the next attempt.
                    self._changed.wait_for(
                        lambda: self._closed or (self._ending and not self._final), delay
                    )
                delay = min(2 * delay, _LONGEST_DELAY)

    def _fail(self, error: BaseException) -> None:
        """Say, once for each reason, that a save could not be copied; where it is required, end the training."""
        if self.settings.required:
            with self._changed:
                self._error = self._error or error
        kind = type(error).__name__ if isinstance(error, RemoteError) else str(error)
        if kind in self._warned:
            return
        self._warned.add(kind)
        logger.warning("A save is not safe in %s yet, and is tried again: %s", self.run.url, error)

    def _copy(self, upload: Upload) -> None:
        self._check_lease()
        begun = time.monotonic()
        saved = upload.saved
        put = sum(self._put(key, part) for key, part in upload.parts.items())
        if put:
            self._bytes, self._seconds = self._bytes + put, self._seconds + time.monotonic() - begun
        if self._rank != 0:
            return
        self._await_others(upload)
        self._copy_files()
        # Again, since the waits may have been long: another process may write the run by now.
        self._check_lease()
        # The manifest of a target and then its pointers, or the manifests of a file, `latest` last.
        for key, text in upload.visible.items():
            self.run.put(key, text)
        if "model" not in saved.names:
            self.committed_step = saved.step
        # A reason that comes back is named again.
        self._warned.clear()
        if self._lines.due() or self._ending or not saved.may_give_way:
            size = sum(part.size for part in upload.parts.values())
            names = ", ".join(saved.names)
            seconds = time.monotonic() - begun
            logger.info(
                "Step %d is safe in %s (%s): %.1f MB in %.1f s.",
                saved.step,
                self.run.url,
                names,
                size / 1e6,
                seconds,
            )
        with self._changed:
            spared = {
                owner_of(key) for other in self._waiting for key in (*other.parts, *other.visible)
            }
        self._sweep(saved.sequence, spared)

    def _check_lease(self) -> None:
        lost = self.lease.lost
        if lost is not None:
            raise lost

    def _put(self, key: str, part: Part) -> int:
        """Put a file; return how many bytes went up."""
        # Keys have the digest of a file, or the random name of a target: the same key, the same contents.
        if key in self.run.sizes:
            return 0
        digest = storage.hash_file(part.file)
        if part.digest is not None and digest != part.digest:
            raise CheckpointDamaged(
                f"Expected {part.file} as it was written. Received: another SHA-256, as read to be uploaded. The disk may be failing."
            )
        self.run.put(key, part.file)
        return part.size

    def _await_others(self, upload: Upload) -> None:
        """Wait until the store lists every file of a target as the manifest has it: other ranks put theirs at their own pace."""
        store, root, missing = self.run.store, self.run.layout.checkpoints, upload.others
        delay = _FIRST_LOOK
        end = time.monotonic() + _PATIENCE * store.settings.timeout_seconds
        while missing:
            prefix = f"{root}/{TARGETS}/{upload.saved.target}"
            there = {entry.key.removeprefix(f"{root}/"): entry.size for entry in store.list(prefix)}
            missing = {key: size for key, size in missing.items() if there.get(key) != size}
            if not missing:
                break
            with self._changed:
                closed = self._changed.wait_for(lambda: self._closed, delay)
            if closed or time.monotonic() > end:
                names = ", ".join(sorted(key.rpartition("/")[2] for key in missing)[:4])
                raise RemoteUnavailable(
                    f"Expected the other ranks to put their files of step {upload.saved.step}. Received: not yet {names}. See what these "
                    "ranks say."
                )
            delay = min(2 * delay, _LONGEST_LOOK)
        self.run.sizes.update(upload.others)

    def _sweep(self, up_to: int | None, spared: Collection[str | None]) -> None:
        """Remove the history that retention gives up, and what no name leads to; what cannot be removed, after the next save.

        Rank 0 alone, before the thread runs or in it.
        """
        try:
            self.run.retire(keep=self.settings.keep_latest_k, up_to=up_to, spared=spared)
        except RemoteError as error:
            self.run.forget()
            if "retire" not in self._warned:
                self._warned.add("retire")
                logger.warning("An old checkpoint in %s is still there: %s", self.run.url, error)

    def _copy_files(self) -> None:
        """Copy the other files that have changed. One that is being written to goes up as it is now, and again the next time."""
        for path in run_files(self._directory):
            try:
                with open_file(path, follow=False) as file:
                    found = os.fstat(file.fileno())
                    state = (found.st_size, found.st_mtime_ns)
                    if self._copied.get(path) == state:
                        continue
                    if found.st_nlink > 1:
                        raise ValueError(
                            "it has another name (a hard link), and may be a file of another place"
                        )
                    if found.st_size > _LARGEST_FILE:
                        raise ValueError(f"it has more than {_LARGEST_FILE:,} bytes")
                    # Read the whole file at once: a line appended meanwhile must not go up in part.
                    content = file.read(_LARGEST_FILE)
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                # A save is worth more than a log that cannot be read.
                if path not in self._unread:
                    self._unread.add(path)
                    logger.warning("%s is not copied to %s: %s", path, self.run.url, error)
                continue
            self.run.store.put(
                self.run.layout.file(path.relative_to(self._directory).as_posix()), content
            )
            self._copied[path] = state


def _is_seen(path: Path) -> bool:
    """Whether a file that has just been made on another machine is there: a network disk may show it a moment later."""
    end = time.monotonic() + _LOOK_SECONDS
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def run_files(directory: Path) -> Iterator[Path]:
    """Yield the files of a run directory that belong to the run, apart from its checkpoints."""
    for name in RUN_FILES:
        if os.path.lexists(directory / name):
            yield directory / name
    for name in _DIRECTORIES:
        if os.path.islink(directory / name):
            yield directory / name  # which cannot be opened as a file of the run
            continue
        for place, _, files in os.walk(directory / name):
            yield from (Path(place, file) for file in sorted(files) if not is_unfinished(file))

"""Which directory a run writes into, and the right to do so: a run is never overwritten, and never written by two at once."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from danling.utils.locks import FileLock

from .series import (
    LOCK,
    background_writers,
    holds_checkpoint,
    holds_figures,
    member,
    natural_key,
    number_of,
    numbers,
    parts,
)

logger = logging.getLogger("danling")

WAIT_SECONDS = 60.0
"""How long a start waits for the process that uses its directory to end: after a kill, ranks take a while to die."""

_MOMENT_SECONDS = 0.25
"""How long the lock of somebody who only asks whether it is taken may stand in the way."""

_CONFIG = Path("metadata", "config.full.yaml")


class RunInUseError(RuntimeError):
    """Another process writes into the directory."""


@dataclass(frozen=True)
class Wish:
    """Where a run may write, and what it wants to go on from.

    Attributes:
        family: Directory in which the runs of this line of work lie side by side.
        id: Identity of the run.
        named: The run directory, where the configuration names one.
        checkpoint_dir: The directory of checkpoints, where the configuration names one.
        checkpoint_dir_name: Its name below the run directory otherwise.
        part: Directory below the run directory that this group of processes writes into, where several work on one run.
        auto_resume: Whether to go on in the newest run of this id.
        resume: Checkpoint to go on from: a name in the run's own directory, or a path.
        only_looks: Whether no checkpoint is written, so that the directory of another process may be looked into.
        wait_seconds: How long to wait for the process that uses the directory to end.
        own_id: Returns the id under which the run can go on in a run directory, `None` where that holds another run.
        differences: Returns how the configuration of the run in a run directory differs in what changes the result, a line for each key.
        older: Returns a run directory of the family that an older version made for this configuration under another id.
        elsewhere: Returns the numbers of the runs of this id that an object store has; asked only where no directory is named.
        again: Whether the program may make the same run again, as a cell of a notebook does: a start from scratch takes the next free name
            beside a directory that is named and holds a run, and a directory that an earlier runner of this process has is taken over.
    """

    family: Path
    id: str
    named: Path | None = None
    checkpoint_dir: Path | None = None
    checkpoint_dir_name: str = "checkpoints"
    part: str | None = None
    auto_resume: bool = False
    resume: str | None = None
    only_looks: bool = False
    wait_seconds: float = WAIT_SECONDS
    own_id: Callable[[Path], str | None] = lambda directory: None
    differences: Callable[[Path], list[str]] = lambda directory: []
    older: Callable[[], Path | None] = lambda: None
    elsewhere: Callable[[], list[int]] = list
    again: bool = False

    def checkpoints(self, run: Path) -> Path:
        """Return the directory of checkpoints of a run directory."""
        return self.checkpoint_dir or run / self.checkpoint_dir_name

    def holds_run(self, run: Path) -> bool:
        """Whether a directory holds a checkpoint or a line of metrics, which a start from scratch must not touch."""
        return holds_checkpoint(run / self.checkpoint_dir_name) or holds_figures(run)

    def names_checkpoint(self) -> bool:
        """Whether `resume` is a name such as `latest`, and no path."""
        return self.resume is not None and "/" not in self.resume and not Path(self.resume).exists()


@dataclass
class Claim:
    """A run directory and the right to write into it.

    Attributes:
        dir: The run directory.
        id: Identity of the run: the wished one, or the one under which an older version began it.
        notice: What to tell the user about the choice; `None` when there is nothing to tell.
        wish: What it was chosen for.
        from_scratch: Whether nothing that lies there is gone on from.
    """

    dir: Path
    id: str
    notice: str | None = None
    wish: Wish = field(default_factory=lambda: Wish(Path(), ""))
    from_scratch: bool = True
    _locks: list[FileLock] = field(default_factory=list)
    _made: list[Path] = field(default_factory=list)

    def enter(self) -> None:
        """Make the directory if need be, and become its writer. To be called on one rank for all, once."""
        wish, run = self.wish, self.dir
        if not wish.only_looks:
            if not self.is_writer:
                directory = run / wish.part if wish.part else run
                self.make(directory)
                self.lock(directory, wish.wait_seconds)
                self._wait_for_writers(wish.checkpoints(run), wish.wait_seconds)
                if self.from_scratch:
                    _refuse_run(wish, run)  # the one that was waited for may have written one
            self._lock_checkpoints()
        if not self.from_scratch:
            self.id = wish.own_id(run) or wish.id

    def write_figures(self, *, resumed: bool) -> None:
        """Become the writer of a directory that was entered to look only, since training begins in it. On one rank for all."""
        if self.is_writer:
            return
        if not resumed and self.wish.holds_run(self.dir):
            raise ValueError(
                f"Expected a directory without a run to train in from scratch. Received: {self.dir}, which holds one, and "
                "checkpoint.load_only=true, which only looks. Set `dir` to another directory, or load a checkpoint first."
            )
        directory = self.dir / self.wish.part if self.wish.part else self.dir
        self.make(directory)
        self.lock(directory, self.wish.wait_seconds)

    def _wait_for_writers(self, checkpoints: Path, seconds: float) -> None:
        """Wait until what a killed run has left to write in the background has ended too. Groups of one job share the directory."""
        for file in background_writers(checkpoints) if self.wish.part is None else ():
            lock = FileLock(file)
            if not lock.wait(seconds):
                raise RunInUseError(
                    f"Expected {checkpoints} to be free. Received: a directory that is written to in the background by {lock.holder}. "
                    "Wait until it has ended, or name another `dir`."
                )
            lock.release()  # which removes the file

    def _lock_checkpoints(self) -> None:
        """Become the one writer of a directory of checkpoints that lies elsewhere; replica groups have a right of their own to it."""
        directory = self.wish.checkpoint_dir
        if directory is not None and self.wish.part is None and self.dir not in (directory, *directory.parents):
            self.make(directory)
            self.lock(directory, self.wish.wait_seconds)

    def release(self) -> None:
        """Give the right back, and remove the directories that were made and stayed empty. A second call does nothing."""
        locks, self._locks = self._locks, []
        for lock in reversed(locks):
            lock.release()
        made, self._made = self._made, []
        for directory in reversed(made):
            with contextlib.suppress(OSError):
                os.rmdir(directory)

    def make(self, directory: Path) -> bool:
        """Make a directory and those above it; return whether this call has made it."""
        missing = [path for path in (directory, *directory.parents) if not os.path.lexists(path)]
        made = bool(missing)
        if missing:
            with _file_in_the_way(directory):
                directory.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.mkdir(directory)
            except FileExistsError:
                made = False
        make_directory(directory)
        self._made += [path for path in reversed(missing) if path != directory or made]
        return made

    def lock(self, directory: Path, seconds: float) -> FileLock:
        """Become the one writer of a directory, waiting if need be."""
        lock = FileLock(directory / LOCK)
        if not lock.wait(seconds):
            me = lock.holder.pid == os.getpid()
            if me and self.wish.again and lock.take_over():
                logger.info(
                    "This runner writes into %s from now on, and an earlier one of this notebook no more.", directory
                )
                self._locks.append(lock)
                return lock
            raise RunInUseError(
                f"Expected {directory} to be free. Received: a directory that is in use by {lock.holder}"
                + (", which is this process: close the runner that has it first." if me else ".")
                + " Wait until it has ended, name another `dir`, or set checkpoint.load_only=true to look only."
            )
        self._locks.append(lock)
        return lock

    def confirm(self) -> None:
        """See to it, before something is written, that this process has the right still."""
        for lock in self._locks:
            if self.wish.again and not lock.held:
                raise RunInUseError(
                    f"Expected the runner that was constructed last to write into {lock.file.parent}. Received: an earlier one of this "
                    "notebook. Use the later one, or construct this one anew."
                )
            if not lock.confirm():
                raise RunInUseError(
                    f"Expected this process to be the one that writes into {lock.file.parent}. Received: a directory that "
                    f"{lock.holder} has taken since this program opened and closed {lock.file.name} there, as by copying the "
                    "directory. Leave that file out."
                )

    @property
    def is_writer(self) -> bool:
        """Whether this process holds the right to write."""
        return bool(self._locks)


def claim(wish: Wish) -> Claim:
    """Choose the run directory. To be called on one rank for all, and `enter` before anything is written.

    One that is named, or gone on in, is not touched until then. Of those that start from scratch in the default place, each makes a
    directory of its own here, and is its writer.
    """
    return _named(wish, wish.named) if wish.named is not None else _unnamed(wish)


def _named(wish: Wish, run: Path) -> Claim:
    # A checkpoint of another place comes before what lies here, and would write over it.
    goes_on = wish.auto_resume if wish.resume is None else _lies_in(wish, run)
    if not wish.only_looks and not goes_on:
        if wish.again:
            return _next_free(wish, run)
        _refuse_run(wish, run)
    return _chosen(wish, run, from_scratch=not goes_on)


def _next_free(wish: Wish, run: Path) -> Claim:
    """Choose a named directory, or the next beside it that holds no run and that nobody writes into."""
    _refuse_checkpoints(wish)
    number = 1
    while wish.holds_run(free := run.with_name(member(run.name, number))) or is_in_use(free):
        number += 1
    claimed = _chosen(wish, free, from_scratch=True)
    if number > 1:
        here = f"this one, from scratch, is {free}."
        claimed.notice = (
            f"{run} holds an earlier run, which stays as it is: {here} auto_resume=true goes on in the earlier one."
            if wish.holds_run(run)
            else f"{run} is in use by another runner: {here}"
        )
    return claimed


def _unnamed(wish: Wish) -> Claim:
    existing = [wish.family / member(wish.id, number) for number in numbers(wish.family, wish.id)]
    if wish.resume is not None and not wish.names_checkpoint():
        run = run_of(Path(wish.resume), wish.part)
        if run is not None and wish.own_id(run) is not None:
            return _chosen(wish, run, from_scratch=False)
    elif wish.auto_resume or wish.only_looks or wish.resume is not None:
        run = _newest(wish, existing)
        if run is not None:
            claimed = _chosen(wish, run, from_scratch=False)
            if len(existing) > 1 or run not in existing:
                claimed.notice = f"Going on in {run}, the newest run of this configuration."
            return claimed
    return _from_scratch(wish)


def _newest(wish: Wish, existing: list[Path]) -> Path | None:
    with_run = [run for run in existing if wish.holds_run(run) or is_in_use(run)]
    there = max(wish.elsewhere(), default=0)
    if there > max((number_of(run.name, wish.id) or 0 for run in with_run), default=0):
        # Its machine was lost: it goes on here.
        return wish.family / member(wish.id, there)
    if with_run:
        return with_run[-1]
    older = wish.older()
    return older or (existing[-1] if existing else None)


def _from_scratch(wish: Wish) -> Claim:
    _refuse_checkpoints(wish)
    there = wish.elsewhere()
    while True:
        taken = numbers(wish.family, wish.id)
        if taken and taken[-1] not in there:
            claimed = _adopt(wish, wish.family / member(wish.id, taken[-1]))
            if claimed is not None:
                return _with_notice(wish, claimed, taken[-1])
        number = max([*taken, *there], default=0) + 1
        run = wish.family / member(wish.id, number)
        claimed = Claim(run, wish.id, wish=wish)
        try:
            # Of several that start at once, one makes it.
            mine = claimed.make(run) and (wish.only_looks or _try_lock(claimed, run, wish.part))
            # Another one may have taken it over before it was locked, and have come to its end.
            if mine and (wish.part is not None or not wish.holds_run(run)):
                return _with_notice(wish, claimed, number)
        except BaseException:
            claimed.release()
            raise
        claimed.release()


def _with_notice(wish: Wish, claimed: Claim, number: int) -> Claim:
    if number > 1:
        before = wish.family / member(wish.id, number - 1)
        claimed.notice = (
            f"{before} holds an earlier run of this configuration, which stays as it is: this one is {claimed.dir}. "
            "auto_resume goes on in the newest."
        )
    return claimed


def _adopt(wish: Wish, run: Path) -> Claim | None:
    """Take over the newest directory where it holds no run: one that an attempt has left that never came to train."""
    joins = wish.part is not None and is_in_use(run)
    if wish.holds_run(run) and not joins:
        return None
    claimed = Claim(run, wish.id, wish=wish)
    if wish.part is not None:
        # The groups of one job share it; each has a part of its own.
        claimed.make(run / wish.part)
        claimed.lock(run / wish.part, wish.wait_seconds)
        return claimed
    lock = FileLock(run / LOCK)
    # Without locks nobody can tell whether somebody is about to write there.
    if lock.wait(_MOMENT_SECONDS) and lock.works and not wish.holds_run(run):
        claimed._locks.append(lock)
        return claimed
    lock.release()
    return None


def _try_lock(claimed: Claim, run: Path, part: str | None) -> bool:
    directory = run / part if part else run
    claimed.make(directory)
    lock = FileLock(directory / LOCK)
    if lock.wait(_MOMENT_SECONDS):
        claimed._locks.append(lock)
        return True
    return False


def _chosen(wish: Wish, run: Path, *, from_scratch: bool) -> Claim:
    id = wish.id if from_scratch else wish.own_id(run) or wish.id
    return Claim(run, id, wish=wish, from_scratch=from_scratch)


def _refuse_run(wish: Wish, run: Path) -> None:
    _refuse_checkpoints(wish)
    joins = wish.part is not None and is_in_use(run)
    if not joins and wish.holds_run(run):
        what = "metrics in metrics.jsonl" if holds_figures(run) else "a checkpoint"
        raise ValueError(_refusal(wish, "dir", run, what))


def _refuse_checkpoints(wish: Wish) -> None:
    directory = wish.checkpoint_dir
    if directory is None or wish.only_looks or wish.part is not None:
        return
    goes_on = wish.auto_resume if wish.resume is None else _lies_in(wish, directory)
    if not goes_on and holds_checkpoint(directory):
        raise ValueError(_refusal(wish, "checkpoint_dir", directory, "a checkpoint"))


def _refusal(wish: Wish, key: str, directory: Path, what: str) -> str:
    begins = (
        "starts from scratch" if wish.resume is None else f"goes on from resume={wish.resume!r}, which lies elsewhere"
    )
    go_on = "Set auto_resume=true" if not wish.auto_resume else "Unset resume, which comes before auto_resume,"
    received = f"{key}={str(directory)!r}, which holds one ({what})"
    others = wish.differences(directory if key == "dir" else directory.parent)
    if others:
        listing = "".join(f"\n  {line}" for line in others)
        received += f", whose configuration differs:{listing}\n"
        go_on = f"Give this run a directory of its own ({key}), or restore the configuration and set auto_resume=true"
    else:
        received, go_on = (
            f"{received}. ",
            f"{go_on} to go on with it, set resume to a checkpoint of it, or {key} to another directory",
        )
    return (
        f"Expected {key} to be a directory without a run, since this one {begins}. Received: {received}{go_on}; "
        "checkpoint.load_only=true only looks."
    )


def _lies_in(wish: Wish, run: Path) -> bool:
    """Whether the checkpoint to go on from lies in a run directory."""
    if wish.resume is None:
        return False
    if wish.names_checkpoint():
        return True
    source, places = Path(os.path.realpath(wish.resume)), (run.resolve(), wish.checkpoints(run).resolve())
    return any(place in (source, *source.parents) for place in places)


def is_in_use(run: Path) -> bool:
    """Whether a process writes into a run directory, or into the part of a group of it."""
    return any(FileLock(directory / LOCK).is_taken() for directory in (run, *parts(run)))


def run_of(checkpoint: Path, part: str | None = None) -> Path | None:
    """Return the run directory that a checkpoint lies in, `None` for one that was copied out of it."""
    source = Path(os.path.realpath(checkpoint))
    if not source.exists():
        return None
    # A single file beside the metadata of a run is no checkpoint of it: those lie in a directory of their own.
    above = (source, *source.parents) if source.is_dir() else tuple(source.parents)[1:]
    for directory in above[:4]:
        if (directory / _CONFIG).is_file() or (part is not None and (directory / part / _CONFIG).is_file()):
            return directory
    return None


def newest_first(family: Path) -> Iterator[Path]:
    """Yield the run directories of a family, the one that was written to last first."""
    found = [Path(entry.path) for entry in _entries(family) if Path(entry.path, _CONFIG).is_file()]
    return iter(sorted(found, key=lambda path: (_changed(path), natural_key(path.name)), reverse=True))


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(directory))
    except OSError:
        return []


def _changed(run: Path) -> float:
    files = [run / "metrics.jsonl", run / _CONFIG]
    return max((file.stat().st_mtime for file in files if file.is_file()), default=0.0)


@contextlib.contextmanager
def _file_in_the_way(directory: Path) -> Iterator[None]:
    try:
        yield
    except (FileExistsError, NotADirectoryError):
        file = next((path for path in (directory, *directory.parents) if path.is_file()), directory)
        raise ValueError(
            "Expected a directory, or nothing yet, on the way to the run directory. "
            f"Received: dir={str(directory)!r}, where {str(file)!r} is a file. "
            "Move it, or set `workspace_root` or `dir`."
        ) from None
    except OSError as error:
        raise PermissionError(
            f"Expected a run directory that can be made. Received: dir={str(directory)!r}: {error.strerror}. "
            "Set `workspace_root` or `dir`."
        ) from None


def make_directory(directory: Path) -> None:
    """Make a run directory."""
    with _file_in_the_way(directory):
        directory.mkdir(parents=True, exist_ok=True)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError(
            f"Expected a run directory that can be written. Received: dir={str(directory)!r}. "
            "Set `workspace_root` or `dir`."
        )

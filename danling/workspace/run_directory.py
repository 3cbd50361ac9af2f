"""Which directory a run takes, and the right to write into it: no run is overwritten, and two processes never write into one directory.

The runs of one configuration have directories next to each other: `<id>`, `<id>-2`, `<id>-3`, ..., in the order in which they began.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from danling.checkpoints.errors import CheckpointMismatch
from danling.utils.files import open_file, read_text
from danling.utils.locks import WRITING, FileLock
from danling.utils.plain import parse_yaml

if TYPE_CHECKING:
    from danling.config import RunnerConfig

logger = logging.getLogger("danling")

LOCK = ".lock"
"""File in a run directory that its writer locks."""

_WAIT_SECONDS = 60.0
"""How long a start waits for the process that uses its directory: after a kill, ranks take a while to die."""

_MOMENT_SECONDS = 0.25
"""How long the lock of a process that only asks whether it is taken may be in the way."""

_CONFIG = Path("metadata", "config.full.yaml")
_CHECKPOINT = re.compile(r"(latest|best|model|ckpt-(e\d+|s\d+))(\.pth(\.sha256(\.next)?)?)?")
_NUMBERED = re.compile(r"(.+)-([1-9]\d*)")
_DIGITS = 16
"""Digits of the hash of a configuration at the end of an id."""


class RunInUseError(RuntimeError):
    """Another process writes into the directory."""


@dataclass(frozen=True)
class RunDirectoryRequest:
    """What a start asks for: where its configuration lets it write, and what it resumes from.

    Attributes:
        config: The configuration of the run.
        id: Id of the run.
        code_id: Identity of the code, or `None` without git.
        part: Directory below the run directory that this replica group writes into, where several work on one run.
        replicas: Ranks that read different samples.
        elsewhere: Returns the numbers of the runs of this id in an object store; called only where no directory is named.
        reruns: Whether the program may start the same run again in one process, as a cell of a notebook does. A start from scratch then
            takes the next free name where the named directory holds a run, and takes over the directory of an earlier runner.
    """

    config: RunnerConfig
    id: str
    code_id: str | None = None
    part: str | None = None
    replicas: int = 1
    elsewhere: Callable[[], Sequence[int]] = tuple
    reruns: bool = False

    @property
    def family(self) -> Path:
        """Directory of the runs of this lineage."""
        lineage = self.config.lineage
        return absolute(self.config.workspace_root) / (f"{lineage}-{self.code_id}" if self.code_id else lineage)

    @property
    def checkpoint_dir(self) -> Path | None:
        """Directory of checkpoints outside of the run directory, where the configuration names one."""
        named = self.config.get("checkpoint_dir", None)
        return absolute(named) if named else None

    @property
    def only_looks(self) -> bool:
        """Whether no checkpoint is written, so that the directory of another process may be read."""
        return bool(self.config.checkpoint.load_only)

    @property
    def wait_seconds(self) -> float:
        """How long to wait for the process that uses the directory; the other ranks wait as well, and must not give up first."""
        limit = self.config.comm.init_timeout_seconds
        return _WAIT_SECONDS if limit is None else min(_WAIT_SECONDS, limit / 2)

    def checkpoints(self, run: Path) -> Path:
        return self.checkpoint_dir or run / self.config.checkpoint.dir_name

    def holds_run(self, run: Path) -> bool:
        """Whether a directory holds a checkpoint or a line of metrics, which a start from scratch must not touch."""
        return holds_checkpoint(run / self.config.checkpoint.dir_name) or holds_metrics(run)

    def names_checkpoint(self) -> bool:
        """Whether `resume` is a name such as `latest`, and no path."""
        resume = self.config.resume
        return resume is not None and "/" not in resume and not Path(resume).exists()

    def resumes_in(self, directory: Path) -> bool:
        """Whether the run resumes from a checkpoint in a run directory, or in a directory of checkpoints."""
        resume = self.config.resume
        if resume is None:
            return bool(self.config.auto_resume)
        if self.names_checkpoint():
            return True
        source = Path(os.path.realpath(resume))
        places = (directory.resolve(), self.checkpoints(directory).resolve())
        return any(place in (source, *source.parents) for place in places)

    def own_id(self, run: Path) -> str | None:
        """Return the id under which the run resumes in a run directory; `None` where that holds another run.

        A seed that was drawn is part of the configuration of a checkpoint, but not of the id of its run: such a run keeps its id.
        """
        from danling.checkpoints.directory import newest_record  # torch

        record = newest_record(run / self.config.checkpoint.dir_name)
        if record is None:
            return self.id if number_of(run.name, self.id) is not None else None
        if record.run == self.id:
            return self.id
        is_same = _code_of(record.run) == (self.code_id or "") and self.differences(run) == []
        return record.run if is_same else None

    def differences(self, run: Path) -> list[str] | None:
        """Return how the run in a directory differs in what changes the result, a line for each key; `None` where none can be read."""
        from danling.checkpoints.reading import stored_settings  # torch

        stored = stored_settings(run / self.config.checkpoint.dir_name)
        if stored is None:
            return None
        return self.config.differences(stored[0], stored_replicas=stored[1], replicas=self.replicas)

    def refuse_other_update_sizes(self) -> None:
        """Refuse to begin anew where the same settings have made a run on another number of ranks.

        Its updates have another size, so that it is another run; but a user who starts fewer processes wants to resume.
        """
        from danling.config import identity

        own = identity.update_sizes(self.config.plain(), 1).get("dataloader")
        for run in _newest_first(self.family) if own is not None else ():
            stem, number = natural_key(run.name)
            stem = stem if 0 < number < 10**6 else run.name
            if _code_of(stem) != (self.code_id or ""):
                continue
            try:
                stored = parse_yaml(read_text(run / "metadata" / "config.canonical.yaml"))
            except (OSError, ValueError, yaml.YAMLError):
                continue
            if not isinstance(stored, dict):
                continue
            made = identity.update_sizes(stored, 1).get("dataloader")
            if own is None or made is None or made.samples % own.samples:
                continue
            then = identity.canonical(self.config.plain(), replicas=made.samples // own.samples)
            differences = self.differences(run) if stem[-_DIGITS:] == identity.digest(then) else None
            if differences:
                raise CheckpointMismatch(
                    f"Expected auto_resume to continue with updates of the same size. Received: {'; '.join(differences)}; the run in {run} "
                    "has the same settings. Start as many processes as then, or keep the product by another batch_size or accum_steps; "
                    "dataloader.global_batch_size keeps it at any number. For a new run, start once without auto_resume."
                )


@dataclass
class RunDirectoryLease:
    """A run directory and the right to write into it."""

    dir: Path
    request: RunDirectoryRequest
    id: str = ""
    from_scratch: bool = True
    notice: str | None = None
    _locks: list[FileLock] = field(default_factory=list)
    _made: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.id = self.request.id
        if not self.from_scratch:
            self.id = self.request.own_id(self.dir) or self.id

    def enter(self) -> str:
        """Make the directory if necessary, and become its writer; return the id of the run. Call on one rank for all, once."""
        request = self.request
        if not request.only_looks:
            if not self._locks:
                self._take_directory()
                self._wait_for_background_writers()
                if self.from_scratch:
                    _refuse_run(request, self.dir)  # the process that was waited for may have written one
            checkpoints = request.checkpoint_dir
            # Each replica group locks the checkpoint directory later, when it writes the full checkpoints.
            outside = checkpoints is not None and self.dir not in (checkpoints, *checkpoints.parents)
            if checkpoints is not None and outside and request.part is None:
                self.make(checkpoints)
                self._lock(checkpoints)
        if not self.from_scratch:
            self.id = request.own_id(self.dir) or request.id
        return self.id

    def enter_to_train(self, *, resumed: bool) -> None:
        """Become the writer of a directory that was entered to look only, since training begins in it. On one rank for all."""
        if self._locks:
            return
        if not resumed and self.request.holds_run(self.dir):
            raise ValueError(
                f"Expected a directory without a run to train in from scratch. Received: {self.dir}, which holds one, and "
                "checkpoint.load_only=true, which only looks. Set `dir` to another directory, or load a checkpoint first."
            )
        self._take_directory()

    def _take_directory(self) -> None:
        directory = self.dir / self.request.part if self.request.part else self.dir
        self.make(directory)
        self._lock(directory)

    def _wait_for_background_writers(self) -> None:
        """Wait until a killed run has written what it had left to write. Replica groups of one job share the directory."""
        checkpoints = self.request.checkpoints(self.dir)
        for name in sorted(_names(checkpoints)) if self.request.part is None else ():
            lock = FileLock(checkpoints / name)
            if not name.startswith(WRITING):
                continue
            if not lock.wait(self.request.wait_seconds):
                raise RunInUseError(
                    f"Expected {checkpoints} to be free. Received: a directory that is written to in the background by {lock.holder}. "
                    "Wait until it has ended, or name another `dir`."
                )
            lock.release()  # which removes the file

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

    def _lock(self, directory: Path) -> None:
        """Become the one writer of a directory, waiting if necessary."""
        lock = FileLock(directory / LOCK)
        if not lock.wait(self.request.wait_seconds):
            is_mine = lock.holder.pid == os.getpid()
            if not (is_mine and self.request.reruns and lock.take_over()):
                raise RunInUseError(
                    f"Expected {directory} to be free. Received: a directory that is in use by {lock.holder}"
                    + (", which is this process: close the runner that has it first." if is_mine else ".")
                    + " Wait until it has ended, name another `dir`, or set checkpoint.load_only=true to look only."
                )
            logger.info("This runner writes into %s from now on; an earlier one of this notebook does not.", directory)
        self._locks.append(lock)

    def try_lock(self) -> FileLock | None:
        """Become the writer of the directory if no other process is; return the lock."""
        directory = self.dir / self.request.part if self.request.part else self.dir
        self.make(directory)
        lock = FileLock(directory / LOCK)
        if not lock.wait(_MOMENT_SECONDS):
            return None
        self._locks.append(lock)
        return lock

    def confirm(self) -> None:
        """Check, before something is written, that this process still has the right."""
        for lock in self._locks:
            directory = lock.file.parent
            if self.request.reruns and not lock.held:
                raise RunInUseError(
                    f"Expected the runner that was constructed last to write into {directory}. Received: an earlier one of this notebook. "
                    "Use the later one, or construct this one anew."
                )
            if not lock.confirm():
                raise RunInUseError(
                    f"Expected this process to be the one that writes into {directory}. Received: a directory that {lock.holder} has taken "
                    f"since this program opened and closed {lock.file.name} there, as by copying the directory. Leave that file out."
                )

    def release(self) -> None:
        """Give the right back, and remove the directories that were made and are empty. A second call does nothing."""
        locks, self._locks = self._locks, []
        for lock in reversed(locks):
            lock.release()
        made, self._made = self._made, []
        for directory in reversed(made):
            with contextlib.suppress(OSError):
                os.rmdir(directory)


def choose_run_directory(request: RunDirectoryRequest) -> RunDirectoryLease:
    """Choose the run directory. Call on one rank for all, and `enter` before anything is written.

    A directory that is named, or resumed in, is not touched until then. Starts from scratch in the default place each make a directory of
    their own here, and are its writer.
    """
    named = request.config.get("dir", None)
    if named:
        run = absolute(named)
        resumes = request.resumes_in(run)
        if not request.only_looks and not resumes:
            if request.reruns:
                return _next_to(request, run)
            _refuse_run(request, run)
        return RunDirectoryLease(run, request, from_scratch=not resumes)
    resume = request.config.resume
    if resume is not None and not request.names_checkpoint():
        source = run_of(Path(resume), request.part)
        if source is not None and request.own_id(source) is not None:
            return RunDirectoryLease(source, request, from_scratch=False)
    elif request.config.auto_resume or request.only_looks or resume is not None:
        lease = _resumed(request)
        if lease is not None:
            return lease
    return _from_scratch(request)


def _next_to(request: RunDirectoryRequest, run: Path) -> RunDirectoryLease:
    """Choose a named directory, or the next one after it that holds no run and is not in use."""
    _refuse_checkpoints(request)
    number = 1
    while request.holds_run(free := run.with_name(member(run.name, number))) or is_in_use(free):
        number += 1
    lease = RunDirectoryLease(free, request)
    if number > 1:
        here = f"this one, from scratch, is {free}."
        lease.notice = (
            f"{run} holds an earlier run, which stays as it is: {here} auto_resume=true resumes the earlier one."
            if request.holds_run(run)
            else f"{run} is in use by another runner: {here}"
        )
    return lease


def _resumed(request: RunDirectoryRequest) -> RunDirectoryLease | None:
    """Choose the newest run of the id; `None` where there is none."""
    existing = [request.family / member(request.id, number) for number in numbers(request.family, request.id)]
    with_run = [run for run in existing if request.holds_run(run) or is_in_use(run)]
    stored = max(request.elsewhere(), default=0)
    if stored > max((number_of(run.name, request.id) or 0 for run in with_run), default=0):
        run = request.family / member(request.id, stored)  # the machine with its directory was lost
    elif with_run:
        run = with_run[-1]
    else:
        request.refuse_other_update_sizes()
        if not existing:
            return None
        run = existing[-1]
    lease = RunDirectoryLease(run, request, from_scratch=False)
    if len(existing) > 1 or run not in existing:
        lease.notice = f"Resuming in {run}, the newest run of this configuration."
    return lease


def _from_scratch(request: RunDirectoryRequest) -> RunDirectoryLease:
    """Make a directory for a new run, or take over the newest one where that holds no run; become its writer."""
    _refuse_checkpoints(request)
    stored, family = request.elsewhere(), request.family
    while True:
        taken = numbers(family, request.id)
        if taken and taken[-1] not in stored:
            lease = _adopt(request, family / member(request.id, taken[-1]))
            if lease is not None:
                return _with_notice(lease, taken[-1])
        number = max([*taken, *stored], default=0) + 1
        lease = RunDirectoryLease(family / member(request.id, number), request)
        try:
            # Of several that start at once, one makes it.
            mine = lease.make(lease.dir) and (request.only_looks or lease.try_lock() is not None)
            # Another start may have taken it over before it was locked, and have ended.
            if mine and (request.part is not None or not request.holds_run(lease.dir)):
                return _with_notice(lease, number)
        except BaseException:
            lease.release()
            raise
        lease.release()


def _adopt(request: RunDirectoryRequest, run: Path) -> RunDirectoryLease | None:
    """Take over a directory that holds no run, since the attempt that made it never trained; `None` where it holds one."""
    joins = request.part is not None and is_in_use(run)
    if request.holds_run(run) and not joins:
        return None
    lease = RunDirectoryLease(run, request)
    if request.part is not None:
        lease._take_directory()  # the groups of one job share it
        return lease
    lock = lease.try_lock()
    # Without locks nothing tells whether another process is about to write there.
    if lock is not None and lock.works and not request.holds_run(run):
        return lease
    lease.release()
    return None


def _with_notice(lease: RunDirectoryLease, number: int) -> RunDirectoryLease:
    if number > 1:
        before = lease.request.family / member(lease.request.id, number - 1)
        lease.notice = (
            f"{before} holds an earlier run of this configuration, which stays as it is: this one is {lease.dir}. "
            "auto_resume resumes the newest."
        )
    return lease


def _refuse_run(request: RunDirectoryRequest, run: Path) -> None:
    _refuse_checkpoints(request)
    joins = request.part is not None and is_in_use(run)
    if not joins and request.holds_run(run):
        raise _refusal(request, "dir", run, "metrics in metrics.jsonl" if holds_metrics(run) else "a checkpoint")


def _refuse_checkpoints(request: RunDirectoryRequest) -> None:
    directory = request.checkpoint_dir
    if directory is None or request.only_looks or request.part is not None:
        return
    if not request.resumes_in(directory) and holds_checkpoint(directory):
        raise _refusal(request, "checkpoint_dir", directory, "a checkpoint")


def _refusal(request: RunDirectoryRequest, key: str, directory: Path, what: str) -> ValueError:
    resume = request.config.resume
    begins = "starts from scratch" if resume is None else f"resumes from resume={resume!r}, which is elsewhere"
    received = f"{key}={str(directory)!r}, which holds one ({what})"
    others = request.differences(directory if key == "dir" else directory.parent) or ()
    others = [line for line in others if not line.endswith("now absent")]  # what __init__ has yet to set
    if others:
        received += f", whose configuration differs:{''.join(f'{chr(10)}  {line}' for line in others)}\n"
        fix = f"Give this run its own directory ({key}), or restore the configuration and set auto_resume=true"
    else:
        received += ". "
        fix = "Unset resume, which comes before auto_resume," if request.config.auto_resume else "Set auto_resume=true"
        fix += f" to resume it, set resume to a checkpoint of it, or {key} to another directory"
    return ValueError(
        f"Expected {key} to be a directory without a run, since this one {begins}. Received: {received}{fix}; "
        "checkpoint.load_only=true only looks."
    )


def member(id: str, number: int) -> str:
    """Return the name of the directory of the `number`-th run of an id, counted from 1."""
    return id if number == 1 else f"{id}-{number}"


def number_of(name: str, id: str) -> int | None:
    """Return which run of an id a directory of that name holds; `None` when it holds none of it."""
    found = _NUMBERED.fullmatch(name)
    number = 1 if name == id else int(found[2]) if found and found[1] == id else 0
    return number if number and name == member(id, number) else None


def numbers(family: Path, id: str) -> list[int]:
    """Return the numbers of the runs of an id that have a directory, in order."""
    found = (number_of(name, id) for name in _names(family))
    return sorted(number for number in found if number is not None)


def natural_key(name: str) -> tuple[str, int]:
    """Return a key that sorts `id-2` between `id` and `id-10`."""
    found = _NUMBERED.fullmatch(name)
    return (found[1], int(found[2])) if found else (name, 0)


def holds_checkpoint(directory: Path) -> bool:
    """Whether there is a checkpoint in a directory of checkpoints, complete or not, by the names in it; no file is opened."""
    names = _names(directory)
    if any(_CHECKPOINT.fullmatch(name) for name in names):
        return True
    targets = directory / "targets"
    return "targets" in names and any("manifest.sha256" in _names(targets / target) for target in _names(targets))


def holds_metrics(run: Path) -> bool:
    """Whether a line of metrics was written in a run directory, or in the part of a replica group."""
    return any(has_line(directory / "metrics.jsonl") for directory in (run, *_parts(run)))


def has_line(file: Path) -> bool:
    """Whether a file has a whole line, or cannot be read: it may be another program's."""
    try:
        with open_file(file) as lines:
            return b"\n" in lines.read(1 << 16)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def is_in_use(run: Path) -> bool:
    """Whether a process writes into a run directory, or into the part of a replica group."""
    return any(FileLock(directory / LOCK).is_taken() for directory in (run, *_parts(run)))


def run_of(checkpoint: Path, part: str | None = None) -> Path | None:
    """Return the run directory that contains a checkpoint, `None` for one that was copied out of it."""
    source = Path(os.path.realpath(checkpoint))
    if not source.exists():
        return None
    # A single file next to the metadata of a run is no checkpoint of it: those have their own directory.
    above = (source, *source.parents) if source.is_dir() else tuple(source.parents)[1:]
    for directory in above[:4]:
        if (directory / _CONFIG).is_file() or (part is not None and (directory / part / _CONFIG).is_file()):
            return directory
    return None


def make_directory(directory: Path) -> None:
    """Make a run directory that can be written."""
    with _file_in_the_way(directory):
        directory.mkdir(parents=True, exist_ok=True)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError(
            f"Expected a run directory that can be written. Received: dir={str(directory)!r}. "
            "Set `workspace_root` or `dir`."
        )


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


def absolute(path: str | os.PathLike[str]) -> Path:
    """Return a path that a later change of the working directory does not move; `~` is the home directory."""
    return Path(os.path.abspath(os.path.expanduser(path)))


def _newest_first(family: Path) -> list[Path]:
    """Return the run directories of a family, the one that was written to last first."""

    def changed(run: Path) -> float:
        files = [run / "metrics.jsonl", run / _CONFIG]
        return max((file.stat().st_mtime for file in files if file.is_file()), default=0.0)

    found = [family / name for name in _names(family) if (family / name / _CONFIG).is_file()]
    return sorted(found, key=lambda run: (changed(run), natural_key(run.name)), reverse=True)


def _code_of(id: str) -> str:
    return id[:-_DIGITS].removesuffix("-")


def _parts(run: Path) -> Iterator[Path]:
    """Yield the directories below a run directory, in each of which a replica group may write."""
    return (run / name for name in sorted(_names(run)) if (run / name).is_dir())


def _names(directory: Path) -> set[str]:
    try:
        return set(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return set()
    except OSError as error:
        if error.errno == errno.ELOOP:
            return set()
        raise

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
# `latest.pth`, its checksums, and those that wait while it is replaced; or the pointer `latest`.
_CHECKPOINT = re.compile(r"(latest|best|model|ckpt-(e\d+|s\d+))(\.pth(\.sha256(\.next)?)?)?")
_NUMBERED = re.compile(r"(.+)-([1-9]\d*)")
_NUMBER = re.compile(r"-[1-9]\d{0,5}\Z")
_DIGITS = 16
"""Digits of the hash of a configuration at the end of an id."""


class RunInUseError(RuntimeError):
    """Another process writes into the directory."""


class RunDirectory:
    """The directory of a run, which the constructor chooses, and the right to write into it. Used on one rank for all.

    A directory that is named, or resumed in, is not touched before `enter`. A start from scratch in the default place makes a new directory
    at once, and is its writer.
    """

    def __init__(
        self,
        config: RunnerConfig,
        id: str,
        *,
        code_id: str | None = None,
        group_dir: str | None = None,
        replicas: int = 1,
        elsewhere: Callable[[], Sequence[int]] = tuple,
        reruns: bool = False,
        inherited: Path | None = None,
    ) -> None:
        self.id = id
        self.from_scratch = True
        self.notice: str | None = None
        self._asked_id = id
        self._config = config
        self._code_id = code_id or ""
        self._group_dir = group_dir
        self._replicas = replicas
        self._elsewhere = elsewhere
        self._reruns = reruns
        self._family = absolute(config.workspace_root) / family_of(config.lineage, code_id)
        named = config.get("checkpoint_dir", None)
        self._checkpoint_dir = absolute(named) if named else None
        limit = config.comm.init_timeout_seconds
        # The other ranks wait as well, and must not give up first.
        self._wait_seconds = _WAIT_SECONDS if limit is None else min(_WAIT_SECONDS, limit / 2)
        self._locks: list[FileLock] = []
        self._made: list[Path] = []
        self._described: tuple[int, int] | None = None
        self.dir = self._family / id
        if inherited is None:
            self._choose()
        else:
            self.dir = inherited
            self.from_scratch = False

    # The choice

    @property
    def _only_looks(self) -> bool:
        # Read each time: the `__init__` of a runner may set it after the choice.
        return bool(self._config.checkpoint.load_only)

    def _choose(self) -> None:
        named = self._config.get("dir", None)
        resume = self._config.resume
        run: Path | None = None
        if named:
            self.dir = absolute(named)
            if self._resumes_in(self.dir):
                run = self.dir
            elif self._reruns and not self._only_looks:
                self._take_next_name()
            elif not self._only_looks:
                self._refuse_run()
        elif resume is not None and not self._names_checkpoint():
            # The run goes on in the directory of the checkpoint if that is of this run; from one of
            # another run, or from a copy, it begins in its own directory.
            source = run_of(Path(resume), self._group_dir)
            if source is not None and self._id_in(source) is not None:
                run = source
        elif self._config.auto_resume or self._only_looks or resume is not None:
            run = self._newest_run()
        if run is not None:
            self.dir = run
            self.from_scratch = False
            self.id = self._id_in(run) or self.id
        elif not named:
            self._start_in_default_place()

    def _names_checkpoint(self) -> bool:
        """Whether `resume` is a name such as `latest`, and no path."""
        resume = self._config.resume
        return resume is not None and "/" not in resume and not Path(resume).exists()

    def _resumes_in(self, directory: Path) -> bool:
        """Whether the run resumes from a checkpoint in a run directory, or in a directory of checkpoints."""
        resume = self._config.resume
        if resume is None:
            return bool(self._config.auto_resume)
        if self._names_checkpoint():
            return True
        # Links are followed, so that a run is found by each of its paths.
        source = Path(os.path.realpath(resume))
        places = (directory.resolve(), self._checkpoints_of(directory).resolve())
        return any(place in (source, *source.parents) for place in places)

    def _take_next_name(self) -> None:
        """Choose the named directory, or the next one after it that holds no run and is not in use."""
        self._refuse_checkpoints()
        named = self.dir
        number = 1
        while self._holds_run(self.dir) or is_in_use(self.dir):
            number += 1
            self.dir = named.with_name(member(named.name, number))
            self.notice = f"{named} has an earlier run, which stays as it is: this one, from scratch, is {self.dir}."

    def _newest_run(self) -> Path | None:
        """Return the directory of the newest run of the id; `None` where there is none."""
        existing = [
            self._family / member(self.id, number) for number in numbers(self._family, self.id)
        ]
        with_run = [run for run in existing if self._holds_run(run) or is_in_use(run)]
        # A copy in an object store counts like a directory.
        stored = max(self._elsewhere(), default=0)
        if stored > max((number_of(run.name, self.id) or 0 for run in with_run), default=0):
            run = self._family / member(self.id, stored)  # the machine with its directory was lost
        elif with_run:
            run = with_run[-1]
        else:
            self._refuse_other_update_sizes()
            if not existing:
                return None
            # Made by an attempt that never trained.
            run = existing[-1]
        if len(existing) > 1 or run not in existing:
            self.notice = f"Resuming in {run}, the newest run with this id."
        return run

    def _start_in_default_place(self) -> None:
        """Make a directory for a new run, or take over the newest one where that holds no run; become its writer."""
        self._refuse_checkpoints()
        stored = self._elsewhere()
        # Other starts of the same configuration may take a directory meanwhile: then the next number.
        while True:
            taken = numbers(self._family, self.id)
            number = taken[-1] if taken else 0
            if (
                not number
                or number in stored
                or not self._take_over(self._family / member(self.id, number))
            ):
                number = max([*taken, *stored], default=0) + 1
                if not self._make_new(self._family / member(self.id, number)):
                    continue
            if number > 1:
                before = self._family / member(self.id, number - 1)
                self.notice = (
                    f"{before} holds an earlier run with the same id, which stays as it is: this one is {self.dir}. "
                    "auto_resume resumes the newest."
                )
            return

    def _take_over(self, run: Path) -> bool:
        """Take a directory that holds no run, since the attempt that made it never trained, and that no other process has."""
        if self._holds_run(run) and not self._joins(run):
            return False
        self.dir = run
        if self._group_dir is not None:
            self._lock(self._own_dir)  # the groups of one job share it
            return True
        lock = self._try_lock()
        # Without locks nothing tells whether another process is about to write there.
        if lock is not None and lock.works and not self._holds_run(run):
            return True
        self.release()
        return False

    def _make_new(self, run: Path) -> bool:
        """Make a directory, and become its writer; of several that start at once, one does."""
        self.dir = run
        try:
            mine = self.make(run) and (self._only_looks or self._try_lock() is not None)
            # Another start may have taken it over before it was locked, and have ended.
            if mine and (self._group_dir is not None or not self._holds_run(run)):
                return True
        except BaseException:
            self.release()
            raise
        self.release()
        return False

    def _joins(self, run: Path) -> bool:
        """Whether this replica group joins others that work on a run."""
        return self._group_dir is not None and is_in_use(run)

    # The right to write

    @property
    def _own_dir(self) -> Path:
        return self.dir / self._group_dir if self._group_dir else self.dir

    def enter(self) -> str:
        """Make the directory if necessary, and become its writer; return the id of the run. Call once."""
        if not self._only_looks:
            if not self._locks:
                self._lock(self._own_dir)
                self._wait_for_background_writers()
                if self.from_scratch:
                    self._refuse_run()  # the process that was waited for may have written one
            self._lock_checkpoints()
        if not self.from_scratch:
            self.id = self._id_in(self.dir) or self._asked_id
        return self.id

    def inherit(self) -> None:
        """Become the writer in the place of one that has ended: its lock falls with it, and what it wrote in the background is awaited."""
        if self._only_looks:
            return
        self._lock(self._own_dir)
        self._wait_for_background_writers()
        self._lock_checkpoints()

    def _lock_checkpoints(self) -> None:
        """Become the writer of a directory of checkpoints that is not below that of the run."""
        checkpoints = self._checkpoint_dir
        # Each replica group locks it later, when it writes the full checkpoints.
        if checkpoints is None or self._group_dir is not None:
            return
        if self.dir not in (checkpoints, *checkpoints.parents):
            self._lock(checkpoints)

    def enter_to_train(self, *, resumed: bool) -> None:
        """Become the writer of a directory that was entered to look only, since training begins in it."""
        if self._locks:
            return
        if not resumed and self._holds_run(self.dir):
            raise ValueError(
                f"Expected a directory without a run to train in from scratch. Received: {self.dir}, which holds one, and "
                "checkpoint.load_only=true, which writes nothing to it. Set `dir` to another directory, or load a checkpoint first."
            )
        self._lock(self._own_dir)

    def _wait_for_background_writers(self) -> None:
        """Wait until a killed run has written what it had left to write. Replica groups of one job share the directory."""
        if self._group_dir is not None:
            return
        checkpoints = self._checkpoints_of(self.dir)
        writing = (name for name in _names(checkpoints) if name.startswith(WRITING))
        for name in sorted(writing):
            lock = FileLock(checkpoints / name)
            if not lock.wait(self._wait_seconds):
                raise RunInUseError(
                    f"Expected {checkpoints} to be free. Received: a directory that is written to in the background by {lock.holder}. "
                    "Wait until it has ended, or name another `dir`."
                )
            lock.release()  # which removes the file

    def make(self, directory: Path) -> bool:
        """Make a directory and those above it; return whether this call has made it."""
        # What this call makes and nothing is written to, `release` removes again.
        missing = [path for path in (directory, *directory.parents) if not os.path.lexists(path)]
        made = False
        with _file_in_the_way(directory):
            directory.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory)
                made = True
        make_directory(directory)
        self._made += [path for path in reversed(missing) if path != directory or made]
        return made

    def _lock(self, directory: Path) -> None:
        """Make a directory, and become its one writer, waiting if necessary."""
        self.make(directory)
        lock = FileLock(directory / LOCK)
        if not lock.wait(self._wait_seconds):
            is_mine = lock.holder.pid == os.getpid()
            own = ", which is this process: close the runner that has it first" if is_mine else ""
            # In a notebook, a cell that is run again makes a new runner while the old one still exists.
            if not (is_mine and self._reruns and lock.take_over()):
                raise RunInUseError(
                    f"Expected {directory} to be free. Received: a directory that is in use by {lock.holder}{own}. "
                    "Wait until it has ended, name another `dir`, or set checkpoint.load_only=true to look only."
                )
            logger.info(
                "This runner writes into %s from now on; an earlier one of this notebook does not.",
                directory,
            )
        self._locks.append(lock)

    def _try_lock(self) -> FileLock | None:
        """Become the writer of the directory if no other process is; return the lock."""
        self.make(self._own_dir)
        lock = FileLock(self._own_dir / LOCK)
        if not lock.wait(_MOMENT_SECONDS):
            return None
        self._locks.append(lock)
        return lock

    def confirm(self) -> None:
        """Check, before something is written, that this process still has the right."""
        for lock in self._locks:
            directory = lock.file.parent
            if self._reruns and not lock.held:
                raise RunInUseError(
                    f"Expected the runner that was constructed last to write into {directory}. Received: an earlier one of this notebook. "
                    "Use the later one, or construct this one again."
                )
            if not lock.confirm():
                raise RunInUseError(
                    f"Expected this process to be the one that writes into {directory}. Received: a directory that {lock.holder} has taken "
                    f"since {lock.file.name} there was removed, or opened and closed by this program, as by copying the directory. Leave "
                    "that file alone."
                )
            if lock.was_removed:
                self._refuse_used_meanwhile(lock)
        self._described = self._description()

    def _refuse_used_meanwhile(self, lock: FileLock) -> None:
        """Refuse to continue where a process may have come and gone while the lock had no file: every start describes itself."""
        if (
            self._described is None
            or self._described != self._description()
            or lock.file.parent != self._own_dir
        ):
            raise RunInUseError(
                f"Expected this process to be the only one that has written into {lock.file.parent}. Received: a directory whose "
                f"{lock.file.name} was removed, in which another process may have started since. Leave that file alone, and start this "
                "program again."
            )
        lock.was_removed = False
        logger.warning(
            "%s was removed while this process writes there; it is back. Leave that file alone.",
            lock.file,
        )

    def _description(self) -> tuple[int, int] | None:
        """Return what tells whether a start has written its configuration since."""
        # The file is replaced at each start, so that it has another inode.
        with contextlib.suppress(OSError):
            about = os.stat(self._own_dir / _CONFIG)
            return about.st_ino, about.st_mtime_ns
        return None

    def release(self) -> None:
        """Give the right back, and remove the directories that were made and are empty. A second call does nothing."""
        locks, self._locks = self._locks, []
        for lock in reversed(locks):
            lock.release()
        made, self._made = self._made, []
        for directory in reversed(made):
            with contextlib.suppress(OSError):
                os.rmdir(directory)

    # Runs that are there

    def _checkpoints_of(self, run: Path) -> Path:
        return self._checkpoint_dir or run / self._config.checkpoint.dir_name

    def _holds_run(self, run: Path) -> bool:
        """Whether a directory holds a checkpoint or a line of metrics, which a start from scratch must not touch."""
        return holds_checkpoint(run / self._config.checkpoint.dir_name) or holds_metrics(run)

    def _id_in(self, run: Path) -> str | None:
        """Return the id under which the run resumes in a run directory; `None` where that holds another run.

        A seed that was drawn is part of the configuration of a checkpoint, but not of the id of its run: such a run keeps its id.
        """
        from danling.checkpoints.directory import newest_record  # torch

        record = newest_record(run / self._config.checkpoint.dir_name)
        if record is None:
            return self._asked_id if number_of(run.name, self._asked_id) is not None else None
        if record.run == self._asked_id:
            return self._asked_id
        is_same = _code_of(record.run) == self._code_id and self._differences(run) == []
        return record.run if is_same else None

    def _differences(self, run: Path) -> list[str] | None:
        """Return how the run in a directory differs in what changes the result, a line for each key; `None` where none can be read."""
        from danling.checkpoints.reading import stored_settings  # torch

        stored = stored_settings(run / self._config.checkpoint.dir_name)
        if stored is None:
            return None
        return self._config.differences(
            stored[0], stored_replicas=stored[1], replicas=self._replicas
        )

    def _refuse_run(self) -> None:
        """Refuse to begin anew in a directory that holds a run."""
        self._refuse_checkpoints()
        if self._holds_run(self.dir) and not self._joins(self.dir):
            what = "metrics in metrics.jsonl" if holds_metrics(self.dir) else "a checkpoint"
            raise self._refusal("dir", self.dir, what)

    def _refuse_checkpoints(self) -> None:
        directory = self._checkpoint_dir
        if directory is None or self._only_looks or self._group_dir is not None:
            return
        if not self._resumes_in(directory) and holds_checkpoint(directory):
            raise self._refusal("checkpoint_dir", directory, "a checkpoint")

    def _refusal(self, key: str, directory: Path, what: str) -> ValueError:
        resume = self._config.resume
        begins = (
            "starts from scratch"
            if resume is None
            else f"resumes from resume={resume!r}, which is elsewhere"
        )
        differences = self._differences(directory if key == "dir" else directory.parent) or ()
        differences = [
            line for line in differences if not line.endswith("now absent")
        ]  # what __init__ has yet to set
        others = f", whose configuration differs: {'; '.join(differences)}" if differences else ""
        return ValueError(
            f"Expected {key} to be a directory without a run, since this one {begins}. Received: {key}={str(directory)!r}, which holds one "
            f"({what}){others}. To continue that run, use its configuration with auto_resume=true and without resume; "
            f"to start another one, set {key} to another directory; to load its checkpoints without training, set "
            "checkpoint.load_only=true."
        )

    def _refuse_other_update_sizes(self) -> None:
        """Refuse to begin anew where the same settings have made a run on another number of ranks.

        Its updates have another size, so that it is another run; but a user who starts fewer processes wants to resume.
        """
        from danling.config import identity

        settings = self._config.plain()
        own = identity.update_sizes(settings, 1).get("dataloader")
        if own is None:
            return
        for name in sorted(_names(self._family)):
            run, id = self._family / name, _NUMBER.sub("", name)
            try:
                stored = parse_yaml(read_text(run / "metadata" / "config.canonical.yaml"))
            except (OSError, ValueError, yaml.YAMLError):
                continue
            if not isinstance(stored, dict) or _code_of(id) != self._code_id:
                continue
            made = identity.update_sizes(stored, 1).get("dataloader")
            if made is None or made.samples % own.samples:
                continue
            # The id that this configuration has on as many ranks as made that run.
            then = identity.canonical(settings, replicas=made.samples // own.samples)
            is_same = id[-_DIGITS:] == identity.digest(then)
            if is_same and (differences := self._differences(run)):
                raise CheckpointMismatch(
                    f"Expected auto_resume to continue with updates of the same size. Received: {'; '.join(differences)}; the run in {run} "
                    "has the same settings. Start as many processes as then, or keep the product by another batch_size or accum_steps; "
                    "dataloader.global_batch_size keeps it at any number. For a new run, start once without auto_resume."
                )


def family_of(lineage: str, code_id: str | None) -> str:
    """Return the name of the directory of the runs of a lineage: with the id of the code, where there is git."""
    return f"{lineage}-{code_id}" if code_id else lineage


def member(id: str, number: int) -> str:
    """Return the name of the directory of the `number`-th run of an id, counted from 1."""
    return id if number == 1 else f"{id}-{number}"


def number_of(name: str, id: str) -> int | None:
    """Return which run of an id a directory of that name holds; `None` when it holds none of it."""
    if name == id:
        return 1
    found = _NUMBERED.fullmatch(name)
    if found is None or found[1] != id:
        return None
    # Not `id-1`, which is no name of a run, nor digits that are not those of ASCII.
    number = int(found[2])
    return number if name == member(id, number) else None


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
    return "targets" in names and any(
        "manifest.sha256" in _names(targets / target) for target in _names(targets)
    )


def holds_metrics(run: Path) -> bool:
    """Whether a line of metrics was written in a run directory, or in that of a replica group within it."""
    return any(has_line(directory / "metrics.jsonl") for directory in (run, *_group_dirs(run)))


def has_line(file: Path) -> bool:
    """Whether a file has a whole line, or cannot be read: it may be another program's."""
    # A line of metrics is shorter than this by far.
    try:
        with open_file(file) as lines:
            return b"\n" in lines.read(1 << 16)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def is_in_use(run: Path) -> bool:
    """Whether a process writes into a run directory, or into that of a replica group within it."""
    return any(FileLock(directory / LOCK).is_taken() for directory in (run, *_group_dirs(run)))


def run_of(checkpoint: Path, group_dir: str | None = None) -> Path | None:
    """Return the run directory that contains a checkpoint, `None` for one that was copied out of it."""
    source = Path(os.path.realpath(checkpoint))
    if not source.exists():
        return None
    # A single file next to the metadata of a run is no checkpoint of it: those have their own directory.
    above = (source, *source.parents) if source.is_dir() else tuple(source.parents)[1:]
    for directory in above[:4]:
        if (directory / _CONFIG).is_file() or (
            group_dir and (directory / group_dir / _CONFIG).is_file()
        ):
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


def _code_of(id: str) -> str:
    return id[:-_DIGITS].removesuffix("-")


def _group_dirs(run: Path) -> Iterator[Path]:
    """Yield the directories below a run directory, in each of which a replica group may write."""
    return (run / name for name in sorted(_names(run)) if (run / name).is_dir())


def _names(directory: Path) -> set[str]:
    try:
        return set(os.listdir(directory))
    except OSError as error:
        # Nothing is there, or a link that leads to itself. A directory that may not be read is an
        # error: it would look as if it held no run.
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return set()
        raise

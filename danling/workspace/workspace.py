"""Where the files of a run are, the small files that describe it, and the state of its code."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from danling.utils.files import clear_places, read_bytes, refuse_link, write_atomically, write_error
from danling.utils.messages import clause
from danling.utils.plain import json_text, to_plain, yaml_text
from danling.utils.process import in_notebook
from danling.utils.secrets import redact_patch, secret_values, without_secrets

from .run_directory import RunDirectory, absolute, family_of, make_directory, number_of

if TYPE_CHECKING:
    from danling.config import RunnerConfig
    from danling.remote.attach import RemoteStores
    from danling.runners.base_runner import BaseRunner

logger = logging.getLogger("danling")

PathLike = str | os.PathLike[str]

_CONFIGS = ("full", "canonical", "diff")
_DESCRIPTION = (*(f"config.{name}.yaml" for name in _CONFIGS), "git.yaml", "git.diff", "run.json")
_UNFINISHED = re.compile(r"\..+\.[0-9a-z_]{8}\.tmp")
_YOUNG_SECONDS = 60.0

_SHORT = 7
_NAMED_UNTRACKED = 100
_GIT_TIMEOUT_SECONDS = 60.0
# The names of untracked files are only noted: a start does not wait long for a large tree of them.
_LISTING_TIMEOUT_SECONDS = 5.0
# Every option that a user's git configuration could change is fixed: the same tree must give the same bytes everywhere.
_DIFF = (
    *(
        "-c",
        "core.quotePath=true",
        "diff",
        "--no-ext-diff",
        "--no-textconv",
        "--no-color",
        "--no-renames",
    ),
    *(
        "--no-relative",
        "--binary",
        "--full-index",
        "--unified=3",
        "--inter-hunk-context=0",
        "--diff-algorithm=myers",
    ),
    *("--indent-heuristic", "--submodule=short", "--src-prefix=a/", "--dst-prefix=b/", "HEAD"),
)

# What a checkpoint records of places: where its run wrote, on the machine that it ran on.
PLACES = frozenset(
    {
        *(
            "dir",
            "checkpoint_dir",
            "log_file",
            "workspace_root",
            "init_method",
            "resume",
            "auto_resume",
            "pretrained",
        ),
        *(
            "wandb.dir",
            "mlflow.uri",
            "profiling.trace_dir",
            "heartbeat.dir_name",
            "compile.precompile_artifact_dir",
        ),
        "checkpoint.remote.url",
    }
)
# Names of single directories, which are where the run is: they are kept unless they lead out of it.
DIRECTORY_NAMES = frozenset(
    {"lineage", "checkpoint.dir_name", "checkpoint.ft_dataloader_checkpoint_prefix"}
)
_ENGINE_PLACES = re.compile(r"deepspeed\.(.*\.)?[a-z_]*_(path|dir|file)")
# DeepSpeed joins these to a directory, of which nothing is left where they are paths themselves.
_ENGINE_NAMES = re.compile(r"deepspeed\.(.*\.)?job_name")
_PLAIN_NAME = re.compile(r"[^/\\\0]+")


@dataclass(frozen=True)
class CodeIdentity:
    """The state of the code that a run was started from.

    Untracked files do not count: a run that writes below its own repository would otherwise change its identity from
    one attempt to the next, and `auto_resume` would never find it. Their names are in `git.yaml`.
    """

    sha: str | None = None
    branch: str | None = None
    """`None` when the head is detached."""
    diff: bytes = b""
    """`git diff HEAD` of the whole repository. Bytes, since tracked files may be in any encoding."""
    untracked: tuple[str, ...] = ()

    @classmethod
    def of_directory(cls, directory: str | os.PathLike[str] | None = None) -> CodeIdentity:
        """Read the identity of the repository around `directory`.

        Without git, repository or commit the identity is empty. `None` is the working directory.
        """
        where = Path(directory or ".")
        head = _git(where, "rev-parse", "HEAD", "--abbrev-ref", "HEAD")
        if head is None:
            return cls()
        sha, branch = head.decode().split()
        diff = _git(where, *_DIFF)
        # Without the diff, the commit would name code that was not run.
        if diff is None:
            return cls()
        return cls(sha, None if branch == "HEAD" else branch, diff, _untracked(where))

    @property
    def dirty(self) -> bool:
        """Whether a tracked file differs from the commit."""
        return bool(self.diff)

    @cached_property
    def diff_sha(self) -> str | None:
        """First 10 hexadecimal digits of the SHA-256 of the diff; `None` when clean."""
        return hashlib.sha256(self.diff).hexdigest()[:10] if self.diff else None

    @property
    def code_id(self) -> str | None:
        """`<short_sha>`, or `<short_sha>-d<diff_sha>` when dirty; `None` without git."""
        # Not git's own abbreviation, whose length differs from clone to clone.
        short_sha = self.sha[:_SHORT] if self.sha else None
        return short_sha if self.diff_sha is None else f"{short_sha}-d{self.diff_sha}"

    def describe(self) -> dict[str, object]:
        """Return the content of `git.yaml`: plain values, without the diff itself; `None` for what only git knows, where there is none."""
        return {
            "code_id": self.code_id,
            "sha": self.sha,
            "branch": self.branch,
            "dirty": self.dirty if self.sha else None,
            "diff_sha": self.diff_sha,
            "untracked": list(self.untracked),
        }


def _untracked(directory: Path) -> tuple[str, ...]:
    # Of the whole repository (`:/`), a directory without tracked files as one name, ended by zeros.
    listing = (
        "ls-files",
        "--others",
        "--exclude-standard",
        "--directory",
        "--full-name",
        "-z",
        "--",
        ":/",
    )
    names = _git(directory, *listing, timeout=_LISTING_TIMEOUT_SECONDS) or b""
    return tuple(os.fsdecode(name) for name in names.split(b"\0") if name)[:_NAMED_UNTRACKED]


def _git(directory: Path, *arguments: str, timeout: float = _GIT_TIMEOUT_SECONDS) -> bytes | None:
    # Without optional locks, reading never disturbs a git command that the user runs meanwhile.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    command = ["git", "-C", str(directory), *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            check=True,
            stdin=subprocess.DEVNULL,
            timeout=timeout,
            env=environment,
        )
    except (OSError, subprocess.SubprocessError) as error:
        logger.debug("git %s gave nothing: %s", arguments[0], error)
        return None
    return done.stdout


# A link in the place of one of these would have a run write and remove files somewhere else.
_OWN_DIRECTORIES = ("metadata", "logs", "tensorboard", "profiles", "heartbeats", "hangs")
"""Directories in that of a run, into which it writes."""


class Workspace:
    """Paths of one attempt of a run, and the writing of its metadata and results.

        workspace_root/lineage[-code_id]/id/
          checkpoints/  logs/{timestamp}.log  tensorboard/{timestamp}/  wandb/
          metrics.jsonl  results.json  latest.json  best.json  progress.json  [streams.json]
          metadata/ config.full.yaml config.canonical.yaml config.diff.yaml git.yaml git.diff run.json

    Constructing touches no file. Paths are absolute, so that a later change of the working directory moves nothing.
    Every rank may read the paths; only the main process creates and writes, and on the others these calls do nothing.
    """

    def __init__(
        self,
        dir: PathLike,
        *,
        timestamp: str,
        is_main: bool = True,
        checkpoint_dir: PathLike | None = None,
        checkpoint_dir_name: str = "checkpoints",
        log_file: PathLike | None = None,
        group_dir: str | None = None,
        instance: str = "",
    ) -> None:
        self.is_main = is_main
        run_dir = absolute(dir)
        self.instance = instance or run_dir.name
        """Name of the run among those of one id, under which trackers have it."""
        self.dir = run_dir / group_dir if group_dir else run_dir
        self.checkpoints = absolute(checkpoint_dir or run_dir / checkpoint_dir_name)
        self.log_file = absolute(log_file or self.dir / "logs" / f"{timestamp}.log")
        self.tensorboard_dir = self.dir / "tensorboard" / timestamp
        self.wandb_dir = self.dir / "wandb"
        self.metadata_dir = self.dir / "metadata"
        self.jsonl_file = self.dir / "metrics.jsonl"
        self.results_file = self.dir / "results.json"
        self.latest_file = self.dir / "latest.json"
        self.best_file = self.dir / "best.json"
        self.digests_file = self.dir / "digests.jsonl"
        self.streams_file = self.dir / "streams.json"
        self.progress_file = self.dir / "progress.json"

    def latest_tensorboard_dir(self) -> Path | None:
        """Return the directory of the events of the last attempt that wrote some, `None` without one."""
        attempts = sorted(path for path in self.tensorboard_dir.parent.glob("*") if path.is_dir())
        return attempts[-1] if attempts else None

    def create(self) -> None:
        """Create the run directory on the main process; each writer creates its own files below it.

        It moves aside entries that have the name of a file or directory of the run and are none, such as a named pipe: they would block
        a restart.
        """
        if not self.is_main:
            return
        make_directory(self.dir)
        refuse_link(self.metadata_dir)
        for name in _OWN_DIRECTORIES:
            # A link that leads nowhere is moved aside below, or replaced by the code that makes the directory.
            if os.path.isdir(self.dir / name):
                refuse_link(self.dir / name)
        clear_places(directories=[self.metadata_dir, self.dir / "logs"])
        written = (
            self.jsonl_file,
            self.results_file,
            self.latest_file,
            self.best_file,
            self.streams_file,
            self.progress_file,
            self.digests_file,
        )
        clear_places(files=[*written, *(self.metadata_dir / name for name in _DESCRIPTION)])

    def write_metadata(
        self, config: RunnerConfig, code: CodeIdentity, *, replicas: int = 1
    ) -> None:
        """Write what the run was made of as YAML, on the main process; an earlier attempt's files are replaced.

        Lines of `git.diff` that look like secrets, or have a secret of the configuration, are replaced, and counted in `git.yaml`.

        Args:
            config: The configuration of the run.
            code: State of the code, empty without git.
            replicas: Ranks that read different samples.
        """
        if not self.is_main:
            return
        self._make_metadata_dir()
        secrets = config.secret_keys or ()
        changed = without_secrets(config.changed(), secrets)
        for name, values in zip(
            _CONFIGS, (config.public(), config.canonical(replicas=replicas), changed)
        ):
            write_atomically(self.metadata_dir / f"config.{name}.yaml", yaml_text(values))
        text, left_out = redact_patch(code.diff, secret_values(config.plain(), secrets))
        write_atomically(
            self.metadata_dir / "git.yaml",
            yaml_text({**code.describe(), "lines_left_out": left_out}),
        )
        # Where an earlier attempt has written one, it is not of this code.
        patch = self.metadata_dir / "git.diff"
        if config.git_diff and code.sha is not None:
            write_atomically(patch, text)
        else:
            patch.unlink(missing_ok=True)

    def _make_metadata_dir(self) -> None:
        try:
            self.metadata_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error("the metadata of the run", self.metadata_dir, error) from error

    def write_record(self, record: Mapping[str, object]) -> None:
        """Write `metadata/run.json` on the main process: what a run records of itself when it begins to train."""
        if self.is_main:
            self._make_metadata_dir()
            write_atomically(self.metadata_dir / "run.json", json_text(to_plain(record)))

    def write_results(
        self,
        results: Mapping[Any, Any],
        latest: Mapping[str, object] | None,
        best: Mapping[str, object] | None,
    ) -> None:
        """Write `results.json`, `latest.json` and `best.json` on the main process; `None` removes the file of an earlier attempt.

        They are JSON for every reader: keys are strings, and NaN and infinities, which JSON lacks, are `null`. A file
        whose content stays the same is left alone.
        """
        if not self.is_main:
            return
        for path, content in (
            (self.results_file, results),
            (self.latest_file, latest),
            (self.best_file, best),
        ):
            if content is None:
                path.unlink(missing_ok=True)
                continue
            text = json_text(to_plain(content)).encode()
            # Its time tells readers when there was something new.
            if not _holds(path, text):
                write_atomically(path, text)

    def write_streams(self, streams: Mapping[str, Mapping[str, object]]) -> None:
        """Write `streams.json` on the main process. It is for people who look: a file that cannot be written is no error."""
        if not self.is_main:
            return
        text = json_text({name: dict(found) for name, found in streams.items()})
        try:
            write_atomically(self.streams_file, text)
        except OSError as error:
            text = clause(error)
            logger.warning("How far the streams of this run are could not be written: %s.", text)


def _holds(path: Path, content: bytes) -> bool:
    """Whether a regular file has this content; not more than that is read of it."""
    try:
        return read_bytes(path, limit=len(content), follow=False) == content
    except (OSError, ValueError):
        return False


@dataclass(frozen=True)
class JoinedRun:
    """A run that is under way, and where it is: an elastic rank joins it."""

    id: str
    dir: str
    code_id: str | None
    config_id: str
    timestamp: str
    seed: int

    @property
    def names(self) -> tuple[str | None, str, str]:
        """The ids of code and configuration, and the time of the attempt."""
        return self.code_id, self.config_id, self.timestamp


class RunLocation:
    """Names a run, chooses its directory, and holds the right to write into it.

    Every method but `workspace`, `confirm` and `release` is called on all ranks: the main process acts, the others are told the result.
    """

    def __init__(
        self, runner: BaseRunner, stores: RemoteStores | None, joined: JoinedRun | None = None
    ) -> None:
        self._runner = runner
        self.stores = stores
        """Object stores, where the run is copied to one."""
        self._directory: RunDirectory | None = None
        """On the main process."""
        world, replicas = runner.world, runner.placement.data_replicas
        self.code = CodeIdentity()
        self.code_id: str | None
        self._joined = joined
        if joined is not None:
            # The run is under way: this rank is told where, and writes nothing.
            self.notice: str | None = None
            self.code_id, self.config_id, self.timestamp = joined.names
            self.id = joined.id
            self.dir = Path(joined.dir)
            self._chosen_for = self._places()
            return

        def name() -> tuple[str | None, str, str]:
            self.code = CodeIdentity.of_directory()
            now = datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")
            return self.code.code_id, now, runner.config.config_id(replicas=replicas)

        self.code_id, self.timestamp, self.config_id = world.on_first(name)
        self.choose()

    def choose(self) -> None:
        """Choose the run directory, and give an earlier choice up."""
        self.release()
        self.id = f"{self.code_id}-{self.config_id}" if self.code_id else self.config_id
        self._chosen_for = self._places()
        self.dir, self.id, self.notice = self._runner.world.on_first(self._choose)

    def _choose(self) -> tuple[Path, str, str | None]:
        group_dir = self._group_dir()
        chosen = self._directory = RunDirectory(
            self._runner.config,
            self.id,
            code_id=self.code_id,
            group_dir=group_dir,
            replicas=self._runner.placement.data_replicas,
            elsewhere=self._numbers_in_store,
            reruns=group_dir is None and in_notebook(),
        )
        return chosen.dir, chosen.id, chosen.notice

    def _numbers_in_store(self) -> list[int]:
        # A directory whose machine was lost is known by its copy only.
        names = self.stores.runs(self.family, self.id) if self.stores is not None else ()
        return sorted(number for name in names if (number := number_of(name, self.id)) is not None)

    def _group_dir(self) -> str | None:
        """Return the directory of this replica group below the run directory: several processes must not write into one log."""
        ft, checkpoint = self._runner.config.ft, self._runner.config.checkpoint
        return (
            f"{checkpoint.ft_dataloader_checkpoint_prefix}-{ft.replica_id}" if ft.enabled else None
        )

    def _places(self) -> tuple[object, ...]:
        """Return the settings by which the directory is chosen, to see whether they have changed."""
        config = self._runner.config
        return (
            config.get("dir", None),
            config.get("checkpoint_dir", None),
            config.workspace_root,
            config.lineage,
            config.resume,
            config.auto_resume,
            config.checkpoint.dir_name,
            self._group_dir(),
        )

    def open(self, *, code_id: str | None, config_id: str, timestamp: str) -> Workspace:
        """Become the writer of the run directory, create it, and remove the files that a killed attempt has left in it.

        The directory is chosen anew where a place in the configuration has changed since.
        """
        self.code_id, self.config_id = code_id, config_id
        if self._joined is not None:
            return self.workspace(timestamp)
        if self._places() != self._chosen_for:
            self.choose()
        directory = self._directory
        self.id = self._runner.world.on_first(
            lambda: directory.enter() if directory is not None else self.id
        )
        workspace = self.workspace(timestamp)
        workspace.create()
        if workspace.is_main and not self._runner.config.checkpoint.load_only:
            remove_litter(workspace.dir)
        return workspace

    def inherit(self, workspace: Workspace) -> None:
        """Become the writer of the run directory in the place of a main process that has ended. Called on the new one."""
        config = self._runner.config
        self._directory = RunDirectory(
            config, self.id, code_id=self.code_id, inherited=workspace.dir
        )
        self._directory.inherit()
        workspace.is_main = True

    def write_metadata(self, workspace: Workspace, *, foreign: Callable[[], bool]) -> None:
        """Write what the run was made of, unless this process only looks at the run."""
        config = self._runner.config
        described = workspace.metadata_dir / "config.full.yaml"
        # A process that only looks describes a run that lacks a description, and no other one.
        if config.checkpoint.load_only and (
            foreign() or self._runner.world.on_first(described.is_file)
        ):
            return
        workspace.write_metadata(config, self.code, replicas=self._runner.placement.data_replicas)

    def workspace(self, timestamp: str) -> Workspace:
        """Return the paths of the run; no file is touched."""
        config = self._runner.config
        return Workspace(
            self.dir,
            timestamp=timestamp,
            is_main=self._runner.world.rank == 0,
            checkpoint_dir=config.get("checkpoint_dir", None),
            checkpoint_dir_name=config.checkpoint.dir_name,
            log_file=config.get("log_file", None),
            group_dir=self._group_dir(),
            instance=self.instance,
        )

    @property
    def instance(self) -> str:
        """Name of this run among those of one id: the id, or the id with `-2`, `-3`, ..."""
        name = self.dir.name
        return name if number_of(name, self.id) is not None else self.id

    @property
    def family(self) -> str:
        """Name of the directory of the runs of this lineage."""
        return family_of(self._runner.config.lineage, self.code_id)

    def enter_to_train(self, *, resumed: bool) -> None:
        """Become the writer of a directory that was entered to look only, since training begins."""
        directory = self._directory
        self._runner.world.on_first(
            lambda: directory.enter_to_train(resumed=resumed) if directory else None
        )

    def confirm(self) -> None:
        """Check that this process is still the writer of the directory; on the main process."""
        if self._directory is not None:
            self._directory.confirm()

    def release(self) -> None:
        """Give the right to write up; a second call does nothing."""
        if self._directory is not None:
            self._directory.release()


def is_unfinished(name: str) -> bool:
    """Whether a small file of that name was not finished, or is being written."""
    return _UNFINISHED.fullmatch(name) is not None


def litter_in_run(run: Path) -> list[Path]:
    """Return the unfinished small files that killed processes have left in a run directory, sorted; its checkpoints are not looked at."""
    found = []
    # What a link leads to is the user's.
    below = [run / name for name in ("metadata", "heartbeats", "profiles", "compiled")]
    for directory in (run, *(path for path in below if not os.path.islink(path))):
        with contextlib.suppress(OSError), os.scandir(directory) as entries:
            files = [entry for entry in entries if entry.is_file(follow_symlinks=False)]
            found += [Path(file.path) for file in files if is_unfinished(file.name)]
    return sorted(found)


def remove_litter(run: Path) -> None:
    """Remove them. Called by the one writer of the directory; what cannot be removed does no harm."""
    for file in litter_in_run(run):
        with contextlib.suppress(OSError):
            # Other ranks of this start may be writing their first heartbeats.
            of_main = file.parent == run or file.parent.name == "metadata"
            if of_main or time.time() - file.stat().st_mtime > _YOUNG_SECONDS:
                file.unlink()


def without_places(stored: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return the configuration of a checkpoint without the places in it: they are recorded, and never obeyed.

    The author of the checkpoint could otherwise choose the files that the reader writes to, and a copied one would write into the run
    directory of the machine that it came from. The user's own sections are left as they are.
    """
    kept: dict[str, Any] = {}
    for name, value in stored.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            kept[name] = without_places(value, f"{key}.")
        elif not _is_place(key, value):
            kept[name] = value
    return kept


def _is_place(key: str, value: object) -> bool:
    if key in PLACES or _ENGINE_PLACES.fullmatch(key):
        return True
    if key not in DIRECTORY_NAMES and not _ENGINE_NAMES.fullmatch(key):
        return False
    return not isinstance(value, str) or not _PLAIN_NAME.fullmatch(value) or value in (".", "..")

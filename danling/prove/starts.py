"""Starts a script with the tape in its processes, waits for the records, and ends all of its processes."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

import torch

from danling.utils.messages import first_of
from danling.utils.process import held_port

from .differences import NotChecked
from .guard import end_marked
from .inside.tape import VARIABLE, Job
from .program import (
    ProgramEnd,
    announce,
    end_program,
    kill_program,
    rank_variables,
    start_program,
)

_SITE = Path(__file__).parent / "site"
_POLL_SECONDS = 0.05
_SECONDS_FOR_OTHERS = 60.0
"""How long the other ranks may take once one has made its last update."""
_COPIED_BYTES = 1 << 30
_COPIED_FILES = 5000
"""Size and number of the files of the working directory that a start has a copy of."""
_TAIL_LINES = 12

_NO_TRACKERS = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "SWANLAB_MODE": "disabled",
    "CLEARML_OFFLINE_MODE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


def reason_of(error: Exception) -> str:
    """Return why a script was not checked: what is wrong with it, or the traceback of an error of the comparison."""
    return (
        str(error)
        if isinstance(error, NotChecked)
        else f"the comparison fails:\n{''.join(traceback.format_exception(error))}"
    )


@dataclass(frozen=True)
class Script:
    """A script, and how it is started.

    Attributes:
        command: The command for several processes.
        scratch: Directory of the records.
        one: The command for one process.
        ranks: Processes to start here; `None` where the command starts them.
        timeout: Seconds that a start may take.
    """

    command: Sequence[str]
    scratch: Path
    one: Sequence[str]
    ranks: int | None = None
    timeout: float = 600.0
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Have no process of the script be left afterwards, even where this process is killed."""
        # In its own session, so that a signal for this process group does not end it before the script.
        guard = subprocess.Popen(
            [sys.executable, "-I", os.fspath(Path(__file__).with_name("guard.py")), self.token],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            yield
        finally:
            # The guard waits for the end of its input, which a kill of this process brings too.
            if guard.stdin is not None:
                guard.stdin.close()
            guard.wait()

    def copied(self, name: str) -> Path:
        """Return a copy of the working directory; files that are links to the originals are named once."""
        linked = copy_directory(Path.cwd(), self.scratch / name)
        if linked:
            _name_links(tuple(linked))
        return self.scratch / name

    def start(
        self, name: str, job: Job, *, alone: bool, directory: Path | None = None, ends: bool = False
    ) -> int:
        """Start the script, and return the number of its ranks once all have written their records.

        Args:
            name: Name of the start.
            job: What to record, in which the directory and the token are filled in.
            alone: Whether it is started in one process.
            directory: Directory to run in; `None` makes a copy of this one, which is removed.
            ends: Whether the script may also end by itself.

        Raises:
            NotChecked: If the script ends before, or takes too long.
        """
        records = self.scratch / name
        records.mkdir(parents=True)
        # Two starts of one script would write the same outputs and checkpoints.
        work = directory or self.copied(f"{name}-work")
        settings = {**asdict(job), "directory": os.fspath(records), "token": self.token}
        try:
            with self._started(records, settings, alone, work) as processes:
                return self._wait(records, processes, job, alone, ends)
        finally:
            if directory is None:
                shutil.rmtree(work, ignore_errors=True)

    @contextmanager
    def _started(
        self, records: Path, settings: Mapping[str, object], alone: bool, work: Path
    ) -> Iterator[list[subprocess.Popen[bytes]]]:
        command = self.one if alone else self.command
        # `None` where the command starts the processes itself, also as one.
        number = 1 if alone and self.ranks is not None else self.ranks
        # Python runs `sitecustomize` of the first directory in each process of the script, also in those that a launcher starts.
        paths = [os.fspath(_SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **_NO_TRACKERS,
            "MLFLOW_TRACKING_URI": (self.scratch / "mlflow").as_uri(),
            "PYTHONPATH": os.pathsep.join(paths),
            # `__pycache__` in the copy is a link: bytecode would go into the original.
            "PYTHONDONTWRITEBYTECODE": "1",
            VARIABLE: json.dumps(dict(settings)),
        }
        if sys.platform == "linux" and not torch.cuda.is_available():
            # gloo looks the name of the machine up, which in many containers leads nowhere.
            environment["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        processes: list[subprocess.Popen[bytes]] = []
        try:
            # Held while the ranks start, since two checks at one time must not take one port.
            with held_port() as port:
                # Of torchrun, whose own default is one port for all.
                environment.setdefault(
                    "PET_MASTER_PORT", os.environ.get("PET_MASTER_PORT", str(port))
                )
                if number is not None:
                    environment |= rank_variables(number, port)
                for rank in range(number or 1):
                    own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if number is not None else {}
                    log = records / f"output-{rank}.log"
                    both = {**environment, **own}
                    try:
                        processes.append(
                            start_program(command, None, log=log, environment=both, directory=work)
                        )
                    except ValueError as error:
                        raise NotChecked(str(error)) from None
                yield processes
        finally:
            for process in processes:
                if process.poll() is None:
                    kill_program(process)
            # Those in another session or process group, as a launcher starts them.
            end_marked(self.token)
            for process in processes:
                end_program(process)

    def _wait(
        self,
        records: Path,
        processes: Sequence[subprocess.Popen[bytes]],
        job: Job,
        alone: bool,
        ends: bool,
    ) -> int:
        end = time.monotonic() + self.timeout
        others: float | None = None
        while True:
            exited = [process.poll() for process in processes]
            # Before the exit codes: the tape says more than the end of a process does.
            for file in records.glob("rank-*.failed"):
                raise NotChecked(file.read_text())
            done = sorted(records.glob("rank-*.end"))
            if done:
                number = int(done[0].read_text())
                if alone and number > 1:
                    raise NotChecked(
                        f"Expected a command for one process. Received: {shlex.join(self.one)!r}, which starts {number}. Give it by --one."
                    )
                if len(done) >= number:
                    return number
                others = others or time.monotonic() + _SECONDS_FOR_OTHERS
            # One rank that fails is enough: the others wait for it, mostly until their timeout.
            if all(code is not None for code in exited) or (len(exited) > 1 and any(exited)):
                if ends and not any(exited):
                    return len(list(records.glob("rank-*.jsonl")))
                raise self._ended(records, exited, job, alone)
            if time.monotonic() > end:
                raise self._failed(records, 0, f"no end in {self.timeout:g} s", job, alone)
            if others is not None and time.monotonic() > others:
                missing = len(done)
                raise self._failed(
                    records, 0, f"only {missing} of {number} ranks make so many updates", job, alone
                )
            time.sleep(_POLL_SECONDS)

    def _ended(
        self, records: Path, codes: Sequence[int | None], job: Job, alone: bool
    ) -> NotChecked:
        rank = next((rank for rank, code in enumerate(codes) if code), 0)
        code = codes[rank]
        return self._failed(records, rank, f"exit code {code}" if code else "it ended", job, alone)

    def _failed(self, records: Path, rank: int, how: str, job: Job, alone: bool) -> NotChecked:
        files = [*records.glob("rank-0.update-*.pt"), *records.glob("rank-0.jsonl")]
        updates = sum(len(f.read_text().splitlines()) if f.suffix == ".jsonl" else 1 for f in files)
        lines = (
            ProgramEnd(None, records / f"output-{rank}.log")
            .tail.strip()
            .splitlines()[-_TAIL_LINES:]
        )
        where = "in one process" if alone else "on its processes"
        printed = "".join(f"\n    {line}" for line in lines)
        return NotChecked(
            f"Expected a script that makes {job.updates} updates {where}. Received: {how} after {updates} updates of a torch optimizer. "
            f"The end of what it printed:{printed or ' nothing'}"
        )


def one_process(command: Sequence[str]) -> list[str] | None:
    """Return the command of a launcher for one process; `None` where it is not known which number it has to change."""
    words, launcher = list(command), _launcher(command)
    if launcher is None:
        return None
    names = _NUMBERS[launcher]
    found = False
    for at, word in enumerate(words):
        name, equals, _ = word.partition("=")
        if name in names:
            found = True
            if equals:
                words[at] = f"{name}=1"
            elif at + 1 < len(words):
                words[at + 1] = "1"
    if not found:
        at = next(at for at, word in enumerate(words) if os.path.basename(word) in _LAUNCHERS) + 1
        # `accelerate launch` has its options behind the second word.
        words[at + (launcher == "accelerate") : at + (launcher == "accelerate")] = [names[0], "1"]
    return words


_NUMBERS = {
    "torchrun": ("--nproc-per-node", "--nproc_per_node"),
    "accelerate": ("--num_processes", "--num-processes"),
    "deepspeed": ("--num_gpus", "--num_accelerators"),
}
_LAUNCHERS = {
    "torchrun": "torchrun",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
}


def _launcher(command: Sequence[str]) -> str | None:
    words = [os.path.basename(word) for word in command[:3]]
    return next((_LAUNCHERS[word] for word in words if word in _LAUNCHERS), None)


def private_directory(directory: Path) -> Path:
    """Return a directory for records and copies, which only its owner reads: it has pickles that are read again.

    Raises:
        ValueError: If it is not empty.
    """
    if directory.exists() and any(directory.iterdir()):
        raise ValueError(
            f"Expected --scratch to be a new or an empty directory. Received: {str(directory)!r}."
        )
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)
    return directory


def copy_directory(source: Path, target: Path) -> list[Path]:
    """Copy a directory, so that what a script writes does not change it; return what is a link to the original, since it is too large.

    The directory of the target is left out. Environments, `.git` and links to directories elsewhere are links, too.
    """
    source = source.resolve()
    files, size = _COPIED_FILES, _COPIED_BYTES
    linked: list[Path] = []
    queue = [(source, target)]
    while queue:
        here, there = queue.pop(0)
        there.mkdir(parents=True, exist_ok=True)
        for entry in _entries(here):
            path, own = Path(entry.path), there / entry.name
            if path == target.parent.resolve():
                continue
            real = Path(os.path.realpath(path))
            # A link within the directory leads into the copy, or writes would reach the original.
            if entry.is_symlink() and real.is_relative_to(source):
                own.symlink_to(target / real.relative_to(source))
                continue
            is_part = entry.is_dir(follow_symlinks=False) and not _is_environment(path)
            if is_part and files > 0:
                queue.append((path, own))
            elif entry.is_file() and files > 0 and entry.stat().st_size <= size:
                files, size = files - 1, size - entry.stat().st_size
                # Another process may remove a file meanwhile.
                with suppress(PermissionError, FileNotFoundError):
                    shutil.copy2(path, own)
            else:
                own.symlink_to(real)
                if is_part or entry.is_file():
                    linked.append(path)
    return linked


@cache
def _name_links(linked: tuple[Path, ...]) -> None:
    shown = first_of(linked, 3)
    announce(
        f"the working directory has more than {_COPIED_FILES} files or {_COPIED_BYTES >> 30} GiB, so {len(linked)} files or directories of "
        f"its copy are links: {shown}. What the script writes into them changes the originals; write to other files for the check"
    )


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    try:
        return sorted(os.scandir(directory), key=lambda entry: entry.name)
    except PermissionError:
        return []


def _is_environment(directory: Path) -> bool:
    return (
        directory.name in (".git", "node_modules", "__pycache__")
        or (directory / "pyvenv.cfg").exists()
    )

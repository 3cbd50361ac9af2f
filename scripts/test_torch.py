"""Run the tests with another torch, in an environment that is made when it is missing and kept in the user's cache directory.

    python scripts/test_torch.py [--python python3.12] 2.15.0 [arguments of pytest]
    python scripts/test_torch.py --quick [--third 2]

`--quick` takes the oldest and the newest torch (requirements-oldest.txt, requirements-newest.txt) and the tests of what touches torch's
internals; `--third` takes one of three parts of these. A version that cannot be installed is named at the end with pip's own line, which is
no failure; otherwise the exit status is 69. `--install` runs no tests.

The environment is `danling/venvs/torch-2.15.0-py3.12` in the user's cache. It has what danling and its tests require, and serves all
clones: danling itself is the one of this clone. An environment counts by the file `whole`, which is written last and has the
requirements; any other is removed and made again. Linux machines without an NVIDIA driver get the CPU build of torch where an index has
one, else the default build (`scripts/install_torch.sh`).
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
UNAVAILABLE = 69
# Their releases follow those of torch: the pins fit the pinned torch only.
FOLLOW_TORCH = ("torch", "torchvision")
QUICK = [
    f"tests/{room}" for room in ("mesh", "checkpoints", "training", "graph", "optim", "elastic")
]
VERSION = "import sys; print('{}.{}'.format(*sys.version_info))"


class CannotInstall(Exception):
    """An environment cannot be made on this machine."""


@dataclass(frozen=True)
class Environment:
    """What an environment has, and the moment (of `time.monotonic`) by which it is to be there."""

    torch: str
    base: str
    requirements: Sequence[str]
    constraints: Sequence[str]
    deadline: float

    @property
    def directory(self) -> Path:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        version = subprocess.run(
            [self.base, "-c", VERSION], capture_output=True, text=True, check=True
        ).stdout.strip()
        return cache / "danling" / "venvs" / f"torch-{self.torch}-py{version}"

    def python(self) -> Path:
        """Return the interpreter of the environment; make the environment if it is not there or has other requirements."""
        directory = self.directory
        python, stamp = directory / "bin" / "python", directory / "whole"
        wanted = "\n".join(
            [
                f"torch=={self.torch}",
                *self.requirements,
                *(f"-c {line}" for line in self.constraints),
            ]
        )
        directory.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{directory}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # The link to an interpreter remains where that was removed.
            if python.exists() and stamp.is_file() and stamp.read_text() == wanted:
                return python
            shutil.rmtree(directory, ignore_errors=True)
            print(f"Making {directory}, which takes some minutes", flush=True)
            try:
                self._install(directory, python, lock.fileno())
                stamp.write_text(wanted)
            except BaseException:
                shutil.rmtree(directory, ignore_errors=True)
                raise
        return python

    def _install(self, directory: Path, python: Path, lock: int) -> None:
        self._run([self.base, "-m", "venv", directory], lock)
        self._run([ROOT / "scripts" / "install_torch.sh", python, self.torch], lock)
        with tempfile.TemporaryDirectory() as folder:
            requirements, constraints = (
                Path(folder) / "requirements.txt",
                Path(folder) / "constraints.txt",
            )
            requirements.write_text("\n".join(self.requirements))
            constraints.write_text("\n".join([f"torch=={self.torch}", *self.constraints]))
            pip: list[str | Path] = [
                python,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
            ]
            self._run([*pip, "-r", requirements, "-c", constraints], lock)

    def _run(self, command: Sequence[str | Path], lock: int) -> None:
        """Run a command, which inherits the lock: if this process is killed alone, the next one waits for the end of its pip."""
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            pass_fds=[lock],
        )
        try:
            output, _ = process.communicate(timeout=max(0.0, self.deadline - time.monotonic()))
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise CannotInstall(
                f"{command[0]} was not done in the time of --seconds. {output}"
            ) from None
        if process.returncode:
            lines = [line for line in output.splitlines() if line.strip()]
            errors = [line for line in lines if line.startswith("ERROR")]
            raise CannotInstall(
                "\n".join(errors[-2:] or lines[-1:])
                or f"{command[0]} ended with {process.returncode}"
            )


def requirements_of(project: dict[str, Any], extra: str) -> Iterator[str]:
    """Yield what an extra requires, with the extras that it names."""
    for requirement in project["optional-dependencies"][extra]:
        named = re.fullmatch(r"danling\[([\w,]+)\]", requirement)
        if named is None:
            yield requirement
        else:
            for name in named[1].split(","):
                yield from requirements_of(project, name)


def pins_for_every_torch(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [line for line in lines if line.partition("==")[0] not in FOLLOW_TORCH]


def pinned_torch(file: str) -> str:
    found = re.search(r"^torch==(\S+)", (ROOT / file).read_text(), re.MULTILINE)
    if found is None:
        raise ValueError(f"Expected a line torch==VERSION in {file}.")
    return found[1]


def find_python(name: str) -> str:
    """Return an interpreter that runs; pyenv has a shim also for a version that is switched off."""
    versions = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    others = (
        [str(path) for path in sorted(versions.glob(f"*/bin/{name}"), reverse=True)]
        if "/" not in name
        else []
    )
    for candidate in (shutil.which(name), *others):
        if (
            candidate is not None
            and subprocess.run([candidate, "-c", VERSION], capture_output=True).returncode == 0
        ):
            return candidate
    raise CannotInstall(
        f"Expected an interpreter. Received: --python={name}, which does not run here."
    )


def environment_of(torch: str, base: str, seconds: float) -> Environment:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *requirements_of(project, "test")]
    constraints = pins_for_every_torch((ROOT / "constraints.txt").read_text())
    return Environment(torch, base, requirements, constraints, time.monotonic() + seconds)


def run_tests(python: Path, arguments: Sequence[str]) -> int:
    pytest = [str(python), "-m", "pytest", "-n", "2", "--dist", "worksteal", "-m", "not slow"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([*pytest, *arguments], cwd=ROOT, env=variables).returncode


def _end(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("torch", nargs="?", help="a version, such as 2.15.0")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a part of the tests with the oldest and the newest torch",
    )
    parser.add_argument(
        "--third", choices=["0", "1", "2"], help="with --quick: a third of its tests"
    )
    parser.add_argument(
        "--install", action="store_true", help="make the environments and run no test"
    )
    parser.add_argument(
        "--python", default=sys.executable, help="an interpreter; default: the one that runs this"
    )
    parser.add_argument(
        "--seconds", type=float, default=3600, help="limit for making an environment; default: 3600"
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of pytest")
    given = parser.parse_args(arguments)
    if (given.torch is None) != given.quick:
        parser.error("Expected a version of torch, or --quick.")
    signal.signal(signal.SIGTERM, _end)
    versions, tests = [given.torch], given.arguments
    if given.quick:
        versions, tests = (
            [pinned_torch(f"requirements-{which}.txt") for which in ("oldest", "newest")],
            [*QUICK, *(["--third", given.third] if given.third else [])],
        )
    failed, untested = 0, []
    for torch in versions:
        try:
            python = environment_of(torch, find_python(given.python), given.seconds).python()
        # OSError: such as a full disk, or a cache directory that is read-only.
        except (CannotInstall, OSError) as error:
            untested.append(
                f"NOT TESTED with torch {torch}: its environment cannot be installed here.\n{error}"
            )
            continue
        print(f"== torch {torch}: {python}", flush=True)
        if not given.install:
            failed = run_tests(python, tests) or failed
    for text in untested:
        print(f"{'#' * 100}\n{text}\n{'#' * 100}", flush=True)
    if untested and not given.quick:
        return UNAVAILABLE
    return failed


if __name__ == "__main__":
    sys.exit(main())

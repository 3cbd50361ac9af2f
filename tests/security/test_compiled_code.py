"""Compiled code that another user has put into a run: it is not used, nothing outside is touched, and nothing hangs."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.processes import fork, wait
from support.toys import Small
from support.toys import settings as toy_settings

from danling.distributed import LocalDomain
from danling.graph.artifacts import Artifacts
from danling.graph.compiler import cxx_version

CACHE = "TORCHINDUCTOR_CACHE_DIR"
ANOTHER = 65534
"""The user `nobody`."""
NO_NAMESPACES = 77

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None,
    reason="another user needs root and setpriv",
)
USERS = [pytest.param(None, id="own"), pytest.param(ANOTHER, id="another", marks=needs_root)]

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(cxx_version() is None, reason="compile.enable needs a compiler"),
]


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place that every user can reach, with the key and the temporary files of this one."""
    place = Path(tempfile.mkdtemp(prefix="danling-test-"))
    place.chmod(0o755)
    for name in ("private", "me"):
        (place / name).mkdir(0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(place / "private"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "me"))
    monkeypatch.delenv(CACHE, raising=False)
    yield place
    shutil.rmtree(place)


def made(root: Path, **compile: Any) -> Small:
    run = root / "run"
    if not run.exists():
        run.mkdir()
        run.chmod(0o777)
    return Small(toy_settings(run, steps=1, auto_resume=True, compile={"enable": True, **compile}))


def act(user: int | None, script: str, **places: Path) -> subprocess.CompletedProcess[str]:
    """Run a script of the shell as a user."""
    as_user = (
        [] if user is None else ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    )
    environment = {**os.environ, **{name: str(place) for name, place in places.items()}}
    command = [*as_user, "sh", "-c", f"umask 0; {script}"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def visible(folder: str | None) -> set[str]:
    """Return the names of the files that torch's compiler finds in its folder, which follows links."""
    assert folder is not None
    return {
        name
        for _, _, names in os.walk(folder, followlinks=True)
        for name in names
        if not name.endswith(".lock")
    }


def start(root: Path, *, compiles: str = "", **compile: Any) -> set[str]:
    """Start a run, and return the code that it finds; it may leave a file as its compiler does."""
    with made(root, **compile) as runner:
        assert runner.compilation is not None
        runner.compilation.open()
        with runner.compilation.settings():
            folder = os.environ.get(CACHE)
        found = visible(folder)
        if compiles:
            Path(str(folder), compiles).write_text("code")
    return found


def code_name(root: Path) -> str:
    """Return the name of the compiled code of a run."""
    with made(root) as runner:
        assert runner.compilation is not None and runner.compilation.artifacts is not None
        return runner.compilation.artifacts.path.name


PLANTS = {
    "linked folders": 'mkdir -p "$code" && ln -s "$canary" "$code/fxgraph" && ln -s "$canary" "$code/aotautograd"',
    "a relative link": 'mkdir -p "$code" "$run/hidden" && echo evil > "$run/hidden/evil" && ln -s ../../hidden "$code/fxgraph"',
    "an unlisted file": 'mkdir -p "$code/fxgraph" && echo evil > "$code/fxgraph/evil"',
    "a link": 'mkdir -p "$run/compiled" && ln -s "$canary" "$code"',
    "a link to the runs": 'mkdir -p "$run/compiled" && ln -s ../.. "$code"',
    "a link to a file": 'mkdir -p "$run/compiled" && ln -s "$canary/file.txt" "$code"',
    "a hard link": 'mkdir -p "$run/compiled" && (ln "$canary/file.txt" "$code" || true)',
    "a link above": 'ln -s "$canary" "$run/compiled"',
    "a pipe": 'mkdir -p "$run/compiled" && mkfifo "$code" "$code.lock"',
    "a pipe above": 'mkfifo "$run/compiled"',
    "a pipe inside": 'mkdir -p "$code" && mkfifo "$code/manifest.json"',
    "an enormous file": 'mkdir -p "$run/compiled" && truncate -s 100G "$code"',
    "a folder of rights": 'mkdir -m 0 -p "$code"',
}
"""What a user puts into a run before the first start, as a script of the shell."""


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("plant", PLANTS)
def test_planted_code_is_not_found_and_nothing_hangs(
    root: Path, canary: Path, plant: str, user: int | None
) -> None:
    name = code_name(root)
    shutil.rmtree(root / "run" / "compiled", ignore_errors=True)
    neighbour = root / "neighbour"
    neighbour.write_text("another run")
    done = act(
        user, PLANTS[plant], run=root / "run", code=root / "run" / "compiled" / name, canary=canary
    )
    assert done.returncode == 0, done.stderr
    assert start(root, compiles="mine.so") == set()
    assert start(root) <= {"mine.so"}
    assert neighbour.exists()


@pytest.mark.parametrize("user", USERS)
def test_lock_of_another_process_does_not_hang_the_start(root: Path, user: int | None) -> None:
    code = root / "run" / "compiled" / code_name(root)
    act(user, 'mkdir -p "$code" && touch "$code.lock"', code=code)
    as_user = (
        [] if user is None else ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    )
    command = [
        *as_user,
        "flock",
        "--no-fork",
        f"{code}.lock",
        "sh",
        "-c",
        "echo locked; exec sleep 90",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == b"locked\n"
            assert start(root) == set()
        finally:
            holder.kill()


@pytest.mark.parametrize("user", USERS)
def test_code_planted_during_a_run_is_not_signed(root: Path, user: int | None) -> None:
    name = code_name(root)
    code = root / "run" / "compiled" / name
    shutil.rmtree(root / "run" / "compiled", ignore_errors=True)
    act(user, 'mkdir -p "$code/fxgraph"', code=code)
    with made(root) as runner:
        assert runner.compilation is not None
        runner.compilation.open()
        with runner.compilation.settings():
            folder = Path(os.environ[CACHE])
        (folder / "mine.so").write_text("code")
        act(user, 'mkdir -p "$code/fxgraph"; echo evil > "$code/fxgraph/evil"', code=code)
        if user is not None:
            entered = act(user, 'echo evil > "$folder/evil"; ls "$folder"', folder=folder)
            assert entered.returncode != 0 and "evil" not in visible(str(folder))
    assert start(root) <= {"mine.so"}


@pytest.mark.parametrize("user", USERS)
def test_the_code_of_a_run_of_another_user_is_compiled_again(
    root: Path, user: int | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(root / "theirs"))
    start(root, compiles="theirs.so")
    assert start(root) == {"theirs.so"}
    for path in (root / "run" / "compiled").rglob("*"):
        os.chown(path, os.geteuid() if user is None else user, -1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(root / "me"))
    caplog.clear()
    assert start(root, compiles="mine.so") == set()
    warnings = [
        record.getMessage() for record in caplog.records if "compiled code" in record.getMessage()
    ]
    assert len(warnings) == 1 and "not as" in warnings[0]
    assert start(root) == {"mine.so"}


@needs_root
@pytest.mark.parametrize("rights", ["of another user", "writable by others"])
def test_shared_code_writable_for_another_user_is_not_used(
    root: Path, rights: str, caplog: pytest.LogCaptureFixture
) -> None:
    shared = root / "shared"
    start(root, compiles="theirs.so", precompile_artifact_dir=str(shared))
    (file,) = (path for path in shared.iterdir() if path.suffix != ".lock")
    if rights == "of another user":
        os.chown(file, ANOTHER, ANOTHER)
    else:
        file.chmod(0o666)
    content = file.read_bytes() if file.is_file() else b""
    caplog.clear()
    assert start(root, compiles="mine.so", precompile_artifact_dir=str(shared)) == set()
    assert file.read_bytes() == content
    assert [
        record
        for record in caplog.records
        if "another user's, or others can write to it" in record.getMessage()
    ]


@needs_root
@pytest.mark.parametrize("wrong", ["short", "of another user", "readable", "link", "pipe"])
def test_key_readable_for_others_signs_nothing(
    root: Path, canary: Path, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    key = root / "me" / "danling" / "key"
    key.parent.mkdir(parents=True)
    if wrong in ("link", "pipe"):
        key.symlink_to(canary / "file.txt") if wrong == "link" else os.mkfifo(key)
    else:
        key.write_bytes(b"" if wrong == "short" else bytes(32))
        key.chmod(0o644 if wrong == "readable" else 0o600)
        os.chown(key, ANOTHER if wrong == "of another user" else 0, -1)
    assert start(root, compiles="mine.so") == set()
    assert start(root) == set()
    assert [record for record in caplog.records if "nothing is kept" in record.getMessage()]


@needs_root
def test_a_temporary_directory_of_another_user_is_not_compiled_in(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = root / "theirs"
    theirs.mkdir(0o777)
    theirs.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(theirs))
    with made(root) as runner:
        assert runner.compilation is not None
        runner.compilation.open()
        with runner.compilation.settings():
            assert not str(os.environ.get(CACHE)).startswith(str(theirs / "danling-compiled"))
    assert [record for record in caplog.records if "set TMPDIR" in record.getMessage()]


@contextmanager
def opened(root: Path) -> Iterator[Path]:
    """Open shared code as one process, and yield its private folder."""
    code = Artifacts(root / "code", signed=False, world=LocalDomain(), leads=True)
    code.open()
    assert code.folder is not None
    try:
        yield code.folder
    finally:
        code.close()


def _alone_in_a_namespace(root: Path) -> None:
    """Become a user in whose namespace there is no other one, as in a container of Apptainer, and compile in /tmp."""
    if os.geteuid() == 0:
        os.setgid(ANOTHER - 1)
        os.setuid(ANOTHER - 1)
    user, libc = os.geteuid(), ctypes.CDLL(None)
    libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: else the mapping belongs to root
    if libc.unshare(0x10000000):  # CLONE_NEWUSER
        os._exit(NO_NAMESPACES)
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    assert os.stat("/").st_uid != 0
    tempfile.tempdir = "/tmp"
    with opened(root):
        pass


def test_root_outside_of_a_container_may_own_the_temporary_directory(root: Path) -> None:
    root.chmod(0o777)
    code = wait(fork(_alone_in_a_namespace, root))
    if code == NO_NAMESPACES:
        pytest.skip("the kernel gives users no namespaces")
    assert code == 0


def test_folders_of_other_machines_in_a_shared_temporary_directory_stay(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(host: str) -> Path:
        """Return the folder of a process of a machine, which no lock is seen on from another one."""
        with monkeypatch.context() as patched:
            patched.setattr(socket, "gethostname", lambda: host)
            with opened(root) as folder:
                pass
        folder.mkdir()
        return folder

    own, other = killed(socket.gethostname()), killed("other")
    with opened(root):
        assert not own.exists() and other.exists()

"""`make test-torch` keeps an environment for each torch: whole or not there, and made once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from support.pages import ROOT

from scripts.test_torch import CannotInstall, Environment, main, pinned_torch

MAKES = f"""
import sys
from scripts.test_torch import Environment
Environment("9.9.9", {sys.executable!r}, ["tool"], [], 1e5).python()
"""


def write_wheel(folder: Path, name: str, version: str) -> None:
    """Write a wheel with one module that says its version."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"__version__ = {version!r}\n")
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{info}/RECORD", "")


def environment(*requirements: str, seconds: float = 240.0) -> Environment:
    return Environment("9.9.9", sys.executable, requirements, [], time.monotonic() + seconds)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in the place of the registry, with a module in the place of torch; the cache directory is another one."""
    folder = tmp_path_factory.mktemp("wheels")
    for name, version in (("torch", "9.9.9"), ("tool", "1.0"), ("tool", "2.0")):
        write_wheel(folder, name, version)
    return folder


@pytest.fixture(autouse=True)
def registry(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {
        "NO_INDEX": "1",
        "FIND_LINKS": str(wheels),
        "CONFIG_FILE": os.devnull,
        "NO_CACHE_DIR": "1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def versions(python: Path) -> list[str]:
    program = "import tool, torch; print(torch.__version__, tool.__version__)"
    return subprocess.run(
        [python, "-I", "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "danling" / "venvs" / "torch-9.9.9-py{}.{}".format(*sys.version_info)


def write_environment(place: Path, interpreter: Path | str, requirement: str) -> None:
    """Write what is left of an environment: the link to its interpreter, and the file that says that it is whole."""
    (place / "bin").mkdir(parents=True)
    (place / "bin" / "python").symlink_to(interpreter)
    (place / "whole").write_text(f"torch==9.9.9\n{requirement}")


def test_whole_environment_is_kept(place: Path) -> None:
    write_environment(place, sys.executable, "tool")
    assert environment("tool", seconds=0.0).python() == place / "bin" / "python"


@pytest.mark.parametrize(
    ("interpreter", "requirement"),
    [(sys.executable, "another tool"), ("removed", "tool")],
    ids=["changed", "removed"],
)
def test_environment_with_other_requirements_or_without_interpreter_is_made_again(
    interpreter: str, requirement: str, place: Path
) -> None:
    write_environment(place, interpreter, requirement)
    with pytest.raises(CannotInstall, match="was not done in the time of --seconds"):
        environment("tool", seconds=0.0).python()
    assert not place.exists()


@pytest.mark.slow
def test_environment_of_a_killed_program_is_made_again(place: Path) -> None:
    wanted = environment("tool")
    with subprocess.Popen(
        [sys.executable, "-c", MAKES], cwd=ROOT, stdout=subprocess.DEVNULL
    ) as killed:
        while not (place / "bin" / "python").exists():
            assert killed.poll() is None
            time.sleep(0.01)
        killed.kill()
    assert wanted.directory == place and not (place / "whole").exists()
    # Waits for the program that makes it still, and begins at the beginning.
    python = wanted.python()
    assert versions(python) == ["9.9.9", "2.0"]
    made = python.stat(follow_symlinks=False).st_ino
    assert (
        environment("tool").python() == python and python.stat(follow_symlinks=False).st_ino == made
    )


@pytest.mark.slow
def test_registry_without_the_release_is_named_and_leaves_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["--quick"]) == 0
    said = capfd.readouterr().out
    for version in (
        pinned_torch("requirements-oldest.txt"),
        pinned_torch("requirements-newest.txt"),
    ):
        assert f"NOT TESTED with torch {version}: its environment cannot be installed here." in said
        assert f"ERROR: No matching distribution found for torch=={version}" in said
    assert [path.suffix for path in (tmp_path / "danling" / "venvs").iterdir()] == [
        ".lock",
        ".lock",
    ]


def test_broken_interpreter_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--python", "python9.9", "2.15.0"]) == 69
    assert "Received: --python=python9.9, which does not run here." in capfd.readouterr().out


def test_unwritable_cache_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "danling").touch()
    assert main(["2.15.0"]) == 69
    said = capfd.readouterr().out
    assert "NOT TESTED with torch 2.15.0" in said and str(tmp_path / "danling" / "venvs") in said

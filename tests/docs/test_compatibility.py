"""The page of versions and systems says what pyproject.toml, constraints.txt, the fixtures and the sources say."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from support.pages import ROOT
from support.warm import interpreter

import danling
from danling.checkpoints.torch_files import FORMAT_VERSION

PAGE = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def pinned(name: str) -> str:
    found = re.search(rf"^{name}==([\w.]+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return found[1]


def test_python_and_torch_are_those_of_the_project() -> None:
    least = dict(re.findall(r'"(torch|torchdata)>=([\d.]+)"', PROJECT))
    python = re.search(r'requires-python = ">=([\d.]+)"', PROJECT)
    assert python is not None and f"| Python | {python[1]} or later |" in PAGE
    for name in ("torch", "torchdata"):
        assert f"| {name} | {least[name]} or later | {pinned(name)} |" in PAGE


def test_extras_for_linux_alone_are_named() -> None:
    marked = {line.split(" = ")[0] for line in PROJECT.splitlines() if "sys_platform == 'linux'" in line}
    assert marked == {"deepspeed", "torchft", "mooncake"}
    assert "The extras `deepspeed`, `torchft` and `mooncake` install their packages on Linux only." in PAGE


def test_malicious_releases_of_lightning_are_refused_by_every_extra() -> None:
    asked = [specifiers for name, specifiers in re.findall(r'"((?:pytorch-)?lightning)([^"]*)"', PROJECT)]
    assert asked and all("!=2.6.2" in specifiers and "!=2.6.3" in specifiers for specifiers in asked)
    assert pinned("pytorch-lightning") not in ("2.6.2", "2.6.3")
    assert "pytorch-lightning 2.6.2 and 2.6.3" in PAGE


def test_version_and_formats_are_those_of_the_sources() -> None:
    assert f"This is {danling.__version__}, an alpha" in PAGE
    assert f"Today's, and so far the only one, is **{FORMAT_VERSION}**." in PAGE
    fixtures = {path.name for path in (ROOT / "tests" / "checkpoints" / "fixtures").glob("v*") if path.is_dir()}
    assert fixtures == {f"v{version}" for version in range(1, FORMAT_VERSION + 1)}


def test_a_runner_cannot_be_had_without_record_locks() -> None:
    """As on Windows, which has no `fcntl`."""
    program = (
        "import sys\n"
        "for name in [name for name in sys.modules if name.partition('.')[0] == 'danling']: del sys.modules[name]\n"
        "sys.modules['fcntl'] = None\n"
        "import danling\n"
        "danling.Runner"
    )
    ended = subprocess.run([interpreter(), "-c", program], capture_output=True, text=True, cwd=Path(ROOT))
    assert ended.returncode == 1 and "import of fcntl halted" in ended.stderr

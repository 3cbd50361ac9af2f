"""The link check finds what is broken, and the documentation names no file of the repository that is not there."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from support.pages import ROOT, pages

CHECK: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "check_links.py"))


def write(path: str, body: str) -> None:
    file = Path("site") / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"<html><body>{body}</body></html>")


def test_whole_links_pass_and_broken_ones_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    write("index.html", '<h1 id="top"><a href="guide/#begin">guide</a><a href="https://pytorch.org">torch</a></h1>')
    write("guide/index.html", '<h1 id="begin"></h1><a href="..">home</a><a href="#begin">up</a>')
    assert CHECK["main"](["site"]) == 0
    write("guide/index.html", '<a href="../gone/">gone</a><a href="../#bottom">bottom</a><a href="#begin">up</a>')
    assert CHECK["main"](["site"]) == 1
    printed = capsys.readouterr().out
    assert "guide/index.html: ../gone/: no such page or file" in printed
    assert "guide/index.html: ../#bottom: no such anchor" in printed
    assert "index.html: guide/#begin: no such anchor" in printed
    assert printed.endswith("4 broken links\n")


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"`((?:examples|benchmarks|tests|scripts|danling)/[\w./]+\.(?:py|sh|sbatch))`", page.read_text())
    rooms = {folder.name for folder in (ROOT / "danling").iterdir()}
    named += [
        f"danling/{name}" for name in re.findall(r"`(\w+/\w+\.py)`", page.read_text()) if name.split("/")[0] in rooms
    ]
    named += re.findall(r"(?:python|bash|sbatch) ((?:examples|benchmarks)/[\w./]+)", page.read_text())
    assert [name for name in named if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("page", ["README.md", "docs/guarantees.md"])
def test_tests_that_a_guarantee_names_exist(page: str) -> None:
    named = set(re.findall(r"`(?:tests/guarantees/)?(test_\w+\.py)`", (ROOT / page).read_text()))
    assert named
    assert [name for name in named if not (ROOT / "tests" / "guarantees" / name).is_file()] == []


def test_files_that_the_readme_links_exist() -> None:
    linked = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / "README.md").read_text())
    assert any(name.startswith("tests/guarantees/") for name in linked)
    assert [name for name in linked if not (ROOT / name).exists()] == []


def test_every_example_is_on_the_front_page() -> None:
    front = (ROOT / "docs" / "index.md").read_text()
    programs = [*(ROOT / "examples").glob("*.py"), *(ROOT / "examples").glob("**/*.s[hb]*")]
    assert [program.name for program in programs if program.name not in front] == []


def test_nothing_installs_what_another_project_has_published_under_this_name() -> None:
    """The public package index knows `danling` as another project's."""
    folders = ("benchmarks", "danling", "docs", "examples", "scripts")
    kinds = (".md", ".py", ".sh", ".sbatch")
    files = [ROOT / "README.md", *(file for folder in folders for file in (ROOT / folder).rglob("*"))]
    texts = {file: file.read_text() for file in files if file.suffix in kinds}
    installs = re.compile(r"pip3? install[^\n`]*[\s'\"]danling\b")
    assert installs.search("pip install -U 'danling[wandb]'")
    assert len(texts) > 200
    assert [str(file.relative_to(ROOT)) for file, text in texts.items() if installs.search(text)] == []

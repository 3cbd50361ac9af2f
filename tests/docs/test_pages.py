"""What README and the documentation say: their words, the files that they name, the versions and systems."""

from __future__ import annotations

import io
import re
import runpy
import subprocess
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.pages import ROOT, blocks_of, pages
from support.warm import interpreter

import danling
from danling.checkpoints.torch_files import FORMAT_VERSION
from danling.utils.torch_private import TESTED

AVOIDED = re.compile(
    r"\b(lies|whoever|nobody|somebody|besides?|stands?|standing)\b(?! *[=(\[.,:}])|\bof (one's|your|its|their) own\b(?= *([.,;:)]|$))",
    re.IGNORECASE,
)
PROGRAMS = sorted(
    file
    for folder in ("danling", "examples", "benchmarks", "scripts")
    for file in (ROOT / folder).rglob("*.py")
)


def prose_of(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page outside of blocks, or the comments and strings of a program, without code in backticks."""
    if file.suffix == ".md":
        text = re.sub(
            r"^( *)```.*?^\1```",
            lambda block: "\n" * block.group().count("\n"),
            file.read_text(),
            flags=re.MULTILINE | re.DOTALL,
        )
        parts = list(enumerate(text.splitlines(), 1))
    else:
        kinds = {
            tokenize.COMMENT,
            tokenize.STRING,
            getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING),
        }
        tokens = tokenize.generate_tokens(io.StringIO(file.read_text()).readline)
        parts = [
            (token.start[0] + number, line)
            for token in tokens
            if token.type in kinds
            for number, line in enumerate(token.string.splitlines())
        ]
    yield from ((number, re.sub(r"`[^`]*`|\"beside\"", "", line)) for number, line in parts)


@pytest.mark.parametrize("files", [pages(), PROGRAMS], ids=["pages", "programs"])
def test_awkward_words_are_avoided(files: list[Path]) -> None:
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in files
        if file.name != "errors.md" or file.parent.name != "reference"
        for number, line in prose_of(file)
        if AVOIDED.search(line)
    ]
    assert found == [], "\n".join(found)


def test_the_check_finds_such_a_word() -> None:
    assert AVOIDED.search("The file lies beside it") and AVOIDED.search("It has a loop of its own.")
    assert not AVOIDED.search("copies of its own layout") and not AVOIDED.search(
        "It is next to the file"
    )


CHECK: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "check_links.py"))


def write(path: str, body: str) -> None:
    file = Path("site") / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"<html><body>{body}</body></html>")


def test_whole_links_pass_and_broken_ones_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    write(
        "index.html",
        '<h1 id="top"><a href="guide/#begin">guide</a><a href="https://pytorch.org">torch</a></h1>',
    )
    write("guide/index.html", '<h1 id="begin"></h1><a href="..">home</a><a href="#begin">up</a>')
    assert CHECK["main"](["site"]) == 0
    write(
        "guide/index.html",
        '<a href="../gone/">gone</a><a href="../#bottom">bottom</a><a href="#begin">up</a>',
    )
    assert CHECK["main"](["site"]) == 1
    printed = capsys.readouterr().out
    assert "guide/index.html: ../gone/: no such page or file" in printed
    assert "guide/index.html: ../#bottom: no such anchor" in printed
    assert "index.html: guide/#begin: no such anchor" in printed
    assert printed.endswith("4 broken links\n")


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_files_named_by_a_page_exist(page: Path) -> None:
    named = re.findall(
        r"`((?:examples|benchmarks|tests|scripts|danling)/[\w./]+\.(?:py|sh|sbatch))`",
        page.read_text(),
    )
    rooms = {folder.name for folder in (ROOT / "danling").iterdir()}
    named += [
        f"danling/{name}"
        for name in re.findall(r"`(\w+/\w+\.py)`", page.read_text())
        if name.split("/")[0] in rooms
    ]
    named += re.findall(
        r"(?:python|bash|sbatch) ((?:examples|benchmarks)/[\w./]+)", page.read_text()
    )
    assert [name for name in named if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize(
    "recipe", ["Makefile", *sorted(f"scripts/{file.name}" for file in ROOT.glob("scripts/*.sh"))]
)
def test_files_named_by_a_recipe_exist(recipe: str) -> None:
    """The shell expands the braces."""
    named = re.findall(
        r"(?<![\w/.])(?:benchmarks|examples|scripts|tests)/\w[\w./{},]*",
        (ROOT / recipe).read_text(),
    )
    assert named
    listed = subprocess.run(
        ["bash", "-c", f"ls -d {' '.join(named)}"], capture_output=True, text=True, cwd=ROOT
    )
    assert listed.returncode == 0, listed.stderr


@pytest.mark.parametrize("page", ["README.md", "docs/guarantees.md"])
def test_tests_named_by_a_guarantee_exist(page: str) -> None:
    named = set(re.findall(r"`(?:tests/guarantees/)?(test_\w+\.py)`", (ROOT / page).read_text()))
    assert named
    assert [name for name in named if not (ROOT / "tests" / "guarantees" / name).is_file()] == []


def test_files_linked_by_the_readme_exist() -> None:
    linked = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / "README.md").read_text())
    assert any(name.startswith("tests/guarantees/") for name in linked)
    assert [name for name in linked if not (ROOT / name).exists()] == []


def test_files_for_other_programs_parse() -> None:
    blocks = [
        (page, block)
        for page in pages()
        for block in blocks_of(page)
        if block.language in ("yaml", "json")
    ]
    assert len(blocks) >= 3
    for page, block in blocks:
        assert yaml.safe_load(block.code), f"{page}:{block.line}"
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["authors"]) == (
        danling.__version__,
        [{"name": "The danling developers"}],
    )


def test_every_example_is_on_the_front_page() -> None:
    front = (ROOT / "docs" / "index.md").read_text()
    programs = [*(ROOT / "examples").glob("*.py"), *(ROOT / "examples").glob("**/*.s[hb]*")]
    assert [program.name for program in programs if program.name not in front] == []


def test_nothing_installs_another_project_of_this_name() -> None:
    """The public package index knows `danling` as another project's."""
    folders = ("benchmarks", "danling", "docs", "examples", "scripts")
    kinds = (".md", ".py", ".sh", ".sbatch")
    files = [
        ROOT / "README.md",
        *(file for folder in folders for file in (ROOT / folder).rglob("*")),
    ]
    texts = {file: file.read_text() for file in files if file.suffix in kinds}
    installs = re.compile(r"pip3? install[^\n`]*[\s'\"]danling\b|\bdanling\[\w")
    assert installs.search("pip install -U 'danling[wandb]'") and installs.search(
        "install the extra danling[wandb]."
    )
    assert len(texts) > 200
    assert [
        str(file.relative_to(ROOT)) for file, text in texts.items() if installs.search(text)
    ] == []


PAGE = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def pinned(name: str) -> str:
    found = re.search(
        rf"^{name}==([\w.]+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert found is not None
    return found[1]


def test_python_and_torch_are_those_of_the_project() -> None:
    least = dict(re.findall(r'"(torch|torchdata)>=([\d.]+)"', PROJECT))
    python = re.search(r'requires-python = ">=([\d.]+)"', PROJECT)
    assert python is not None and f"| Python | {python[1]} or later |" in PAGE
    for name in ("torch", "torchdata"):
        assert f"| {name} | {least[name]} or later | {pinned(name)} |" in PAGE
    assert (
        f"pip install torch=={pinned('torch')} "
        in (ROOT / "docs" / "guides" / "quickstart.md").read_text()
    )


def test_releases_of_torch_are_those_of_the_matrix() -> None:
    ends = {}
    for which in ("oldest", "newest"):
        found = re.search(
            r"^torch==([\d.]+)$", (ROOT / f"requirements-{which}.txt").read_text(), re.MULTILINE
        )
        assert found is not None
        ends[which] = found[1]
    assert f'"torch>={TESTED[0]}"' in PROJECT
    assert [version.rpartition(".")[0] for version in ends.values()] == [TESTED[0], TESTED[-1]]
    rows = re.findall(r"^\| (\d+\.\d+)\.\d+ \| 3\.", PAGE, re.MULTILINE)
    assert sorted(set(rows)) == sorted(TESTED)
    assert all(f"| {version} |" in PAGE for version in (*ends.values(), pinned("torch")))


def test_lowest_python_is_the_same_everywhere() -> None:
    project = tomllib.loads(PROJECT)
    lowest = project["project"]["requires-python"].removeprefix(">=")
    major, minor = lowest.split(".")
    tools = project["tool"]
    assert (
        tools["ruff"]["target-version"] == f"py{major}{minor}"
        and tools["mypy"]["python_version"] == lowest
    )
    listed = [
        line.rpartition(" ")[2]
        for line in project["project"]["classifiers"]
        if "Python :: 3." in line
    ]
    assert listed[0] == lowest
    for page in ("README.md", "docs/guides/quickstart.md"):
        assert f"Python {lowest} or later" in (ROOT / page).read_text()
    assert f"Python (>= {lowest})" in (ROOT / "Makefile").read_text()
    assert f"< ({major}, {minor})" in (ROOT / "scripts" / "test_system_python.sh").read_text()


def test_extras_for_linux_alone_are_named() -> None:
    marked = {
        line.split(" = ")[0] for line in PROJECT.splitlines() if "sys_platform == 'linux'" in line
    }
    assert marked == {"deepspeed", "torchft", "mooncake"}
    assert (
        "The extras `deepspeed`, `torchft` and `mooncake` install their packages on Linux only."
        in PAGE
    )


def test_malicious_releases_of_lightning_are_refused_by_every_extra() -> None:
    asked = [
        specifiers for name, specifiers in re.findall(r'"((?:pytorch-)?lightning)([^"]*)"', PROJECT)
    ]
    assert asked and all(
        "!=2.6.2" in specifiers and "!=2.6.3" in specifiers for specifiers in asked
    )
    assert pinned("pytorch-lightning") not in ("2.6.2", "2.6.3")
    assert "pytorch-lightning 2.6.2 and 2.6.3" in PAGE


def test_version_and_formats_are_those_of_the_sources() -> None:
    assert f"This is {danling.__version__}, an alpha" in PAGE
    assert f"Today's is **{FORMAT_VERSION}**." in PAGE
    fixtures = {
        path.name
        for path in (ROOT / "tests" / "checkpoints" / "fixtures").glob("v*")
        if path.is_dir()
    }
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
    ended = subprocess.run(
        [interpreter(), "-c", program], capture_output=True, text=True, cwd=Path(ROOT)
    )
    assert ended.returncode == 1 and "import of fcntl halted" in ended.stderr

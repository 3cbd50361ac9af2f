"""Every block of README and of the documentation is run; `tests/support/pages.py` has the conventions."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import io
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.job import Job
from support.pages import ROOT, Block, alike, blocks_of, pages, prints
from support.processes import free_port
from support.warm import programs, variables

PAGES = [page for page in pages() if blocks_of(page)]
SLOW = {ROOT / "docs/guides/plots.md", ROOT / "docs/guides/quickstart.md"}
"""Run long, and show what README and the tests of plots show too."""
RUN = {"python", "bash", "diff"}
READ = {"console", "json", "text", "yaml", ""}
TITLES = {"output", "error"}


class Page:
    """Runs the blocks of one page in order."""

    def __init__(self, page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.page = page
        self.namespace: dict[str, Any] = {"__name__": "__page__"}
        self.output = ""
        self.error: BaseException | None = None
        for name in ("examples", "benchmarks"):
            Path(name).symlink_to(ROOT / name)
        self.search = search_path(activated=not activates(page))
        make_environment()
        # Files that the page writes can be imported by it.
        monkeypatch.syspath_prepend(os.getcwd())
        monkeypatch.setattr(sys, "argv", [str(page)])

    def run(self, blocks: list[Block]) -> None:
        for block, following in zip(blocks, [*blocks[1:], None]):
            raises = following is not None and following.title == "error"
            if block.language in RUN and block.title:
                Path(block.title).write_text(block.code)
            elif block.language == "python":
                self.run_python(block, raises=raises)
            elif block.language == "bash":
                self.run_bash(block, raises=raises)
            elif block.language == "diff":
                self.run_diff(block)
            elif block.title:
                self.compare(block)

    def run_python(self, block: Block, *, raises: bool) -> None:
        # Line numbers of a traceback are those of the page.
        code = compile("\n" * (block.line - 1) + block.code, str(self.page), "exec")
        printed = io.StringIO()
        self.error = None
        with contextlib.redirect_stdout(printed):
            try:
                exec(code, self.namespace)
            except (Exception, SystemExit) as error:
                if not raises:
                    raise
                self.error = error
        self.output = printed.getvalue()

    def run_diff(self, block: Block) -> None:
        said = []
        for other in "+-":
            code = "".join(
                line[1:] or "\n"
                for line in block.code.splitlines(True)
                if not line.startswith(other)
            )
            if all(map(importlib.util.find_spec, imported(code))):
                printed = io.StringIO()
                with contextlib.redirect_stdout(printed):
                    exec(
                        compile(code, f"{self.page}:{block.line}", "exec"), {"__name__": "__page__"}
                    )
                said.append(printed.getvalue())
        self.output = said[-1]
        assert len({text.splitlines()[-1] for text in said}) == 1, (
            f"{self.page}:{block.line}: {said}"
        )

    def run_bash(self, block: Block, *, raises: bool) -> None:
        # torchrun without a rendezvous of its own takes port 29500, which another test may have at this moment.
        environment = {
            **os.environ,
            **variables(),
            "PATH": self.search,
            "PET_MASTER_PORT": str(free_port()),
        }
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        )
        # One shell to the reader: where a block finds its programs, the next one does.
        said = Path(".search").resolve()
        command = [
            "bash",
            "-euo",
            "pipefail",
            "-c",
            f"trap 'printf %s \"$PATH\" > {said}' EXIT\n{block.code}",
        ]
        # What it leaves in the background ends with it, and does not keep its output open.
        with Job(command, environment=environment) as job:
            code, self.output = job.wait(200.0)
        assert (code != 0) == raises, f"{self.page}:{block.line} ended with {code}\n{self.output}"
        self.error = RuntimeError(self.output) if raises else None
        self.search = said.read_text()

    def compare(self, block: Block) -> None:
        where = f"{self.page}:{block.line}"
        if block.title == "output":
            missing = prints(block.code, self.output)
            assert missing is None, (
                f"{where}: expected the line {missing!r}. Received:\n{self.output}"
            )
        elif block.title == "error":
            text = f"{type(self.error).__name__}: {self.error}"
            assert matches(block.code, text), f"{where}: expected\n{block.code}\nReceived: {text}"


def imported(code: str) -> set[str]:
    """Return the packages that a program imports."""
    nodes = list(ast.walk(ast.parse(code)))
    names = [name.name for node in nodes if isinstance(node, ast.Import) for name in node.names]
    return {
        name.partition(".")[0]
        for name in names
        + [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    }


def activates(page: Path) -> bool:
    return any(
        ".venv/bin/activate" in block.code for block in blocks_of(page) if block.language == "bash"
    )


def search_path(*, activated: bool) -> str:
    """Return where programs are found, with those of this Python or, as for a user who has just come, without them."""
    own = Path(sys.executable).parent
    others = [path for path in os.environ["PATH"].split(os.pathsep) if Path(path) != own]
    return os.pathsep.join([own_programs()] * activated + others)


def own_programs() -> str:
    """Return where this Python's programs are found, those that import torch as forks that have it loaded."""
    return os.pathsep.join([str(programs()), str(Path(sys.executable).parent)])


def make_environment() -> None:
    """Put this Python's environment where `make train` puts one."""
    script = Path(".venv/bin/activate")
    script.parent.mkdir(parents=True)
    script.write_text(f'export PATH="{own_programs()}:$PATH"\n')


def one_line(text: str) -> str:
    return " ".join(text.split())


def matches(quoted: str, text: str) -> bool:
    pattern = ".*".join(re.escape(part.strip()) for part in one_line(quoted).split("..."))
    return re.search(pattern, one_line(text)) is not None


@pytest.fixture
def _forgets_modules() -> Iterator[None]:
    before = set(sys.modules)
    yield
    here = os.getcwd()
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(here):
            del sys.modules[name]


@pytest.fixture
def _forgets_accelerate() -> Iterator[None]:
    """A program of the page may make an `Accelerator`, or a `Trainer` that does; its state is that of the process."""
    yield
    if "accelerate.state" in sys.modules:
        state: Any = importlib.import_module("accelerate.state")
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


@pytest.fixture
def _keeps_the_level_of_the_log() -> Iterator[None]:
    """A page may quiet the log of the library; other tests of this process read it."""
    log = logging.getLogger("danling")
    before = log.level
    yield
    log.setLevel(before)


@pytest.mark.timeout(300)  # README starts half a dozen programs
@pytest.mark.usefixtures("_forgets_modules", "_forgets_accelerate", "_keeps_the_level_of_the_log")
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow) if page in SLOW else page for page in PAGES],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_blocks_of_a_page_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Page(page, monkeypatch).run(blocks_of(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_keeps_to_the_conventions(page: Path) -> None:
    blocks = blocks_of(page)
    commands = "\n".join(
        block.code for block in blocks if block.language in RUN and not block.title
    )
    assert "pip install" not in commands, f"{page.name}: a page that is run installs nothing"
    for block in blocks:
        where = f"{page.name}:{block.line}"
        assert block.language in RUN | READ, (
            f"{where}: {block.language!r} is neither run nor marked as for reading"
        )
        if block.language in RUN and block.title:
            name = Path(block.title).stem
            assert re.search(rf"\b{name}\b", commands), (
                f"{where}: no block of the page uses {block.title}"
            )
        elif block.title:
            assert block.title in TITLES, f"{where}: {block.title!r} is not a title that is checked"


def test_comparison_of_output_is_strict_about_results() -> None:
    assert alike("accuracy 0.95 after epoch 8", "accuracy 0.96 after epoch 8")
    assert not alike("accuracy 0.95 after epoch 8", "accuracy 0.95 after epoch 9")
    assert not alike("at step 270", "at step 267")
    assert not alike("accuracy 0.95", "accuracy 0.92")
    assert not alike("accuracy 0.95", "loss 0.95")
    assert prints("first\n...\nthird", "first\nsecond\nthird") is None
    assert prints("second\nfirst", "first\nsecond") == "first"
    assert matches("Expected one. ... Set it.", "ValueError: Expected one. Received: two. Set it.")

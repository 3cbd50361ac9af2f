"""The code of the documentation, taken out of its pages.

Conventions of a page, which `tests/docs/test_blocks.py` holds it to:

- blocks of ``python`` run one after another in one namespace, in a directory that only this page uses;
- a block with ``title="name"`` is written to that file of the directory instead, and a command of the page has to use it;
- blocks of ``bash`` run by ``bash -euo pipefail`` in that directory, which has links to `examples` and `benchmarks`;
- ``text title="output"`` is what the block before it prints: every line must be there, in order; whole numbers exactly, others to 2 %;
- ``text title="error"`` is what the block before it raises; `...` matches anything;
- ``diff`` shows a program before and after, whole: both run, and their last lines must be the same;
  the first is left out where it imports what is not installed;
- ``console`` and any other ``text`` is for reading, and the sentence before it says why it is not run;
- ``yaml`` and ``json`` are files that other programs read: a test of their own parses them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w+-]*)(?P<options>[^\n`]*)$")
_TITLE = re.compile(r'title="([^"]*)"')
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e-?\d+)?")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    language: str
    title: str
    code: str
    line: int


def pages() -> list[Path]:
    """Return README and every page of the documentation."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of a page in order."""
    return list(_blocks(page.read_text(encoding="utf-8").splitlines()))


def _blocks(lines: list[str]) -> Iterator[Block]:
    opened: re.Match[str] | None = None
    begin = 0
    for number, line in enumerate(lines, 1):
        found = _FENCE.match(line)
        if opened is None and found is not None:
            opened, begin = found, number
        elif opened is not None and line.strip() == "```":
            indent = len(opened["indent"])
            code = "".join(f"{text[indent:]}\n" for text in lines[begin : number - 1])
            title = _TITLE.search(opened["options"])
            yield Block(opened["language"], title[1] if title else "", code, begin + 1)
            opened = None
    assert opened is None, (
        f"Expected every fence to be closed. Received: one open since line {begin}."
    )


def prints(expected: str, output: str) -> str | None:
    """Return the first line of `expected` that `output` does not have in this order, `None` when all are there."""
    rest = output.splitlines()
    for wanted in filter(None, map(str.strip, expected.splitlines())):
        place = next((i for i, line in enumerate(rest) if alike(wanted, line)), None)
        if place is None:
            return wanted
        rest = rest[place + 1 :]
    return None


def alike(wanted: str, line: str) -> bool:
    """Whether a line reads as `wanted`: `...` matches anything, and a number with a point or an exponent may be 2 % off.

    Such numbers move a little with the machine; whole ones count something, and do not.
    """
    pieces = [
        ".*?" if part == "..." else _with_numbers(part) for part in re.split(r"(\.\.\.)", wanted)
    ]
    found = re.search("".join(pieces) + r"\s*$", line)
    if found is None:
        return False
    numbers = _NUMBER.findall(wanted.replace("...", " "))
    return all(_as_good_as(want, got) for want, got in zip(numbers, found.groups()))


def _as_good_as(want: str, got: str) -> bool:
    if not re.search(r"[.e]", want):
        return want == got
    return abs(float(got) - float(want)) <= 0.02 * abs(float(want)) + 1e-9


def _with_numbers(text: str) -> str:
    parts = [re.escape(part) for part in _NUMBER.split(text)]
    return r"(-?\d+(?:\.\d+)?(?:e-?\d+)?)".join(parts)

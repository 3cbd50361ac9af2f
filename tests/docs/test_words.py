"""Documentation, comments, docstrings and messages avoid words that read as translated. Tests and the page of errors are not checked."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.pages import ROOT, pages

AVOIDED = re.compile(
    r"\b(lies|whoever|nobody|somebody|besides?|stands?|standing)\b(?! *[=(\[.,:}])|\bof (one's|your|its|their) own\b(?= *([.,;:)]|$))",
    re.IGNORECASE,
)
PROGRAMS = sorted(
    file for folder in ("danling", "examples", "benchmarks", "scripts") for file in (ROOT / folder).rglob("*.py")
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
        kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
        tokens = tokenize.generate_tokens(io.StringIO(file.read_text()).readline)
        parts = [
            (token.start[0] + number, line)
            for token in tokens
            if token.type in kinds
            for number, line in enumerate(token.string.splitlines())
        ]
    yield from ((number, re.sub(r"`[^`]*`|\"beside\"", "", line)) for number, line in parts)


@pytest.mark.parametrize("files", [pages(), PROGRAMS], ids=["pages", "programs"])
def test_words_that_read_as_translated_are_avoided(files: list[Path]) -> None:
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
    assert not AVOIDED.search("copies of its own layout") and not AVOIDED.search("It is next to the file")

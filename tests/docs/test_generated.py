"""What scripts make of the sources is up to date: the picture of the rooms, the page of errors, the table of libraries."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from support.pages import ROOT

sys.path.append(str(ROOT / "scripts"))

import draw_rooms
import list_libraries
import write_llms

LIST: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "list_errors.py"))


def test_imports_run_down_and_no_room_imports_a_runner() -> None:
    rooms = draw_rooms.rooms_of(ROOT / "danling")
    draw_rooms.floors_of(rooms)
    assert {room for room, below in rooms.items() if "runners" in below} <= {"cli", "stream"}
    assert not [room for room, below in rooms.items() if "cli" in below]
    assert rooms["utils"] == set()


def test_picture_matches_its_source() -> None:
    assert draw_rooms.main(["--check"]) == 0


def test_list_of_pages_matches_the_documentation() -> None:
    assert write_llms.main(["--check"]) == 0, "run: python scripts/write_llms.py"
    text = write_llms.FILE.read_text()
    pages = {str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")}
    assert {name for name in pages if f"]({name})" not in text} == set()


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        ("# Title\n\nIt trains. It ends.\n", "It trains."),
        (
            "# T\n\n```python\nx = 1. Y\n```\n\nSee [the page](a.md) of **torch 2.13**, e.g. here: `x`.\n",
            "See the page of torch 2.13, e.g. here",
        ),
        ("---\nhide: all\n---\n\n# T\n\n| a |\n", ""),
    ],
)
def test_the_first_sentence_of_a_page_is_found(page: str, sentence: str) -> None:
    assert write_llms.first_sentence(page) == sentence


def page_of(source: str) -> str:
    file = Path("library") / "config" / "module.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source)
    return str(LIST["page"](Path("library")))


def test_page_matches_its_sources() -> None:
    assert LIST["main"](["--check"]) == 0, "run: python scripts/list_errors.py"


AWKWARD = re.compile(
    r"\b(afresh|all is well|anew|as far as|aside|go(es)? on|held|lies|mend(ed)?|nobody|somebody|stands?|told|what there is|whoever)\b",
    re.IGNORECASE,
)
"""Words that messages avoid: *again, continue, fix* and the name of who does it are plain."""


def test_messages_are_in_plain_words() -> None:
    found = [
        f"{file.relative_to(ROOT)}: {text}"
        for file in sorted((ROOT / "danling").rglob("*.py"))
        for text in whole_messages_of(file.read_text())
        if AWKWARD.search(text)
    ]
    assert found == [], "\n".join(found)


def test_awkward_message_is_found() -> None:
    source = 'raise ValueError(f"Expected a number. Received: {held}. The run goes on.")\nraise ValueError(f"Expected {mend}. Set it.")'
    [found] = [text for text in whole_messages_of(source) if AWKWARD.search(text)]
    assert found == "Expected a number. Received: . The run goes on."


def whole_messages_of(source: str) -> list[str]:
    """Return the messages of a source, from their first to their last sentence, without values."""

    class Whole(LIST["Collector"]):  # type: ignore[misc]
        def _note(self, node: ast.expr, text: str) -> None:
            super()._note(node, text)
            self.found[-1] = LIST["words_of"](text)

    collector = Whole()
    collector.visit(ast.parse(source))
    return list(collector.found)


def test_first_sentence_of_an_error_is_found_with_its_values_and_its_file() -> None:
    page = page_of(
        "def check(value):\n"
        '    raise ValueError(f"Expected a number in {value!r} of {type(value).__name__}. Received: none. " "Set it to one.")\n'
    )
    assert "| `config/module.py` | Expected a number in <i>value</i> of <i>...</i>. |" in page


def test_warnings_and_texts_raised_elsewhere_are_found() -> None:
    page = page_of(
        "def check(logger, name, many):\n"
        '    logger.warning("Update %d of %s was skipped.", name, len(many))\n'
        '    logger.info("Nothing of this is on the page.")\n'
        '    return "Expected a file_name with | in it. Received: none."\n'
    )
    assert (
        r"| Expected a file\_name with \| in it.<br>Update <i>name</i> of <i>...</i> was skipped. |"
        in page
    )
    assert "Nothing of this" not in page


def test_table_of_libraries_matches_the_tests() -> None:
    assert list_libraries.PAGE.read_text() == list_libraries.page(), (
        "run python scripts/list_libraries.py"
    )


@pytest.mark.parametrize(
    "library", sorted({row["Library"] for row in list_libraries.declared().values()})
)
def test_installed_version_is_the_pinned_one(library: str) -> None:
    try:
        found = metadata.version(library)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{library} is not installed")
    pinned = list_libraries.pinned(ROOT / "constraints.txt")
    assert found.partition("+")[0] == pinned[list_libraries.normal(library)]


def test_every_library_has_a_quick_test() -> None:
    for path in list_libraries.declared():
        parts = (ROOT / path).read_text().split("\ndef test_")
        heads = [before.rsplit("\n\n\n", 1)[-1] for before in parts[:-1]]
        assert any(not head.strip().startswith("@pytest.mark.slow") for head in heads), path

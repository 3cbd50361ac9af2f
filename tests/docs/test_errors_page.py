"""The page of every error text follows the sources, and has the first sentence of each error and warning."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from support.pages import ROOT

LIST: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "list_errors.py"))


def page_of(source: str) -> str:
    file = Path("library") / "config" / "module.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source)
    return str(LIST["page"](Path("library")))


def test_the_page_is_that_of_the_sources() -> None:
    assert LIST["main"](["--check"]) == 0, "run: python scripts/list_errors.py"


def test_the_first_sentence_of_what_is_raised_is_found_with_its_values_and_its_file() -> None:
    page = page_of(
        "def check(value):\n"
        '    raise ValueError(f"Expected a number in {value!r} of {type(value).__name__}. Received: none. " "Set it to one.")\n'
    )
    assert "| `config/module.py` | Expected a number in <i>value</i> of <i>...</i>. |" in page


def test_warnings_and_texts_that_are_raised_elsewhere_are_found() -> None:
    page = page_of(
        "def check(logger, name, many):\n"
        '    logger.warning("Update %d of %s was skipped.", name, len(many))\n'
        '    logger.info("Nothing of this is on the page.")\n'
        '    return "Expected a file_name with | in it. Received: none."\n'
    )
    assert r"| Expected a file\_name with \| in it.<br>Update <i>name</i> of <i>...</i> was skipped. |" in page
    assert "Nothing of this" not in page

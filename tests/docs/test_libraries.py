"""The table of libraries is what the tests of `tests/ecosystem` declare, in the versions that they pass with."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))

import list_libraries  # noqa: E402


def test_the_table_is_that_of_the_tests() -> None:
    assert list_libraries.PAGE.read_text() == list_libraries.page(), "run python scripts/list_libraries.py"


@pytest.mark.parametrize("library", sorted({row["Library"] for row in list_libraries.declared().values()}))
def test_the_version_is_that_of_the_tests(library: str) -> None:
    try:
        found = metadata.version(library)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{library} is not installed")
    pinned = list_libraries.pinned(ROOT / "constraints.txt")
    assert found.partition("+")[0] == pinned[list_libraries.normal(library)]


def test_every_library_is_shown_by_a_test_that_is_not_slow() -> None:
    for path in list_libraries.declared():
        parts = (ROOT / path).read_text().split("\ndef test_")
        heads = [before.rsplit("\n\n\n", 1)[-1] for before in parts[:-1]]
        assert any(not head.strip().startswith("@pytest.mark.slow") for head in heads), path

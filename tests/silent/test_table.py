"""The table of the published faults says what `danling prove` said."""

from __future__ import annotations

import pytest

from benchmarks.silent.__main__ import Proof, Row, cases


def row(number: int, verdict: str, notes: list[str], right: str = "same") -> Row:
    wrong = Proof(verdict, "why" if verdict == "different" else "", notes, 1.0)
    return Row(
        number, "a fault", "a source 1 (2026-01)", wrong, Proof(right, "", ["of both"], 2.0), 0.5
    )


@pytest.mark.parametrize(
    ("number", "verdict", "notes", "found", "expected"),
    [
        (1, "different", [], "found", True),
        (1, "same", ["of both"], "no", False),
        (9, "same", ["of both", "of one"], "noticed", True),
        (9, "same", ["of both"], "no", False),
        (12, "same", [], "no", True),
    ],
)
def test_row_says_how_a_fault_is_seen(
    number: int, verdict: str, notes: list[str], found: str, expected: bool
) -> None:
    made = row(number, verdict, notes)
    assert made.found == found
    assert made.as_expected is expected
    assert f"| {found}" in made.line()


def test_accused_twin_is_not_as_expected() -> None:
    made = row(1, "different", [], right="different")
    assert not made.as_expected
    assert "**accused**" in made.line()


def test_cases_are_numbered_without_a_gap() -> None:
    assert list(cases([])) == list(range(1, 16))
    assert list(cases([3])) == [3]

"""SIGKILL at random instants, again and again, also inside saves: what is found afterwards is whole, and the end is the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.locks import child, wait_for
from support.saves import KINDS, go_on, load, make_manager, record_saves


def _load_for_ever(kind: str, place: Path, count: Path) -> None:
    manager = make_manager(kind, place)
    while True:
        source = manager.find_latest()
        assert source is not None and load(manager, source) == 3
        with count.open("a") as file:
            file.write("+")


@pytest.mark.parametrize("kind", KINDS)
def test_a_kill_within_a_load_changes_nothing(kind: str, tmp_path: Path) -> None:
    place, count = record_saves(kind, tmp_path / "checkpoints"), tmp_path / "loads"
    before = {path: (path.stat().st_ino, path.read_bytes()) for path in place.rglob("*") if path.is_file()}
    for number in range(5):
        count.write_text("")
        # The process does nothing but load, so that it is killed within a load, each time after another number of them.
        with child(lambda: _load_for_ever(kind, place, count)):
            wait_for(lambda number=number: count.stat().st_size > number)
    assert {path: (path.stat().st_ino, path.read_bytes()) for path in place.rglob("*") if path.is_file()} == before
    assert go_on(kind, place, 4)[0] == 3

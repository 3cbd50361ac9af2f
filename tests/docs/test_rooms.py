"""Imports between the rooms run downwards, and the picture of them is that of the source."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import draw_rooms  # noqa: E402


def test_imports_run_down_and_no_room_imports_a_runner() -> None:
    rooms = draw_rooms.rooms_of(ROOT / "danling")
    draw_rooms.floors_of(rooms)
    assert {room for room, below in rooms.items() if "runners" in below} <= {"cli", "stream"}
    assert not [room for room, below in rooms.items() if "cli" in below]
    assert rooms["utils"] == set()


def test_the_picture_is_that_of_the_source() -> None:
    assert draw_rooms.main(["--check"]) == 0

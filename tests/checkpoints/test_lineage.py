"""Which number a save gets, and which older ones it replaces: asked of the lineage alone."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.saves import record_saves

from danling.checkpoints import CheckpointError, CheckpointMismatch, CheckpointSettings
from danling.checkpoints.file_store import FileStore
from danling.checkpoints.lineage import SaveLineage
from danling.checkpoints.policy import Record
from danling.checkpoints.search import Apart, CheckpointSearch

FIRST, SECOND = "ckpt-s000000000001", "ckpt-s000000000002"
TOO_MUCH = 1 << 60


@dataclass
class Copies:
    """A mirror with saves that it has not copied yet."""

    waiting: frozenset[int] = frozenset()
    given_up: list[str] = field(default_factory=list)

    def pending(self) -> frozenset[int]:
        return self.waiting

    def let_go(self) -> list[str]:
        self.waiting = frozenset()
        return self.given_up


def _lineage(
    place: Path, *, mirror: Any = None, run: str = "run", keep: int = 1
) -> tuple[CheckpointSearch, SaveLineage]:
    settings = CheckpointSettings(keep_latest_k=keep)
    search = CheckpointSearch(place, first=FileStore, run_id=run, settings=settings)
    return search, SaveLineage(search, settings, mirror=lambda: mirror)


def _open(lineage: SaveLineage, *names: str, needed: int = 1) -> list[Record]:
    return lineage.open_attempt(list(names), needed=needed, epoch=1, global_step=4)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Three saves: of the first two there is history, the first one is the best."""
    return record_saves("file", tmp_path / "checkpoints", keep=0)


def test_the_first_save_makes_the_directory(tmp_path: Path) -> None:
    _, lineage = _lineage(tmp_path / "new")
    best, latest = _open(lineage, "best", "latest")
    assert best == Record("best", 1, 0, (), "run", 4, 1) and latest.name == "latest"
    assert _open(lineage, "latest")[0].sequence == 2
    assert (tmp_path / "new").is_dir()


def test_a_save_after_the_newest_goes_on_and_after_an_older_one_branches(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    search, lineage = _lineage(place)
    lineage.continue_from(search.describe("latest"))
    assert [(record.sequence, record.branch) for record in _open(lineage, "latest")] == [(4, 0)]
    search, older = _lineage(place)
    older.continue_from(search.describe(FIRST))
    assert older.resumed is not None and older.resumed.step == 1
    with caplog.at_level(logging.WARNING, logger="danling"):
        record = _open(older, "latest")[0]
    assert (record.sequence, record.branch, record.line) == (4, 1, ((0, 1),))
    assert f"Going on from {FIRST}: 2 saves in {place} are no longer part of this run." in caplog.messages


def test_another_run_is_refused_before_a_number_is_given(place: Path) -> None:
    _, lineage = _lineage(place, run="other")
    with pytest.raises(CheckpointMismatch, match="of this run \\(other\\)"):
        _open(lineage, "latest")


def test_retention_spares_what_it_goes_on_from_and_what_is_still_copied(place: Path) -> None:
    copies = Copies(waiting=frozenset({1}))
    search, lineage = _lineage(place, mirror=copies)
    lineage.prune()
    assert (place / f"{FIRST}.pth").exists(), "nothing is removed before the first save of the process"
    (place / "best.pth").unlink()
    (place / "best.pth.sha256").unlink()
    lineage.continue_from(search.describe("latest"))
    _open(lineage, "latest")
    lineage.prune()
    assert (place / f"{FIRST}.pth").exists()
    copies.waiting = frozenset()
    lineage.prune()
    assert not (place / f"{FIRST}.pth").exists() and (place / f"{SECOND}.pth").exists()


def test_a_full_disk_is_told_before_anything_is_written_and_copies_that_wait_give_way(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, lineage = _lineage(place)
    with pytest.raises(CheckpointError):
        _open(lineage, "latest", needed=TOO_MUCH)
    copies = Copies(given_up=["best", "latest"])
    _, lineage = _lineage(place, mirror=copies)
    with caplog.at_level(logging.WARNING, logger="danling"), pytest.raises(CheckpointError):
        _open(lineage, "latest", needed=TOO_MUCH)
    assert any("best, latest will not be copied to the object store" in text for text in caplog.messages)
    assert _open(lineage, "latest")[0].sequence == 4, "a refused save takes no number"


def test_only_machines_with_disks_of_their_own_follow_the_main_one(place: Path) -> None:
    search, lineage = _lineage(place)
    asked: list[object] = []

    def exchange(value: object) -> list[Any]:
        asked.append(value)
        return [value]

    lineage.follow(4, exchange, is_main=True)
    assert asked == []
    search.lie_apart(Apart(any=True))
    lineage.follow(4, exchange, is_main=True)
    assert asked == [set()]

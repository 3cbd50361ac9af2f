"""Which checkpoint a name, a path or the newest save means, asked of the search alone: no manager, no run."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.saves import make_manager, record_saves

from danling.checkpoints import (
    CheckpointDamaged,
    CheckpointMismatch,
    CheckpointNotFound,
    CheckpointSettings,
    storage,
)
from danling.checkpoints.file_store import FileStore
from danling.checkpoints.search import Apart, CheckpointSearch

OLDEST, SECOND = "ckpt-s000000000001", "ckpt-s000000000002"


def _search(directory: Path, *, run: str = "run", load_only: bool = False, **compare: Any) -> CheckpointSearch:
    settings = CheckpointSettings(load_only=load_only)
    return CheckpointSearch(directory, first=FileStore, run_id=run, settings=settings, **compare)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return record_saves("file", tmp_path / "checkpoints")


def _damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def test_a_name_and_a_path_mean_the_same_checkpoint(place: Path) -> None:
    search = _search(place)
    path = place / f"{OLDEST}.pth"
    assert search.verified(OLDEST) == search.verified(path) == (-1, path)
    record = search.describe(OLDEST)
    assert record is not None and (record.step, record.run) == (1, "run")
    assert {found.name for found, _ in search.records()} == {OLDEST, SECOND, "best", "latest"}


def test_a_checkpoint_of_another_kind_is_found_beside_its_own(place: Path) -> None:
    other = make_manager("dcp", place.parent / "other")
    other.save_checkpoint({"format_version": 1, "model": {}, "state": {}}, epoch=0, global_step=9)
    other.close()
    search = _search(place.parent / "other")
    assert search.find_latest() == str(place.parent / "other" / "latest")
    assert search.verified("latest")[1].parent.name == "targets"


def test_what_is_damaged_is_skipped_for_an_older_one_and_loading_it_by_name_is_refused(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _damage(place / "latest.pth")
    search = _search(place)
    with caplog.at_level(logging.WARNING, logger="danling"):
        assert search.find_latest() == SECOND
        assert search.find_latest() == SECOND
    assert len([text for text in caplog.messages if "latest.pth is skipped" in text]) == 1
    with pytest.raises(CheckpointDamaged, match="latest"):
        search.verified("latest")
    search.skip(SECOND, CheckpointDamaged("it cannot be read"))
    assert search.find_latest() == "best"


def test_where_everything_is_damaged_nobody_begins_anew(place: Path) -> None:
    for file in place.glob("*.pth"):
        if not os.path.samefile(file, place / "best.pth") or file.name == "best.pth":
            _damage(file)
    search = _search(place)
    assert search.find_latest() is None
    with pytest.raises(CheckpointDamaged, match="some lie there. Received none that does"):
        search.refuse_lost()
    _search(place.parent / "empty").refuse_lost()


def test_what_is_not_there_is_said_with_what_is(place: Path) -> None:
    expected = f"there are: best, {OLDEST}, {SECOND}, latest"
    with pytest.raises(CheckpointNotFound, match=expected) as raised:
        _search(place).verified("ckpt-s000000000007")
    assert "Received: 'ckpt-s000000000007'" in str(raised.value)


def test_another_run_is_refused_with_what_differs_unless_one_only_looks(place: Path) -> None:
    seen: list[Mapping[str, Any]] = []

    def compare(payload: Mapping[str, Any]) -> list[str]:
        seen.append(payload)
        return ["optim.lr: stored 1, now 2"]

    search = _search(place, run="other", compare=compare)
    assert search.is_foreign() and not _search(place).is_foreign()
    with pytest.raises(
        CheckpointMismatch, match="of run run, whose configuration differs:\n  optim.lr: stored 1, now 2"
    ):
        search.find_latest()
    assert [payload["state"] for payload in seen] == [{"step": 3}]
    with pytest.raises(CheckpointMismatch):
        search.verified("best")
    assert _search(place, run="other", load_only=True).verified("best")[1] == place / "best.pth"


def test_what_lies_on_a_disk_of_its_own_is_not_loaded(place: Path) -> None:
    search = _search(place)
    search.lie_apart(Apart(any=True, follows=True))
    assert search.find_latest() is None
    with pytest.raises(CheckpointNotFound):
        search.verified("latest")
    search.lie_apart(Apart())
    assert search.find_latest() == "latest"


def test_what_a_killed_save_has_left_is_removed_for_its_own_run_alone(place: Path) -> None:
    left = place / f"{storage.UPLOADING}1"
    left.write_text("half")
    _search(place, run="other").tidy()
    assert left.exists()
    _search(place).tidy()
    assert not left.exists()


def test_after_a_failure_it_says_what_is_left(place: Path) -> None:
    assert _search(place).still_good() == (
        f"Still good in {place}: latest (step 3), {SECOND} (step 2), best (step 1), {OLDEST} (step 1)."
    )
    empty = place.parent / "empty"
    assert f"in {empty} no complete checkpoint" in _search(empty).still_good()

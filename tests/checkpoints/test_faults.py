"""Every call to the system that a restart and a save make fails once: what was complete is still there, the error says what to do, and
after the mend the run goes on bitwise."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.chaos import ASKED, report
from support.faults import FAULTS, Crash, FaultyOs
from support.saves import KINDS, litter, load, make_manager, record_saves, save, train_on

from danling.checkpoints import CheckpointDiskError, CheckpointError, storage
from danling.cli.verify import verify

FIRST, STRUCK, LAST = 3, 4, 6
SOME = 6
MENDS = (
    "Free some",
    "Give this user the right",
    "is mounted for reading only",
    "Bring it back",
    "may be failing",
    "Use another checkpoint",
    "Restore one of them",
    "or bring it back",
)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    # The process ends here and not the machine: what is synced does not matter, only in which order; and a disk takes its time.
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture(scope="module", params=KINDS)
def earlier(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    directory = tmp_path_factory.mktemp(request.param) / "checkpoints"
    train_on(request.param, directory, FIRST)
    return request.param, directory


def attempt(
    kind: str,
    place: Path,
    faulty: FaultyOs,
    monkeypatch: pytest.MonkeyPatch,
    mode: str = "disabled",
) -> str | None:
    """Restart and save under a fault; return the error, `None` when there was none, and the empty text of a process that died."""
    with monkeypatch.context() as patch:
        patch.setattr(storage, "os", faulty)
        try:
            train_on(kind, place, STRUCK, mode=mode)
        except CheckpointError as error:
            # What reads for torch catches the death of the process too.
            return "" if faulty.dead else str(error)
        except Crash:
            return ""
    return None


def check_error(error: str) -> None:
    """An error says what was tried on which path, what came of it, what is good, and what to do."""
    assert error.startswith("Expected ") and " Received: " in error and "/" in error, error
    assert any(mend in error for mend in MENDS), error
    if error.startswith("Expected to"):
        assert "start again" in error and (
            "Still good in" in error or "was not touched" in error
        ), error
    if error.startswith(("Expected to write", "Expected to sync", "Expected to create")):
        assert "bytes free" in error, error


def check_earlier(kind: str, place: Path, saved: bool) -> None:
    """What was complete is still there, or what was saved over it."""
    manager = make_manager(kind, place)
    found = {
        record.name: load(manager, record.name) for record in manager.store.records(complete=True)
    }
    assert found["latest"] in ((STRUCK,) if saved else (FIRST, STRUCK))
    assert found["best"] in ((STRUCK,) if saved else (FIRST - 1, STRUCK))
    assert {FIRST, FIRST - 1} <= set(found.values()) or {FIRST, STRUCK} <= set(found.values())


def check_end(kind: str, place: Path) -> None:
    """The run goes on to the end that it has when it is left alone."""
    train_on(kind, place, LAST)
    manager = make_manager(kind, place)
    found = {
        record.name: load(manager, record.name) for record in manager.store.records(complete=True)
    }
    newest = {
        "latest": LAST,
        "best": LAST,
        f"ckpt-s{LAST:012d}": LAST,
        f"ckpt-s{LAST - 1:012d}": LAST - 1,
    }
    assert newest.items() <= found.items()
    assert litter(place) == []
    assert not [verdict for verdict in verify(place, "full") if verdict["problems"]]


def some(calls: list[Any]) -> list[Any]:
    """Return all of them where chaos is asked for, else some at equal distances."""
    return calls if ASKED else calls[:: -(-len(calls) // SOME)]


# Each fault of each kind of checkpoint; `make test` meets those of sharded ones, which take longer, in one of the two modes by turns.
_CALLS = [
    pytest.param(
        kind, fault, mode, marks=pytest.mark.slow if kind == "dcp" and (number + turn) % 2 else ()
    )
    for kind in KINDS
    for number, fault in enumerate(FAULTS)
    for turn, mode in enumerate(("disabled", "async"))
]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("earlier", "fault", "mode"), _CALLS, indirect=["earlier"])
def test_a_call_fails(
    earlier: tuple[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    mode: str,
) -> None:
    kind, recorded = earlier
    counting = FaultyOs()
    assert (
        attempt(
            kind, Path(shutil.copytree(recorded, tmp_path / "count")), counting, monkeypatch, mode
        )
        is None
    )
    assert len(counting.calls) > 150
    chosen = some(counting.candidates(fault))
    errors = 0
    for index in chosen:
        place = Path(shutil.copytree(recorded, tmp_path / str(index)))
        faulty = FaultyOs(index, fault, place)
        error = attempt(kind, place, faulty, monkeypatch, mode)
        assert faulty.struck
        faulty.mend()
        if error:
            check_error(error)
        errors += error is not None
        check_earlier(kind, place, error is None and fault != "vanish")
        check_end(kind, place)
        shutil.rmtree(place)
    assert errors > 0
    report(
        f"calls of a restart and a save that met {fault}: {kind}, {mode} (no kills, {len(chosen)} faults)",
        0,
        len(chosen),
    )


def test_error_names_the_call_the_free_space_and_the_good_checkpoint(
    earlier: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, recorded = earlier
    place = Path(shutil.copytree(recorded, tmp_path / "checkpoints"))

    class Full(FaultyOs):
        def write(self, handle: int, data: Any) -> int:
            raise OSError(28, "No space left on device")

    manager = make_manager(kind, place)
    manager.begin("latest")
    with monkeypatch.context() as patch:
        patch.setattr(storage, "os", Full())
        with pytest.raises(CheckpointDiskError) as raised:
            save(manager, STRUCK)
    told = str(raised.value)
    assert re.search(
        rf"Expected to write {place}/\S+\. Received: No space left on device, with [\d,]+ bytes free\.",
        told,
    )
    assert "Free some space" in told and "`auto_resume` continues" in told
    assert f"Still good in {place}: " in told and "latest (step 3)" in told


def test_contents_are_durable_before_they_get_a_name(
    earlier: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, recorded = earlier
    if kind != "file":
        pytest.skip("a target becomes visible by its manifest, which is written last")
    place = Path(shutil.copytree(recorded, tmp_path / "traced"))
    faulty = FaultyOs()
    assert attempt(kind, place, faulty, monkeypatch) is None
    calls = [name for name, _ in faulty.calls]
    first_link, last_write = (
        calls.index("link"),
        max(i for i, name in enumerate(calls) if name == "write"),
    )
    assert last_write < first_link
    # One for the state and one for each of the three manifests, each after its writes; then the directory.
    assert calls[:first_link].count("fsync") >= 5
    assert calls[len(calls) - 1 - calls[::-1].index("replace") :].count("fsync") >= 1


def test_a_full_disk_is_noticed_before_anything_is_written(
    earlier: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, recorded = earlier
    place = Path(shutil.copytree(recorded, tmp_path / "full"))
    manager = make_manager(kind, place)
    manager.begin("latest")
    before = sorted(path.name for path in place.rglob("*"))

    class Full(FaultyOs):
        def statvfs(self, path: Path) -> Any:
            class Found:
                f_bavail, f_frsize = 1, 1000

            return Found

    with monkeypatch.context() as patch:
        patch.setattr(storage, "os", Full())
        with pytest.raises(CheckpointError, match="Expected 2,520 free bytes .* Received: 1,000"):
            save(manager, STRUCK)
    assert sorted(path.name for path in place.rglob("*")) == before


def test_file_systems_without_links_get_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Linkless(FaultyOs):
        def link(self, source: Path, target: Path) -> None:
            raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(storage, "os", Linkless())
    place = record_saves("file", tmp_path / "checkpoints", (1, 2))
    assert len({path.stat().st_ino for path in place.glob("*.pth")}) == 3
    assert load(make_manager("file", place), "best") == 1

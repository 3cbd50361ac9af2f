"""A restart finds the newest good checkpoint whatever is next to it, names what it passes over, and the next save makes its way."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.patience import until
from support.processes import child
from support.saves import KINDS, go_on, load, make_manager, record_saves

from danling.checkpoints import CheckpointDamaged, storage
from danling.checkpoints.target_store import TargetStore
from danling.cli.main import main
from danling.cli.verify import verify

OLDEST = "ckpt-s000000000001"


@pytest.fixture(scope="module", params=KINDS)
def recorded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    kind = request.param
    return kind, record_saves(kind, tmp_path_factory.mktemp(kind) / "checkpoints")


@pytest.fixture
def kind(recorded: tuple[str, Path]) -> str:
    return recorded[0]


@pytest.fixture
def place(recorded: tuple[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded[1], tmp_path / "checkpoints"))


def part(place: Path, name: str) -> Path:
    """Return the file that a name goes by, of either kind."""
    return place / (f"{name}.pth" if (place / "best.pth").exists() else name)


def sums(place: Path, name: str) -> Path:
    """Return the sums of a name."""
    own = part(place, name)
    return (
        own.with_name(own.name + ".sha256")
        if own.suffix
        else own.parent / "targets" / own.read_text().strip() / "manifest.sha256"
    )


def replace(path: Path, make: Callable[[Path], object]) -> Path:
    path.unlink()
    make(path)
    return path


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def directory(path: Path) -> None:
    (path / "within").mkdir(parents=True)


def empty(path: Path) -> None:
    path.touch()


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def foreign(path: Path) -> None:
    path.write_bytes(b"\x80\x02ccollections\nOrderedDict\n)R." * 30)


STRANGE = {
    "a loop of links": loop,
    "a link that leads nowhere": dangling,
    "a directory": directory,
    "a named pipe": os.mkfifo,
    "an empty file": empty,
    "a huge file": huge,
    "a file of another program": foreign,
}


@pytest.mark.parametrize("strange", STRANGE)
def test_a_strange_thing_in_place_of_an_old_checkpoint(
    kind: str, place: Path, strange: str, caplog: pytest.LogCaptureFixture
) -> None:
    changed = replace(part(place, OLDEST), STRANGE[strange])
    with caplog.at_level(logging.WARNING, "danling"):
        found, manager = go_on(kind, place, 4)
    assert found == 3
    named = [record.message for record in caplog.records if str(changed) in record.message]
    assert len(named) == 1 and "is skipped" in named[0]
    assert load(manager, "latest") == 4 and load(manager, "ckpt-s000000000004") == 4


@pytest.mark.parametrize("strange", STRANGE)
@pytest.mark.parametrize("which", ["latest", "sums of latest", "waiting sums of latest"])
def test_a_strange_thing_in_the_way_of_the_next_save(
    kind: str, place: Path, which: str, strange: str, caplog: pytest.LogCaptureFixture
) -> None:
    changed = part(place, "latest") if which == "latest" else sums(place, "latest")
    if which.startswith("waiting"):
        if kind == "dcp":
            pytest.skip("the sums of a target never wait")
        changed = changed.with_name(f"{changed.name}.next")
        STRANGE[strange](changed)
        newest = 3
    else:
        replace(changed, STRANGE[strange])
        # A target goes by its own name when its pointer is lost.
        newest = 3 if kind == "dcp" and which == "latest" else 2
    with caplog.at_level(logging.WARNING, "danling"):
        found, manager = go_on(kind, place, 4)
    assert found == newest
    assert load(manager, "latest") == 4
    assert go_on(kind, place, 5)[0] == 4
    verdicts = [verdict for verdict in verify(place, "full") if "latest" in verdict["path"]]
    assert [verdict["problems"] for verdict in verdicts] == [[]]
    if strange in ("a directory", "a named pipe") and (kind == "file" or which == "latest"):
        aside = next(place.glob("*.aside-*"))
        assert any(str(aside) in record.message for record in caplog.records), (
            "no line says where it is now"
        )


@pytest.mark.parametrize("strange", STRANGE)
@pytest.mark.parametrize("which", ["latest", "sums"])
def test_verify_judges_every_checkpoint_and_goes_on(
    place: Path, which: str, strange: str, capsys: pytest.CaptureFixture[str]
) -> None:
    replace(part(place, OLDEST) if which == "latest" else sums(place, OLDEST), STRANGE[strange])
    assert main(["verify", str(place)]) == 1
    told = capsys.readouterr().out
    assert told.count("ok  ") >= 2 and "DAMAGED" in told


def test_a_named_pipe_hangs_no_reader(
    kind: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replace(part(place, "latest"), os.mkfifo)
    assert main(["verify", str(place)]) == 1
    # The sums of a file are still next to it, and say that there was one.
    assert main(["verify", str(part(place, "latest"))]) == (1 if kind == "file" else 3)
    assert main(["inspect", str(part(place, "latest"))]) == 3
    if kind == "dcp":
        target = next((place / "targets").iterdir())
        for name in (".metadata", "__0_0.distcp"):
            replace(target / name, os.mkfifo)
            assert main(["verify", str(target)]) == 1
            assert main(["inspect", str(target)]) == 1
            assert f"{name} is a named pipe" in capsys.readouterr().out


@pytest.mark.parametrize("strange", ["a directory", "a named pipe"])
def test_renamed_strange_file_is_no_longer_mentioned(
    tmp_path: Path,
    strange: str,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = record_saves("file", tmp_path / "checkpoints")
    alone = place / "ckpt-s000000000009.pth"
    STRANGE[strange](alone)
    with caplog.at_level(logging.WARNING, "danling"):
        go_on("file", place, 4)
        (told,) = [record.message for record in caplog.records]
        assert f"Received: {alone.name} is {strange}; {alone.name}.sha256 is missing." in told
        alone.rename(place / "moved-away.pth")
        caplog.clear()
        assert go_on("file", place, 5)[0] == 4
    assert caplog.records == []
    assert main(["verify", str(place)]) == 0
    assert "moved-away" not in capsys.readouterr().out


class BrokenPaths:
    """An `os` on which every call fails that reads or looks at what was at a path, under whatever name: a bad inode."""

    def __init__(self, code: int, broken: Path) -> None:
        self._code = code
        self._broken = os.stat(broken).st_ino

    def __getattr__(self, name: str) -> Any:
        original = getattr(os, name)
        if name not in ("open", "stat", "lstat", "listdir"):
            return original

        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            if os.path.lexists(path) and os.lstat(path).st_ino == self._broken:
                raise OSError(self._code, os.strerror(self._code), str(path))
            return original(path, *args, **kwargs)

        return call


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ESTALE])
@pytest.mark.parametrize("which", ["file", "sums"])
def test_an_unreadable_old_checkpoint_blocks_no_restart(
    kind: str,
    place: Path,
    which: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = part(place, OLDEST) if which == "file" else sums(place, OLDEST)
    monkeypatch.setattr(storage, "os", BrokenPaths(code, broken))
    with caplog.at_level(logging.WARNING, "danling"):
        found, manager = go_on(kind, place, 4)
    assert found == 3 and load(manager, "latest") == 4
    assert any(os.strerror(code) in record.message for record in caplog.records)
    assert sorted(bool(verdict["problems"]) for verdict in verify(place, "full"))[-1] is True


def test_unlistable_target_blocks_no_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = record_saves("dcp", tmp_path / "checkpoints")
    newest = TargetStore(place).target(place / "latest")
    monkeypatch.setattr(storage, "os", BrokenPaths(errno.EIO, newest))
    assert go_on("dcp", place, 4)[0] == 2


def test_files_of_another_kind_of_manager_block_no_restart(
    kind: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "dcp":
        (place / "old.pth").mkdir()
        (place / "latest.pth.sha256").symlink_to("latest.pth.sha256")
    else:
        (place / "targets" / "00000009-00000000").mkdir(parents=True)
        (place / "best").symlink_to("best")
        monkeypatch.setattr(storage, "os", BrokenPaths(errno.EIO, place / "targets"))
    assert go_on(kind, place, 4)[0] == 3


def test_a_file_in_place_of_the_targets_is_moved_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "checkpoints"
    place.mkdir()
    (place / "targets").write_text("mine")
    with caplog.at_level(logging.WARNING, "danling"):
        assert go_on("dcp", place, 1)[0] is None
    assert next(place.glob("targets.aside-*")).read_text() == "mine"
    assert "targets.aside-" in caplog.text


def test_dangling_targets_are_named_by_an_error(place: Path, kind: str) -> None:
    if kind == "file":
        pytest.skip("files have no targets")
    shutil.move(place / "targets", place.parent / "unmounted")
    (place / "targets").symlink_to(place.parent / "mount")
    manager = make_manager(kind, place)
    assert manager.find_latest() is None
    with pytest.raises(CheckpointDamaged, match="that verifies, since there are some"):
        manager.checkpoints.refuse_lost()
    shutil.move(place.parent / "unmounted", place.parent / "mount")
    assert make_manager(kind, place).find_latest() is not None
    with pytest.raises(
        ValueError, match="Expected no link at .*targets.*Move what it leads to here"
    ):
        go_on(kind, place, 4)


def test_run_does_not_start_from_scratch_over_unreadable_checkpoints(
    place: Path, kind: str
) -> None:
    fresh = make_manager(kind, place.parent / "other")
    fresh.checkpoints.refuse_lost()
    for path in [*place.glob("*.sha256"), *place.glob("targets/*/manifest.sha256")]:
        path.write_text("nothing")
    with pytest.raises(CheckpointDamaged, match=r"(?s)Received none that does:\n.*latest"):
        make_manager(kind, place).checkpoints.refuse_lost()


def test_a_foreign_file_without_sums_is_not_overwritten(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    place.mkdir()
    (place / "latest.pth").write_bytes(b"precious")
    assert go_on("file", place, 1)[0] is None
    assert next(place.glob("latest.pth.aside-*")).read_bytes() == b"precious"


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
    before = {
        path: (path.stat().st_ino, path.read_bytes()) for path in place.rglob("*") if path.is_file()
    }
    for number in range(5):
        count.write_text("")
        # The process does nothing but load, so that it is killed within a load, each time after another number of them.
        with child(lambda: _load_for_ever(kind, place, count)):
            until(lambda number=number: count.stat().st_size > number)
    assert {
        path: (path.stat().st_ino, path.read_bytes()) for path in place.rglob("*") if path.is_file()
    } == before
    assert go_on(kind, place, 4)[0] == 3

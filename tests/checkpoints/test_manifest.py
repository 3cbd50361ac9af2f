"""The manifest says what was written, to us and to `sha256sum`; names, lines and retention follow from what was recorded."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.saves import KINDS, make_manager, save

from danling.checkpoints import CheckpointDamaged
from danling.checkpoints.manifest import (
    Line,
    Manifest,
    Record,
    history_name,
    is_history,
    next_line,
    on_line,
    to_delete,
)
from danling.checkpoints.storage import hash_file


def _manifest(directory: Path) -> Manifest:
    files = {}
    for name, content in (("a.bin", b"one"), ("b.bin", b"two")):
        (directory / name).write_bytes(content)
        files[name] = (3, hash_file(directory / name))
    return Manifest(Record("latest", 7, 2, ((0, 3), (1, 5)), "a-b: c", 70, 1), files)


def test_round_trip(tmp_path: Path) -> None:
    manifest = _manifest(tmp_path)
    assert Manifest.parse(manifest.text()) == manifest


def test_sha256sum_reads_it(tmp_path: Path) -> None:
    (tmp_path / "sums").write_text(_manifest(tmp_path).text())
    done = subprocess.run(["sha256sum", "--strict", "-c", "sums"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "a.bin: OK\nb.bin: OK\n", done.stdout + done.stderr


def test_every_changed_byte_of_it_is_noticed(tmp_path: Path) -> None:
    text = _manifest(tmp_path).text()
    for index in range(len(text)):
        changed = text[:index] + chr(ord(text[index]) ^ 1) + text[index + 1 :]
        with pytest.raises(CheckpointDamaged):
            Manifest.parse(changed)
    for length in range(len(text)):
        with pytest.raises(CheckpointDamaged):
            Manifest.parse(text[:length])


# Names, lines and retention


def _record(
    sequence: int, *, name: str | None = None, branch: int = 0, line: tuple[tuple[int, int], ...] = ()
) -> Record:
    return Record(name or f"ckpt-s{sequence:012d}", sequence, branch, line, "run", sequence, 0)


def test_history_names() -> None:
    assert history_name(step_mode=True, epoch=3, global_step=70) == "ckpt-s000000000070"
    assert history_name(step_mode=False, epoch=3, global_step=70) == "ckpt-e000003"
    assert is_history("ckpt-e000003")
    assert not is_history("ckpt-mine") and not is_history("latest")


def test_retention_keeps_the_newest_made_and_what_is_protected() -> None:
    # Made in this order, whatever their names say.
    records = [
        _record(1, name="ckpt-e000009"),
        _record(2, name="ckpt-e000001"),
        _record(3, name="ckpt-e000002"),
        _record(3, name="latest"),
    ]
    assert to_delete(records, keep=0, protected=()) == []
    assert to_delete(records, keep=2, protected=()) == ["ckpt-e000009"]
    assert to_delete(records, keep=1, protected={1}) == ["ckpt-e000001"]


def test_going_back_begins_a_line_without_what_came_after() -> None:
    records = [_record(1), _record(2), _record(3)]
    line = next_line(records, records[0])
    assert line == Line(1, ((0, 1),), 3)
    assert [on_line(r, line.branch, line.ancestors) for r in records] == [True, False, False]
    fourth = _record(4, branch=1, line=line.ancestors)
    again = next_line([*records, fourth, _record(5, branch=1, line=line.ancestors)], fourth)
    assert again == Line(2, ((0, 1), (1, 4)), 5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_latest_becomes_visible_after_the_other_names_of_its_save(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart looks for it first: killed between two names, it must not find one of whose save others are still to come."""
    moved: list[str] = []
    replace = os.replace

    def noted(source: Path, target: Path) -> None:
        replace(source, target)
        moved.append(Path(target).name.removesuffix(".pth"))

    monkeypatch.setattr(os, "replace", noted)
    manager = make_manager(kind, tmp_path / "checkpoints")
    save(manager, 3)
    manager.close()
    names = ["ckpt-s000000000003", "best", "latest"]
    assert [name for name in moved if name in names] == names

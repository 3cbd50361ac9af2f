"""The manifest says what was written, to us and to `sha256sum`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from danling.checkpoints import CheckpointDamaged
from danling.checkpoints.manifest import Manifest, find_problems
from danling.checkpoints.policy import Record
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


def test_levels(tmp_path: Path) -> None:
    manifest = _manifest(tmp_path)
    assert find_problems(manifest, tmp_path, "full") == []
    (tmp_path / "a.bin").write_bytes(b"onf")
    assert find_problems(manifest, tmp_path, "size") == []
    assert find_problems(manifest, tmp_path, "full") == ["a.bin has another SHA-256 than was written"]
    (tmp_path / "a.bin").write_bytes(b"")
    (tmp_path / "b.bin").unlink()
    assert find_problems(manifest, tmp_path, "none") == ["b.bin is missing"]
    assert find_problems(manifest, tmp_path, "size") == ["a.bin has 0 bytes instead of 3", "b.bin is missing"]

"""Files that data sets read: found in what their objects hold, by size and date; nothing is called."""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from danling.audit.data_files import data_files


class Folder:
    """Like a folder of images: a root, classes, and samples of a path and a label."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.classes = ["cat", "dog"]
        self.samples = [(str(path), 0) for path in sorted(root.glob("*.jpg"))]
        self.itself = self

    @property
    def dear(self) -> str:
        raise AssertionError("a property is not to be read")

    def __call__(self) -> None:
        raise AssertionError("nothing is to be called")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    for number in range(3):
        (tmp_path / "images" / f"{number}.jpg").write_bytes(b"x" * number)
        os.utime(tmp_path / "images" / f"{number}.jpg", (0, 0))
    return tmp_path / "images"


def aged(path: str) -> str:
    os.utime(path, (9, 9))
    return path


def test_paths_are_found_through_wrappers_with_size_and_date(root: Path) -> None:
    wrapped = ConcatDataset([Subset(Folder(root), [0, 2]), TensorDataset(torch.zeros(2))])
    found = data_files([wrapped])
    assert found[str(root / "2.jpg")] == "2 bytes, 1970-01-01T00:00:00+00:00"
    assert len(found) == 3


def test_open_files_mapped_arrays_relative_paths_and_mappings(root: Path) -> None:
    np.save("table.npy", np.zeros(4, np.float32))
    np.save("written_now.npy", np.zeros(4, np.float32))
    aged("table.npy")
    with open("images/1.jpg", "rb") as file:
        found = data_files(
            [OrderedDict(a=np.load("table.npy", mmap_mode="r"), b=[file, Path("images/2.jpg"), "written_now.npy"])]
        )
    assert sorted(os.path.relpath(path) for path in found) == ["images/1.jpg", "images/2.jpg", "table.npy"]


def test_what_names_no_file_is_left_out(root: Path) -> None:
    values = [
        "cat",
        "a sentence.",
        "a\0b",
        "",
        "/nowhere/at.all",
        3,
        None,
        torch.zeros(2),
        Folder,
        "x/" * 5000,
        b"1.jpg",
    ]
    os.mkfifo("images/pipe.bin")
    detached = io.TextIOWrapper(io.BytesIO(b"a"))
    detached.detach()
    values += [detached, str(root), "."]
    assert data_files([values, "images/pipe.bin"]) == {}


def test_of_too_many_it_is_said_so(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("danling.audit.data_files._MOST_FILES", 2)
    assert data_files([Folder(root)])["more"] == "only 2 were looked at"
    monkeypatch.setattr("danling.audit.data_files._MOST_FILES", 100)
    monkeypatch.setattr("danling.audit.data_files._MOST_VALUES", 10)
    assert "more" in data_files([list(range(100))])


def test_of_many_sentences_few_are_taken_for_paths(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    stat = os.stat
    monkeypatch.setattr("danling.audit.data_files.os.stat", lambda path: asked.append(path) or stat(path))
    monkeypatch.setattr("danling.audit.data_files._MOST_FAILED", 20)
    assert data_files([[f"Sentence {number} is here." for number in range(100)]]) == {} and not asked
    assert data_files([[f"and/or {number}" for number in range(100)]]) == {} and len(asked) == 20

"""The table of backends: each row with what its manager writes and what earlier code wrote, and one that is added."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.saves import load, save

from danling.checkpoints import CheckpointNotFound, CheckpointSettings, FileCheckpointManager, backends
from danling.checkpoints.backends import BACKENDS, Backend, backend_named, backend_of, locate, stores, stores_in
from danling.checkpoints.file_store import FileStore
from danling.checkpoints.policy import Record
from danling.checkpoints.reading import read_payload, read_sections
from danling.checkpoints.target_store import TargetStore
from danling.cli.contents import read_contents
from danling.cli.verify import verify
from danling.distributed import LocalDomain

FIXTURES = Path(__file__).parent / "fixtures" / "v1"
STORED = {"file": FIXTURES / "run-file", "dcp": FIXTURES / "run-sharded", "deepspeed": FIXTURES / "run-engine"}


@pytest.mark.parametrize("name", list(STORED))
def test_every_row_knows_its_own(name: str) -> None:
    """What lies there is found, told from the others, verified, described and read through the table alone."""
    store, found = locate(STORED[name])
    target = store.target(found)
    backend = backend_of(target)
    assert backend is backend_named(name) and isinstance(store, backend.store)
    assert store.claims(found) and store.listed() == []  # a store of "checkpoints" here
    (listed,) = [path for each in stores_in(STORED[name]) for path in each.listed()]
    assert listed == found
    manifest, problems = store.examine(found, "full")
    assert problems == [] and manifest.record.step == 3
    outline = backend.read_outline(target)
    assert outline.plain["state"]["train"]["global_step"] == 3 and outline.is_own
    names = {entry.name for entry in outline.entries}
    assert any(entry.startswith("ema.weights.") for entry in names)
    assert any(entry.startswith("model.") for entry in names) is (name != "deepspeed")
    payload = backend.read_payload(target, sections=frozenset({"format_version", "runner", "state"}))
    assert payload["runner"]["seed"] == 3 and set(payload) == {"format_version", "runner", "state"}
    assert backend.manager().store_class is backend.store


def test_a_damaged_file_is_named_by_every_store(tmp_path: Path) -> None:
    import shutil

    for name, source in STORED.items():
        copy = tmp_path / name
        shutil.copytree(source, copy)
        biggest = max((path for path in copy.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
        content = bytearray(biggest.read_bytes())
        content[len(content) // 2] ^= 1
        biggest.write_bytes(content)
        (verdict,) = verify(copy, "full")
        assert len(verdict["problems"]) == 1 and biggest.name in verdict["problems"][0]


def test_what_a_manager_writes_is_read_through_the_table(tmp_path: Path) -> None:
    payload = {"format_version": 1, "runner": {"seed": 1}, "state": {}, "model": {"w": torch.arange(3.0)}}
    for name in ("file", "dcp"):
        manager = backend_named(name).manager()(
            tmp_path / name,
            domain=LocalDomain(),
            run_id="run",
            settings=CheckpointSettings(async_mode="disabled"),
            step_mode=True,
        )
        manager.save_checkpoint(payload, epoch=0, global_step=1)
        manager.close()
        store, found = locate(tmp_path / name)
        assert backend_of(store.target(found)).name == name
        assert torch.equal(read_payload(store.target(found))["model"]["w"], payload["model"]["w"])  # type: ignore[index]
        assert read_sections(tmp_path / name, ["runner"])["runner"] == {"seed": 1}


def test_names_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"checkpoint\.backend='tape'"):
        backend_named("tape")
    with pytest.raises(CheckpointNotFound, match="where there is none"):
        locate(tmp_path)
    assert stores() == [FileStore, TargetStore]
    assert [type(store) for store in stores_in(tmp_path, first=TargetStore)] == [TargetStore, FileStore]


class NoteStore(FileStore):
    """Checkpoints that are lines of text; `record` is what the first word says."""

    def locate(self, source: Path) -> Path | None:
        """Return the note, or the one in a directory."""
        return next(
            (path for path in (source, source / "latest.note") if path.suffix == ".note" and path.is_file()), None
        )

    def claims(self, path: Path) -> bool:
        """Whether it is a note."""
        return path.suffix == ".note"

    def listed(self) -> list[Path]:
        """Return the notes."""
        return sorted(self.directory.glob("*.note"))

    def record(self, path: Path) -> Record:
        """Return what it says."""
        return Record("latest", 1, "", (), "run", int(path.read_text()), 0)

    def verify(self, path: Path, level: str) -> None:
        """Believe it."""


def test_a_backend_is_one_store_and_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a row in the table it is found, read and described wherever the others are."""
    reader = tmp_path / "note_reader.py"
    reader.write_text(
        "from danling.checkpoints.outline import Outline\n"
        "def read_payload(path, **how):\n"
        "    return {'format_version': 1, 'runner': {'step': int(path.read_text())}}\n"
        "def read_outline(path):\n"
        "    return Outline('note', path, plain=read_payload(path))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    row = Backend("note", NoteStore, lambda path: path.suffix == ".note", "note_reader", ("note_reader", "None"))
    monkeypatch.setattr(backends, "BACKENDS", (row, *BACKENDS))
    (tmp_path / "latest.note").write_text("17")
    assert read_sections(tmp_path, ["runner"])["runner"] == {"step": 17}
    contents: Any = read_contents(tmp_path)
    assert contents.kind == "note" and contents.record["step"] == 17


class BinStore(FileStore):
    suffix = ".bin"


class BinManager(FileCheckpointManager):
    store_class = BinStore


def test_single_files_of_another_kind_have_another_suffix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A subclass of the store and of the manager saves, prunes, resumes, tidies and verifies as the library's own."""
    monkeypatch.setattr(
        backends,
        "BACKENDS",
        (
            Backend("bin", BinStore, lambda path: path.suffix == ".bin", BACKENDS[0].reader, ("bins", "BinManager")),
            *BACKENDS,
        ),
    )
    settings = CheckpointSettings(async_mode="disabled", keep_latest_k=1)

    def manager() -> BinManager:
        return BinManager(tmp_path, domain=LocalDomain(), run_id="run", settings=settings, step_mode=True)

    first = manager()
    for step in (1, 2):
        save(first, step, best=step == 1)
    assert {path.name for path in tmp_path.iterdir() if path.suffix == ".bin"} == {
        "latest.bin", "best.bin", "ckpt-s000000000002.bin", "ckpt-s000000000001.bin",
    }  # fmt: skip
    (tmp_path / ".deleting-ckpt-s000000000002").touch()
    (tmp_path / "ckpt-s000000000002.bin").unlink()
    second = manager()
    second.tidy()
    assert not list(tmp_path.glob("ckpt-s000000000002*")) and not list(tmp_path.glob(".deleting*"))
    source = second.find_latest()
    assert source == "latest" and load(second, source) == 2
    second.begin(source)
    save(second, 3)
    assert load(manager(), "best") == 3 and not [v for v in verify(tmp_path, "full") if v["problems"]]


def test_the_table_needs_no_torch() -> None:
    """To verify checkpoints takes no import of seconds."""
    code = "import sys, danling.cli.verify, danling.checkpoints.backends; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

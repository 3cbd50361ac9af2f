"""The table of backends: each row with what its manager writes and what earlier code wrote, and one that is added."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from danling.checkpoints import CheckpointNotFound, CheckpointSettings
from danling.checkpoints.reading import (
    kind_of,
    locate,
    manager_named,
    read_outline,
    read_payload,
    read_sections,
    stores_in,
)
from danling.checkpoints.store import FileStore, TargetStore
from danling.cli.verify import verify
from danling.distributed import LocalDomain

FIXTURES = Path(__file__).parent / "fixtures" / "v1"
STORED = {"file": FIXTURES / "run-file", "dcp": FIXTURES / "run-sharded", "deepspeed": FIXTURES / "run-engine"}


@pytest.mark.parametrize("name", list(STORED))
def test_every_row_knows_its_own(name: str) -> None:
    """What lies there is found, told from the others, verified, described and read through the table alone."""
    store, found = locate(STORED[name])
    target = store.target(found)
    assert kind_of(target) == name and isinstance(store, manager_named(name).store_class)
    assert store.claims(found) and store.listed() == []  # a store of "checkpoints" here
    (listed,) = [path for each in stores_in(STORED[name]) for path in each.listed()]
    assert listed == found
    manifest, problems = store.examine(found, "full")
    assert problems == [] and manifest.record.step == 3
    outline = read_outline(target)
    assert outline.plain["state"]["train"]["global_step"] == 3 and outline.is_own
    names = {entry.name for entry in outline.entries}
    assert any(entry.startswith("ema.weights.") for entry in names)
    assert any(entry.startswith("model.") for entry in names) is (name != "deepspeed")
    payload = read_payload(target, sections=["runner", "state"])
    assert payload["runner"]["seed"] == 3 and set(payload) == {"format_version", "runner", "state"}


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
        manager = manager_named(name)(
            tmp_path / name,
            domain=LocalDomain(),
            run_id="run",
            settings=CheckpointSettings(async_mode="disabled"),
            step_mode=True,
        )
        manager.save_checkpoint(payload, epoch=0, global_step=1)
        manager.close()
        store, found = locate(tmp_path / name)
        assert kind_of(store.target(found)) == name
        assert torch.equal(read_payload(store.target(found))["model"]["w"], payload["model"]["w"])  # type: ignore[index]
        assert read_sections(tmp_path / name, ["runner"])["runner"] == {"seed": 1}


def test_names_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"checkpoint\.backend='tape'"):
        manager_named("tape")
    with pytest.raises(CheckpointNotFound, match="where there is none"):
        locate(tmp_path)
    assert [type(store) for store in stores_in(tmp_path, first=TargetStore)] == [TargetStore, FileStore]


def test_the_table_needs_no_torch() -> None:
    """To verify checkpoints takes no import of seconds."""
    code = "import sys, danling.cli.verify, danling.checkpoints.reading; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""What the manifests of a run in a store record, asked of the records alone."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from support.remote_runs import upload_run
from support.saves import record_saves

from danling.remote import RunLayout, open_store
from danling.remote.sources import RemoteRecords
from danling.remote.stored_run import StoredRun

pytest.importorskip("obstore")
LAYOUT = RunLayout("family", "run")
OLDEST, SECOND = "ckpt-s000000000001", "ckpt-s000000000002"


@pytest.mark.parametrize("kind", ["file", "dcp"])
def test_what_lacks_an_object_counts_for_the_order_alone_and_is_told_once(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record_saves(kind, tmp_path / "run" / "checkpoints")
    store = open_store(f"file://{tmp_path}/bucket")
    upload_run(tmp_path / "run", store, LAYOUT)

    def records() -> RemoteRecords:
        return RemoteRecords(StoredRun(store, LAYOUT), file=kind == "file")

    whole = records()
    assert [(found.name, found.record.step) for found in whole.described(complete=True)] == [
        ("best", 1),
        (OLDEST, 1),
        (SECOND, 2),
        ("latest", 3),
    ]
    assert whole.lost() == [] and whole.named(SECOND) is not None and whole.named("ckpt-s000000000009") is None
    assert RemoteRecords(StoredRun(store, LAYOUT), file=kind != "file").described(complete=False) == []

    run = StoredRun(store, LAYOUT)
    found = run.describe("latest", file=kind == "file")
    (tmp_path / "bucket" / LAYOUT.checkpoints / run.key(found, next(iter(found.manifest.files)))).unlink()
    cut = records()
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="danling"):
        for _ in range(2):
            assert [d.name for d in cut.described(complete=True)] == ["best", OLDEST, SECOND]
            assert [d.name for d in cut.described(complete=False)] == ["best", OLDEST, SECOND, "latest"]
    place = f"{run.url}/checkpoints/latest{'.pth' if kind == 'file' else ''}"
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith(f"{place} is skipped: ")
    assert [line.partition(": ")[0] for line in cut.lost()] == [place]

"""Checkpoints whose sums are right and whose contents are hostile: each costs one line, whichever command reads them."""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.recorded import bounded, record_run

from danling.checkpoints import CheckpointDamaged, storage
from danling.checkpoints.file_store import FILE_SUMS
from danling.checkpoints.manifest import Manifest
from danling.checkpoints.torch_files import check_values, read_file
from danling.cli.main import main

WEIGHTS = {"a": torch.ones(2)}


def own(**changes: Any) -> dict[str, Any]:
    return {
        "format_version": 1,
        "model": WEIGHTS,
        "state": {"train": {"global_step": 3}},
        "runner": {},
        **changes,
    }


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {"w": torch.ones(2)}
    for _ in range(levels):
        value = {"k": value}
    return value


def holds_itself() -> list[Any]:
    value: list[Any] = [1]
    value.append(value)
    return value


def doubled() -> list[Any]:
    value: list[Any] = [torch.ones(1)]
    for _ in range(60):
        value = [value, value]
    return value


PAYLOADS: dict[str, Any] = {
    "nested 3,000 times": own(model=nested(3000)),
    "a list that holds itself": own(state=holds_itself()),
    "lists that hold a list twice": own(extra=doubled()),
    "a tensor of 2**40 elements in 4 bytes": own(model={"a": torch.ones(1).expand(1 << 40)}),
    "weights by numbers": own(model={1: torch.ones(2)}),
    "weights that are none": own(model={"a": 5}),
    "a model that is a number": own(model=5),
    "settings that are a list": own(runner=[1]),
    "progress that is a number": own(state={"train": 4}),
    "results that are a list": own(state={"results": [1]}),
    "a result that is a number": own(state={"results": {"1": 1}}),
    "results by names": own(state={"results": {"a": {"b": {"c": 1.0}}}}),
    "scores of 401 digits": own(state={"scores": {"best_score": 10**400}}),
    "averages that are a number": own(ema=5),
    "a version that is a text": own(format_version="new"),
    "weights of another program, nested": nested(3000),
    "a state of another program that is a list": {"state": [1], "runner": 5, "a": torch.ones(1)},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_run(tmp_path_factory.mktemp("recorded"), checkpoint={"backend": "file"})


def resealed(run: Path, place: Path, put: Callable[[Path], None]) -> Path:
    """Return a copy of a run's checkpoint with other contents, and sums that are right."""
    place.mkdir(exist_ok=True)
    path = Path(shutil.copy(run / "checkpoints" / "best.pth", place / "best.pth"))
    sums = Path(shutil.copy(run / "checkpoints" / f"best.pth{FILE_SUMS}", place))
    path.unlink()
    put(path)
    record = Manifest.parse(sums.read_text()).record
    sums.write_text(
        Manifest(record, {"best.pth": (path.stat().st_size, storage.hash_file(path))}).text()
    )
    return path


def save(payload: Any) -> Callable[[Path], None]:
    def put(path: Path) -> None:
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(100_000)
        try:
            torch.save(payload, path)
        finally:
            sys.setrecursionlimit(limit)

    return put


@pytest.mark.parametrize("name", PAYLOADS)
def test_hostile_contents_are_one_line(
    run: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = resealed(run, tmp_path / "copy", save(PAYLOADS[name]))
    assert main(["verify", str(path)]) == 0, "the sums are right"
    for words in (
        ["inspect", "--tensors", "--config"],
        ["export", str(tmp_path / "out.safetensors")],
    ):
        capsys.readouterr()
        code = main([words[0], str(path), *words[1:]])
        told = capsys.readouterr().err
        assert code in (0, 1, 2) and told.count("\n") <= 1, told
        assert code == 0 or told.startswith("danling: Expected")


def inflated(path: Path) -> None:
    """Write a file of some megabytes whose tensor has 2.5 GiB."""
    torch.save(own(), path)
    whole = path.read_bytes()
    path.unlink()
    with (
        zipfile.ZipFile(_stored(path, whole)) as old,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as new,
    ):
        for record in old.infolist():
            with new.open(record.filename, "w", force_zip64=True) as out:
                if "/data/" not in record.filename:
                    out.write(old.read(record))
                    continue
                for _ in range(160):
                    out.write(bytes(1 << 24))


def _stored(path: Path, content: bytes) -> Path:
    stored = path.with_name("whole.zip")
    stored.write_bytes(content)
    return stored


def test_compression_bomb_is_refused_before_it_inflates(run: Path, tmp_path: Path) -> None:
    path = resealed(run, tmp_path / "copy", inflated)
    assert path.stat().st_size < 16 << 20
    done = bounded("export", path, tmp_path / "out.pth")
    assert done.returncode == 1 and "compressed, which torch never does" in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1 and not (tmp_path / "out.pth").exists()


def test_overlapping_records_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"a": torch.ones(2000)}, path)
    with zipfile.ZipFile(path) as archive:
        data = next(record for record in archive.infolist() if "/data/0" in record.filename)
    content = path.read_bytes()
    entry = content.rindex(b"PK\x01\x02", 0, content.rindex(data.filename.encode()))
    # The entry of the same bytes with another size, which is all that is read of it here.
    spoiled = bytearray(content)
    spoiled[entry + 20 : entry + 28] = (1 << 31).to_bytes(4, "little") * 2
    path.write_bytes(spoiled)
    with pytest.raises(CheckpointDamaged, match="records have|no whole archive"):
        read_file(path)


def test_values_within_the_bounds_are_read(tmp_path: Path) -> None:
    shared = torch.ones(3)
    payload = {
        **nested(150),
        "tied": [shared, shared],
        "view": shared.expand(4, 3),
        "numbers": list(range(10_000)),
    }
    torch.save(payload, tmp_path / "a.pt")
    found = read_file(tmp_path / "a.pt")
    assert torch.equal(found["view"], payload["view"]) and found["numbers"] == payload["numbers"]
    check_values(torch.ones(1), tmp_path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["a.pth", "a.safetensors", "a.pt", "model.safetensors.index.json"])
def test_a_named_pipe_is_not_waited_for(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / name)
    for words in (["inspect"], ["export", str(tmp_path / "out.pth")], ["estimate"], ["verify"]):
        assert main([words[0], str(tmp_path / name), *words[1:]]) in (1, 2, 3)
        told = capsys.readouterr()
        assert told.err.count("\n") == 1 or "named pipe" in told.out

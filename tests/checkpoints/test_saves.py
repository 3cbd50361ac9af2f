"""Saves of both kinds: names, sources, retention, lines, damage, foreign readers, the background, several ranks."""

from __future__ import annotations

import enum
import logging
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.processes import run_processes
from support.saves import KINDS, load, make_manager, payload, record_saves, save
from support.toys import differences
from support.warm import interpreter
from torch import nn

from danling.checkpoints import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    CheckpointSettings,
    FileCheckpointManager,
    read_config,
    read_model,
    storage,
)
from danling.checkpoints.manifest import Manifest, Record
from danling.checkpoints.reading import read_payload
from danling.checkpoints.snapshot import SnapshotBuffers, to_host
from danling.distributed import Domain

FIXTURES = Path(__file__).parent / "fixtures"
OLDEST, SECOND = "ckpt-s000000000001", "ckpt-s000000000002"
of_both_kinds = pytest.mark.parametrize("kind", KINDS)


def names_in(directory: Path) -> list[str]:
    return sorted(
        path.stem for path in directory.iterdir() if path.is_file() and path.suffix in ("", ".pth")
    )


def contents(directory: Path, kind: str) -> set[Any]:
    """Return what tells the contents under the names of a directory apart."""
    files = [path for path in directory.iterdir() if path.is_file() and path.suffix in ("", ".pth")]
    return {path.stat().st_ino if kind == "file" else path.read_text() for path in files}


# Names and sources


@of_both_kinds
def test_one_write_gives_all_names_and_a_model_is_exported_beside_them(
    kind: str, tmp_path: Path
) -> None:
    manager = make_manager(kind, tmp_path)
    save(manager, 12)
    assert (
        names_in(tmp_path) == ["best", "ckpt-s000000000012", "latest"]
        and len(contents(tmp_path, kind)) == 1
    )
    save(manager, 13, history=False, best=False)
    assert [load(manager, name) for name in names_in(tmp_path)] == [12, 12, 13]
    manager.export_model(
        {"format_version": 1, "model": {"weight": torch.ones(2)}}, epoch=0, global_step=14
    )
    assert load(manager, "latest") == 13 and manager.find_latest() == "latest"
    assert read_model(manager, "model")["weight"].tolist() == [1, 1]


@of_both_kinds
def test_checkpoint_is_found_by_name_path_and_directory_and_existing_ones_are_named(
    kind: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    manager = make_manager(kind, run / "checkpoints")
    manager.save_checkpoint(
        {**payload(5), "runner": {"seed": 7}}, epoch=0, global_step=5, history=True
    )
    other = make_manager(kind, tmp_path / "other" / "checkpoints", run="another")
    suffix = ".pth" if kind == "file" else ""
    history = run / "checkpoints" / f"ckpt-s000000000005{suffix}"
    for source in (run, run / "checkpoints", run / "checkpoints" / f"latest{suffix}", str(history)):
        assert load(other, source) == 5
        assert read_config(source) == {"seed": 7}
    assert other.load_checkpoint(run, sections=["state"]).keys() == {"format_version", "state"}
    with pytest.raises(
        CheckpointNotFound,
        match=r"are: ckpt-s000000000005, latest\), or a path. Received: 'ckpt-s1'",
    ):
        manager.load_checkpoint("ckpt-s1")
    with pytest.raises(CheckpointNotFound):
        read_config(tmp_path / "nothing")


@of_both_kinds
def test_another_run_is_refused_with_the_differences_unless_it_only_looks(
    kind: str, tmp_path: Path
) -> None:
    place = record_saves(kind, tmp_path / "checkpoints")
    other, seen = make_manager(kind, place, run="other"), []

    def compare(path: Path) -> list[str]:
        seen.append(read_payload(path)["state"])
        return ["optim.lr: stored 1, now 2"]

    other.checkpoints._compare = compare
    assert other.checkpoints.is_foreign() and not make_manager(kind, place).checkpoints.is_foreign()
    for refused in (other.find_latest, other.checkpoints.refuse_foreign, lambda: save(other, 4)):
        with pytest.raises(
            CheckpointMismatch,
            match="of run run, whose configuration differs:\n  optim.lr: stored 1",
        ):
            refused()
    assert seen[0] == {"step": 3}
    looking = make_manager(kind, place, run="other", load_only=True)
    assert load(looking, "best") == 1
    before = sorted(place.rglob("*"))
    save(looking, 4)
    left = place / f"{storage.UPLOADING}1"
    left.write_text("what a killed save of the other run left")
    other.checkpoints.tidy()
    assert sorted(place.rglob("*")) == sorted([*before, left])
    make_manager(kind, place).checkpoints.tidy()
    assert not left.exists()


@of_both_kinds
def test_latest_becomes_visible_after_the_other_names_of_its_save(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart looks for it first: killed between two names, it must not find one of whose save others are still to come."""
    moved, replace = [], os.replace

    def noted(source: Path, target: Path) -> None:
        replace(source, target)
        moved.append(Path(target).name.removesuffix(".pth"))

    monkeypatch.setattr(os, "replace", noted)
    save(make_manager(kind, tmp_path), 3)
    names = ["ckpt-s000000000003", "best", "latest"]
    assert [name for name in moved if name in names] == names


def test_a_run_goes_on_with_the_other_kind_of_manager(tmp_path: Path) -> None:
    for step, kind in enumerate(("file", "dcp", "file"), start=1):
        manager = make_manager(kind, tmp_path)
        source = manager.find_latest()
        if step > 1:
            assert source is not None and load(manager, source) == step - 1
            manager.begin(source)
        save(manager, step, history=False, best=False)
        assert manager.find_latest() == "latest"


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    manager = make_manager("file", tmp_path)
    manager.save_checkpoint({"format_version": 99}, epoch=0, global_step=1)
    with pytest.raises(CheckpointMismatch, match="format_version 99"):
        manager.load_checkpoint("latest")
    torch.save({"weight": torch.ones(1)}, tmp_path / "bare.pt")
    with pytest.raises(CheckpointMismatch, match="pretrained"):
        make_manager("file", tmp_path / "x", verify="none").load_checkpoint(tmp_path / "bare.pt")
    assert read_model(manager, tmp_path / "bare.pt")["weight"].tolist() == [1]


def test_to_verify_and_to_list_needs_no_torch() -> None:
    code = "import sys, danling.cli.verify, danling.checkpoints.reading; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Checkpoints of every `format_version` there ever was still load; see `fixtures/README.md`


def payload_of_version_1() -> dict[str, Any]:
    """Return what the fixtures of version 1 were made of."""
    return {
        "format_version": 1,
        "runner": {"seed": 7, "optim": {"type": "adamw", "lr": 0.5}},
        "state": {
            "train": {"global_step": 12, "epoch": 3},
            "scores": {},
            "rng": {"ranks": {"0": torch.arange(4, dtype=torch.uint8)}},
        },
        "model": {
            "0.weight": torch.arange(6.0).reshape(2, 3),
            "0.bias": torch.tensor([0.5, -1], dtype=torch.bfloat16),
        },
        "optimizer": {
            "state": {"0.weight": {"step": torch.tensor(12.0), "exp_avg": torch.ones(2, 3)}},
            "param_groups": [{"lr": 0.5}],
        },
        "dataloaders": {"train": {"kind": "position", "epoch": 3, "consumed": 40}},
    }


@pytest.mark.parametrize("kind", ["file/latest.pth", "indexed/latest"])
def test_old_checkpoints_load(tmp_path: Path, kind: str) -> None:
    source = FIXTURES / "v1" / kind
    manager = make_manager("file", tmp_path, run="x")
    assert differences(manager.load_checkpoint(source), payload_of_version_1()) == []
    assert read_config(source) == payload_of_version_1()["runner"]


@pytest.mark.parametrize("kind", ["run-file/latest.pth", "run-sharded/latest", "run-engine/latest"])
def test_whole_runs_of_old_load(tmp_path: Path, kind: str) -> None:
    source, manager = FIXTURES / "v1" / kind, make_manager("file", tmp_path, run="x")
    assert read_config(source)["optim"] == {"type": "adamw", "lr": 0.01}
    if "engine" in kind:
        with pytest.raises(CheckpointError, match="checkpoint.trust=true"):
            manager.load_checkpoint(source)
        return
    found = manager.load_checkpoint(source)
    assert found["state"]["train"]["global_step"] == 3 and found["criterion"]["scale"] == 1.0
    assert found["model"].keys() >= found["ema"]["weights"].keys() >= {"0.weight", "4.bias"}


# Retention and lines


@of_both_kinds
def test_retention_spares_best_and_the_checkpoint_resumed_from(kind: str, tmp_path: Path) -> None:
    for step in range(1, 7):
        manager = make_manager(kind, tmp_path)
        if step > 1:
            manager.begin("latest")
        save(manager, step, best=step == 2)
    assert names_in(tmp_path) == ["best", *(f"ckpt-s{step:012d}" for step in (2, 5, 6)), "latest"]
    assert len(contents(tmp_path, kind)) == 3 and [
        load(manager, n) for n in names_in(tmp_path)
    ] == [2, 2, 5, 6, 6]
    if kind == "dcp":
        assert len([*(tmp_path / "targets").iterdir()]) == 3
    again = make_manager(kind, tmp_path, keep=1)
    again.begin("ckpt-s000000000005")
    for step in (7, 8):
        save(again, step, best=False)
    # Number 6 is of the line that was left.
    assert names_in(tmp_path) == ["best", *(f"ckpt-s{step:012d}" for step in (2, 5, 8)), "latest"]


def test_damaged_ones_do_not_count_as_kept(tmp_path: Path) -> None:
    manager = make_manager("file", tmp_path)
    save(manager, 1, best=False)
    save(manager, 2, best=False)
    path = tmp_path / f"{SECOND}.pth"
    path.unlink()
    path.write_bytes(b"cut")
    save(manager, 3, best=False)
    assert names_in(tmp_path) == [OLDEST, SECOND, "ckpt-s000000000003", "latest"]


@of_both_kinds
def test_going_back_begins_a_line_and_retention_counts_the_saves_of_both(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = make_manager(kind, tmp_path, keep=0)
    for step in (1, 2, 3, 4):
        save(manager, step, best=False)
    back = make_manager(kind, tmp_path)
    back.begin(SECOND)
    assert back.find_latest() == "latest" and load(back, "latest") == 4
    with caplog.at_level(logging.WARNING, "danling"):
        save(back, 5, best=False)
    assert "2 saves" in caplog.text and "no longer part of this run" in caplog.text
    # The two newest stay, whatever their line, and the one that the run goes on from.
    assert names_in(tmp_path) == [*(f"ckpt-s{step:012d}" for step in (2, 4, 5)), "latest"]
    record = back.store.record(back.store.path("latest"))
    assert (record.sequence, record.branch, record.ancestors) == (5, 1, ((0, 2),))
    fresh = make_manager(kind, tmp_path)
    save(fresh, 1, history=False, best=False)
    assert fresh.find_latest() == "latest" and load(fresh, "latest") == 1
    save(fresh, 2, best=False)
    save(fresh, 3, best=False)
    assert names_in(tmp_path) == [*(f"ckpt-s{step:012d}" for step in (2, 3)), "latest"]


# Damage


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _swap(path: Path) -> None:
    if path.name.startswith("latest"):
        shutil.copy(path.parent / path.name.replace("latest", OLDEST), path)
    else:
        other = next(target for target in path.parent.parent.iterdir() if target != path.parent)
        shutil.copy(other / path.name, path)


@pytest.mark.parametrize(
    "damage", [_flip, _cut, lambda path: path.write_bytes(b""), Path.unlink, _swap]
)
@pytest.mark.parametrize(
    ("kind", "file"),
    [
        *(("file", file) for file in ("latest.pth", "latest.pth.sha256")),
        *(("dcp", file) for file in (".metadata", "index.json", "__0_0.distcp", "manifest.sha256")),
    ],
)
def test_damage_is_found_named_and_skipped(
    kind: str,
    file: str,
    damage: Callable[[Path], None],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    manager = make_manager(kind, tmp_path)
    save(manager, 1, best=False)
    save(manager, 2, history=False, best=False)
    path = (
        tmp_path / file if kind == "file" else sorted((tmp_path / "targets").iterdir())[-1] / file
    )
    before = path.read_bytes()
    shutil.copy(path, tmp_path / "copy")
    (tmp_path / "copy").replace(path)  # which is a link to other names no more
    damage(path)
    if path.exists() and path.read_bytes() == before:
        assert (file, damage) == ("index.json", _swap), (
            "the same tensors at the same places: nothing has changed"
        )
        return
    with pytest.raises(
        (CheckpointDamaged, CheckpointNotFound), match="latest" if kind == "file" else file
    ):
        manager.load_checkpoint("latest")
    with caplog.at_level(logging.WARNING, "danling"):
        assert manager.find_latest() == OLDEST
        manager.begin(OLDEST)
        save(manager, 3, best=False)
    assert "is skipped" in caplog.text
    assert manager.find_latest() == "latest" and load(manager, "latest") == 3


def test_every_bit_matters_unless_less_is_verified(tmp_path: Path) -> None:
    manager = make_manager("file", tmp_path)
    manager.save_checkpoint(
        {"format_version": 1, "model": {"w": torch.ones(2)}}, epoch=0, global_step=1
    )
    path, content = tmp_path / "latest.pth", (tmp_path / "latest.pth").read_bytes()
    for offset in range(0, len(content), 41):
        changed = bytearray(content)
        changed[offset] ^= 1 << (offset % 8)
        path.write_bytes(changed)
        with pytest.raises(CheckpointDamaged, match="latest.pth has another SHA-256"):
            manager.load_checkpoint("latest")
    path.write_bytes(
        content.replace(torch.ones(2).numpy().tobytes(), torch.zeros(2).numpy().tobytes())
    )
    assert make_manager("file", tmp_path, verify="size").load_checkpoint("latest")["model"][
        "w"
    ].tolist() == [0, 0]
    (tmp_path / "latest.pth.sha256").unlink()
    with pytest.raises(CheckpointDamaged, match="sha256 is missing"):
        manager.load_checkpoint("latest")


def test_every_changed_byte_of_a_manifest_is_noticed() -> None:
    files = {"a.bin": (3, "0" * 64), "b.bin": (3, "1" * 64)}
    manifest = Manifest(Record("latest", 7, 2, ((0, 3), (1, 5)), "a-b: c", 70, 1), files)
    text = manifest.text()
    assert Manifest.parse(text) == manifest
    changed = [
        text[:index] + chr(ord(text[index]) ^ 1) + text[index + 1 :] for index in range(len(text))
    ]
    for other in [*changed, *(text[:length] for length in range(len(text)))]:
        with pytest.raises(CheckpointDamaged):
            Manifest.parse(other)


# Foreign readers


@of_both_kinds
def test_foreign_readers(kind: str, tmp_path: Path) -> None:
    manager = make_manager(kind, tmp_path, mode="async")
    save(manager, 4)
    manager.close()
    directory = tmp_path if kind == "file" else next((tmp_path / "targets").iterdir())
    sums = [path.name for path in directory.glob("*.sha256")]
    done = subprocess.run(
        ["sha256sum", "--strict", "-c", *sums], cwd=directory, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.count(": OK") == 3, done.stdout + done.stderr
    out = tmp_path / "latest.pth"
    if kind == "dcp":
        out, convert = tmp_path / "out.pth", "torch.distributed.checkpoint.format_utils"
        subprocess.run(
            [interpreter(), "-m", convert, "dcp_to_torch", directory, out],
            check=True,
            capture_output=True,
        )
    assert differences(torch.load(out, weights_only=True), payload(4)) == []
    with zipfile.ZipFile(out) as archive:
        assert archive.testzip() is None


# The background


class Slow:
    """Holds every write until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.begun, self.writes = threading.Event(), threading.Event(), 0
        original = storage.open_new

        @contextmanager
        def open_new(path: Path) -> Iterator[storage.HashingWriter]:
            if storage.STAGED in path.name:
                self.begun.set()
                assert self.go.wait(20)
            with original(path) as writer:
                yield writer
            # An archive of torch's is never that small, and sums always are.
            self.writes += writer.size > 700

        monkeypatch.setattr(storage, "open_new", open_new)


def test_the_values_of_the_call_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    slow, losses = Slow(monkeypatch), [1.0]
    manager = make_manager("file", tmp_path, mode="async")
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "state": {"losses": losses},
    }
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    moment = optimizer.state_dict()["state"][0]["exp_avg"].clone()
    manager.save_checkpoint({"format_version": 1, **state}, epoch=0, global_step=1)
    for _ in range(3):
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
    losses.append(2.0)
    slow.go.set()
    loaded = manager.load_checkpoint("latest")
    assert all(torch.equal(loaded["model"][name], value) for name, value in expected.items())
    assert torch.equal(loaded["optimizer"]["state"][0]["exp_avg"], moment)
    assert loaded["state"]["losses"] == [1.0]
    manager.close()


def test_history_and_best_are_all_written_and_others_coalesce(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch)
    manager = make_manager("file", tmp_path, mode="async", keep=0)

    def begin(step: int, **names: bool) -> None:
        manager.save_checkpoint(payload(step), epoch=0, global_step=step, **names)

    begin(1, history=True)
    slow.begun.wait(20)
    for step in (2, 3, 4):
        begin(step)
    begin(5, best=True)
    threading.Timer(0.2, slow.go.set).start()
    begin(6, history=True)
    begin(7)
    manager.close()
    assert names_in(tmp_path) == ["best", OLDEST, "ckpt-s000000000006", "latest"]
    assert [load(make_manager("file", tmp_path), name) for name in names_in(tmp_path)] == [
        5,
        1,
        6,
        7,
    ]
    assert slow.writes <= 5
    with pytest.raises(RuntimeError, match="cannot save after close"):
        begin(8)


def _fail(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_an_error_of_the_background_surfaces_at_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make_manager("file", tmp_path, mode="async")

    def save_and_fail(step: int) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(storage, "open_new", _fail)
            manager.save_checkpoint(payload(step), epoch=0, global_step=step)
            manager._executor.wait()

    save(manager, 1)
    save_and_fail(2)
    with pytest.raises(
        CheckpointError, match=r"No space left on device.*Still good in .*latest \(step 1\)"
    ):
        save(manager, 3)
    save(manager, 4)
    save_and_fail(5)
    with pytest.raises(CheckpointError, match="No space left"):
        manager.close()
    manager.close()
    assert load(make_manager("file", tmp_path), "latest") == 4


def test_close_gives_up_in_time_and_leaves_things_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make_manager("file", tmp_path, mode="async")
    save(manager, 1)
    slow = Slow(monkeypatch)
    manager.save_checkpoint(payload(2), epoch=0, global_step=2)
    manager.close(0.1)
    assert load(make_manager("file", tmp_path), "latest") == 1
    slow.go.set()
    manager._executor.wait()


@pytest.mark.parametrize("mode", ["disabled", "async"])
@of_both_kinds
def test_a_save_is_told_when_it_can_be_loaded_and_not_when_it_fails(
    tmp_path: Path, kind: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make_manager(kind, tmp_path, mode=mode)
    heard: list[tuple[int, bool, bool]] = []

    def hear(state: Mapping[str, Any]) -> None:
        is_there = any(tmp_path.glob("latest*"))
        heard.append(
            (
                state["state"]["step"],
                is_there,
                threading.current_thread() is threading.main_thread(),
            )
        )

    manager.after_save = hear
    for step in (4, 8):
        manager.save_checkpoint(payload(step), epoch=0, global_step=step, history=True)
    manager.wait()
    manager.export_model({"format_version": 1, "model": {}}, epoch=0, global_step=8)
    manager.wait()
    assert heard == [(4, True, mode == "disabled"), (8, True, mode == "disabled")]

    monkeypatch.setattr(storage, "open_new", _fail)
    with pytest.raises(Exception, match="No space left"):
        manager.save_checkpoint(payload(9), epoch=0, global_step=9)
        manager.wait()
    assert len(heard) == 2
    manager.close()


# Snapshots


def test_tied_tensors_stay_tied_and_slices_stay_small() -> None:
    weight = torch.randn(4, 4)
    copied, _ = SnapshotBuffers().copy(
        {"a": weight, "b": weight, "row": weight[1], "column": weight[:, 1], "empty": weight[:0]}
    )
    assert copied["a"] is copied["b"]
    assert copied["row"].untyped_storage().nbytes() == 16
    assert torch.equal(copied["column"], weight[:, 1])
    host = to_host({"row": weight[1], "whole": weight})
    assert host["row"].untyped_storage().nbytes() == 16
    assert host["whole"].data_ptr() == weight.data_ptr()


def test_memory_is_used_again_only_when_it_is_free() -> None:
    buffers, state = SnapshotBuffers(), {"a": torch.zeros(8), "b": torch.zeros(8)}
    (first, release), (second, _) = buffers.copy(state), buffers.copy(state)
    addresses = {tensor.data_ptr() for tensor in first.values()}
    assert not addresses & {tensor.data_ptr() for tensor in second.values()}
    release()
    assert addresses == {tensor.data_ptr() for tensor in buffers.copy(state)[0].values()}


def test_other_types_are_made_plain_or_refused_by_name() -> None:
    class Color(enum.IntEnum):
        RED = 2

    copied = to_host({"a": numpy.float64(0.5), "b": [Color.RED], "c": torch.bfloat16})
    assert (
        type(copied["a"]) is float and type(copied["b"][0]) is int and copied["c"] is torch.bfloat16
    )
    with pytest.raises(CheckpointError, match=r"state\.pool\.1.*\(object\)"):
        to_host({"state": {"pool": [1, object()]}})


# Several ranks


def _save_and_fail_on_two_ranks(directory: Path) -> list[object]:
    settings, seen, original = CheckpointSettings(async_mode="async"), [], storage.open_new
    manager = FileCheckpointManager(
        directory, domain=Domain(), run_id="run", settings=settings, step_mode=True
    )
    save(manager, 1)
    seen.append(load(manager, manager.find_latest() or ""))
    if manager.domain.rank == 0:
        storage.open_new = _fail  # type: ignore[assignment]
    try:
        save(manager, 2)
    except CheckpointError as error:
        seen.append("No space left" in str(error) and type(error).__name__)
    storage.open_new = original
    try:
        manager.load_checkpoint("ckpt-none")
    except CheckpointNotFound:
        seen.append("not found")
    try:
        manager.on_all(lambda: 1 // manager.domain.rank)
    except CheckpointError as error:
        seen.append("ZeroDivisionError" in str(error))
    manager.close()
    return seen


def test_all_ranks_see_the_same(tmp_path: Path) -> None:
    seen = run_processes(
        _save_and_fail_on_two_ranks, tmp_path, world_size=2, init_process_group=True
    )
    assert seen == [[1, "CheckpointDiskError", "not found", True]] * 2

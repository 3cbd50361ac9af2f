"""Names in manifests and indices, with sums that fit: nothing outside the directory is written, removed or overwritten."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from support.hostile import reseal
from support.remote_runs import upload_run
from support.saves import go_on, make_manager, record_saves, save

from danling.checkpoints import CheckpointDamaged, import_weights
from danling.checkpoints.dcp_index import parse_index
from danling.checkpoints.manifest import Manifest
from danling.cli.main import main
from danling.remote.store import open_store
from danling.remote.stored_run import RunLayout

HOSTILE = (
    "", ".", "..", "/", "/etc/passwd", "../x", "a/../../x", "a//b", "a/", "./a", "a\0b", "a\nb", "C:x", "c:/x", "a\\b", "x" * 256, "\ud800",
)  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_saves("dcp", tmp_path_factory.mktemp("saved") / "checkpoints")


def _manifest_with(saved: Path, name: str) -> str:
    manifest = Manifest.parse(next(saved.glob("targets/*/manifest.sha256")).read_text())
    return Manifest(manifest.record, {**manifest.files, name: (3, "0" * 64)}).text()


@pytest.mark.parametrize("name", [name for name in HOSTILE if name != "\ud800"] + ["a/b"])
def test_a_sealed_manifest_and_an_index_name_files_beside_them_only(
    saved: Path, tmp_path: Path, name: str
) -> None:
    with pytest.raises(CheckpointDamaged, match="cannot be read"):
        Manifest.parse(_manifest_with(saved, name))
    index = json.loads(next(saved.glob("targets/*/index.json")).read_text())
    with pytest.raises(ValueError, match="no plain"):
        parse_index(json.dumps({**index, "files": [name] * len(index["files"])}))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointDamaged, match="no plain"):
        import_weights(tmp_path / "model.safetensors.index.json")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# sequence: 3", f"# sequence: {'9' * 401}"),
        ("# sequence: 3", "# sequence: -1"),
        ("# step: 3", "# step: 1_0"),
        ("# name: ", "# name: ../"),
        ("# size: ", "# size: -"),
    ],
)
def test_figures_in_a_sealed_manifest_are_bounded(saved: Path, old: str, new: str) -> None:
    newest = max(saved.glob("targets/*/manifest.sha256"))
    body = newest.read_text().rpartition("# sha256")[0]
    assert old in body
    from hashlib import sha256

    changed = body.replace(old, new, 1)
    sealed = f"{changed}# sha256 of the lines above: {sha256(changed.encode()).hexdigest()}\n"
    with pytest.raises(CheckpointDamaged, match="cannot be read"):
        Manifest.parse(sealed)


def test_export_of_a_url_touches_no_file_named_by_the_store(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    victim = tmp_path / "thesis.tex"
    victim.write_text("three years of work")
    run = tmp_path / "run"
    shutil.copytree(saved, run / "checkpoints")
    for sums in run.glob("checkpoints/targets/*/manifest.sha256"):
        sums.write_text(_manifest_with(saved, str(victim)))
    url = f"file://{tmp_path}/bucket"
    upload_run(run, open_store(url), RunLayout("line", "id"))
    assert main(["export", f"{url}/line/id", str(tmp_path / "out.pth")]) == 1
    assert victim.read_text() == "three years of work"
    assert "no plain relative name" in capsys.readouterr().err


def _cut_in_two(saved: Path, place: Path, second: int) -> Path:
    """Let the index say that the weights are two chunks of half their length, the second one from `second`."""
    shutil.copytree(saved, place)
    for index in place.glob("targets/*/index.json"):
        content = json.loads(index.read_text())
        (entry,) = content["tensors"].values()
        ((_, (length,), *where),) = entry["chunks"]
        half = length // 2
        entry["chunks"] = [[[0], [half], *where], [[second], [half], *where]]
        index.write_text(json.dumps(content))
    reseal(place)
    return place


def test_overlapping_chunks_leave_no_memory_unread(saved: Path, tmp_path: Path) -> None:
    manager = make_manager("dcp", _cut_in_two(saved, tmp_path / "checkpoints", 149))
    with pytest.raises(CheckpointDamaged, match="do not make up its shape"):
        manager.load_checkpoint("latest")


@pytest.mark.parametrize(
    ("shape", "chunks", "whole"),
    [
        ((4, 6), [((0, 0), (4, 6))], True),
        ((4, 6), [((0, 0), (2, 6)), ((2, 0), (2, 2)), ((2, 2), (2, 4))], True),
        ((4, 6), [((0, 0), (2, 6)), ((1, 0), (2, 6))], False),
        ((4, 6), [((0, 0), (2, 6)), ((0, 0), (2, 6))], False),
        ((4, 6), [((0, 0), (4, 3)), ((0, 2), (4, 3))], False),
        ((4, 6), [((0, 0), (2, 4)), ((2, 2), (2, 4)), ((0, 4), (2, 2)), ((2, 0), (2, 2))], True),
        ((4, 6), [((0, 0), (4, 6)), ((4, 0), (0, 6))], True),
        ((4, 6), [((0, 0), (5, 6))], False),
        ((4, 6), [], False),
        ((), [((), ())], True),
        ((), [], False),
        ((0, 3), [], True),
        ((2,) * 12, [((0,) * 12, (1,) * 12)] * 4096, False),
    ],
)
def test_chunks_cover_each_element_once(
    shape: tuple[int, ...], chunks: list[tuple[tuple[int, ...], tuple[int, ...]]], whole: bool
) -> None:
    listed = [[list(offsets), list(sizes), 0, 0, 1 << 40] for offsets, sizes in chunks]
    tensor = {"path": ["a"], "dtype": "float32", "shape": list(shape), "chunks": listed}
    text = json.dumps(
        {"format": "danling-index 1", "files": ["f"], "tensors": {"a": tensor}, "values": {}}
    )
    if whole:
        parse_index(text)
    else:
        with pytest.raises(ValueError, match="do not make up its shape|is not within its shape"):
            parse_index(text)


@pytest.mark.parametrize("change", ["shape", "length"])
def test_memory_is_allocated_for_no_more_than_the_files_have(
    saved: Path, tmp_path: Path, change: str
) -> None:
    place = Path(shutil.copytree(saved, tmp_path / "checkpoints"))
    for index in place.glob("targets/*/index.json"):
        content = json.loads(index.read_text())
        (entry,) = content["tensors"].values()
        huge = 1 << 50
        entry["shape"], entry["chunks"][0][1] = [huge], [huge]
        if change == "length":
            entry["chunks"][0][4] = huge * 8
        index.write_text(json.dumps(content))
    reseal(place)
    with pytest.raises(
        CheckpointDamaged, match="fewer than its elements take|more bytes than they have"
    ):
        make_manager("dcp", place).load_checkpoint("latest")


# Links


def _snapshot(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def test_checkpoint_moved_to_another_disk_by_its_owner_stays(saved: Path, tmp_path: Path) -> None:
    place, disk = Path(shutil.copytree(saved, tmp_path / "checkpoints")), tmp_path / "disk"
    disk.mkdir()
    for target in sorted((place / "targets").iterdir()):
        shutil.move(target, disk / target.name)
        target.symlink_to(disk / target.name)
    before = _snapshot(disk)
    for step in (4, 5, 6, 7):
        assert go_on("dcp", place, step, keep=1)[0] == step - 1
    assert _snapshot(disk) == before
    assert make_manager("dcp", place).load_checkpoint("best")["state"]["step"] == 7


def test_linked_directory_of_targets_is_refused_and_left_alone(saved: Path, tmp_path: Path) -> None:
    place, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    shutil.copytree(saved, place)
    (elsewhere / "00000009-0123abcd").mkdir(parents=True)
    (elsewhere / "00000009-0123abcd" / "mine").write_text("mine")
    shutil.rmtree(place / "targets")
    (place / "targets").symlink_to(elsewhere)
    manager = make_manager("dcp", place)
    with pytest.raises(ValueError, match="Expected no link at .*targets"):
        save(manager, 4)
    assert (elsewhere / "00000009-0123abcd" / "mine").read_text() == "mine"
    assert os.listdir(elsewhere) == ["00000009-0123abcd"]


def test_a_directory_of_checkpoints_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "checkpoints").symlink_to(tmp_path / "disk")
    record_saves("dcp", tmp_path / "checkpoints")
    assert go_on("dcp", tmp_path / "checkpoints", 4)[0] == 3


# What verifies and cannot be read


@pytest.mark.parametrize("kind", ["file", "dcp"])
def test_auto_resume_falls_back_if_the_newest_verifies_and_is_unreadable(
    kind: str, tmp_path: Path
) -> None:
    from support.hostile import harm, plant_in_file, plant_in_value

    place = record_saves(kind, tmp_path / "checkpoints")
    content = harm("os.system", tmp_path / "mark", protocol=2)
    if kind == "file":
        plant_in_file(place / "latest.pth", content)
    else:
        plant_in_value(
            place / "targets" / (place / "latest").read_text().strip(), content, name="state"
        )
    reseal(place)
    manager = make_manager(kind, place)
    newest = manager.find_latest()
    assert newest == "latest"
    with pytest.raises(CheckpointDamaged) as error:
        manager.load_checkpoint(newest)
    manager.checkpoints.skip(newest, error.value)
    older = manager.find_latest()
    assert older is not None and manager.load_checkpoint(older)["state"]["step"] == 2

"""Every reader of files, fed with a pickle of every dangerous kind: nothing runs."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import hostile

from danling.checkpoints import CheckpointDamaged, CheckpointError
from danling.checkpoints.dcp_index import parse_index, read_index
from danling.checkpoints.dcp_target import read_target
from danling.checkpoints.exchange import import_weights
from danling.checkpoints.torch_files import read_file
from danling.deepspeed.checkpoints import read_engine_file
from danling.utils.plain import parse_json, parse_yaml
from danling.workspace.workspace import without_places

FIXTURES = Path(__file__).parents[1] / "checkpoints" / "fixtures" / "v1"


def _in_metadata(place: Path, content: bytes) -> Path:
    place.write_bytes(content)
    return place


def _in_target(place: Path, content: bytes) -> Path:
    place.mkdir()
    (place / ".metadata").write_bytes(content)
    return place


def _in_archive(place: Path, content: bytes) -> Path:
    torch.save({"model": {"a": torch.ones(2)}}, place)
    hostile.plant_in_file(place, content)
    return place


def _in_old_file(place: Path, content: bytes) -> Path:
    # What torch.save wrote before 1.6: a magic number, the protocol, the machine, and then the object, each pickled.
    buffer = io.BytesIO()
    torch.save({}, buffer, _use_new_zipfile_serialization=False)
    head = buffer.getvalue().split(b"\x80\x02}")[0]
    place.write_bytes(head + content)
    return place


def _in_value(place: Path, content: bytes) -> Path:
    (source,) = (FIXTURES / "indexed" / "targets").iterdir()
    shutil.copytree(source, place)
    hostile.plant_in_value(place, content)
    return place


READERS: dict[str, tuple[Callable[[Path, bytes], Path], Callable[[Path], Any]]] = {
    ".metadata": (_in_target, read_index),
    "an archive": (_in_archive, read_file),
    "an archive, mapped": (_in_archive, lambda path: read_file(path, mmap=True)),
    "an old file": (_in_old_file, read_file),
    "foreign weights": (_in_archive, import_weights),
    "a bare pickle": (_in_metadata, read_file),
    "a file of an engine": (_in_archive, read_engine_file),
    "an old file of an engine": (_in_old_file, read_engine_file),
    "plain values of a sharded checkpoint": (_in_value, read_target),
}


@pytest.mark.parametrize("kind", hostile.kinds())
def test_a_careless_reader_is_harmed(tmp_path: Path, kind: str) -> None:
    """The pickles are what they claim to be: otherwise the tests below could not fail."""
    hostile.works(kind, tmp_path / "mark")
    assert (tmp_path / "mark").exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("reader", READERS)
def test_nothing_runs(tmp_path: Path, reader: str) -> None:
    plant, read = READERS[reader]
    for number, kind in enumerate(hostile.kinds()):
        for protocol in (2, 4):
            place = plant(
                tmp_path / f"{number}-{protocol}",
                hostile.harm(kind, tmp_path / "mark", protocol=protocol),
            )
            with pytest.raises(CheckpointError, match=r"Expected .* Received: ") as caught:
                read(place)
            assert str(place) in str(caught.value) or "runner" in str(caught.value), kind
            assert not (tmp_path / "mark").exists(), kind


def test_pickle_of_an_engine_runs_only_with_trust(tmp_path: Path) -> None:
    place = _in_archive(
        tmp_path / "states.pt", hostile.harm("io.FileIO", tmp_path / "mark", protocol=2)
    )
    with pytest.raises(CheckpointError, match=r"checkpoint\.trust=true .*danling export --trust"):
        read_engine_file(place)
    assert not (tmp_path / "mark").exists()
    read_engine_file(place, trust=True)
    assert (tmp_path / "mark").exists()


def test_an_engines_enumeration_is_read_in_both_spellings_and_nothing_else_by_getattr(
    tmp_path: Path,
) -> None:
    kind = b"cdeepspeed.runtime.zero.config\nZeroStageEnum\n"
    by_value = kind + b"(K\x02tR"
    by_name = b"cbuiltins\ngetattr\n(" + kind + b"X\x09\x00\x00\x00gradientstR"
    for spelling, value in ((by_value, 2), (by_name, "gradients")):
        found = read_engine_file(_in_archive(tmp_path / "states.pt", b"\x80\x02" + spelling + b"."))
        # A member where DeepSpeed is imported, else its substitute.
        assert value in (
            getattr(found, "value", None),
            getattr(found, "name", None),
            *getattr(found, "values", ()),
        )
    other = b"cbuiltins\ngetattr\n(cdeepspeed.runtime.fp16.loss_scaler\nLossScaler\nX\x08\x00\x00\x00__init__tR"
    with pytest.raises(CheckpointError):
        read_engine_file(_in_archive(tmp_path / "states.pt", b"\x80\x02" + other + b"."))


DEEP = "[" * 100_000


def test_endlessly_nested_text_is_a_caught_error(tmp_path: Path) -> None:
    for parse in (parse_yaml, parse_json, parse_index):
        with pytest.raises(ValueError, match="nested"):
            parse(DEEP)
    run = tmp_path / "run"
    (run / "metadata").mkdir(parents=True)
    for name in ("metrics.jsonl", "results.json", "latest.json", "metadata/config.full.yaml"):
        (run / name).write_text(DEEP + "\n")
    # In its own process, which deep recursion would end.
    program = f"import sys; from danling.cli.main import main; sys.exit(main(['runs', {str(tmp_path)!r}]))"
    done = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True)
    assert done.returncode in (0, 1), done.stderr
    assert b"nested" in done.stderr + done.stdout


@pytest.mark.parametrize("text", [DEEP, "[]", '{"weight_map": 5}', '{"weight_map": {"a": 5}}'])
def test_invalid_index_of_safetensors_is_damage(tmp_path: Path, text: str) -> None:
    place = tmp_path / "model.safetensors.index.json"
    place.write_text(text)
    with pytest.raises(CheckpointDamaged, match="Expected an index of safetensors"):
        import_weights(place)


@pytest.mark.parametrize("tied", [DEEP, "5", '{"b": "c"}'])
def test_dangling_tied_names_of_safetensors_are_damage(tmp_path: Path, tied: str) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors", metadata={"tied": tied})
    with pytest.raises(CheckpointDamaged, match=r"model\.safetensors"):
        import_weights(tmp_path / "model.safetensors")


def test_named_pipe_in_place_of_an_engines_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "states.pt")
    with pytest.raises(CheckpointDamaged, match="is a named pipe"):
        read_engine_file(tmp_path / "states.pt")


def test_places_of_an_engine_are_not_obeyed() -> None:
    engine = {
        "flops_profiler": {"enabled": True, "output_file": "/srv/figures"},
        "tensorboard": {"output_path": "/srv", "job_name": "/srv/job"},
        "csv_monitor": {"job_name": "job"},
        "zero_optimization": {"stage": 3, "offload_param": {"nvme_path": "/srv"}},
    }
    assert without_places({"deepspeed": engine}) == {
        "deepspeed": {
            "flops_profiler": {"enabled": True},
            "tensorboard": {},
            "csv_monitor": {"job_name": "job"},
            "zero_optimization": {"stage": 3, "offload_param": {}},
        }
    }

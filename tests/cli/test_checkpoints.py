"""verify, inspect and export on checkpoints that a run really wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from support.recorded import danling, record_run
from torch import nn

import danling as dl
from danling.checkpoints.errors import CheckpointNotFound
from danling.checkpoints.exchange import export_weights
from danling.checkpoints.reading import locate, read_payload
from danling.cli.inspect import read_contents
from danling.cli.main import main


@pytest.fixture(scope="module", params=["file", "dcp"])
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_run(tmp_path_factory.mktemp("recorded"), checkpoint={"backend": request.param})


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "run"))


def flip_bit(path: Path, position: int) -> None:
    """Change one bit in place."""
    with path.open("r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 1]))


def verdicts(path: Path, capsys: pytest.CaptureFixture[str], code: int) -> dict[str, list[str]]:
    assert main(["verify", str(path), "--json"]) == code
    found = json.loads(capsys.readouterr().out)["checkpoints"]
    return {Path(verdict["path"]).name: verdict["problems"] for verdict in found}


def payload_files(run: Path) -> list[Path]:
    """Return the files that hold tensors, each once."""
    places = (
        run.glob("checkpoints/targets/*/*.distcp")
        if is_sharded(run)
        else run.glob("checkpoints/*.pth")
    )
    return sorted(places)


def is_sharded(run: Path) -> bool:
    return (run / "checkpoints" / "targets").is_dir()


def test_whole_checkpoints_verify(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = verdicts(run, capsys, 0)
    assert {"latest", "best"} <= {name.removesuffix(".pth") for name in found} and not any(
        found.values()
    )
    assert verdicts(run / "checkpoints", capsys, 0) == found
    done = danling("verify", run, warm=True)
    assert (
        done.returncode == 0 and done.stdout.count("ok ") == len(found) and "step 12" in done.stdout
    )


def test_every_damaged_file_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = payload_files(run)
    for path in files:
        content = path.read_bytes()
        path.unlink()  # names of one save are hard links
        path.write_bytes(content)
        flip_bit(path, len(content) // 2)
    found = verdicts(run, capsys, 1)
    told = "\n".join(problem for problems in found.values() for problem in problems)
    assert all(found.values()) and all(path.name in told for path in files) and "SHA-256" in told
    assert main(["verify", str(run), "--level", "size"]) == 0


def test_sums_without_their_file_are_damage(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lost = payload_files(run)[0]
    lost.unlink()
    problems = [problem for of_one in verdicts(run, capsys, 1).values() for problem in of_one]
    assert any(f"{lost.name} is missing" in problem for problem in problems)


def test_contents_are_those_of_the_checkpoint(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = read_contents(run)
    shapes = {entry.name: entry.shape for entry in contents.entries}
    assert shapes["model.0.weight"] == (12, 6) and shapes["optimizer.state.0.weight.exp_avg"] == (
        12,
        6,
    )
    assert contents.sections()["model"]["elements"] == 6 * 12 + 12 + 24 + 36 + 3
    assert main(["inspect", str(run), "--json", "--tensors", "--config"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (
        facts["step"] == 12 and facts["world_size"] == 1 and facts["config"]["optim"]["lr"] == 0.01
    )
    assert {"model", "ema", "optimizer"} <= set(facts["sections"]) and len(facts["tensors"]) == len(
        shapes
    )
    assert main(["inspect", str(run), "--tensors", "--config"]) == 0
    assert "optim.lr: 0.01" in capsys.readouterr().out


def weights_of(run: Path, section: str) -> dict[str, Any]:
    store, found = locate(run)
    payload = read_payload(store.target(found))[section]
    return payload["weights"] if section == "ema" else payload


def test_exported_weights_are_those_of_the_checkpoint(run: Path, tmp_path: Path) -> None:
    model, ema = weights_of(run, "model"), weights_of(run, "ema")
    assert not torch.equal(model["0.weight"], ema["0.weight"])
    assert main(["export", str(run), "plain.pth", "--trained"]) == 0
    plain = torch.load("plain.pth", weights_only=True)
    assert plain.keys() == model.keys() and all(
        torch.equal(plain[name], model[name]) for name in model
    )
    assert main(["export", str(run), "ema.safetensors", "--ema", "--dtype", "bf16"]) == 0
    averaged = load_file("ema.safetensors")
    assert all(torch.equal(averaged[name], ema[name].bfloat16()) for name in ema)
    assert main(["export", str(run), "usual.pth"]) == 0
    usual = torch.load("usual.pth", weights_only=True)
    assert usual.keys() == ema.keys() and all(torch.equal(usual[name], ema[name]) for name in ema)
    assert main(["export", str(run), "both", "--ema", "beside"]) == 0
    assert {path.name for path in Path("both").iterdir()} == {
        "model.safetensors",
        "ema.safetensors",
    }
    assert read_contents("ema.safetensors").sections()["tensors"]["dtypes"].keys() == {"BF16"}


def test_export_replaces_nothing_unasked_and_nothing_damaged(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("there.pth").write_text("mine")
    assert main(["export", str(run), "there.pth"]) == 2
    assert Path("there.pth").read_text() == "mine" and "--force" in capsys.readouterr().err
    for path in payload_files(run):
        flip_bit(path, path.stat().st_size // 2)
    assert main(["export", str(run), "new.pth"]) == 1
    assert not Path("new.pth").exists()
    assert main(["export", str(run), "new", "--max-shard-size", "1"]) == 1
    assert main(["export", str(run), "new.pth", "--max-shard-size", "1"]) == 2


def test_an_export_stays_out_of_the_checkpoints(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = [
        run / "checkpoints",
        run / "checkpoints" / "latest.pth",
        run / "checkpoints" / "weights.safetensors",
    ]
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    for place in places:
        assert main(["export", str(run), str(place), "--force"]) == 2
        assert "outside of the run's checkpoints" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_an_exported_directory_is_inspected_and_estimated(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = weights_of(run, "model")
    assert main(["export", str(run), "weights", "--ema", "beside", "--max-shard-size", "0.2k"]) == 0
    assert {entry.name for entry in read_contents("weights").entries} == set(model)
    assert main(["inspect", "weights"]) == 0 and main(["estimate", "weights"]) == 0


def test_file_without_a_checkpoint_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.safetensors").write_bytes(b"\xff" * 40)
    (tmp_path / "bad.pth").write_bytes(b"nothing")
    assert main(["inspect", "bad.safetensors"]) == 1 and main(["inspect", "bad.pth"]) == 1
    errors = capsys.readouterr().err
    assert "bad.safetensors" in errors and "bad.pth" in errors
    torch.save({"a.weight": torch.ones(2, 3)}, "foreign.pth")
    assert (
        read_contents("foreign.pth").kind == "torch file" and main(["inspect", "foreign.pth"]) == 0
    )
    torch.save({"a.weight": torch.ones(2, 3)}, "old.pth", _use_new_zipfile_serialization=False)
    assert [entry.shape for entry in read_contents("old.pth").entries] == [(2, 3)]
    assert main(["verify", "bad.safetensors"]) == 3 and "DAMAGED" not in capsys.readouterr().out


def test_file_unreadable_for_torch_is_named_in_one_line(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("text.pth").write_text("epoch,loss\n1,0.5\n")
    Path("empty.pth").touch()
    Path("bytes.pth").write_bytes(b"\x80\x02nothing")
    torch.save(nn.Linear(2, 2), "module.pth")
    for name in ("text.pth", "empty.pth", "bytes.pth", "module.pth"):
        assert main(["inspect", name]) == 1
        told = capsys.readouterr().err
        assert (
            name in told
            and told.count("\n") == 1
            and "\x1b" not in told
            and "weights_only" not in told
        )
    assert "torch.nn.modules.linear.Linear" in told and "state_dict()" in told
    if not is_sharded(run):
        (run / "checkpoints" / "latest.pth").write_bytes(b"nothing")
        assert main(["inspect", str(run)]) == 1
        assert "danling verify" in capsys.readouterr().err


def test_export_of_a_foreign_file_names_its_reader(capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"a.weight": torch.ones(2, 3)}, "foreign.pth")
    assert main(["export", "foreign.pth", "out.pth"]) == 2
    told = capsys.readouterr().err
    assert "`pretrained`" in told and "checkpoint.verify" not in told


def test_export_of_missing_averages_names_the_available_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = record_run(tmp_path / "bare", ema={"enabled": False})
    assert main(["export", str(bare), "out.pth", "--ema"]) == 2
    told = capsys.readouterr().err
    assert "leave --ema out" in told and "'model'" in told and "'optimizer'" in told


class Toy(dl.Runner):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.model = nn.Linear(3, 2)


def test_weights_of_other_programs_are_no_damage_and_directories_say_how_they_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = nn.Linear(3, 2).state_dict()
    legacy = tmp_path / "legacy.pth"
    torch.save(weights, legacy, _use_new_zipfile_serialization=False)
    assert (
        main(["verify", str(legacy)]) == 0
        and "nothing to compare it with" in capsys.readouterr().out
    )
    sharded, bare = tmp_path / "sharded", tmp_path / "bare"
    dcp.save(weights, checkpoint_id=sharded)
    bare.mkdir()
    torch.save(weights, bare / "pytorch_model.bin")
    for directory, advice in (
        (sharded, "format_utils dcp_to_torch"),
        (bare, f"Name the file in it: {bare}/pytorch_model.bin"),
    ):
        for command in ("verify", "inspect"):
            assert main([command, str(directory)]) == 3
            assert advice in capsys.readouterr().err
        with (
            pytest.raises(CheckpointNotFound, match=advice),
            Toy({"pretrained": str(directory), "dir": str(tmp_path / "run")}),
        ):
            pass
    parts = tmp_path / "parts"
    export_weights(parts, weights, max_shard_bytes=8)
    contents = read_contents(parts / "model.safetensors.index.json")
    assert {entry.name: entry.shape for entry in contents.entries} == {
        "weight": (2, 3),
        "bias": (2,),
    }
    (parts / "model-00001-of-00002.safetensors").unlink()
    assert main(["inspect", str(parts / "model.safetensors.index.json")]) != 0


@pytest.mark.parametrize("command", ["train", "fit"])
def test_training_command_is_answered_with_the_users_program(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command])
    assert "run `python train.py`" in capsys.readouterr().err

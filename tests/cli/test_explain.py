"""`danling explain` says what runs trained, from what they have written: one process, two, one without a record."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.processes import run_processes
from support.recorded import record_run
from support.remote_runs import upload_run

from danling.cli.explain import explain
from danling.cli.main import main
from danling.remote.store import open_store
from danling.remote.stored_run import RunLayout
from danling.workspace.runs import Run

MORE = {
    "scheduler": {"type": "cosine", "warmup_steps": 3},
    "max_grad_norm": 0.5,
    "pretrained": None,
}


def recorded(root: Path) -> str:
    return str(record_run(root, lineage="two", checkpoint={"backend": "dcp"}, **MORE))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_run(tmp_path_factory.mktemp("recorded"), **MORE)


def sections(path: Path | str, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    assert main(["explain", str(path), "--json"]) == 0
    return {
        name: "\n".join(lines)
        for name, lines in json.loads(capsys.readouterr().out)["sections"].items()
    }


def test_one_process(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = torch.load(run / "checkpoints" / "latest.pth", weights_only=True)["model"]
    parameters = sum(tensor.numel() for tensor in weights.values())
    found = sections(run, capsys)
    names = "run settings model criterion optimizer scheduler data update layout environment checkpoints score seed"
    assert list(found) == [*names.split(), "rate", "results", "disk"]
    assert found["run"].startswith("trained to step 12 of 12, attempts 1")
    assert (
        "scheduler.type cosine, scheduler.warmup_steps 3" in found["settings"]
        and "seed 3" in found["settings"]
    )
    assert (
        f"kind Sequential, parameters {parameters}, trained {parameters}, bytes {4 * parameters}"
        in found["model"]
    )
    assert (
        "train: kind NoisyPoints, samples 26, trained True, evaluated False"
        in found["data"].splitlines()[0]
    )
    assert found["update"] == "batch_size 4, micro_batches 1"
    assert (
        found["optimizer"].splitlines()[0] == "kind AdamW"
        and "initial_lr 0.01" in found["optimizer"]
    )
    assert found["rate"].startswith("learning rate 0.00333 at step 1, 0.01 at most,")
    assert (
        found["layout"].startswith("stack ddp, processes 1,")
        and f"torch {torch.__version__}" in found["environment"]
    )
    best = json.loads((run / "best.json").read_text())
    assert f"best val/acc {best['score']:.5g} at step {best['index']}" in found["results"]
    assert found["checkpoints"] == "manager FileCheckpointManager, interval 4"
    one = (run / "checkpoints" / "latest.pth").stat().st_size
    assert f"the last one {one / 1000:.3g} kB" in found["disk"]


def test_the_text_is_one_screen_and_needs_no_torch(run: Path) -> None:
    block = "import sys; sys.modules['torch'] = None; from danling.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", block, "explain", run], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == str(run) and len(lines) <= 40 and max(map(len, lines[1:])) <= 110
    assert re.search(r"^model        kind Sequential", done.stdout, re.MULTILINE)


def test_two_processes_with_sharded_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = run_processes(recorded, tmp_path, world_size=2)[0]
    found = sections(place, capsys)
    assert found["layout"] == "stack ddp, processes 2, data_replicas 2, device cpu"
    used = sum(
        file.stat().st_size
        for file in Path(place, "checkpoints", "targets").rglob("*")
        if file.is_file()
    )
    assert f"checkpoints take {used / 1000:.3g} kB" in found["disk"]


def test_run_without_a_record_names_the_unknown_facts(run: Path, tmp_path: Path) -> None:
    names = ("metrics.jsonl", "results.json", "best.json", "metadata/config.full.yaml")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((run / name).read_bytes())
    found = explain(Run(tmp_path, "old"))
    assert "metadata/run.json" in found["missing"][0] and "model" not in found
    assert found["run"][0].startswith("trained to step 12 of 12") and list(found) == [
        "run",
        "rate",
        "results",
        "disk",
        "missing",
    ]


def test_a_url_names_a_run(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = f"file://{tmp_path}/store"
    upload_run(run, open_store(place), RunLayout("lin", "run"))
    found = sections(place, capsys)
    assert found["model"].startswith("kind Sequential") and found["disk"].startswith(
        "no checkpoint here"
    )


@pytest.mark.parametrize(
    "record", ["{", "[]", '{"model": 3}', '{"model": {}, "data": {"a": 1}, "update": {}}']
)
def test_a_broken_record_is_named(
    run: Path, tmp_path: Path, record: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes())
    (tmp_path / "metadata" / "run.json").write_text(record)
    assert main(["explain", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert "trained to step 12" in out and "run.json" in err

"""A run whose machine is lost goes on elsewhere from an empty disk: bitwise, from files, from shards and from an engine."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from support.remote_runs import upload_run
from support.toys import TracingRunner, differences, whole_state

import danling as dl
from danling.remote.sources import bring_files
from danling.remote.store import open_store
from danling.remote.stored_run import RunLayout


def settings(
    root: Path, url: str | None = None, backend: str = "file", **changes: Any
) -> dict[str, Any]:
    return {
        "steps": 8,
        "accum_steps": 2,
        "ema": {"enabled": True, "decay": 0.9},
        "dataloader": {"batch_size": 2, "drop_last": False},
        "optim": {"type": "adamw", "lr": 1e-2},
        "evaluate_interval": 3,
        "auto_resume": True,
        "workspace_root": str(root),
        "checkpoint": {
            "backend": backend,
            "async_enabled": False,
            "interval": 2,
            "remote.url": url,
        },
        "log_interval": 1,
        **changes,
    }


def train(
    config: dict[str, Any], stop_at: int | None = None
) -> tuple[dict[str, Any], Path, list[int]]:
    with TracingRunner(config, stop_at=stop_at) as runner:
        runner.train()
        return whole_state(runner), runner.workspace.dir, runner.ids


def lose_machine(root: Path, url: str | None, stop_at: int = 4, **changes: Any) -> str:
    """Train a part on a machine that is lost then; return the URL of the run."""
    _, directory, _ = train(settings(root, None, **changes), stop_at)
    layout = RunLayout(directory.parent.name, directory.name)
    upload_run(directory, open_store(str(url)), layout)
    return f"{url}/{layout.root}"


@pytest.mark.parametrize("backend", ["file", "dcp"])
def test_restored_run_equals_the_uninterrupted_one_bitwise(
    tmp_path: Path, url: str, backend: str
) -> None:
    alone, first, ids = train(settings(tmp_path / "alone", backend=backend, seed=3))
    lose_machine(tmp_path / "lost", url, backend=backend, seed=3)
    resumed, directory, later = train(settings(tmp_path / "empty", url, backend=backend, seed=3))
    assert differences(resumed, alone) == []
    assert 0 < len(later) < len(ids) and ids[-len(later) :] == later
    # Curves and results of both machines are there.
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "train/loss" in line] == list(range(1, 9))
    assert (directory / "results.json").read_bytes() == (first / "results.json").read_bytes()
    assert len(list((directory / "logs").glob("*.log"))) == 2


@pytest.mark.parametrize("backend", ["file", "dcp"])
def test_best_of_the_lost_machine_is_kept(
    tmp_path: Path, url: str, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    lose_machine(tmp_path / "lost", url, backend=backend, seed=3)
    with (
        caplog.at_level(logging.INFO, "danling"),
        TracingRunner(settings(tmp_path / "empty", url, backend=backend, seed=3)) as runner,
    ):
        assert runner.best_index is not None and runner.state.train.global_step == 4
        step = runner.read_checkpoint("best")["state"]["train"]["global_step"]
        assert step == runner.best_index
    assert "this run keeps one from its next better score on" not in caplog.text


def test_drawn_seed_of_the_lost_machine_is_kept(tmp_path: Path, url: str) -> None:
    lose_machine(tmp_path / "lost", url)
    with TracingRunner(settings(tmp_path / "empty", url)) as runner:
        assert runner.state.train.global_step == 4
        (stored,) = {
            dl.TorchRunner.read_config(path)["seed"]
            for path in (tmp_path / "lost").rglob("latest.pth")
        }
        assert runner.seed == stored


@pytest.mark.parametrize("backend", ["file", "dcp"])
def test_urls_are_taken_wherever_a_path_is(tmp_path: Path, url: str, backend: str) -> None:
    run = lose_machine(tmp_path / "lost", url, backend=backend, seed=3)
    with TracingRunner(
        settings(tmp_path / "resume", backend=backend, seed=3, resume=run, auto_resume=False)
    ) as runner:
        assert runner.state.train.global_step == 4
        weights = {
            name: tensor.clone() for name, tensor in runner.unwrapped_model.state_dict().items()
        }
        runner.train()
        assert runner.state.train.global_step == 8
    latest = f"{run}/checkpoints/latest"
    with TracingRunner(
        settings(
            tmp_path / "pretrained",
            seed=4,
            pretrained=latest,
            auto_resume=False,
            pretrained_averages=False,
        )
    ) as runner:
        assert runner.state.train.global_step == 0
        assert all(
            torch.equal(tensor, weights[name])
            for name, tensor in runner.unwrapped_model.state_dict().items()
        )
    assert TracingRunner.read_config(run)["seed"] == 3
    with TracingRunner.from_checkpoint(run, {"workspace_root": str(tmp_path / "again")}) as runner:
        assert runner.state.train.global_step == 4 and runner.seed == 3
        assert runner.config.checkpoint.remote.url is None
    assert not list(tmp_path.rglob(".staged-*"))


def test_present_file_is_not_downloaded_again(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/store")
    for name, content in (("empty.log", b""), ("full.log", b"a line")):
        store.put(f"files/logs/{name}", content)
    assert [bring_files(store, "files", tmp_path / "run") for _ in range(2)] == [2, 0]
    (tmp_path / "run" / "logs" / "full.log").write_bytes(b"a")
    assert bring_files(store, "files", tmp_path / "run") == 1
    assert (tmp_path / "run" / "logs" / "full.log").read_bytes() == b"a line"


def test_plain_weights_at_a_url_are_loaded(tmp_path: Path, url: str) -> None:
    weights = {
        name: torch.randn_like(tensor)
        for name, tensor in TracingRunner(settings(tmp_path)).model.state_dict().items()
    }
    torch.save(weights, tmp_path / "weights.pt")
    open_store(url).put("weights.pt", tmp_path / "weights.pt")
    with TracingRunner(settings(tmp_path / "run", pretrained=f"{url}/weights.pt")) as runner:
        assert all(
            torch.equal(tensor, weights[name])
            for name, tensor in runner.unwrapped_model.state_dict().items()
        )

"""A stack of a user's own over `BaseRunner`: directory, metadata, logs, signals and exact checkpoints around a loop by hand."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from torch.utils.data import TensorDataset

import danling as dl
from danling.checkpoints import CheckpointMismatch
from danling.reporting import read_jsonl


class LeastSquares(dl.BaseRunner):
    def __init__(
        self, config: Any, *, signal_at: int | None = None, fails_at: int | None = None
    ) -> None:
        super().__init__(config)
        self.signal_at, self.fails_at = signal_at, fails_at
        inputs = torch.randn(22, 3)
        self.datasets = {"train": TensorDataset(inputs, inputs.sum(1))}
        self.weights = torch.zeros(3)

    def component_states(self) -> dict[str, Any]:
        return {"model": {"weights": self.weights}}

    def load_components(self, payload: Any, excluded: set[str]) -> None:
        if "model" in payload:
            self.weights.copy_(payload["model"]["weights"])

    def train(self) -> None:
        source, state = self.source("train"), self.train_state
        with self.session():
            while state.epoch < (self.epochs or 0):
                for batch in source.batches():
                    inputs, targets = batch.data
                    error = inputs @ self.weights - targets + 0.1 * torch.randn(len(targets))
                    gradient = (
                        self.world.all_reduce(inputs.T @ error / len(error)) / self.world_size
                    )
                    self.weights -= 0.1 * gradient
                    source.commit([batch])
                    state.global_step += 1
                    self.log_figures({"train/loss": error.square().mean().item()})
                    if state.global_step == self.signal_at and self.rank == self.world_size - 1:
                        signal.raise_signal(signal.SIGTERM)
                    if state.global_step == self.fails_at:
                        raise RuntimeError("no further")
                    if self.boundary():
                        return
                source.finish_pass()
                state.epoch += 1
                self.save_checkpoint(history=True)


def settings(root: Path, **more: Any) -> dict[str, Any]:
    return {
        "dir": str(root),
        "seed": 3,
        "epochs": 3,
        "dataloader": {"batch_size": 4, "drop_last": False},
        **more,
    }


def test_a_run_has_its_directory_metadata_log_and_figures(tmp_path: Path) -> None:
    with LeastSquares(
        settings(tmp_path / "run", heartbeat={"enabled": True}, gc={"interval": 2})
    ) as runner:
        runner.train()
        assert runner.scores == {} and runner.progress == 1.0
    run = tmp_path / "run"
    names = {str(path.relative_to(run)) for path in run.rglob("*")}
    assert {
        "checkpoints/latest.pth",
        "checkpoints/ckpt-e000001.pth",
        "metadata/config.full.yaml",
        "metrics.jsonl",
    } <= names
    assert [line["step"] for line in read_jsonl(run / "metrics.jsonl")] == list(range(1, 19))
    beat = json.loads((run / "heartbeats" / "rank-0.json").read_text())
    assert (beat["status"], beat["global_step"]) == ("stopped", 18)
    assert any(name.startswith("logs/") for name in names)


@pytest.mark.parametrize("signal_at", [1, 5, 6, 13, 18])
def test_run_ended_by_a_signal_resumes_bitwise(signal_at: int, tmp_path: Path) -> None:
    with LeastSquares(settings(tmp_path / "whole")) as runner:
        runner.train()
        whole = runner.weights.clone()
    handler = signal.getsignal(signal.SIGTERM)
    with (
        pytest.raises(SystemExit) as ended,
        LeastSquares(settings(tmp_path / "parts"), signal_at=signal_at) as runner,
    ):
        runner.train()
    assert ended.value.code == 143 and signal.getsignal(signal.SIGTERM) is handler
    with LeastSquares(settings(tmp_path / "parts", auto_resume=True)) as runner:
        assert runner.train_state.global_step == signal_at
        runner.train()
        assert torch.equal(runner.weights, whole)
    steps = [line["step"] for line in read_jsonl(tmp_path / "parts" / "metrics.jsonl")]
    assert steps == list(range(1, 19))


def test_a_failure_saves_nothing_and_the_last_checkpoint_is_gone_on_from(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="no further"),
        LeastSquares(settings(tmp_path), fails_at=8) as runner,
    ):
        runner.train()
    with LeastSquares(settings(tmp_path, auto_resume=True)) as runner:
        assert runner.train_state.global_step == 6


def trained(root: Path) -> list[tuple[int, list[float]]]:
    """Train whole, to a signal on the last rank, and on from there."""
    ends = []
    runs = {"whole": {}, "signalled": {"signal_at": 4}, "resumed": {}}
    for name, options in runs.items():
        place = root / ("whole" if name == "whole" else "parts")
        with LeastSquares(settings(place, auto_resume=name == "resumed"), **options) as runner:
            try:
                runner.train()
            except SystemExit as ended:
                assert (name, ended.code) == ("signalled", 143)
            ends.append((runner.train_state.global_step, runner.weights.tolist()))
    return ends


def test_a_signal_on_one_rank_stops_all_of_them(tmp_path: Path) -> None:
    for whole, signalled, resumed in run_processes(trained, tmp_path, world_size=2):
        assert signalled[0] == 4 and resumed == whole


def test_a_payload_is_loaded_as_a_file_is(tmp_path: Path) -> None:
    with LeastSquares(settings(tmp_path / "a", epochs=1)) as runner:
        runner.train()
        payload = runner.read_checkpoint("latest")
    with LeastSquares(settings(tmp_path / "b", epochs=1)) as runner:
        runner.load_checkpoint(payload)
        assert runner.train_state.epoch == 1 and torch.equal(
            runner.weights, payload["model"]["weights"]
        )
        with pytest.raises(CheckpointMismatch, match=r"with the entries 'runner' and 'state'"):
            runner.load_checkpoint({"weights": runner.weights})


class Wrapping(LeastSquares):
    """Wraps its weights, as another stack does with a model."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = {"module": self.weights}

    def unwrap(self, model: Any) -> Any:
        return model["module"] if isinstance(model, dict) else model


def test_another_stack_leaves_the_users_model(tmp_path: Path) -> None:
    with Wrapping(settings(tmp_path)) as runner:
        assert isinstance(runner.model, dict)
    assert runner.model is runner.weights

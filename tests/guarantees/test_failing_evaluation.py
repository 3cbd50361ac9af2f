"""Nothing that was trained is lost to an evaluation: it is tried before the first update, and saved when it fails later."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_outcomes, run_processes
from support.saves import make_manager
from support.stacks import needs_deepspeed, zero
from support.toys import NoisyPoints, TracingRunner, differences, whole_state
from support.toys import settings as toy_settings
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, RandomSampler

import danling as dl
from danling.checkpoints import storage
from danling.training import run_state
from danling.utils.tensors import local_part

MODES: dict[str, dict[str, Any]] = {
    "epochs": {"epochs": 3},
    "steps": {"steps": 12, "evaluate_interval": 4},
}


def settings(root: Path | str, mode: str, **more: Any) -> dict[str, Any]:
    base = {
        "seed": 5,
        "dataloader": {"batch_size": 6},
        "optim": {"type": "adamw", "lr": 0.01},
        "score_name": "acc",
    }
    return toy_settings(root, **{**base, **MODES[mode], **more})


class BreaksInTheStep(TracingRunner):
    def evaluate_step(self, data: Any) -> Any:
        raise RuntimeError("in the step")


class BreaksInTheMetric(TracingRunner):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.metrics = {"acc": lambda pred, target: pred[99]}


@pytest.mark.parametrize(
    ("mode", "runner_class", "error"),
    [("steps", BreaksInTheStep, "in the step"), ("epochs", BreaksInTheMetric, "out of bounds")],
)
def test_an_error_in_an_evaluation_comes_before_the_first_update(
    runner_class: Any, error: str, mode: str, tmp_path: Path
) -> None:
    with runner_class(settings(tmp_path / "run", mode)) as runner:
        with pytest.raises(Exception, match=error):
            runner.train()
        assert runner.state.train.global_step == 0
        assert not runner.results


class Everything(TracingRunner):
    """All that an evaluation might leave a trace in: meters, buffers, averaged weights, generators, metrics."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.model = nn.Sequential(
            nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 3)
        )
        self.model.register_buffer("forwards", torch.zeros(()))
        generator = torch.Generator().manual_seed(2)
        shared = {"batch_size": 4, "drop_last": True}
        train, val = NoisyPoints(26), NoisyPoints(10)
        self.dataloaders = {
            "train": DataLoader(train, sampler=RandomSampler(train, generator=generator), **shared),
            "val": DataLoader(val, sampler=RandomSampler(val, generator=generator), **shared),
        }

    def train_step(self, data: Any) -> Any:
        self.meters.update({"noise": torch.rand(())})
        return super().train_step(data)

    def evaluate_step(self, data: Any) -> Any:
        self.model.forwards += 1
        self.meters.update({"noise": torch.rand(())})
        return super().evaluate_step(data)


@pytest.mark.parametrize(
    ("mode", "runner_class"), [("epochs", Everything), ("steps", TracingRunner)]
)
def test_the_trial_leaves_no_trace(mode: str, runner_class: Any, tmp_path: Path) -> None:
    ends = []
    for name in ("tried", "not"):
        config = settings(
            tmp_path / name, mode, try_evaluation=name == "tried", ema={"enabled": True}
        )
        with runner_class(config) as runner:
            runner.train()
            ends.append((whole_state(runner), runner.trace, runner.results, runner.id))
    assert not differences(ends[0], ends[1])


def test_metric_undefined_for_one_batch_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Perplexing(TracingRunner):
        def summarize(self, split: str, totals: Any) -> dict[str, float]:
            if totals.totals()["loss"][1] < 7:
                raise ValueError("only one class")
            return super().summarize(split, totals)

    with (
        caplog.at_level(logging.WARNING, logger="danling"),
        Perplexing(settings(tmp_path / "run", "epochs")) as runner,
    ):
        assert len(runner.train()) == 3
    (said,) = [
        message for message in caplog.messages if "cannot be computed from one batch" in message
    ]
    assert "only one class" in said


def test_one_shot_source_is_not_tried(tmp_path: Path) -> None:
    batches = [
        {"input": torch.randn(4, 6), "target": torch.zeros(4).long(), "index": torch.arange(4)}
    ]
    with TracingRunner(settings(tmp_path / "run", "epochs", epochs=1)) as runner:
        runner.datasets.pop("val")
        runner.dataloaders["val"] = iter(batches)
        assert set(runner.train()[1]["val"]) == {"loss", "acc"}


class Killed(BaseException):
    """Stands for a SIGKILL in the place of an error."""


def kill(*args: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Failing(TracingRunner, dl.Runner):
    """Fails in the evaluation after so many updates, on one rank or, without one, on all."""

    failure: type[BaseException] | None = None
    at = 8
    on_rank: int | None = 0
    where = "step"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.metrics = {"acc": self.accuracy}

    def accuracy(
        self, pred: torch.Tensor, target: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._maybe_fail("metric")
        return dl.metrics.accuracy(pred, target)

    def _is_to_fail(self, where: str) -> bool:
        at = self.at // self.placement.data_replicas
        mine = self.on_rank in (None, self.rank) and where == self.where
        return mine and self.failure is not None and self.state.train.global_step >= at

    def _maybe_fail(self, where: str) -> None:
        if self._is_to_fail(where) and self.failure is not None:
            if self.failure is Killed:
                kill()
            raise self.failure("in an evaluation")

    def evaluate_step(self, data: Any) -> Any:
        self._maybe_fail("step")
        return super().evaluate_step(data)

    def summarize(self, split: str, totals: Any) -> dict[str, float]:
        self._maybe_fail("summary")
        figures = super().summarize(split, totals)
        if self._is_to_fail("score"):
            del figures["acc"]
        return figures

    def save_checkpoint(self, **options: Any) -> None:
        self._maybe_fail("save")
        if self._is_to_fail("link"):
            storage.link = kill
        super().save_checkpoint(**options)


def uninterrupted(root: str, mode: str, more: dict[str, Any] | None = None) -> dict[str, Any]:
    with Failing(settings(root, mode, **(more or {}))) as runner:
        runner.train()
        return {"state": own_state(runner), "trace": runner.trace, "results": runner.results}


def own_state(runner: Failing) -> Any:
    """Return the state of a run, of divided tensors what this rank holds."""
    return tree_map_only(torch.Tensor, lambda value: local_part(value).clone(), whole_state(runner))


def failing(
    root: str, mode: str, kind: Any, rank: int | None, where: str, more: dict[str, Any]
) -> int:
    Failing.failure, Failing.on_rank, Failing.where = kind, rank, where
    with Failing(settings(root, mode, **more)) as runner:
        runner.train()
    return 0


def resumed(root: str, mode: str, more: dict[str, Any]) -> dict[str, Any]:
    Failing.failure = None
    with Failing(settings(root, mode, auto_resume=True, **more)) as runner:
        step = runner.state.train.global_step
        runner.train()
        return {
            "from": step,
            "state": own_state(runner),
            "trace": runner.trace,
            "results": runner.results,
        }


@pytest.mark.parametrize(
    ("mode", "kind", "where", "more"),
    [
        ("steps", torch.OutOfMemoryError, "step", {"checkpoint.interval": 50}),
        ("epochs", KeyboardInterrupt, "summary", {"checkpoint.async_enabled": False}),
        ("steps", ValueError, "summary", {"checkpoint.backend": "dcp"}),
        (
            "epochs",
            RuntimeError,
            "step",
            {"checkpoint.backend": "dcp", "checkpoint.async_enabled": False},
        ),
    ],
)
def test_training_before_a_failing_evaluation_is_saved_and_resumes_bitwise(
    mode: str,
    kind: Any,
    where: str,
    more: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("failure", "on_rank", "where"):
        monkeypatch.setattr(Failing, name, getattr(Failing, name))
    whole = uninterrupted(str(tmp_path / "whole"), mode)
    with pytest.raises(kind, match="in an evaluation"):
        failing(str(tmp_path / "parts"), mode, kind, 0, where, more)
    rest = resumed(str(tmp_path / "parts"), mode, more)
    assert rest["from"] == 8
    assert rest["trace"] == whole["trace"][8:]
    assert not differences(rest["state"], whole["state"])
    assert rest["results"] == whole["results"]


def test_read_only_run_fails_with_the_error_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("failure", "on_rank", "where"):
        monkeypatch.setattr(Failing, name, getattr(Failing, name))
    with pytest.raises(ValueError, match="in an evaluation"):
        failing(str(tmp_path), "epochs", ValueError, 0, "step", {"checkpoint.load_only": True})
    assert not list(tmp_path.rglob("*.pth"))


def test_the_best_stays_the_best_when_a_later_evaluation_fails(tmp_path: Path) -> None:
    class Falling(TracingRunner):
        def evaluate_step(self, data: Any) -> Any:
            if self.state.train.global_step >= 8:
                raise RuntimeError("in an evaluation")
            return super().evaluate_step(data)

    with Falling(settings(tmp_path / "run", "epochs")) as runner:
        with pytest.raises(RuntimeError, match="in an evaluation"):
            runner.train()
        assert runner.read_checkpoint("latest")["state"]["train"]["global_step"] == 8
        assert runner.read_checkpoint("best")["state"]["train"]["global_step"] == 4


SHARDED = {"stack": "parallel", "parallel": {"axes": {"shard": 2}}}
STAGES = {
    "stack": "parallel",
    "parallel": {"axes": {"pipeline": 2}},
    "dataloader": {"batch_size": 6},
}
NOT_DUE = {"checkpoint.interval": 50}
"""No checkpoint follows the evaluation that fails."""
SYNCHRONOUS = {"checkpoint.async_enabled": False}
DCP = {"checkpoint.backend": "dcp"}


def slow(*values: Any) -> Any:
    return pytest.param(
        *values, marks=[pytest.mark.slow, *([needs_deepspeed] if "deepspeed" in values[-1] else [])]
    )


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("kind", "on_rank", "where", "more"),
    [
        # An error on one rank, of which the others hear in an evaluation or in a save that takes all of them.
        (RuntimeError, 0, "summary", {}),
        (RuntimeError, 1, "step", {**SHARDED, **NOT_DUE}),
        slow(RuntimeError, 1, "step", {"stack": "deepspeed", "deepspeed": zero(1), **NOT_DUE}),
        slow(RuntimeError, 1, "step", NOT_DUE),
        slow(RuntimeError, None, "metric", {**SHARDED, **SYNCHRONOUS}),
        slow(ValueError, None, "score", {**SHARDED, **NOT_DUE}),
        slow(RuntimeError, 0, "step", {**DCP, "ema": {"enabled": True}}),
        slow(
            RuntimeError,
            1,
            "summary",
            {**SHARDED, "checkpoint.async_mode": "async_with_pinned_mem"},
        ),
        slow(RuntimeError, 1, "metric", STAGES),
        slow(RuntimeError, 0, "metric", {"stack": "deepspeed", "deepspeed": zero(1)}),
        slow(RuntimeError, 1, "summary", {"stack": "deepspeed", "deepspeed": zero(3), **NOT_DUE}),
        # A kill, also between the save before an evaluation and the one with its figures.
        (Killed, 0, "link", {**DCP, **SYNCHRONOUS}),
        slow(Killed, 1, "step", {}),
        slow(Killed, 0, "save", {**SHARDED, **SYNCHRONOUS}),
        slow(Killed, 0, "save", {**SHARDED, "checkpoint.async_mode": "async_with_pinned_mem"}),
    ],
)
def test_one_rank_fails_while_the_others_wait_for_it(
    kind: type[BaseException], on_rank: int | None, where: str, more: dict[str, Any], tmp_path: Path
) -> None:
    whole = run_processes(uninterrupted, str(tmp_path / "whole"), "epochs", more, world_size=2)
    arguments = (str(tmp_path / "parts"), "epochs", kind, on_rank, where, more)
    ends = run_outcomes(failing, *arguments, world_size=2, grace=10.0)
    if kind is Killed:
        assert next(end.exit_code for end in ends if end.rank == on_rank) == -signal.SIGKILL
    else:
        assert all(end.error is not None for end in ends) and any(
            isinstance(end.error, kind) for end in ends
        )
    rest = run_processes(resumed, str(tmp_path / "parts"), "epochs", more, world_size=2)
    if kind is not Killed or more.get("checkpoint.async_enabled") is False:
        assert rest[0]["from"] == (8 if more.get("parallel") == STAGES["parallel"] else 4)
    for rank in range(2):
        assert not differences(rest[rank]["state"], whole[rank]["state"])
        assert rest[rank]["results"] == whole[rank]["results"]


def failing_without_a_save_before(root: str) -> None:
    """Fail on both ranks and go on, then fail on one of them."""
    more = {**DCP, **NOT_DUE, "checkpoint.before_evaluation": False}
    with pytest.raises(RuntimeError, match="in an evaluation"):
        failing(f"{root}/all", "epochs", RuntimeError, None, "step", more)
    assert resumed(f"{root}/all", "epochs", more)["from"] == 4
    run_state._PATIENCE_SECONDS = 0.5
    failing(f"{root}/one", "epochs", RuntimeError, 1, "step", more)


def test_without_an_earlier_save_it_is_saved_if_all_ranks_fail(tmp_path: Path) -> None:
    ends = run_outcomes(failing_without_a_save_before, str(tmp_path), world_size=2, grace=10.0)
    assert any("in an evaluation" in str(end.error) for end in ends)
    found = make_manager("dcp", tmp_path / "elsewhere").load_checkpoint(
        tmp_path / "one" / "checkpoints" / "latest"
    )
    assert found["state"]["train"]["global_step"] == 2

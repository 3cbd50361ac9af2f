"""G1: a run that was stopped anywhere and resumed in another process ends as the one that was not."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support.processes import run_processes
from support.toys import TracingRunner, differences, whole_settings, whole_state


def settings(mode: str, root: Path, **changes: Any) -> dict[str, Any]:
    schedule = {"type": "cosine", "total_steps": 40, "warmup_steps": 4}
    base = {"accum_steps": 3, "scheduler": schedule, "max_grad_norm": 1.0, "log_interval": 4}
    epochs, steps = {"epochs": 3, "checkpoint.interval": 1}, {"steps": 13, "evaluate_interval": 3}
    # Not after every update, as a twentieth of so few would be.
    budget = epochs if mode == "epoch" else {**steps, "checkpoint.interval": 4}
    return whole_settings(root, **{**base, **budget, **changes})


def train(config: dict[str, Any], stop_at: int | None) -> dict[str, Any]:
    with TracingRunner(config, stop_at=stop_at) as runner:
        runner.train()
        step = runner.state.train.global_step
        return {
            "ids": runner.ids,
            "trace": runner.trace,
            "step": step,
            "state": whole_state(runner),
        }


def train_stopping_at_each(
    config: dict[str, Any], root: str, stops: list[int]
) -> list[dict[str, Any]]:
    """Train to each of some steps of a run, each time from scratch in a directory of its own."""
    return [train({**config, "workspace_root": f"{root}/{k}"}, k) for k in stops]


def resume_from_each(config: dict[str, Any], root: str, stops: list[int]) -> list[dict[str, Any]]:
    """Finish what `train_stopping_at_each` left."""
    return [
        train({**config, "workspace_root": f"{root}/{k}", "auto_resume": True}, None) for k in stops
    ]


DCP = {"checkpoint.backend": "dcp", "checkpoint.async_mode": "async"}
SYNCHRONOUS = {**DCP, "checkpoint.async_mode": "disabled"}
EVERY = [(*case, 1, {}) for case in product(("epoch", "step"), (1, 2), (0, 2))]
EVERY += [("epoch", 1, 0, 1, DCP), ("epoch", 2, 0, 1, SYNCHRONOUS)]


@pytest.mark.timeout(800)
@pytest.mark.parametrize(
    ("mode", "world_size", "workers", "every", "more"),
    [
        # `make test` stops at some steps, `make test-all` at every one.
        ("epoch", 1, 0, 3, {}),
        ("step", 2, 0, 4, {}),
        ("epoch", 1, 2, 6, {}),
        ("epoch", 2, 0, 4, DCP),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in EVERY),
    ],
)
def test_resumed_at_every_step(
    mode: str, world_size: int, workers: int, every: int, more: dict[str, Any], tmp_path: Path
) -> None:
    config = settings(mode, tmp_path / "whole", **more)
    config["dataloader"]["num_workers"] = workers
    whole = run_processes(train, config, None, world_size=world_size)
    last = whole[0]["step"]
    assert last >= 9 // world_size
    stops = list(range(1, last, every))
    stopped = run_processes(
        train_stopping_at_each, config, str(tmp_path), stops, world_size=world_size, timeout=350
    )
    resumed = run_processes(
        resume_from_each, config, str(tmp_path), stops, world_size=world_size, timeout=350
    )
    for rank in range(world_size):
        for k, part, second in zip(stops, stopped[rank], resumed[rank], strict=True):
            assert part["step"] == k
            assert part["ids"] + second["ids"] == whole[rank]["ids"], f"samples, stopped at {k}"
            assert part["trace"] + second["trace"] == whole[rank]["trace"], (
                f"losses and rates, stopped at {k}"
            )
            assert differences(second["state"], whole[rank]["state"]) == [], (
                f"state, stopped at {k}"
            )


def test_resumed_twice_with_other_workers(tmp_path: Path) -> None:
    config = settings("epoch", tmp_path / "whole")
    whole = run_processes(train, config, None, world_size=1)[0]
    parts = []
    for workers, stop_at in ((2, 4), (0, 7), (2, None)):
        config = settings("epoch", tmp_path / "parts", auto_resume=True)
        config["dataloader"]["num_workers"] = workers
        parts.append(run_processes(train, config, stop_at, world_size=1)[0])
    assert [i for part in parts for i in part["ids"]] == whole["ids"]
    assert [line for part in parts for line in part["trace"]] == whole["trace"]
    assert differences(parts[-1]["state"], whole["state"]) == []


def test_at_its_end_a_run_touches_nothing(tmp_path: Path) -> None:
    config = settings("epoch", tmp_path, auto_resume=True)
    run_processes(train, config, None, world_size=1)
    before = {
        path: (path.stat().st_mtime_ns, path.read_bytes()) for path in tmp_path.rglob("*.pth")
    }
    results = {
        path: path.read_bytes()
        for name in ("results.json", "metrics.jsonl")
        for path in tmp_path.rglob(name)
    }
    again = run_processes(train, config, None, world_size=1)[0]
    assert again["ids"] == []
    assert before == {
        path: (path.stat().st_mtime_ns, path.read_bytes()) for path in tmp_path.rglob("*.pth")
    }
    assert results == {path: path.read_bytes() for path in results}


class SavesInStep(TracingRunner):
    """Saves in an override of `step`, which is in the middle of a pass."""

    def step(self) -> Any:
        outcome = super().step()
        if self.train_state.global_step == 2 and self.train_state.epoch == 0:
            self.save_checkpoint(history=True)
        return outcome


@pytest.mark.parametrize("mode", ["epoch", "step"])
def test_run_saved_within_its_step_is_resumed_after_the_update(mode: str, tmp_path: Path) -> None:
    config = settings(mode, tmp_path, log=False, **{"checkpoint.keep_latest_k": 9})
    with SavesInStep({**config, "dir": str(tmp_path / "whole")}) as whole:
        whole.train()
        saved = min((tmp_path / "whole" / "checkpoints").glob("ckpt-*.pth"))
    with SavesInStep({**config, "dir": str(tmp_path / "resumed"), "resume": str(saved)}) as resumed:
        assert resumed.train_state.global_step == 2
        resumed.train()
    assert (
        resumed.ids == whole.ids[-len(resumed.ids) :] and len(resumed.trace) == len(whole.trace) - 2
    )
    assert resumed.trace == whole.trace[2:]
    assert not differences(whole_state(whole)["model"], whole_state(resumed)["model"])


class DiesAfterItsSave(SavesInStep):
    """Ends before the evaluation that is due after the update."""

    def step(self) -> Any:
        outcome = super().step()
        if self.train_state.global_step == 2:
            self.checkpoint_manager.wait()
            raise RuntimeError("killed here")
        return outcome


@pytest.mark.parametrize("interval", [1, 2])
def test_evaluation_that_follows_a_save_in_step_is_made_by_the_resumed_run(
    interval: int, tmp_path: Path
) -> None:
    config = settings("step", tmp_path, log=False, evaluate_interval=interval, auto_resume=True)
    with SavesInStep({**config, "dir": str(tmp_path / "whole")}) as whole:
        whole.train()
    config["dir"] = str(tmp_path / "parts")
    with DiesAfterItsSave(config) as killed, pytest.raises(RuntimeError, match="killed here"):
        killed.train()
    with SavesInStep(config) as resumed:
        assert resumed.train_state.global_step == 2 and 2 not in resumed.results
        resumed.train()
    found, expected = (
        {index: result["val"] for index, result in each.results.items()}
        for each in (resumed, whole)
    )
    assert found == expected
    assert resumed.results[2]["train"]["loss"] == whole.results[2]["train"]["loss"]
    assert not differences(whole_state(whole)["model"], whole_state(resumed)["model"])


class EvaluatesInItsStep(TracingRunner):
    """Evaluates in each micro-batch of an update, after it was asked to stop in the first one if it is to."""

    not_saved = ("ids", "trace", "is_to_stop", "looked")
    is_to_stop = False

    def train_step(self, data: Any) -> Any:
        if self.train_state.global_step == 2:
            if self.is_to_stop:
                self.stop()
            self.looked = self.evaluate()
        return super().train_step(data)


def test_update_that_evaluates_in_its_step_is_made_before_a_stop(tmp_path: Path) -> None:
    config = settings("step", tmp_path, log=False, auto_resume=True)
    with EvaluatesInItsStep({**config, "dir": str(tmp_path / "whole")}) as whole:
        whole.train()
    config["dir"] = str(tmp_path / "parts")
    with EvaluatesInItsStep(config) as stopped:
        stopped.is_to_stop = True
        stopped.train()
        assert stopped.train_state.global_step == 3
    with EvaluatesInItsStep(config) as resumed:
        resumed.train()
    assert [*stopped.trace, *resumed.trace] == whole.trace
    assert not differences(whole_state(whole)["model"], whole_state(resumed)["model"])

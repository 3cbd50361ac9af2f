"""Updates whose gradient is computed again: bits that flip in between are found and named, and runs in order raise no alarm."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checked import Checked, CheckedText, Flip, settings, state_of
from support.processes import run_outcomes, run_processes
from torch import Tensor

from danling.audit.attach import ReplayMismatchError


@contextmanager
def calls_into(*parts: str) -> Iterator[list[str]]:
    """Yield a list that takes the names of the functions of this thread that are called in files with one of these parts in their path."""
    called: list[str] = []

    def profile(frame: Any, event: str, _: object) -> None:
        if event == "call" and any(part in frame.f_code.co_filename for part in parts):
            called.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        yield called
    finally:
        sys.setprofile(None)


OFF: dict[str, Any] = {"audit.replay_interval": None}
SAVING: dict[str, Any] = {"checkpoint.load_only": False, "checkpoint.interval": 100}


def train(
    config: dict[str, Any], flip: Flip | None = None, kind: type[Checked] = Checked
) -> dict[str, Tensor]:
    """Train, and return the end."""
    with kind(config, flip) as runner:
        runner.train()
        return state_of(runner)


def differing(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    """Return the names of what two ends have not bitwise alike."""
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("gradient", "rank 0 on cpu of .*: the gradient of '0.weight'"),
        ("weight", "rank 0 on cpu of .*: the losses of micro-batches and "),
        ("buffer", "rank 0 on cpu of .*: the losses of micro-batches and "),
        ("loss", "rank 0 on cpu of .*: the losses of micro-batches"),
    ],
)
def test_a_flip_ends_the_run_with_the_state_from_before_saved_and_the_run_resumes(
    kind: str, named: str, tmp_path: Path
) -> None:
    clean = train(settings(tmp_path / "clean", **OFF))
    expected = f"forward and backward of update 4 to give the same bits.*{named}.*A third computation agrees"
    with pytest.raises(ReplayMismatchError, match=expected):
        train(settings(tmp_path / "run", **SAVING), (kind, 4, 0))
    assert (
        torch.load(tmp_path / "run" / "checkpoints" / "latest.pth")["state"]["train"]["global_step"]
        == 3
    )
    assert not differing(clean, train(settings(tmp_path / "run", **SAVING, auto_resume=True)))


@pytest.mark.parametrize(
    "more",
    [
        {"audit.replays": 2, "audit.replay_interval": 3, "ema.enabled": True},
        {"compile.enable": True, "compile.backend": "aot_eager"},
        {"accum_steps": 1, "dataloader": {"global_batch_size": 8, "micro_batch_size": "auto"}},
    ],
)
def test_a_run_in_order_raises_no_alarm_and_ends_as_one_without(
    more: dict[str, Any], tmp_path: Path
) -> None:
    clean = train(settings(tmp_path / "clean", **{**more, **OFF}))
    assert not differing(clean, train(settings(tmp_path / "checked", **more)))


STACKS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"stack": "parallel", "parallel.axes.shard": 2},
    "tensor": {"stack": "parallel", "parallel.axes.tensor": 2},
    "pipeline": {"stack": "parallel", "parallel.axes.pipeline": 2},
    "accelerate": {"stack": "accelerate"},
}


def train_stack(root: str, more: dict[str, Any], kind: type[Checked]) -> tuple[list[str], str]:
    """Train on a rank without checks, with them, and with a flip on rank 1; return what differs, and the error."""
    clean = train(settings(f"{root}/clean", **more, **OFF), None, kind)
    found = differing(clean, train(settings(f"{root}/checked", **more), None, kind))
    # In a pipeline a step of the user's begins when the forward of its stage has ended.
    flip = ("loss" if "parallel.axes.pipeline" in more else "weight", 3, 1)
    with pytest.raises(ReplayMismatchError) as caught:
        train(settings(f"{root}/flipped", **more), flip, kind)
    return found, str(caught.value)


@pytest.mark.parametrize(
    "stack",
    [pytest.param(name, marks=pytest.mark.slow if name == "tensor" else ()) for name in STACKS],
)
def test_on_every_stack_a_flip_is_found_and_a_run_in_order_raises_no_alarm(
    stack: str, tmp_path: Path
) -> None:
    if stack == "accelerate":
        pytest.importorskip(stack)
    kind = CheckedText if stack in ("tensor", "pipeline") else Checked
    ranks = run_processes(
        train_stack, str(tmp_path), {"steps": 5, **STACKS[stack]}, kind, timeout=120
    )
    for found, error in ranks:
        assert found == [] and "forward and backward of update 3" in error
        # Ranks that compute together come to other losses together.
        assert "rank 1 on cpu" in error and (
            stack not in ("ddp", "accelerate") or "rank 0" not in error
        )


def test_reduced_gradient_names_its_ranks(tmp_path: Path) -> None:
    outcomes = run_outcomes(train, settings(tmp_path, **SAVING), ("gradient", 4, 1), world_size=2)
    for outcome in outcomes:
        assert isinstance(outcome.error, ReplayMismatchError), outcome.traceback
        assert "the gradient of '0.weight'" in str(outcome.error)
    assert torch.load(tmp_path / "checkpoints" / "latest.pth")["state"]["train"]["global_step"] == 3


COUNTER = itertools.count()


class Restless(Checked):
    """A loss that follows a counter that is not put back."""

    def compute_loss(self, pred: Tensor, target: Tensor) -> Tensor:
        return super().compute_loss(pred, target) * (1 + next(COUNTER))


class Writing(Checked):
    """A step that writes to its batch."""

    def train_step(self, data: Any) -> tuple[Any, Any]:
        data["input"].mul_(2)
        return super().train_step(data)


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        (Restless, ReplayMismatchError, "A third computation gave other bits again"),
        (Writing, ValueError, "Change a clone of it"),
    ],
)
def test_unrepeatable_steps_are_refused(
    kind: type[Checked], error: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        train(settings(tmp_path), None, kind)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"deterministic": False}, "Expected deterministic=true with audit.replay_interval"),
        ({"stack": "deepspeed"}, "Received: stack='deepspeed'"),
    ],
)
def test_uncheckable_runs_are_refused(more: dict[str, Any], words: str, tmp_path: Path) -> None:
    if more.get("stack") == "deepspeed":
        pytest.importorskip("deepspeed")
    with pytest.raises(ValueError, match=words):
        Checked(settings(tmp_path, **more))


def test_nothing_of_it_is_called_in_an_update_when_it_is_off(tmp_path: Path) -> None:
    with Checked(settings(tmp_path, **OFF)) as runner, calls_into("/danling/audit/") as called:
        runner.train()
    assert called == []

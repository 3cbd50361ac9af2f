"""Updates that are made again: bits that flip anywhere in them are found, named and healed, and runs in order raise no alarm."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.calls import calls_into
from support.flips import Flip, Flipped, FlippedText, Striker, settings, train_flipped
from support.processes import run_outcomes, run_processes
from torch import Tensor

from danling.audit.errors import ReplayMismatchError

FLIPS = int(os.environ.get("DANLING_FLIPS", "40"))
"""How many bits flip on one process; a thousand before a release."""
OFF: dict[str, Any] = {"audit.replay_interval": None}
HEAL: dict[str, Any] = {"audit.heal": True}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    """Return the names of what two ends have bitwise alike not."""
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]


def missed(flips: list[Flip], said: list[tuple[int, str]]) -> list[Flip]:
    """Return the flips of which nothing was said; nothing flips in the first update, which is not checked."""
    heard = {step for step, _ in said}
    return [flip for flip in flips if flip.step > 1 and flip.step not in heard]


def test_every_flip_is_found_and_healed_bitwise(tmp_path: Path) -> None:
    clean, _, _ = train_flipped(settings(tmp_path / "clean", steps=FLIPS + 1, **OFF))
    end, flips, said = train_flipped(settings(tmp_path / "flipped", steps=FLIPS + 1, **HEAL), Striker(FLIPS))
    assert len(flips) == FLIPS + 1 and all(flip.struck for flip in flips)
    assert not same(clean, end)
    # A lowest bit may be rounded away: that of a first gradient by the second, that of a moment by the next. Nothing can hear of it then.
    for flip in missed(flips, said):
        config = settings(tmp_path / f"{flip.step}", steps=FLIPS + 1, **OFF)
        struck, _, _ = train_flipped(config, Striker(FLIPS, only=flip.step))
        assert not same(clean, struck), f"{flip} changes how a run ends that is not checked, and nothing was said"


@pytest.mark.parametrize("more", [{}, {"audit.replays": 2, "audit.replay_interval": 3}, {"ema.enabled": True}])
def test_a_run_in_order_raises_no_alarm_and_ends_as_one_without(more: dict[str, Any], tmp_path: Path) -> None:
    clean, _, _ = train_flipped(settings(tmp_path / "clean", steps=12, **OFF))
    end, _, said = train_flipped(settings(tmp_path / "checked", steps=12, **more))
    assert not said
    assert not same(clean, end)


@pytest.mark.parametrize(
    ("kind", "instant", "named"),
    [
        ("weight", "fetch", "what the run holds after update 3 to stay what it was .* cpu of .*: weights.0/"),
        ("gradient", "backward", "forward and backward of update 4 .* rank 0 on cpu of .*: the gradient of '4.weight'"),
        ("loss", "loss", "forward and backward of update 4 .* the loss up to micro-batch"),
        ("batch", "forward", "forward and backward of update 4 .* the batch of micro-batch . after its backward"),
        ("moment", "step", "the step of update 4 .* optimizer.0/"),
        ("moment", "end", "what the step of update 4 has left to stay what it was .* optimizer.0/"),
        ("buffer", "end", "what the step of update 4 has left to stay what it was .* buffers/"),
    ],
)
def test_a_flip_ends_the_run_with_what_it_was_before_saved(kind: str, instant: str, named: str, tmp_path: Path) -> None:
    config = settings(tmp_path, steps=8, **{"checkpoint.load_only": False, "checkpoint.interval": 100})
    with pytest.raises(ReplayMismatchError, match=named):
        train_flipped(config, Striker(3, every=4, kinds=(kind,), instants=(instant,)))
    end, _, said = train_flipped({**config, "auto_resume": True})
    clean, _, _ = train_flipped(settings(tmp_path / "clean", steps=8, **OFF))
    assert not said
    assert not same(clean, end)


def test_what_is_never_the_same_twice_is_not_taken_for_a_broken_device(tmp_path: Path) -> None:
    with Restless(settings(tmp_path)) as runner, pytest.raises(ReplayMismatchError, match="The attempts do not agree"):
        runner.train()


COUNTER = itertools.count()


class Restless(Flipped):
    """A loss that follows a counter which nobody puts back."""

    def compute_loss(self, pred: Tensor, target: Tensor) -> Tensor:
        """Count the calls."""
        return super().compute_loss(pred, target) * (1 + next(COUNTER))


def train_ddp(
    root: str, more: dict[str, Any], seed: int | None, ranks: tuple[int, ...], **which: Any
) -> tuple[dict[str, Tensor], list[Flip], list[tuple[int, str]]]:
    """Train on several ranks."""
    striker = None if seed is None else Striker(seed, ranks=ranks, **which)
    return train_flipped(settings(root, **more), striker)


@pytest.mark.parametrize(
    ("kind", "instant", "named"),
    [("gradient", "backward", "the gradient of '4.weight'"), ("weight", "forward", "weights.0/")],
)
def test_of_two_ranks_the_one_is_named_whose_gradient_was_wrong(
    kind: str, instant: str, named: str, tmp_path: Path
) -> None:
    more = {"steps": 8, "checkpoint.load_only": False, "checkpoint.interval": 100}
    which = {"kinds": (kind,), "instants": (instant,), "every": 4}
    outcomes = run_outcomes(train_ddp, str(tmp_path), more, 1, (1,), world_size=2, **which)
    for outcome in outcomes:
        assert isinstance(outcome.error, ReplayMismatchError), outcome.traceback
        assert "update 4 to come to the same bits when it is made again. Received: rank 1 on cpu of" in str(
            outcome.error
        )
        assert named in str(outcome.error)
    assert [path.name for path in (tmp_path / "checkpoints").glob("*.pth")] == ["latest.pth"]
    assert torch.load(tmp_path / "checkpoints" / "latest.pth")["state"]["train"]["global_step"] == 3


def test_kernels_that_need_not_be_repeatable_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Expected deterministic=true with audit.replay_interval"):
        Flipped(settings(tmp_path, deterministic=False))


def test_nothing_of_it_is_called_in_an_update_when_it_is_off(tmp_path: Path) -> None:
    with Flipped(settings(tmp_path, **OFF)) as runner, calls_into("/danling/audit/", "replaying") as called:
        runner.train()
    assert called == []


LATE: dict[str, Any] = {
    "kinds": ("weight", "moment", "gradient"),
    "instants": ("after backward", "clip", "step", "after step", "end"),
}
VISIBLE: dict[str, Any] = {"kinds": ("weight", "moment", "buffer", "batch", "loss")}
"""What is no gradient, of which an engine shows the ranks only a share, and that late."""
STACKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ddp": ({}, {}),
    "fsdp": ({"stack": "parallel", "parallel.axes.shard": 2}, {}),
    "tensor": ({"stack": "parallel", "parallel.axes.tensor": 2}, LATE),
    "pipeline": ({"stack": "parallel", "parallel.axes.pipeline": 2}, LATE),
    "accelerate": ({"stack": "accelerate"}, {}),
    "deepspeed": (
        {"stack": "deepspeed", "deepspeed": {"zero_optimization": {"stage": 1, "reduce_bucket_size": 4096}}},
        VISIBLE,
    ),
}


Ended = tuple[dict[str, Tensor], list[Flip], list[tuple[int, str]]]


def train_stack(root: str, more: dict[str, Any], which: dict[str, Any]) -> list[Ended]:
    """Train on a rank of a stack: without checks, with them, and with flips that are healed."""
    kind = FlippedText if which == LATE else Flipped
    trials = (("clean", OFF, None), ("checked", {}, None), ("healed", HEAL, Striker(5, ranks=(0, 1), **which)))
    return [train_flipped(settings(f"{root}/{name}", **more, **own), striker, kind) for name, own, striker in trials]


@pytest.mark.parametrize("stack", STACKS)
def test_on_every_stack_flips_are_found_and_healed_and_none_is_an_alarm(stack: str, tmp_path: Path) -> None:
    if stack in ("accelerate", "deepspeed"):
        pytest.importorskip(stack)
    more, which = STACKS[stack]
    ranks = run_processes(train_stack, str(tmp_path), {"steps": 6, **more}, which, world_size=2, timeout=120)
    struck = {flip.step for _, _, (_, flips, _) in ranks for flip in flips if flip.struck and flip.step > 1}
    (_, _, alarms), (_, _, said) = ranks[0][1:]
    assert not alarms and {step for step, _ in said} == struck == set(range(2, 7))
    for (clean, _, _), (checked, _, _), (healed, _, _) in ranks:
        assert not same(clean, checked) and not same(clean, healed)


@pytest.mark.parametrize("zero", [{"stage": 2}, {"stage": 3}, {"stage": 1, "offload_optimizer": {"device": "cpu"}}])
def test_engines_that_keep_no_gradient_are_refused_with_the_reason(zero: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    with pytest.raises(ValueError, match="Expected gradients that can be put back .* Received: deepspeed.zero_opt"):
        Flipped(settings(tmp_path, stack="deepspeed", deepspeed={"zero_optimization": zero}))


def test_compiled_code_raises_no_alarm_and_what_compiles_is_not_checked(tmp_path: Path) -> None:
    more = {"steps": 8, "compile.enable": True, "compile.backend": "aot_eager"}
    clean, _, _ = train_flipped(settings(tmp_path / "clean", **more, **OFF))
    end, _, said = train_flipped(settings(tmp_path / "checked", **more))
    assert not said
    assert not same(clean, end)

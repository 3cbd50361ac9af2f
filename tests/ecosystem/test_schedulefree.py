"""schedule-free optimizers: one set of weights is trained, another evaluated and saved.

Library: schedulefree
Works: its optimizers on `ddp` and `accelerate`; evaluation and files have the averaged weights
Exact: resume; an evaluation leaves no trace
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.toys import in_parts, line_of, settings
from torch import Tensor, nn

import danling as dl

schedulefree = pytest.importorskip("schedulefree")

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda parameters: schedulefree.AdamWScheduleFree(parameters, lr=0.05, warmup_steps=3),
    "sgd": lambda parameters: schedulefree.SGDScheduleFree(parameters, lr=0.5, momentum=0.9),
    "wrapper": lambda parameters: schedulefree.ScheduleFreeWrapper(
        torch.optim.SGD(parameters, lr=0.1), momentum=0.9
    ),
}


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


class Free(dl.Runner):
    def __init__(self, config: dict[str, Any], kind: str = "adamw") -> None:
        super().__init__(config)
        self.model, self.criterion = model_of(), nn.MSELoss()
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.datasets = {"train": line_of(24), "val": line_of(8)}


FREE: dict[str, Any] = {
    "optim": {},
    "dataloader": {"batch_size": 4, "shuffle": False},
    "evaluate_interval": 3,
}


def by_hand(kind: str, steps: int) -> tuple[list[Tensor], list[Tensor], float]:
    """Weights of training, weights to evaluate and their loss, of a loop as schedule-free wants it."""
    model, (inputs, targets) = model_of(), line_of(24).tensors
    optimizer = OPTIMIZERS[kind](model.parameters())
    optimizer.train()
    for step in range(steps):
        part = slice(step % 6 * 4, step % 6 * 4 + 4)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs[part]), targets[part]).backward()
        optimizer.step()
    trained = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.eval()
    with torch.no_grad():
        held_out = line_of(8).tensors
        loss = nn.functional.mse_loss(model(held_out[0]), held_out[1]).item()
    return trained, [parameter.detach().clone() for parameter in model.parameters()], loss


@pytest.mark.parametrize("stack", ["ddp", "accelerate"])
@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_training_evaluation_and_files_have_the_right_weights(
    kind: str, stack: str, tmp_path: Path
) -> None:
    trained, averaged, loss = by_hand(kind, 8)
    assert not torch.equal(trained[0], averaged[0])
    with Free(settings(tmp_path, **FREE, steps=8, stack=stack), kind) as runner:
        runner.train()
        assert runner.evaluate("val")["val"]["loss"] == pytest.approx(loss, rel=1e-6)
        for mine, expected in zip(runner.unwrapped_model.parameters(), trained, strict=True):
            torch.testing.assert_close(mine, expected)
        held = [parameter.detach().clone() for parameter in runner.unwrapped_model.parameters()]
        runner.infer("val")
        assert all(map(torch.equal, held, runner.unwrapped_model.parameters()))
    saved = torch.load(tmp_path / "checkpoints/latest.pth", weights_only=True)["model"]
    for mine, expected in zip(saved.values(), averaged, strict=True):
        torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize("backend", ["file", pytest.param("dcp", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_a_resumed_run_ends_bitwise(kind: str, backend: str, tmp_path: Path) -> None:
    whole, runner = in_parts(
        partial(Free, kind=kind), tmp_path, (4, 7, 10), **FREE, checkpoint={"backend": backend}
    )
    assert all(runner.results[step]["val"] == whole.results[step]["val"] for step in (3, 6, 9))
    mine, theirs = runner.state_dict(), whole.state_dict()
    assert all(torch.equal(mine["model"][name], value) for name, value in theirs["model"].items())
    for name, value in whole.unwrapped_model.named_parameters():
        assert torch.equal(runner.unwrapped_model.get_parameter(name), value)


def test_an_evaluation_leaves_no_trace(tmp_path: Path) -> None:
    often, seldom = (
        in_parts(Free, tmp_path / str(interval), [9], **{**FREE, "evaluate_interval": interval})[0]
        for interval in (1, 9)
    )
    assert all(
        map(torch.equal, often.unwrapped_model.parameters(), seldom.unwrapped_model.parameters())
    )


def test_an_optimizer_among_others_is_found(tmp_path: Path) -> None:
    class Joint(Free):
        def __init__(self, config: dict[str, Any]) -> None:
            super().__init__(config)
            first, last = self.model[0].parameters(), self.model[2].parameters()
            self.optimizer = dl.optim.JointOptimizer(
                OPTIMIZERS["adamw"](first), torch.optim.SGD(last, lr=0.1)
            )

    whole, runner = in_parts(Joint, tmp_path, (3, 6), **FREE)
    assert all(
        map(torch.equal, runner.unwrapped_model.parameters(), whole.unwrapped_model.parameters())
    )


def test_other_stacks_refuse_it(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"one set of weights on the stack 'parallel'. Received: a AdamWScheduleFree",
    ):
        Free(settings(tmp_path, **FREE, steps=2, stack="parallel"))

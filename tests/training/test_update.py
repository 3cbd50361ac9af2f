"""One update of a runner: what is asked in which order, what advances with it, and what an update that is left out leaves as it was."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import danling as dl
from danling.data import Batch, open_source
from danling.distributed import StepTotals
from danling.training import NonFiniteError, UpdateOutcome

HOOKS = [
    "complete_gradients",
    "unscale_gradients",
    "gradient_norm",
    "clip_gradients",
    "optimizer_step",
    "zero_gradients",
]


class Run(dl.TorchRunner):
    """A linear model of one weight whose loss is its output, with a note of each hook that is asked."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        super().__init__({"dir": str(directory), "log": False, "seed": 1, "steps": 9, **settings})
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.model.weight)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.asked: list[str] = []
        self.not_saved = ("asked",)
        for hook in HOOKS:
            setattr(self, hook, self._noting(hook, getattr(self, hook)))

    def _noting(self, hook: str, call: Any) -> Any:
        def noted(*args: Any) -> Any:
            self.asked.append(hook.split("_")[0])
            return call(*args)

        return noted

    def compute_loss(self, pred: Any, target: Any) -> Tensor:
        loss: Tensor = pred.mean()
        return loss

    def batch_weight(self, data: Any, target: Any) -> float:
        return 1.0

    @property
    def weight(self) -> float:
        return float(self.model.weight.detach())

    def make(self, *values: float) -> UpdateOutcome:
        for value in values:
            self.train_step(torch.full((2, 1), value))
        return self.step()


def test_the_hooks_are_asked_in_this_order_and_everything_advances(tmp_path: Path) -> None:
    with Run(tmp_path, ema={"enabled": True, "decay": 0.5}) as run:
        stepped: list[int] = []
        run.scheduler = SimpleNamespace(
            step=lambda: stepped.append(run.train_state.global_step), state_dict=dict
        )
        outcome = run.make(1.0, 3.0)
        assert run.asked == ["complete", "unscale", "gradient", "clip", "optimizer", "zero"]
        assert (
            outcome.committed
            and outcome.weight == 2.0
            and outcome.samples == 4.0
            and outcome.loss == 2.0
        )
        assert outcome.grad_norm is not None and float(outcome.grad_norm) == 2.0
        assert run.weight == 1.0 - 0.5 * 2.0 and run.model.weight.grad is None and stepped == [1]
        train = run.train_state
        assert (train.global_step, train.samples, train.micro_step, run.window.count) == (
            1,
            4,
            2,
            0,
        )
        assert run._parts.losses.averages() == {"loss": 2.0} and run.ema.num_updates == 1


def test_skipped_update_advances_only_the_samples(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Run(
        tmp_path, skip_nonfinite_grad=True, max_skipped_updates=1, ema={"enabled": True}
    ) as run:
        run.scheduler = SimpleNamespace(
            step=lambda: pytest.fail("a schedule advanced"), state_dict=dict
        )
        for value in (float("inf"), float("nan")):
            run.train_state.consecutive_skips = 0
            outcome = run.make(value)
            assert (
                outcome.reason == "nonfinite"
                and run.weight == 1.0
                and run.model.weight.grad is None
            )
        train = run.train_state
        assert (train.global_step, train.skipped_updates, train.samples, run.ema.num_updates) == (
            0,
            2,
            4,
            0,
        )
        assert not run._parts.losses and "clip" not in run.asked and run.window.count == 0
        assert caplog.messages.count("Update 1 was skipped (nonfinite).") == 2
        with pytest.raises(
            NonFiniteError, match=r"at most 1 skipped updates in a row. Received: 2 before step 1"
        ):
            run.make(float("inf"))


def test_an_update_without_a_micro_batch_a_backward_or_a_gradient_is_refused(
    tmp_path: Path,
) -> None:
    class Silent(Run):
        def train_step(self, data: Any) -> Any:
            return None, torch.zeros(())

    class Lost(Run):
        def backward(self, loss: Tensor) -> None:
            """Leave no gradient."""

    with (
        Run(tmp_path / "run") as run,
        pytest.raises(ValueError, match=r"step\(\) and backward\(loss\) need at least"),
    ):
        run.step()
    with (
        Silent(tmp_path / "silent") as run,
        pytest.raises(ValueError, match="every micro-batch. Received: 2 of 2"),
    ):
        run.make(1.0, 1.0)
    with (
        Lost(tmp_path / "lost") as run,
        pytest.raises(ValueError, match="Expected `backward` to leave a gradient"),
    ):
        run.make(1.0)


def test_samples_on_an_accelerator_are_read_when_needed(tmp_path: Path) -> None:
    with Run(tmp_path) as run:
        update = run._parts.update
        update.sync.reduce = lambda own: StepTotals(1.0, 2.0, torch.tensor(3.0), 0.0)  # type: ignore[method-assign]
        run.make(1.0)
        run.make(1.0)
        assert run.train_state.samples == 0
        update.raise_pending_error()
        assert run.train_state.samples == 6


@pytest.mark.parametrize(
    ("closes", "size", "expected"),
    [
        (
            (None,) * 5,
            2,
            [[False, True], [False, True], [True]],
        ),  # the pass ends before the last window is full
        ((None, True, None), 1, [[True], [True], [True]]),
        (
            (False, False, True),
            1,
            [[False, False, True]],
        ),  # a loader that knows where an update closes
    ],
)
def test_the_last_micro_batch_of_a_window_reduces(
    tmp_path: Path, closes: tuple[bool | None, ...], size: int, expected: list[list[bool]]
) -> None:
    with Run(tmp_path, accum_steps=size) as run:
        source = open_source([], split="train", seed=0)
        batches = iter([Batch(torch.ones(2, 1), 2, None, each) for each in closes])
        found: list[list[bool]] = []
        run.train_step = lambda data: found[-1].append(run.window.reduces)  # type: ignore[assignment, method-assign, misc]
        for window in expected:
            consumed: list[Batch] = []
            found.append([])
            assert run._parts.update.run_window(source, batches, consumed) and len(consumed) == len(
                window
            )
            run.window.reset()
        assert found == expected

"""Messages that were wrong: what they refused works, what they advised is right, and they are not said where nothing is amiss."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import danling as dl


class Toy(dl.Runner):
    """A linear model over a list of samples."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = nn.Linear(4, 2)
        self.criterion = nn.CrossEntropyLoss()
        points = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
        self.datasets = {"train": [(point, torch.tensor(int(point.sum() > 0))) for point in points]}


def settings(root: Path, steps: int, **more: Any) -> dict[str, Any]:
    base = {"seed": 1, "steps": steps, "dir": str(root), "log": False, "dataloader": {"batch_size": 8}}
    return {**base, **more}


class Closing(Toy):
    """Trains with LBFGS, as the message asks for."""

    not_saved = ("batch",)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.optimizer = torch.optim.LBFGS(self.model.parameters(), lr=0.1)

    def train_step(self, data: Any) -> Any:
        self.batch = data
        return super().train_step(data)

    def step(self) -> Any:
        return super().step()

    def optimizer_step(self) -> None:

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss: Tensor = self.criterion(self.model(self.batch[0]), self.batch[1])
            loss.backward()
            return loss

        self.optimizer.step(closure)


def test_lbfgs_with_both_hooks_overridden_trains_and_resumes(tmp_path: Path) -> None:
    weights = []
    for runs in ([("whole", 6)], [("parts", 3), ("parts", 6)]):
        for name, steps in runs:
            with Closing(settings(tmp_path / name, steps, auto_resume=True)) as runner:
                before = runner.model.weight.detach().clone()
                runner.train()
                weights.append(runner.unwrapped_model.weight.detach().clone())
                assert not torch.equal(before, weights[-1])
    assert torch.equal(weights[0], weights[2])


class Pairs:
    """A batch sampler of a user's own."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1, 2], [5, 6, 7]])

    def __len__(self) -> int:
        return 2


def test_batch_size_none_written_out_beside_a_batch_sampler_is_explained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Sampled(Toy):
        def build_datasampler(self, split: str, dataset: Any = None) -> Any:
            return Pairs()

    more = {"optim": {"type": "sgd", "lr": 0.1}}
    with (
        caplog.at_level(logging.INFO, logger="danling"),
        pytest.raises(TypeError, match="list indices"),
        Sampled(settings(tmp_path / "none", 2, **more, dataloader={"batch_size": None})) as runner,
    ):
        runner.train()
    assert "each list of indices of the Pairs at once. Leave batch_size out" in caplog.text
    with Sampled(settings(tmp_path / "absent", 2, **more, dataloader={})) as runner:
        runner.train()
        assert runner.train_state.samples == 6


def test_a_counter_of_the_optimizers_own_is_no_option_that_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    schedulefree = pytest.importorskip("schedulefree")

    class Free(Toy):
        decay = 0.0

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.optimizer = schedulefree.SGDScheduleFree(self.model.parameters(), lr=0.1, weight_decay=self.decay)

    with Free(settings(tmp_path, 3)) as runner:
        runner.train()
    with caplog.at_level(logging.WARNING, logger="danling"):
        with Free(settings(tmp_path, 3, auto_resume=True)):
            pass
        assert "options" not in caplog.text
        with type("Decayed", (Free,), {"decay": 0.5})(settings(tmp_path, 3, auto_resume=True)):
            pass
    assert "not those of the program: weight_decay=0.0 (here 0.5). To have" in caplog.text

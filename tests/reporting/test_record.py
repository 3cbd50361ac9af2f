"""What a run records of itself: parts that no setting contains are compared when it is resumed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.toys import Small, settings
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

import danling as dl
from danling.reporting.record import _chosen


class Scaled:
    """A transform with a description of its own."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, value: Tensor) -> Tensor:
        return value * self.factor

    def __repr__(self) -> str:
        return f"Scaled({self.factor})"


class Points(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, transform: Callable[[Tensor], Tensor]) -> None:
        self.transform = transform
        self.inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.transform(self.inputs[index]), self.inputs[index].sum()[None]


class PartsRunner(dl.Runner):
    def __init__(
        self,
        config: dl.RunnerConfig,
        activation: nn.Module,
        criterion: nn.Module,
        transform: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__(config)
        self.model = nn.Sequential(nn.Linear(4, 8), activation, nn.Linear(8, 1))
        self.criterion = criterion
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.datasets = {"train": Points(transform)}


def trained(path: Path, steps: int, *parts: object, resume: str | None = None) -> None:
    config = dl.RunnerConfig(
        steps=steps, seed=1, dir=str(path), auto_resume=resume is None, dataloader={"batch_size": 4}
    )
    config.resume = resume
    with PartsRunner(config, *parts) as runner:  # type: ignore[arg-type]
        runner.train()


@pytest.mark.parametrize(
    ("activation", "criterion", "transform", "said"),
    [
        (nn.ReLU(), nn.MSELoss(), Scaled(2.0), []),
        (nn.ReLU(), nn.L1Loss(), Scaled(2.0), ["criterion was MSELoss, is L1Loss"]),
        (
            nn.GELU(),
            nn.MSELoss(),
            Scaled(2.0),
            ["number of GELU layers was 0, is 1; number of ReLU layers was 1, is 0"],
        ),
        (
            nn.ReLU(),
            nn.MSELoss(),
            Scaled(3.0),
            ["transform of train was Scaled(2.0), is Scaled(3.0)"],
        ),
    ],
)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_resume_with_other_parts_is_warned_of_once(
    activation: nn.Module,
    criterion: nn.Module,
    transform: Scaled,
    said: list[str],
    elsewhere: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trained(tmp_path / "run", 2, nn.ReLU(), nn.MSELoss(), Scaled(2.0))
    source = str(tmp_path / "run" / "checkpoints" / "latest.pth") if elsewhere else None
    with caplog.at_level("WARNING", "danling"):
        trained(
            tmp_path / ("other" if elsewhere else "run"),
            4,
            activation,
            criterion,
            transform,
            resume=source,
        )
    lines = [line for line in caplog.messages if "continues with other parts" in line]
    assert len(lines) == len(said)
    assert all(text in line for text, line in zip(said, lines))


class FoldRunner(dl.Runner):
    """One fold of a cross validation, which no key of its configuration names."""

    def __init__(self, config: dl.RunnerConfig, fold: int) -> None:
        super().__init__(config)
        self.model = nn.Linear(4, 1)
        self.criterion = nn.MSELoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        points = Points(Scaled(1.0))
        evaluated = range(4 * fold, 4 * fold + 4)
        self.datasets = {
            "train": Subset(points, [index for index in range(16) if index not in evaluated]),
            "val": Subset(points, evaluated),
        }


@pytest.mark.parametrize("fold", [0, 1])
def test_resume_with_other_samples_of_a_subset_is_warned_of(
    fold: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for epochs, number in ((1, 0), (2, fold)):
        config = dl.RunnerConfig(
            epochs=epochs, seed=1, dir=str(tmp_path), auto_resume=True, dataloader={"batch_size": 4}
        )
        with FoldRunner(config, number) as runner:
            runner.train()
    said = "train has other samples of its dataset; val has other samples of its dataset"
    assert [said in line for line in caplog.messages if "continues with other parts" in line] == [
        True
    ] * fold


def test_samples_of_a_subset_are_known_with_any_default_device() -> None:
    subset = Subset(Points(Scaled(1.0)), [1, 2])
    on_cpu = _chosen(subset)
    with torch.device("meta"):
        assert on_cpu is not None and _chosen(subset) == on_cpu


def test_a_fold_that_is_in_no_setting_is_told_that_its_run_is_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for fold in range(2):
        config = dl.RunnerConfig(
            epochs=1, seed=1, dir=str(tmp_path), auto_resume=True, dataloader={"batch_size": 4}
        )
        with FoldRunner(config, fold) as runner:
            runner.train()
    assert any(
        "name in the configuration what differs, such as fold=1" in line for line in caplog.messages
    )


class Growing(Small):
    """Has more points from pass to pass, beginning with some."""

    def __init__(self, config: Mapping[str, Any], points: int, *, validated: int = 4) -> None:
        super().__init__(config)
        self.points = points
        self.grow(points)
        self.datasets["val"] = TensorDataset(torch.randn(validated, 4), torch.arange(validated) % 2)

    def grow(self, points: int) -> None:
        target = torch.arange(points) % 2
        self.datasets["train"] = TensorDataset(torch.randn(points, 4), target)

    def on_pass_start(self, split: str) -> None:
        self.grow(self.points + 4 * self.state.train.epoch)


@pytest.mark.parametrize(
    ("points", "validated", "named"),
    [
        (8, 4, ""),
        (12, 4, "number of samples of train was 8, is 12."),
        (8, 3, "number of samples of val was 4, is 3."),
    ],
)
def test_data_of_another_length_are_named_once(
    points: int, validated: int, named: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that grow in training are not."""
    config = settings(tmp_path, auto_resume=True)
    with Growing({**config, "epochs": 2}, 8) as run:
        run.train()
    for epochs, expected in ((3, named), (4, "")):
        caplog.clear()
        with Growing({**config, "epochs": epochs}, points, validated=validated) as run:
            run.train()
        lines = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
        assert len(lines) == bool(expected) and expected in "".join(lines)


class OwnLoop(Growing):
    """Gets another dataset and criterion before each pass, by a loop of its own."""

    def loop(self, epochs: int) -> None:
        for epoch in range(self.state.train.epoch, epochs):
            self.grow(self.points + 4 * epoch)
            self.criterion = nn.CrossEntropyLoss() if epoch == 0 else nn.MultiMarginLoss()
            self.train_epoch()
            self.save_checkpoint()


@pytest.mark.parametrize(("points", "named"), [(8, ""), (12, "train was 8, is 12.")])
def test_what_a_loop_by_hand_changes_from_pass_to_pass_is_no_other_part(
    points: int, named: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither in the program itself nor in the one that continues it, in a later pass."""
    config = settings(tmp_path, auto_resume=True)
    for epochs, begun, expected in ((2, 8, ""), (4, points, named)):
        caplog.clear()
        with OwnLoop({**config, "epochs": epochs}, begun) as run:
            run.loop(epochs)
        lines = [line for line in caplog.messages if "continues with other parts" in line]
        assert len(lines) == bool(expected) and expected in "".join(lines)

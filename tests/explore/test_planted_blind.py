"""Each planted fault changes the result that it names, and nothing once its switch is off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from explore.planted_blind import PLANTED
from explore.planted_form import noting
from support.toys import line_of, settings
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import danling as dl

NARROW = torch.bfloat16


def trained(make: Callable[[Any], dl.Runner], root: Path, *stops: int, **more: Any) -> dl.Runner:
    """Train to each of some updates, in another runner each, and return the last one."""
    for steps in stops:
        with make(settings(root, steps=steps, auto_resume=True, **more)) as runner:
            runner.train()
    return runner


class Line(dl.Runner):
    """A linear model of sums, in any dtype."""

    dtype = torch.float32

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        inputs, targets = line_of(16).tensors
        self.model, self.criterion = nn.Linear(3, 1).to(self.dtype), nn.MSELoss()
        self.datasets = {"train": TensorDataset(inputs.to(self.dtype), targets.to(self.dtype))}


# Each program returns whether the result is right.


def draws_are_independent(root: Path) -> bool:
    pairs = set()

    class Flips(Dataset[tuple[Tensor, Tensor]]):
        def __len__(self) -> int:
            return 32

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            pairs.add((int(torch.randint(2, ())), int(numpy.random.randint(2))))
            return torch.ones(3), torch.ones(1)

    class Flipping(Line):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.datasets = {"train": Flips()}

    trained(Flipping, root, 8, **{"dataloader.keyed": "sample"})
    return len(pairs) == 4


def evaluation_changes_no_mask(root: Path) -> bool:
    class Noisy(Line):
        looks = False

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1))
            self.datasets["val"] = line_of(6)

        def train_step(self, data: Any) -> Any:
            if self.looks:
                self.evaluate_epoch("val")
            return super().train_step(data)

    class Looking(Noisy):
        looks = True

    plain, looking = (trained(kind, root / kind.__name__, 3) for kind in (Noisy, Looking))
    return torch.equal(plain.model[1].weight, looking.model[1].weight)


def statistics_stay_finite(root: Path) -> bool:
    class Spoilt(Line):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
            inputs, targets = line_of(16).tensors
            inputs[5] = float("nan")
            self.datasets = {"train": TensorDataset(inputs, targets)}

    runner = trained(Spoilt, root, 3, skip_nonfinite_grad=True)
    return bool(runner.model[0].running_mean.isfinite().all())


def averages_move(root: Path) -> bool:
    class Narrow(Line):
        dtype = NARROW

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            nn.init.ones_(self.model.weight)

    runner = trained(Narrow, root, 16, **{"ema.enabled": True, "ema.decay": 0.999})
    return not torch.equal(runner.ema.weights["weight"].double(), torch.ones(1, 3).double())


def every_sample_is_predicted_in_order(root: Path) -> bool:
    class Predicting(Line):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = nn.Identity()
            self.datasets = {"test": TensorDataset(torch.arange(21.0).view(21, 1))}

    more = {"dataloader.shuffle": True, "dataloader.drop_last": True, "optim": {}}
    with Predicting(settings(root, **more)) as runner:
        predictions = [float(each) for each in runner.infer("test")]
    return predictions == list(map(float, range(21)))


def trial_leaves_the_count(root: Path) -> bool:
    counts = []

    class Counting(Line):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.evaluated = 0
            self.datasets["val"] = line_of(6)

        def train_step(self, data: Any) -> Any:
            counts.append(self.evaluated)
            return super().train_step(data)

        def evaluate_step(self, data: Any) -> Any:
            self.evaluated += 1
            return super().evaluate_step(data)

    trained(Counting, root, 1)
    return counts == [0]


def rate_stays_while_score_rises(root: Path) -> bool:
    class Rising(Line):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.datasets["val"] = line_of(6)
            self.rises = 0.0

        def summarize(self, split: str, totals: Any) -> dict[str, float]:
            self.rises += 1.0
            return {"acc": self.rises}

    schedule = {"type": "reducelronplateau", "patience": 0}
    more = {
        "scheduler": schedule,
        "score_name": "acc",
        "score_split": "val",
        "evaluate_interval": 1,
    }
    runner = trained(Rising, root, 6, **more)
    return float(runner.optimizer.param_groups[0]["lr"]) == 0.1


class Slow(torch.optim.Optimizer):
    """Wide momentum, and slow weights that only its own `state_dict` knows."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.slow: list[Tensor] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        self.slow = self.slow or [parameter.clone() for parameter in parameters]
        for parameter, slow in zip(parameters, self.slow):
            momentum = self.state[parameter].setdefault(
                "momentum", torch.zeros_like(parameter, dtype=torch.float32)
            )
            momentum.mul_(0.9).add_(parameter.grad)
            parameter.sub_(0.1 * momentum)
            slow.lerp_(parameter, 0.5)
            parameter.lerp_(slow, 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": list(self.slow)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.slow = [slow.clone() for slow in state_dict.get("slow", [])]


def slow_runs(root: Path, dtype: torch.dtype) -> tuple[Slow, Slow, bool]:
    """Return the optimizers of a run that is left alone and of one that is resumed, and whether their weights are equal."""

    class Slowly(Line):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            torch.manual_seed(1)
            self.model = nn.Linear(3, 1).to(dtype)
            inputs, targets = line_of(16).tensors
            self.datasets = {"train": TensorDataset(inputs.to(dtype), targets.to(dtype))}
            self.optimizer = Slow(self.model.parameters())

    whole, parts = (
        trained(Slowly, root / "whole", 5, optim={}),
        trained(Slowly, root / "parts", 2, 5, optim={}),
    )
    return whole.optimizer, parts.optimizer, torch.equal(whole.model.weight, parts.model.weight)


def moments_keep_their_dtype(root: Path) -> bool:
    _, resumed, _ = slow_runs(root, NARROW)
    return all(state["momentum"].dtype == torch.float32 for state in resumed.state.values())


def slow_weights_come_back(root: Path) -> bool:
    return slow_runs(root, torch.float32)[2]


def deleted_attribute_stays_deleted(root: Path) -> bool:
    class Deleting(Line):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.warm = 1

        def train_step(self, data: Any) -> Any:
            if self.state.train.global_step == 0:
                del self.warm
            return super().train_step(data)

    return not hasattr(trained(Deleting, root, 1, 2), "warm")


PROGRAMS: dict[str, Callable[[Path], bool]] = {
    "one_number_for_all_streams": draws_are_independent,
    "evaluation_moves_streams": evaluation_changes_no_mask,
    "skipped_update_keeps_statistics": statistics_stay_finite,
    "averages_in_dtype_of_weights": averages_move,
    "order_of_training_everywhere": every_sample_is_predicted_in_order,
    "trial_changes_attributes": trial_leaves_the_count,
    "plateau_takes_lowest": rate_stays_while_score_rises,
    "moments_take_dtype_of_weights": moments_keep_their_dtype,
    "own_entries_of_optimizer_are_dropped": slow_weights_come_back,
    "deleted_attribute_comes_back": deleted_attribute_stays_deleted,
}


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_switch_changes_its_result(planted: Any, tmp_path: Path) -> None:
    program = PROGRAMS[planted.name]
    with planted.switch():
        assert not program(tmp_path / "fault")
    with noting([planted], tmp_path / "reached"):
        assert program(tmp_path / "right")
    assert (tmp_path / "reached").read_text().split() == [planted.name]

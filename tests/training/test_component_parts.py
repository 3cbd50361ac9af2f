"""The parts of a training in a checkpoint, of components that note what they are handed."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from danling.checkpoints import CheckpointMismatch
from danling.config import RunnerConfig
from danling.training.component_parts import component_parts
from danling.training.frozen import FrozenWeights
from danling.training.run_state import RunState


class Averages:
    """Averaged weights."""

    num_updates = 3

    def state_dict(self) -> dict[str, Any]:
        """Return them."""
        return {"weights": {"w": 1}, "num_updates": 3}


class Held:
    """A training whose pieces note what they are restored from."""

    def __init__(self) -> None:
        self.criterion: Any = nn.CrossEntropyLoss(weight=torch.ones(2))
        self.ema: Any = Averages()
        self.optimizer: Any = object()
        self.scheduler: Any = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), 5)
        self.restored: list[tuple[str, Any, bool]] = []
        self.config = RunnerConfig()
        self._parts = SimpleNamespace(frozen=FrozenWeights(list))

    def model_state_dict(self) -> dict[str, Any]:
        """Return weights."""
        return {"w": 0}

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Return its state."""
        return {"state": {"w": 5}, "param_groups": ["own"]}

    def load_model(self, state: Mapping[str, Any], *, partial: bool = False) -> None:
        """Note it."""
        self.restored.append(("model", dict(state), partial))

    def load_ema(self, state: Mapping[str, Any], *, partial: bool = False) -> None:
        """Note it."""
        self.restored.append(("ema", dict(state), partial))

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        """Note it."""
        self.restored.append(("optimizer", dict(state), False))

    def load_scheduler(self, state: Mapping[str, Any]) -> None:
        """Note it."""
        self.restored.append(("scheduler", state["step_size"], False))


def test_what_is_there_is_saved_and_comes_back_in_order() -> None:
    held = Held()
    state = RunState(component_parts(held), [])
    saved = state.components()
    assert list(saved) == ["model", "criterion", "ema", "optimizer", "scheduler"]
    held.criterion.weight.zero_()
    state.load_components({**saved, "criterion": {"weight": torch.full((2,), 2.0)}}, frozenset())
    assert held.criterion.weight.tolist() == [2.0, 2.0]
    assert held.restored == [
        ("model", {"w": 0}, False),
        ("ema", {"weights": {"w": 1}, "num_updates": 3}, False),
        ("optimizer", {"state": {"w": 5}, "param_groups": ["own"]}, False),
        ("scheduler", 5, False),
    ]


def test_a_component_that_is_put_there_later_is_saved_and_one_that_is_not_there_is_left_out() -> None:
    held = Held()
    state = RunState(component_parts(held), [])
    held.ema = held.optimizer = held.scheduler = None
    held.criterion = nn.MSELoss()
    assert state.names() == ["model"]
    held.optimizer = object()
    assert state.names() == ["model", "optimizer"]


def test_what_is_left_out_of_a_load_is_kept_as_it_is() -> None:
    held = Held()
    parts = RunState(component_parts(held), [])
    payload = {
        "model": {},
        "ema": {"num_updates": 9},
        "optimizer": {"state": {"w": 1}},
        "scheduler": {"last_epoch": 2},
    }
    parts.load_components(payload, {"model.w", "ema.weights.w", "optimizer.param_groups", "scheduler.step_size"})
    assert held.restored == [
        ("model", {}, True),
        ("ema", {"weights": {}, "num_updates": 9}, True),
        ("optimizer", {"state": {"w": 1}, "param_groups": ["own"]}, False),
        ("scheduler", 5, False),
    ]


class Bare(Held):
    """A base that is frozen and a head that is trained, with averages of both."""

    def __init__(self, base: float, head: float) -> None:
        super().__init__()
        self.criterion = self.optimizer = self.scheduler = None
        self.weights = {"base": torch.full((3,), base), "head": torch.full((2,), head)}
        self.ema.weights, self.ema.state_dict = self.weights, lambda: {"weights": self.weights, "num_updates": 3}
        self.config.checkpoint.trainable_only = True
        held = [(name, nn.Parameter(value, requires_grad=name == "head")) for name, value in self.weights.items()]
        self._parts.frozen = FrozenWeights(lambda: held)
        self.parts = RunState(component_parts(self), [])  # type: ignore[arg-type]

    def model_state_dict(self) -> dict[str, Tensor]:
        """Return weights."""
        return dict(self.weights)

    def loaded(self, payload: Mapping[str, Any]) -> list[dict[str, list[float]]]:
        """Return the model and the averages that are restored of a payload."""
        self.restored.clear()
        self.parts.load_components(payload, frozenset())
        found = [state["weights"] if name == "ema" else state for name, state, _ in self.restored]
        return [{name: weight.tolist() for name, weight in weights.items()} for weights in found]


def test_a_run_goes_over_to_saving_what_is_trained_alone_and_back() -> None:
    before, trained = Bare(1.0, 2.0), [{"base": [1.0] * 3, "head": [2.0] * 2}] * 2
    without = before.parts.components()
    assert list(without) == ["frozen", "model", "ema"] and list(without["model"]) == ["head"]
    before.config.checkpoint.trainable_only = False
    whole = before.parts.components()
    assert list(whole) == ["model", "ema"] and list(whole["ema"]["weights"]) == ["base", "head"]
    for leaves_out in (True, False):
        after = Bare(1.0, 7.0)
        after.config.checkpoint.trainable_only = leaves_out
        assert "frozen" not in after.parts.names()
        # A payload of the one kind after one of the other, too.
        assert all(after.loaded(payload) == trained for payload in (without, whole, without))
        after.loaded(whole)
        missing = after.loaded({"model": {"head": before.weights["head"]}})
        assert missing == [{"head": [2.0] * 2}]  # which is refused by who loads it
        with pytest.raises(CheckpointMismatch, match="frozen weights that the checkpoint was made on"):
            Bare(1.5, 7.0).loaded(without)


def test_a_frozen_weight_that_a_whole_checkpoint_has_other_values_of_is_saved_on() -> None:
    before = Bare(1.5, 2.0)
    before.config.checkpoint.trainable_only = False
    after = Bare(1.0, 7.0)
    after.loaded(before.parts.components())
    assert list(after.parts.components()["model"]) == ["base", "head"]

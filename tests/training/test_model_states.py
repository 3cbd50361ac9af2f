"""The states of a model, its averages and its optimizer, without a runner."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.toys import Small, differences, settings
from torch import nn

from danling.checkpoints import CheckpointMismatch, import_weights
from danling.checkpoints.reading import ExcludedFromLoading
from danling.training import EMA
from danling.training.model_states import ModelStates


class Trained:
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.unwrapped_model: nn.Module = self.model
        self.ema: EMA | None = EMA(self.model, decay=0.5)
        self.optimizer = None
        self.run_state = SimpleNamespace(excluded=ExcludedFromLoading(None))

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self.model.named_parameters()


def test_mismatched_names_and_shapes_are_named() -> None:
    states = ModelStates(Trained(1))
    weights = states.model_state()
    with pytest.raises(CheckpointMismatch, match=r"missing=\['0\.bias'\], unexpected=\['head'\]"):
        states.load_model(
            {**{n: v for n, v in weights.items() if n != "0.bias"}, "head": torch.ones(1)}
        )
    with pytest.raises(
        CheckpointMismatch, match=r"shapes. Received: .* To keep those of the new model, add 'model"
    ):
        states.load_model({**weights, "0.bias": torch.ones(9)})
    states.load_model({"0.bias": torch.full((4,), 7.0)}, partial=True)
    assert states.model_state()["0.bias"].tolist() == [7.0] * 4


def test_model_with_module_as_its_only_part_takes_its_plain_weights(tmp_path: Path) -> None:
    class Wrapper(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.module = Trained(seed).model

    trained, saved = Trained(1), Wrapper(2).state_dict()
    trained.unwrapped_model = model = Wrapper(3)
    states = ModelStates(trained)
    for weights in (saved, {f"module.{name}": value for name, value in saved.items()}):
        torch.save(weights, tmp_path / "weights.pth")
        model.module[0].weight.data.zero_()
        states.load_model(import_weights(tmp_path / "weights.pth"))
        assert differences(states.model_state(), dict(saved)) == []
    states.load_model(saved)
    with pytest.raises(CheckpointMismatch, match=r"unexpected=\['module.head'\]"):
        states.load_model({"head": torch.ones(1)}, partial=True)


def test_weights_that_are_lacking_are_those_that_were_left_out() -> None:
    trained = Trained(1)
    states = ModelStates(trained)
    trained.run_state.excluded = ExcludedFromLoading(["model.0", "ema.weights.0"])
    weights, averages = states.model_state(), states.averages().state_dict()
    kept = {name: value for name, value in weights.items() if not name.startswith("0.")}
    states.load_model(kept, partial=True)
    with pytest.raises(CheckpointMismatch, match=r"missing=\['2.bias'\].*add 'model.2' to"):
        states.load_model(
            {name: value for name, value in kept.items() if name != "2.bias"}, partial=True
        )
    known = {
        name: value for name, value in averages["weights"].items() if not name.startswith("0.")
    }
    states.load_ema({**averages, "weights": known}, partial=True)
    del known["2.bias"]
    with pytest.raises(CheckpointMismatch, match="2.bias"):
        states.load_ema({**averages, "weights": known}, partial=True)


class Body(Small):
    """A model of one part."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.model = nn.Sequential(OrderedDict(body=nn.Linear(4, 2)))


class Deeper(Body):
    """The same model with a head."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.model.add_module("head", nn.Linear(2, 2))


@pytest.mark.parametrize("ema", [False, True])
def test_layer_that_a_checkpoint_lacks_is_that_of_the_model(ema: bool, tmp_path: Path) -> None:
    config = settings(tmp_path / "first", steps=2, ema={"enabled": ema})
    with Body(config) as runner:
        runner.train()
        stored = {
            name: value.clone() for name, value in runner.unwrapped_model.state_dict().items()
        }
        averaged = runner.state_dict().get("ema", {"weights": stored})["weights"]
        averaged = {name: value.clone() for name, value in averaged.items()}
    source, steps = str(tmp_path / "first" / "checkpoints" / "latest.pth"), {"steps": 4}
    with pytest.raises(CheckpointMismatch, match="add 'model.head' to"):
        Deeper.from_pretrained({**config, "dir": str(tmp_path / "refused")}, source)
    with pytest.raises(ValueError, match="'model.haed', which matches nothing"):
        policy = {"exclude_from_loading": ["model.haed"]}
        Deeper.from_pretrained(
            {**config, "dir": str(tmp_path / "slip"), "checkpoint": policy}, source
        )

    def fresh() -> torch.Tensor:
        with Deeper(
            {**config, "dir": str(tmp_path / "fresh"), "checkpoint": {"load_only": True}}
        ) as runner:
            return runner.unwrapped_model.state_dict()["head.weight"].clone()

    policy = {"exclude_from_loading": ["model.head"]}
    tuned = {**config, "dir": str(tmp_path / "tuned"), "checkpoint": policy}
    with Deeper.from_pretrained(tuned, source) as runner:
        found = runner.unwrapped_model.state_dict()
        assert torch.equal(found["head.weight"], fresh())
        assert all(torch.equal(found[name], value) for name, value in averaged.items())
        runner.train()
        trained = {
            name: value.clone() for name, value in runner.unwrapped_model.state_dict().items()
        }
    # The entry may stay in the program: what the run has trained is loaded.
    with Deeper({**tuned, "auto_resume": True}) as runner:
        found = runner.unwrapped_model.state_dict()
        assert all(torch.equal(found[name], value) for name, value in trained.items())
    policy = {
        "exclude_from_loading": ["model.head", "optimizer", *(["ema.weights.head"] if ema else [])]
    }
    with Deeper(
        {**config, **steps, "dir": str(tmp_path / "on"), "resume": source, "checkpoint": policy}
    ) as runner:
        found = runner.unwrapped_model.state_dict()
        assert torch.equal(found["head.weight"], fresh()) and runner.train_state.global_step == 2
        assert all(torch.equal(found[name], value) for name, value in stored.items())
        runner.train()


def test_averages_of_left_out_weights_begin_at_the_models() -> None:
    trained = Trained(1)
    states = ModelStates(trained)
    states.load_ema({"weights": {"0.bias": torch.zeros(4)}, "num_updates": 9}, partial=True)
    averages = states.averages()
    assert averages.num_updates == 9 and averages.weights["0.bias"].tolist() == [0.0] * 4
    assert torch.equal(averages.weights["2.weight"], trained.model[2].weight)
    trained.ema = None
    with pytest.raises(CheckpointMismatch, match="ema.enabled=False"):
        states.load_ema({"weights": {}, "num_updates": 0})

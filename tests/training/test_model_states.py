"""The states of a model, its averages and its optimizer: whole, in parts of a pipeline, and of a criterion. No runner takes part."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.toys import differences
from torch import Tensor, nn

from danling.checkpoints import CheckpointMismatch, import_weights
from danling.mesh.model_states import ShardedModelStates
from danling.training import EMA
from danling.training.model_states import (
    ModelStates,
    cast_floating,
    criterion_state,
    load_criterion,
    weights_to_export,
)


class Trained:
    """A small model after one step of Adam, with averages."""

    def __init__(self, seed: int, only: str = "") -> None:
        self.pipeline_domain: Any = None
        torch.manual_seed(seed)
        whole = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        # A stage of a pipeline has some of the children, under the names of the whole.
        self.model = nn.Sequential()
        for name, child in whole.named_children():
            if not only or name in only:
                self.model.add_module(name, child)
        self.unwrapped_model: nn.Module = self.model
        self.ema: EMA | None = EMA(self.model, decay=0.5)
        decayed = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim == 1]
        self.optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=0.1)
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        self.optimizer.step()
        self.ema.update()

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self.model.named_parameters()


def copied(state: Any) -> Any:
    """Return a copy of a nested state."""
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    return [copied(value) for value in state] if isinstance(state, list) else state


def test_a_model_takes_over_the_state_of_another() -> None:
    first, second = Trained(1), Trained(2)
    states, others = ModelStates(first), ModelStates(second)
    assert differences(states.model_state(), others.model_state())
    others.load_model(states.model_state())
    others.load_ema(states.averages().state_dict())
    others.load_optimizer(states.optimizer_state())
    assert differences(others.model_state(), states.model_state()) == []
    assert differences(others.averages().state_dict(), states.averages().state_dict()) == []
    assert differences(others.optimizer_state(), states.optimizer_state()) == []
    assert states.template() is None


def test_names_and_shapes_that_do_not_fit_are_named() -> None:
    states = ModelStates(Trained(1))
    weights = states.model_state()
    with pytest.raises(CheckpointMismatch, match=r"missing=\['0\.bias'\], unexpected=\['head'\]"):
        states.load_model({**{n: v for n, v in weights.items() if n != "0.bias"}, "head": torch.ones(1)})
    with pytest.raises(CheckpointMismatch, match=r"shapes. Received: .* To keep those of the new model, add 'model"):
        states.load_model({**weights, "0.bias": torch.ones(9)})
    states.load_model({"0.bias": torch.full((4,), 7.0)}, partial=True)
    assert states.model_state()["0.bias"].tolist() == [7.0] * 4


def test_a_model_whose_only_part_is_called_module_takes_plain_weights_of_itself(tmp_path: Path) -> None:
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


def test_averages_of_weights_that_were_left_out_begin_at_the_models() -> None:
    trained = Trained(1)
    states = ModelStates(trained)
    states.load_ema({"weights": {"0.bias": torch.zeros(4)}, "num_updates": 9}, partial=True)
    averages = states.averages()
    assert averages.num_updates == 9 and averages.weights["0.bias"].tolist() == [0.0] * 4
    assert torch.equal(averages.weights["2.weight"], trained.model[2].weight)
    trained.ema = None
    with pytest.raises(CheckpointMismatch, match="ema.enabled=False"):
        states.load_ema({"weights": {}, "num_updates": 0})


def test_stages_of_a_pipeline_have_the_states_of_the_whole() -> None:
    """Two stages read what a whole model saved, and together save what it is."""
    whole = Trained(1)
    saved = ModelStates(whole)
    payload = copied(
        {"model": saved.model_state(), "ema": saved.averages().state_dict(), "optimizer": saved.optimizer_state()}
    )
    stages = [Trained(2, only="01"), Trained(3, only="2")]
    # What a gather answers each of them with: the names of tensors, or of the parameters in each group.
    names = [set(stage.model.state_dict()) for stage in stages]
    groups = [
        [list(group["params"]) for group in ModelStates(stage).optimizer_state()["param_groups"]] for stage in stages
    ]

    def gather(value: Any) -> list[Any]:
        answer: list[Any] = names if isinstance(value, set) else groups
        return answer

    for stage in stages:
        stage.pipeline_domain = SimpleNamespace(gather_objects=gather)
    states = [ShardedModelStates(stage) for stage in stages]
    found: dict[str, Any] = {"model": {}, "ema": {}, "optimizer": {}}
    for state in states:
        state.load_model(payload["model"])
        state.load_ema(payload["ema"])
        state.load_optimizer(payload["optimizer"])
        found["model"].update(state.model_state())
        found["ema"].update(state.averages().weights)
        found["optimizer"].update(state.optimizer_state()["state"])
        mine = state.optimizer_state()["param_groups"]
        theirs = payload["optimizer"]["param_groups"]
        assert [sorted(group["params"]) for group in mine] == [sorted(group["params"]) for group in theirs]
        template = state.template()
        assert template["model"].keys() == state.model_state().keys() and set(template) == {"model", "ema", "optimizer"}
    assert differences(found["model"], payload["model"]) == []
    assert differences(found["ema"], payload["ema"]["weights"]) == []
    assert differences(found["optimizer"], payload["optimizer"]["state"]) == []
    with pytest.raises(CheckpointMismatch, match="unexpected"):
        states[0].load_model({**payload["model"], "nobody's": torch.ones(1)})
    regrouped = {**payload["optimizer"], "param_groups": payload["optimizer"]["param_groups"][:1]}
    with pytest.raises(CheckpointMismatch, match="grouped as here"):
        states[1].load_optimizer(regrouped)


def test_the_state_of_a_criterion() -> None:
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]))
    assert criterion_state(nn.functional.mse_loss) == criterion_state(nn.MSELoss()) == {}
    other = nn.CrossEntropyLoss(weight=torch.zeros(2))
    load_criterion(other, criterion_state(weighted))
    assert other.weight is not None and other.weight.tolist() == [1.0, 2.0]
    with pytest.raises(CheckpointMismatch, match="this criterion"):
        load_criterion(nn.CrossEntropyLoss(weight=torch.zeros(3)), criterion_state(weighted))


def test_an_export_casts_what_floats() -> None:
    weights = {"w": torch.ones(2), "count": torch.tensor(3)}
    assert cast_floating(weights, None)["w"] is weights["w"]
    ema = EMA(nn.Linear(2, 2), decay=0.9)
    payload = weights_to_export({"seed": 1}, weights, ema, dtype="bfloat16", version=1)
    assert payload["model"]["w"].dtype is torch.bfloat16 and payload["model"]["count"].dtype is torch.int64
    assert payload["ema"]["weights"]["weight"].dtype is torch.bfloat16 and payload["ema"]["num_updates"] == 0
    assert (payload["format_version"], payload["runner"]) == (1, {"seed": 1})
    assert "ema" not in weights_to_export({}, weights, None, dtype=None, version=1)
    with pytest.raises(ValueError, match="export_dtype"):
        cast_floating(weights, "int3")

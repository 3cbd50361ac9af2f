"""Models from the meta device: what their initialisation does not write is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from support.toys import whole_settings
from torch import Tensor, nn
from torch import distributed as dist

import danling as dl
from danling.utils.tensors import whole


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.empty(1))  # one rank of two has nothing of it
        self.register_buffer("table", torch.empty(5))
        self.register_buffer("order", torch.empty(5, dtype=torch.int64), persistent=False)
        self.register_buffer("mask", torch.empty(5, dtype=torch.bool))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs) * self.scale + self.table.sum()

    def init_weights(self) -> None:
        self.layer.weight.data.normal_()
        self.layer.bias.data.zero_()
        self.scale.data.fill_(1.0)
        self.table.copy_(torch.arange(5.0))
        self.order.copy_(torch.arange(90, 95))  # one of them is what memory was filled with
        self.mask.fill_(True)


class LeavesBuffer(Model):
    def init_weights(self) -> None:
        table = self.table.clone()
        super().init_weights()
        self.table.copy_(table)


class LeavesElement(Model):
    def init_weights(self) -> None:
        last = self.order[-1].clone()
        super().init_weights()
        self.order[-1] = last


class LeavesMask(Model):
    def init_weights(self) -> None:
        mask = self.mask.clone()
        super().init_weights()
        self.mask.copy_(mask)


class LeavesScale(Model):
    def init_weights(self) -> None:
        scale = self.scale.detach().clone()
        super().init_weights()
        self.scale.data.copy_(scale)


class OnFirstRank(Model):
    def init_weights(self) -> None:
        if not dist.is_initialized() or dist.get_rank() == 0:
            super().init_weights()


class OnSecondRank(Model):
    def init_weights(self) -> None:
        if dist.is_initialized() and dist.get_rank() == 1:
            super().init_weights()


class MetaRunner(dl.Runner):
    def __init__(self, config: Mapping[str, Any], model: Callable[[], nn.Module]) -> None:
        super().__init__(config)
        with torch.device("meta"):
            self.model = model()


def config(root: Path | str, axes: Mapping[str, int] | None = None, **more: Any) -> dict[str, Any]:
    base = {
        "stack": "parallel",
        "parallel": {"axes": dict(axes or {})},
        "log": False,
        "steps": 1,
        "ema": {},
    }
    return whole_settings(root, **{**base, **more})


def made(settings: Mapping[str, Any], model: Callable[[], nn.Module]) -> dict[str, Tensor] | str:
    """Return the tensors of the model, or why it is refused."""
    try:
        with MetaRunner(settings, model) as runner:
            named = (*runner.named_parameters(), *runner.model.named_buffers())
            return {name: whole(value).detach().clone() for name, value in named}
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    "axes", [None, {"replicate": 2}, {"shard": 2}], ids=["one process", "replicate", "shard"]
)
def test_weight_left_uninitialised_is_refused_by_name(
    axes: Mapping[str, int] | None, tmp_path: Path
) -> None:
    for model, name in (
        (LeavesBuffer, "table"),
        (LeavesElement, "order"),
        (LeavesMask, "mask"),
        (LeavesScale, "scale"),
    ):
        for message in run_processes(
            made, config(tmp_path, axes), model, world_size=2 if axes else 1
        ):
            assert isinstance(message, str) and f"Received: {name} with" in message


def test_value_equal_to_the_filling_by_chance_is_accepted(tmp_path: Path) -> None:
    found = made(config(tmp_path), Model)
    assert (
        isinstance(found, dict)
        and found["order"].tolist() == [90, 91, 92, 93, 94]
        and found["mask"].all()
    )
    assert found["layer.weight"].isfinite().all()


def test_copies_must_be_initialised_on_their_source_rank(tmp_path: Path) -> None:
    first, second = run_processes(made, config(tmp_path, {"replicate": 2}), OnFirstRank)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    for message in run_processes(made, config(tmp_path, {"replicate": 2}), OnSecondRank):
        assert isinstance(message, str) and "(6 in all) with unwritten" in message


def test_loaded_weights_need_no_initialisation(tmp_path: Path) -> None:
    weights = tmp_path / "weights.pt"
    torch.save(
        {name: torch.full_like(value, 2.0) for name, value in Model().state_dict().items()}, weights
    )

    class LeavesWeights(Model):
        def init_weights(self) -> None:
            self.order.zero_()

    found = made(config(tmp_path, pretrained=str(weights)), LeavesWeights)
    assert (
        isinstance(found, dict)
        and (found["layer.weight"] == 2.0).all()
        and (found["order"] == 0).all()
    )

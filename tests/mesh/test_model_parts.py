"""Parts of a model, one after the other, are the model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from danling.mesh.model_parts import choose_parts, take_part


class Chain(nn.Module):
    """Goes through its layers in a loop, and by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.heads = nn.ModuleDict({"norm": nn.LayerNorm(4), "out": nn.Linear(4, 2)})

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.heads["out"](self.heads["norm"](x))
        return found


@pytest.mark.parametrize(
    "parts",
    [
        [["first", "layers.0", "layers.1", "layers.2"], ["heads"]],
        [["first"], ["layers"], ["heads.norm", "heads.out"]],
        [
            ["first.0"],
            ["first.1", "layers.0"],
            ["layers.1", "layers.2", "heads.norm"],
            ["heads.out"],
        ],
    ],
    ids=str,
)
def test_stages_without_a_part_of_a_container(parts: list[list[str]]) -> None:
    model = Chain()
    assert choose_parts(model, len(parts), parts) == parts
    x = torch.randn(2, 3)
    expected, names = model(x), {name for name, _ in model.named_parameters()}
    for part in parts:
        stage = take_part(copy.deepcopy(model), part)
        held = {name for name, _ in stage.named_parameters()}
        assert held <= names
        names -= held
        x = stage(x)
    assert not names
    torch.testing.assert_close(x, expected, rtol=0, atol=0)


def test_a_module_with_two_names_is_in_both_places_or_refused() -> None:
    act = nn.Tanh()
    model, x = nn.Sequential(nn.Linear(3, 3), act, nn.Linear(3, 3), act), torch.randn(2, 3)
    stage = x
    for part in choose_parts(model, 2):
        stage = take_part(copy.deepcopy(model), part)(stage)
    assert torch.equal(stage, model(x))
    nested = nn.Sequential(nn.Sequential(nn.Linear(3, 3), act), nn.Sequential(nn.Linear(3, 3), act))
    with pytest.raises(ValueError, match="1.1 in none"):
        choose_parts(nested, 2, [["0"], ["1.0"]])
    tied = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Tanh()))
    tied[1].register_parameter("extra", tied[0].weight)
    with pytest.raises(ValueError, match="1.extra in none"):
        choose_parts(tied, 2, [["0"], ["1.0"]])

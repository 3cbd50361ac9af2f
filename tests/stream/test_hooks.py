"""Hidden states by forward hooks, compared with those that a model of transformers returns itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from danling.stream.hooks import capture_hidden_states


def hooks_of(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


def test_layers_give_the_hidden_states_of_a_model_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
    }
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=32, **sizes, num_key_value_heads=2)
    ).eval()
    tokens = torch.randint(0, 32, (2, 5))
    with torch.no_grad():
        expected = model(
            tokens, output_hidden_states=True
        ).hidden_states  # by hooks of its own, which stay
    before = hooks_of(model)
    with torch.no_grad(), capture_hidden_states(model, [0, 2, -1]) as states:
        assert states == {}
        model(tokens)
    assert torch.equal(states[0], expected[1])
    assert torch.equal(states[2], expected[3])
    # The last one is taken before the final norm.
    assert not torch.equal(states[-1], expected[4])
    assert torch.equal(model.model.norm(states[-1]), expected[4])
    assert hooks_of(model) == before


def test_hooks_are_removed_after_an_error_and_modules_may_be_named() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    with pytest.raises(RuntimeError, match="shapes"), capture_hidden_states(model, ["0", "1"]):
        model(torch.zeros(1, 5))
    assert hooks_of(model) == 0
    with capture_hidden_states(model, ["1"]) as states:
        output = model(torch.zeros(1, 2))
    assert states["1"] is output


def test_missing_layer_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 3))
    with pytest.raises(ValueError, match="module of Sequential. Received: 'layers.0'"):
        capture_hidden_states(model, ["0", "layers.0"]).__enter__()
    assert hooks_of(model) == 0
    with pytest.raises(ValueError, match="layers under one of"):
        capture_hidden_states(model, [0]).__enter__()
    held = nn.Module()
    held.layers = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    with pytest.raises(ValueError, match="from -2 to 1. Received: 2"):
        capture_hidden_states(held, [2]).__enter__()

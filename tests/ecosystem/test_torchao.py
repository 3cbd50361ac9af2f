"""torchao: optimizers with a state in 8 and 4 bits, and models with weights in 8 bits, are saved in the background and resumed bitwise.

Library: torchao
Works: `AdamW8bit`, `AdamW4bit`, in files and sharded checkpoints, which hold plain tensors; frozen 8-bit weights, in files
Exact: resume
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.toys import in_parts, settings
from torch import nn
from torch.utils.data import TensorDataset

import danling as dl
from danling.optim.state import from_inner_tensors, to_inner_tensors

pytest.importorskip("torchao")

from torchao.optim import AdamW4bit, AdamW8bit
from torchao.optim.subclass_8bit import OptimState8bit
from torchao.quantization import Int8WeightOnlyConfig, quantize_


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """Its step is compiled, which takes a minute here and changes nothing of what is shown."""
    with torch.compiler.set_stance("force_eager"):
        yield


class Quantized(dl.Runner):
    def __init__(self, config: dict[str, Any], kind: Any) -> None:
        super().__init__(config)
        torch.manual_seed(0)
        self.model, self.criterion = (
            nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)),
            nn.MSELoss(),
        )
        self.optimizer = kind(self.model.parameters(), lr=1e-2)
        inputs = torch.randn(24, 64)
        self.datasets = {"train": TensorDataset(inputs, inputs.sum(1, keepdim=True))}


SCHEDULED: dict[str, Any] = {"optim": {}, "scheduler": {"type": "cosine", "total_steps": 9}}


@pytest.mark.parametrize("backend", ["file", pytest.param("dcp", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [AdamW8bit, AdamW4bit])
def test_a_resumed_run_ends_bitwise(kind: Any, backend: str, tmp_path: Path) -> None:
    policy = {"backend": backend, "interval": 1}
    whole, runner = in_parts(
        partial(Quantized, kind=kind), tmp_path, (4, 9), **SCHEDULED, checkpoint=policy
    )
    assert all(
        map(torch.equal, runner.unwrapped_model.parameters(), whole.unwrapped_model.parameters())
    )
    moment, expected = (
        r.optimizer.state[r.unwrapped_model[0].weight]["exp_avg"] for r in (runner, whole)
    )
    assert type(moment) is type(expected) is not torch.Tensor
    assert torch.equal(moment.codes, expected.codes) and torch.equal(moment.scale, expected.scale)
    assert runner.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]


def test_a_tensor_is_taken_apart_and_put_together() -> None:
    tensor = OptimState8bit.zeros((8, 64))
    tensor.copy_(torch.randn(8, 64))
    again: Any = from_inner_tensors(to_inner_tensors(tensor))
    assert torch.equal(again.dequantize(), tensor.dequantize()) and again.codes is not tensor.codes
    parts: Any = to_inner_tensors(tensor)
    for name in (
        "torchao.optim.subclass_8bit:Tensor.add",
        "os:system",
        "not.loaded:OptimState8bit",
    ):
        with pytest.raises(
            ValueError, match=r"Expected the optimizer that the checkpoint was saved with"
        ):
            from_inner_tensors({**parts, "tensor_class": name})


class QuantizedBase(dl.Runner):
    """Two layers in 8 bits that stay as they are, of the same shape, and one that trains on them."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        torch.manual_seed(0)
        base = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).requires_grad_(False)
        quantize_(base, Int8WeightOnlyConfig())
        self.model, self.criterion = nn.Sequential(base, nn.Tanh(), nn.Linear(64, 1)), nn.MSELoss()
        self.optimizer = torch.optim.AdamW(self.model[2].parameters(), lr=1e-2)
        inputs = torch.randn(24, 64)
        self.datasets = {"train": TensorDataset(inputs, inputs.sum(1, keepdim=True))}


def plain(runner: Any) -> dict[str, torch.Tensor]:
    state = runner.unwrapped_model.state_dict()
    return {
        name: (w.dequantize() if "torchao" in type(w).__module__ else w).clone()
        for name, w in state.items()
    }


@pytest.mark.parametrize(
    "mode", ["disabled", "async", pytest.param("async_with_pinned_mem", marks=pytest.mark.slow)]
)
def test_weights_in_8_bits_are_saved_and_come_back(mode: str, tmp_path: Path) -> None:
    policy = {"interval": 1, "async_mode": mode}
    whole, runner = in_parts(QuantizedBase, tmp_path, (3, 6), **SCHEDULED, checkpoint=policy)
    ended, expected = plain(runner), plain(whole)
    assert not torch.equal(expected["0.0.weight"], expected["0.2.weight"])
    assert all(torch.equal(ended[name], expected[name]) for name in expected)
    stored = torch.load(tmp_path / "parts" / "checkpoints" / "latest.pth", weights_only=True)[
        "model"
    ]
    for name in ("0.0.weight", "0.2.weight"):
        assert torch.equal(stored[name].dequantize(), expected[name])


def test_weights_in_8_bits_in_a_sharded_checkpoint_are_refused_before_anything_is_trained(
    tmp_path: Path,
) -> None:
    with QuantizedBase(
        settings(tmp_path, **SCHEDULED, steps=3, checkpoint={"backend": "dcp"})
    ) as runner:
        with pytest.raises(
            ValueError, match=r"0.0.weight, of the class Int8Tensor. Set checkpoint.backend='file'"
        ):
            runner.train()
        assert runner.state.train.global_step == 0

"""What is kept for the backward: gradients stay right under dropout, whatever the policy."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from danling.config.checks import read_memory_policy
from danling.distributed import Domain
from danling.graph.compilation import GraphCompilation, WholeLoss, check_backend, policy_tag
from danling.training.window import Window

POLICIES = ["default", "budget:0.9", "budget:0.5", "budget:0.1", "budget:0.01", "recompute"]


class Block(nn.Module):
    """A layer of a network whose activations are larger than its input."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow, self.dropout = nn.Linear(8, 32), nn.Linear(32, 8), nn.Dropout(0.3)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = inputs + self.dropout(
            self.narrow(nn.functional.gelu(self.dropout(self.wide(inputs))))
        )
        return output


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3))).double()


def compiled(
    model: nn.Sequential, policy: str, backend: str | None = "aot_eager_decomp_partition"
) -> WholeLoss:
    compilation = GraphCompilation({"backend": backend, "memory_policy": policy}, model)
    window = Window(Domain(), torch.device("cpu"))
    window.begin_microbatch(1.0, 1.0)
    return WholeLoss(
        model, lambda: lambda pred, target: (pred - target).square().mean(), compilation, window
    )


def saved_bytes(model: nn.Module, function: Any, *args: Any) -> tuple[Tensor, int]:
    """Return the loss of a forward and the bytes that it keeps for the backward, parameters left out."""
    kept: dict[int, int] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _, loss = function(*args)
    return loss, sum(kept.values())


def error_of_gradient(model: nn.Module, function: Any, inputs: Tensor, target: Tensor) -> float:
    """Return how far the gradient is from a central difference along a direction, relative to it."""
    generator = torch.Generator().manual_seed(1)
    parameters = list(model.parameters())
    direction = [torch.randn(p.shape, dtype=p.dtype, generator=generator) for p in parameters]

    def loss() -> Tensor:
        torch.manual_seed(5)
        found: Tensor = function(inputs, target)[1]
        return found

    model.zero_grad()
    loss().backward()
    slope = sum(
        float((p.grad * d).sum()) for p, d in zip(parameters, direction) if p.grad is not None
    )
    ends, step = [], 1e-5
    for sign in (1.0, -1.0):
        with torch.no_grad():
            for parameter, along in zip(parameters, direction):
                parameter += sign * step * along
        ends.append(loss().item())
        with torch.no_grad():
            for parameter, along in zip(parameters, direction):
                parameter -= sign * step * along
    difference = (ends[0] - ends[1]) / (2 * step)
    return abs(slope - difference) / abs(difference)


# Each kind, a budget that keeps a half and one that keeps next to nothing.
_QUICK = {"default", "budget:0.5", "budget:0.01", "recompute"}


@pytest.mark.parametrize(
    "policy", [p if p in _QUICK else pytest.param(p, marks=pytest.mark.slow) for p in POLICIES]
)
def test_the_gradient_under_dropout_is_right(policy: str) -> None:
    model = build()
    inputs, target = torch.randn(4, 8).double(), torch.randn(4, 8).double()
    assert error_of_gradient(model, compiled(model, policy), inputs, target) < 1e-6


def test_less_is_kept_the_smaller_the_budget() -> None:
    found = []
    for policy in ("default", "budget:0.5", "budget:0.1"):
        model = build()
        _, kept = saved_bytes(
            model, compiled(model, policy), torch.randn(4, 8).double(), torch.zeros(4, 8).double()
        )
        found.append(kept)
    assert found[0] > found[1] > found[2]


def test_layers_are_recomputed_and_the_model_stays_as_it_is() -> None:
    model = build()
    before, keys = copy.deepcopy(model), list(model.state_dict())
    recomputed, plain = (
        compiled(model, "recompute", "aot_eager"),
        compiled(before, "default", "aot_eager"),
    )
    # Large enough that the states of the generator, which are kept for dropout, are small beside the activations.
    inputs, target = torch.randn(128, 8).double(), torch.randn(128, 8).double()
    found = []
    for function, root in ((recomputed, model), (plain, before)):
        torch.manual_seed(3)
        loss, kept = saved_bytes(root, function, inputs, target)
        loss.backward()
        found.append((loss.detach(), kept, [p.grad for p in root.parameters()]))
    assert torch.equal(found[0][0], found[1][0])
    assert all(
        torch.equal(a, b)
        for a, b in zip(found[0][2], found[1][2])
        if a is not None and b is not None
    )
    assert found[0][1] < found[1][1]
    assert list(model.state_dict()) == keys
    assert all("forward" not in vars(module) for module in model.modules())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(twin(inputs), inputs) and not torch.equal(model(inputs), inputs)


def test_the_settings_of_the_process_are_put_back() -> None:
    import torch._functorch.config as functorch

    model = build()
    function = compiled(model, "budget:0.5")
    for _ in range(2):
        function(torch.randn(4, 8).double(), torch.zeros(4, 8).double())[1].backward()
        assert functorch.activation_memory_budget == 1.0 and functorch.joint_custom_pass is None
        assert torch.compiler.config.cache_key_tag == ""


def test_the_tag_tells_policies_and_versions_of_the_pass_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tags = {policy_tag(policy) for policy in (*POLICIES, None)}
    assert len(tags) == len(POLICIES)
    monkeypatch.setattr("danling.graph.compilation.PASS_VERSION", 2)
    assert policy_tag("budget:0.5") not in tags


@pytest.mark.parametrize(
    "policy",
    [
        "budget:0",
        "budget:0.0",
        "budget:1",
        "budget:-1",
        "budget:nan",
        "budget:",
        "budget",
        "offload",
        "full",
    ],
)
def test_other_policies_are_refused(policy: str) -> None:
    with pytest.raises(ValueError, match=r"Expected compile\.memory_policy"):
        read_memory_policy(policy)


@pytest.mark.parametrize(
    ("policy", "backend", "followed"),
    [
        ("default", "eager", True),
        ("budget:0.5", None, True),
        ("budget:0.5", "inductor", True),
        ("budget:0.5", "aot_eager", False),
        ("recompute", "aot_eager", True),
        ("recompute", "eager", False),
    ],
)
def test_backend_without_the_policy_is_refused(
    policy: str, backend: str | None, followed: bool
) -> None:
    if followed:
        check_backend(policy, backend)
    else:
        with pytest.raises(ValueError, match=r"compile\.backend"):
            check_backend(policy, backend)

"""Compilation in place: what becomes a graph, and what a module is like during and after it."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from danling.graph.compilation import Compilation


class Backend:
    """Counts the graphs that it is handed, and runs them as they are."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, examples: Any) -> Any:
        self.graphs += 1
        return graph


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))

    def forward(self, inputs: Tensor, *, scale: float = 1.0) -> Tensor:
        output: Tensor = self.inner(inputs)
        return output * scale


def encoder() -> nn.Module:
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2, enable_nested_tensor=False
    )


MODULES = {
    "linear": lambda: nn.Linear(4, 3),
    "sequential": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
    "own": Own,
}


@pytest.mark.parametrize("kind", [*MODULES, "encoder"])
def test_one_graph_computes_the_same_as_the_module(kind: str) -> None:
    backend = Backend()
    module = {**MODULES, "encoder": encoder}[kind]()
    eager, inputs = copy.deepcopy(module), torch.randn(2, 3, 4)
    compilation = Compilation({"backend": backend, "fullgraph": True})
    compilation.compile(module)
    torch.manual_seed(0)
    expected = eager(inputs)
    expected.square().sum().backward()
    for _ in range(2):
        module.zero_grad()
        torch.manual_seed(0)
        found = module(inputs)
        found.square().sum().backward()
    assert torch.equal(found, expected) and backend.graphs == compilation.graphs == 1
    for first, second in zip(module.parameters(), eager.parameters()):
        assert first.grad is not None and torch.equal(first.grad, second.grad)
    assert list(module.state_dict()) == list(eager.state_dict())


def test_copies_and_pickles_are_modules_of_their_own() -> None:
    backend, module, inputs = Backend(), nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)
    compilation = Compilation({"backend": backend})
    compilation.compile(module)
    module(inputs)
    file = io.BytesIO(pickle.dumps(module))
    for twin in (copy.deepcopy(module), pickle.load(file)):
        with torch.no_grad():
            twin[0].weight.zero_()
            twin[0].bias.zero_()
        assert not twin(inputs).any() and module(inputs).any()
    assert backend.graphs == 1
    compilation.close()
    compilation.close()
    module(torch.randn(3, 4))  # another size, which would be compiled anew
    assert backend.graphs == 1 and "forward" not in vars(module)


def test_hooks_of_the_module_itself_run_whenever_they_are_registered() -> None:
    module, inputs, seen = (
        nn.Sequential(nn.Linear(4, 4)),
        torch.randn(2, 4, requires_grad=True),
        list[str](),
    )
    Compilation({"backend": Backend(), "fullgraph": True}).compile(module)
    module(inputs)
    module.register_forward_pre_hook(lambda *_: seen.append("before"))
    module.register_forward_hook(lambda *_: seen.append("after"))
    module.register_full_backward_hook(lambda *_: seen.append("backward"))
    module(inputs).sum().backward()
    assert seen == ["before", "after", "backward"]


def test_modules_of_one_class_share_their_graph_and_two_compilations_share_none() -> None:
    counted = []
    for dynamic in (False, True):
        backend = Backend()
        compilation = Compilation({"backend": backend, "dynamic": dynamic})
        blocks = [nn.Linear(4, 4) for _ in range(5)]
        for block in blocks:
            compilation.compile(block)
        for size in (8, 5, 3):
            inputs = torch.randn(size, 4, requires_grad=True)
            for block in blocks:
                inputs = block(inputs)
        counted.append(backend.graphs)
    assert counted == [3, 1]


def test_a_setting_of_the_process_is_changed_for_the_call_only() -> None:
    seen = []

    def backend(graph: Any, examples: Any) -> Any:
        seen.append(torch._dynamo.config.optimize_ddp)
        return graph

    before = torch._dynamo.config.optimize_ddp
    module = nn.Linear(4, 4)
    Compilation({"backend": backend, "optimize_ddp": "no_optimization"}, distributed=True).compile(
        module
    )
    module(torch.randn(2, 4))
    assert seen == ["no_optimization"] and torch._dynamo.config.optimize_ddp == before


def test_no_graph_is_said(caplog: pytest.LogCaptureFixture) -> None:
    module = Own()
    compilation = Compilation({"backend": Backend()})
    compilation.compile(module)
    module.inner(torch.randn(2, 4))
    compilation.after_first_update(is_main=True)
    (record,) = caplog.records
    assert "no graph" in record.getMessage() and "Own" in record.getMessage()
    module(torch.randn(2, 4))
    assert compilation.graphs == 1


def test_a_function_is_compiled_for_each_compilation_anew() -> None:
    counted = []
    for dynamic in (False, True):
        backend = Backend()
        compiled = Compilation({"backend": backend, "dynamic": dynamic}).function(_double)
        for size in (8, 5, 3):
            assert torch.equal(compiled(torch.ones(size)), torch.full((size,), 2.0))
        counted.append(backend.graphs)
    assert counted == [3, 1]


def _double(inputs: Tensor) -> Tensor:
    return inputs * 2

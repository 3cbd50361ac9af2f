"""A model and its loss as one compiled function, and what it says where they cannot be one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from danling.distributed import Domain
from danling.graph.compilation import GraphCompilation, WholeLoss
from danling.training.window import Window


def compilation(**section: Any) -> GraphCompilation:
    return GraphCompilation({"backend": "eager", **section}, [])


def window(weight: float = 1.0) -> Window:
    """Return a window with one micro-batch."""
    made = Window(Domain(), torch.device("cpu"))
    made.begin_microbatch(weight, 1.0)
    return made


def squares(pred: Tensor, target: Tensor) -> Tensor:
    return (pred - target).square().mean()


class Named(nn.Module):
    """A model that is called with keywords, and says so in what it returns."""

    def forward(self, first: Tensor, second: Tensor) -> dict[str, Tensor]:
        return {"logits": first + second}


def test_a_mapping_is_passed_as_keywords_and_the_loss_is_one_graph_with_it() -> None:
    made = compilation()
    function = WholeLoss(
        Named(), lambda: lambda pred, target: squares(pred["logits"], target), made, window()
    )
    pred, loss = function({"first": torch.ones(3), "second": torch.ones(3)}, torch.zeros(3))
    assert torch.equal(pred["logits"], torch.full((3,), 2.0)) and loss.item() == 4.0
    assert made.graphs == made.calls == 1


def test_the_loss_may_be_found_outside() -> None:
    function = WholeLoss(nn.Linear(2, 2), lambda: None, compilation(), window())
    pred, loss = function(torch.ones(1, 2), None)
    assert pred.requires_grad and loss is None


def test_the_loss_is_looked_up_for_every_batch() -> None:
    losses = [squares, lambda pred, target: pred.sum() * 0 + 7]
    function = WholeLoss(nn.Linear(2, 2), lambda: losses.pop(), compilation(), window())
    found = [function(torch.ones(1, 2), torch.zeros(1, 2))[1].item() for _ in range(2)]
    assert found[0] == 7 and found[1] != 7


@pytest.mark.parametrize(("dynamic", "graphs"), [(None, 4), (False, 4), (True, 2)])
def test_each_size_has_a_graph_unless_one_is_asked_for_all(
    dynamic: bool | None, graphs: int
) -> None:
    made = compilation(dynamic=dynamic)
    function = WholeLoss(nn.Linear(2, 2), lambda: squares, made, window())
    for size in (32, 17, 5, 1, 32, 5):
        function(torch.ones(size, 2), torch.zeros(size, 2))
    assert made.graphs == graphs


def test_too_many_sizes_are_an_error_with_the_mend() -> None:
    function = WholeLoss(nn.Linear(2, 2), lambda: squares, compilation(), window())
    with pytest.raises(RuntimeError, match=r"compile\.dynamic=true"):
        for size in range(2, 20):
            function(torch.ones(size, 2), torch.zeros(size, 2))


class Asking(nn.Module):
    """Asks for a value, which no graph can."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs if inputs.sum().item() > 0 else -inputs


@contextmanager
def fails_on(*, whole: bool | None) -> Iterator[None]:
    if whole is False:
        yield
    else:
        with pytest.raises(RuntimeError, match=r"compile\.fullgraph=false"):
            yield


@pytest.mark.parametrize("whole", [None, True, False])
def test_graph_break_is_an_error_unless_parts_are_requested(whole: bool | None) -> None:
    function = WholeLoss(Asking(), lambda: squares, compilation(fullgraph=whole), window())
    with fails_on(whole=whole):
        assert function(-torch.ones(2), torch.ones(2))[1].item() == 0


def test_update_without_a_call_of_the_function_is_an_error() -> None:
    made = compilation()
    with pytest.raises(ValueError, match=r"super\(\)\.train_step"):
        made.after_first_update(is_main=True)
    WholeLoss(nn.Linear(2, 2), lambda: squares, made, window())(torch.ones(1, 2), torch.zeros(1, 2))
    made.after_first_update(is_main=True)


def test_weightless_first_update_on_this_rank_has_called_the_function() -> None:
    made = compilation()
    model = nn.Linear(2, 2)
    function = WholeLoss(
        model, lambda: lambda pred, target: squares(pred, target) / 0, made, window(0.0)
    )
    function(torch.ones(1, 2), torch.zeros(1, 2))[1].backward()
    assert model.weight.grad is not None and not model.weight.grad.any() and made.graphs == 0
    made.after_first_update(is_main=True)

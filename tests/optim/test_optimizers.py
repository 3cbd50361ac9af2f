from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from danling.optim import OPTIMIZERS

_CLASSES = {
    name: cls
    for name, cls in inspect.getmembers(torch.optim, inspect.isclass)
    if issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
}


def _descend(optimizer: Any, weight: nn.Parameter, embedding: nn.Embedding | None = None) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight if embedding is None else embedding(torch.tensor([0, 1]))).square().sum()
        loss.backward()
        return loss

    for _ in range(5):
        optimizer.step(closure)


@pytest.mark.parametrize("name", _CLASSES)
def test_every_optimizer_of_torch_is_built_by_its_lower_case_name_and_descends(name: str) -> None:
    embedding = nn.Embedding(2, 3, sparse=name == "SparseAdam")
    before = embedding.weight.detach().square().sum()
    optimizer = OPTIMIZERS.build(params=embedding.parameters(), type=name.lower(), lr=0.01)
    assert type(optimizer) is _CLASSES[name]
    _descend(optimizer, embedding.weight, embedding)
    assert embedding.weight.detach().square().sum() < before


@pytest.mark.parametrize("name", ["adam", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_adam_is_fused_and_differs_by_rounding_only(name: str, dtype: torch.dtype) -> None:
    fused, looped = (nn.Parameter(torch.linspace(-1, 1, 37, dtype=dtype)) for _ in range(2))
    first = OPTIMIZERS.build(params=[fused], type=name, lr=0.01, weight_decay=0.1)
    second = OPTIMIZERS.build(params=[looped], type=name, lr=0.01, weight_decay=0.1, foreach=False)
    assert first.defaults["fused"] and not second.defaults["fused"]
    _descend(first, fused)
    _descend(second, looped)
    # In half precision the fused form computes in float32 and rounds once an update.
    torch.testing.assert_close(fused, looped, **({"atol": 4e-3, "rtol": 0.0} if dtype == torch.bfloat16 else {}))


@pytest.mark.parametrize("options", [{"fused": False}, {"foreach": True}, {"differentiable": True}])
def test_the_users_choice_of_implementation_stands(options: dict[str, Any]) -> None:
    optimizer = OPTIMIZERS.build(params=[nn.Parameter(torch.ones(2))], type="adamw", **options)
    assert not optimizer.defaults["fused"]
    grouped = OPTIMIZERS.build(params=[{"params": [nn.Parameter(torch.ones(2))], **options}], type="adamw")
    assert not grouped.defaults["fused"]


def test_complex_parameters_are_not_fused() -> None:
    optimizer = OPTIMIZERS.build(params=[nn.Parameter(torch.ones(2, dtype=torch.complex64))], type="adam")
    assert not optimizer.defaults["fused"]


@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_sparse_gradients_still_work(name: str) -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    before = embedding.weight.detach().clone()
    _descend(OPTIMIZERS.build(params=embedding.parameters(), type=name, lr=0.1), embedding.weight, embedding)
    after = embedding.weight.detach()
    assert after[:2].square().sum() < before[:2].square().sum()
    assert torch.equal(after[2:], before[2:]), "rows without a gradient stay"


def test_lists_from_a_file_become_tuples() -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    assert OPTIMIZERS.build(params=[parameter], type="adamw", betas=[0.8, 0.9]).defaults["betas"] == (0.8, 0.9)
    group = OPTIMIZERS.build(params=[{"params": [parameter], "betas": [0.8, 0.9]}], type="adamw").param_groups[0]
    assert group["betas"] == (0.8, 0.9)
    assert OPTIMIZERS.build(params=[parameter], type="rprop", etas=[0.4, 1.1]).defaults["etas"] == (0.4, 1.1)


def test_generators_and_named_parameters_are_taken() -> None:
    model = nn.Linear(3, 2)
    assert len(OPTIMIZERS.build(params=model.parameters(), type="AdamW").param_groups[0]["params"]) == 2
    assert OPTIMIZERS.build(params=model.named_parameters(), type="sgd").param_groups[0]["param_names"] == [
        "weight",
        "bias",
    ]
    groups = [{"params": (p for p in model.parameters()), "lr": 0.5}]
    assert len(OPTIMIZERS.build(params=groups, type="adam").param_groups[0]["params"]) == 2
    assert len(OPTIMIZERS.build(params=[{"params": model.weight}], type="adam").param_groups[0]["params"]) == 1


def test_nothing_to_train_is_an_error() -> None:
    for params in ([], [{"params": []}]):
        with pytest.raises(ValueError, match="at least one parameter .* Received: none"):
            OPTIMIZERS.build(params=params, type="sgd")


def test_a_set_has_no_order() -> None:
    with pytest.raises(ValueError, match="Received: a set"):
        OPTIMIZERS.build(params={nn.Parameter(torch.ones(1))}, type="sgd")


def test_unknown_names_are_errors() -> None:
    parameters = [nn.Parameter(torch.ones(1))]
    with pytest.raises(ValueError, match="adadelta, .*sparseadam. Received: type='adamm'. Did you mean 'adam"):
        OPTIMIZERS.build(params=parameters, type="adamm")
    with pytest.raises(ValueError, match="Received: 'momentun'. Did you mean 'momentum'"):
        OPTIMIZERS.build(params=parameters, type="sgd", momentun=0.9)
    with pytest.raises(
        ValueError, match="parameter group of optimizer 'sgd'.* Received: 'momentun'. Did you mean 'momentum'"
    ):
        OPTIMIZERS.build(params=[{"params": parameters, "momentun": 0.9}], type="sgd")


def test_a_users_optimizer_is_built_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OPTIMIZERS, "_builders", dict(OPTIMIZERS._builders))
    monkeypatch.setattr(OPTIMIZERS, "_names", dict(OPTIMIZERS._names))

    @OPTIMIZERS.register("sign")
    class Sign(torch.optim.SGD):
        pass

    optimizer = OPTIMIZERS.build(params=[nn.Parameter(torch.ones(1))], type="Sign", lr=0.1)
    assert type(optimizer) is Sign

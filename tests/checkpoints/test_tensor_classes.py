"""Tensors of a class of the user's: saved as plain ones where these have all of it, else refused at the first save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import danling as dl
from danling.checkpoints import CheckpointError


class Labelled(Tensor):
    """A tensor whose class says what it is for."""


class Wrapped(Tensor):
    """A tensor that has its values elsewhere."""

    @staticmethod
    def __new__(cls, values: Tensor) -> Wrapped:
        wrapped: Any = Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)  # type: ignore[attr-defined]
        wrapped.values = values
        return wrapped  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def bare(value: Any) -> Any:
            return value.values if isinstance(value, Wrapped) else value

        found = function(*map(bare, args), **(kwargs or {}))
        return cls(found) if isinstance(found, Tensor) else found


def labelled(values: Tensor) -> Any:
    return values.as_subclass(Labelled)


class Classes(dl.Runner):
    def __init__(self, config: Any, where: str) -> None:
        super().__init__(config)
        self.model, self.criterion = nn.Linear(4, 1), nn.MSELoss()
        nn.init.constant_(self.model.weight, 0.5)
        if where == "parameter":
            self.model.weight = nn.Parameter(labelled(self.model.weight.detach()))
        if where == "buffer":
            self.model.register_buffer("seen", labelled(torch.zeros(2)))
        if where == "attribute":
            self.seen = labelled(torch.zeros(2))
        inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
        self.datasets = {"train": TensorDataset(inputs, inputs.sum(1, keepdim=True))}
        self.where = where

    def train_step(self, data: Any) -> Any:
        if self.where == "buffer":
            self.unwrapped_model.seen += 1
        if self.where == "attribute":
            self.seen = self.seen + 1 if self.rank == 0 else self.seen.add_(2)
        return super().train_step(data)


def _train(root: str, where: str, more: dict[str, Any]) -> list[Any]:
    for steps in (2, 5):
        config = {"dir": root, "steps": steps, "seed": 1, "log": False, "auto_resume": True, **more}
        config |= {"dataloader": {"batch_size": 2}, "optim": {"type": "adam", "lr": 0.1}}
        with Classes(config, where) as runner:
            runner.train()
            module: Any = runner.unwrapped_model
            found = (
                runner.seen
                if where == "attribute"
                else module.seen
                if where == "buffer"
                else module.weight
            )
    return [type(found).__name__, found.detach().as_subclass(Tensor).clone()]


FILE: dict[str, Any] = {}
DCP: dict[str, Any] = {"checkpoint.backend": "dcp"}
ENGINE: dict[str, Any] = {"stack": "deepspeed"}


@pytest.mark.parametrize(
    ("where", "more"),
    [
        *(
            pytest.param(where, FILE, id=f"{where}-file")
            for where in ("parameter", "buffer", "attribute")
        ),
        pytest.param("attribute", DCP, id="attribute-dcp"),
        pytest.param("buffer", ENGINE, id="buffer-engine"),
        *(
            pytest.param(where, DCP, id=f"{where}-dcp", marks=pytest.mark.slow)
            for where in ("parameter", "buffer")
        ),
        *(
            pytest.param(where, ENGINE, id=f"{where}-engine", marks=pytest.mark.slow)
            for where in ("parameter", "attribute")
        ),
    ],
)
def test_tensor_of_a_class_comes_back_as_one(
    where: str, more: dict[str, Any], tmp_path: Path
) -> None:
    if "stack" in more:
        pytest.importorskip("deepspeed")
        more = {**more, "deepspeed": {"zero_optimization": {"stage": 0}}}
    ranks = run_processes(
        _train, str(tmp_path / "labelled"), where, more, world_size=2, timeout=200
    )
    for rank, (kind, value) in enumerate(ranks):
        assert kind == "Labelled"
        if where == "buffer":
            assert value.tolist() == [5.0, 5.0]
        if where == "attribute":
            assert value.tolist() == [5.0 * (rank + 1)] * 2
    if where == "parameter":
        plain = run_processes(
            _train, str(tmp_path / "plain"), "none", more, world_size=2, timeout=200
        )
        assert plain[0][0] == "Parameter" and torch.equal(ranks[0][1], plain[0][1])


@pytest.mark.parametrize("backend", ["file", "dcp"])
def test_tensor_with_more_than_values_is_refused_at_the_first_save(
    backend: str, tmp_path: Path
) -> None:
    class Wraps(Classes):
        def __init__(self, config: Any) -> None:
            super().__init__(config, "none")
            self.model.register_buffer("odd", Wrapped(torch.zeros(2)))

    config = {
        "dir": str(tmp_path),
        "steps": 4,
        "log": False,
        "checkpoint": {"backend": backend, "interval": 1},
    }
    with pytest.raises(CheckpointError, match=r"model\.odd of the class Wrapped.*add_safe_globals"):  # noqa: SIM117
        with Wraps(
            {**config, "dataloader": {"batch_size": 4}, "optim": {"type": "sgd", "lr": 0.1}}
        ) as runner:
            runner.train()
    assert runner.state.train.global_step == 1

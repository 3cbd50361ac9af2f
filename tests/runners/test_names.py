"""Names of the library that a user sets on a runner: refused with their owner, and with another name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.toys import Small
from support.toys import settings as toy_settings

import danling as dl


class Named(Small):
    def __init__(self, config: Any, taken: dict[str, Any] | None = None) -> None:
        super().__init__(config)
        for name, value in (taken or {}).items():
            setattr(self, name, value)


def settings(root: Path) -> dict[str, Any]:
    return toy_settings(root / "run", steps=1, checkpoint={"load_only": True})


@pytest.mark.parametrize(
    "name",
    [
        "window",
        "_parts",
        "index",
        "step",
        "batch_weight",
        "device",
        "mode",
        "_bind_reduction",
        "scores",
    ],
)
def test_name_of_the_library_is_refused_at_its_assignment(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        AttributeError, match=rf"self.{name} = .*library's \((\w+)\).*my_{name.strip('_')}"
    ) as caught:
        Named(settings(tmp_path), {name: 3.5})
    owner = str(caught.value).partition("library's (")[2].partition(")")[0]
    assert owner in {kind.__name__ for kind in dl.TorchRunner.__mro__}
    assert os.listdir(tmp_path) == []  # before anything is written


@pytest.mark.parametrize("name", ["scores", "parameters", "reduction"])
def test_a_method_under_the_name_of_a_property_is_refused_with_the_mend(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(
        AttributeError,
        match=rf"Expected '{name}' to be a property.*a method of the class Own\. Put @prop",
    ):
        type("Own", (Named,), {name: lambda self: {}})(settings(tmp_path))


def test_every_attribute_of_the_librarys_is_known_to_the_guard(tmp_path: Path) -> None:
    with Named(settings(tmp_path)) as runner:
        runner.train()
        unknown = vars(runner).keys() - runner.library_names
        assert not unknown, f"annotate them in the class that sets them: {sorted(unknown)}"


MEMBERS: dict[str, Any] = {
    "_bind_reduction": lambda self, text: None,
    "window": lambda self: 3,
    "train_step": 0.1,
}


@pytest.mark.parametrize("name", MEMBERS)
def test_methods_and_values_of_a_class_are_looked_at_too(name: str, tmp_path: Path) -> None:
    made = type("Made", (Named,), {name: MEMBERS[name]})
    with pytest.raises(AttributeError, match=f"{name} of the class Made, where '{name}'"):
        made(settings(tmp_path))


class Silent:
    def log(self, values: Any, step: int) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_settable_names_of_the_contract_stay(tmp_path: Path) -> None:
    class Free(Named):
        stack = "ddp"
        config_class = dl.RunnerConfig
        rate = 3

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.batch_weight = lambda data, target: torch.tensor(4.0)
            self.device = torch.device("cpu")
            self.lr, self.width, self.tokenizer = 0.1, 3, object()
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.id = "mine"
            self.add_tracker(Silent())

        @property
        def scores(self) -> dict[int, float]:
            return super().scores

        def _own(self) -> None:
            pass

    with Free(settings(tmp_path)) as runner:
        runner.train()
        assert (runner.lr, runner.width, runner.rate) == (0.1, 3, 3)


@pytest.mark.parametrize("name", ["model", "ema", "criterion", "optimizer", "scheduler", "metrics"])
def test_a_property_may_stand_for_a_component(name: str, tmp_path: Path) -> None:
    def write(self: Any, value: Any) -> None:
        self.kept_component = value

    kept = type("Kept", (Named,), {name: property(lambda self: self.kept_component, write)})
    with Named(settings(tmp_path / "plain")) as plain, kept(settings(tmp_path / "kept")) as runner:
        assert type(getattr(runner, name)) is type(getattr(plain, name))
        assert runner.train() == plain.train()


def test_missing_name_is_an_attribute_error_also_inside_of_a_property(tmp_path: Path) -> None:
    class Wrong(Named):
        @property
        def mine(self) -> Any:
            return self.nothing_like_it

    with Wrong(settings(tmp_path)) as runner:
        assert not hasattr(runner, "nowhere")
        with pytest.raises(AttributeError, match="nothing_like_it") as caught:
            _ = runner.mine
        assert caught.value.obj is runner

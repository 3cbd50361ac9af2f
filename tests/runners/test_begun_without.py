"""What a run leaves out of the checkpoint that it begins from, such as a head, belongs to its own checkpoints: they are loaded whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from support.toys import NoisyPoints, differences
from torch import Tensor, nn

import danling as dl
from danling.checkpoints import CheckpointMismatch
from danling.utils.tensors import whole


class Tuned(dl.Runner):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = nn.Sequential()
        self.model.add_module("backbone", nn.Linear(6, 8))
        self.model.add_module("head", nn.Linear(8, self.config.task.classes))
        self.criterion = nn.CrossEntropyLoss()
        self.datasets = {"train": NoisyPoints(64)}

    def train_step(self, data: dict[str, Any]) -> tuple[Any, Tensor]:
        return super().train_step((data["input"], data["target"]))


def config(root: Path | str, steps: int, **more: Any) -> dict[str, Any]:
    optim, data = {"type": "adamw", "lr": 0.05}, {"batch_size": 8}
    base = {
        "seed": 1,
        "steps": steps,
        "dir": str(root),
        "optim": optim,
        "dataloader": data,
        "task.classes": 5,
    }
    return base | {"checkpoint.exclude_from_loading": ["model.head"]} | more


def state(runner: Tuned) -> dict[str, Tensor]:
    averages = runner.ema.weights if runner.ema else {}
    held = {
        **runner.model_state_dict(),
        **{f"ema/{name}": value for name, value in averages.items()},
    }
    return {name: whole(value).clone() for name, value in held.items()}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("base")
    with Tuned(
        config(place, 4, **{"task.classes": 7, "checkpoint.exclude_from_loading": None})
    ) as runner:
        runner.train()
    return place / "checkpoints" / "latest.pth"


def tune(root: Path | str, base: Path | str, steps: int, **more: Any) -> dict[str, Tensor]:
    with Tuned.from_pretrained(config(root, steps, **more), base) as runner:
        runner.train()
        return state(runner)


def in_parts(root: str, base: str, more: dict[str, Any]) -> bool:
    expected = tune(f"{root}/whole", base, 6, **more)
    tune(f"{root}/parts", base, 3, **more)
    return not differences(expected, tune(f"{root}/parts", base, 6, auto_resume=True, **more))


def test_a_new_head_comes_back_with_auto_resume_resume_and_from_checkpoint(
    tmp_path: Path, base: Path
) -> None:
    more = {"ema.enabled": True}
    with pytest.raises(CheckpointMismatch, match="'model.head' to checkpoint.exclude_from_loading"):
        tune(tmp_path / "refused", base, 6, **{"checkpoint.exclude_from_loading": None})
    expected = tune(tmp_path / "whole", base, 6, **more)
    tune(tmp_path / "parts", base, 3, **more)
    half = tmp_path / "parts" / "checkpoints" / "latest.pth"
    assert not differences(expected, tune(tmp_path / "resumed", base, 6, resume=str(half), **more))
    with Tuned.from_checkpoint(half, {"steps": 6, "dir": str(tmp_path / "from")}) as runner:
        runner.train()
        assert not differences(expected, state(runner))
    for steps in (4, 5, 6):
        ended = tune(tmp_path / "parts", base, steps, auto_resume=True, **more)
    assert not differences(expected, ended)


LAYOUTS = {
    "ddp": {},
    "sharded": {
        "stack": "parallel",
        "parallel.axes.shard": 2,
        "fsdp.enabled": True,
        "ema.enabled": True,
    },
    "deepspeed": {"stack": "deepspeed", "deepspeed": {"zero_optimization": {"stage": 1}}},
}


@pytest.mark.parametrize("layout", ["sharded", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "deepspeed"))])  # fmt: skip
def test_on_two_processes(layout: str, tmp_path: Path, base: Path) -> None:
    assert all(run_processes(in_parts, str(tmp_path), str(base), LAYOUTS[layout], world_size=2))


def test_parts_left_out_at_a_start_are_left_out_once(tmp_path: Path, base: Path) -> None:
    before = tune(tmp_path, base, 3)
    entries = {"checkpoint.exclude_from_loading": ["model.head", "model.backbone", "optimizer"]}
    with Tuned(config(tmp_path, 6, auto_resume=True, **entries)) as runner:
        found = state(runner)
        assert torch.equal(found["head.weight"], before["head.weight"])
        said = runner.workspace.log_file.read_text()
        assert "model.head is loaded: checkpoint.exclude_from_loading left it out when this" in said
        assert (
            "Left out, as checkpoint.exclude_from_loading asks for: model.backbone, optimizer."
            in said
        )
        assert (
            not torch.equal(found["backbone.weight"], before["backbone.weight"])
            and not runner.optimizer.state
        )
        runner.train()
        trained = state(runner)
    with Tuned(config(tmp_path, 6, auto_resume=True, **entries)) as runner:
        assert not differences(trained, state(runner)) and runner.optimizer.state


def test_starting_checkpoint_is_taken_without_them_again(tmp_path: Path, base: Path) -> None:
    head = tune(tmp_path / "first", base, 3)["head.weight"]
    with Tuned.from_pretrained(
        config(tmp_path / "second", 3), tmp_path / "first" / "checkpoints"
    ) as runner:
        assert not torch.equal(state(runner)["head.weight"], head)
        # A resume of its own leaves no trace of what it has loaded all the same.
        runner.load_checkpoint(tmp_path / "first" / "checkpoints" / "latest.pth")
        assert torch.equal(state(runner)["head.weight"], head)
        runner.model.head.reset_parameters()
        begun = state(runner)["head.weight"]
        runner.load_pretrained(tmp_path / "first" / "checkpoints")
        assert torch.equal(state(runner)["head.weight"], begun)


def test_parts_with_changed_settings_are_left_out_again(tmp_path: Path, base: Path) -> None:
    entries = {"checkpoint.exclude_from_loading": ["model.head", "optimizer", "runner.optim"]}
    tune(tmp_path / "adamw", base, 2, **entries)
    for before, kind in (("adamw", "sgd"), ("sgd", "rmsprop")):
        more = {
            "resume": str(tmp_path / before / "checkpoints" / "latest.pth"),
            "optim": {"type": kind, "lr": 0.05},
        }
        with Tuned(config(tmp_path / kind, 2, **entries, **more)) as runner:
            assert type(runner.optimizer).__name__.lower() == kind and not runner.optimizer.state
            runner.save_checkpoint()

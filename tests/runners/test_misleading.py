"""Errors that sent people the wrong way, each with the sentence that names cause and mend; and what is understood now."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.toys import Line, settings
from torch import Tensor

import danling as dl
from danling.checkpoints.errors import CheckpointMismatch
from danling.workspace import runs


class Scored(Line):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.datasets["test"] = self.datasets["val"]
        self.metrics = {"acc": lambda pred, target: (pred - target).abs().mean()}


# Scores


@pytest.mark.parametrize(
    ("name", "more"), [("val.acc", {}), ("test.acc", {}), ("val.acc", {"score_split": "val"})]
)
def test_a_score_may_be_named_as_logs_write_it(
    name: str, more: dict[str, Any], tmp_path: Path
) -> None:
    split, _, metric = name.partition(".")
    found = []
    for kind, given in (
        ("dotted", {"score_name": name, **more}),
        ("plain", {"score_name": metric, "score_split": split}),
    ):
        with Scored(settings(tmp_path / kind, epochs=2, **given)) as runner:
            runner.train()
            found.append((runner.score_split, dict(runner.scores), runner.best_index))
        assert runs.Run(tmp_path / kind, kind).score_name == f"{split}/{metric}"
    assert found[0] == found[1] and found[0][1][2] == runner.results[2][split][metric]
    with Scored(
        settings(tmp_path / "dotted", epochs=3, score_name=name, **more, auto_resume=True)
    ) as runner:
        assert runner.state.train.epoch == 2 and runner.best_index == found[0][2]


# Sections, numbers, paths


@pytest.mark.parametrize(
    ("key", "value", "example"),
    [
        ("optim", "adamw", "{'type': 'adamw'}"),
        ("scheduler", "cosine", "{'type': 'cosine'}"),
        ("compile", True, "{'enable': True}"),
        ("ema", True, "{'enabled': True}"),
        ("wandb", False, "{'enabled': False}"),
        ("dataloader", 32, "{'batch_size': ...}"),
    ],
)
def test_a_value_in_the_place_of_a_section(key: str, value: Any, example: str) -> None:
    with pytest.raises(TypeError) as caught:
        dl.RunnerConfig({key: value})
    assert str(caught.value).endswith(f"Received: {key}={value!r}. Write {key}={example}.")


OPTIMIZER = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
NUMBERS: dict[str, tuple[Callable[[], Any], str]] = {
    "comma in code": (
        lambda: dl.RunnerConfig({"optim.lr": "1,5e-3"}),
        "Write 1.5e-3, with a point.",
    ),
    "comma in words": (
        lambda: dl.RunnerConfig().parse(["--optim.lr", "1,5e-3"]),
        "Write 1.5e-3, with a point.",
    ),
    "percent": (lambda: dl.RunnerConfig({"ema.decay": "99.9%"}), "Write 0.999, as a share of 1."),
    "warm-up": (
        lambda: dl.SCHEDULERS.build(OPTIMIZER, type="cosine", total_steps=10, warmup_steps="10%"),
        "a number >= 0: updates, or below 1 a share of the run. Received: warmup_steps='10%'. Write 0.1, as a share of 1.",
    ),
}


@pytest.mark.parametrize("case", NUMBERS)
def test_text_similar_to_a_number_is_named(case: str) -> None:
    read, message = NUMBERS[case]
    with pytest.raises((TypeError, ValueError)) as caught:
        read()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["--evaluate_splits", "val,test"], "evaluate_splits", ["val", "test"]),
        (["--evaluate_splits", "val", "test"], "evaluate_splits", ["val", "test"]),
        (["--evaluate_splits", "val"], "evaluate_splits", ["val"]),
        (["--optim.betas", "0.9,0.95"], "optim.betas", [0.9, 0.95]),
        (["--optim.betas=0.9,0.95"], "optim.betas", [0.9, 0.95]),
        (["--own.text", "a,b"], "own.text", "a,b"),
    ],
)
def test_a_list_of_the_library_is_divided_at_commas(words: list[str], key: str, value: Any) -> None:
    assert dl.RunnerConfig().parse(words)[key] == value


def test_a_path_with_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.delenv("NOWHERE", raising=False)
    with Line(settings("$SCRATCH/run", steps=1)) as runner:
        runner.train()
        assert runner.dir == tmp_path / "scratch" / "run"
    assert (tmp_path / "scratch" / "run" / "checkpoints" / "latest.pth").exists()
    config = dl.RunnerConfig({"workspace_root": "~/runs"}).parse(
        ["--resume", "$HOME/a", "--wandb.dir", "$SCRATCH"]
    )
    assert config.workspace_root == f"{tmp_path}/runs" and config.resume == f"{tmp_path}/a"
    assert (
        config.wandb.dir == f"{tmp_path}/scratch" and dl.RunnerConfig(name="$HOME").name == "$HOME"
    )
    with pytest.raises(
        ValueError, match=r"dir to be a path whose variables are set \(\$NOWHERE is not\)"
    ):
        dl.RunnerConfig(dir="$NOWHERE/x")


# Schedules and averages


def test_a_schedule_by_epochs_in_a_run_of_steps(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"a budget of epochs.*steps=4.*Set scheduler\.interval='step'"
    ):
        Line(settings(tmp_path, steps=4, scheduler={"type": "cosine", "interval": "epoch"}))
    given = {"type": "cosine", "interval": "epoch", "total_steps": 2}
    Line(settings(tmp_path, steps=4, scheduler=given)).close()


@pytest.mark.parametrize("stack", ["ddp", "accelerate"])
@pytest.mark.parametrize("named", [["runner.ema"], ["runner.ema", "ema"]])
def test_averages_switched_on_at_a_resume_begin_with_the_loaded_weights(
    named: list[str], stack: str, tmp_path: Path
) -> None:
    with Line(settings(tmp_path / "first", steps=2, stack=stack)) as runner:
        runner.train()
        loaded = whole(runner.unwrapped_model.state_dict())
    given = {
        "steps": 4,
        "ema": {"enabled": True, "decay": 0.5},
        "resume": str(tmp_path / "first/checkpoints/latest.pth"),
    }
    with pytest.raises(CheckpointMismatch, match=r"ema\.enabled: stored False, now True"):
        Line(settings(tmp_path / "second", stack=stack, **given))
    given["checkpoint"] = {"exclude_from_loading": named}
    expected = {name: tensor.clone() for name, tensor in loaded.items()}

    class Averaging(Line):
        def optimizer_step(self) -> None:
            super().optimizer_step()
            for name, tensor in self.unwrapped_model.state_dict().items():
                expected[name] = 0.5 * expected[name] + 0.5 * tensor

    with Averaging(settings(tmp_path / "third", stack=stack, **given)) as runner:
        assert runner.state.train.global_step == 2
        assert all(torch.equal(runner.ema.weights[name], tensor) for name, tensor in loaded.items())
        runner.train()
        for name, tensor in expected.items():
            torch.testing.assert_close(runner.ema.weights[name], tensor)
    given["steps"], given["checkpoint"] = 5, {}
    del given["resume"]
    with Line(settings(tmp_path / "third", stack=stack, **given, auto_resume=True)) as runner:
        assert runner.state.train.global_step == 4
        for name, tensor in expected.items():
            torch.testing.assert_close(runner.ema.weights[name], tensor)


def test_left_out_averages_begin_with_the_loaded_weights(tmp_path: Path) -> None:
    given: dict[str, Any] = {"ema": {"enabled": True, "decay": 0.9}}
    with Line(settings(tmp_path / "first", steps=2, **given)) as runner:
        runner.train()
        loaded = whole(runner.unwrapped_model.state_dict())
    given |= {
        "resume": str(tmp_path / "first/checkpoints/latest.pth"),
        "checkpoint": {"exclude_from_loading": ["ema"]},
    }
    with Line(settings(tmp_path / "second", steps=3, **given)) as runner:
        assert all(torch.equal(runner.ema.weights[name], tensor) for name, tensor in loaded.items())


def whole(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


# Verbs

EARLY: dict[str, Callable[[Any], Any]] = {
    "train": lambda runner: runner.train(),
    "evaluate": lambda runner: runner.evaluate(),
    "infer": lambda runner: runner.infer("val"),
    "save_checkpoint": lambda runner: runner.save_checkpoint(),
    "load_checkpoint": lambda runner: runner.load_checkpoint("latest"),
}


@pytest.mark.parametrize("verb", EARLY)
def test_a_verb_in_init_is_too_early(verb: str, tmp_path: Path) -> None:
    class Early(Line):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            EARLY[verb](self)

    with pytest.raises(
        ValueError, match=f"`{verb}` to be called on a constructed runner.*too early"
    ):
        Early(settings(tmp_path, steps=1))


def test_a_name_for_a_save_is_answered(tmp_path: Path) -> None:
    with Line(settings(tmp_path, steps=1)) as runner:
        runner.train()
        with pytest.raises(
            TypeError, match=r"Received: 'x\.pth'.*save_pretrained\(directory\).*danling export"
        ):
            getattr(runner, "save_checkpoint")("x.pth")  # noqa: B009


def test_an_override_of_a_save_may_take_a_name(tmp_path: Path) -> None:
    class Named(Line):
        def save_checkpoint(self, name: str = "", **options: Any) -> None:
            self.named = name
            super().save_checkpoint(**options)

    with Named(settings(tmp_path, steps=1)) as runner:
        runner.save_checkpoint("mine")
        assert runner.named == "mine"

"""The last lines of a training: the best score and the commands to go on, which are those of how it was started."""

from __future__ import annotations

import logging
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import danling as dl
from danling.reporting.reporter import describe_end


@pytest.fixture
def run() -> Path:
    directory = Path("runs", "a b")
    (directory / "checkpoints").mkdir(parents=True)
    for name in ("metrics.jsonl", "checkpoints/latest.pth", "checkpoints/best.pth"):
        (directory / name).write_text("")
    return directory.absolute()


def lines(run: Path, words: str | None = "", **more: Any) -> list[str]:
    """Return what is said of a run that has come to the end of its budget, unless `more` says something else."""

    class Mine(SimpleNamespace):
        """A runner."""

    own = {"note": "", "tags": [], "hub": {}, "url": "", "phrase": ""}
    config = dl.RunnerConfig(
        {"score_name": "acc", "epochs": 10, "patience": 2, "secret_keys": ["phrase"], **own}
    )
    main = ModuleType("__main__")
    main.__spec__, file = more.pop("spec", None), more.pop("file", "train.py")
    if file is not None:
        main.__file__ = file
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "__main__", main)
        patch.setattr("sys.argv", ["train.py", *(words.split("|") if words else [])])
        patch.setenv("DANLING_LAUNCH_COMMAND", more.pop("launch", ""))
        for name, variable in (("local", "LOCAL_WORLD_SIZE"), ("machines", "GROUP_WORLD_SIZE")):
            patch.delenv(variable, raising=False)
            if name in more:
                patch.setenv(variable, more.pop(name))
        if words is not None:
            config.parse()
        board = SimpleNamespace(split="val", name="acc")
        standing = SimpleNamespace(board=board, evaluations_since_best=2)
        given = {
            "is_step_mode": False,
            "steps": None,
            "epochs": 10,
            "progress": 1.0,
            "world_size": 1,
            "stack": "ddp",
        }
        paths = SimpleNamespace(dir=run, checkpoints=run / "checkpoints")
        stop_reason = more.pop("stop_reason", None)
        best = {"best_score": 0.98333, "best_index": 7}
        made = {"workspace": paths, "standing": standing, "config": config}
        runner: Any = Mine(**{**given, **best, **more}, **made)
        return describe_end(runner, stop_reason)


@pytest.mark.parametrize(
    ("words", "more", "command"),
    [
        (
            "--epochs|10|--resume|old.pth",
            {"world_size": 2, "progress": 0.5, "stop_reason": "terminate"},
            "torchrun --nproc-per-node 2 train.py --epochs 10 --dir 'runs/a b' --auto_resume true",
        ),
        (
            "--patience|2|--epochs=9",
            {"progress": 0.5, "stop_reason": "patience", "file": "my runs/train.py"},
            "python 'my runs/train.py' --epochs 9 --dir 'runs/a b' --auto_resume true --patience 4",
        ),
        (
            "--auto-resume=true|--dir|x|--note=-5 %|--tags|a|b",
            {"file": "/opt/tool/__main__.py", "spec": ModuleSpec("tool.__main__", None)},
            "python -m tool.__main__ '--note=-5 %' --tags a b --dir 'runs/a b' --auto_resume true --epochs 20",
        ),
        (
            "--hub.token|longer1|--hub.api-key=ab|--hub.more|{'token': 'ab'}|--url|x?k=longer1|--phrase|a b",
            {"progress": 0.5},
            "python train.py --hub.token ... --hub.api-key ... --hub.more "
            """'{'"'"'token'"'"': '"'"'...'"'"'}' --url ... --phrase ... --dir 'runs/a b' --auto_resume true""",
        ),
        (
            "--epochs|10",
            {"world_size": 1, "progress": 0.5, "launch": "danling run --ranks 3 --"},
            "danling run --ranks 3 -- python train.py --epochs 10 --dir 'runs/a b' --auto_resume true",
        ),
        (
            "--epochs|10",
            {"world_size": 16, "progress": 0.5, "local": "8", "machines": "2"},
            "torchrun --nproc-per-node 8 --nnodes 2 train.py --epochs 10 --dir 'runs/a b' --auto_resume true",
        ),
        (
            None,
            {},
            "Mine.from_checkpoint('runs/a b/checkpoints/latest.pth', {'epochs': 20}).train()",
        ),
        (
            "",
            {"file": None},
            "Mine.from_checkpoint('runs/a b/checkpoints/latest.pth', {'epochs': 20}).train()",
        ),
    ],
    ids=[
        "stopped",
        "out of patience",
        "a module",
        "secrets",
        "another launcher",
        "two machines",
        "no command line",
        "no script",
    ],
)
def test_the_command_to_go_on_can_be_pasted_and_shows_no_secret(
    run: Path, words: str | None, more: dict[str, Any], command: str
) -> None:
    assert lines(run, words, **more)[1] == f"resume   {command}"


def test_the_commands_have_the_place_of_the_run(run: Path) -> None:
    assert lines(run) == [
        "best     val.acc 0.9833 at epoch 7: runs/a b/checkpoints/best.pth",
        "resume   python train.py --dir 'runs/a b' --auto_resume true --epochs 20",
        "curves   danling plot 'runs/a b' -o curves.png",
        "weights  danling export 'runs/a b/checkpoints/best.pth' model.safetensors",
    ]


def test_commands_that_need_a_missing_package_say_so_or_do_without(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("matplotlib", "safetensors"):
        monkeypatch.setitem(sys.modules, package, None)
    assert lines(run)[2:] == [
        "curves   danling plot 'runs/a b' -o curves.png  # needs pip install matplotlib",
        "weights  danling export 'runs/a b/checkpoints/best.pth' model.pth",
    ]


def test_module_that_the_program_has_made_is_no_error(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = lines(run)
    for package in ("matplotlib", "safetensors"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    assert lines(run) == whole


def test_missing_facts_are_not_named(run: Path) -> None:
    (run / "checkpoints" / "best.pth").rename(run / "checkpoints" / "latest")  # a pointer
    (run / "checkpoints" / "latest.pth").unlink()
    said = lines(run, stack="deepspeed")
    assert said[0] == "best     val.acc 0.9833 at epoch 7"
    assert (
        said[-1]
        == "weights  danling export 'runs/a b/checkpoints/latest' model.safetensors --trust"
    )
    assert lines(Path("none"), best_index=None) == []


class Worse(dl.Runner):
    """Its score gets worse from the first epoch on."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.model, self.criterion = nn.Linear(1, 1), nn.MSELoss()
        data = TensorDataset(torch.ones(4, 1), torch.ones(4, 1))
        self.datasets = {"train": data, "val": data}
        self.metrics = {"rising": lambda _, target: target.flatten() * (1 + self.state.train.epoch)}


@pytest.mark.parametrize(
    ("epochs", "more"), [(20, {"patience": 4}), (3, {"epochs": 6, "patience": 4})]
)
def test_offered_settings_continue_a_run_out_of_patience(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, epochs: int, more: dict[str, int]
) -> None:
    scored = {
        "score_name": "rising",
        "score_mode": "min",
        "patience": 2,
        "epochs": epochs,
        "optim": {"type": "sgd"},
    }
    with (
        Worse({"dir": str(tmp_path / "run"), "seed": 1, **scored}) as runner,
        caplog.at_level(logging.INFO, "danling"),
    ):
        runner.train()
    assert runner.state.train.epoch == 3
    [offer] = re.findall(r"resume   (.*)", caplog.text)
    assert str(more) in offer
    [checkpoint] = re.findall(r"'(.*latest.pth)'", offer)
    with eval(offer.removesuffix(".train()"), {"Worse": Worse}) as goes_on:
        assert (goes_on.state.train.epoch, Path(checkpoint).is_file()) == (3, True)
        goes_on.train()
    assert goes_on.state.train.epoch == 5

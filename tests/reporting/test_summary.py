"""The last lines of a training: the best score and the commands to go on, which are those of how it was started."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from danling.reporting import Launch, describe_end


@pytest.fixture
def run() -> Path:
    directory = Path("runs", "a b")
    (directory / "checkpoints").mkdir(parents=True)
    for name in ("metrics.jsonl", "checkpoints/latest.pth", "checkpoints/best.pth"):
        (directory / name).write_text("")
    return directory.absolute()


def lines(
    run: Path, launch: Launch, *, budget: tuple[str, int] | None = ("epochs", 20), trust: bool = False
) -> list[str]:
    best = ("val.acc", 0.98333, "epoch 7")
    return describe_end(launch, directory=run, checkpoints=run / "checkpoints", best=best, budget=budget, trust=trust)


def test_the_commands_are_those_of_the_script(run: Path) -> None:
    launch = Launch("train.py", ["--epochs", "10", "--optim.lr", "1e-3", "--auto-resume=true", "--dir", "x"], 1, "Mine")
    assert lines(run, launch) == [
        "best     val.acc 0.9833 at epoch 7: runs/a b/checkpoints/best.pth",
        "go on    python train.py --optim.lr 1e-3 --dir 'runs/a b' --auto_resume true --epochs 20",
        "curves   danling plot 'runs/a b' -o curves.png",
        "weights  danling export 'runs/a b/checkpoints/best.pth' model.safetensors",
    ]


def test_a_run_that_was_stopped_goes_on_within_its_budget(run: Path) -> None:
    [_, go_on, *_] = lines(run, Launch("train.py", ["--epochs", "10"], 2, "Mine"), budget=None)
    assert go_on == "go on    torchrun ... train.py --epochs 10 --dir 'runs/a b' --auto_resume true"


def test_without_a_command_line_it_is_a_line_of_python(run: Path) -> None:
    wanted = "go on    Mine.from_checkpoint('runs/a b/checkpoints/latest.pth', {'epochs': 20}).train()"
    assert lines(run, Launch(None, None, 1, "Mine"))[1] == wanted
    assert lines(run, Launch("train.py", None, 1, "Mine"))[1] == wanted


def test_what_is_not_there_is_not_named(run: Path) -> None:
    launch = Launch("train.py", [], 1, "Mine")
    (run / "checkpoints" / "best.pth").rename(run / "checkpoints" / "latest")  # a pointer
    (run / "checkpoints" / "latest.pth").unlink()
    said = lines(run, launch, trust=True)
    assert said[0] == "best     val.acc 0.9833 at epoch 7"
    assert said[-1] == "weights  danling export 'runs/a b/checkpoints/latest' model.safetensors --trust"
    nothing = describe_end(launch, directory=Path("none"), checkpoints=Path("none"), best=None, budget=None)
    assert nothing == []


@pytest.mark.parametrize(
    ("file", "spec", "script"),
    [
        ("train.py", None, "train.py"),
        ("my runs/train.py", None, "'my runs/train.py'"),
        ("/opt/tool/__main__.py", ModuleSpec("tool.__main__", None), "-m tool.__main__"),
        (None, None, None),
    ],
)
def test_a_program_is_known_by_how_it_was_started(
    file: str | None, spec: ModuleSpec | None, script: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = ModuleType("__main__")
    main.__spec__ = spec
    if file is not None:
        main.__file__ = file
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert Launch.of_this_program(None, 1, "Mine").script == script

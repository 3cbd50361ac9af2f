"""The doctor has a program make a few updates, be resumed and evaluate, and leaves the files of its own runs alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.recorded import danling
from support.warm import interpreter

from danling.audit.quick import QuickRunFailed, try_quickly

PROGRAM = """
import json, sys
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
import danling as dl

CALLS = Path(__file__).parent / "calls.jsonl"

class Toy(dl.Runner):
    def __init__(self, config):
        super().__init__(config)
        points = torch.randn(400, 4, generator=torch.Generator().manual_seed(0))
        data = TensorDataset(points, (points.sum(1) > 0).long())
        self.datasets = {"train": data} if "alone" in sys.argv else {"train": data, "val": data}
        self.model = nn.Linear(4, 2)
        self.criterion = nn.CrossEntropyLoss()
        self.add_tracker(lambda: self.called("tracker"))

    def called(self, name, **more):
        with open(CALLS, "a") as file:
            print(json.dumps([name, self.rank, self.train_state.global_step, more]), file=file)

    def train_epoch(self, split="train"):
        self.called("train_epoch")
        return super().train_epoch(split)

    def evaluate_epoch(self, split):
        if "fails" in sys.argv:
            raise RuntimeError("no such metric")
        result = super().evaluate_epoch(split)
        self.called("evaluate_epoch", samples=result["samples"])
        return result

budget = {sys.argv[1]: int(sys.argv[2])}
settings = {"seed": 1, "dataloader": {"batch_size": 8}, "optim": {"type": "adamw", "lr": 1e-2}, "tensorboard": True}
with Toy({**budget, **settings, "dir": str(CALLS.parent / "own"), "scheduler": {"type": "cosine", "warmup_steps": 20}}) as runner:
    runner.train()
    runner.save_pretrained(CALLS.parent / "exported")
"""
LAUNCH = "-m torch.distributed.run --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1"


@pytest.fixture
def program(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(PROGRAM)
    return str(tmp_path / "train.py")


def calls_of(place: Path) -> list[tuple[str, int, int, dict[str, float]]]:
    file = place / "calls.jsonl"
    return (
        [tuple(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []
    )


@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_quick_run_calls_the_overrides_and_writes_nothing_of_the_program(
    program: str, tmp_path: Path, ranks: int
) -> None:
    launch = LAUNCH.split() if ranks == 2 else []
    words = [interpreter(), *launch, program, "epochs", "1"]
    done = danling("doctor", "--quick", "--timeout", "150", "--", *words, timeout=380, warm=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(
        "this program trains, evaluates, saves and resumes (3 updates, and 3 after its resume)\n"
    )
    assert len(done.stdout.splitlines()) == 1
    wanted = [
        ("train_epoch", 0, {}),
        ("train_epoch", 3, {}),
        ("evaluate_epoch", 6, {"samples": 3 * 8.0 * ranks}),
    ]
    for rank in range(ranks):
        assert [
            (name, step, more) for name, at, step, more in calls_of(tmp_path) if at == rank
        ] == wanted
    assert {file.name for file in tmp_path.iterdir()} == {"train.py", "calls.jsonl"}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("words", "updates", "said"),
    [
        (
            ["steps", "50"],
            2,
            "trains, evaluates, saves and resumes (2 updates, and 2 after its resume)",
        ),
        (
            ["steps", "50", "alone"],
            2,
            "trains, saves and resumes (2 updates, and 2 after its resume); it evaluates no",
        ),
        (
            ["steps", "2"],
            2,
            "trains, evaluates, saves and resumes (2 updates, and 0 after its resume)",
        ),
    ],
    ids=["steps", "no_split_to_evaluate", "budget_of_the_first_start"],
)
def test_quick_run_by_updates(
    program: str, tmp_path: Path, words: list[str], updates: int, said: str
) -> None:
    command = [interpreter(), program, *words]
    assert said in try_quickly(command, tmp_path / "scratch", updates=updates, timeout=150)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("words", "received"),
    [
        (
            ["epochs", "1", "fails"],
            "resumes, trains, evaluates and saves. Received: exit code 1; .*no such metric",
        ),
        (["steps", "2"], "at least 3 updates. Received: 2 until its end. Write --quick 2"),
    ],
    ids=["evaluation_fails", "too_short"],
)
def test_failure_in_a_quick_run_is_named(
    program: str, tmp_path: Path, words: list[str], received: str
) -> None:
    with pytest.raises(QuickRunFailed, match=f"(?s)Expected a program that .*{received}"):
        try_quickly([interpreter(), program, *words], tmp_path / "scratch", updates=3, timeout=150)

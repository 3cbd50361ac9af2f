"""`danling prove --resume`: a script that continues bitwise, and the first thing that differs in those that do not."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.proved import proved
from support.warm import interpreter

from danling.prove.differences import NotChecked
from danling.prove.resume import ResumeProof
from danling.prove.starts import Script

pytestmark = pytest.mark.timeout(500)

SCRIPT = """
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

words = sys.argv[1:]
resumes = "resume" in words
torch.manual_seed(0)
inputs = torch.randn(64, 6, generator=torch.Generator().manual_seed(2))
labels = inputs[:, :3].argmax(1)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=64)
step = 0
if resumes:
    saved = torch.load("last.pt", weights_only=False)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
    if "schedule" not in words:
        schedule.load_state_dict(saved["schedule"])
    if "dropout" not in words:
        torch.set_rng_state(saved["rng"])
    if "weights" in words:
        model[0].weight.data[0, 0] += 1e-3
for epoch in range(step // 8, 4):
    seed = 0 if "order" in words and resumes else epoch
    order = torch.randperm(64, generator=torch.Generator().manual_seed(seed)).tolist()
    loader = DataLoader(TensorDataset(inputs, labels), 8, sampler=order, generator=torch.Generator())
    for number, (x, y) in enumerate(loader):
        if number < step - epoch * 8:
            continue
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()
        step += 1
        if step % 3 == 0 and "never" not in words:
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
            torch.save({**states, "step": step, "rng": torch.get_rng_state()}, "last.pt")
"""

CASES = {
    # words: exit code, what differs first, the update that it begins with and the one that differs
    "": (0, None, 13, None),
    "order": (1, "samples", 13, 13),
    "dropout": (1, "loss", 13, 13),
    "schedule": (1, "weights", 13, 14),
    "weights": (1, None, None, None),
}


@pytest.mark.parametrize("word", CASES)
def test_resume_is_compared_with_an_undisturbed_start(word: str, tmp_path: Path) -> None:
    code, first, begins, differs = CASES[word]
    command = f"{interpreter()} train.py resume {word}"
    found, report = proved(
        tmp_path, options=["--resume", command, "--updates", "14"], script=SCRIPT
    )
    assert (found, report["first"], report["begins"], report["differs"]) == (
        code,
        first,
        begins,
        differs,
    ), report
    assert report["checks"][0][1] == "ok" and not (tmp_path / "last.pt").exists()


@pytest.mark.slow
def test_resume_without_a_checkpoint_is_not_judged(tmp_path: Path) -> None:
    options = ["--resume", f"{interpreter()} train.py never saves", "--updates", "5"]
    code, report = proved(tmp_path, "never saves", options=options, script=SCRIPT)
    assert code == 2 and "it finds no checkpoint of the first 5 updates" in report["summary"], (
        report
    )


def test_rank_with_the_cause_is_named_and_no_later_one(tmp_path: Path) -> None:
    """Of two ranks that differ in the same update, where gradients are averaged."""

    def line(update: int, **others: int) -> dict[str, int]:
        return {
            "samples": update,
            "loss": 0,
            "gradients": 0,
            "before": update,
            "after": update + 1,
            **others,
        }

    whole = [[line(update) for update in range(3)] for _ in range(2)]
    script = Script(command=["python"], scratch=tmp_path, one=["python"])
    proof = ResumeProof(script, ["python"], updates=2)
    proof.report.processes = 2
    resumed = [[line(1, loss=loss, gradients=1, after=9)] for loss in (0, 1)]
    proof._resumes(whole, resumed, 1)
    assert proof.report.first == "loss"
    assert "on rank 1" in proof.report.checks[-1][2]


def test_resume_on_another_number_of_processes_is_not_judged(tmp_path: Path) -> None:
    script = Script(command=["python"], scratch=tmp_path, one=["python"])
    proof = ResumeProof(script, ["python", "train.py"], updates=2)
    with pytest.raises(NotChecked, match=r"starts 2 processes.*'python train.py', which starts 1"):
        proof._have_same_ranks([[], []], [[]], proof.resumed)

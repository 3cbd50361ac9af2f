"""`danling prove` on scripts of several processes: right ones, mistakes, and what cannot be compared."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.proved import proved

pytestmark = pytest.mark.timeout(500)

slow = pytest.mark.slow

RIGHT = {
    "ddp": ["clipped"],
    "fsdp2 in bf16": ["fsdp2", "bf16", "window", "clipped"],
    "fsdp1": ["fsdp1"],
    "fsdp1 with joined parameters": ["fsdp1", "flat"],
    "windows": ["window"],
    "bf16": ["bf16"],
    "one sequence of batches": ["same samples"],
    "a constant divisor": ["constant"],
    "own batches": ["shown"],
    "batch norm": ["batch norm"],
    "batch norm, compiled": ["batch norm", "compiled"],
    "an optimizer that calls another one": ["nested"],
}


@pytest.mark.parametrize(
    "words",
    [pytest.param(w, id=name, marks=[] if name == "ddp" else slow) for name, w in RIGHT.items()],
)
def test_right_script_is_not_accused(words: list[str], tmp_path: Path) -> None:
    code, report = proved(tmp_path, *words, warm=words != ["shown"])
    assert (code, report["verdict"]) == (0, "same"), report
    is_switched = any("uses its running statistics" in note for note in report["notes"])
    assert is_switched == ("batch norm" in words)
    assert report["parameters"] == (1 if "flat" in words else 7)
    assert report["updates"] == (1 if "constant" in words else 2)
    assert os.listdir(tmp_path) == ["train.py"]


WRONG = {
    # words: of the summary or the facts, and parameters whose gradients differ
    "mean of means": (["mean of means"], "mean of means", 7),
    "gradient over the world": (["over world"], "the gradient is 1/2 of that of one process", 7),
    "gradients not summed": (["not summed"], "a sum over ranks is missing", 7),
    "clipped by the shard": (["fsdp2", "clipped alone"], "", 7),
    "mean of means in bf16": (["mean of means", "bf16"], "mean of means", 7),
    "seeds of the ranks": (["seeded", "not summed"], "the ranks begin with different weights", 0),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_script_is_accused(case: str, tmp_path: Path) -> None:
    words, sentence, number = WRONG[case]
    code, report = proved(tmp_path, *words)
    assert (code, report["verdict"], report["step"]) == (1, "different", 1), report
    assert sentence in report["summary"] and len(report["gradients"]) == number, report


REFUSED = {
    "own statistics": "batch normalization without running statistics (BatchNorm1d)",
    "noise": "draws random numbers",
    "own loader": "no batch of a torch DataLoader was seen",
    "one update": "it ended after 1 updates",
    "no gradient": "the gradients of all updates are zero",
    "statistic of the batch": "the gradient of the joined batch is no sum of those of the ranks' batches",
}


RUNNER = """
import torch
from torch import nn

import danling as dl


class Runner(dl.Runner):
    def __init__(self, config):
        super().__init__(config)
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.criterion = nn.MSELoss()
        self.datasets = {"train": torch.utils.data.TensorDataset(torch.ones(64, 2), torch.ones(64, 1))}


with Runner(dl.RunnerConfig({"epochs": 1, "dataloader": {"batch_size": 4}})) as runner:
    runner.train()
"""


def test_program_of_the_library_is_left_to_its_own_check(tmp_path: Path) -> None:
    code, report = proved(tmp_path, script=RUNNER)
    assert code == 2 and "`danling check-layout ddp=2 -- python ...`" in report["summary"], report


@pytest.mark.parametrize("case", REFUSED)
def test_uncomparable_script_is_not_judged(case: str, tmp_path: Path) -> None:
    code, report = proved(tmp_path, case)
    assert (code, report["verdict"]) == (2, "not checked"), report
    assert REFUSED[case] in report["summary"], report

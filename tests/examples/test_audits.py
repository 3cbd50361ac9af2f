"""Stretches of the examples, trained again by `danling audit`, are bitwise the stored ones: the first run that each of them makes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from support.warm import interpreter

from danling.cli.main import main

EXAMPLES = Path(__file__).parents[2] / "examples"
BY_STEPS = ("--steps", "12", "--checkpoint.interval", "4", "--evaluate_interval", "12")
BY_EPOCHS = ("--epochs", "2", "--checkpoint.interval", "1")
SMALL = ("--model.width", "16", "--model.depth", "1", "--model.context", "16")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
PROGRAMS: dict[str, tuple[str, ...]] = {
    "gan": ("gan.py", *BY_STEPS),
    "finetune": ("finetune.py", "--epochs", "4", "--checkpoint.interval", "1"),
    "contrastive": ("contrastive.py", *BY_EPOCHS),
    "digits": ("digits.py", *BY_EPOCHS),
    "early_stop": ("early_stop.py", *BY_EPOCHS),
    "gpt": ("gpt.py", *SMALL, *BY_STEPS),
    "graphs": ("graphs.py", *BY_EPOCHS),
    "images": ("images.py", *BY_EPOCHS, "--scheduler.total_steps", "28"),
    "lora": ("lora.py", *BY_EPOCHS[:1], "1", *BY_EPOCHS[2:]),
    "mixture": ("mixture.py", *SMALL, *BY_STEPS, "--dataloader.batch_size", "4"),
    "regression": ("regression.py", *BY_EPOCHS),
    "streaming": ("streaming.py", *BY_STEPS, "--scheduler.total_steps", "12"),
    "target": ("draft.py", "target", *BY_STEPS),
    "uncertainty": ("uncertainty.py", *BY_EPOCHS),
    "uneven": ("uneven.py", *BY_EPOCHS),
    "uneven on 2": (*TORCHRUN, "uneven.py", *BY_EPOCHS),
}
FIRST = {"finetune": "pretrain", "lora": "lora-base"}
"""The first run of programs that make several."""
QUICK = frozenset({"gan"})


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in PROGRAMS])  # fmt: skip
def test_example_equals_its_digests_bitwise(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [str(EXAMPLES / word) if word.endswith(".py") else word for word in PROGRAMS[name]]
    program = [interpreter(), *words, "--audit.digest_interval", "1"]
    subprocess.run(program, check=True, capture_output=True, timeout=200)
    runs = sorted(path.parents[1] for path in Path().rglob("config.full.yaml"))
    (run,) = [run for run in runs if run.parent.name == FIRST.get(name, runs[0].parent.name)]
    assert main(["audit", str(run), "--json", "--", *program]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["same"] and facts["divergences"] == [] and facts["from"] < facts["to"]

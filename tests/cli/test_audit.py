"""`danling audit` of runs that a user's own program has trained: bitwise again, parted on purpose, and what cannot be audited."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from support.warm import interpreter

from danling.audit.rerun import Stored, differences_of, stretch_of
from danling.cli.audit import stretch
from danling.cli.main import main
from danling.utils.locks import FileLock

PROGRAM = """
import os, sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
import danling as dl

class Program(dl.Runner):
    def __init__(self, config):
        super().__init__(config)
        points = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.0 if "GLOBAL" in os.environ else 0.2), nn.Linear(8, 3))
        self.criterion = nn.CrossEntropyLoss()
        target = points[:, :3].argmax(1)
        self.datasets = {"train": TensorDataset(points, target), "val": TensorDataset(points[:9], target[:9])}

    def complete_gradients(self):
        super().complete_gradients()
        if str(self.state.train.global_step + 1) == os.environ.get("DISTURB"):
            next(self.model.parameters()).grad.mul_(1.01)

budget = {"epochs": 3} if "epochs" in sys.argv else {"steps": 12}
interval = 1 if "epochs" in sys.argv else 4
with Program({"dir": sys.argv[1], "seed": 5, **budget, "checkpoint.interval": interval, "log_interval": 1,
              "dataloader": {"global_batch_size" if "GLOBAL" in os.environ else "batch_size": 8,
                             "num_workers": int(os.environ.get("WORKERS", 0))},
              "audit.digest_interval": 1, "optim": {"type": "adamw", "lr": float(os.environ.get("RATE", 0.01))}}) as runner:
    runner.train()
    if "AFTERWARDS" in os.environ:
        runner.load_checkpoint(os.environ["AFTERWARDS"])
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("audited")
    (place / "train.py").write_text(PROGRAM)
    for name, words in (("run", []), ("epochs", ["epochs"])):
        subprocess.run([interpreter(), "train.py", name, *words], cwd=place, check=True, capture_output=True)
    return place


@pytest.fixture(autouse=True)
def _in_place(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


def audit(run: str, *words: str) -> int:
    return main(["audit", run, "--json", "--", interpreter(), "train.py", run.split(":")[0], *words])


def files(run: str) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path(run).rglob("*") if path.is_file()}


@pytest.mark.parametrize(("run", "words"), [("run", []), ("run:0..8", []), ("epochs:6..", ["epochs"])])
def test_a_stretch_that_is_trained_again_is_bitwise_the_stored_one(
    run: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(run.split(":")[0])
    assert audit(run, *words) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["same"] and facts["differing"] == [] and facts["divergences"] == [] and facts["environment"] == {}
    assert (facts["from"], facts["to"]) == {"run": (8, 12), "run:0..8": (0, 8), "epochs:6..": (6, 18)}[run]
    assert files(run.split(":")[0]) == before


def test_a_stretch_that_parts_says_at_which_update_and_what_parted_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DISTURB", "7")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert main(["audit", "run:4..8", "--", interpreter(), "train.py", "run"]) == 1
    text = capsys.readouterr().out
    assert "updates 5 to 8: not the same as" in text and "first difference at step 7: gradients" in text
    assert "model/0.weight" in text and "variables.OMP_NUM_THREADS" in text


def test_another_program_and_one_that_fails_are_refused_with_what_they_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RATE", "0.5")
    assert audit("run") == 2
    assert "optim.lr" in capsys.readouterr().err
    # From scratch no resume compares the settings: it is refused before it trains.
    assert audit("run:0..8") == 2
    told = capsys.readouterr().err
    assert "Expected the program to have the settings of the run" in told and "optim.lr: stored 0.01, now 0.5" in told
    assert "Training from step" not in told
    assert "danling: 1 of 2: the program trains updates 1 to 8 again, which took the run 0:00:" in told
    assert "2 of 2" not in told
    assert main(["audit", "run", "--", interpreter(), "-c", "print('no runner here')"]) == 2
    assert "no checkpoint there; the end of what it printed:\nno runner here" in capsys.readouterr().err


def test_what_a_program_does_after_the_stretch_is_not_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AFTERWARDS", "ckpt-s000000000004")
    assert main(["audit", "run:4..8", "--", interpreter(), "train.py", "run"]) == 0
    said = capsys.readouterr().out
    assert "updates 5 to 8: bitwise the same" in said
    assert (
        "The program failed after this stretch, which is not compared: danling.checkpoints.errors.CheckpointNotFound: "
        in said
    )
    monkeypatch.setenv("DISTURB", "7")
    assert audit("run:4..8") == 1
    assert "CheckpointNotFound" in json.loads(capsys.readouterr().out)["failed"]


SEVERAL = """
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
import danling as dl

class Program(dl.Runner):
    def __init__(self, config):
        super().__init__(config)
        points = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
        self.model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, self.config.classes))
        self.criterion = nn.CrossEntropyLoss()
        self.datasets = {"train": TensorDataset(points, points[:, : self.config.classes].argmax(1))}

def settings(lineage, classes, **more):
    return dl.RunnerConfig(lineage=lineage, classes=classes, seed=5, steps=6, dataloader={"batch_size": 8}, optim={"type": "adamw"},
                           checkpoint={"interval": 3, "exclude_from_loading": ["model.2"]}, **more)

with Program(settings("base", 4)) as runner:
    runner.train()
    base = runner.workspace.checkpoints
look = settings("teacher", 4, resume=str(base / "latest.pth"), dir="tuned")
look.checkpoint.update(load_only=True, exclude_from_loading=None)
with Program(look) as teacher:
    scale = float(teacher.model[0].weight.abs().sum())
tune = settings("tuned", 3, dir="tuned")
tune.optim.lr = scale * 1e-3
with Program.from_pretrained(tune, base) as runner:
    runner.train()
    tuned = runner.workspace.checkpoints
with Program.from_checkpoint(tuned, {"checkpoint.load_only": True}) as runner:
    print("looked at", runner.state.train.global_step)
with Program(settings(*sys.argv[1:], 2)) as runner:
    runner.train()
"""


@pytest.fixture
def several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SEVERAL)
    subprocess.run([interpreter(), "train.py", "other"], check=True, capture_output=True)
    found = [path.parents[1] for path in Path().rglob("config.full.yaml")]
    return {run.name if run.name == "tuned" else run.parent.name.partition("-")[0]: str(run) for run in found}


def test_each_of_the_runs_that_a_program_makes_can_be_audited(
    several: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    program = [interpreter(), "train.py", "other"]
    assert sorted(several) == ["base", "other", "tuned"]
    before = files(".")
    for run in several.values():
        assert main(["audit", run, "--json", "--", *program]) == 0, run
        facts = json.loads(capsys.readouterr().out)
        assert facts["same"] and facts["failed"] is None and (facts["from"], facts["to"]) == (3, 6)
    assert main(["audit", "tuned", "--scratch", "kept", "--", *program]) == 0
    # The run before it was trained whole, and the program ended where it would have begun another one.
    assert [path.name.partition("-")[0] for path in Path("kept", "others").iterdir()] == ["base"]
    assert "looked at" not in Path("kept", "output.log").read_text()
    # By its name alone, since runs of one program may have the same settings.
    assert main(["audit", several["other"], "--", interpreter(), "train.py", "else"]) == 2
    assert "are not the one that is meant" in capsys.readouterr().err
    assert {name: read for name, read in files(".").items() if not name.startswith("kept")} == before


def test_what_cannot_be_audited_is_refused_before_anything_is_started(capsys: pytest.CaptureFixture[str]) -> None:
    assert audit("none") == 3 and audit("run:1..3") == 2 and audit("run:8..4") == 2 and audit("run:a..b") == 2
    assert main(["audit", "run"]) == 2
    said = capsys.readouterr().err
    assert (
        "[4, 8, 12]. Received: 3" in said
        and "FROM before TO" in said
        and "RUN:FROM..TO" in said
        and "behind `--`" in said
    )
    lock = FileLock(Path("run", ".lock").absolute())
    assert lock.acquire() and audit("run") == 2
    assert "a run that no process writes to" in capsys.readouterr().err
    del lock


def test_parts_of_a_command_line_and_stretches() -> None:
    assert stretch("a:b:1..2") == (Path("a:b"), 1, 2) and stretch("a:..2") == (Path("a"), None, 2)
    stored = [Stored(Path(), 4, 0), Stored(Path(), 8, 0), Stored(Path(), 8, 1)]
    assert stretch_of(stored, None, None) == (stored[0], stored[2]) and stretch_of(stored, 0, 4) == (None, stored[0])
    assert stretch_of(stored[:1], None, None) == (None, stored[0])


@pytest.mark.parametrize(
    ("first", "second", "share"),
    [
        (torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]), 0.1),
        (torch.tensor([3.0, 4.0]).half(), torch.tensor([3.0, 4.0]), 0.0),
        (torch.zeros(2), -torch.zeros(2), 0.0),
        (torch.zeros(2), torch.ones(2), float("inf")),
        (torch.tensor([1j]), torch.tensor([1.0 + 0j]), 2**0.5),
        (torch.zeros(2), torch.zeros(3), None),
        (torch.arange(2), torch.arange(2) + 1, None),
        (2.0, 3.0, 0.5),
        (2, 3, None),
        ("a", "b", None),
    ],
)
def test_by_how_much_entries_differ(first: object, second: object, share: float | None) -> None:
    (found,) = differences_of({"model": {"a": first}}, {"model": {"a": second}})
    assert found.path == "model/a" and found.share == (share if share is None else pytest.approx(share))


def test_another_number_of_processes_is_within_a_tolerance_and_a_disturbed_update_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GLOBAL", "1")
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py", "global"]
    subprocess.run([interpreter(), "train.py", "global"], check=True, capture_output=True)
    assert main(["audit", "global", "--tolerance", "1e-5", "--", interpreter(), *words]) == 0
    said = capsys.readouterr().out
    assert "not the same as" in said and "Accepted with a tolerance of 1e-05." in said
    assert "Processes: 1 stored, 2 here." in said and "of their norm (" in said
    monkeypatch.setenv("DISTURB", "10")
    program = [interpreter(), "train.py", "global"]
    assert main(["audit", "global", "--tolerance", "1e-5", "--json", "--", *program]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert not facts["accepted"] and facts["ranks"] == [1, 1] and facts["shares"]["grad_norm"] > 1e-3
    assert main(["audit", "global", "--tolerance", "0.5", "--", *program]) == 0
    with pytest.raises(SystemExit):
        main(["audit", "global", "--tolerance", "-1", "--", interpreter(), *words])
    assert "expected a share from 0 to below 1" in capsys.readouterr().err

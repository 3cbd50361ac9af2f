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
if "NEXT" in os.environ:
    Program({"dir": "next"}).train()
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("audited")
    (place / "train.py").write_text(PROGRAM)
    for name, words in (("run", []), ("epochs", ["epochs"])):
        subprocess.run(
            [interpreter(), "train.py", name, *words], cwd=place, check=True, capture_output=True
        )
    return place


@pytest.fixture(autouse=True)
def _in_place(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


def audit(run: str, *words: str) -> int:
    return main(
        ["audit", run, "--json", "--", interpreter(), "train.py", run.split(":")[0], *words]
    )


def files(run: str) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path(run).rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("run", "words"), [("run", []), ("run:0..8", []), ("epochs:6..", ["epochs"])]
)
def test_retrained_stretch_equals_the_stored_one_bitwise(
    run: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(run.split(":")[0])
    assert audit(run, *words) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (
        facts["same"]
        and facts["differing"] == []
        and facts["divergences"] == []
        and facts["environment"] == {}
    )
    assert (facts["from"], facts["to"]) == {
        "run": (8, 12),
        "run:0..8": (0, 8),
        "epochs:6..": (6, 18),
    }[run]
    assert files(run.split(":")[0]) == before


def test_diverging_stretch_names_its_first_update_and_tensor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DISTURB", "7")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert main(["audit", "run:4..8", "--", interpreter(), "train.py", "run"]) == 1
    text = capsys.readouterr().out
    assert (
        "updates 5 to 8: not the same as" in text
        and "first difference at step 7: gradients" in text
    )
    assert "model/0.weight" in text and "variables.OMP_NUM_THREADS" in text


def test_another_program_and_a_failing_one_are_refused_with_their_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RATE", "0.5")
    assert audit("run") == 2
    assert "optim.lr" in capsys.readouterr().err
    # From scratch no resume compares the settings: the report has what differs.
    assert audit("run:0..8") == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["settings"]["optim.lr"] == [0.01, 0.5]
    assert (
        "danling: 1 of 2: the program trains updates 1 to 8 again, which took the run 0:00:"
        in said.err
    )
    assert main(["audit", "run", "--", interpreter(), "-c", "print('no runner here')"]) == 2
    assert (
        "no checkpoint there; the end of what it printed:\nno runner here"
        in capsys.readouterr().err
    )


def test_updates_after_the_stretch_are_not_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AFTERWARDS", "ckpt-s000000000004")
    assert main(["audit", "run:4..8", "--", interpreter(), "train.py", "run"]) == 0
    said = capsys.readouterr().out
    assert "updates 5 to 8: bitwise the same" in said
    assert (
        "failed after this stretch, which is not compared: danling.checkpoints.errors.CheckpointNotFound: "
        in said
    )
    monkeypatch.setenv("DISTURB", "7")
    assert audit("run:4..8") == 1
    assert "CheckpointNotFound" in json.loads(capsys.readouterr().out)["failed"]


def test_program_ends_before_it_begins_another_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NEXT", "1")
    assert audit("run:4..8") == 0
    assert json.loads(capsys.readouterr().out)["failed"] is None and not Path("next").exists()


def test_impossible_audit_is_refused_before_any_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        audit("none") == 3
        and audit("run:1..3") == 2
        and audit("run:8..4") == 2
        and audit("run:a..b") == 2
    )
    assert main(["audit", "run"]) == 2
    said = capsys.readouterr().err
    for words in ("[4, 8, 12]. Received: 3", "FROM before TO", "RUN:FROM..TO", "behind `--`"):
        assert words in said
    lock = FileLock(Path("run", ".lock").absolute())
    assert lock.acquire() and audit("run") == 2
    assert "a run that no process writes to" in capsys.readouterr().err
    del lock


def test_parts_of_a_command_line_and_stretches() -> None:
    assert stretch("a:b:1..2") == (Path("a:b"), 1, 2) and stretch("a:..2") == (Path("a"), None, 2)
    stored = [Stored(Path(), 4, 0), Stored(Path(), 8, 0), Stored(Path(), 8, 1)]
    assert stretch_of(stored, None, None) == (stored[0], stored[2]) and stretch_of(
        stored, 0, 4
    ) == (None, stored[0])
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
    assert found.path == "model/a" and found.share == (
        share if share is None else pytest.approx(share)
    )


def test_disturbed_update_is_outside_a_small_tolerance(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GLOBAL", "1")
    program = [interpreter(), "train.py", "global"]
    subprocess.run(program, check=True, capture_output=True)
    monkeypatch.setenv("DISTURB", "10")
    assert main(["audit", "global", "--tolerance", "1e-5", "--json", "--", *program]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert (
        not facts["accepted"] and facts["ranks"] == [1, 1] and facts["shares"]["grad_norm"] > 1e-3
    )
    assert main(["audit", "global", "--tolerance", "0.5", "--", *program]) == 0
    with pytest.raises(SystemExit):
        main(["audit", "global", "--tolerance", "-1", "--", *program])
    assert "--tolerance: Expected a number of at least 0" in capsys.readouterr().err


@pytest.mark.slow
def test_another_number_of_processes_is_within_a_tolerance(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GLOBAL", "1")
    words = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "train.py",
        "global",
    ]
    subprocess.run([interpreter(), "train.py", "global"], check=True, capture_output=True)
    assert main(["audit", "global", "--tolerance", "1e-5", "--", interpreter(), *words]) == 0
    said = capsys.readouterr().out
    assert "not the same as" in said and "Accepted with a tolerance of 1e-05." in said
    assert "Processes: 1 stored, 2 here." in said and "of their norm (" in said

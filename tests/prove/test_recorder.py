"""What `danling prove` leaves as it was: the weights of a script, its `sitecustomize`, and the processes of the machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.patience import patience
from support.proved import ROOT, SCRIPT, proved

import danling.prove
from danling.prove.guard import marked
from danling.prove.inside.samples import CannotCompare, join
from danling.prove.inside.stacks import assembled
from danling.prove.starts import mirror, one_process

pytestmark = pytest.mark.timeout(500)

SITE = ROOT / "danling" / "prove" / "site"


def wait_for(condition: Callable[[], bool], timeout: float) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + patience(timeout)
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def trained(place: Path, words: list[str], environment: dict[str, str]) -> dict[str, torch.Tensor]:
    """Return the weights of the script after four updates in one process."""
    (place / "train.py").write_text(SCRIPT)
    file = place / "weights.pt"
    command = [sys.executable, "train.py", *words, "writes", str(file)]
    subprocess.run(command, cwd=place, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, check=True)
    weights: dict[str, torch.Tensor] = torch.load(file)
    return weights


def test_recorder_changes_no_weight(tmp_path: Path) -> None:
    """With dropout and clipping, in the mode that compares resumes; the script has its own `sitecustomize` too."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text(
        "import os\nos.environ['OWN'] = '1'\nopen(os.environ['SEEN'], 'a').write('x')\n"
    )
    (tmp_path / "records").mkdir()
    seen = tmp_path / "seen"
    job = json.dumps({"directory": str(tmp_path / "records"), "updates": 9, "mode": "resume"})
    common = {"SEEN": str(seen)}
    without = trained(tmp_path, ["same samples", "clipped"], {**common, "PYTHONPATH": str(own)})
    paths = os.pathsep.join([str(SITE), str(own)])
    with_it = trained(tmp_path, ["same samples", "clipped"], {**common, "PYTHONPATH": paths, "DANLING_PROVE": job})
    assert without.keys() == with_it.keys() and all(torch.equal(without[name], with_it[name]) for name in without)
    assert len((tmp_path / "records" / "rank-0.jsonl").read_text().splitlines()) == 4
    assert seen.read_text() == "xx"


def test_killed_command_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, time\nopen(os.environ['HERE'], 'w').write(os.environ['DANLING_PROVE'])\ntime.sleep(500)\n"
    )
    here = tmp_path / "here"
    command = [sys.executable, "-m", "danling", "prove", "--ranks", "2", "--", sys.executable, "train.py"]
    process = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "HERE": str(here)})
    try:
        wait_for(lambda: here.exists() and here.read_text() != "", timeout=100)
        token = json.loads(here.read_text())["token"]
        assert marked(token)
        process.send_signal(signal.SIGKILL)
        wait_for(lambda: not marked(token), timeout=60)
    finally:
        process.kill()
        process.wait()


BAD = {
    "crashes": ("raise RuntimeError('out of luck')", "exit code 1 after 0 updates"),
    "reads its input": ("print(input('name: '))", "EOFError"),
    "has no update": ("import torch", "it ended after 0 updates"),
    "catches its end": ("import sys\ntry:\n    sys.exit(3)\nexcept SystemExit:\n    pass", "it ended after 0 updates"),
}


@pytest.mark.parametrize("case", [pytest.param(n, marks=[] if n == "crashes" else pytest.mark.slow) for n in BAD])
def test_script_that_fails_is_not_judged(case: str, tmp_path: Path) -> None:
    script, sentence = BAD[case]
    code, report = proved(tmp_path, script=script)
    assert (code, report["verdict"]) == (2, "not checked") and sentence in report["summary"], report


@pytest.mark.slow
def test_two_processes_of_one_rank_are_not_compared(tmp_path: Path) -> None:
    code, report = proved(tmp_path, "same samples", script="import os\nos.fork()\n" + SCRIPT, options=["--one", "true"])
    assert code == 2 and "two processes of the script train as rank 0" in report["summary"], report


def test_batches_are_as_they_were_outside_of_the_command() -> None:
    iterable = iter([1, 2])
    assert danling.prove.batches(iterable) is iterable


def test_batches_of_ranks_are_joined() -> None:
    one = {
        "input_ids": torch.tensor([[1, 2, 3]]),
        "labels": torch.tensor([[1, 2, 3]]),
        "names": ["a"],
        "pair": (torch.ones(1, 2), 3),
    }
    two = {
        "input_ids": torch.tensor([[4, 5]]),
        "labels": torch.tensor([[4, -100]]),
        "names": ["b"],
        "pair": (torch.zeros(1, 2), 3),
    }
    both = join([one, two])
    assert both["input_ids"].tolist() == [[1, 2, 3], [4, 5, 0]] and both["labels"].tolist() == [
        [1, 2, 3],
        [4, -100, -100],
    ]
    assert both["names"] == ["a", "b"] and both["pair"][0].tolist() == [[1, 1], [0, 0]] and both["pair"][1] == 3
    assert join([one, two], reverse=True)["input_ids"].tolist() == [[4, 5, 0], [1, 2, 3]]
    with pytest.raises(CannotCompare, match="other values"):
        join([{"tokens": torch.tensor(3)}, {"tokens": torch.tensor(4)}])


def test_parts_of_ranks_are_put_together() -> None:
    whole = torch.arange(12.0).reshape(4, 3)
    by_offset = [((0, 0), (4, 3), whole[:3]), ((3, 0), (4, 3), whole[3:])]
    by_hand = [((0, 0), (2, 3), whole[:2]), ((0, 0), (2, 3), whole[2:])]
    for pieces in (by_offset, by_hand):
        found = assembled(pieces, (4, 3))
        assert found is not None and torch.equal(found, whole)
    assert assembled(by_hand, (8, 3)) is None


@pytest.mark.parametrize(
    ("command", "one"),
    [
        ("torchrun --nproc-per-node 2 train.py --lr 2", "torchrun --nproc-per-node 1 train.py --lr 2"),
        (
            "python -m torch.distributed.run --nproc_per_node=4 t.py",
            "python -m torch.distributed.run --nproc_per_node=1 t.py",
        ),
        ("accelerate launch --num_processes 2 t.py", "accelerate launch --num_processes 1 t.py"),
        ("accelerate launch t.py", "accelerate launch --num_processes 1 t.py"),
        ("deepspeed --num_gpus 2 t.py", "deepspeed --num_gpus 1 t.py"),
        ("python t.py", None),
    ],
)
def test_launcher_is_started_with_one_process(command: str, one: str | None) -> None:
    found = one_process(command.split())
    assert found == (None if one is None else one.split())


def test_script_runs_in_a_copy_of_its_directory(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "data").mkdir(parents=True)
    (source / "data" / "small").write_text("a")
    (source / "data" / "large").write_bytes(bytes(2 << 20))
    (source / ".venv").mkdir()
    (source / ".venv" / "pyvenv.cfg").write_text("")
    copy = mirror(source, source / "scratch" / "work")
    (copy / "data" / "small").write_text("b")
    assert (source / "data" / "small").read_text() == "a" and (copy / "data" / "large").is_symlink()
    assert (copy / ".venv").is_symlink() and not (copy / "scratch" / "work").exists()

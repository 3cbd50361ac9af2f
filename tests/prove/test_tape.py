"""What `danling prove` leaves as it was: the weights of a script, its `sitecustomize`, and the processes of the machine."""

from __future__ import annotations

import json
import os
import pickle
import shlex
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
from support.warm import interpreter

import danling.prove
from danling.prove.comparison import Update, layout_notes
from danling.prove.guard import marked
from danling.prove.inside.samples import CannotCompare, Loaders, join
from danling.prove.inside.stacks import assembled
from danling.prove.inside.tape import _divisors_of
from danling.prove.starts import copy_directory, one_process

pytestmark = pytest.mark.timeout(500)

SITE = ROOT / "danling" / "prove" / "site"


def wait_for(condition: Callable[[], bool], timeout: float) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + patience(timeout)
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def trained(
    python: str, place: Path, words: list[str], environment: dict[str, str]
) -> dict[str, torch.Tensor]:
    """Return the weights of the script after four updates in one process."""
    (place / "train.py").write_text(SCRIPT)
    file = place / "weights.pt"
    command = [python, "train.py", *words, "writes", str(file)]
    subprocess.run(
        command, cwd=place, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, check=True
    )
    weights: dict[str, torch.Tensor] = torch.load(file)
    return weights


def test_tape_changes_no_weight(tmp_path: Path) -> None:
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
    words = ["same samples", "clipped"]
    without = trained(interpreter(), tmp_path, words, {**common, "PYTHONPATH": str(own)})
    paths = os.pathsep.join([str(SITE), str(own)])
    recorded = {**common, "PYTHONPATH": paths, "DANLING_PROVE": job}
    with_it = trained(sys.executable, tmp_path, words, recorded)
    assert without.keys() == with_it.keys() and all(
        torch.equal(without[name], with_it[name]) for name in without
    )
    assert len((tmp_path / "records" / "rank-0.jsonl").read_text().splitlines()) == 4
    assert seen.read_text() == "xx"


def test_killed_command_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, time\nopen(os.environ['HERE'], 'w').write(os.environ['DANLING_PROVE'])\ntime.sleep(500)\n"
    )
    here = tmp_path / "here"
    command = [
        sys.executable,
        "-m",
        "danling",
        "prove",
        "--ranks",
        "2",
        "--",
        sys.executable,
        "train.py",
    ]
    process = subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "HERE": str(here)}
    )
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
    "catches its end": (
        "import sys\ntry:\n    sys.exit(3)\nexcept SystemExit:\n    pass",
        "it ended after 0 updates",
    ),
}


@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=[] if n == "crashes" else pytest.mark.slow) for n in BAD]
)
def test_failing_script_is_not_judged(case: str, tmp_path: Path) -> None:
    script, sentence = BAD[case]
    code, report = proved(tmp_path, script=script)
    assert (code, report["verdict"]) == (2, "not checked") and sentence in report["summary"], report


@pytest.mark.slow
def test_two_processes_of_one_rank_are_not_compared(tmp_path: Path) -> None:
    code, report = proved(
        tmp_path,
        "same samples",
        script="import os\nos.fork()\n" + SCRIPT,
        options=["--one", "true"],
        warm=False,
    )
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
    assert (
        both["names"] == ["a", "b"]
        and both["pair"][0].tolist() == [[1, 1], [0, 0]]
        and both["pair"][1] == 3
    )
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
        (
            "torchrun --nproc-per-node 2 train.py --lr 2",
            "torchrun --nproc-per-node 1 train.py --lr 2",
        ),
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


def test_script_runs_in_a_copy_of_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, outside = tmp_path / "source", tmp_path / "outside"
    (source / "data").mkdir(parents=True)
    outside.mkdir()
    (source / "data" / "small").write_text("a")
    (source / "data" / "model.pt").write_bytes(bytes(2 << 20))
    (source / ".venv").mkdir()
    (source / ".venv" / "pyvenv.cfg").write_text("")
    (source / "last").symlink_to("data")
    (source / "others").symlink_to(outside)
    copy = source / "data" / "scratch" / "work"
    assert copy_directory(source, copy) == []
    for name in ("small", "model.pt"):
        # Through the link, too, which leads to the copy.
        (copy / "last" / name).write_text("b")
        assert (copy / "data" / name).read_text() == "b"
    assert (source / "data" / "small").read_text() == "a"
    assert (source / "data" / "model.pt").read_bytes() == bytes(2 << 20)
    assert (copy / ".venv").is_symlink() and (copy / "others").resolve() == outside
    assert not (copy / "data" / "scratch").exists()
    monkeypatch.setattr("danling.prove.starts._COPIED_BYTES", 1 << 20)
    assert copy_directory(source, source / "data" / "scratch" / "second") == [
        source / "data" / "model.pt"
    ]


def test_each_iterator_has_its_own_batches_though_others_have_ended(tmp_path: Path) -> None:
    """As in a loop over epochs, where the iterator of an epoch is deleted before that of the next one is made."""
    layout = Loaders(None, (), "joined")
    data = torch.arange(3.0)
    for row in data:
        layout.fetch(_Iterator(), lambda row=row: row[None])
    (tmp_path / "rank-0.batches").write_bytes(pickle.dumps(layout.kept))
    (tmp_path / "lengths.json").write_text("{}")
    one = Loaders(tmp_path, [0], "joined")
    assert torch.cat([one.fetch(_Iterator(), list) for _ in data]).tolist() == data.tolist()


class _Iterator:
    pass


@pytest.mark.parametrize(
    ("made", "divisors"),
    [
        (lambda loss: loss, []),
        (lambda loss: loss / 2, [2]),
        (lambda loss: loss * 0.25, [4]),
        (lambda loss: 8 * loss / torch.tensor(3.0), [3, 1 / 8]),
        (lambda loss: loss / loss.detach().requires_grad_(), []),
        (lambda loss: (loss / 2).square(), []),
    ],
)
def test_divisors_of_a_loss_are_read(
    made: Callable[[torch.Tensor], torch.Tensor], divisors: list[float]
) -> None:
    loss = made(torch.nn.Linear(2, 1)(torch.ones(1, 2)).sum())
    assert list(_divisors_of(loss)) == pytest.approx(divisors)


@pytest.mark.parametrize(
    ("full", "short", "is_noticed"),
    [
        ([[2.0], [65536.0, 2.0]], [[2.0]], True),
        ([[2.0], [2.0]], [[1.0]], False),
        ([[7.0], [7.0]], [[7.0]], False),
    ],
)
def test_short_window_is_noticed_by_its_divisor(
    full: list[list[float]], short: list[list[float]], is_noticed: bool
) -> None:
    common = {
        "groups": [],
        "unchanged": [],
        "dropped": 0,
        "start": {},
        "switched": [],
        "has_group": True,
    }
    updates = [Update([{**common, "divisors": divisors}]) for divisors in (full, short)]
    notes = list(layout_notes(updates))
    assert [note.partition(":")[0] for note in notes] == (
        ["update 2 has 1 micro-batches instead of 2, and divides their losses by 2"]
        if is_noticed
        else []
    )


def test_scratch_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    """It has a copy of the working directory, and pickles that are read again."""
    (tmp_path / "source").mkdir()
    scratch = tmp_path / "scratch"
    scratch.mkdir(mode=0o777)
    options = ["--ranks", "1", "--scratch", str(scratch)]
    code, report = proved(tmp_path / "source", script="raise SystemExit(1)", options=options)
    assert code == 2 and (scratch / "layout").exists(), report
    assert scratch.stat().st_mode & 0o777 == 0o700


def test_unstartable_command_is_named(tmp_path: Path) -> None:
    code, report = proved(tmp_path, options=["--ranks", "2", "--one", "missing train.py"])
    assert code == 2 and report["summary"].startswith(
        "Expected a program that can be started. Received: 'missing'"
    )


@pytest.mark.slow
def test_one_process_has_to_be_one(tmp_path: Path) -> None:
    two = f"{shlex.quote(sys.executable)} -m torch.distributed.run --nproc-per-node 2 train.py"
    code, report = proved(tmp_path, options=["--ranks", "2", "--one", two])
    assert code == 2 and "which starts 2" in report["summary"], report

"""Ranks that are killed, stopped, or end by themselves: the others and the replacements end in the state of one undisturbed process."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.process_tree import descendants, seconds_since_boot
from support.processes import server_processes

from . import mutated, plain_loop, training
from .supervised import Ended, run_ranks, train_ranks

_STEPS = 120
_SETTINGS = {"steps": _STEPS}


@pytest.mark.parametrize(
    ("ranks", "faults", "changes"),
    [
        (2, "1:reduce:10:kill", 1),
        (3, "0:in_reduce:10:kill;1:stepped:12:exit", 2),
        (3, "2:leaf:10:raise", 1),
        (3, "1:reduced:10:kill;2:formed:2:kill", 1),
        (2, "1:reduced:10:kill;2:took_state:1:kill;3:born:1:kill", 1),
        (2, "1:stepped:10:stop", 1),
        # The third rank alone has made the update, and dies while it sends it.
        (3, "0:reduced:10:abandon;1:reduced:10:abandon;2:sending:1:kill", 1),
        # Another rank than its neighbours waits for one that wakes only if these close their sockets.
        (4, "2:reduce:10:late", 1),
    ],
)
def test_loop_by_hand_ends_as_if_undisturbed(
    ranks: int, faults: str, changes: int, tmp_path: Path
) -> None:
    ended = run_ranks(
        plain_loop.main, ranks, tmp_path / "report", variables={"FAULTS": faults, "FENCE": "0.3"}
    )
    assert not ended.verdict
    assert ended.hashes == {plain_loop.undisturbed(plain_loop.UPDATES)}
    assert changes <= max(note["changes"] for note in ended.ends)
    assert all(note["repeated"] <= note["changes"] for note in ended.ends)


@pytest.mark.parametrize(
    ("broken", "ranks", "faults"),
    [
        pytest.param(
            mutated.puts_in_early, 3, "0:reduced:10:abandon;1:reduced:10:abandon;2:sending:1:kill"
        ),
        # Of three ranks each is a neighbour of the dead one, and wakes by itself.
        pytest.param(mutated.skips_leave, 4, "2:reduce:10:late", marks=pytest.mark.slow),
    ],
)
def test_process_with_a_broken_rule_fails_its_test(
    broken: Callable[[], None],
    ranks: int,
    faults: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(plain_loop, "main", broken)
    # Far less than the timeout of a collective, which would end the wait that a broken rule makes.
    monkeypatch.setattr(f"{__name__}.run_ranks", partial(run_ranks, timeout=20.0))
    with pytest.raises(AssertionError):
        test_loop_by_hand_ends_as_if_undisturbed(ranks, faults, 1, tmp_path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The end of one process without elastic ranks."""
    return training.train(str(tmp_path_factory.mktemp("alone")), **_SETTINGS)[0]


def _train(
    ranks: int, faults: str, directory: Path, settings: dict[str, Any] = _SETTINGS, **elastic: Any
) -> Ended:
    return train_ranks(
        ranks,
        directory,
        faults=faults,
        settings=settings,
        elastic={"fence_seconds": 0.3, **elastic},
    )


def _steps(directory: Path, name: str) -> list[int]:
    lines = (directory / "run" / "metrics.jsonl").read_text().splitlines()
    return [record["step"] for line in lines if name in (record := json.loads(line))]


def test_rank_that_ends_before_the_training_ends_the_others_with_a_plain_error(
    tmp_path: Path,
) -> None:
    # In the batch that is evaluated before the first update.
    ended = train_ranks(3, tmp_path, faults="1:born:1:kill", function=training.noted_error)
    assert "ended before all ranks trained" in ended.verdict
    assert {note["error"] for note in ended.notes if "error" in note} == {"RuntimeError"}


@pytest.mark.parametrize("shards", [False, True])
def test_collective_that_fails_after_the_step_is_an_error(shards: bool, tmp_path: Path) -> None:
    # The step cannot be taken back, and the update would be made twice.
    settings, elastic = {"steps": 6, "evaluate_interval": None}, {"shard_state": shards}
    ended = train_ranks(
        3,
        tmp_path,
        settings=settings,
        elastic=elastic,
        function=training.noted_error,
        KIND="collecting",
    )
    texts = [note["text"] for note in ended.notes if note.get("error") == "RuntimeError"]
    assert len(texts) == 2
    assert all("the step of update 3 cannot be taken back" in text for text in texts)
    assert "Every rank that had the state of the run has died" in ended.verdict


def test_second_training_of_a_start_is_refused(tmp_path: Path) -> None:
    ended = train_ranks(2, tmp_path, function=training.two_trainings)
    assert ended.codes == [0, 0]
    refused = [note["refused"] for note in ended.notes if "refused" in note]
    assert sum("a second call of train()" in text for text in refused) == 2
    assert sum("one runner for each start" in text for text in refused) == 2


def test_fewer_ranks_than_needed_save_and_end(undisturbed: str, tmp_path: Path) -> None:
    ended = _train(2, "1:leaf:40:kill", tmp_path, min_ranks=2, replacements=0, wait_seconds=0.5)
    assert sorted(ended.codes) == [-9, 143]
    digest, _ = training.train(
        str(tmp_path), **_SETTINGS, dir=str(tmp_path / "run"), auto_resume=True
    )
    assert digest == undisturbed
    assert _steps(tmp_path, "train/loss") == list(range(1, _STEPS + 1))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_workers_of_loaders_are_started_again(tmp_path: Path) -> None:
    begun = seconds_since_boot()
    short = {"steps": 24}  # each pass, which has few updates, starts workers
    digest, _ = training.train(str(tmp_path / "alone"), **short)
    loaders = {
        "global_batch_size": 16,
        "micro_batch_size": 4,
        "num_workers": 2,
        "multiprocessing_context": "fork",
    }
    ended = _train(2, "1:leaf:15:kill", tmp_path, {**short, "dataloader": loaders})
    ended.check_changes()
    assert ended.hashes == {digest}
    # A worker of torch's looks every five seconds whether the process that it reads for is there.
    while descendants(os.getpid(), without=server_processes(), since=begun):
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("ranks", "faults"),
    [
        pytest.param(3, "1:leaf:15:kill", id="in a micro-batch"),
        pytest.param(3, "1:reduced:10:kill", id="after the sums"),
        pytest.param(2, "0:stepped:12:kill", id="the main process after an update"),
        pytest.param(3, "0:evaluating:2:kill", id="the main process in an evaluation"),
        pytest.param(3, "2:evaluating:3:kill", id="another one in an evaluation"),
        pytest.param(2, "0:save:4:kill", id="the main process in a save"),
        pytest.param(3, "2:saved:3:exit", id="by an exit after a save"),
        pytest.param(3, "1:leaf:15:raise", id="by an error"),
        pytest.param(3, "1:leaf:15:leave", id="by sys.exit of the program"),
        pytest.param(3, "1:leaf:15:kill;2:leaf:12:kill", id="two of three"),
        pytest.param(2, "1:leaf:15:kill;0:stepped:70:kill", id="one, then the other"),
        pytest.param(2, "1:stepped:11:stop", id="stopped for long"),
        pytest.param(2, "1:leaf:15:kill;2:born:1:kill", id="and a replacement at birth"),
    ],
)
def test_training_ends_as_if_undisturbed(
    ranks: int, faults: str, undisturbed: str, tmp_path: Path
) -> None:
    ended = _train(ranks, faults, tmp_path)
    ended.check_changes()
    assert ended.hashes == {undisturbed}
    assert _steps(tmp_path, "train/loss") == list(range(1, _STEPS + 1))
    assert _steps(tmp_path, "val/loss") == list(range(10, _STEPS + 1, 10))
    assert _steps(tmp_path, "elastic/ranks")

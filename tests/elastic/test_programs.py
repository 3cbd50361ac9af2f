"""What programs do in hooks of their own: it is put back with an update that is made again, made once, or refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from . import programs, training
from .supervised import Ended, train_ranks

_SETTINGS: dict[str, Any] = {"steps": 20, "evaluate_interval": None}


def _means(directory: Path) -> dict[int, float]:
    records = map(json.loads, (directory / "run" / "metrics.jsonl").read_text().splitlines())
    return {
        record["step"]: record["train_mean/size"]
        for record in records
        if "train_mean/size" in record
    }


def _train(kind: str, directory: Path, faults: str, **elastic: Any) -> Ended:
    elastic = {"fence_seconds": 0.3, **elastic}
    return train_ranks(
        3,
        directory,
        faults=faults,
        settings=_SETTINGS,
        elastic=elastic,
        function=programs.rank,
        KIND=kind,
    )


def _attributes(directory: Path) -> str:
    payload: dict[str, Any] = torch.load(
        directory / "run" / "checkpoints" / "latest.pth", weights_only=True
    )
    return str(payload["attributes"])


@pytest.mark.parametrize(
    ("kind", "faults", "shards"),
    [
        pytest.param(
            "Earlier", "1:leaf:9:kill;0:leaf:30:kill", False, id="changes before the sums"
        ),
        pytest.param(
            "Earlier",
            "1:leaf:9:kill",
            True,
            id="changes before the sums, with shards",
            marks=pytest.mark.slow,
        ),
        pytest.param("SavesInStep", "2:save:1:kill;0:saved:5:kill", False, id="saves in step"),
        pytest.param(
            "Careful",
            "1:leaf:9:kill;0:evaluating:5:kill",
            False,
            id="writes weights and puts them back",
        ),
        pytest.param(
            "ObserverEvaluates", "2:evaluating:4:kill", False, id="evaluates in an observer"
        ),
        pytest.param(
            "EvaluatesAtPassStart", "0:evaluating:3:kill", False, id="evaluates where a pass begins"
        ),
        pytest.param(
            "ReadsRemotelyAgain", "", False, id="fails once with an error as of a lost rank"
        ),
    ],
)
def test_program_ends_as_if_undisturbed(
    kind: str, faults: str, shards: bool, tmp_path: Path
) -> None:
    alone, many = tmp_path / "alone", tmp_path / "many"
    many.mkdir()
    training.train_program(programs.KINDS[kind], str(alone), **_SETTINGS, dir=str(alone / "run"))
    ended = _train(kind, many, faults, shard_state=shards)
    ended.check_changes()
    name = "run/checkpoints/latest.pth"
    assert training.digest_of_file(many / name) == training.digest_of_file(alone / name)
    assert _attributes(many) == _attributes(alone)
    saved, expected = (
        {path.name for path in each.glob("run/checkpoints/*.pth")} for each in (many, alone)
    )
    assert saved == expected


@pytest.mark.parametrize(
    ("kind", "faults", "text"),
    [
        (
            "WeightsEarlier",
            "",
            "Received: the weights of the model, changed in place before the step",
        ),
        ("LargeEarlier", "", "Received: self.bank, changed in place before the step"),
        (
            "MomentumEncoder",
            "",
            "Received: the weights of the model, changed in place before the step",
        ),
        (
            "EvaluatesInStep",
            "2:evaluating:4:kill",
            "what follows it in step() after update 6 cannot be made again",
        ),
        (
            "SavesAndEvaluatesInStep",
            "2:evaluating:4:kill",
            "what follows it in step() after update 6 cannot be made again",
        ),
        # Not again and again.
        ("ReadsRemotely", "", "503: Connection reset by peer"),
    ],
)
def test_what_cannot_be_made_again_is_refused(
    kind: str, faults: str, text: str, tmp_path: Path
) -> None:
    ended = _train(kind, tmp_path, faults)
    texts = [
        note["text"] for note in ended.notes if note.get("error") in ("ValueError", "RuntimeError")
    ]
    assert texts and all(text in each for each in texts)
    assert not ended.hashes


def test_means_that_a_rank_takes_with_it_are_named_and_those_after_it_are_whole(
    tmp_path: Path,
) -> None:
    settings = {"steps": 60, "evaluate_interval": 5}
    alone, many = tmp_path / "alone", tmp_path / "many"
    many.mkdir()
    training.train_program(programs.Averages, str(alone), **settings, dir=str(alone / "run"))
    ended = train_ranks(
        3, many, faults="1:leaf:5:kill", settings=settings, function=programs.rank, KIND="Averages"
    )
    ended.check_changes()
    expected, found = _means(alone), _means(many)
    assert found.keys() == expected.keys()
    (log,) = (many / "run" / "logs").glob("*.log")
    named = [
        int(step)
        for step in re.findall(
            r"The next means of size leave out the updates up to (\d+)", log.read_text()
        )
    ]
    # None where a replacement has joined.
    differing = [step for step in expected if abs(found[step] - expected[step]) > 1e-6]
    assert 5 in differing
    assert all(any(step - 5 < last <= step for last in named) for step in differing)

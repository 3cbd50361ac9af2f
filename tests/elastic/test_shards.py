"""`elastic.shard_state`: the optimizer's state in shards, each on two ranks. Ranks that end one at a time lose nothing of it."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.chaos import SEED, report, share

from danling.elastic.shards import check_optimizer, owners, parts_of
from danling.optim import JointOptimizer

from . import mutated, training
from .supervised import Ended, train_ranks

_STEPS = 40
_SETTINGS = {"steps": _STEPS}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What one process without elastic ranks saves at the end."""
    return _alone(tmp_path_factory.mktemp("alone"), **_SETTINGS)


def _alone(directory: Path, **more: Any) -> str:
    training.train(str(directory), **more, dir=str(directory / "run"))
    return _saved(directory)


def _saved(directory: Path) -> str:
    return training.digest_of_file(directory / "run" / "checkpoints" / "latest.pth")


def _train(
    ranks: int,
    faults: str,
    directory: Path,
    *,
    settings: dict[str, Any] = _SETTINGS,
    shards: bool = True,
    function: Callable[[], None] = training.elastic_rank,
    **elastic: Any,
) -> Ended:
    elastic = {"fence_seconds": 0.3, "shard_state": shards, **elastic}
    return train_ranks(
        ranks, directory, faults=faults, settings=settings, elastic=elastic, function=function
    )


@pytest.mark.parametrize(
    ("ranks", "faults"),
    [
        pytest.param(3, "0:vote:9:kill", id="the main process before the vote"),
        pytest.param(3, "1:in_vote:9:kill", id="in the vote"),
        pytest.param(4, "2:vote_done:9:kill", id="after the vote"),
        pytest.param(3, "1:in_weights:9:kill", id="while weights are sent"),
        pytest.param(
            3, "0:weights_done:9:kill", id="the main process after the step", marks=pytest.mark.slow
        ),
        pytest.param(3, "1:leaf:15:kill", id="in a micro-batch", marks=pytest.mark.slow),
        pytest.param(3, "2:save:3:kill", id="in a save", marks=pytest.mark.slow),
        pytest.param(
            3, "0:saved:3:exit", id="the main process after a save", marks=pytest.mark.slow
        ),
        pytest.param(3, "1:leaf:15:raise", id="by an error", marks=pytest.mark.slow),
        pytest.param(3, "1:weights:9:stop", id="stopped for long", marks=pytest.mark.slow),
        pytest.param(3, "0:evaluating:2:kill", id="in an evaluation", marks=pytest.mark.slow),
        pytest.param(3, "1:vote_done:9:abandon", id="none, but one does not hear of the vote"),
        pytest.param(3, "0:weights_done:9:abandon", id="none, but one does not get the weights"),
        pytest.param(4, "0:leaf:12:kill;2:leaf:12:kill", id="two that are no neighbours at once"),
        pytest.param(
            4,
            "1:leaf:9:kill;0:exchange_done:1:abandon;3:exchange:2:kill",
            id="one while parts are sent",
        ),
        pytest.param(
            5, "1:leaf:9:kill;3:stepped:16:exit;0:weights:24:kill", id="one after another of five"
        ),
    ],
)
def test_training_ends_as_if_undisturbed(
    ranks: int, faults: str, undisturbed: str, tmp_path: Path
) -> None:
    ended = _train(ranks, faults, tmp_path)
    ended.check_changes()
    assert len(ended.hashes) == 1
    assert _saved(tmp_path) == undisturbed
    if "kill" not in faults and "exit" not in faults and "raise" not in faults:
        assert set(ended.codes) == {0}  # one that gives up takes the state of another over


_TWO_GIVE_UP = "1:reduced:9:abandon;2:reduced:9:abandon"
# The first rank has its new parts, another one gives the change up, and the third one, which had its own, ends.
_ONE_HAS_NEW_PARTS = "0:leaf:9:kill;3:taken:1:abandon;2:taken:1:kill"


@pytest.mark.parametrize(
    ("broken", "faults"),
    [
        pytest.param(
            mutated.drops_old_parts, _ONE_HAS_NEW_PARTS, id="old parts stay until all have theirs"
        ),
        pytest.param(mutated.skips_vote, _TWO_GIVE_UP, id="the vote comes before the step"),
    ],
)
def test_rule_keeps_what_is_lost_without_it(
    broken: Callable[[], None], faults: str, undisturbed: str, tmp_path: Path
) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    for directory in (right, wrong):
        directory.mkdir()
    assert not _train(4, faults, right, replacements=0).verdict
    assert _saved(right) == undisturbed
    assert (
        "Two ranks ended at once"
        in _train(4, faults, wrong, function=broken, replacements=0).verdict
    )


@pytest.mark.parametrize(
    "optim",
    [
        {"type": "sgd", "lr": 0.05, "momentum": 0.9, "nesterov": True},
        pytest.param({"type": "adagrad", "lr": 0.05}, marks=pytest.mark.slow),
        pytest.param({"type": "adafactor", "lr": 0.01}, marks=pytest.mark.slow),
        pytest.param({"type": "rmsprop", "lr": 0.001, "momentum": 0.9}, marks=pytest.mark.slow),
        pytest.param({"type": "nadam", "lr": 0.01}, marks=pytest.mark.slow),
    ],
    ids=lambda optim: optim["type"],
)
def test_other_optimizer_ends_as_if_undisturbed(optim: dict[str, Any], tmp_path: Path) -> None:
    settings = {"steps": 20, "optim": optim}
    alone = _alone(tmp_path / "alone", **settings)
    ended = _train(3, "2:weights:9:kill", tmp_path, settings=settings)
    assert not ended.verdict
    assert _saved(tmp_path) == alone


_POINTS = (
    "update",
    "reduced",
    "vote",
    "in_vote",
    "vote_done",
    "weights",
    "in_weights",
    "weights_done",
    "stepped",
)


@pytest.mark.slow
def test_random_faults_one_at_a_time_end_as_if_undisturbed(tmp_path: Path) -> None:
    settings = {"steps": 80}
    alone = _alone(tmp_path / "alone", **settings)
    choices, wanted = random.Random(SEED), share(1.0, otherwise=3)
    struck, jobs = 0, 0
    while struck < wanted:
        directory, ranks = tmp_path / str(jobs), choices.choice((3, 4, 5))
        directory.mkdir()
        members = choices.sample(range(ranks), min(3, ranks - 1))
        counts = [10 + 22 * index + choices.randrange(8) for index in range(len(members))]
        how = choices.choice(("kill", "kill", "exit"))
        faults = ";".join(
            f"{m}:{choices.choice(_POINTS)}:{count}:{how}" for m, count in zip(members, counts)
        )
        ended = _train(ranks, faults, directory, settings=settings)
        assert not ended.verdict, f"{ranks} ranks, {faults}: {ended.verdict}"
        assert _saved(directory) == alone, f"{ranks} ranks, {faults}"
        struck, jobs = struck + sum("struck" in note for note in ended.notes), jobs + 1
    report("elastic ranks with shards, one at a time", struck, jobs)


@pytest.mark.parametrize(
    ("ranks", "faults"),
    [
        pytest.param(3, "", id="of three"),
        pytest.param(4, "", id="of four", marks=pytest.mark.slow),
        pytest.param(5, "", id="of five"),
        pytest.param(4, "1:leaf:9:kill", id="after a change, when older parts are dropped"),
    ],
)
def test_each_state_is_on_two_ranks(
    ranks: int, faults: str, undisturbed: str, tmp_path: Path
) -> None:
    # After a change there are as many as it says: the replacement may come before the end or not.
    ended = _train(ranks, faults, tmp_path)
    left = {note["changes"][-1][1] if faults else ranks for note in ended.ends}
    saved = torch.load(tmp_path / "run" / "checkpoints" / "latest.pth", weights_only=True)
    whole = sum(
        value.nbytes for state in saved["optimizer"]["state"].values() for value in state.values()
    )
    kept = [note["has"] for note in ended.ends]
    assert not ended.verdict
    assert _saved(tmp_path) == undisturbed
    assert left == {len(kept)}
    assert sum(kept) == 2 * whole
    assert max(kept) < whole


def test_last_rank_saves_what_all_would_have(undisturbed: str, tmp_path: Path) -> None:
    ended = _train(3, "1:leaf:9:kill;2:leaf:30:kill", tmp_path, replacements=0)
    assert sorted(ended.codes) == [-9, -9, 0]
    assert _saved(tmp_path) == undisturbed


def test_saved_run_is_resumed_on_other_ranks(undisturbed: str, tmp_path: Path) -> None:
    # Two of three ranks are left: they save, and end.
    ended = _train(3, "1:leaf:15:kill", tmp_path, min_ranks=3, replacements=0, wait_seconds=0.5)
    assert sorted(ended.codes) == [-9, 143, 143]
    resumed = {**_SETTINGS, "auto_resume": True}
    for name, ranks, shards in (("shards", 4, True), ("replicas", 2, False)):
        directory = tmp_path / name
        shutil.copytree(tmp_path / "run", directory / "run")
        assert not _train(ranks, "", directory, settings=resumed, shards=shards).verdict
        assert _saved(directory) == undisturbed
    assert _alone(tmp_path, **resumed) == undisturbed


def test_neighbours_that_end_at_once_end_the_run_by_name(tmp_path: Path) -> None:
    ended = _train(4, "1:leaf:12:kill;2:leaf:12:kill", tmp_path)
    assert "Two ranks ended at once" in ended.verdict
    assert "Start the command again with auto_resume" in ended.verdict
    assert not ended.hashes
    assert set(ended.codes) == {-9, 1}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 20])
def test_shards_are_even_and_each_is_on_two_ranks(ranks: int) -> None:
    sizes = tuple(1 + (index * 7919) % 101 for index in range(60))
    found = [parts_of(sizes, ranks, rank) for rank in range(ranks)]
    loads = [
        sum(size for size, owner in zip(sizes, owners(sizes, ranks)) if owner == rank)
        for rank in range(ranks)
    ]
    assert max(loads) - min(loads) <= max(sizes)
    for index in range(len(sizes)):
        assert sum(index in each for each in found) == min(ranks, 2)


def _hooked(directory: Path, **more: str) -> Ended:
    settings, elastic = {"steps": 4, "evaluate_interval": None}, {"shard_state": True}
    return train_ranks(
        3,
        directory,
        settings=settings,
        elastic=elastic,
        function=training.noted_error,
        KIND="hooked",
        **more,
    )


def test_hooks_of_the_optimizer_see_whole_gradients_and_all_weights(tmp_path: Path) -> None:
    ended = _hooked(tmp_path)
    seen = [(note["stale"], note["missing"]) for note in ended.notes if "stale" in note]
    assert not ended.verdict
    assert seen == [(0, 0)] * 12


def test_parameters_in_another_order_are_refused(tmp_path: Path) -> None:
    ended = _hooked(tmp_path, MOVED="1")
    texts = [note["text"] for note in ended.notes if note.get("error") == "ValueError"]
    assert len(texts) == 3
    assert all("in another order" in text for text in texts)


class _Own(torch.optim.SGD):
    pass


def _weights() -> list[torch.Tensor]:
    return [torch.zeros(2, 2, requires_grad=True)]


@pytest.mark.parametrize(
    ("optimizer", "scales", "received"),
    [
        (torch.optim.LBFGS(_weights()), False, "LBFGS"),
        (torch.optim.Muon(_weights()), False, "Muon"),
        (_Own(_weights(), lr=0.1), False, "_Own"),
        (JointOptimizer(torch.optim.SGD(_weights(), lr=0.1)), False, "JointOptimizer"),
        (torch.optim.SGD(_weights(), lr=0.1), True, "precision='fp16'"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_optimizer_that_cannot_be_divided_is_refused(
    optimizer: torch.optim.Optimizer, scales: bool, received: str
) -> None:
    with pytest.raises(ValueError, match=f"Received: {received}.*unset elastic.shard_state"):
        check_optimizer(optimizer, scales=scales)

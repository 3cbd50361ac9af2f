"""What every stack keeps, on two processes with ragged windows: one row a stack in `support/stacks.py`, one test a promise.

A stack runs its whole program in one pair of processes, and dies in another one; the tests look at what came of it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_outcomes, run_processes
from support.stacks import KILLED_IN, STACKS, STOPS, UPDATES, Points, build, continue_elsewhere, die, exercise, loss_of
from support.toys import differences

pytestmark = pytest.mark.timeout(400)


class Ran:
    """What the program of a stack left, by rank; it is run when a test first asks, once for all workers of a session."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.root.mkdir(exist_ok=True)
        self._read: dict[str, Any] = {}

    def of(self, name: str) -> list[dict[str, Any]]:
        self.death(name)
        found: list[dict[str, Any]] = self._once(
            f"{name}.ran", lambda: run_processes(exercise, name, str(self.root / name), timeout=300)
        )
        return found

    def death(self, name: str) -> dict[int, tuple[int | None, str]]:
        killed = str(self.root / name / "killed")
        ended: dict[int, tuple[int | None, str]] = self._once(
            f"{name}.died",
            lambda: {
                outcome.rank: (outcome.exit_code, repr(outcome.error))
                for outcome in run_outcomes(die, name, killed, timeout=100)
            },
        )
        return ended

    def on_another(self, source: str, target: str) -> list[dict[str, Any]]:
        here = [name for name, stack in STACKS.items() if stack.is_here]
        for name in here:
            self.of(name)
        near = neighbours(source, target)
        pairs = [(a, b) for a, b in PAIRS if a in here and b in here and neighbours(a, b) == near]
        what = "exchange" if near else "further exchange"
        ranks = self._once(what, lambda: run_processes(continue_elsewhere, pairs, str(self.root), timeout=300))
        return [rank[pairs.index((source, target))] for rank in ranks]

    def _once(self, what: str, make: Callable[[], Any]) -> Any:
        if what not in self._read:
            file = self.root / f"{what}.pt"
            with open(self.root / f"{what}.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not file.exists():
                    file.with_suffix(".failed").touch(exist_ok=False)  # a program that fails is run once
                    torch.save(make(), file)
                self._read[what] = torch.load(file, weights_only=False)
        return self._read[what]


PAIRS = [(a, b) for a in STACKS for b in STACKS if a != b]


def neighbours(source: str, target: str) -> bool:
    """Whether two stacks stand beside each other in the ring of all: `make test` goes from each one to two others, and to it from two."""
    names = list(STACKS)
    return (names.index(source) - names.index(target)) % len(names) in (1, len(names) - 1)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    base = tmp_path_factory.getbasetemp()
    # Each worker of pytest-xdist has a directory of its own in that of the session.
    return Ran((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "every-stack")


@pytest.fixture(params=STACKS)
def name(request: pytest.FixtureRequest) -> str:
    """Each stack in turn."""
    stack: str = request.param
    if not STACKS[stack].is_here:
        pytest.skip(f"{STACKS[stack].package} is not installed: pip install {STACKS[stack].package}")
    return stack


def test_the_gradient_of_each_update_is_that_of_one_process(name: str, ran: Ran) -> None:
    """Per parameter, of windows that are ragged over micro-batches and ranks."""
    first, second = (rank["watched"] for rank in ran.of(name))
    stack = STACKS[name]
    data = Points(22, getattr(torch, stack.dtype))
    sizes = set()
    for update in range(UPDATES):
        ids = first["ids"][update] + second["ids"][update]
        sizes.add(len(ids))
        model = build(getattr(torch, stack.dtype))
        model.load_state_dict(first["path"][update])
        loss = loss_of(model(data.inputs[ids]), data.targets[ids])
        loss.backward()
        for rank in (first, second):
            assert differences(rank["path"][update], first["path"][update]) == []
            mean, weight, _ = rank["losses"][update]
            assert weight == (data.targets[ids] >= 0).sum()
            assert mean / weight == pytest.approx(loss.item(), rel=1e-6)
            for key, parameter in model.named_parameters():
                made = rank["path"][update][key] - rank["path"][update + 1][key]
                assert (made - parameter.grad).norm() <= stack.tolerance * parameter.grad.norm(), (update, key)
    assert sizes == {16, 6}, "no ragged window"


def test_every_sample_is_seen_once_a_pass(name: str, ran: Ran) -> None:
    updates = list(zip(*(rank["whole"]["ids"] for rank in ran.of(name))))
    for begin in range(0, UPDATES, 2):
        assert sorted(i for update in updates[begin : begin + 2] for ids in update for i in ids) == list(range(22))


def test_an_evaluation_is_that_of_the_whole_split(name: str, ran: Ran) -> None:
    """Seven samples do not divide over two ranks; training's random numbers stay as they were."""
    data = Points(7, getattr(torch, STACKS[name].dtype))
    for rank in ran.of(name):
        watched = rank["watched"]
        model = build(getattr(torch, STACKS[name].dtype))
        model.load_state_dict(watched["path"][-1])
        with torch.no_grad():
            loss = loss_of(model(data.inputs), data.targets)
        assert watched["evaluated"]["loss"] == pytest.approx(loss.item(), rel=1e-6)
        assert differences(*watched["rng"]) == []


def test_inference_predicts_every_sample_in_order(name: str, ran: Ran) -> None:
    data = Points(7, getattr(torch, STACKS[name].dtype))
    for rank in ran.of(name):
        model = build(getattr(torch, STACKS[name].dtype))
        model.load_state_dict(rank["watched"]["path"][-1])
        with torch.no_grad():
            torch.testing.assert_close(rank["watched"]["predicted"], model(data.inputs), rtol=1e-6, atol=1e-7)


def test_what_is_not_finite_on_one_rank_is_skipped_by_all_and_moves_nothing(name: str, ran: Ran) -> None:
    ranks = [rank["skipped"] for rank in ran.of(name)]
    for rank in ranks:
        assert rank["seen"] == [(True, None)] * 2 + [(False, "nonfinite")] * 2 + [(True, None)] * 4
        assert rank["moved"] == []
        assert rank["step"] == UPDATES
        assert differences(rank["state"]["model"], ranks[0]["state"]["model"]) == []


def test_what_is_not_finite_on_one_rank_is_raised_on_all(name: str, ran: Ran) -> None:
    for rank in ran.of(name):
        assert "step 3" in rank["raised"] and "ranks [1]" in rank["raised"]


def same_run(parts: list[dict[str, Any]], whole: dict[str, Any]) -> list[str]:
    """Return where a run in parts differs from the one that was left alone, to the bit."""
    joined = {key: [item for part in parts for item in part[key]] for key in ("ids", "trace")}
    last = parts[-1]
    mine = {**joined, "state": last["state"], "results": last["results"], "step": last["step"]}
    return differences(mine, {key: whole[key] for key in mine})


def test_stopped_and_resumed(name: str, ran: Ran) -> None:
    for rank in ran.of(name):
        for stop, first, second in zip(STOPS, rank["stopped"], rank["resumed"]):
            assert first["step"] == stop
            assert same_run([first, second], rank["whole"]) == []


def test_a_signal_to_one_rank_stops_all_and_the_run_goes_on(name: str, ran: Ran) -> None:
    for rank in ran.of(name):
        assert (rank["signalled"]["step"], rank["signalled"]["code"]) == (3, 143)
        assert same_run([rank["signalled"], rank["after the signal"]], rank["whole"]) == []


def test_killed_in_an_update_and_resumed(name: str, ran: Ran) -> None:
    for rank in ran.of(name):
        resumed, whole = rank["after the kill"], rank["whole"]
        made = len(resumed["seen"])
        # A save in the background may not have been finished.
        assert UPDATES - KILLED_IN + 1 <= made <= UPDATES
        assert resumed["trace"] == whole["trace"][-made:]
        assert differences(resumed["state"], whole["state"]) == []
    first, second = ran.death(name)[0], ran.death(name)[1]
    assert second[0] == -9 and "ProcessFailure" in second[1]
    assert first[1] != "None", "the other rank went on alone"


def test_it_is_the_stack_that_was_asked_for(name: str, ran: Ran) -> None:
    assert [rank["whole"]["stack"] for rank in ran.of(name)] == [name, name]


@pytest.mark.parametrize("name", [name for name, stack in STACKS.items() if stack.equals_ddp and name != "ddp"])
def test_it_ends_as_ddp_to_the_bit(name: str, ran: Ran) -> None:
    for own, ddp in zip(ran.of(name), ran.of("ddp")):
        assert same_run([own["whole"]], ddp["whole"]) == []


@pytest.mark.parametrize(
    ("source", "target"), [pytest.param(*pair, marks=() if neighbours(*pair) else pytest.mark.slow) for pair in PAIRS]
)
def test_a_checkpoint_goes_to_another_stack(source: str, target: str, ran: Ran) -> None:
    """The run goes on with the batch that is next, and ends where the other stack's own run ends."""
    missing = [name for name in (source, target) if not STACKS[name].is_here]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    ended = ran.on_another(source, target)
    exact = STACKS[source].equals_ddp and STACKS[target].equals_ddp
    for mine, rank in zip(ended, ran.of(target)):
        whole = rank["whole"]
        assert mine["step"] == UPDATES and mine["ids"] == whole["ids"][STOPS[-1] :]
        for part in ("model", "ema"):
            if exact:
                assert differences(mine["state"][part], whole["state"][part]) == []
            else:
                torch.testing.assert_close(mine["state"][part], whole["state"][part], rtol=1e-4, atol=1e-5)
        assert mine["trace"] == [pytest.approx(line, rel=1e-4) for line in whole["trace"][STOPS[-1] :]]

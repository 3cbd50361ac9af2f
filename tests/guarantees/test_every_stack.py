"""What every stack keeps, on two processes with ragged windows: one row a stack in `support/stacks.py`, one test a promise.

A stack runs its whole program (`exercise`) in one pair of processes, and dies in another one; the tests look at what came of it.
"""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support.processes import run_outcomes, run_processes
from support.stacks import STACKS, AnyStackRunner, Points, build, copied
from support.toys import differences, whole_settings, whole_state
from torch import Tensor, nn

from danling.training import NonFiniteError
from danling.utils.tensors import canonical_name

pytestmark = pytest.mark.timeout(400)

UPDATES = 6
STOPS = (1, 4)
"""Updates after which a run is stopped: within the first pass, and within the second."""
KILLED_IN = 4
"""Update in which a rank dies."""
UNSAVED: dict[str, Any] = {"checkpoint": {"load_only": True}}
"""For runs that nobody goes on with."""


class Exercised(AnyStackRunner):
    """One script for every stack, which notes its samples and what became of each update."""

    not_saved: ClassVar[tuple[str, ...]] = ("ids", "moved", "seen")

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        signalled: int | None = None,
        dies: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(config, norm=False, **options)
        self.signalled, self.dies = signalled, dies
        self.ids: list[list[int]] = [[]]
        self.seen: list[tuple[bool, str | None]] = []
        self.moved: list[str] = []

    def train_step(self, data: dict[str, Any]) -> tuple[Any, Tensor]:
        last = self.rank == self.world_size - 1
        if last and self.dies and self.train_state.global_step == KILLED_IN - 1 and self.ids[-1]:
            os.kill(os.getpid(), signal.SIGKILL)
        if (
            last
            and self.signalled is not None
            and self.train_state.global_step == 2
            and not self.ids[-1]
        ):
            os.kill(os.getpid(), self.signalled)
        self.ids[-1] += data["index"].tolist()
        return super().train_step(data)

    def step(self) -> Any:
        before = self.still() if self.train_state.attempted in self.spoiled else None
        outcome = super().step()
        if before is not None and not outcome.committed:
            self.moved += differences(self.still(), before)
        self.seen.append((outcome.committed, outcome.reason))
        self.ids.append([])
        return outcome

    def still(self) -> dict[str, Any]:
        state = copied(whole_state(self))
        for name in ("rng", "train"):
            del state["state"][name]
        del state["dataloaders"]
        return {"step": self.train_state.global_step, **state}


class Watched(Exercised):
    """Keeps the weights around every update, of which plain gradient descent by 1 shows the gradient."""

    not_saved: ClassVar[tuple[str, ...]] = ("path",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.path: list[dict[str, Tensor]] = []

    def step(self) -> Any:
        if not self.path:
            self.path.append(self.weights())
        outcome = super().step()
        self.path.append(self.weights())
        return outcome

    def weights(self) -> dict[str, Tensor]:
        with self.whole_weights():
            named = self.unwrapped_model.named_parameters()
            return {canonical_name(name): value.detach().clone() for name, value in named}


def settings(name: str, root: str, **changes: Any) -> dict[str, Any]:
    """Return the configuration of a run with two updates a pass, the second of which is a shorter window with ragged batches."""
    base: dict[str, Any] = {
        **STACKS[name].settings,
        "steps": UPDATES,
        "accum_steps": 4,
        "dropout": 0.3,
        "points": 22,
    }
    base |= {
        "max_grad_norm": 0.3,
        "evaluate_interval": 2,
        "scheduler": {"type": "cosine", "warmup_steps": 2},
    }
    return whole_settings(
        "unused", **{**base, "checkpoint": {"interval": 1}, "dir": root, "log": False, **changes}
    )


def train(
    name: str, root: str, config: Mapping[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    code = None
    with Exercised(settings(name, root, **(config or {})), **options) as runner:
        try:
            runner.train()
        except SystemExit as end:
            code = end.code
        return {
            "stack": runner.stack,
            "code": code,
            "step": runner.train_state.global_step,
            "ids": runner.ids[:-1],
            "seen": runner.seen,
            "trace": runner.trace,
            "moved": runner.moved,
            "results": dict(runner.results),
            "state": copied(whole_state(runner)),
        }


def train_again(name: str, root: str) -> dict[str, Any]:
    return train(name, root, {"auto_resume": True})


def die(name: str, root: str) -> None:
    train(name, root, dies=True)


def watch(name: str, root: str) -> dict[str, Any]:
    """Train by plain gradient descent, evaluate and predict, and return what one process is to find too."""
    plain: dict[str, Any] = {
        **UNSAVED,
        "optim": {},
        "scheduler": {},
        "ema": {},
        "max_grad_norm": None,
    }
    plain |= {"dropout": 0.0, "arithmetic": STACKS[name].dtype}
    with Watched(settings(name, root, **plain)) as runner:
        runner.train()
        before = copied(whole_state(runner)["state"]["rng"])
        found = {"path": runner.path, "ids": runner.ids[:-1], "losses": runner.trace}
        found["evaluated"] = runner.evaluate("val")["val"]
        found["predicted"] = torch.stack(runner.infer("val"))
        return {**found, "rng": (before, copied(whole_state(runner)["state"]["rng"]))}


def fail(name: str, root: str) -> str:
    """Return what all ranks raise where the loss of one is not a number, and nothing may be skipped."""
    with pytest.raises(NonFiniteError) as caught:
        train(name, root, UNSAVED, spoiled=(2,))
    return str(caught.value)


def exercise(name: str, root: str) -> dict[str, Any]:
    """Do everything that all stacks can, one run after the other in this process; the killed run is there already."""
    return {
        "watched": watch(name, f"{root}/watched"),
        "whole": train(name, f"{root}/whole", UNSAVED),
        "stopped": [train(name, f"{root}/stopped-{stop}", stop_at=stop) for stop in STOPS],
        "resumed": [train_again(name, f"{root}/stopped-{stop}") for stop in STOPS],
        "signalled": train(name, f"{root}/signalled", signalled=signal.SIGTERM),
        "after the signal": train_again(name, f"{root}/signalled"),
        "after the kill": train_again(name, f"{root}/killed"),
        "skipped": train(
            name, f"{root}/skipped", {**UNSAVED, "skip_nonfinite_grad": True}, spoiled=(2, 3)
        ),
        "raised": fail(name, f"{root}/raised"),
    }


def continue_elsewhere(pairs: list[tuple[str, str]], root: str) -> list[dict[str, Any]]:
    """Continue with a run of each first stack on the second one, from the last checkpoint of one that was stopped within a pass."""
    unsaved = {"checkpoint": {**UNSAVED["checkpoint"], "trust": True}}
    ended = []
    for source, target in pairs:
        # The checkpoint of the last stopped run, which was gone on with since.
        found = Path(root, source, f"stopped-{STOPS[-1]}", "checkpoints").glob(
            f"ckpt-s{STOPS[-1]:012d}*"
        )
        resume = str(next(path for path in sorted(found) if path.suffix != ".sha256"))
        ended.append(train(target, f"{root}/{source}-{target}", {**unsaved, "resume": resume}))
    return ended


def loss_of(pred: Tensor, target: Tensor) -> Tensor:
    """Return the mean over the positions that count."""
    return nn.functional.cross_entropy(pred.reshape(len(pred), 4, 3), target)


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
        ranks = self._once(
            what, lambda: run_processes(continue_elsewhere, pairs, str(self.root), timeout=300)
        )
        return [rank[pairs.index((source, target))] for rank in ranks]

    def _once(self, what: str, make: Callable[[], Any]) -> Any:
        if what not in self._read:
            file = self.root / f"{what}.pt"
            with open(self.root / f"{what}.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not file.exists():
                    file.with_suffix(".failed").touch(
                        exist_ok=False
                    )  # a program that fails is run once
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
    stack: str = request.param
    if not STACKS[stack].is_here:
        pytest.skip(
            f"{STACKS[stack].package} is not installed: pip install {STACKS[stack].package}"
        )
    return stack


def test_gradient_of_each_update_equals_one_process(name: str, ran: Ran) -> None:
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
            mean, weight, *_ = rank["losses"][update]
            assert weight == (data.targets[ids] >= 0).sum()
            assert mean / weight == pytest.approx(loss.item(), rel=1e-6)
            for key, parameter in model.named_parameters():
                made = rank["path"][update][key] - rank["path"][update + 1][key]
                assert (made - parameter.grad).norm() <= stack.tolerance * parameter.grad.norm(), (
                    update,
                    key,
                )
    assert sizes == {16, 6}, "no ragged window"


def test_every_sample_is_seen_once_a_pass_by_the_requested_stack(name: str, ran: Ran) -> None:
    assert [rank["whole"]["stack"] for rank in ran.of(name)] == [name, name]
    updates = list(zip(*(rank["whole"]["ids"] for rank in ran.of(name))))
    for begin in range(0, UPDATES, 2):
        assert sorted(
            i for update in updates[begin : begin + 2] for ids in update for i in ids
        ) == list(range(22))


def test_evaluation_covers_the_whole_split_and_inference_predicts_it_in_order(
    name: str, ran: Ran
) -> None:
    """Seven samples do not divide over two ranks; training's random numbers stay as they were."""
    data = Points(7, getattr(torch, STACKS[name].dtype))
    for rank in ran.of(name):
        watched = rank["watched"]
        model = build(getattr(torch, STACKS[name].dtype))
        model.load_state_dict(watched["path"][-1])
        with torch.no_grad():
            predicted = model(data.inputs)
        assert watched["evaluated"]["loss"] == pytest.approx(
            loss_of(predicted, data.targets).item(), rel=1e-6
        )
        assert differences(*watched["rng"]) == []
        torch.testing.assert_close(watched["predicted"], predicted, rtol=1e-6, atol=1e-7)


def test_nonfinite_update_of_one_rank_is_raised_or_skipped_on_all_and_moves_nothing(
    name: str, ran: Ran
) -> None:
    for rank in ran.of(name):
        assert "step 3" in rank["raised"] and "ranks [1]" in rank["raised"]
    ranks = [rank["skipped"] for rank in ran.of(name)]
    for rank in ranks:
        assert rank["seen"] == [(True, None)] * 2 + [(False, "nonfinite")] * 2 + [(True, None)] * 4
        assert rank["moved"] == []
        assert rank["step"] == UPDATES
        assert differences(rank["state"]["model"], ranks[0]["state"]["model"]) == []


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


@pytest.mark.parametrize(
    "name", [name for name, stack in STACKS.items() if stack.equals_ddp and name != "ddp"]
)
def test_it_ends_as_ddp_to_the_bit(name: str, ran: Ran) -> None:
    for own, ddp in zip(ran.of(name), ran.of("ddp")):
        assert same_run([own["whole"]], ddp["whole"]) == []


def _tensors(state: Any) -> dict[str, Any]:
    """Return the tensors and numbers of a part of the state; averages have the name of what is done with buffers too."""
    flat = {**state, **state["weights"]} if "weights" in state else state
    return {name: value for name, value in flat.items() if name not in ("weights", "buffers")}


@pytest.mark.parametrize(
    ("source", "target"),
    [pytest.param(*pair, marks=() if neighbours(*pair) else pytest.mark.slow) for pair in PAIRS],
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
                ended, expected = (_tensors(each["state"][part]) for each in (mine, whole))
                torch.testing.assert_close(ended, expected, rtol=1e-4, atol=1e-5)
        assert mine["trace"] == [
            pytest.approx(line, rel=1e-4) for line in whole["trace"][STOPS[-1] :]
        ]

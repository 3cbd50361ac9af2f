"""Observers with a state: it comes back by name, whenever the observer is appended, on every rank, or is named."""

from __future__ import annotations

import logging
import os
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.processes import run_processes
from torch import Tensor, nn

import danling as dl
from danling.checkpoints.errors import CheckpointMismatch
from danling.utils.observers import Observer

SAMPLES = 8


def points() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.rand(SAMPLES, 3, generator=generator)
    return [(row, row.sum(0, keepdim=True) + 1) for row in inputs]


class Norms(Observer):
    """Averages the norm of the gradient, and remembers it in several forms."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.average = 0.0
        self.seen: set[int] = set()
        self.latest = np.zeros(2)
        self.norms: deque[Tensor] = deque(maxlen=3)
        self.loaded = 0

    def gradients_ready(self, totals: object, norm: Tensor) -> None:
        self.average = 0.9 * self.average + 0.1 * float(norm)
        self.norms.append(norm.detach().clone())

    def update_ended(self, outcome: Any) -> None:
        self.seen.add(len(self.seen))
        self.latest = np.array([len(self.seen), self.average])

    def state_dict(self) -> dict[str, Any]:
        return {
            "average": self.average,
            "seen": self.seen,
            "latest": self.latest,
            "norms": self.norms,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded += 1
        self.average, self.seen = state["average"], state["seen"]
        self.latest, self.norms = state["latest"], state["norms"]


class Program(dl.Runner):
    def __init__(self, config: dict[str, Any], *observers: Observer) -> None:
        super().__init__(config)
        torch.manual_seed(0)
        self.model, self.criterion = nn.Linear(3, 1), nn.MSELoss()
        self.datasets = {"train": points()}
        self.observers.extend(observers)


def settings(directory: Path, steps: int, **more: Any) -> dict[str, Any]:
    given = {
        "dir": str(directory),
        "steps": steps,
        "seed": 1,
        "stack": "ddp",
        "log": False,
        "auto_resume": True,
    }
    return {**given, "optim": {"type": "sgd", "lr": 0.1}, "dataloader": {"batch_size": 8}, **more}


def train(directory: Path, steps: int, *observers: Observer, **more: Any) -> None:
    with Program(settings(directory, steps, **more), *observers) as runner:
        runner.train()


def norms_by_hand(steps: int) -> list[float]:
    """Return the norms of the gradients of full batches, in float64."""
    torch.manual_seed(0)
    model, (inputs, targets) = nn.Linear(3, 1), map(torch.stack, zip(*points()))
    model, found = model.double(), []
    for _ in range(steps):
        model.zero_grad()
        ((model(inputs.double()) - targets.double()) ** 2).mean().backward()
        gradients = [
            parameter.grad for parameter in model.parameters() if parameter.grad is not None
        ]
        found.append(float(torch.cat([each.flatten() for each in gradients]).norm()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients):
                parameter -= 0.1 * gradient
    return found


@pytest.mark.parametrize("backend", ["file", "dcp"])
@pytest.mark.parametrize("appended", ["in __init__", "after construction"])
def test_state_continues_after_resume(appended: str, backend: str, tmp_path: Path) -> None:
    checkpoint = {"checkpoint": {"backend": backend}}
    train(tmp_path, 3, Norms(), **checkpoint)
    observer = Norms()
    given = (observer,) if appended == "in __init__" else ()
    with Program(settings(tmp_path, 5, **checkpoint), *given) as runner:
        if not given:
            runner.observers.append(observer)
        assert observer.loaded == 1 and observer.seen == {0, 1, 2}
        runner.train()
    norms = norms_by_hand(5)
    average = 0.0
    for norm in norms:
        average = 0.9 * average + 0.1 * norm
    assert observer.average == pytest.approx(average, rel=1e-5)
    assert observer.latest.dtype == np.float64 and observer.latest.tolist() == [5, observer.average]
    assert type(observer.seen) is set and observer.seen == set(range(5))
    assert observer.norms.maxlen == 3 and [float(norm) for norm in observer.norms] == pytest.approx(
        norms[2:], rel=1e-5
    )


def test_observers_of_one_class_need_names(tmp_path: Path) -> None:
    with Program(settings(tmp_path / "refused", 1), Norms("a"), Norms("b")) as runner:
        with pytest.raises(
            ValueError, match="different names. Received: name='a' more than once. Set `name`"
        ):
            runner.observers.append(Norms("a"))
        assert len(list(runner.observers.with_state)) == 2
    first, second = Norms("a"), Norms("b")
    train(tmp_path / "run", 2, first, second)
    # The order of the list does not matter.
    again, other = Norms("b"), Norms("a")
    again.average = -1.0
    second.average = 5.0
    with Program(settings(tmp_path / "run", 2), again, other) as runner:
        assert again.average == other.average == first.average
        state = runner.state_dict()["observers"]
    assert sorted(state) == ["a", "b"]


def test_observer_without_load_state_dict_is_refused(tmp_path: Path) -> None:
    class Half(Observer):
        def state_dict(self) -> dict[str, Any]:
            return {"count": 1}

    with (
        Program(settings(tmp_path, 1)) as runner,
        pytest.raises(TypeError, match="'Half' without it. Override both"),
    ):
        runner.observers.append(Half())


def test_new_observer_is_named_and_begins_without_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, 2, Norms())
    known, new = Norms(), Norms("new")
    with Program(settings(tmp_path, 2), known, new):
        assert known.loaded == 1 and new.loaded == 0
    assert caplog.text.count("has no state of the observer 'new': it begins without one") == 1


def test_state_without_observer_is_named_when_training_begins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, 2, Norms())
    with Program(settings(tmp_path, 3)) as runner:
        assert "which this program does not have" not in caplog.text
        runner.train()
        assert "observers" not in runner.state_dict()
    assert (
        caplog.text.count("state of the observers 'Norms', which this program does not have") == 1
    )


@pytest.mark.parametrize("appended", ["in __init__", "after construction"])
@pytest.mark.parametrize("entry", ["observers", "observers.Norms"])
def test_excluded_state_is_not_loaded(
    entry: str, appended: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path / "first", 2, Norms())
    observer = Norms()
    more = {
        "checkpoint": {"exclude_from_loading": [entry]},
        "resume": str(tmp_path / "first" / "checkpoints" / "latest.pth"),
    }
    given = (observer,) if appended == "in __init__" else ()
    with Program(settings(tmp_path / "second", 3, **more), *given) as runner:
        if not given:
            runner.observers.append(observer)
        assert observer.loaded == 0
    assert "has no state" not in caplog.text


def test_weights_alone_or_without_attributes_load_no_state(tmp_path: Path) -> None:
    train(tmp_path / "first", 2, Norms())
    latest = tmp_path / "first" / "checkpoints" / "latest.pth"

    class Watched(Program):
        def __init__(self, config: dict[str, Any]) -> None:
            self.observer: Norms
            super().__init__(config, Norms())

    def loaded(runner: dl.TorchRunner) -> int:
        return runner.observers.with_state["Norms"].loaded  # type: ignore[attr-defined,no-any-return]

    with Watched.from_pretrained(settings(tmp_path / "second", 1), latest) as runner:
        assert loaded(runner) == 0
    with Watched.from_checkpoint(latest, {"dir": str(tmp_path / "third")}) as runner:
        assert loaded(runner) == 1
    with Watched.from_checkpoint(
        latest, {"dir": str(tmp_path / "fourth")}, attributes=False
    ) as runner:
        assert loaded(runner) == 0


class Failing(Norms):
    fails: str = "save"

    def state_dict(self) -> dict[str, Any]:
        if self.fails == "save":
            raise OSError("no state now")
        return {"average": 1.0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("norms")


class Critical(Failing):
    critical = True


def test_failing_observer_is_dropped_at_a_save_and_the_save_is_complete(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "danling")
    good = Norms()
    with Program(settings(tmp_path, 2), Failing(), good) as runner:
        runner.train()
        assert list(runner.observers.with_state) == ["Norms"]
    assert (
        caplog.text.count("The observer Failing failed and is dropped") == 1
        and "no state now" in caplog.text
    )
    other = Norms()
    with Program(settings(tmp_path, 2), other):
        assert other.average == good.average
    with (
        Program(settings(tmp_path / "critical", 2), Critical()) as runner,
        pytest.raises(OSError, match="no state now"),
    ):
        runner.train()


def test_observer_unable_to_load_refuses_the_checkpoint(tmp_path: Path) -> None:
    observer = Failing()
    observer.fails = "load"
    train(tmp_path, 1, observer)
    with pytest.raises(
        CheckpointMismatch,
        match=r"KeyError: 'norms'.*add 'observers.Failing' to checkpoint.exclude",
    ):
        Program(settings(tmp_path, 2), observer)


@pytest.mark.parametrize(
    ("value", "received"),
    [
        (object(), r"a object as \['value'\]"),
        ([Norms()], r"as \['value'\]\[0\]"),
        (torch.Generator(), r"Generator as \['value'\]"),
    ],
    ids=["object", "observer", "generator"],
)
def test_unsavable_value_is_named(value: Any, received: str, tmp_path: Path) -> None:
    class Odd(Critical):
        def state_dict(self) -> dict[str, Any]:
            return {"value": value}

    with (
        Program(settings(tmp_path, 1), Odd()) as runner,
        pytest.raises(TypeError, match=f"Odd.*Received: .*{received}"),
    ):
        runner.train()


class Held(Program):
    """Has its observers as attributes too."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.norms, self.plain = Norms(), Plain()
        self.observers.extend([self.norms, self.plain])


class Plain(Observer):
    """Has no state of its own."""

    updates = 0

    def __init__(self) -> None:
        self.counted = [0]

    def update_ended(self, outcome: Any) -> None:
        self.counted[0] += 1


def test_observer_in_an_attribute_is_saved_once(tmp_path: Path) -> None:
    with Held(settings(tmp_path, 2)) as runner:
        runner.train()
        saved = runner.state_dict()
        assert list(saved["observers"]) == ["Norms"] and list(saved["attributes"]) == ["plain"]
    with Held(settings(tmp_path, 3)) as runner:
        assert runner.norms.loaded == 1 and runner.norms is runner.observers.with_state["Norms"]
        assert runner.plain.counted == [2]


class OfRank(Observer):
    """Counts in its own way on each rank, and alike on all."""

    def __init__(self, name: str, rank: int) -> None:
        self.name, self.rank, self.count = name, rank, 0

    def update_ended(self, outcome: Any) -> None:
        self.count += 1 + self.rank

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def train_ranks(directory: Path, steps: int, backend: str) -> tuple[list[int], dict[str, Any]]:
    batch_size = SAMPLES // int(os.environ["WORLD_SIZE"])
    more = {"dataloader": {"batch_size": batch_size}, "checkpoint": {"backend": backend}}
    with Program(settings(directory, steps, **more)) as runner:
        observers = [OfRank("own", runner.rank), OfRank("alike", 0)]
        runner.observers.extend(observers)
        runner.train()
        return [observer.count for observer in observers], runner.state_dict()["observers"]


@pytest.mark.parametrize("backend", ["file", "dcp"])
def test_each_rank_gets_its_own_state(backend: str, tmp_path: Path) -> None:
    run_processes(train_ranks, tmp_path, 2, backend, world_size=2)
    (first, saved), (second, _) = run_processes(train_ranks, tmp_path, 3, backend, world_size=2)
    assert first == [3, 3] and second == [6, 3]
    assert list(saved["own"]) == ["of", "ranks"] and list(saved["alike"]) == ["value"]
    with pytest.raises(
        CheckpointMismatch, match="Expected 2 processes: .* of the observer 'own' .*'observers.own'"
    ):
        run_processes(train_ranks, tmp_path, 4, backend, world_size=1)


class Removed(OfRank):
    """Fails at the save on some ranks, and is removed there."""

    fails_on: tuple[int, ...] = ()

    def state_dict(self) -> dict[str, Any]:
        if self.rank in self.fails_on:
            raise OSError("no state now")
        return super().state_dict()


def train_removed(
    directory: Path, steps: int, backend: str, fails_on: tuple[int, ...]
) -> tuple[int, str]:
    more = {
        "dataloader": {"global_batch_size": SAMPLES, "drop_last": False},
        "checkpoint": {"backend": backend},
    }
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("danling").addHandler(handler)
    with Program(settings(directory, steps, **more)) as runner:
        observer = Removed("own", runner.rank)
        observer.fails_on = fails_on
        runner.observers.append(observer)
        begun = observer.count
        runner.train()
    return begun, "\n".join(line for line in lines if "begins without one" in line)


@pytest.mark.parametrize(("size", "backend"), [(2, "file"), (2, "dcp"), (3, "file")])
def test_a_rank_whose_observer_was_removed_begins_without_a_state_and_says_so(
    size: int, backend: str, tmp_path: Path
) -> None:
    """With two ranks one state is left, and with three the two that are left differ."""
    run_processes(train_removed, tmp_path, 2, backend, (1,), world_size=size)
    ends = run_processes(train_removed, tmp_path, 4, backend, (), world_size=size)
    said = "The checkpoint has no state of the observer 'own' of rank 1: it begins without one."
    assert ends == [(2 * (1 + rank), "") if rank != 1 else (0, said) for rank in range(size)]

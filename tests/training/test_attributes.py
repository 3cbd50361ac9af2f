"""What users set on a runner, restored in the same process."""

from __future__ import annotations

import datetime
import logging
import math
import random
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.toys import Small
from torch import nn
from torch.utils.data import Dataset

from danling.training.attribute_restore import decode_tensor


class Counts:
    """Hands out in its state what it has, not copies of it."""

    def __init__(self) -> None:
        self.seen: defaultdict[str, int] = defaultdict(int)
        self.later: dict[int, defaultdict[str, int]] = {}
        self.mean = (
            torch.ones(1, requires_grad=True) * 2.0
        )  # part of a graph, as a mean of losses that are not detached
        self.generators: list[Any] = [
            torch.Generator(),
            numpy.random.default_rng(1),
            random.Random(2),
        ]

    def state_dict(self) -> dict[str, Any]:
        own = {
            "seen": self.seen,
            "again": self.seen,
            "later": self.later,
            "generators": self.generators,
        }
        return {**own, "mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["again"] is state["seen"]
        self.seen, self.later, self.generators = state["seen"], state["later"], state["generators"]
        self.mean = state["mean"]

    def draw(self) -> list[float]:
        first, *others = self.generators
        return [torch.rand((), generator=first).item(), *(each.random() for each in others)]


class Keeping(Small):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.counts, self.size, self.late = Counts(), torch.Size([1]), 0
        self.limits = numpy.finfo("float32")  # has a dtype and is no array
        self.second = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.second[1].weight = self.second[0].weight

    def change(self) -> list[float]:
        self.counts.seen["a"] += 1
        self.counts.mean = self.counts.mean * 2.0
        self.counts.later[1] = defaultdict(int, a=2)
        self.size = torch.Size([3, 4])
        with torch.no_grad():
            self.second[0].weight.fill_(7.0)
        return self.counts.draw()


CONFIG: dict[str, Any] = {
    "dataloader": {"batch_size": 8},
    "optim": {"type": "sgd", "lr": 0.1},
    "log": False,
}


def test_states_with_shared_values_and_generators_come_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also an attribute that is set anew after the restore, or that a checkpoint of before lacks, is named."""
    config = {**CONFIG, "dir": str(tmp_path)}
    with Keeping({**config, "steps": 1}) as runner:
        runner.change()
        runner.train()
        drawn = runner.counts.draw()
    with Keeping({**config, "steps": 2, "auto_resume": True}) as runner:
        assert runner.counts.draw() == drawn and runner.size == torch.Size([3, 4])
        assert (
            runner.counts.mean == 4.0
            and runner.counts.seen["a"] == 1
            and runner.counts.seen["b"] == 0
        )
        assert runner.counts.later[1]["a"] == 2 and runner.counts.later[1]["b"] == 0
        assert (
            runner.second[1].weight is runner.second[0].weight
            and runner.second[1].weight.eq(7).all()
        )
        runner.size, runner.late = torch.Size([5]), 1
        runner.load_checkpoint(tmp_path / "checkpoints" / "latest.pth")
        assert "self.late: changed since the program set it" in caplog.text
        runner.size = torch.Size([5])
        runner.train()
    assert caplog.text.count("self.size: set again after the checkpoint was restored") == 1


class Own(dict[str, int]):
    """A dictionary of the user's, which may have more than its entries."""


class Losing(Small):
    """Changes what a checkpoint cannot hold."""

    not_saved = ("started",)

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.own, self.made, self.started = Own(), list[Any](), 0
        self.pairs: set[Any] = set()
        self.batches, self.teacher = iter([1, 2]), nn.Linear(1, 1).requires_grad_(False)

    def train_step(self, data: Any) -> Any:
        self.own["steps"] = self.started = self.state.train.global_step + 1
        self.made = [Counts()]
        self.pairs.add(object())
        return super().train_step(data)


def test_changing_unsavable_attribute_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Losing(
        {**CONFIG, "dir": str(tmp_path), "steps": 4, "checkpoint": {"interval": 1}}
    ) as runner:
        runner.train()
    said = [
        record.getMessage()
        for record in caplog.records
        if record.getMessage().startswith("Not saved: ")
    ]
    assert [each.split(": ")[1] for each in said] == [
        "self.batches",
        "self.teacher",
        "self.own, self.made, self.pairs",
    ]


class Sharp(torch.optim.SGD):
    """An optimizer around another one, as SAM and Lookahead are."""

    def __init__(self, params: Any, name: str, inner: Any) -> None:
        super().__init__(params, lr=0.1)
        vars(self)[name] = inner


@pytest.mark.parametrize("name", ["inner", "base_optimizer", "optimizer", "optimizers"])
def test_an_optimizer_inside_of_the_optimizer_is_saved_once(name: str, tmp_path: Path) -> None:
    class Wrapped(Small):
        def __init__(self, config: dict[str, Any]) -> None:
            super().__init__(config)
            self.fast = torch.optim.Adam(self.model.parameters(), lr=0.1)
            self.optimizer = Sharp(
                self.model.parameters(), name, [self.fast] if name == "optimizers" else self.fast
            )

        def optimizer_step(self) -> None:
            self.fast.step()
            super().optimizer_step()

    with Wrapped({**CONFIG, "dir": str(tmp_path), "steps": 1}) as runner:
        runner.train()
        assert "attributes" not in runner.state_dict()


class Level:
    """An object in an object in an object."""

    def __init__(self, depth: int) -> None:
        self.count = 0
        self.next = Level(depth - 1) if depth else None


class Bare:
    """An object that is a key."""


class WordTokenizer:
    def __init__(self) -> None:
        self.table = {Bare(): 1}


class Table(Dataset[int]):
    def __init__(self) -> None:
        self.rows = {Bare(): 1}


class Handle:
    """What belongs to a process, and a count, which is saved."""

    def __init__(self) -> None:
        self.lock, self.loop, self.log, self.count = (
            threading.Lock(),
            len,
            logging.getLogger("x"),
            0,
        )


class Bringing(Small):
    """Has every kind of what no checkpoint holds, and changes it in place."""

    not_saved = ("silenced",)

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        pandas = pytest.importorskip("pandas")
        self.by_object, self.silenced = {Bare(): 0}, {Bare(): 0}
        self.objects = numpy.array([{}, []], dtype=object)
        self.sparse = torch.eye(2).to_sparse()
        self.frame = pandas.DataFrame({"a": [1, 2]})
        self.masked = numpy.ma.masked_array([1, 2], mask=[0, 1])
        self.deep = Level(4)
        self.nested = {"unique": {Bare()}}
        self.when = datetime.datetime(2026, 1, 1)
        # Left to the program, and not named.
        self.function, self.kind, self.module, self.lock = len, Small, math, threading.RLock()
        self.logger, self.tokenizer, self.table = (
            logging.getLogger("mine"),
            WordTokenizer(),
            Table(),
        )
        self.place, self.device_of, self.handle = Path("there"), torch.device("cpu"), Handle()

    def train_step(self, data: Any) -> Any:
        self.objects[0]["a"] = self.deep.next.next.next.next.count = 1  # type: ignore[union-attr]
        self.handle.count += 1
        return super().train_step(data)


NAMED = {
    "by_object": "a dict by Bare",
    "objects": "an array of object",
    "sparse": "a tensor that is not strided",
    "frame": "a DataFrame, in which ._mgr is a BlockManager",
    "masked": "a MaskedArray",
    "deep": "a Level, in which .next.next.next is a Level, deeper than 3 objects",
    "nested['unique']": "a set of Bare",
    "when": "a datetime",
}


def test_attributes_without_an_encoding_are_listed_once_at_the_first_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {**CONFIG, "dir": str(tmp_path), "checkpoint": {"interval": 1}}
    with caplog.at_level(logging.INFO, "danling"):
        with Bringing({**config, "steps": 3}) as runner:
            runner.train()
        with Bringing({**config, "steps": 4, "auto_resume": True}) as runner:
            assert runner.handle.count == 3 and runner.handle.lock.acquire(blocking=False)
    said = [record for record in caplog.records if "have no encoding" in record.getMessage()]
    assert [record.levelname for record in said] == ["INFO"]
    listing = ", ".join(f"self.{name} ({what})" for name, what in NAMED.items())
    assert f"since their types have no encoding: {listing}. A resumed run" in said[0].getMessage()
    assert "Not saved" not in caplog.text


@pytest.mark.parametrize("shape", [(2, 2), (3, 3)])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_saved_tensor_replaces_one_of_another_layout(
    layout: torch.layout, shape: tuple[int, int]
) -> None:
    saved = torch.arange(9.0).reshape(3, 3)
    restored = decode_tensor(saved, torch.ones(shape).to_sparse(layout=layout))
    assert torch.equal(restored, saved) and restored is not saved


@pytest.mark.parametrize(
    "name", ["by_object", "sparse", "nested", "when", "handle.loop", "deep.next"]
)
def test_replaced_or_grown_attributes_without_an_encoding_are_warned_of(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Changing(Bringing):
        def train_step(self, data: Any) -> Any:
            changes: dict[str, Any] = {
                "by_object": lambda: self.by_object.update({Bare(): 1}),
                "sparse": lambda: self.sparse.mul_(2),
                "nested": lambda: self.nested["unique"].add(Bare()),
                "when": lambda: setattr(self, "when", datetime.datetime(2027, 1, 1)),
                "handle.loop": lambda: setattr(self.handle, "loop", max),
                "deep.next": lambda: setattr(self.deep, "count", self.deep.count + 1),
            }
            changes[name]()
            return super().train_step(data)

    config = {**CONFIG, "dir": str(tmp_path), "steps": 2, "checkpoint": {"interval": 1}}
    with Changing(config) as runner:
        runner.train()
    said = [
        record.getMessage() for record in caplog.records if "Not saved: " in record.getMessage()
    ]
    shown = {"nested": "nested['unique']", "deep.next": "deep"}.get(name, name)
    assert len(said) == 1 and said[0].startswith(
        f"Not saved: self.{shown}: changed since the program set it"
    )


def test_the_list_of_attributes_without_an_encoding_is_bounded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Many(Small):
        def __init__(self, config: dict[str, Any]) -> None:
            super().__init__(config)
            self.whens = [datetime.date(2026, 1, 1 + day) for day in range(25)]
            self.levels = [Level(0) for _ in range(10_001)]

    with (
        caplog.at_level(logging.INFO, "danling"),
        Many({**CONFIG, "dir": str(tmp_path), "steps": 1}) as runner,
    ):
        runner.train()
    (line,) = [
        record.getMessage()
        for record in caplog.records
        if "have no encoding" in record.getMessage()
    ]
    assert line.count("(a date)") == 20 and ", 6 more. A resumed run" in line


class Misspelt(Small):
    saved = ("teachr", "bank_a", "bank_b")
    not_saved = ("begun", "made_later")

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.teacher = nn.Linear(2, 2).requires_grad_(False)
        self.begun_at = 0.0
        self.begum = self.bank_a = 0.0
        self.second = iter(range(3))


def test_a_misspelt_declaration_and_an_iterator_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"steps": 1, "dir": str(tmp_path), "log": False, "optim": {"type": "sgd", "lr": 0.1}}
    with Misspelt(config) as runner:
        runner.train()
        runner.config.steps = 2
        runner.train()
    lines = [line for line in caplog.messages if line.startswith(("`saved`", "`not_saved`"))]
    assert lines == [
        "`saved` names 'teachr', which the runner does not have. Did you mean 'teacher'?",
        "`not_saved` names 'begun', which the runner does not have. Did you mean 'begum'?",
    ]
    (line,) = [line for line in caplog.messages if "self.second: is an iterator" in line]
    assert "in the dataset of a split" in line and "`saved`" not in line


def test_one_name_as_text_is_refused_with_the_tuple(tmp_path: Path) -> None:
    one = type("One", (Small,), {"not_saved": "begun_at"})
    with pytest.raises(TypeError, match=r"Write not_saved = \('begun_at',\)"):
        one({"steps": 1, "dir": str(tmp_path)})

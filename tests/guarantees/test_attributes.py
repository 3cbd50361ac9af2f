"""What users set on a runner is part of the run: every kind of attribute, stopped and resumed in new processes, bitwise."""

from __future__ import annotations

import copy
import logging
import os
import random
import signal
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, Flag
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from support.processes import run_outcomes, run_processes
from support.stacks import needs_deepspeed
from support.toys import settings as toy_settings
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

import danling as dl
from danling.utils.tensors import local_part


@dataclass
class Window:
    sums: list[float] = field(default_factory=list)


class Curriculum:
    """A plain object, which also names a function and has another object."""

    def __init__(self) -> None:
        self.level, self.seen, self.weights, self.metric, self.window = (
            0,
            [0.5],
            torch.zeros(2),
            len,
            Window(),
        )
        self.once = [1]


class Meter:
    """An object with a state of its own, and with what cannot be saved."""

    def __init__(self) -> None:
        self.total, self.lock = 0.0, iter(())

    def add(self, value: float) -> None:
        self.total += value

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.total = state["total"]


class Pair(NamedTuple):
    first: int
    second: float


class History(Meter):
    """Hands out what it has, and empties that before it takes a state."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.losses.clear()
        self.losses.extend(state["losses"])


class Colour(Enum):
    RED = 1
    BLUE = "b"


class Rights(Flag):
    READ = 1
    WRITE = 2


@dataclass(frozen=True)
class Frozen:
    """An immutable object that names a member."""

    level: int = 0
    colour: Colour = Colour.RED


class Slots:
    """An object without a dictionary of attributes."""

    __slots__ = ("__secret", "colour", "total")

    def __init__(self) -> None:
        self.total, self.colour, self.__secret = torch.zeros(1), Colour.RED, 0

    def add(self, number: int) -> None:
        self.total += number
        self.__secret += number
        self.colour = Colour.BLUE

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slots) and (self.total, self.__secret) == (
            other.total,
            other.__secret,
        )

    __hash__ = None  # type: ignore[assignment]


class Recurrent(nn.Module):
    """A module whose forward changes a buffer that is not persistent."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.register_buffer("mean", torch.zeros(4), persistent=False)
        self.register_buffer("first", torch.zeros(4), persistent=False)
        self.register_buffer("second", torch.zeros(4), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.linear(inputs)
        if self.training:
            self.mean = self.mean * 0.5 + hidden.detach().mean(0)
        return hidden - self.mean


Make = Callable[["Keeping"], Any]
Change = Callable[["Keeping", Any, int], Any]


def _call(method: str, *args: Any) -> Change:
    def change(runner: Keeping, value: Any, step: int) -> Any:
        getattr(value, method)(*(arg(step) if callable(arg) else arg for arg in args))
        return value

    return change


def _curriculum(runner: Keeping, value: Any, step: int) -> Any:
    value.level += 1
    if step == 1:
        del value.once
    value.seen.append(value.level * 0.5)
    value.weights += step
    value.window.sums.append(step)
    return value


def _queue(runner: Keeping, value: Tensor, step: int) -> Tensor:
    value.copy_(value.roll(1, 0))
    value[0] = step
    return value


def _scale(runner: Keeping, value: Any, step: int) -> Any:
    value.scale(torch.ones(1))
    value.update(2.0**step)
    return value


def _train_second(runner: Keeping, value: Any, step: int) -> Any:
    module, optimizer, schedule = value["module"], value["optimizer"], value["schedule"]
    optimizer.zero_grad()
    module(torch.full((2, 3), float(step))).square().sum().backward()
    optimizer.step()
    schedule.step()
    return value


def _second(runner: Keeping) -> dict[str, Any]:
    torch.manual_seed(5)
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    return {
        "module": module,
        "optimizer": optimizer,
        "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    }


def _follow(runner: Keeping, value: nn.Module, step: int) -> nn.Module:
    for parameter in value.parameters():
        parameter.data = parameter.data * 0.9 + step * 0.1
    return value


def _averaged(runner: Keeping, value: AveragedModel, step: int) -> AveragedModel:
    value.update_parameters(runner.source_of_averages)
    with torch.no_grad():
        for parameter in runner.source_of_averages.parameters():
            parameter.add_(0.5)
    return value


def _metric(runner: Keeping) -> Any:
    import torchmetrics

    return torchmetrics.MeanMetric()


CASES: dict[str, tuple[Make, Change]] = {
    "integer": (lambda r: 0, lambda r, v, n: v + n),
    "number": (lambda r: 0.1, lambda r, v, n: v * 1.1),
    "text": (lambda r: "a", lambda r, v, n: v + str(n)),
    "truth": (lambda r: False, lambda r, v, n: not v),
    "from_none": (lambda r: None, lambda r, v, n: n if v is None else v * 2),
    "to_none": (lambda r: 3, lambda r, v, n: None),
    "bits": (lambda r: b"", lambda r, v, n: v + bytes([n])),
    "changed_bits": (lambda r: bytearray(), _call("append", lambda n: n)),
    "complex_number": (lambda r: 1j, lambda r, v, n: v * (1 + 1j)),
    "huge": (lambda r: 1, lambda r, v, n: v * 10**19),
    "tensor": (lambda r: torch.zeros(3), lambda r, v, n: v + n),
    "half": (lambda r: torch.ones(2, dtype=torch.bfloat16), lambda r, v, n: v * 1.5),
    "queue": (lambda r: torch.zeros(5, 2), _queue),
    "hidden": (lambda r: None, lambda r, v, n: (torch.full((2,), n * 1.0), [torch.ones(1) * n])),
    "array": (lambda r: numpy.zeros((2, 2)), lambda r, v, n: v + n),
    "words": (lambda r: numpy.array(["a", "bc"]), lambda r, v, n: numpy.append(v, str(n))),
    "flags": (lambda r: numpy.zeros(3, dtype=bool), lambda r, v, n: ~v),
    "scalar": (lambda r: numpy.float32(0), lambda r, v, n: numpy.float32(v + n / 3)),
    "items": (lambda r: [], _call("append", lambda n: n)),
    "tensors": (lambda r: [], _call("append", lambda n: torch.ones(2) * n)),
    "nested": (
        lambda r: {"a": [1, (2, {3})]},
        lambda r, v, n: {"a": [n, (n, {n, 3})], "b": {n: torch.ones(1) * n}},
    ),
    "pair": (lambda r: (0, 0.5), lambda r, v, n: (v[0] + 1, v[1] * 2)),
    "named_pair": (lambda r: Pair(0, 0.5), lambda r, v, n: Pair(v.first + 1, v.second * 2)),
    "unique": (lambda r: set(), _call("add", lambda n: n)),
    "frozen_set": (lambda r: frozenset(), lambda r, v, n: v | {n}),
    "ring": (lambda r: deque(maxlen=2), _call("append", lambda n: torch.ones(1) * n)),
    "by_class": (lambda r: defaultdict(list), lambda r, v, n: v[n % 2].append(n) or v),
    "counts": (lambda r: Counter(), lambda r, v, n: v.update("ab" * n) or v),
    "ordered": (lambda r: OrderedDict(), lambda r, v, n: v.update({(n, "x"): n}) or v),
    "torch_generator": (
        lambda r: torch.Generator().manual_seed(3),
        lambda r, v, n: torch.rand(1, generator=v) is None or v,
    ),
    "numpy_generator": (lambda r: numpy.random.default_rng(3), _call("random")),
    "numpy_state": (lambda r: numpy.random.RandomState(3), _call("normal")),
    "python_generator": (lambda r: random.Random(3), _call("gauss", 0.0, 1.0)),
    "curriculum": (lambda r: Curriculum(), _curriculum),
    "window_sums": (lambda r: Window(), lambda r, v, n: v.sums.append(n / 2) or v),
    "meter": (lambda r: Meter(), _call("add", lambda n: n / 3)),
    "history": (lambda r: History(), lambda r, v, n: v.losses.append(n / 3) or v),
    "scaler": (lambda r: torch.amp.GradScaler("cpu", init_scale=8.0), _scale),
    "torch_metric": (_metric, lambda r, v, n: v.update(torch.tensor(n * 1.0)) or v),
    "second": (_second, _train_second),
    "teachers": (
        lambda r: {"of": copy.deepcopy(_second(r)["module"])},
        lambda r, v, n: {"of": _follow(r, v["of"], n)},
    ),
    "frozen_teacher": (
        lambda r: copy.deepcopy(_second(r)["module"]).requires_grad_(False),
        _follow,
    ),
    "averages": (lambda r: AveragedModel(r.source_of_averages), _averaged),
    "by_parameter": (
        lambda r: {},
        lambda r, v, n: {p: v.get(p, 0.0) + n / 2 for p in r.unwrapped_model.parameters()},
    ),
    "by_module": (lambda r: {}, lambda r, v, n: v.update({r.unwrapped_model[0]: n}) or v),
    "by_number_of_numpy": (
        lambda r: {},
        lambda r, v, n: v.update({numpy.int64(n): n, numpy.float32(n / 3): 1}) or v,
    ),
    "by_member": (lambda r: {}, lambda r, v, n: v.update({Colour.BLUE: torch.ones(1) * n}) or v),
    "by_bits": (lambda r: {}, lambda r, v, n: v.update({bytes([n, 255]): n}) or v),
    "by_pairs": (
        lambda r: {},
        lambda r, v, n: v.update({(n, (numpy.int32(n), Colour.RED)): n, frozenset({n}): 1}) or v,
    ),
    "members": (lambda r: set(), lambda r, v, n: v | {Colour.RED, (n, b"a"), frozenset({n, "a"})}),
    "colour": (lambda r: Colour.RED, lambda r, v, n: Colour.BLUE if n > 1 else v),
    "rights": (lambda r: Rights.READ, lambda r, v, n: Rights.READ | Rights.WRITE),
    "frozen": (lambda r: Frozen(), lambda r, v, n: Frozen(v.level + n, Colour.BLUE)),
    "slots": (lambda r: Slots(), _call("add", lambda n: n)),
    "slots_of_slots": (lambda r: SimpleNamespace(at=Slots()), lambda r, v, n: v.at.add(n) or v),
    "by_rank": (lambda r: [r.rank], _call("append", lambda n: n)),
}
"""By name: what `__init__` sets, and what an update makes of it."""


class Keeping(dl.Runner):
    """Keeps one attribute of every kind; their sum takes part in the loss."""

    source_of_averages: nn.Module
    items: list[int]
    number: float
    queue: Tensor

    saved = ("frozen_teacher",)
    not_saved = ("dies_at",)

    def __init__(
        self, config: Mapping[str, Any], *, constant: int = 1, dies_at: int | None = None
    ) -> None:
        super().__init__(config)
        self.dies_at = dies_at
        torch.manual_seed(1)
        self.model: Any = nn.Sequential(Recurrent(), nn.Linear(4, 2))
        if self.stack != "deepspeed":  # an engine divides what is trained from the beginning on
            self.model[1].requires_grad_(False)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.criterion = nn.CrossEntropyLoss()
        generator = torch.Generator().manual_seed(7)
        points = torch.randn(16, 6, generator=generator)
        self.datasets = {"train": TensorDataset(points, (points.sum(1) > 0).long())}
        self.source_of_averages = nn.Linear(2, 2)
        for name, (make, _) in CASES.items():
            setattr(self, name, make(self))
        self.tied = {"items": self.items, "weight": self.model[1].weight}
        self.api_token, self.out_dir, self.constant = "t", "here", constant
        self.first_batch: Any = torch.ones(3)

    def train_epoch(self, split: str = "train") -> dict[str, float]:
        if self.state.train.epoch == 1:
            model: Any = self.unwrapped_model
            model[1].requires_grad_(True)
        return super().train_epoch(split)

    def train_step(self, data: Any) -> tuple[Any, Tensor]:
        step = self.state.train.global_step + 1
        if step == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        for name, (_, change) in CASES.items():
            setattr(self, name, change(self, getattr(self, name), step))
        if step == self.rank + 1:
            del self.first_batch
        if step == 1:
            recurrent: Any = self.unwrapped_model[0]
            recurrent.first = None
            del recurrent.second
        self.api_token += "t"
        self.out_dir += "/x"
        pred = self.model(data[0])
        loss = self.criterion(pred, data[1]) * (
            1 + 0.01 * self.number + 0.001 * float(self.queue.sum())
        )
        self.backward(loss)
        return pred, loss


def _key(key: Any) -> Any:
    return (
        type(key).__name__
        if isinstance(key, (Tensor, nn.Module))
        else (type(key).__name__, repr(key))
    )


def described(value: Any) -> Any:
    """Return a value as something that can be compared and sent; tensors by their bits."""
    if isinstance(value, Tensor):
        local = local_part(value.detach())
        return str(value.dtype), tuple(local.shape), local.reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, (numpy.ndarray, numpy.generic)):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, Slots):
        return [described(getattr(value, name)) for name in ("total", "colour", "_Slots__secret")]
    if isinstance(value, torch.Generator):
        return described(value.get_state())
    if isinstance(value, numpy.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, numpy.random.RandomState):
        return repr(value.get_state(legacy=False))
    if isinstance(value, random.Random):
        return repr(value.getstate())
    if type(value).__module__.startswith("torchmetrics"):
        return described(value.compute())
    if hasattr(value, "state_dict"):
        return described(value.state_dict())
    if isinstance(value, Mapping):
        return type(value).__name__, [(_key(key), described(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return (
            type(value).__name__,
            getattr(value, "maxlen", None),
            [described(item) for item in value],
        )
    if isinstance(value, (set, frozenset)):
        return type(value).__name__, sorted(map(_key, value), key=repr)
    return described(vars(value)) if hasattr(value, "__dict__") and not callable(value) else value


def settings(stack: str, root: str, **more: Any) -> dict[str, Any]:
    """Return the configuration of three epochs; `zero` is DeepSpeed with divided optimizer states, `fsdp` divides the weights."""
    base = toy_settings(root, epochs=3, checkpoint={"async_enabled": False}, optim={})
    of_stack: dict[str, dict[str, Any]] = {
        "ddp": {"stack": "ddp"},
        "dcp": {"stack": "ddp", "checkpoint": {**base["checkpoint"], "backend": "dcp"}},
        "fsdp": {"stack": "parallel", "parallel.axes.shard": -1, "fsdp.enabled": True},
        "zero": {
            "stack": "deepspeed",
            "optim": {"type": "adamw", "lr": 0.01},
            "deepspeed": {"zero_optimization": {"stage": 1}},
            "checkpoint": {**base["checkpoint"], "trust": True},
        },
    }
    return {**base, **of_stack[stack], **more}


def keep(
    stack: str, root: str, more: Mapping[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    """Train, and return what became of the attributes, of weights, of `requires_grad` and of buffers."""
    with Keeping(settings(stack, root, **(more or {})), **options) as runner:
        runner.train()
        model: Any = runner.unwrapped_model
        found = {name: described(getattr(runner, name)) for name in CASES}
        found["weights"] = described(dict(model.named_parameters()))
        found["requires_grad"] = [parameter.requires_grad for parameter in model.parameters()]
        found["buffers"] = described(dict(model.named_buffers()))
        found["deleted"] = [
            hasattr(runner, "first_batch"),
            hasattr(runner.curriculum, "once"),
            *model[0]._buffers,
        ]
        found["ties"] = [
            runner.tied["items"] is runner.items,
            runner.tied["weight"] is model[1].weight or stack != "ddp",
        ]
        found["left out"] = [runner.api_token, runner.out_dir, runner.constant]
        return found


LAYOUTS = {
    "ddp-1": ("ddp", 1),
    "ddp-2": ("ddp", 2),
    "fsdp-2": ("fsdp", 2),
    "dcp-2": ("dcp", 2),
    "zero-2": ("zero", 2),
}
WHAT = [*CASES, "weights", "requires_grad", "buffers", "ties", "deleted"]

pytestmark = pytest.mark.timeout(300)


def _both(stack: str, root: str) -> dict[str, Any]:
    whole = keep(stack, f"{root}/whole")
    keep(stack, f"{root}/parts", {"epochs": 2})
    return whole


def _rest(
    stack: str, root: str, more: dict[str, Any] | None = None, constant: int = 1
) -> dict[str, Any]:
    return keep(stack, f"{root}/parts", {"auto_resume": True, **(more or {})}, constant=constant)


@pytest.mark.parametrize(
    "layout",
    [
        "ddp-1",
        "ddp-2",
        "fsdp-2",
        pytest.param("dcp-2", marks=pytest.mark.slow),
        pytest.param("zero-2", marks=[pytest.mark.slow, needs_deepspeed]),
    ],
)
def test_resumed_run_has_the_attributes_of_the_uninterrupted_one(
    layout: str, tmp_path: Path
) -> None:
    """Secrets, places and constants are those that the program sets anew."""
    stack, world_size = LAYOUTS[layout]
    ranks = run_processes(_both, stack, str(tmp_path), world_size=world_size, timeout=120)
    resumed = run_processes(
        _rest, stack, str(tmp_path), constant=2, world_size=world_size, timeout=120
    )
    for whole, parts in zip(ranks, resumed, strict=True):
        assert [what for what in WHAT if parts[what] != whole[what]] == []
        assert whole["requires_grad"] == [True] * 4 and whole["ties"] == [True, True]
        assert whole["deleted"] == [False, False, "mean", "first"]
        # Three epochs in one process, one in the other; a constant that the script sets anew stays new.
        tokens = [found["left out"][0].count("t") for found in (whole, parts)]
        assert tokens[0] - 1 == 3 * (tokens[1] - 1) and whole["left out"][1] == "here" + "/x" * (
            tokens[0] - 1
        )
        assert (whole["left out"][2], parts["left out"][2]) == (1, 2)


def test_a_killed_run_goes_on_with_the_attributes_of_its_last_save(tmp_path: Path) -> None:
    (killed,) = run_outcomes(
        keep, "ddp", str(tmp_path / "parts"), dies_at=7, world_size=1, timeout=120
    )
    assert killed.exit_code == -signal.SIGKILL
    whole, parts = keep("ddp", str(tmp_path / "whole")), _rest("ddp", str(tmp_path))
    assert [what for what in WHAT if parts[what] != whole[what]] == []
    assert len(parts["left out"][0]) < len(whole["left out"][0]), "begun anew"


def _refused(stack: str, root: str) -> str:
    with pytest.raises(Exception) as caught:
        _rest(stack, root, {"dataloader": {"batch_size": 8}})
    return str(caught.value)


def test_values_of_each_rank_are_refused_on_another_number_of_ranks(tmp_path: Path) -> None:
    run_processes(keep, "ddp", str(tmp_path / "parts"), {"epochs": 1}, timeout=120)
    (message,) = run_processes(_refused, "ddp", str(tmp_path), world_size=1, timeout=120)
    assert message.startswith(
        "Expected 2 processes: the checkpoint has a value of self.by_rank for each of them."
    )
    assert "'attributes.by_rank' to checkpoint.exclude_from_loading" in message


def test_a_resume_with_other_threads_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    threads = torch.get_num_threads()
    keep("ddp", str(tmp_path / "parts"), {"epochs": 1})
    try:
        torch.set_num_threads(threads + 1)
        with caplog.at_level(logging.WARNING, logger="danling"):
            keep("ddp", str(tmp_path / "parts"), {"epochs": 2, "auto_resume": True})
    finally:
        torch.set_num_threads(threads)
    (said,) = [
        record.getMessage()
        for record in caplog.records
        if "no longer bitwise" in record.getMessage()
    ]
    assert said.endswith(f"threads {threads}, now {threads + 1}.")

"""Every stack as a row, and one small program that each of them runs on two processes.

A row says how a stack is asked for, and how near its gradient comes to that of one process.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import danling as dl
from danling.training import NonFiniteError
from danling.utils.tensors import canonical_name, whole

from .toys import differences, whole_settings, whole_state

WORLD = 2
UPDATES = 6
STOPS = (1, 4)
"""Updates after which a run is stopped: within the first pass, and within the second."""
KILLED_IN = 4
"""Update in which a rank dies."""
UNSAVED: dict[str, Any] = {"checkpoint": {"load_only": True}}
"""For runs that nobody goes on with."""


@dataclass(frozen=True)
class Stack:
    """How a stack is asked for on two processes."""

    settings: Mapping[str, Any]
    dtype: str = "float64"
    tolerance: float = 1e-12
    equals_ddp: bool = False
    package: str = "torch"

    @property
    def is_here(self) -> bool:
        return find_spec(self.package) is not None


STACKS: dict[str, Stack] = {
    "ddp": Stack({"stack": "ddp"}, equals_ddp=True),
    "parallel": Stack({"stack": "parallel", "parallel": {"axes": {"shard": 2}}}),
    "deepspeed": Stack(
        {"stack": "deepspeed", "deepspeed": {"zero_optimization": {"stage": 2}}},
        dtype="float32",  # an engine keeps weights in float32
        tolerance=1e-5,
        package="deepspeed",
    ),
    "accelerate": Stack({"stack": "accelerate"}, equals_ddp=True, package="accelerate"),
    # The backend that runs the graph as it is: what inductor makes of it rounds otherwise, and takes long.
    "graph": Stack({"stack": "graph", "compile": {"backend": "eager"}}, equals_ddp=True),
}


class Points(Dataset[dict[str, Any]]):
    """Fixed points with three positions, of which some do not count, and their own numbers."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(size)
        self.inputs = torch.randn(size, 5, generator=generator, dtype=torch.float64).to(dtype)
        self.targets = torch.randint(4, (size, 3), generator=generator)
        # Unequal weights, and never nothing.
        self.targets[:, 1:][torch.rand(size, 2, generator=generator) < 0.5] = -100

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input": self.inputs[index], "target": self.targets[index], "index": index}


def build(dtype: torch.dtype, dropout: float = 0.0) -> nn.Module:
    """Return the model; seven do not divide over two ranks."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(dropout), nn.Linear(7, 12))
    return model.to(dtype)


def loss_of(pred: Tensor, target: Tensor) -> Tensor:
    """Return the mean over the positions that count."""
    return nn.functional.cross_entropy(pred.reshape(len(pred), 4, 3), target)


class AnyStack(dl.Runner):
    """One script for every stack, which writes down what its updates were made of."""

    not_saved: ClassVar[tuple[str, ...]] = ("ids", "moved", "seen", "trace")

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        stop_at: int | None = None,
        spoiled: tuple[int, ...] = (),
        signalled: int | None = None,
        dies: bool = False,
    ) -> None:
        super().__init__(config)
        dtype = getattr(torch, self.config.get("arithmetic", "float32"))
        self.stop_at, self.spoiled, self.signalled, self.dies = stop_at, spoiled, signalled, dies
        self.model = build(dtype, self.config.get("dropout", 0.0))
        self.criterion = nn.CrossEntropyLoss()
        self.datasets = {"train": Points(22, dtype), "val": Points(7, dtype)}
        self.ids: list[list[int]] = [[]]
        self.seen: list[tuple[bool, str | None]] = []
        self.trace: list[tuple[float, float, float]] = []
        self.moved: list[str] = []

    def train_step(self, data: dict[str, Any]) -> tuple[Any, Tensor]:
        last = self.rank == self.world_size - 1
        if last and self.dies and self.train_state.global_step == KILLED_IN - 1 and self.ids[-1]:
            os.kill(os.getpid(), signal.SIGKILL)
        if last and self.signalled is not None and self.train_state.global_step == 2 and not self.ids[-1]:
            os.kill(os.getpid(), self.signalled)
        self.ids[-1] += data["index"].tolist()
        spoiled = last and len(self.seen) in self.spoiled
        return super().train_step((data["input"] * torch.nan if spoiled else data["input"], data["target"]))

    def evaluate_step(self, data: dict[str, Any]) -> tuple[Any, Tensor | None]:
        return super().evaluate_step((data["input"], data["target"]))

    def infer_step(self, data: dict[str, Any]) -> Any:
        return super().infer_step((data["input"], data["target"]))

    def compute_loss(self, pred: Tensor, target: Tensor) -> Tensor:
        return super().compute_loss(pred.reshape(len(pred), 4, 3), target)

    def step(self) -> Any:
        if self.stop_at is not None and self.train_state.global_step == self.stop_at - 1:
            self.stop()
        before = self.still() if len(self.seen) in self.spoiled else None
        rate = self.optimizer.param_groups[0]["lr"]
        outcome = super().step()
        if before is not None and not outcome.committed:
            self.moved += differences(self.still(), before)
        self.seen.append((outcome.committed, outcome.reason))
        self.trace.append((float(outcome.loss_sum), float(outcome.weight), rate))
        self.ids.append([])
        return outcome

    def still(self) -> dict[str, Any]:
        state = copied(whole_state(self))
        for name in ("rng", "train"):
            del state["state"][name]
        del state["dataloaders"]
        return {"step": self.train_state.global_step, **state}

    def weights(self) -> dict[str, Tensor]:
        with self.whole_weights():
            named = self.unwrapped_model.named_parameters()
            return {canonical_name(name): value.detach().clone() for name, value in named}


class Watched(AnyStack):
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


def copied(value: Any) -> Any:
    """Return nested values with whole copies of the tensors. Call on all ranks."""
    if isinstance(value, Tensor):
        return whole(value).detach().clone()
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, (list, tuple)) else value


def settings(name: str, root: str, **changes: Any) -> dict[str, Any]:
    """Return the configuration of a run with two updates a pass, the second of which is a shorter window with ragged batches."""
    base: dict[str, Any] = {**STACKS[name].settings, "steps": UPDATES, "accum_steps": 4, "dropout": 0.3}
    base |= {"max_grad_norm": 0.3, "evaluate_interval": 2, "scheduler": {"type": "cosine", "warmup_steps": 2}}
    return whole_settings("unused", **{**base, "checkpoint": {"interval": 1}, "dir": root, "log": False, **changes})


def train(name: str, root: str, config: Mapping[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """Train and return what it was made of and how it ended. Call on all ranks."""
    code = None
    with AnyStack(settings(name, root, **(config or {})), **options) as runner:
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
    """Go on with a run in its directory."""
    return train(name, root, {"auto_resume": True})


def die(name: str, root: str) -> None:
    """Train until the last rank is killed."""
    train(name, root, dies=True)


def watch(name: str, root: str) -> dict[str, Any]:
    """Train by plain gradient descent, evaluate and predict, and return what one process is to find too."""
    plain: dict[str, Any] = {**UNSAVED, "optim": {}, "scheduler": {}, "ema": {}, "max_grad_norm": None}
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
    try:
        train(name, root, UNSAVED, spoiled=(2,))
    except NonFiniteError as error:
        return str(error)
    return "nothing was raised"


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
        "skipped": train(name, f"{root}/skipped", {**UNSAVED, "skip_nonfinite_grad": True}, spoiled=(2, 3)),
        "raised": fail(name, f"{root}/raised"),
    }


def continue_elsewhere(pairs: list[tuple[str, str]], root: str) -> list[dict[str, Any]]:
    """Go on with a run of each first stack on the second one, from the last checkpoint of one that was stopped within a pass."""
    unsaved = {"checkpoint": {**UNSAVED["checkpoint"], "trust": True}}
    return [
        train(target, f"{root}/{source}-{target}", {**unsaved, "resume": saved(f"{root}/{source}")})
        for source, target in pairs
    ]


def saved(root: str) -> str:
    """Return the path of the checkpoint that the last stopped run has left; it was gone on with since."""
    found = Path(root, f"stopped-{STOPS[-1]}", "checkpoints").glob(f"ckpt-s{STOPS[-1]:012d}*")
    return str(next(path for path in sorted(found) if path.suffix != ".sha256"))

"""A training of danling on elastic ranks, with faults at chosen points; run by `supervised.run_ranks`, by `danling run`, or alone.

Environment: ROOT (workspace), SETTINGS (JSON), FAULTS and REPORT as in `plain_loop`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import danling as dl
from danling.utils.observers import Observer

from .plain_loop import Faults, note

torch.set_num_threads(1)


class Noisy(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows with noise of their own at each read."""

    def __init__(self, length: int, seed: int) -> None:
        self.rows = torch.randn(length, 10, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = 0.1 * torch.randn(10)
        return {"input": self.rows[index] + noise, "target": self.rows[index][:5].argmax()}


class Net(dl.Runner):
    not_saved = ("changes", "passes_seen")
    saved = ("passes",)

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.passes = 0
        self.changes: list[tuple[int, int]] = []
        self.model = nn.Sequential(nn.Linear(10, 23), nn.LayerNorm(23), nn.GELU(), nn.Dropout(0.1), nn.Linear(23, 5))
        self.criterion = nn.CrossEntropyLoss()
        self.datasets = {"train": Noisy(41, 7), "val": Noisy(19, 8)}

    def on_pass_start(self, split: str) -> None:
        super().on_pass_start(split)
        self.passes += 1

    def membership_changed(self, before: int, after: int) -> None:
        self.changes.append((before, after))


class Striker(Observer):
    """Ends this rank at a point."""

    critical = True

    def __init__(self, faults: Faults, runner: dl.Runner) -> None:
        self._faults = faults
        self._runner = runner
        self._has_changed = False

    def update_started(self) -> None:
        self._faults.at("update")

    def micro_batch_started(self, data: object, *, read: object, samples: float) -> None:
        self._faults.at("leaf")

    def gradients_ready(self, totals: object, norm: object) -> None:
        self._faults.at("reduced")

    def update_ended(self, outcome: object) -> None:
        self._faults.at("stepped")
        if self._has_changed:
            self._has_changed = False
            import time

            note(update=self._runner.state.train.global_step, again=time.time(), size=self._runner.world_size)

    def membership_changed(self, before: int, after: int) -> None:
        self._has_changed = True

    def evaluation_batch_started(self, split: str, number: int) -> None:
        self._faults.at("evaluating")

    def save_started(self) -> None:
        self._faults.at("save")

    def save_ended(self) -> None:
        self._faults.at("saved")


def settings(**more: Any) -> dict[str, Any]:
    return {
        "name": "elastic",
        "seed": 5,
        "steps": 30,
        "gradient_sum": "canonical",
        "max_grad_norm": 1.0,
        "ema": {"enabled": True, "decay": 0.9},
        "optim": {"type": "adamw", "lr": 1e-2},
        "scheduler": {"type": "cosine"},
        "dataloader": {"global_batch_size": 16, "micro_batch_size": 4},
        "log_interval": 1,
        "evaluate_interval": 10,
        "checkpoint": {"interval": 5, "async_enabled": False},
        **json.loads(os.environ.get("SETTINGS", "{}")),
        **more,
    }


def digest_of(runner: Net) -> str:
    """Return the digest of all that was trained: weights, averages, moments, schedule, results."""
    found = hashlib.sha256()
    state = runner.state_dict()
    for name in ("model", "ema", "optimizer", "scheduler"):
        _add(found, state.get(name))
    _add(found, runner.results)
    _add(found, [runner.passes, runner.state.train.samples, runner.state.train.micro_step])
    return found.hexdigest()[:16]


def _add(found: Any, value: object) -> None:
    if isinstance(value, torch.Tensor):
        found.update(value.detach().contiguous().numpy().tobytes())
    elif isinstance(value, dict):
        for key in value:
            found.update(str(key).encode())
            _add(found, value[key])
    elif isinstance(value, (list, tuple)):
        for each in value:
            _add(found, each)
    else:
        found.update(repr(value).encode())


def train(root: str, **more: Any) -> tuple[str, Net]:
    """Train in this process, and return the digest of the end."""
    with Net(settings(workspace_root=root, **more)) as runner:
        runner.train()
        return digest_of(runner), runner


def alone(root: str) -> str:
    """Train undisturbed in one process."""
    quiet()
    return train(root)[0]


def quiet() -> None:
    warnings.filterwarnings("ignore")
    if "LOUD" not in os.environ:
        logging.getLogger("danling").addHandler(logging.NullHandler())


def elastic_rank() -> None:
    """Be one rank."""
    quiet()
    config = settings(workspace_root=os.environ["ROOT"], elastic={"enabled": True, **_elastic()})
    config["dir"] = os.environ["ROOT"] + "/run"
    with Net(config) as runner:
        assert runner._parts.elastic is not None
        faults = Faults(runner._parts.elastic._member.number)
        faults.at("born")
        runner.observers.append(Striker(faults, runner))
        runner.train()
        note(
            end=_digest_alone(runner),
            repeated=runner._parts.elastic.repeated,
            changes=runner.changes,
            update=runner.state.train.global_step,
            rank=runner.rank,
        )
    sys.stdout.flush()


def _digest_alone(runner: Net) -> str:
    # `state_dict` gathers from all ranks, of which some may have ended.
    found = hashlib.sha256()
    parts = runner.run_state.components()
    for name in ("model", "ema", "optimizer", "scheduler"):
        _add(found, parts.get(name))
    _add(found, runner.results)
    _add(found, [runner.passes, runner.state.train.samples, runner.state.train.micro_step])
    return found.hexdigest()[:16]


def _elastic() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(os.environ.get("ELASTIC", "{}"))
    return found


Function = Callable[[], None]

if __name__ == "__main__":
    elastic_rank()

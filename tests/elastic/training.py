"""A training of danling on elastic ranks, with faults at chosen points; run by `supervised.run_ranks`, by `danling run`, or alone.

Environment: ROOT (workspace), SETTINGS (JSON), FAULTS and REPORT as in `plain_loop`.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import distributed as dist
from torch import nn

import danling as dl
from danling.utils.observers import Observer

from .opened import AuditedFiles, TracedFiles
from .plain_loop import Faults, note
from .storm import Storm

torch.set_num_threads(1)
_FILES: dict[str, type[AuditedFiles | TracedFiles]] = {"audit": AuditedFiles, "strace": TracedFiles}


class Noisy(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows with noise of their own at each read."""

    def __init__(self, length: int, seed: int) -> None:
        self.rows = torch.randn(length, 10, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = 0.1 * torch.randn(10)
        return {"input": self.rows[index] + noise, "target": self.rows[index][:5].argmax()}


class Tokens(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Sequences of which each read replaces some tokens by others."""

    def __init__(self, length: int, seed: int) -> None:
        self.rows = torch.randint(0, 13, (length, 9), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        is_replaced = torch.rand(8) < 0.1
        return {
            "input": torch.where(is_replaced, torch.randint(0, 13, (8,)), row[:-1]),
            "target": row[1:],
        }


class Gpt(nn.Module):
    """A decoder of one block, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(13, 16), nn.Embedding(8, 16)
        self.block = nn.TransformerEncoderLayer(
            16, 2, 32, dropout=0.1, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(16, 13)
        self.register_buffer("mask", torch.ones(8, 8, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.token(tokens) + self.place.weight
        scores: torch.Tensor = self.head(self.block(hidden, src_mask=self.mask))
        return scores.transpose(1, 2)


class Net(dl.Runner):
    not_saved: ClassVar[tuple[str, ...]] = ("changes", "passes_seen")
    saved: ClassVar[tuple[str, ...]] = ("passes",)

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.passes = 0
        self.changes: list[tuple[int, int]] = []
        self.criterion = nn.CrossEntropyLoss()
        if os.environ.get("MODEL") == "gpt":
            self.model: nn.Module = Gpt()
            self.datasets = {"train": Tokens(41, 7), "val": Tokens(19, 8)}
        else:
            self.model = nn.Sequential(
                nn.Linear(10, 23), nn.LayerNorm(23), nn.GELU(), nn.Dropout(0.1), nn.Linear(23, 5)
            )
            self.datasets = {"train": Noisy(41, 7), "val": Noisy(19, 8)}

    def on_pass_start(self, split: str) -> None:
        super().on_pass_start(split)
        self.passes += 1

    def membership_changed(self, before: int, after: int) -> None:
        self.changes.append((before, after))


class Hooked(Net):
    """Looks at weights and gradients in hooks of the optimizer."""

    not_saved = (*Net.not_saved, "seen", "missing", "is_hooked")

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.seen: list[torch.Tensor] = []
        self.missing = 0
        self.is_hooked = False
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.optimizer.register_step_post_hook(lambda *_: self._look())

    def on_pass_start(self, split: str) -> None:
        super().on_pass_start(split)
        if split == "train" and not self.is_hooked:
            self.is_hooked = True
            self.optimizer.register_step_pre_hook(lambda *_: self._count())
            if os.environ.get("MOVED"):
                self.optimizer.param_groups[0]["params"].reverse()

    def _count(self) -> None:
        self.missing += sum(parameter.grad is None for parameter in self.model.parameters())

    def _look(self) -> None:
        self._count()
        self.seen = [parameter.detach().clone() for parameter in self.model.parameters()]

    def optimizer_step(self) -> None:
        super().optimizer_step()
        stale = sum(
            not torch.equal(one, other) for one, other in zip(self.seen, self.model.parameters())
        )
        note(stale=stale, missing=self.missing)


class Collecting(Net):
    """Makes a collective after the step; one rank ends before it in the third update."""

    def optimizer_step(self) -> None:
        super().optimizer_step()
        if (
            self.state.train.global_step == 2
            and self.rank == 2
            and os.environ["DANLING_ELASTIC_JOINS"] == "0"
        ):
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.zeros(1))


KINDS: dict[str, type[Net]] = {"": Net, "hooked": Hooked, "collecting": Collecting}


class Striker(Observer):
    """Ends this rank at a point."""

    critical = True

    def __init__(self, faults: Faults | Storm, runner: Net) -> None:
        self._faults = faults
        self._runner = runner
        self._has_changed = False
        self._step = 0

    def update_started(self) -> None:
        self._faults.at("update")

    def micro_batch_started(self, data: object, *, read: object, samples: float) -> None:
        self._faults.at("leaf")

    def gradients_ready(self, totals: object, norm: object) -> None:
        self._faults.at("reduced")

    def update_ended(self, outcome: object) -> None:
        self._step = self._runner.state.train.global_step
        if self._has_changed:
            self._has_changed = False
            note(
                update=self._step,
                again=time.time(),
                size=self._runner.world_size,
                members=self._members(),
            )
            if isinstance(self._faults, Storm):
                self._faults.made_update(self._members())
        self._faults.at("stepped")

    def _members(self) -> list[int]:
        ranks = self._runner._parts.elastic
        assert ranks is not None
        assert ranks.member.membership is not None
        return list(ranks.member.membership.members)

    def membership_changed(self, before: int, after: int) -> None:
        self._has_changed = True
        step = self._runner.state.train.global_step
        if step < self._step:
            note(lost=[step, self._step])
        self._step = step
        if isinstance(self._faults, Storm):
            self._faults.has_state()

    def evaluation_batch_started(self, split: str, number: int) -> None:
        self._faults.at("evaluating")

    def save_started(self) -> None:
        self._faults.at("save")

    def save_ended(self) -> None:
        self._faults.at("saved")


def strike_in_shards(faults: Faults | Storm, shards: Any, handover: Any) -> None:
    """End this rank in the collectives of a step on shards, when parts are sent after a change, or when they have come."""
    succeeds, exchange, exchange_all = shards._succeeds, shards.exchange, handover.exchange

    def struck_step(collective: Callable[[], object]) -> bool:
        name = "vote" if shards._phase == "sums" else "weights"

        def make() -> None:
            faults.at(name)
            faults.at(f"in_{name}")
            collective()
            faults.at(f"{name}_done")

        return bool(succeeds(make))

    def struck_exchange(now: Any) -> None:
        faults.at("exchange")
        faults.at("in_exchange")
        exchange(now)
        faults.at("exchange_done")

    def struck_exchange_of_all(now: Any) -> None:
        exchange_all(now)
        faults.at("taken")

    shards._succeeds, shards.exchange = struck_step, struck_exchange
    handover.exchange = struck_exchange_of_all


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
    return train_program(Net, root, **more)


def train_program(kind: type[Net], root: str, **more: Any) -> tuple[str, Net]:
    """Train a program in this process, and return the digest of the end."""
    with kind(settings(workspace_root=root, **more)) as runner:
        runner.train()
        return digest_of(runner), runner


def digest_of_file(path: Path) -> str:
    """Return the digest of what a checkpoint has of a training."""
    found = hashlib.sha256()
    payload = torch.load(path, weights_only=True)
    for name in ("model", "ema", "optimizer", "scheduler"):
        _add(found, payload[name])
    _add(
        found,
        {
            name: payload["state"]["train"][name]
            for name in ("global_step", "samples", "micro_step")
        },
    )
    return found.hexdigest()[:16]


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
    if "STORM" in os.environ:
        # A signal writes where this rank is.
        file = os.open(f"{os.environ['ROOT']}/python.{os.getpid()}", os.O_WRONLY | os.O_CREAT)
        faulthandler.register(signal.SIGUSR1, file=file)
    config = settings(workspace_root=os.environ["ROOT"], elastic={"enabled": True, **_elastic()})
    config["dir"] = os.environ["ROOT"] + "/run"
    with KINDS[os.environ.get("KIND", "")](config) as runner:
        ranks, training = runner._parts.elastic, runner._parts.elastic_training
        assert ranks is not None
        assert training is not None
        number = ranks.member.number
        faults = (
            Storm(number, has_shards=training.shards is not None)
            if "STORM" in os.environ
            else Faults(number)
        )
        files = _FILES[os.environ["OPENED"]]() if "OPENED" in os.environ else None
        faults.at("born")
        runner.observers.append(Striker(faults, runner))
        if training.shards is not None:
            strike_in_shards(faults, training.shards, training._handover)
        runner.train()
        note(
            end=_digest_alone(runner),
            repeated=training.repeated,
            changes=runner.changes,
            update=runner.state.train.global_step,
            rank=runner.rank,
            has=_bytes_of(runner.optimizer.state.values()),
        )
        if files is not None:
            files.tell()
    sys.stdout.flush()


def noted_error() -> None:
    """Be one rank, and note the error with which it ends."""
    try:
        elastic_rank()
    except BaseException as error:
        note(error=type(error).__name__, text=str(error))
        raise


def two_trainings() -> None:
    """Train, and try to train again with the same runner and with another one."""
    quiet()
    more = {
        "elastic": {"enabled": True},
        "steps": 3,
        "dir": os.environ["ROOT"] + "/run",
        "evaluate_interval": None,
    }
    with Net(settings(workspace_root=os.environ["ROOT"], **more)) as runner:
        runner.train()
        runner.config.steps = 6
        for again in (
            runner.train,
            lambda: Net(settings(workspace_root=os.environ["ROOT"], **more)),
        ):
            try:
                again()
            except ValueError as error:
                note(refused=str(error))


def _digest_alone(runner: Net) -> str:
    # `state_dict` gathers from all ranks, of which some may have ended.
    found = hashlib.sha256()
    # A rank has its own parts of what is in shards.
    shared = ["optimizer"] if runner.config.elastic.shard_state else []
    with runner.run_state.saved_elsewhere(*shared):
        parts = runner.run_state.components()
    for name in ("model", "ema", "optimizer", "scheduler"):
        _add(found, parts.get(name))
    _add(found, runner.results)
    _add(found, [runner.passes, runner.state.train.samples, runner.state.train.micro_step])
    return found.hexdigest()[:16]


def _bytes_of(states: Iterable[dict[str, Any]]) -> int:
    tensors = [
        value for state in states for value in state.values() if isinstance(value, torch.Tensor)
    ]
    return sum(tensor.nbytes for tensor in tensors)


def _elastic() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(os.environ.get("ELASTIC", "{}"))
    return found


Function = Callable[[], None]

if __name__ == "__main__":
    elastic_rank()

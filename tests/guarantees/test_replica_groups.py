"""Replica groups are killed and come back: the others go on, all end with the same weights, and no sample of theirs is lost."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from support.chaos import report, share
from support.replicas import Lighthouse, ReplicaGroup, note_heals
from support.toys import NoisyPoints, differences, whole_settings
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import danling as dl
from danling.data.sampler import Division, PositionedBatchSampler, Share
from danling.utils.tensors import local_part, whole

pytest.importorskip("torchft", reason="torchft is not installed")

KILLS = share(0.005, otherwise=2)
LIMIT = 100 + 20 * KILLS
TRAIN_SIZE = 40
BATCH_SIZE = (
    4  # a ragged last batch leaves two samples to each of four ranks, which BatchNorm needs
)


class GroupRunner(dl.Runner):
    """Writes down the ids of every update, tells how far it is, and stops at the step that a file names."""

    not_saved = ("committed", "heals", "window_ids")

    def __init__(self, config: dict[str, Any], board: Path) -> None:
        super().__init__(config)
        self.board = board
        self.window_ids: list[int] = []
        self.committed: list[tuple[int, int, list[int]]] = []
        self.heals: list[int] = []
        self.model = nn.Sequential(
            nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 3)
        )
        self.criterion = nn.CrossEntropyLoss()
        self.datasets = {"train": NoisyPoints(TRAIN_SIZE)}

    def train_step(self, data: dict[str, Any]) -> tuple[Any, Tensor]:
        time.sleep(0.01)
        self.window_ids += data["index"].tolist()
        return super().train_step((data["input"], data["target"]))

    def step(self) -> Any:
        stop_at = self.board / "stop"
        if stop_at.exists() and self.state.train.global_step == int(stop_at.read_text()) - 1:
            self.stop()
        epoch = self.sources["train"].epoch
        outcome = super().step()
        if outcome.committed:
            step = self.state.train.global_step
            self.committed.append((step, epoch, self.window_ids))
            (self.board / f"group-{self.config.ft.replica_id}-{self.rank}").write_text(str(step))
        self.window_ids = []
        return outcome

    def init_fault_tolerance(self) -> None:
        super().init_fault_tolerance()
        assert self.fault_tolerance is not None
        note_heals(self.fault_tolerance, self.note)

    def note(self) -> None:
        self.window_ids = []
        self.heals.append(self.state.train.global_step)


def settings(root: Path, group: int, stack: str) -> dict[str, Any]:
    more = {
        "stack": stack,
        "fsdp": {"enabled": stack == "parallel"},
        "steps": 10**6,
        "auto_resume": True,
    }
    more |= {"dataloader": {"batch_size": BATCH_SIZE, "drop_last": False}}
    more |= {
        "scheduler": {"type": "cosine", "total_steps": 10**6},
        "checkpoint": {"interval": 20, "keep_latest_k": 2},
    }
    ft = {"enabled": True, "replica_id": group, "group_size": 2, "process_group_timeout_ms": 5000}
    return whole_settings(root, **more, ft=ft)


def train(root: Path, group: int, stack: str) -> dict[str, Any]:
    with GroupRunner(settings(root, group, stack), root) as runner:
        runner.train()
        rates = [entry["lr"] for entry in runner.optimizer.param_groups]
        state = {
            "model": {
                name: whole(value).clone() for name, value in runner.model_state_dict().items()
            },
            "optimizer": tree_map_only(Tensor, local_part, runner.optimizer_state_dict()),
            "ema": tree_map_only(Tensor, local_part, runner.ema.state_dict()),
            "scheduler": runner.scheduler.state_dict(),
            "step": runner.state.train.global_step,
            "epoch": runner.state.train.epoch,
            "samples": runner.state.train.samples,
            "position": runner.sources["train"].state_dict(),
            "rates": rates,
        }
        return {"state": state, "committed": runner.committed, "heals": runner.heals}


def step_of(root: Path, group: int) -> int:
    try:
        return int((root / f"group-{group}-0").read_text() or 0)
    except FileNotFoundError:
        return 0


def reached(root: Path, group: int, step: int) -> Callable[[], bool]:
    return lambda: step_of(root, group) >= step


def expected_ids(
    committed: list[tuple[int, int, list[int]]], rank: int, world_size: int
) -> list[list[int]]:
    """Return the share of every update from the first to the last, read off the order of the whole run."""
    share, division = (
        Share("train", 3, rank, world_size),
        Division.of_batches(BATCH_SIZE, world_size),
    )
    sampler = PositionedBatchSampler(TRAIN_SIZE, share, division, shuffle=True, pad=True)
    shares: list[list[int]] = []
    for epoch in range(committed[-1][1] + 1):
        sampler.epoch = epoch
        batches = [list(keys.indices) for keys in sampler]
        shares += [list(chain(*batches[i : i + 2])) for i in range(0, len(batches), 2)]
    return shares


@pytest.mark.timeout(120 + 20 * KILLS)
@pytest.mark.parametrize(
    ("stack", "world_size"),
    [
        ("ddp", 1),
        *(pytest.param(stack, 2, marks=pytest.mark.slow) for stack in ("parallel", "ddp")),
    ],
)
def test_a_group_is_killed_again_and_again(stack: str, world_size: int, tmp_path: Path) -> None:
    instants = random.Random(f"{stack} {world_size}")
    with (
        Lighthouse() as lighthouse,
        ReplicaGroup(
            train, tmp_path, 0, stack, world_size=world_size, lighthouse=lighthouse, timeout=LIMIT
        ) as steady,
        ReplicaGroup(
            train, tmp_path, 1, stack, world_size=world_size, lighthouse=lighthouse, timeout=LIMIT
        ) as killed,
    ):
        steady.wait_until(reached(tmp_path, 0, 6))
        killed.wait_until(reached(tmp_path, 1, 6))
        for _ in range(KILLS):
            time.sleep(instants.uniform(0.0, 1.0))
            killed.kill()
            died_at = step_of(tmp_path, 0)
            steady.wait_until(reached(tmp_path, 0, died_at + 4))
            killed.start()
            killed.wait_until(reached(tmp_path, 1, died_at + 6))
        (tmp_path / "stop").write_text(str(max(step_of(tmp_path, 0), step_of(tmp_path, 1)) + 20))
        healthy, returned = steady.values(), killed.values()
    for ended, other in zip(returned, healthy, strict=True):
        assert differences(ended["state"], other["state"]) == []
    for ended in healthy:
        # Averages of buffers are a rank's own, as the buffers are between two forwards of DistributedDataParallel.
        assert differences(ended["state"]["model"], healthy[0]["state"]["model"]) == []
    for rank, ended in enumerate(healthy):
        # It may have met the other one some updates after that had begun alone.
        steps = [step for step, _, _ in ended["committed"]]
        assert steps == list(range(steps[0], ended["state"]["step"] + 1))
        shares = expected_ids(ended["committed"], rank, 2 * world_size)
        assert all(ids == shares[step - 1] for step, _, ids in ended["committed"])
    for rank, ended in enumerate(returned):
        assert len(ended["heals"]) >= 1
        shares = expected_ids(ended["committed"], world_size + rank, 2 * world_size)
        assert all(ids == shares[step - 1] for step, _, ids in ended["committed"])
    assert torch.isfinite(healthy[0]["state"]["model"]["0.weight"]).all()
    report(f"replica groups, one of two killed: {stack}, {world_size} processes each", KILLS, 1)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_restarted_lighthouse_is_asked_again(tmp_path: Path) -> None:
    with (
        Lighthouse() as lighthouse,
        ReplicaGroup(
            train, tmp_path, 0, "ddp", world_size=1, lighthouse=lighthouse, timeout=LIMIT
        ) as first,
        ReplicaGroup(
            train, tmp_path, 1, "ddp", world_size=1, lighthouse=lighthouse, timeout=LIMIT
        ) as second,
    ):
        first.wait_until(reached(tmp_path, 0, 6))
        second.wait_until(reached(tmp_path, 1, 6))
        lighthouse.stop()
        time.sleep(6.0)  # the outage
        before = step_of(tmp_path, 0)
        lighthouse.start()
        first.wait_until(reached(tmp_path, 0, before + 10))
        second.wait_until(reached(tmp_path, 1, before + 10))
        (tmp_path / "stop").write_text(str(max(step_of(tmp_path, 0), step_of(tmp_path, 1)) + 20))
        ended, other = first.values(), second.values()
    assert differences(ended[0]["state"], other[0]["state"]) == []
    made = {step for values in (ended, other) for step, _, _ in values[0]["committed"]}
    assert made == set(range(1, max(made) + 1))

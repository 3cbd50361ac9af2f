"""A replica group's own loader states: saved beside the full checkpoints, kept as long, and preferred when a run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.datasets import Stream, stateful_loader
from torch import nn
from torch.utils.data import TensorDataset

import danling as dl
from danling.checkpoints import CheckpointSettings
from danling.data import build_dataloader, open_source
from danling.distributed import LocalDomain
from danling.torchft import OwnPositions, ReplicaLoaderCheckpoints
from danling.training.loader_states import share_of


def checkpoints(directory: Path, replica: str = "1", **changes: Any) -> ReplicaLoaderCheckpoints:
    return ReplicaLoaderCheckpoints(
        directory,
        replica=replica,
        prefix="ft-replica",
        domain=LocalDomain(),
        run_id="run",
        settings=CheckpointSettings(**changes),
    )


def test_the_newest_state_that_is_not_ahead_is_taken(tmp_path: Path) -> None:
    manager = checkpoints(tmp_path)
    for step in (2, 4, 6):
        manager.save({"train": {"consumed": step}}, epoch=0, global_step=step)
    fresh = checkpoints(tmp_path)
    assert fresh.load(1) is None
    assert fresh.load(5) == ({"train": {"consumed": 4}}, 4)
    assert fresh.load(6) == ({"train": {"consumed": 6}}, 6)


def test_groups_keep_apart_and_old_states_go(tmp_path: Path) -> None:
    one, two = checkpoints(tmp_path, "1", keep_latest_k=2), checkpoints(tmp_path, "2", keep_latest_k=2)
    for step in range(1, 6):
        one.save({"train": step}, epoch=0, global_step=step)
    two.save({"train": -1}, epoch=0, global_step=3)
    assert sorted(path.name for path in (tmp_path / "ft-replica-1").glob("ckpt-*.pth")) == [
        "ckpt-s000000000004.pth",
        "ckpt-s000000000005.pth",
    ]
    assert checkpoints(tmp_path, "2").load(9) == ({"train": -1}, 3)


class Place:
    """Counters of a run."""

    epoch = 0
    global_step = 0


@pytest.mark.parametrize(("is_local", "moved"), [(True, True), (True, False), (False, True), (False, False)])
def test_a_place_of_another_step_is_taken_by_loaders_with_a_state_of_their_own_only(
    is_local: bool, moved: bool, tmp_path: Path
) -> None:
    place, left_out = Place(), set[str]()

    def reading() -> tuple[OwnPositions, Any]:
        loader: Any = stateful_loader(list(range(20)), batch_size=2) if is_local else None
        built = loader or build_dataloader(
            list(range(20)), {"batch_size": 2}, split="train", train=True, seed=1, device=torch.device("cpu")
        )
        source = open_source(built, split="train", share=(0, 1), seed=1)
        positions = OwnPositions(
            checkpoints(tmp_path),
            sources=lambda: {"train": source},
            trained=lambda: {"train": source},
            position=lambda: place,
            share=lambda split, state: share_of(state, split, rank=0, size=1, inexact=False),
            leaves_out=left_out.__contains__,
            world=LocalDomain(),
            data_rank=lambda: 0,
        )
        return positions, source

    positions, source = reading()
    positions.load()  # nothing was saved
    source.commit([batch for batch, _ in zip(source.batches(), range(3))])
    consumed, place.global_step = source.consumed, 3
    positions.save()
    place.global_step += moved
    resumed, fresh = reading()
    before = torch.get_rng_state()
    resumed.load()
    assert fresh.consumed == (consumed if is_local or not moved else 0)
    assert torch.equal(torch.get_rng_state(), before)
    left_out.add("train")
    resumed, fresh = reading()
    resumed.load()
    assert fresh.consumed == 0


class Reader(dl.TorchRunner):
    """Reads a stream by a loader of the user's own, which keeps a state of its own, or a dataset by one of the library."""

    not_saved = ("seen",)

    def __init__(self, config: dict[str, Any], own_loader: bool) -> None:
        super().__init__(config)
        self.model = nn.Linear(1, 1)
        self.criterion = nn.MSELoss()
        self.seen: list[int] = []
        if own_loader:
            self.dataloaders["train"] = stateful_loader(Stream(100), batch_size=2)
        else:
            self.datasets = {"train": TensorDataset(torch.arange(100))}

    def train_step(self, data: Any) -> tuple[Any, torch.Tensor]:
        """Note what is read."""
        numbers = data if isinstance(data, torch.Tensor) else data[0]
        self.seen += numbers.tolist()
        inputs = numbers.float().unsqueeze(1) / 100
        return super().train_step((inputs, inputs))


def settings(root: Path, steps: int, **checkpoint: Any) -> dict[str, Any]:
    return {
        "seed": 1,
        "steps": steps,
        "dataloader": {"batch_size": 2, "shuffle": False},
        "optim": {"type": "sgd", "lr": 0.01},
        "workspace_root": str(root),
        "auto_resume": True,
        "checkpoint": {"interval": 2, "async_enabled": False, **checkpoint},
    }


def read(root: Path, steps: int, own_loader: bool, **checkpoint: Any) -> list[int]:
    with Reader(settings(root, steps, **checkpoint), own_loader) as runner:
        runner.train()
        return runner.seen


OWN: dict[str, Any] = {"enable_ft_dataloader_checkpoints": True, "ft_replica_id": "left"}


@pytest.mark.parametrize("own_loader", [True, False])
def test_a_groups_own_state_wins_when_it_goes_on(own_loader: bool, tmp_path: Path) -> None:
    assert read(tmp_path, 4, own_loader, **OWN) == list(range(8))
    (directory,) = tmp_path.rglob("ft-replica-left")
    ours = ReplicaLoaderCheckpoints(
        directory.parent,
        replica="left",
        prefix="ft-replica",
        domain=LocalDomain(),
        run_id=directory.parent.parent.name,
        settings=CheckpointSettings(),
    )
    states, step = ours.load(2) or ({}, 0)
    assert step == 2
    # As if this group stood elsewhere at step 4 than the one that wrote the full checkpoint.
    ours.save(states, epoch=0, global_step=4)
    assert read(tmp_path, 6, own_loader, **OWN) == [4, 5, 6, 7]


def test_another_steps_position_is_left_alone_where_all_groups_share_one(tmp_path: Path) -> None:
    """A common position that differed between groups would end their passes at different updates."""
    read(tmp_path, 4, False, **OWN)
    (directory,) = tmp_path.rglob("ft-replica-left")
    for path in directory.glob("*s000000000004.pth*"):
        path.unlink()
    assert read(tmp_path, 5, False, **OWN) == [8, 9]


def test_excluded_loaders_stay_at_their_beginning(tmp_path: Path) -> None:
    read(tmp_path, 4, True, **OWN)
    assert read(tmp_path, 5, True, exclude_from_loading=["dataloader"], **OWN) == [0, 1]

"""A replica group's own loader states: saved with the full checkpoints, kept as long, and preferred when a run resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.datasets import Stream, stateful_loader
from torch import nn
from torch.utils.data import TensorDataset

import danling as dl
from danling.config import RunnerConfig
from danling.torchft.member import position_owner


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
def test_a_position_of_another_step_is_taken_by_loaders_with_a_state_of_their_own_only(
    own_loader: bool, tmp_path: Path
) -> None:
    """A common position that differed between groups would end their passes at different updates."""
    assert read(tmp_path, 4, own_loader, **OWN) == list(range(8))
    (directory,) = tmp_path.rglob("ft-replica-left")
    for path in directory.glob("*s000000000004.pth*"):
        path.unlink()
    # The full checkpoint is of step 4, the newest position of this group of step 2.
    assert read(tmp_path, 6, own_loader, **OWN) == ([4, 5, 6, 7] if own_loader else [8, 9, 10, 11])


def test_groups_have_directories_of_their_own_and_old_states_go(tmp_path: Path) -> None:
    for replica, steps in (("left", 10), ("right", 12)):
        read(tmp_path, steps, True, **{**OWN, "ft_replica_id": replica, "keep_latest_k": 2})
    for replica, kept in (("left", [8, 10]), ("right", [12])):
        (directory,) = tmp_path.rglob(f"ft-replica-{replica}")
        assert sorted(path.name for path in directory.glob("ckpt-*.pth")) == [
            f"ckpt-s{step:012d}.pth" for step in kept
        ]


def test_excluded_loaders_start_from_their_beginning(tmp_path: Path) -> None:
    read(tmp_path, 4, True, **OWN)
    assert read(tmp_path, 5, True, exclude_from_loading=["dataloader"], **OWN) == [0, 1]


def test_every_group_keeps_its_own_position() -> None:
    asked = {"enable_ft_dataloader_checkpoints": True}
    groups = {"enabled": True, "replica_id": 2, "group_size": 3}
    for settings, owner in (
        ({}, None),
        ({"ft": groups}, "2"),
        ({"checkpoint": asked}, None),
        ({"checkpoint": asked, "ft": groups}, "2"),
        ({"checkpoint": {**asked, "ft_replica_id": "mine"}, "ft": groups}, "mine"),
        ({"checkpoint": {**asked, "ft_replica_id": "mine"}}, "mine"),
    ):
        assert position_owner(RunnerConfig(settings)) == owner

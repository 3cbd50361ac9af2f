"""One bit that flips on one rank is found at the next digest, named, and not saved; runs in order raise no alarm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_outcomes, run_processes
from support.toys import NoisyPoints
from torch import Tensor, nn

import danling as dl
from danling.audit.digests import read_digests
from danling.distributed import ReplicaDriftError
from danling.utils.tensors import local_part, whole


class Small(dl.Runner):
    """A network that flips a bit of a weight or of its second moment, after an update on one rank."""

    def __init__(
        self, config: dict[str, Any], flip: str | None = None, at: int = 4, rank: int = 1
    ) -> None:
        super().__init__(config)
        self.flip, self.flip_at, self.flip_rank = flip, at, rank
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        self.criterion = nn.CrossEntropyLoss()
        self.datasets = {"train": NoisyPoints(64)}

    def train_step(self, data: dict[str, Any]) -> tuple[Any, Tensor]:
        return super().train_step((data["input"], data["target"]))

    def optimizer_step(self) -> None:
        super().optimizer_step()
        if (
            self.flip is None
            or self.state.train.global_step + 1 != self.flip_at
            or self.rank != self.flip_rank
        ):
            return
        weight = dict(self.named_parameters())["3.weight"]
        flipped = weight if self.flip == "weight" else self.optimizer.state[weight]["exp_avg_sq"]
        with torch.no_grad():
            local_part(flipped.detach()).view(torch.int32).view(-1)[0] ^= 1


def settings(root: Path | str, **more: Any) -> dict[str, Any]:
    config = {
        "seed": 1,
        "steps": 8,
        "dir": str(root),
        "log_interval": 4,
        "checkpoint.interval": 2,
        "audit.digest_interval": 2,
    }
    return config | {"optim": {"type": "adamw", "lr": 0.01}, "dataloader": {"batch_size": 4}} | more


def train(root: str, more: dict[str, Any], *flip: Any) -> dict[str, Tensor]:
    with Small(settings(root, **more), *flip) as runner:
        runner.train()
        moments = {
            f"{name}/{key}": whole(value).clone()
            for name, parameter in runner.named_parameters()
            for key, value in runner.optimizer.state[parameter].items()
        }
        with runner.whole_weights():
            return moments | {
                name: value.detach().clone() for name, value in runner.named_parameters()
            }


HSDP = {
    "stack": "parallel",
    "parallel.axes.replicate": 2,
    "parallel.axes.shard": 2,
    "fsdp.enabled": True,
}


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("weight", "'3.weight' .* in 'weights.0'"),
        ("moment", "'3.weight/exp_avg_sq' .* in 'optimizer.0'"),
    ],
)
def test_a_flipped_bit_on_one_of_two_ranks_is_named_and_not_saved(
    what: str, named: str, tmp_path: Path
) -> None:
    outcomes = run_outcomes(train, str(tmp_path), {}, what, 4, 1, world_size=2)
    for outcome in outcomes:
        assert isinstance(outcome.error, ReplicaDriftError), outcome.traceback
        with pytest.raises(
            ReplicaDriftError,
            match=f"after update 4. Received: rank 1 differs from rank 0 in {named}",
        ):
            raise outcome.error
    # That of update 4 is the one that the error kept from being published.
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("ckpt-*.pth")) == [
        "ckpt-s000000000002.pth"
    ]
    assert list(read_digests(tmp_path)) == [2]


def test_between_saves_it_is_found_in_the_collective_of_the_next_update(tmp_path: Path) -> None:
    outcomes = run_outcomes(
        train,
        str(tmp_path),
        {"checkpoint.interval": 8, "evaluate_interval": 8},
        "weight",
        3,
        1,
        world_size=2,
    )
    for outcome in outcomes:
        assert isinstance(outcome.error, ReplicaDriftError) and "after update 4. " in str(
            outcome.error
        )
        assert (
            "in _sum" in outcome.traceback and "in settle" not in outcome.traceback
        )  # not in a collective of its own


def test_rank_different_from_its_copy_is_named_with_replicas_of_shards(tmp_path: Path) -> None:
    outcomes = run_outcomes(train, str(tmp_path), HSDP, "weight", 4, 3, world_size=4)
    for outcome in outcomes:
        assert isinstance(outcome.error, ReplicaDriftError), outcome.traceback
        assert "rank 3 differs from rank 1 in '3.weight' and 0 more" in str(outcome.error)


@pytest.mark.parametrize(
    "others",
    [("replicate", "shard"), pytest.param(("hsdp",), marks=pytest.mark.slow)],
    ids=["two", "four"],
)
def test_digests_are_those_of_the_weights_whatever_the_layout(
    others: tuple[str, ...], tmp_path: Path
) -> None:
    layouts: dict[str, tuple[int, dict[str, Any]]] = {
        "ddp": (2, {}),
        "replicate": (2, {"stack": "parallel", "parallel.axes.replicate": 2}),
        "shard": (2, {"stack": "parallel", "parallel.axes.shard": 2, "fsdp.enabled": True}),
        "hsdp": (4, HSDP),
    }
    found = {}
    for name in ("ddp", *others):
        size, more = layouts[name]
        # The loop over tensors everywhere: a fused step, which shards have not, rounds as it likes on each kind of CPU.
        more["optim"] = {"type": "adamw", "lr": 0.01, "fused": False}
        # The noise of a sample must not depend on its batch, of which there are more on four ranks.
        more["dataloader"] = {"batch_size": 8 // size, "keyed": "sample"}
        tensors = run_processes(train, str(tmp_path / name), more, world_size=size)[0]
        found[name] = tensors, read_digests(tmp_path / name)
        assert list(found[name][1]) == [2, 4, 6, 8]
    for name, (tensors, digests) in found.items():
        for column, slashes in (("weights.0", 0), ("optimizer.0", 1)):
            same = all(
                torch.equal(tensors[k], found["ddp"][0][k])
                for k in tensors
                if k.count("/") == slashes
            )
            assert same == (digests[8].digests[column] == found["ddp"][1][8].digests[column]), (
                name,
                column,
            )
        assert digests[2].digests["samples"] == found["ddp"][1][2].digests["samples"]
    if "shard" in others:
        assert found["shard"][1][8].digests["weights.0"] == found["ddp"][1][8].digests["weights.0"]


def test_resumed_run_writes_the_digests_of_an_uninterrupted_one(tmp_path: Path) -> None:
    train(str(tmp_path / "whole"), {})
    train(str(tmp_path / "parts"), {"steps": 5})
    train(str(tmp_path / "parts"), {"auto_resume": True})
    whole, parts = read_digests(tmp_path / "whole"), read_digests(tmp_path / "parts")
    assert list(whole) == [2, 4, 6, 8] and whole == parts
    assert {*whole[2].digests} == {"weights.0", "optimizer.0", "buffers", "samples"}


def test_trained_weights_and_checkpoints_are_those_of_a_run_without(tmp_path: Path) -> None:
    with_it = train(str(tmp_path / "with"), {})
    without = train(str(tmp_path / "without"), {"audit.digest_interval": None})
    assert all(torch.equal(with_it[name], without[name]) for name in without)
    assert not (tmp_path / "without" / "digests.jsonl").exists()

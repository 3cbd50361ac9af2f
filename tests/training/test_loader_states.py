"""What a checkpoint holds of loaders, one position or a state on each data replica, and what a rank takes of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, TensorDataset

from danling.checkpoints import CheckpointMismatch
from danling.config import RunnerConfig
from danling.data import build_dataloader, open_source
from danling.distributed import LocalDomain
from danling.training.loader_states import (
    differences_of_passes,
    own_states,
    restore_positions,
    share_of,
    share_of_rank,
    state_of,
    states_of_all,
)


def test_a_position_is_one_for_all_ranks() -> None:
    dataset = TensorDataset(torch.arange(10))
    loader = build_dataloader(
        dataset, {"batch_size": 2}, split="train", train=True, seed=1, rank=0, world_size=1, device=torch.device("cpu")
    )
    source = open_source(loader, split="train", rank=0, world_size=1, seed=1)
    assert own_states({"train": source}) == {}
    state = state_of("train", source, [(0, {}), (1, {})])
    assert state == source.state_dict() and share_of(state, "train", rank=1, size=4, inexact=False) is state


class Numbers(IterableDataset[int]):
    """Counts from where it stands."""

    at = 0

    def __iter__(self) -> Any:
        while self.at < 6:
            self.at += 1
            yield self.at

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go there."""
        self.at = state["at"]


def test_states_of_each_replica_are_handed_back_to_it(caplog: pytest.LogCaptureFixture) -> None:
    source = open_source(TorchDataLoader(Numbers(), batch_size=2), split="train", rank=0, world_size=2, seed=1)
    assert source.is_rank_local
    mine = own_states({"train": source})
    # Ranks 0 and 1 read the same data.
    state = state_of("train", source, [(0, mine), (0, {"train": {"other": 1}}), (1, {"train": {"second": 2}})])
    assert state == {"ranks": {"0": mine["train"], "1": {"second": 2}}}
    assert share_of(state, "train", rank=1, size=2, inexact=False) == {"second": 2}
    with pytest.raises(CheckpointMismatch, match="Expected 2 data replicas"):
        share_of(state, "train", rank=0, size=3, inexact=False)
    with caplog.at_level("WARNING", logger="danling"):
        assert share_of(state, "train", rank=0, size=3, inexact=True) is None
    assert "there are 3 now: it starts anew" in caplog.text


def test_passes_that_end_elsewhere_are_named() -> None:
    dataset = TensorDataset(torch.arange(10))
    built = {"split": "train", "train": True, "seed": 1, "rank": 0, "world_size": 1, "device": torch.device("cpu")}
    fours = build_dataloader(dataset, {"batch_size": 4, "drop_last": True}, **built)
    assert isinstance(fours.state_dict(), dict)
    stored = {"train": {"end": 9, "length": 10}}
    (line,) = differences_of_passes(stored, {"train": fours})
    assert line.startswith("dataloader.batch_size: stored passes of 9 out of 10 samples") and "now of 8" in line
    assert differences_of_passes({"train": {"end": 8, "length": 10}}, {"train": fours}) == []
    # Another dataset is refused by the loader itself.
    assert differences_of_passes({"train": {"end": 9, "length": 12}}, {"train": fours}) == []
    assert differences_of_passes({}, {"train": fours}) == []
    assert differences_of_passes(stored, {"train": [1, 2]}) == []


def test_states_of_several_splits_are_those_of_each() -> None:
    sources = {name: open_source([1, 2], split=name) for name in ("train", "more")}
    ranks = [(0, own_states(sources)), (1, own_states(sources))]
    found = states_of_all(sources, iter(ranks))
    assert found == {name: state_of(name, source, ranks) for name, source in sources.items()}
    assert found["more"]["ranks"].keys() == {"0", "1"}


def test_positions_of_the_splits_to_train_on_are_put_back() -> None:
    sources = {name: open_source([1, 2, 3], split=name) for name in ("train", "more")}
    before = {name: open_source([1, 2, 3], split=name) for name in sources}
    for source in before.values():
        source.commit([next(iter(source.batches()))])
    config = RunnerConfig()
    run: Any = SimpleNamespace(
        source=sources.__getitem__, train_splits=["train", "more"], data_domain=LocalDomain(), config=config
    )
    restore_positions(run, {"train": before["train"].state_dict(), "more": None})
    assert (sources["train"].consumed, sources["more"].consumed) == (1, 0)
    run.train_splits = ["val"]
    with pytest.raises(CheckpointMismatch, match=r"state of split 'val'.*\['more', 'train'\]"):
        restore_positions(run, {"train": None, "more": None})
    of_two_ranks = {"ranks": {"0": {"a": 1}, "1": {"a": 2}}}
    with pytest.raises(CheckpointMismatch, match="on each of 2 data replicas"):
        share_of_rank(run, "train", of_two_ranks)
    config.parallel.allow_degree_change = True
    assert share_of_rank(run, "train", of_two_ranks) is None

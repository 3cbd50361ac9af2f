"""Map-style datasets with a state of their own: it comes back with the position, in this process and in workers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy
import pytest
import torch
from support.datasets import drain, read
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset
from torch.utils.data import DataLoader as TorchDataLoader

from danling.data import BatchSource, build_dataloader, open_source
from danling.data.dataset_state import DatasetState, from_plain, to_plain


class Counting(Dataset[Tensor]):
    """Counts what it was asked for, and shows the count in its samples."""

    def __init__(self) -> None:
        self.reads = numpy.zeros(10, dtype=numpy.uint8)

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        self.reads[index] += 1
        return torch.tensor([index, int(self.reads.sum())])

    def state_dict(self) -> dict[str, Any]:
        return {"reads": self.reads}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reads = state["reads"]


def source_of(kind: str, **settings: Any) -> BatchSource:
    data: Any = {"itself": Counting, "subset": lambda: Subset(Counting(), range(9))}.get(
        kind, lambda: ConcatDataset([Counting(), Counting()])
    )()
    if kind == "of a loader":
        return open_source(TorchDataLoader(data, batch_size=2, shuffle=True, **settings), split="train", seed=3)
    loader = build_dataloader(data, {"batch_size": 2, **settings}, split="train", train=True, seed=3)
    return open_source(loader, split="train", seed=3)


@pytest.mark.parametrize(
    ("kind", "settings", "stops"),
    [
        ("itself", {}, range(13)),
        ("subset", {}, range(13)),
        ("concatenated", {}, range(13)),
        ("of a loader", {}, range(13)),
        # With workers, which are started for each pass and again for each resume, within the first pass or within the second one.
        ("itself", {"num_workers": 2}, (3,)),
        ("itself", {"num_workers": 2, "persistent_workers": True}, (6,)),
        pytest.param("itself", {"num_workers": 2}, (6,), marks=pytest.mark.slow),
        pytest.param("itself", {"num_workers": 2, "persistent_workers": True}, (3,), marks=pytest.mark.slow),
        pytest.param("of a loader", {"num_workers": 2}, (3, 6), marks=pytest.mark.slow),
        pytest.param("concatenated", {"num_workers": 3}, (3, 6), marks=pytest.mark.slow),
    ],
)
def test_it_comes_back(kind: str, settings: dict[str, Any], stops: Sequence[int]) -> None:
    source = source_of(kind, **settings)
    whole = read(source, 13)
    source.close()
    for stop in stops:
        first, second = source_of(kind, **settings), source_of(kind, **settings)
        taken = read(first, stop)
        state = copy.deepcopy(first.state_dict())
        first.close()
        second.load_state_dict(state)
        taken += read(second, 13 - stop)
        second.close()
        assert all(torch.equal(one, other) for one, other in zip(taken, whole, strict=True)), stop


def test_workers_go_on_from_what_was_consumed_not_from_what_was_fetched() -> None:
    held = DatasetState(Counting(), "train", 2)
    held.begin(first=True)
    batches = held.unwrapped(iter([(0, {"read": 1}, "a"), (1, {"read": 2}, "b"), (0, {"read": 3}, "c")]))
    assert list(batches) == ["a", "b", "c"]
    # New workers begin with the first one, which gives the next batch.
    held.advance(1)
    assert held.state_dict()["workers"] == {"1": {"read": 1}}
    held.advance(1)
    assert held.state_dict()["workers"] == {"0": {"read": 1}, "1": {"read": 2}}
    held.advance(1)
    assert held.state_dict()["workers"] == {"0": {"read": 2}, "1": {"read": 3}}


def test_another_number_of_workers_within_an_epoch_is_refused() -> None:
    first = source_of("itself")
    drain(first, 2)
    with pytest.raises(ValueError, match=r"Expected num_workers=0 for split 'train'.*Received: num_workers=2"):
        source_of("itself", num_workers=2).load_state_dict(first.state_dict())


def test_each_rank_has_its_own() -> None:
    assert source_of("itself").is_rank_local
    assert not open_source(build_dataloader([1], {}, split="a", train=False, seed=1), split="a").is_rank_local


def test_a_state_that_cannot_be_saved_is_refused() -> None:
    class Unsavable(Counting):
        def state_dict(self) -> dict[str, Any]:
            return {"counts": [1, {"of": self}]}

    with pytest.raises(
        ValueError, match=r"Unsavable.state_dict\(\) of split 'train'.*state_dict\(\)\['counts'\]\[1\]\['of'\] is"
    ):
        build_dataloader(Unsavable(), {}, split="train", train=True, seed=3)


def test_plain_states_are_read_without_pickle(tmp_path: Any) -> None:
    arrays = [numpy.arange(2).astype(kind) for kind in ("uint64", "uint8", "int32", "float32", "bool")]
    state = {"a": arrays, "b": (1, {"x": {2}}), "n": numpy.float64(0.1), "big": numpy.array([2**64 - 1], "uint64")}
    torch.save(to_plain(state), tmp_path / "state.pt")
    back = from_plain(torch.load(tmp_path / "state.pt", weights_only=True))
    for one, other in zip([*arrays, state["big"]], back["a"] + [back["big"]], strict=True):
        assert one.dtype == other.dtype and (one == other).all()  # type: ignore[union-attr,attr-defined]
    assert back["b"] == state["b"] and back["n"] == 0.1 and type(back["n"]) is numpy.float64

"""Map-style datasets with a state of their own: it comes back with the position, in this process and in workers."""

from __future__ import annotations

import copy
import logging
from typing import Any

import numpy
import pytest
import torch
from support.datasets import check_resume, read, source_over
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset
from torch.utils.data import DataLoader as TorchDataLoader

import danling as dl
from danling.data import BatchSource, build_dataloader, open_source
from danling.data.dataset_state import DatasetCopies, from_plain, to_plain
from danling.training.attribute_snapshot import AttributeSnapshot


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
    known: dict[str, Any] = {
        "itself": Counting,
        "seldom": Seldom,
        "subset": lambda: Subset(Counting(), range(9)),
    }
    data = known.get(kind, lambda: ConcatDataset([Counting(), Counting()]))()
    if kind == "of a loader":
        return open_source(
            TorchDataLoader(data, batch_size=2, shuffle=True, **settings), split="train", seed=3
        )
    return source_over(data, batch_size=2, **settings)


@pytest.mark.parametrize("kind", ["itself", "subset", "concatenated", "of a loader"])
def test_it_comes_back(kind: str) -> None:
    check_resume(lambda: source_of(kind), 13, range(13))


class Seldom(Counting):
    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) if index == 9 else torch.tensor([index, 0])


@pytest.mark.parametrize(("kind", "batches"), [("subset", 0), ("of a loader", 0), ("seldom", 4)])
def test_dataset_changed_by_reading_is_refused_in_workers(kind: str, batches: int) -> None:
    source = source_of(kind, num_workers=1, **({"shuffle": False} if kind == "seldom" else {}))
    assert len(read(source, batches)) == batches
    with pytest.raises(
        RuntimeError, match=r"Expected dataloader.num_workers=0 for split 'train': reading changes"
    ):
        read(source, 1)
    source.close()


def test_state_changed_between_two_passes_comes_back_with_workers() -> None:
    class Harder(Counting):
        def __getitem__(self, index: int) -> Tensor:
            return torch.tensor([index, int(self.reads[0])])

        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "best": float("nan")}

    first, second = (source_over(Harder(), batch_size=5, num_workers=1) for _ in range(2))
    first.loader.dataset.reads[0] = 7
    taken = read(first, 1)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert {row[1] for batch in taken + read(second, 1) for row in batch.tolist()} == {7}
    first.close()
    second.close()


def test_another_dataset_is_refused() -> None:
    state = source_of("subset").state_dict()
    with pytest.raises(
        ValueError, match=r"\(dataset.datasets\[0\], .*Received: that of dataset.dataset. Restore"
    ):
        source_of("concatenated").load_state_dict({**state, "length": 20, "consumed": 0})


def test_each_rank_has_its_own() -> None:
    assert source_of("itself").is_rank_local
    assert not source_over([1]).is_rank_local


def test_unsavable_state_is_refused() -> None:
    class Unsavable(Counting):
        def state_dict(self) -> dict[str, Any]:
            return {"counts": [1, {"of": self}]}

    with pytest.raises(
        ValueError,
        match=r"Unsavable.state_dict\(\) of split 'train'.*state_dict\(\)\['counts'\]\[1\]\['of'\] is",
    ):
        build_dataloader(Unsavable(), {}, split="train", train=True, seed=3)


def test_plain_states_are_read_without_pickle(tmp_path: Any) -> None:
    arrays = [
        numpy.arange(2).astype(kind) for kind in ("uint64", "uint8", "int32", "float32", "bool")
    ]
    state = {
        "a": arrays,
        "b": (1, {"x": {2}}),
        "n": numpy.float64(0.1),
        "big": numpy.array([2**64 - 1], "uint64"),
    }
    torch.save(to_plain(state), tmp_path / "state.pt")
    back = from_plain(torch.load(tmp_path / "state.pt", weights_only=True))
    for one, other in zip([*arrays, state["big"]], back["a"] + [back["big"]], strict=True):
        assert one.dtype == other.dtype and (one == other).all()  # type: ignore[union-attr,attr-defined]
    assert back["b"] == state["b"] and back["n"] == 0.1 and type(back["n"]) is numpy.float64


STATES: dict[str, Any] = {
    "set of tuples": {(1, "a"), (2, "b")},
    "frozen set": frozenset({b"x", numpy.int64(3)}),
    "texts": numpy.array(["ab", "c"]),
    "empty array": numpy.zeros((0, 3)),
    "mapping with a kind": {
        "kind": "array",
        "dtype": "<f4",
        "shape": [1],
        "value": torch.zeros(4, dtype=torch.uint8),
    },
    "kind of a set": {"kind": "set", "items": [1]},
    "nested": [{"kind": 1}, (frozenset({1}), numpy.bool_(True))],
}


def same(first: Any, second: Any) -> bool:
    if isinstance(first, (list, tuple)):
        return type(first) is type(second) and all(map(same, first, second))
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (numpy.ndarray, Tensor)):
        return (
            type(first) is type(second)
            and first.dtype == second.dtype
            and first.tolist() == second.tolist()
        )
    return type(first) is type(second) and bool(first == second)


@pytest.mark.parametrize("name", STATES)
def test_state_comes_back_as_it_was(name: str, tmp_path: Any) -> None:
    torch.save(to_plain(STATES[name]), tmp_path / "state.pt")
    assert same(from_plain(torch.load(tmp_path / "state.pt", weights_only=True)), STATES[name])


class Bare(dl.TorchRunner):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = nn.Linear(1, 1)


def test_arrays_and_sets_are_encoded_as_those_of_attributes(tmp_path: Any) -> None:
    values = {
        "array": numpy.arange(3.0),
        "scalar": numpy.float32(2.5),
        "set": {3, 1, "a"},
        "frozen": frozenset({(1, 2)}),
    }
    with Bare({"dir": str(tmp_path), "log": False}) as runner:
        snapshot = AttributeSnapshot(runner)
        for name, value in values.items():
            assert same(to_plain(value), snapshot.attribute(name, value).node)


@pytest.mark.parametrize("dtype", [None, "V", "S", "U", "O"])
def test_forged_item_of_a_set_takes_no_memory(dtype: str | None) -> None:
    item = (
        {"kind": "bytes", "items": 10**13}
        if dtype is None
        else {"kind": "scalar", "dtype": dtype, "item": 10**13}
    )
    with pytest.raises((TypeError, ValueError)):
        from_plain({"kind": "set", "items": [item]})


def test_state_of_an_older_checkpoint_is_read() -> None:
    bits = torch.frombuffer(bytearray(numpy.arange(3, dtype="<i4").tobytes()), dtype=torch.uint8)
    older = {
        "a": {"__numpy_array__": "<i4", "shape": [3], "data": bits},
        "s": {1, 2},
        "d": {"kind": "odd", "n": 1},
    }
    assert same(
        from_plain(older),
        {"a": numpy.arange(3, dtype="<i4"), "s": {1, 2}, "d": {"kind": "odd", "n": 1}},
    )


def changes() -> int:
    return 0


class Referring(Dataset[Tensor]):
    """Refers to objects of the program, which change for other reasons, and to a tensor that counts no changes."""

    def __init__(self) -> None:
        self.logger = logging.getLogger("tests.referring")
        self.of_program = [numpy, Tensor, changes]
        self.unknown = float("nan")
        with torch.inference_mode():
            self.inputs = torch.zeros(4)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return self.inputs[index].clone()


def test_objects_of_the_program_are_no_part_of_a_dataset_copied_to_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dataset = Referring()
    copies = DatasetCopies(dataset)
    dataset.logger.setLevel("DEBUG")
    monkeypatch.setattr(numpy, "of_this_test", [1], raising=False)
    monkeypatch.setattr(changes, "calls", 1, raising=False)
    assert not copies.differ_from(dataset)
    dataset.inputs = torch.ones(4)
    assert copies.differ_from(dataset)

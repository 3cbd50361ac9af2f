from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.datasets import Augmented, stateful_loader
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data._utils.collate import default_convert

from danling.data import DataLoader, build_dataloader, from_datamodule
from danling.data.build import order_setting
from danling.data.split_settings import merge_settings


def build(
    dataset: Any, settings: dict[str, Any] | None = None, *, train: bool = True, **others: Any
) -> Any:
    return build_dataloader(
        dataset, settings or {}, **{"split": "train", "train": train, "seed": 0, **others}
    )


def test_defaults_follow_the_split() -> None:
    dataset = Augmented(10)
    train, test = build(dataset, {"batch_size": 4}), build(dataset, {"batch_size": 4}, train=False)
    assert isinstance(train, DataLoader) and isinstance(test, DataLoader)
    assert (train.order.shuffle, train.drop_last, train.order.pad) == (True, True, True)
    assert (test.order.shuffle, test.drop_last, test.order.pad) == (False, False, False)
    assert (len(train), len(test)) == (2, 3)
    assert not train.pin_memory
    assert not build(dataset, device=torch.device("cuda")).pin_memory or torch.cuda.is_available()
    assert not build(dataset, {"pin_memory": False}, device=torch.device("cuda")).pin_memory
    chosen = build(
        dataset, {"batch_size": 4, "shuffle": False, "drop_last": False, "generator": None}
    )
    assert (chosen.order.shuffle, chosen.drop_last) == (False, False)
    assert build(dataset, {"shuffle": None}).order.shuffle is True


def test_loaders_are_returned_untouched() -> None:
    generator = (number for number in range(3))
    for loader in (TorchDataLoader(range(3)), stateful_loader(range(3)), generator):  # type: ignore[arg-type]
        assert build(loader, {"batch_size": 7}) is loader


def test_a_split_without_workers_is_not_asked_about_them() -> None:
    common = {
        "batch_size": 2,
        "num_workers": 2,
        "persistent_workers": True,
        "prefetch_factor": 4,
        "timeout": 5,
    }
    settings = merge_settings(common, {"num_workers": 0})
    assert settings == {"batch_size": 2, "num_workers": 0}
    assert len(list(build(range(4), settings))) == 2
    with pytest.raises(ValueError, match="persistent_workers"):  # the split's own is contradiction
        build(range(4), merge_settings(common, {"num_workers": 0, "persistent_workers": True}))


class Unsized(list[int]):
    def __len__(self) -> int:
        return len(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dataset", "settings", "message"),
    [
        (range(4), {"batch_size": 0}, r"positive integer\. Received: batch_size=0 \(int\)"),
        (
            range(4),
            {"global_batch_size": "4"},
            r"positive integer\. Received: global_batch_size='4' \(str\)",
        ),
        (
            range(4),
            {"global_batch_size": 4, "batch_size": 2},
            r"not both\. Received: batch_size=2, global_batch_size=4",
        ),
        (range(4), {"num_workers": 2, "in_order": False}, "in_order=True for split 'train'"),
        (range(4), {"generator": torch.Generator()}, r"no dataloader\.generator for split 'train'"),
        (Unsized(), {}, "split 'train' to be a map-style dataset"),
        *(
            (range(4), {name: "mine.pad"}, rf"dataloader\.{name} of split 'train' to be a function")
            for name in ("collate_fn", "worker_init_fn", "sampler", "batch_sampler")
        ),
    ],
)
def test_bad_datasets_and_settings_are_refused(
    dataset: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        build(dataset, settings)
    assert "NoneType" in str(refused.value.__cause__) or not isinstance(dataset, Unsized)


@pytest.mark.parametrize(
    "settings",
    [
        {"prefetch_factor": 2},
        {"persistent_workers": True},
        {"num_workers": -1},
        {"sampler": SequentialSampler(range(4)), "shuffle": True},
        {"batch_sampler": [[0, 1]], "batch_size": 4},
    ],
)
def test_contradictory_settings_name_the_split(settings: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError,
        match=r"Expected dataloader settings of split 'train' that go together\. Received",
    ):
        build(range(4), settings)


class Lists:
    """A batch sampler of a user's own, without a base class, whose order is drawn and counted."""

    def __init__(self) -> None:
        self.passes, self.generator = 0, torch.Generator().manual_seed(1)

    def __iter__(self) -> Iterator[list[int]]:
        self.passes += 1
        yield torch.randperm(8, generator=self.generator).tolist()


class Singles(Lists):
    def __iter__(self) -> Iterator[int]:
        for batch in super().__iter__():
            yield from batch


@pytest.mark.parametrize(
    ("sampler", "settings", "expected"),
    [
        (BatchSampler(RandomSampler(range(8)), 4, False), {}, "batch_sampler"),
        (BatchSampler(RandomSampler(range(8)), 4, False), {"batch_size": 4}, "batch_sampler"),
        (RandomSampler(range(8)), {}, "sampler"),
        ([[0, 1], [2, 3]], {}, "batch_sampler"),
        ([0, 1, 2, 3], {"batch_size": 2}, "sampler"),
        (Lists(), {}, "batch_sampler"),
        (Singles(), {}, "sampler"),
        # Each item is a list of indices that the dataset itself takes.
        (Lists(), {"batch_size": None}, "sampler"),
        (iter([[0, 1]]), {}, "sampler"),
    ],
)
def test_a_batch_sampler_is_told_from_a_sampler(
    sampler: Any, settings: dict[str, Any], expected: str
) -> None:
    assert list(order_setting(sampler, settings)) == [expected]


def test_sampler_keeps_its_attributes_after_a_look_at_its_order() -> None:
    asked = Lists()
    order_setting(asked, {})
    assert asked.passes == 0


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def test_default_convert_leaves_batches_lists() -> None:
    """As the collate_fn of a loader with batches, it is not replaced by what stacks them."""
    assert list(build(Numbers(), {"batch_size": 2, "collate_fn": default_convert})) == [
        [0, 1],
        [2, 3],
    ]
    assert torch.equal(next(iter(build(Numbers(), {"batch_size": 2}))), torch.tensor([0, 1]))
    for loader, kept in (
        (TorchDataLoader(range(4), batch_size=2, collate_fn=default_convert), True),  # type: ignore[arg-type]
        (TorchDataLoader(range(4), batch_size=None), False),  # type: ignore[arg-type]
    ):
        found = from_datamodule(SimpleNamespace(train_dataloader=lambda loader=loader: loader))
        assert (found["train"].settings.get("collate_fn") is default_convert) is kept

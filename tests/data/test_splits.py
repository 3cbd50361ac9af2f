"""Splits by themselves: their names, settings, divisions and lengths, and the shares of ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from danling.data import PLACEHOLDER, Splits, build_dataloader, open_source


class Run:
    """What a program has set up, which it may change at any time."""

    mode = "train"

    def __init__(self, *datasets: str, ranks: int = 1, **settings: Any) -> None:
        self.datasets: dict[str, Any] = {name: points(12) for name in datasets}
        self.dataloaders: dict[str, Any] = {}
        self.config = SimpleNamespace(**{"accum_steps": 1, **settings})
        self.config.get = lambda name, default: getattr(self.config, name, default)
        self.placement = SimpleNamespace(share=lambda trained: (0, ranks))
        self.splits = Splits(self)  # type: ignore[arg-type]

    @property
    def train_splits(self) -> list[str]:
        return self.splits.to_train()


def points(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(float(count)))


def built(settings: dict[str, Any], count: int = 12) -> Any:
    return build_dataloader(points(count), settings, split="train", train=True, seed=0)


class Gathered:
    """A domain whose other ranks answer what they are given."""

    rank = 0

    def __init__(self, *others: Any) -> None:
        self.size, self._others = 1 + len(others), others

    def gather_objects(self, value: Any) -> list[Any]:
        return [value, *self._others]


def test_splits_are_told_by_their_names() -> None:
    splits = Run("train", "train_extra", "test", "val", "inference", "predict_all").splits
    assert splits.to_train() == ["train", "train_extra"]
    assert splits.to_evaluate() == ["test", "val"]
    assert splits.to_infer(splits.to_evaluate()) == ["inference"]
    assert splits.to_score(splits.to_evaluate()) == "val"
    assert Run("train", "test").splits.to_infer(["test"]) == ["test"]
    assert Run("train").splits.to_infer([]) == []


def test_settings_go_before_names() -> None:
    splits = Run("a", "b", "c", train_splits=["b"], evaluate_splits=["c", "a"], score_split="a").splits
    assert (splits.to_train(), splits.to_evaluate(), splits.to_score(["c"])) == (["b"], ["c", "a"], "a")
    assert Run("a", train_splits=[], evaluate_splits=[]).splits.to_train() == []


def test_a_split_that_is_trained_on_is_not_evaluated_whatever_its_name() -> None:
    splits = Run("fit", "test", train_splits=["fit"]).splits
    assert splits.to_evaluate() == ["test"] and splits.to_score(splits.to_evaluate()) == "test"
    assert Run("fit", "test", train_splits=["fit"], evaluate_splits=["fit"]).splits.to_evaluate() == ["fit"]


@pytest.mark.parametrize(
    ("evaluated", "scored"),
    [(["test", "dev", "validation"], "validation"), (["test", "other"], "test"), ([], None)],
    ids=str,
)
def test_the_split_that_is_scored(evaluated: list[str], scored: str | None) -> None:
    assert Run().splits.to_score(evaluated) == scored


def test_what_is_added_later_is_seen_at_once() -> None:
    run = Run("train")
    assert run.splits.to_train() == ["train"] and run.splits.own_lengths(["train"]) == {}
    run.datasets["train_more"] = points(4)
    run.dataloaders["val"] = [1, 2]
    assert (run.splits.to_train(), run.splits.to_evaluate()) == (["train", "train_more"], ["val"])
    run.datasets = {"other": points(4)}  # another mapping, not another entry
    assert run.splits.names == ["other", "val"]
    run.dataloaders["train"] = built({"global_batch_size": 4})
    division = run.splits.division("train")
    assert division is not None and division.samples == 4
    run.dataloaders["train"] = [1, 2, 3]
    assert run.splits.division("train") is None and run.splits.own_lengths(["train"]) == {"train": 3}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("nowhere", r"Expected a split out of \['train', 'val'\]. Received: split='nowhere'"),
        (["val", "val"], "Expected every split of the splits to evaluate once"),
        ([], "Expected at least one split to evaluate"),
    ],
)
def test_a_wrong_choice_is_named(asked: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Run("train", "val").splits.choose(asked, [], "evaluate")


def test_a_split_has_the_common_settings_and_its_own() -> None:
    section = {"batch_size": 8, "num_workers": 2, "prefetch_factor": 4, "val": {"num_workers": 0}, "shuffle": None}
    splits = Run("train", "val", dataloader=section).splits
    assert splits.settings("train") == {"batch_size": 8, "num_workers": 2, "prefetch_factor": 4, "shuffle": None}
    assert splits.settings("val") == {"batch_size": 8, "num_workers": 0, "shuffle": None}
    assert Run("train").splits.settings("train") == {}


def test_an_update_that_is_not_divided_is_as_configured_at_this_moment() -> None:
    run = Run("train", dataloader={"batch_size": 5}, accum_steps=3)
    found = (run.splits.division(), run.splits.micro_batches, run.splits.batch_size, run.splits.undivided())
    assert found == (None, None, 5, 3)
    run.config.accum_steps = 2
    assert run.splits.undivided() == 2
    run.dataloaders["train"] = TorchDataLoader(points(6), batch_size=2)
    assert run.splits.batch_size == 2
    assert Run("train").splits.batch_size is None


def test_an_update_of_a_given_size_is_divided_over_ranks_and_micro_batches() -> None:
    run = Run("train", "val", ranks=3, dataloader={"global_batch_size": 12}, accum_steps=2)
    division = run.splits.division()
    assert division is not None and run.splits.division("val") is not None
    assert (division.samples, division.world_size, division.micro_batches, division.micro_batch_size) == (12, 3, 2, 2)
    assert (run.splits.micro_batches, run.splits.batch_size) == (2, 2)


def test_less_is_held_at_once_only_where_the_size_is_to_be_found() -> None:
    for micro, held in (("auto", 3), (6, 6)):
        settings = {"global_batch_size": 12, "micro_batch_size": micro}
        run = Run("train", dataloader=settings)
        run.dataloaders.update(train=built(settings), train_more=[1, 2])
        assert run.splits.finds_micro_batch_size is (micro == "auto")
        run.splits.hold_at_most(None)
        run.splits.hold_at_most(3)
        assert run.splits.batch_size == held
    assert not Run("train", dataloader={"batch_size": 8}).splits.finds_micro_batch_size


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


def test_a_run_is_as_long_as_its_shortest_loader() -> None:
    run = Run("train", "train_more", accum_steps=2)
    run.dataloaders = {"train": [1, 2, 3], "train_more": built({"global_batch_size": 4})}
    trained = run.splits.to_train()
    assert run.splits.own_lengths(trained) == {"train": 2, "train_more": 3}
    assert run.splits.updates_of_epoch == 5
    samples = {"train_more": run.dataloaders["train_more"].length}
    domain: Any = Gathered(({"train": 1, "train_more": 3}, samples), ({"train": 4, "train_more": 2}, samples))
    run.splits.agree_lengths(trained, domain)
    assert run.splits.lengths == {"train": 1, "train_more": 2} and run.splits.updates_of_epoch == 3
    unknown: Any = Gathered(({"train": None, "train_more": 3}, samples))
    run.splits.agree_lengths(trained, unknown)
    assert run.splits.lengths == {"train": None, "train_more": 3} and run.splits.updates_of_epoch is None


def test_a_stream_has_no_length_and_no_loader_no_updates() -> None:
    run = Run("train")
    assert run.splits.updates_of_epoch is None
    run.dataloaders["train"] = TorchDataLoader(Endless(), batch_size=2)
    assert run.splits.own_lengths(["train"]) == {"train": None} and run.splits.updates_of_epoch is None


def test_a_sampler_that_takes_another_share_is_refused() -> None:
    dataset = points(8)
    loader = TorchDataLoader(dataset, batch_size=2, sampler=DistributedSampler(dataset, num_replicas=4, rank=1))
    with pytest.raises(ValueError, match="Expected the sampler of split 'train' to take share 0 of 2"):
        open_source(loader, split="train", rank=0, world_size=2, seed=0)
    assert open_source(loader, split="train", rank=1, world_size=4, seed=0).reads
    # A rank that reads nothing does not divide anything.
    proxy = open_source(loader, split="train", rank=0, world_size=2, seed=0, reads=False)
    assert not proxy.reads and next(iter(proxy.batches())).data is PLACEHOLDER


def test_a_split_whose_figures_select_must_be_evaluated() -> None:
    run = Run("train", "val")
    run.splits.check_scored("val", trained=["train"], evaluated=["val"])
    run.splits.check_scored("train", trained=["train"], evaluated=["train", "val"])
    with pytest.raises(ValueError, match="score_split='train', which is trained on"):
        run.splits.check_scored("train", trained=["train"], evaluated=["val"])
    with pytest.raises(ValueError, match="split='gone'"):
        run.splits.check_scored("gone", trained=["train"], evaluated=["val"])

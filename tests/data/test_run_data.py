"""The data of a run without a runner: names, settings, divisions and lengths of splits, their loaders, and the batches of each."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, SequentialSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from danling.config import RunnerConfig
from danling.data import PLACEHOLDER, build_dataloader, open_source
from danling.data.run_data import RunData
from danling.distributed import LocalDomain, Placement
from danling.stream import MemoryChannel, MemoryStore, StreamLoader
from danling.training import TrainingSession


class Run:
    """What a program has set up, which it may change at any time."""

    mode = "train"
    world_size, device, seed = 1, torch.device("cpu"), 1

    def __init__(self, *datasets: str, ranks: int = 1, **settings: Any) -> None:
        self.datasets: dict[str, Any] = {name: points(12) for name in datasets}
        self.dataloaders: dict[str, Any] = {}
        self.config = RunnerConfig(settings)
        self.state = SimpleNamespace(train=SimpleNamespace(epoch=0))
        domain = LocalDomain()
        domain.size = ranks
        self.placement = Placement.alike(domain)
        self.sampler: Any = None
        self.data = RunData(self, TrainingSession())  # type: ignore[arg-type]

    @property
    def train_splits(self) -> list[str]:
        return self.data.to_train()

    @property
    def evaluate_splits(self) -> list[str]:
        return self.data.to_evaluate()

    @property
    def score_split(self) -> str | None:
        return self.data.to_score(self.evaluate_splits)

    def build_datasampler(self, split: str, dataset: Any) -> Any:
        return self.sampler

    def build_dataloaders(self) -> None:
        for split, dataset in self.datasets.items():
            self.dataloaders.setdefault(split, self.data.build_loader(split, dataset))

    def opened(self) -> RunData:
        self.build_dataloaders()
        self.data.open_all()
        return self.data


def points(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(float(count)))


def built(settings: dict[str, Any], count: int = 12) -> Any:
    return build_dataloader(points(count), settings, split="train", train=True, seed=0)


# Names


@pytest.mark.parametrize(
    ("names", "settings", "trained", "evaluated", "scored"),
    [
        (
            "train train_extra test val inference predict_all",
            {},
            "train train_extra",
            "test val",
            "val",
        ),
        (
            "a b c",
            {"train_splits": ["b"], "evaluate_splits": ["c", "a"], "score_split": "a"},
            "b",
            "c a",
            "a",
        ),
        ("a", {"train_splits": [], "evaluate_splits": []}, "", "", None),
        ("fit test", {"train_splits": ["fit"]}, "fit", "test", "test"),
        ("fit test", {"train_splits": ["fit"], "evaluate_splits": ["fit"]}, "fit", "fit", "fit"),
        ("test dev validation", {}, "", "test dev validation", "validation"),
        ("test other", {}, "", "test other", "test"),
    ],
)
def test_splits_follow_from_settings_else_from_names(
    names: str, settings: dict[str, Any], trained: str, evaluated: str, scored: str | None
) -> None:
    run = Run(*names.split(), **settings)
    assert (run.train_splits, run.evaluate_splits) == (trained.split(), evaluated.split())
    assert run.score_split == scored


def test_infer_takes_given_splits_or_the_ones_for_prediction() -> None:
    assert Run("train", "inference", "predict_all").data.to_infer(["test"]) == ["inference"]
    assert Run("train", "test").data.to_infer(["test"]) == ["test"]
    assert Run("train").data.to_infer([]) == []


def test_later_dataset_is_seen_at_once() -> None:
    run = Run("train")
    run.datasets["train_more"] = points(4)
    run.dataloaders["val"] = [1, 2]
    assert (run.train_splits, run.evaluate_splits) == (["train", "train_more"], ["val"])
    run.datasets = {"other": points(4)}  # another mapping, not another entry
    assert run.data.names == ["other", "val"]
    run.dataloaders["train"] = built({"global_batch_size": 4})
    division = run.data.division("train")
    assert division is not None and division.samples == 4
    run.dataloaders["train"] = [1, 2, 3]
    assert run.data.division("train") is None and run.data.updates_of_epoch == 3


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
        Run("train", "val").data.choose(asked, [], "evaluate")


def test_split_of_the_score_must_be_evaluated() -> None:
    for settings, message in (
        ({"score_split": "train"}, "score_split='train', which is trained on"),
        ({"score_split": "gone"}, "'gone'"),
    ):
        run = Run("train", "val", **settings)
        with pytest.raises(ValueError, match=message):
            run.data.open_all()
    assert Run("train", score_split="train", evaluate_splits=["train"]).data.open_all() == "train"
    assert Run("train", "val").data.open_all() == "val" and Run("train").data.open_all() is None


# Settings and updates


def test_a_split_has_the_common_settings_and_its_own() -> None:
    section = {
        "batch_size": 8,
        "num_workers": 2,
        "prefetch_factor": 4,
        "val": {"num_workers": 0},
        "shuffle": None,
    }
    data = Run("train", "val", dataloader=section).data
    assert data.settings("train") == {
        "batch_size": 8,
        "num_workers": 2,
        "prefetch_factor": 4,
        "shuffle": None,
    }
    assert data.settings("val") == {"batch_size": 8, "num_workers": 0}
    assert Run("train").data.settings("train") == {}


def test_undivided_update_follows_the_current_configuration() -> None:
    run = Run("train", dataloader={"batch_size": 5}, accum_steps=3)
    assert (run.data.division(), run.data.batch_size, run.data.accum_steps()) == (None, 5, 3)
    run.config["accum_steps"] = 2
    assert run.data.accum_steps() == 2
    run.dataloaders["train"] = TorchDataLoader(points(6), batch_size=2)
    assert run.data.batch_size == 2
    assert Run("train").data.batch_size is None


def test_an_update_of_a_given_size_is_divided_over_ranks_and_micro_batches() -> None:
    run = Run("train", "val", ranks=3, dataloader={"global_batch_size": 12}, accum_steps=2)
    division = run.data.division()
    assert (
        division is not None and run.data.division("val") is not None and run.data.batch_size == 2
    )
    assert (
        division.samples,
        division.world_size,
        division.micro_batches,
        division.micro_batch_size,
    ) == (12, 3, 2, 2)


def test_micro_batch_is_reduced_only_if_its_size_is_automatic() -> None:
    for micro, held in (("auto", 3), (6, 6)):
        settings = {"global_batch_size": 12, "micro_batch_size": micro}
        run = Run("train", dataloader=settings)
        run.dataloaders.update(train=built(settings), train_more=[1, 2])
        assert run.data.finds_micro_batch_size is (micro == "auto")
        run.data.limit_micro_batch(None)
        run.data.limit_micro_batch(3)
        assert run.data.batch_size == held
    assert not Run("train", dataloader={"batch_size": 8}).data.finds_micro_batch_size


# Lengths


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


def test_a_run_is_as_long_as_its_shortest_loader() -> None:
    run = Run("train", "train_more", accum_steps=2)
    run.dataloaders = {"train": [1, 2, 3], "train_more": built({"global_batch_size": 4})}
    assert run.data.updates_of_epoch == 5
    mine = ({"train": 2, "train_more": 3}, {"train_more": 12}, {})
    others: list[Any] = []

    def gather(value: Any) -> list[Any]:
        assert value == mine
        return [value, *others]

    run.placement.optimizer.gather_objects = gather  # type: ignore[method-assign]
    others[:] = [
        ({"train": 1, "train_more": 3}, mine[1], {}),
        ({"train": 4, "train_more": 2}, mine[1], {}),
    ]
    run.data.agree_lengths()
    assert run.data.lengths == {"train": 1, "train_more": 2} and run.data.updates_of_epoch == 3
    others[:] = [({"train": None, "train_more": 3}, mine[1], {})]
    run.data.agree_lengths()
    assert (
        run.data.lengths == {"train": None, "train_more": 3} and run.data.updates_of_epoch is None
    )


def test_a_stream_has_no_length_and_no_loader_no_updates() -> None:
    run = Run("train")
    assert run.data.updates_of_epoch is None
    run.dataloaders["train"] = TorchDataLoader(Endless(), batch_size=2)
    run.data.agree_lengths()
    assert run.data.lengths == {"train": None} and run.data.updates_of_epoch is None


# Loaders and sources


def test_a_sampler_of_the_users_gives_the_order() -> None:
    run = Run("train")
    run.sampler = SequentialSampler(run.datasets["train"])
    source = run.opened().of("train")
    assert torch.cat([batch.data[0] for batch in source.batches()]).tolist() == list(range(12))
    assert source.kind == "sampled"


def test_added_or_replaced_data_is_used_and_an_unknown_split_is_refused() -> None:
    run = Run("train", dataloader={"batch_size": 2})
    data = run.opened()
    first = data.of("train")
    assert data.of("train") is first and len(list(first.batches())) == 6
    run.dataloaders["train"] = TorchDataLoader(run.datasets["train"], batch_size=4)
    assert data.of("train") is not first and data.of("train").remaining_batches() == 3
    run.datasets["more"], run.state.train.epoch = points(2), 3
    assert (data.of("more").remaining_batches(), data.of("more").epoch) == (1, 3)
    with pytest.raises(ValueError, match="'nowhere'"):
        data.of("nowhere")
    data.close()


def test_sampler_with_another_share_is_refused() -> None:
    dataset = points(8)
    loader = TorchDataLoader(
        dataset, batch_size=2, sampler=DistributedSampler(dataset, num_replicas=4, rank=1)
    )
    with pytest.raises(
        ValueError, match="Expected the sampler of split 'train' to take share 0 of 2"
    ):
        open_source(loader, split="train", rank=0, world_size=2, seed=0)
    assert open_source(loader, split="train", rank=1, world_size=4, seed=0).reads
    # A rank that reads nothing does not divide anything.
    proxy = open_source(loader, split="train", rank=0, world_size=2, seed=0, reads=False)
    assert not proxy.reads and next(iter(proxy.batches())).data is PLACEHOLDER


def test_update_loader_gets_its_context() -> None:
    run = Run(accum_steps=3, train_splits=["train"])
    run.id, run.is_main_process = "a-run", True  # type: ignore[attr-defined]
    third = LocalDomain()
    third.rank, third.size = 2, 4
    run.placement = Placement(data=third, optimizer=third, metrics=third)
    loader = run.dataloaders["train"] = StreamLoader(MemoryStore(), MemoryChannel(), 2)
    assert run.data.open("train", loader).kind == "window"
    place = loader._context
    assert place[:4] == (("train", 1, 2, 4), 3, True, True) and loader._runner is run


def test_changing_replica_groups_cannot_divide_a_stream() -> None:
    run = Run("train")
    run.placement = replace(run.placement, replica_group=(0, 2))
    loader = StreamLoader(MemoryStore(), MemoryChannel("a stream"), 2)
    with pytest.raises(
        ValueError,
        match="can redivide for split 'train'. Received: a StreamLoader.*Leave ft.enabled out",
    ):
        run.data.open("train", loader)
    assert run.data.open("train", TorchDataLoader(points(8), batch_size=4)).remaining_batches() == 2


class Closing(TensorDataset):
    """Has no length once it is closed, as an open file has."""

    is_closed = False

    def __len__(self) -> int:
        if self.is_closed:
            raise RuntimeError("it is closed")
        return super().__len__()


@pytest.mark.parametrize("consumed", [0, 1])
def test_replaced_dataset_may_be_closed(consumed: int) -> None:
    run = Run("train", dataloader={"batch_size": 2})
    first = run.datasets["train"] = Closing(torch.zeros(8, 1))
    source = run.opened().of("train")
    source.commit([batch for batch, _ in zip(source.batches(), range(consumed))])
    first.is_closed = True
    run.datasets["train"] = points(12)
    if consumed:
        with pytest.raises(
            ValueError, match=r"to stay as it is within a pass\. Received: another dataset"
        ):
            run.data.of("train")
    else:
        assert run.data.of("train").remaining_batches() == 6


def test_data_replaced_within_a_pass_is_refused_on_ranks_without_reads_too() -> None:
    for reads in (True, False):
        run = Run("train", dataloader={"batch_size": 2})
        run.placement = replace(run.placement, reads_data=reads)
        source = run.opened().of("train")
        source.commit([next(source.batches())])
        run.datasets["train"] = points(12)
        with pytest.raises(ValueError, match="split 'train' to stay as it is within a pass"):
            run.data.of("train")

"""The data of a run without a runner."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

from danling.data.run_data import RunData
from danling.distributed import LocalDomain, Placement
from danling.stream import MemoryChannel, MemoryStore, StreamLoader


class Settings(dict[str, Any]):
    """A configuration of plain values."""

    accum_steps = 3
    gradient_sum = "fast"


class Run:
    """What a run is asked for its data."""

    def __init__(self, **settings: Any) -> None:
        self.config = Settings({"dataloader": {"batch_size": 2}, "accum_steps": 3, **settings})
        self.state = SimpleNamespace(train=SimpleNamespace(epoch=0))
        self.placement = Placement.alike(LocalDomain())
        self.world_size, self.device, self.seed, self.mode = 1, torch.device("cpu"), 1, "train"
        points = TensorDataset(torch.arange(8.0))
        self.datasets: dict[str, Any] = {"train": points, "val": points}
        self.dataloaders: dict[str, Any] = {}
        self.train_splits, self.evaluate_splits, self.accum_steps = ["train"], ["val"], 5
        self.sampler: Any = None
        self._unsaved_updates = lambda: None
        self.data = RunData(self)  # type: ignore[arg-type]

    @property
    def score_split(self) -> str | None:
        return self.data.splits.to_score(self.evaluate_splits)

    def build_datasampler(self, split: str, dataset: Any) -> Any:
        return self.sampler

    def build_dataloaders(self) -> None:
        for split, dataset in self.datasets.items():
            self.dataloaders.setdefault(split, self.data.build_loader(split, dataset))


def test_loaders_are_built_opened_and_scored_by_the_first_evaluated_split() -> None:
    run = Run()
    run.build_dataloaders()
    assert run.data.open_all() == "val" and list(run.data.sources) == ["train", "val"]
    assert [len(batch.data[0]) for batch in run.data.of("train").batches()] == [2, 2, 2, 2]
    run.data.agree_lengths(run.placement.optimizer)
    assert run.data.splits.lengths == {"train": 2}  # four batches in updates of three
    run.evaluate_splits = []
    assert run.data.open_all() is None


def test_a_sampler_of_the_users_own_gives_the_order() -> None:
    run = Run()
    run.sampler = SequentialSampler(run.datasets["train"])
    source = run.data.open("train", run.data.build_loader("train", run.datasets["train"]))
    assert torch.cat([batch.data[0] for batch in source.batches()]).tolist() == list(range(8))
    assert source.kind == "sampled"


def test_data_that_is_added_or_replaced_is_taken_in_and_an_unknown_split_is_refused() -> None:
    run = Run()
    run.build_dataloaders()
    run.data.open_all()
    first = run.data.of("train")
    assert run.data.of("train") is first
    run.dataloaders["train"] = DataLoader(run.datasets["train"], batch_size=4)
    assert run.data.of("train") is not first and run.data.of("train").num_batches == 2
    run.datasets["more"], run.state.train.epoch = TensorDataset(torch.arange(2.0)), 3
    assert (run.data.of("more").num_batches, run.data.of("more").epoch) == (1, 3)
    with pytest.raises(ValueError, match="'nowhere'"):
        run.data.of("nowhere")
    run.data.sources.close()


def test_a_loader_of_windows_hears_where_it_is_read() -> None:
    run = Run()
    run.id, run.is_main_process = "a-run", True  # type: ignore[attr-defined]
    third = LocalDomain()
    third.rank, third.size = 2, 4
    run.placement = Placement(data=third, optimizer=third, metrics=third)
    loader = StreamLoader(MemoryStore(), MemoryChannel(), 2)
    assert run.data.open("train", loader).kind == "window"
    place = loader._place
    assert (place.rank, place.world_size, place.accum_steps, place.trained, place.run()) == (2, 4, 3, True, "a-run")


def test_replica_groups_that_come_and_go_cannot_divide_a_stream() -> None:
    run = Run()
    run.placement = replace(run.placement, replica_group=(0, 2))
    loader = StreamLoader(MemoryStore(), MemoryChannel("a stream"), 2)
    with pytest.raises(
        ValueError, match="can divide anew for split 'train'. Received: a StreamLoader.*Leave ft.enabled out"
    ):
        run.data.open("train", loader)
    assert run.data.open("train", DataLoader(run.datasets["train"], batch_size=4)).num_batches == 2

"""What an update is made of, without a runner."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import TensorDataset

from danling.data import Splits, build_dataloader
from danling.data.splits import UpdatePlan


class Run:
    """Datasets, loaders and settings, which may change at any time."""

    def __init__(self, *splits: str, ranks: int = 1, **settings: Any) -> None:
        self.datasets: dict[str, Any] = {name: TensorDataset(torch.arange(12.0)) for name in splits}
        self.loaders: dict[str, Any] = {}
        self.settings = {"accum_steps": 1, **settings}
        self.splits = Splits(lambda: self.datasets, lambda: self.loaders, self.settings.get)
        self.plan = UpdatePlan(
            self.splits,
            trained=self.splits.to_train,
            shares=lambda split: ranks,
            accum_steps=lambda: self.settings["accum_steps"],
        )


def test_an_update_that_is_not_divided_is_as_configured_at_this_moment() -> None:
    run = Run("train", dataloader={"batch_size": 5}, accum_steps=3)
    assert (run.plan.division(), run.plan.micro_batches, run.plan.batch_size, run.plan.undivided()) == (
        None,
        None,
        5,
        3,
    )
    run.settings["accum_steps"] = 2
    assert run.plan.undivided() == 2


def test_an_update_of_a_given_size_is_divided_over_ranks_and_micro_batches() -> None:
    run = Run("train", "val", ranks=3, dataloader={"global_batch_size": 12}, accum_steps=2)
    assert (run.plan.micro_batches, run.plan.batch_size) == (2, 2)
    assert run.plan.division("val") is not None


def test_a_program_without_data_has_no_batches() -> None:
    run = Run(train_splits=["train"], dataloader={"global_batch_size": 12})
    assert run.plan.division() is None and not run.plan.finds_micro_batch_size
    run = Run("val")
    run.loaders["val"] = [1, 2]
    assert run.plan.division() is None and run.plan.batch_size is None


def test_a_pass_has_as_many_updates_as_its_loaders() -> None:
    run = Run("train", "train_more")
    assert run.plan.updates_of_epoch is None
    run.loaders.update(train=[1, 2, 3], train_more=[4])
    assert run.plan.updates_of_epoch == 4


def test_less_is_held_at_once_only_where_the_size_is_to_be_found() -> None:
    for micro, held in (("auto", 3), (6, 6)):
        settings = {"global_batch_size": 12, "micro_batch_size": micro}
        run = Run("train", dataloader=settings)
        run.loaders["train"] = build_dataloader(run.datasets["train"], settings, split="train", train=True, seed=0)
        assert run.plan.finds_micro_batch_size is (micro == "auto")
        run.plan.hold_at_most(None)
        run.plan.hold_at_most(3)
        assert run.plan.batch_size == held

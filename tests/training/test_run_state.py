"""The table of what a run saves, and what is left out of a load, without a runner."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

from danling.checkpoints import CheckpointMismatch
from danling.checkpoints.reading import ExcludedFromLoading
from danling.config import RunnerConfig
from danling.data import open_source
from danling.distributed import LocalDomain
from danling.metrics import Meters
from danling.training.resume_checks import (
    check_complete,
    check_given,
    check_payload,
    check_same_run,
)
from danling.training.run_state import (
    RunState,
    StatePart,
    loader_states,
    restore_positions,
    share_of_rank,
    stateful,
)


class Run:
    def __init__(self, components: Collection[str] = (), progress: Collection[str] = ()) -> None:
        self.values: dict[str, Any] = {"model": 1, "optimizer": 2}
        self.restored: list[tuple[str, Any, set[str]]] = []
        self.config = RunnerConfig()
        self.placement: Any = SimpleNamespace(optimizer=LocalDomain())
        self.world = self.data_domain = LocalDomain()
        self.dataloaders: dict[str, Any] = {}
        self.train_splits = ["train"]
        self.differences: list[str] = []
        self.added: dict[str, Any] = {}
        self.component_parts = lambda: [
            self.part(name) for name in components if name in self.values
        ]
        self.progress_parts = lambda: [self.part(name) for name in progress]
        self.state = SimpleNamespace(
            state_dict=lambda: dict(self.added), load_state_dict=self.added.update
        )
        self.run_state = RunState(self)  # type: ignore[arg-type]
        self.data = SimpleNamespace(
            restore=lambda split, state: self.source(split).load_state_dict(state)
        )

    def part(self, name: str) -> StatePart:
        def restore(value: Any, excluded: Collection[str]) -> None:
            self.values[name] = value
            self.restored.append((name, value, set(excluded)))

        return StatePart(name, lambda: self.values[name], restore)

    def config_differences(self, payload: Any) -> list[str]:
        return self.differences


def test_components_are_saved_and_restored_in_the_order_of_the_table() -> None:
    run = Run(components=["model", "ema", "optimizer"])
    state = run.run_state
    assert list(state.components().items()) == [("model", 1), ("optimizer", 2)]
    assert state.names() == ["model", "optimizer"]
    state.load_components({"optimizer": 20, "ema": 5, "model": 10, "a user's": 3}, {"model.head"})
    assert run.restored == [("model", 10, {"model.head"}), ("optimizer", 20, {"model.head"})]
    with state.saved_elsewhere("model"):
        assert state.components() == {"optimizer": 20}


def test_later_part_replaces_an_earlier_one_and_missing_parts_have_a_default() -> None:
    run, meters = Run(components=["model", "optimizer"], progress=["model", "optimizer"]), Meters()
    meters.update({"loss": 2.0})
    state = run.run_state
    more = [StatePart("model", lambda: 7, lambda *_: None), stateful("meters", meters, resets=True)]
    own = run.progress_parts
    run.progress_parts = lambda: [*own(), *more, stateful("scaler", None)]
    saved = state.progress()
    assert saved == {"model": 7, "optimizer": 2, "meters": {"loss": [2.0, 1.0]}, "scaler": {}}
    state.load_progress({})
    assert run.restored == [] and len(meters) == 0
    state.load_progress(saved)
    assert run.restored == [("optimizer", 2, set())] and meters.state_dict() == saved["meters"]
    components = run.component_parts
    run.component_parts = lambda: [
        *components(),
        StatePart("model", lambda: 8, lambda *_: None, default=dict),
    ]
    run.restored.clear()
    assert (state.components(), state.names()) == ({"model": 8, "optimizer": 2}, ["optimizer"])
    state.load_components({"model": 9}, set())
    assert run.restored == []


def test_entries_of_a_state_of_the_users_are_saved_once_and_restored_together() -> None:
    run = Run(progress=["model"])
    run.added = {"model": 5, "level": 3, "note": "a"}
    saved = run.run_state.progress()
    assert saved == {"model": 1, "level": 3, "note": "a"}
    loaded: list[Any] = []
    run.state.load_state_dict = loaded.append
    run.run_state.load_progress(saved)
    assert loaded == [{"level": 3, "note": "a"}] and run.restored == [("model", 1, set())]


def test_healing_group_gets_values_without_communication() -> None:
    run = Run()
    run.progress_parts = lambda: [
        StatePart("together", lambda: "all ranks", lambda *_: None, alone=lambda: "this rank"),
        StatePart("local", lambda: 1, lambda *_: None),
    ]
    assert run.run_state.progress() == {"together": "all ranks", "local": 1}
    assert run.run_state.progress(alone=True) == {"together": "this rank", "local": 1}


def test_wrong_states_are_refused() -> None:
    with pytest.raises(CheckpointMismatch, match="without: optimizer"):
        check_complete({"model": 1}, {"ema"}, ["model", "ema", "optimizer"])
    check_complete({"model": 1}, {"ema", "optimizer"}, ["model", "ema", "optimizer"])
    with pytest.raises(ValueError, match=r"Expected `state_dict` .* a mapping\. Received: None"):
        check_payload(None, "`state_dict` to return the full state")
    with pytest.raises(CheckpointMismatch, match="0.weight"):
        check_given({"0.weight": torch.ones(1)}, ExcludedFromLoading(None))
    check_given({"model": {}}, ExcludedFromLoading("state"))


def test_settings_excluded_from_loading_may_differ() -> None:
    run: Any = Run()
    check_same_run(run, {})
    run.differences = ["optim.lr: 0.1, now 0.2", "accum_steps: 2, now 1"]
    with pytest.raises(CheckpointMismatch, match=r"optim\.lr: 0\.1, now 0\.2\n  accum_steps"):
        check_same_run(run, {})
    run.config.checkpoint.exclude_from_loading = ["runner.optim"]
    with pytest.raises(CheckpointMismatch) as refused:
        check_same_run(run, {})
    assert "optim.lr:" not in str(refused.value)
    # The size of an update follows from several keys, and to name one of them is enough.
    run.config.checkpoint.exclude_from_loading = ["runner.optim.lr", "runner.dataloader.batch_size"]
    check_same_run(run, {})


class Numbers(IterableDataset[int]):
    at = 0

    def __iter__(self) -> Any:
        while self.at < 6:
            self.at += 1
            yield self.at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_states_of_each_replica_are_handed_back_to_it(caplog: pytest.LogCaptureFixture) -> None:
    source = open_source(
        TorchDataLoader(Numbers(), batch_size=2), split="train", rank=0, world_size=2, seed=1
    )
    run: Any = Run()
    # Ranks 0 and 1 read the same data.
    others: list[Any] = [(0, {"train": {"other": 1}}, []), (1, {"train": {"second": 2}}, [])]
    run.world = SimpleNamespace(gather_objects=lambda mine: [mine, *others])
    state = loader_states(run, {"train": source}, set())["train"]
    assert state == {"ranks": {"0": source.state_dict(), "1": {"second": 2}}}
    run.data_domain = SimpleNamespace(rank=1, size=2)
    assert share_of_rank(run, "train", state) == {"second": 2}
    run.data_domain = SimpleNamespace(rank=0, size=3)
    with pytest.raises(CheckpointMismatch, match="Expected 2 data replicas"):
        share_of_rank(run, "train", state)
    run.config.parallel.allow_degree_change = True
    with caplog.at_level("WARNING", logger="danling"):
        assert share_of_rank(run, "train", state) is None
    assert "there are 3 now: the loader starts from its beginning" in caplog.text


def test_positions_of_the_splits_to_train_on_are_put_back() -> None:
    sources = {name: open_source([1, 2, 3], split=name) for name in ("train", "more")}
    before = open_source([1, 2, 3], split="train")
    before.commit([next(iter(before.batches()))])
    run: Any = Run()
    run.source, run.train_splits = sources.__getitem__, ["train", "more"]
    restore_positions(run, run.data, {"train": before.state_dict(), "more": None})
    assert (sources["train"].consumed, sources["more"].consumed) == (1, 0)
    run.train_splits = ["val"]
    with pytest.raises(CheckpointMismatch, match=r"state of split 'val'.*\['more', 'train'\]"):
        restore_positions(run, run.data, {"train": None, "more": None})


def test_paths_excluded_from_a_load_have_one_reader() -> None:
    excluded = ExcludedFromLoading(
        ["optimizer.state", "model.0", "lr_scheduler", "data_loader.train", "runner.optim.lr"]
    )
    assert excluded.entries == ["optimizer.state", "model.0", "lr_scheduler", "data_loader.train"]
    payload = {
        "model": {"0.weight": 1, "1.weight": 2},
        "optimizer": {"state": {}, "param_groups": []},
        "scheduler": {},
        "dataloaders": {"train": {}, "val": {}},
    }
    kept, left_out = excluded.apply(payload)
    assert kept == {
        "model": {"1.weight": 2},
        "optimizer": {"param_groups": []},
        "dataloaders": {"val": {}},
    }
    assert left_out == {"model.0", "optimizer.state", "scheduler", "dataloaders.train"}
    assert excluded.apply({"model": {"0.weight": 1}}, section="model") == (
        {"model": {}},
        {"model.0"},
    )
    assert excluded.parts_of("model") == ["model.0"] and excluded.parts_of("scheduler") == []
    assert (
        excluded.mentions("optimizer")
        and excluded.mentions("scheduler")
        and not excluded.mentions("ema")
    )
    assert excluded.leaves_out("dataloaders.train") and not excluded.leaves_out("dataloaders.val")
    assert excluded.allows_setting("optim.lr") and not excluded.allows_setting("optim.weight_decay")
    assert not excluded.allows_setting("accum_steps")
    with pytest.raises(ValueError, match="'ema', which matches nothing"):
        ExcludedFromLoading("ema").apply(payload)

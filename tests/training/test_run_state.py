"""The table of what a run saves, made of parts that stand for nothing."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch

from danling.checkpoints import CheckpointMismatch
from danling.checkpoints.exclusion import ExcludedFromLoading
from danling.metrics import Meters
from danling.training.run_state import (
    RunState,
    StatePart,
    check_complete,
    check_given,
    check_payload,
    check_same_run,
    in_order,
)


class Box:
    """Holds values, and notes what is restored into it."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {"model": 1, "optimizer": 2}
        self.restored: list[tuple[str, Any, set[str]]] = []
        self.losses: list[float] = [1.0]
        self.known: bool | None = True

    def part(self, name: str, **how: Any) -> StatePart:
        """Return a part that is one of the values."""

        def restore(value: Any, excluded: Collection[str]) -> None:
            self.values[name] = value
            self.restored.append((name, value, set(excluded)))

        return StatePart(name, lambda: self.values[name], restore, **how)


def test_components_are_saved_and_restored_in_the_order_of_the_table() -> None:
    box = Box()
    state = RunState([box.part("model"), box.part("ema", exists=lambda: False), box.part("optimizer")])
    assert list(state.components().items()) == [("model", 1), ("optimizer", 2)]
    assert state.names() == ["model", "optimizer"]
    state.load_components({"optimizer": 20, "ema": 5, "model": 10, "a user's": 3}, {"model.head"})
    assert box.restored == [("model", 10, {"model.head"}), ("optimizer", 20, {"model.head"})]


def test_what_is_saved_elsewhere_is_not_read() -> None:
    box = Box()
    del box.values["model"]  # reading it would fail
    state = RunState([box.part("model"), box.part("optimizer")])
    with state.saved_elsewhere("model"):
        assert state.components() == {"optimizer": 2}
    with pytest.raises(KeyError):
        state.components()
    assert state.names() == ["model", "optimizer"]


def test_a_later_part_of_one_name_takes_the_place_of_an_earlier_one() -> None:
    box = Box()
    state = RunState(
        progress=[box.part("model"), box.part("optimizer"), StatePart("model", lambda: 7, lambda *_: None)]
    )
    assert list(state.progress().items()) == [("model", 7), ("optimizer", 2)]


def test_parts_that_a_checkpoint_lacks_are_restored_from_their_default() -> None:
    box, meters = Box(), Meters()
    meters.update({"loss": 2.0})
    state = RunState(
        progress=[
            box.part("model"),
            StatePart.attribute(box, "losses", convert=list),
            StatePart.attribute(box, "known", key="bare"),
            StatePart.stateful("meters", lambda: meters, resets=True),
            StatePart.stateful("scaler", lambda: None),
        ]
    )
    saved = state.progress()
    assert saved["losses"] == [1.0] and saved["bare"] is True and saved["scaler"] == {}
    assert saved["meters"] == meters.state_dict() != {}
    box.losses.append(2.0)
    assert saved["losses"] == [1.0]
    state.load_progress({})
    assert box.restored == [] and box.losses == [] and box.known is None
    assert meters.state_dict() == Meters().state_dict()
    state.load_progress(saved)
    assert box.restored == [("model", 1, set())] and box.losses == [1.0] and box.known is True
    assert meters.state_dict() == saved["meters"]


def test_an_empty_state_leaves_what_does_not_reset() -> None:
    class Scaler:
        scale = 2.0

        def state_dict(self) -> dict[str, float]:
            return {"scale": self.scale}

        def load_state_dict(self, state: dict[str, float]) -> None:
            self.scale = state["scale"]

    scaler = Scaler()
    state = RunState(progress=[StatePart.stateful("scaler", lambda: scaler)])
    state.load_progress({"scaler": {}})
    assert scaler.scale == 2.0
    state.load_progress({"scaler": {"scale": 4.0}})
    assert state.progress() == {"scaler": {"scale": 4.0}}


def test_a_payload_lies_in_one_order_and_ends_with_what_is_a_users() -> None:
    payload = {"mine": 1, "scheduler": 2, "dataloaders": 3, "model": 4, "format_version": 5}
    assert list(in_order(payload)) == ["format_version", "model", "dataloaders", "scheduler", "mine"]
    assert in_order(payload) == payload


def test_what_is_refused() -> None:
    with pytest.raises(CheckpointMismatch, match="without: optimizer"):
        check_complete({"model": 1}, {"ema"}, ["model", "ema", "optimizer"])
    check_complete({"model": 1}, {"ema", "optimizer"}, ["model", "ema", "optimizer"])
    with pytest.raises(ValueError, match=r"Expected `state_dict` .* a mapping\. Received: None"):
        check_payload(None, "`state_dict` to return the full state")
    with pytest.raises(CheckpointMismatch, match="0.weight"):
        check_given({"0.weight": torch.ones(1)}, ExcludedFromLoading(None))
    check_given({"model": {}}, ExcludedFromLoading("state"))


def test_settings_that_are_meant_to_differ_may() -> None:
    lines = ["optim.lr: 0.1, now 0.2", "accum_steps: 2, now 1"]
    with pytest.raises(CheckpointMismatch, match=r"optim\.lr: 0\.1, now 0\.2\n  accum_steps"):
        check_same_run(lines, ExcludedFromLoading(None))
    with pytest.raises(CheckpointMismatch) as refused:
        check_same_run(lines, ExcludedFromLoading(["runner.optim"]))
    assert "optim.lr:" not in str(refused.value)
    # The size of an update follows from several keys, and to name one of them is enough.
    check_same_run(lines, ExcludedFromLoading(["runner.optim.lr", "runner.dataloader.batch_size"]))


def test_the_one_reader_of_what_a_load_leaves_out() -> None:
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
    assert kept == {"model": {"1.weight": 2}, "optimizer": {"param_groups": []}, "dataloaders": {"val": {}}}
    assert left_out == {"model.0", "optimizer.state", "scheduler", "dataloaders.train"}
    assert excluded.apply({"model": {"0.weight": 1}}, section="model") == ({"model": {}}, {"model.0"})
    assert excluded.parts_of("model") == ["model.0"] and excluded.parts_of("scheduler") == []
    assert excluded.mentions("optimizer") and excluded.mentions("scheduler") and not excluded.mentions("ema")
    assert excluded.leaves_out("dataloaders.train") and not excluded.leaves_out("dataloaders.val")
    assert excluded.allows_setting("optim.lr") and not excluded.allows_setting("optim.weight_decay")
    assert not excluded.allows_setting("accum_steps")
    with pytest.raises(ValueError, match="'ema', which matches nothing"):
        ExcludedFromLoading("ema").apply(payload)

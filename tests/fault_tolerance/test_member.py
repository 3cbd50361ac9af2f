"""A replica group as a member of those that train a run together, without a runner and without the other groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from danling.config import RunnerConfig
from danling.data import build_dataloader, open_source
from danling.distributed import LocalDomain
from danling.metrics import Meters
from danling.torchft import Healing, ReplicaMember, ReplicaSettings, check_layout, position_owner
from danling.training import Window
from danling.training.run_state import RunState, StatePart

CPU = torch.device("cpu")


@dataclass
class Train:
    """Counters."""

    global_step: int = 0


@dataclass
class State:
    """Counters and attempts."""

    train: Train = field(default_factory=Train)
    elastic: dict[str, int] = field(default_factory=lambda: {"attempts": 1})

    def state_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {"train": {"global_step": self.train.global_step}, "elastic": dict(self.elastic), "rng": {"0": 1}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take them over."""
        self.train.global_step = state["train"]["global_step"]
        self.elastic = {"attempts": state["elastic"]["attempts"] + 1}


class Run:
    """A model, its optimizer, a loader and a meter."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.state = State()
        self.meters = Meters()
        self.window = Window(LocalDomain(), CPU)
        self.noted: dict[str, Any] = {"seen": seed}
        loader = build_dataloader(list(range(20)), {"batch_size": 2}, split="train", train=True, seed=1, device=CPU)
        self.source = open_source(loader, split="train", share=(0, 1), seed=1)
        part = StatePart("model", self.model.state_dict, lambda state, _: self.model.load_state_dict(state) and None)
        self.healing = Healing(
            run_state=RunState([part], [StatePart("noted", lambda: self.noted, lambda state, _: self.note(state))]),
            counters=lambda: self.state,
            sources=lambda: {"train": self.source},
            keeps_positions=lambda: False,
            model=lambda: self.model,
            named_parameters=self.model.named_parameters,
            window=lambda: self.window,
            meters=lambda: self.meters,
            is_main=True,
        )

    def note(self, state: dict[str, Any]) -> None:
        """Take it over."""
        self.noted = state


def test_a_group_that_heals_goes_on_as_the_other_one(caplog: pytest.LogCaptureFixture) -> None:
    ahead, behind = Run(1), Run(2)
    ahead.state.train.global_step = 7
    ahead.source.commit([batch for batch, _ in zip(ahead.source.batches(), range(3))])
    behind.state.elastic, behind.window.agreed_reference = {"attempts": 4}, 2.0
    behind.meters.update({"seen": 1.0})
    sent = ahead.healing.state()
    assert "rng" not in sent["state"]
    with caplog.at_level("INFO", "danling"):
        behind.healing.take(sent)
    assert torch.equal(behind.model.weight, ahead.model.weight) and behind.noted == {"seen": 1}
    assert behind.source.consumed == ahead.source.consumed == 6
    assert behind.state.train.global_step == 7
    # Its attempts and the scale of its losses are its own, and what the other group has counted stays there.
    assert behind.state.elastic == {"attempts": 4} and behind.window.agreed_reference == 2.0
    assert not behind.meters.averages()
    assert "Healed from another replica group at step 7" in caplog.text


class Groups:
    """The other groups: as many as are said to take part."""

    def __init__(self, participants: int = 1) -> None:
        self.failures = 0
        self.num_participants = participants
        self.counts = {"step": 0, "batches_committed": 0}
        self.has_left = 0

    def state_dict(self) -> dict[str, int]:
        return dict(self.counts)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.counts = dict(state)

    def open(self) -> bool:
        return False

    def sum_totals(self, totals: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        return {name: (2 * total, 2 * weight) for name, (total, weight) in totals.items()}

    def leave(self) -> None:
        self.has_left += 1


class Manager:
    """Has one checkpoint, of a step."""

    def __init__(self, step: int | None) -> None:
        self.step = step
        self.begun: list[Path] = []

    def find_latest(self) -> Path | None:
        return None if self.step is None else Path("latest")

    def step_of(self, source: Path) -> int:
        return self.step or 0

    def begin(self, source: Path) -> None:
        self.begun.append(source)


def member(directory: Path, groups: Any, manager: Manager, *, step: int = 3, resumes: bool = True) -> Any:
    loaded: list[Path] = []
    made = ReplicaMember(
        groups,
        Run(1).healing,
        world=LocalDomain(),
        copies=list,
        remember=lambda: lambda: None,
        statistics=list,
        resumes=lambda: resumes,
        checkpoints=lambda: manager,
        directory=lambda: directory,
        step=lambda: step,
        tried=lambda: step + 2,
        load=loaded.append,
    )
    return made, loaded


@pytest.mark.parametrize(
    ("participants", "written", "resumes", "catches_up"),
    [(1, 9, True, True), (1, 3, True, False), (1, None, True, False), (2, 9, True, False), (1, 9, False, False)],
)
def test_a_group_that_joins_nobody_goes_on_from_a_newer_checkpoint(
    participants: int, written: int | None, resumes: bool, catches_up: bool, tmp_path: Path
) -> None:
    made, loaded = member(tmp_path, Groups(participants), Manager(written), resumes=resumes)
    assert made.open_update() is catches_up
    assert loaded == ([Path("latest")] if catches_up else [])


def test_one_of_two_groups_writes_until_it_closes(tmp_path: Path) -> None:
    managers, groups = [Manager(4), Manager(4)], [Groups(), Groups()]
    (first, _), (second, _) = (member(tmp_path, g, m) for g, m in zip(groups, managers))
    assert first.writes() and first.writes() and managers[0].begun == [Path("latest")]
    assert not second.writes() and not managers[1].begun
    first.close()
    assert groups[0].has_left == 1
    assert second.writes() and managers[1].begun == [Path("latest")]
    second.close()


def test_totals_are_added_where_groups_take_part(tmp_path: Path) -> None:
    alone, _ = member(tmp_path, Groups(0), Manager(None))
    beside, _ = member(tmp_path, Groups(2), Manager(None))
    assert alone.sum_totals({"a": (1.0, 2.0)}) == {"a": (1.0, 2.0)}
    assert beside.sum_totals({"a": (1.0, 2.0)}) == {"a": (2.0, 4.0)}


def test_a_checkpoint_without_the_counts_of_groups_begins_at_the_updates_that_were_tried(tmp_path: Path) -> None:
    groups = Groups()
    made, _ = member(tmp_path, groups, Manager(None))
    state = RunState([], [])
    state.add_progress(made.progress_part())
    state.load_progress({})
    assert groups.counts == {"step": 5, "batches_committed": 5}
    state.load_progress({"replicas": {"step": 8, "batches_committed": 9}})
    assert state.progress() == {"replicas": {"step": 8, "batches_committed": 9}}


def test_settings_wait_for_groups_that_evaluate() -> None:
    config = RunnerConfig({"ft": {"enabled": True, "group_size": 3, "process_group_timeout_ms": 500}})
    read = ReplicaSettings.from_config(config)
    assert (read.group_size, read.timeout) == (3, 0.5)
    assert read.quorum_timeout == (config.comm.train_timeout_seconds or 60.0)
    assert read.max_failures == config.max_skipped_updates


@pytest.mark.parametrize(
    ("stack", "axes", "place", "message"),
    [
        ("deepspeed", {}, (0, 1), "stack='deepspeed'"),
        ("parallel", {"shard": 2, "tensor": 2}, (0, 1), "parallel.axes.tensor=2"),
        ("ddp", {}, (2, 2), "ft.replica_id=2, ft.group_size=2"),
    ],
)
def test_what_groups_cannot_be_is_refused(
    stack: str, axes: dict[str, int], place: tuple[int, int], message: str
) -> None:
    shared = ("replicate", "shard")
    check_layout("parallel", {"shard": 2, "tensor": 1}, shared=shared, replica_id=0, group_size=1)
    with pytest.raises(ValueError, match=message):
        check_layout(stack, axes, shared=shared, replica_id=place[0], group_size=place[1])


def test_every_group_keeps_its_own_place_in_the_data() -> None:
    asked = {"enable_ft_dataloader_checkpoints": True}
    groups = {"enabled": True, "replica_id": 2, "group_size": 3}
    for settings, owner in (
        ({}, None),
        ({"ft": groups}, "2"),
        ({"checkpoint": asked}, None),
        ({"checkpoint": asked, "ft": groups}, "2"),
        ({"checkpoint": {**asked, "ft_replica_id": "mine"}, "ft": groups}, "mine"),
        ({"checkpoint": {**asked, "ft_replica_id": "mine"}}, "mine"),
    ):
        assert position_owner(RunnerConfig(settings)) == owner

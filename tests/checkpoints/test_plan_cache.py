"""A sharded save is planned once, and again when anything of it has changed on any rank."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from danling.checkpoints import CheckpointError, CheckpointSettings, TorchDistributedCheckpointManager
from danling.checkpoints.dcp_files import TargetWriter, save_target
from danling.checkpoints.plan_cache import PlanCache
from danling.checkpoints.policy import Record
from danling.checkpoints.reuse import Reuse
from danling.distributed import Domain, LocalDomain


def _meeting(*others: int) -> PlanCache:
    return PlanCache(lambda value: [value, *others])


def test_a_plan_is_known_when_every_rank_remembers_the_same_save() -> None:
    answers = [-1]
    cache = PlanCache(lambda value: [value, *answers])
    plan = SavePlan([], planner_data={"model.weight": ("model", "weight")})
    assert not cache.is_known(plan)
    cache.finish(plan)
    answers[0] = cache.number
    assert cache.is_known(SavePlan([], planner_data={"model.weight": ("model", "weight")}))
    answers[0] = -1
    assert not cache.is_known(plan), "another rank has another plan"
    answers[0] = cache.number + 3
    assert not cache.is_known(plan), "another rank remembers another save"
    cache.finish(plan)
    assert cache.number == answers[0] + 1, "after a save that all have planned anew, all count alike"


def test_another_place_in_the_nested_state_is_another_plan() -> None:
    cache = _meeting()
    cache.is_known(plan := SavePlan([], planner_data={"a.b": ("a", "b")}))
    cache.finish(plan)
    assert not cache.is_known(SavePlan([], planner_data={"a.b": ("a.b",)}))


def test_a_plan_that_is_known_takes_the_names_of_the_new_save() -> None:
    cache = _meeting()
    cache.is_known(plan := SavePlan([], planner_data={}))
    cache.finish(SavePlan([], storage_data="first"))
    assert cache.is_known(plan)
    assert cache.finish(SavePlan([], storage_data="second", usable=False)).storage_data == "second"


def test_what_was_forgotten_is_not_known() -> None:
    cache = _meeting()
    cache.is_known(plan := SavePlan([], planner_data={}))
    cache.finish(plan)
    cache.forget()
    assert not cache.is_known(plan)
    assert cache.metadata is None


def _save_often(directory: Path) -> list[tuple[int, bool]]:
    """Save seven states, and return how often each was planned, and whether it came back."""
    domain = Domain()
    settings = CheckpointSettings(async_mode="disabled")
    manager = TorchDistributedCheckpointManager(
        directory, domain=domain, run_id="run", settings=settings, step_mode=True
    )
    planned, original = [], DefaultSavePlanner.create_global_plan

    def count(self: DefaultSavePlanner, plans: list[SavePlan]) -> Any:
        planned.append(len(plans))
        return original(self, plans)

    DefaultSavePlanner.create_global_plan = count  # type: ignore[method-assign]
    found = []
    for step in range(7):
        own = torch.full((3,), float(step + 10 * domain.rank))
        if step >= 2 and domain.rank == 1:
            own = own.double()
        # Tensors under keys that are no strings are refused, on the rank that has them.
        mine = {0: own} if step == 4 and domain.rank == 1 else {"own": own}
        payload: dict[str, Any] = {
            "format_version": 1,
            "model": {"weight": torch.full((4, 4), float(step))},
            "ranks": {str(domain.rank): mine},
            "runner": {"words": ["of a length"] * step},
        }
        planned.clear()
        try:
            manager.save_checkpoint(payload, epoch=0, global_step=step)
        except CheckpointError:
            found.append((-1, True))
            continue
        read = manager.load_checkpoint("latest")
        value = read["ranks"][str(domain.rank)]["own"]
        right = torch.equal(value, own) and value.dtype == own.dtype and read["runner"] == payload["runner"]
        found.append((len(planned), right and torch.equal(read["model"]["weight"], payload["model"]["weight"])))
    manager.close()
    return found


def test_ranks_plan_anew_when_one_has_changed_or_a_save_has_failed(tmp_path: Path) -> None:
    first, second = run_processes(_save_often, tmp_path, world_size=2, init_process_group=True)
    # Planned; as before; another dtype on one rank; as before; a state of which one rank can make no plan; all anew; as before.
    assert [times for times, _ in first] == [1, 0, 1, 0, -1, 1, 0]
    assert [times for times, _ in second] == [0, 0, 0, 0, -1, 0, 0]
    assert all(right for _, right in first + second)


@pytest.mark.parametrize("mode", ["async", "async_with_pinned_mem"])
def test_saves_in_the_background_hold_what_they_were_given(tmp_path: Path, mode: str) -> None:
    settings = CheckpointSettings(async_mode=mode)
    manager = TorchDistributedCheckpointManager(
        tmp_path, domain=LocalDomain(), run_id="run", settings=settings, step_mode=True
    )
    for step, dtype in enumerate((torch.float32, torch.float32, torch.float64)):
        weight = torch.full((4,), float(step), dtype=dtype)
        manager.save_checkpoint({"format_version": 1, "model": {"weight": weight}}, epoch=0, global_step=step)
        manager.wait()
        read = manager.load_checkpoint("latest")["model"]["weight"]
        assert torch.equal(read, weight)
        assert read.dtype == dtype
    manager.close()


def test_taking_files_over_leaves_a_plan_that_is_kept_as_it_is(tmp_path: Path) -> None:
    finished: list[tuple[Metadata, list[list[WriteResult]]]] = []

    class Writer(TargetWriter):
        def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
            finished.append((replace(metadata), results))
            super().finish(metadata, results)

    def writer(name: str, reuse: Reuse | None = None) -> TargetWriter:
        return Writer(tmp_path / name, Record(name, 1, 0, (), "run", 1, 0), reuse=reuse)

    save_target({"format_version": 1, "model": {"other": torch.ones(5)}}, writer("another"), alone=True)
    cache = _meeting()
    save_target({"format_version": 1, "model": {"weight": torch.ones(3)}}, writer("planned"), alone=True, cache=cache)
    kept = copy.deepcopy(cache.metadata)
    assert kept is not None
    (tmp_path / "linked").mkdir()
    writer("linked", Reuse("another", frozenset({"model.other"}))).finish(*finished[-1])
    assert {"model.other", "model.weight"} == json.loads((tmp_path / "linked/index.json").read_text())["tensors"].keys()
    assert cache.metadata == kept


def test_a_save_after_one_that_takes_files_over_is_written_as_planned_before(tmp_path: Path) -> None:
    settings = CheckpointSettings(async_mode="disabled")
    manager = TorchDistributedCheckpointManager(
        tmp_path, domain=LocalDomain(), run_id="run", settings=settings, step_mode=True
    )
    payload = {"format_version": 1, "model": {"weight": torch.arange(4.0)}, "state": {"figures": 1}}

    def index() -> str:
        return (sorted((tmp_path / "targets").iterdir())[-1] / "index.json").read_text()

    manager.save_ahead(payload, epoch=0, global_step=3)
    first = index()
    manager.save_checkpoint(payload, epoch=0, global_step=3)
    assert index() != first, "the tensor lies in a file that was taken over, the rest in one beside it"
    manager.save_checkpoint(payload, epoch=0, global_step=4)
    assert index() == first
    assert torch.equal(manager.load_checkpoint("latest")["model"]["weight"], payload["model"]["weight"])
    manager.close()

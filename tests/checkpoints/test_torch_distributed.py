"""Sharded checkpoints over gloo: targets, pointers, the background, other world sizes, damage, foreign readers."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from support.toys import differences
from support.warm import interpreter
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter, Metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from danling.checkpoints import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointNotFound,
    CheckpointSettings,
    TorchDistributedCheckpointManager,
    dcp_target,
    read_config,
    writer_process,
)
from danling.distributed import Domain

MODES = ("disabled", "async", "async_with_pinned_mem")


def _manager(
    directory: Path, *, run_id: str = "run", **settings: Any
) -> TorchDistributedCheckpointManager:
    policy = CheckpointSettings(**{"async_mode": "disabled", **settings})
    return TorchDistributedCheckpointManager(
        directory, domain=Domain(), run_id=run_id, settings=policy, step_mode=True
    )


def _payload(step: int) -> dict[str, Any]:
    return {
        "format_version": 1,
        "runner": {"seed": 7, "empty": {}, "numbers": {1: "one"}},
        "model": {"0.weight": torch.full((5, 3), float(step)), "0.count": torch.tensor(step)},
        "state": {"step": step, "pair": [torch.ones(2), 3]},
        "dataloaders": {},
    }


def _save(manager: Any, step: int, *, history: bool = False, best: bool = False) -> None:
    manager.save_checkpoint(_payload(step), epoch=0, global_step=step, history=history, best=best)


def _step(manager: Any, source: str | Path) -> int:
    return int(manager.load_checkpoint(source)["state"]["step"])


def _targets(directory: Path) -> list[Path]:
    return sorted((directory / "targets").iterdir())


# One process, no process group


@pytest.mark.parametrize("mode", MODES)
def test_a_state_comes_back_as_it_was(tmp_path: Path, mode: str) -> None:
    manager = _manager(tmp_path, async_mode=mode)
    _save(manager, 3, history=True, best=True)
    assert differences(manager.load_checkpoint("ckpt-s000000000003"), _payload(3)) == []
    assert manager.load_checkpoint("latest", sections=["state"]).keys() == {
        "format_version",
        "state",
    }
    assert len(_targets(tmp_path)) == 1
    assert {path.read_text() for path in tmp_path.iterdir() if path.is_file()} == {
        f"{_targets(tmp_path)[0].name}\n"
    }
    assert read_config(tmp_path) == read_config(_targets(tmp_path)[0]) == _payload(3)["runner"]
    manager.close()


# A save ahead of an evaluation


def _ahead(manager: Any, step: int) -> tuple[dict[str, Any], Path]:
    """Save ahead, and return the payload and its target."""
    payload = _payload(step)
    payload["model"]["1.weight"] = torch.arange(50_000.0)
    manager.save_before_evaluation(payload, epoch=0, global_step=step)
    manager.wait()
    assert manager.is_saved_before_evaluation()
    return payload, _targets(manager.directory)[-1]


def test_lost_stale_or_reshaped_data_is_written_again(tmp_path: Path) -> None:
    manager = _manager(tmp_path)
    payload, before = _ahead(manager, 3)
    (before / "__0_0.distcp").unlink()
    manager.save_checkpoint(payload, epoch=1, global_step=3)
    assert differences(_manager(tmp_path).load_checkpoint("latest"), payload) == []
    payload, _ = _ahead(manager, 4)
    manager.save_checkpoint(payload, epoch=0, global_step=5)
    assert not manager.is_saved_before_evaluation()
    for changed in (torch.zeros(5, 3), torch.zeros(3, 5), torch.zeros(3, 5, dtype=torch.int32)):
        manager.save_before_evaluation(payload, epoch=0, global_step=6)
        payload["model"]["0.weight"] = changed
    manager.save_checkpoint(payload, epoch=0, global_step=6, history=True)
    assert differences(_manager(tmp_path).load_checkpoint("ckpt-s000000000006"), payload) == []


def test_retention_counts_no_save_ahead(tmp_path: Path) -> None:
    manager = _manager(tmp_path, keep_latest_k=2)
    for step in range(1, 5):
        payload, _ = _ahead(manager, step)
        manager.save_checkpoint(payload, epoch=0, global_step=step, history=True, best=step == 1)
    names = sorted(path.name for path in tmp_path.iterdir() if path.is_file())
    assert names == [
        "best",
        "ckpt-s000000000001",
        "ckpt-s000000000003",
        "ckpt-s000000000004",
        "latest",
    ]
    assert [_step(manager, name) for name in names] == [1, 1, 3, 4, 4] and len(
        _targets(tmp_path)
    ) == 3


@pytest.mark.parametrize("mode", MODES)
def test_save_after_one_ahead_rewrites_changed_data_and_links_the_rest(
    tmp_path: Path, mode: str
) -> None:
    manager = _manager(tmp_path, async_mode=mode)
    payload, before = _ahead(manager, 3)
    assert differences(_manager(tmp_path).load_checkpoint("latest"), payload) == []
    inode = (before / "__0_0.distcp").stat().st_ino
    payload["state"] = {
        "step": 3,
        "pair": [torch.ones(2), 4],
        "figures": {1: {"val": {"loss": 0.5}}},
    }
    payload["model"]["0.weight"] = torch.arange(15.0).view(5, 3)
    manager.save_checkpoint(payload, epoch=1, global_step=3, history=True, best=True)
    manager.close()
    (target,) = _targets(tmp_path)
    assert target != before
    assert (target / "__0_0.distcp").stat().st_ino == inode
    assert (target / f"{int(target.name.split('-')[0])}__0_0.distcp").stat().st_size < 20_000
    reader = _manager(tmp_path, verify="full")
    for name in ("latest", "best", "ckpt-s000000000003"):
        assert differences(reader.load_checkpoint(name), payload) == []
    subprocess.run(
        [
            interpreter(),
            "-m",
            "torch.distributed.checkpoint.format_utils",
            "dcp_to_torch",
            target,
            tmp_path / "stock",
        ],
        check=True,
    )
    stock = torch.load(tmp_path / "stock", weights_only=True)
    assert differences(stock["model"], payload["model"]) == []
    assert stock["state"]["figures"] == payload["state"]["figures"]
    _flip(target / "__0_0.distcp")
    with pytest.raises(CheckpointDamaged, match="__0_0.distcp has another SHA-256"):
        reader.load_checkpoint("latest")


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "content", ["../../elsewhere\n", "/etc\n", "", "00000001-00000000\n", "targets\n"]
)
def test_pointers_lead_to_targets_only(tmp_path: Path, content: str) -> None:
    manager = _manager(tmp_path)
    _save(manager, 1, history=True)
    (tmp_path / "latest").write_text(content)
    with pytest.raises(CheckpointDamaged, match="latest"):
        manager.load_checkpoint("latest")
    assert manager.find_latest() == "ckpt-s000000000001"
    extra = _targets(tmp_path)[0] / "extra"
    extra.touch()
    with pytest.raises(CheckpointDamaged, match="extra is not part of it"):
        manager.load_checkpoint("ckpt-s000000000001")


def test_exchanged_pointers_are_found_by_their_names(tmp_path: Path) -> None:
    manager = _manager(tmp_path)
    for step in (1, 2):
        _save(manager, step, history=True)
    (tmp_path / "ckpt-s000000000001").write_text((tmp_path / "ckpt-s000000000002").read_text())
    with pytest.raises(
        CheckpointDamaged, match="ckpt-s000000000001 leads to the checkpoint of step 2"
    ):
        manager.load_checkpoint("ckpt-s000000000001")
    assert manager.find_latest() == "latest"


def test_foreign_checkpoint_needs_trust_and_runs_nothing_without(tmp_path: Path) -> None:
    _save(_manager(tmp_path), 1)
    (target,) = _targets(tmp_path)
    # With an index `.metadata` is not opened at all.
    (target / "index.json").unlink()
    assert (
        differences(
            _manager(tmp_path, verify="none", trust=True).load_checkpoint("latest"), _payload(1)
        )
        == []
    )
    (target / ".metadata").write_bytes(b"cos\nsystem\n(S'touch harmed'\ntR.")
    with pytest.raises(
        CheckpointError, match=r"Expected index\.json .*dcp_to_torch.*checkpoint\.trust=true"
    ):
        _manager(tmp_path, verify="none").load_checkpoint("latest")
    assert not Path("harmed").exists()


def test_a_complete_target_without_a_name_counts_and_an_unfinished_one_goes(tmp_path: Path) -> None:
    manager = _manager(tmp_path)
    _save(manager, 1)
    kept = (tmp_path / "latest").read_text()
    _save(manager, 2, history=True)
    # As after a kill between the manifest and the pointers.
    (tmp_path / "ckpt-s000000000002").unlink()
    (tmp_path / "latest").write_text(kept)
    unfinished = tmp_path / "targets" / "00000009-00000000"
    unfinished.mkdir()
    (unfinished / "__0_0.distcp").touch()
    again = _manager(tmp_path)
    source = again.find_latest()
    assert source is not None and _step(again, source) == 2
    again.begin(source)
    _save(again, 3)
    assert not unfinished.exists() and _step(again, "latest") == 3


def test_ambiguous_names_are_refused(tmp_path: Path) -> None:
    manager = _manager(tmp_path)
    with pytest.raises(CheckpointError, match="two parts of the state named 'a.b'"):
        manager.save_checkpoint(
            {"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, epoch=0, global_step=1
        )
    with pytest.raises(CheckpointError, match=r"string keys above tensors\. Received: a\[0\]"):
        manager.save_checkpoint({"a": {0: torch.ones(1)}}, epoch=0, global_step=1)
    with pytest.raises(CheckpointNotFound):
        manager.load_checkpoint("latest")


# Several ranks


class _Net(nn.Module):
    """Rows that do not divide by two or three, a tied weight, a buffer that changes, a frozen and an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.second = nn.Linear(7, 7, bias=False)
        self.tied = nn.Linear(7, 7, bias=False)
        self.tied.weight = self.second.weight
        self.frozen = nn.Linear(7, 1).requires_grad_(False)
        self.unused = nn.Linear(2, 2)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.frozen(self.tied(self.second(self.norm(self.first(data)))))
        return hidden


def _trained(world_size: int, seed: int) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(seed)
    model = _Net()
    if world_size > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(
            torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
        ).square().sum().backward()
        optimizer.step()
    names = dict(enumerate(name for name, _ in model.named_parameters()))
    moments = {names[index]: state for index, state in optimizer.state_dict()["state"].items()}
    return model, {
        "format_version": 1,
        "model": model.state_dict(),
        "optimizer": {"state": moments},
    }


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _save_sharded(directory: Path, mode: str) -> dict[str, Any]:
    domain = Domain()
    model, payload = _trained(domain.size, seed=3)
    payload["ranks"] = {
        str(rank): entry
        for rank, entry in enumerate(domain.gather_objects({"seed": 10 + domain.rank}))
    }
    manager = _manager(directory, async_mode=mode, keep_latest_k=2)
    before: dict[str, Any] = {"model": {}, "optimizer": {}}
    for step in (1, 2, 3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(step)
            for buffer in model.buffers():
                buffer.add_(1)
        before = {
            name: {k: v.clone() for k, v in _whole(payload[name]).items()} for name in ("model",)
        }
        before["optimizer"] = _whole(payload["optimizer"])
        manager.save_checkpoint(payload, epoch=0, global_step=step, history=True)
        if mode != "disabled":
            with torch.no_grad():
                for tensor in (*model.parameters(), *model.buffers()):
                    tensor.fill_(-1)
                    tensor.zero_()
    manager.wait()
    assert manager.find_latest() == "latest"
    manager.close()
    return before if domain.rank == 0 else {}


def _load_sharded(directory: Path) -> dict[str, Any]:
    domain = Domain()
    model, template = _trained(domain.size, seed=99)
    manager = _manager(directory)
    whole = manager.load_checkpoint("latest")
    loaded = manager.load_checkpoint("latest", template=template)
    if domain.size > 1:
        assert type(loaded["model"]["first.weight"]) is type(template["model"]["first.weight"])
        assert loaded["model"]["first.weight"].to_local().shape[0] < 7
    full = _whole(loaded)
    model.load_state_dict(loaded["model"])
    assert differences(_whole(model.state_dict()), full["model"]) == []
    assert differences(full, whole) == []
    manager.close()
    return full if domain.rank == 0 else {}


# What is written is the same in each mode, as the tests above show; a process that writes takes seconds to start.
@pytest.mark.parametrize(
    "mode", [m if m == "async" else pytest.param(m, marks=pytest.mark.slow) for m in MODES]
)
def test_reshard(tmp_path: Path, mode: str) -> None:
    saved = run_processes(_save_sharded, tmp_path, mode, world_size=2, init_process_group=True)[0]
    pointers = sorted(path.name for path in tmp_path.iterdir() if path.is_file())
    assert pointers == ["ckpt-s000000000002", "ckpt-s000000000003", "latest"]
    assert {path.name for path in _targets(tmp_path)[-1].iterdir()} == {
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "index.json",
        "manifest.sha256",
    }
    for world_size in (1, 2, 3):
        init = world_size > 1
        loaded = run_processes(
            _load_sharded, tmp_path, world_size=world_size, init_process_group=init
        )[0]
        assert differences(loaded["model"], saved["model"]) == [], world_size
        assert differences(loaded["optimizer"], saved["optimizer"]) == []
        assert loaded["ranks"] == {"0": {"seed": 10}, "1": {"seed": 11}}


def _fail_on_one_rank(directory: Path, mode: str) -> list[str]:
    domain = Domain()
    manager = _manager(directory, async_mode=mode)
    _save(manager, 1)
    manager.wait()
    original = dcp_target.HashingFileSystem.create_stream

    def fail(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    if domain.rank == 1:
        dcp_target.HashingFileSystem.create_stream = fail  # type: ignore[method-assign]
    seen = []
    try:
        _save(manager, 2, history=True)
        manager.wait()
    except CheckpointError as error:
        seen.append("rank 1: OSError(28, 'No space left on device')" in str(error))
    dcp_target.HashingFileSystem.create_stream = original  # type: ignore[method-assign]
    seen.append(_step(manager, "latest"))
    domain.barrier()
    assert len(_targets(directory)) == 1
    _save(manager, 3)
    manager.wait()
    seen.append(_step(manager, "latest"))
    manager.close()
    return seen


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_failed_write_of_a_rank_fails_the_save_on_all(tmp_path: Path, mode: str) -> None:
    seen = run_processes(_fail_on_one_rank, tmp_path, mode, world_size=2, init_process_group=True)
    assert seen == [[True, 1, 3]] * 2


def _two_saves(manager: Any) -> list[str]:
    """Save twice, the second time with a process that nothing happens to; return what came of each: the step, or the error."""
    seen = []
    for step in (1, 2):
        try:
            _save(manager, step)
            manager.wait()
            seen.append(str(_step(manager, "latest")))
        except CheckpointError as error:
            seen.append(str(error))
        vars(manager._process).pop("_ask", None)
    manager.close()
    return seen


def _lose_a_starting_process(directory: Path, victim: int) -> list[str]:
    manager = _manager(directory, async_mode="async_with_pinned_mem")
    process: Any = manager._process
    if manager.domain.rank == victim:
        process._ask = lambda *_: (
            os.kill(process.pid, signal.SIGKILL),
            type(process)._ask(process, *_),
        )
    return _two_saves(manager)


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_process_dying_at_its_start_is_reported_on_all_ranks(tmp_path: Path, victim: int) -> None:
    seen = run_processes(
        _lose_a_starting_process, tmp_path, victim, world_size=2, init_process_group=True
    )
    for first, second in seen:
        assert "ended by SIGKILL" in first
        assert second == "2"


def _lose_a_joining_process(directory: Path) -> list[str]:
    writer_process._JOIN_SECONDS = 3.0
    manager = _manager(directory, async_mode="async_with_pinned_mem")
    process: Any = manager._process

    def killed(*request: Any) -> None:
        if request[0] is writer_process.join_group and manager.domain.rank == 1:
            del process._ask
            os.kill(process.pid, signal.SIGKILL)
        type(process)._ask(process, *request)

    process._ask = killed
    return _two_saves(manager)


@pytest.mark.slow
def test_processes_wait_for_one_dying_while_they_join_for_a_limited_time(tmp_path: Path) -> None:
    seen = run_processes(
        _lose_a_joining_process, tmp_path, world_size=2, init_process_group=True, timeout=90
    )
    for first, second in seen:
        assert "within 3 s" in first or "ended by SIGKILL" in first
        assert second == "2"


def _many_saves(directory: Path) -> list[int]:
    manager = _manager(directory, async_mode="async")
    for step in range(1, 30):
        _save(manager, step, history=step % 10 == 0)
    manager.wait()
    steps = [
        _step(manager, name) for name in ("latest", "ckpt-s000000000010", "ckpt-s000000000020")
    ]
    manager.close()
    return steps


def test_saves_in_the_background_never_overlap_and_the_newest_wins(tmp_path: Path) -> None:
    steps = run_processes(_many_saves, tmp_path, world_size=2, init_process_group=True)
    assert steps == [[29, 10, 20]] * 2
    assert len(_targets(tmp_path)) == 3


def test_torch_writer_filling_a_copy_of_the_metadata_loses_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch 2.11 does, with which the real writer is run elsewhere; torch 2.13 fills the one that it is given."""
    finish = FileSystemWriter.finish

    def on_a_copy(self: Any, metadata: Metadata, results: Any) -> None:
        finish(self, dataclasses.replace(metadata), results)

    monkeypatch.setattr(FileSystemWriter, "finish", on_a_copy)
    manager = _manager(tmp_path)
    _save(manager, 1)
    _save(manager, 2)
    assert _step(manager, "latest") == 2
    assert torch.equal(
        manager.load_checkpoint("latest")["model"]["0.weight"], torch.full((5, 3), 2.0)
    )


def test_value_that_ranks_have_differently_is_that_of_the_first_rank() -> None:
    """By itself torch takes each value from the rank that has the least to write."""
    planners, plans = [], []
    for rank in range(3):
        planner = dcp_target.SavePlanner()
        mark = [6, 3] if rank == 0 else None
        model = {str(number): torch.zeros(8) for number in range(4)}
        of_rank = {f"rank_{rank}": {"value": rank}}
        state = {
            "model": model,
            "state": {"metrics_mark": mark},
            "attributes": {"ranks": [torch.ones(1)], **of_rank},
        }
        planner.set_up_planner(state, is_coordinator=rank == 0)
        planners.append(planner)
        plans.append(planner.create_local_plan())
    whole, _ = planners[0].create_global_plan(plans)
    names = [{item.index.fqn for item in plan.items} for plan in whole]
    assert [rank for rank, of_plan in enumerate(names) if "state" in of_plan] == [0]
    for rank, of_plan in enumerate(names):
        assert f"attributes.rank_{rank}" in of_plan, "what one rank alone has is saved"
    assert any(name.startswith("model.") for name in names[1] | names[2]), "tensors are shared out"

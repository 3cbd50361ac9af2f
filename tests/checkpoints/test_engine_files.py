"""The files of an engine that were written before an evaluation are linked by the save after it, where they are the same."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from danling.checkpoints.deepspeed import CLIENT_STATE, EngineAhead, HashingFiles

MODEL, SHARE = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"


def state_of(client: dict[str, Any]) -> dict[str, Any]:
    module = {"weight": torch.arange(2000.0), "seen": torch.zeros(3)}
    return {"module": module, "global_steps": 3, CLIENT_STATE: client}


def share() -> dict[str, Any]:
    return {"moments": torch.arange(5000.0), "lr": 0.1, "kind": torch.float32}


def save(files: HashingFiles, target: Path, model: dict[str, Any], optimizer: dict[str, Any]) -> HashingFiles:
    files.makedirs(str(target), exist_ok=True)
    files.save(model, str(target / MODEL))
    files.save(optimizer, str(target / SHARE))
    assert files.error is None
    for name, (size, digest) in files.written.items():
        content = (target / name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (size, digest)
    return files


def linked(first: Path, second: Path) -> set[str]:
    return {name for name in (MODEL, SHARE) if (first / name).stat().st_ino == (second / name).stat().st_ino}


@pytest.fixture
def ahead(tmp_path: Path) -> EngineAhead:
    client = {"results": {}}
    written = save(HashingFiles(), tmp_path / "before", state_of(client), share()).written
    return EngineAhead(tmp_path / "before", 3, client, written)


def test_what_is_the_same_is_linked_whatever_figures_the_runner_adds(ahead: EngineAhead, tmp_path: Path) -> None:
    target = tmp_path / "after"
    save(HashingFiles(ahead=ahead), target, state_of({"results": {1: 0.5}}), share())
    assert linked(ahead.path, target) == {MODEL, SHARE}
    assert torch.load(target / MODEL, weights_only=True)[CLIENT_STATE] == {"results": {}}


@pytest.mark.parametrize("kept", [MODEL, SHARE])
def test_what_an_evaluation_has_changed_is_written(kept: str, ahead: EngineAhead, tmp_path: Path) -> None:
    model, optimizer, target = state_of({}), share(), tmp_path / "after"
    if kept == MODEL:
        optimizer["lr"] = 0.05
    else:
        model["module"]["seen"][1] = 1
    save(HashingFiles(ahead=ahead), target, model, optimizer)
    assert linked(ahead.path, target) == {kept}
    assert torch.load(target / SHARE, weights_only=True)["lr"] == optimizer["lr"]
    assert torch.equal(torch.load(target / MODEL, weights_only=True)["module"]["seen"], model["module"]["seen"])


def test_files_that_are_gone_or_cut_are_written(ahead: EngineAhead, tmp_path: Path) -> None:
    (ahead.path / SHARE).unlink()
    (ahead.path / MODEL).write_bytes(b"cut")
    target = tmp_path / "after"
    save(HashingFiles(ahead=ahead), target, state_of({}), share())
    assert (target / MODEL).stat().st_nlink == (target / SHARE).stat().st_nlink == 1

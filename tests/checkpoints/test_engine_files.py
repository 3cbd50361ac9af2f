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


def test_what_is_the_same_is_linked_and_the_rest_is_written(ahead: EngineAhead, tmp_path: Path) -> None:
    save(HashingFiles(ahead=ahead), tmp_path / "same", state_of({"results": {1: 0.5}}), share())
    assert linked(ahead.path, tmp_path / "same") == {MODEL, SHARE}
    assert torch.load(tmp_path / "same" / MODEL, weights_only=True)[CLIENT_STATE] == {"results": {}}
    model, optimizer = state_of({}), share()
    optimizer["lr"] = 0.05
    save(HashingFiles(ahead=ahead), tmp_path / "optimizer", model, optimizer)
    assert linked(ahead.path, tmp_path / "optimizer") == {MODEL}
    assert torch.load(tmp_path / "optimizer" / SHARE, weights_only=True)["lr"] == 0.05
    model["module"]["seen"][1] = 1
    (ahead.path / SHARE).unlink()  # as by somebody who cleans up
    save(HashingFiles(ahead=ahead), tmp_path / "model", model, share())
    for name in (MODEL, SHARE):
        assert (tmp_path / "model" / name).stat().st_nlink == 1
    assert torch.load(tmp_path / "model" / MODEL, weights_only=True)["module"]["seen"].tolist() == [0, 1, 0]

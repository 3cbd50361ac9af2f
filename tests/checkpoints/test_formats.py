"""Checkpoints of every `format_version` there ever was still load; see `fixtures/README.md`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.toys import differences

from danling.checkpoints import CheckpointSettings, FileCheckpointManager, read_config
from danling.checkpoints.torch_files import FORMAT_VERSION
from danling.distributed import LocalDomain

FIXTURES = Path(__file__).parent / "fixtures"


def payload_of_version_1() -> dict[str, Any]:
    """Return what the fixtures of version 1 were made of."""
    return {
        "format_version": 1,
        "runner": {"seed": 7, "optim": {"type": "adamw", "lr": 0.5}},
        "state": {
            "train": {"global_step": 12, "epoch": 3},
            "scores": {},
            "rng": {"ranks": {"0": torch.arange(4, dtype=torch.uint8)}},
        },
        "model": {"0.weight": torch.arange(6.0).reshape(2, 3), "0.bias": torch.tensor([0.5, -1], dtype=torch.bfloat16)},
        "optimizer": {
            "state": {"0.weight": {"step": torch.tensor(12.0), "exp_avg": torch.ones(2, 3)}},
            "param_groups": [{"lr": 0.5}],
        },
        "dataloaders": {"train": {"kind": "position", "epoch": 3, "consumed": 40}},
    }


@pytest.mark.parametrize("kind", ["file/latest.pth", "indexed/latest"])
@pytest.mark.parametrize("version", range(1, FORMAT_VERSION + 1))
def test_old_checkpoints_load(tmp_path: Path, version: int, kind: str) -> None:
    source = FIXTURES / f"v{version}" / kind
    manager = FileCheckpointManager(
        tmp_path, domain=LocalDomain(), run_id="x", settings=CheckpointSettings(), step_mode=False
    )
    assert differences(manager.load_checkpoint(source), payload_of_version_1()) == []
    assert read_config(source) == payload_of_version_1()["runner"]

"""Updates in order raise no alarm on any stack: digests and copies are compared at each of them, and each is made again where it may be."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from models.gpt import GPT
from support.checked import settings
from support.layouts import LENGTH, VOCABULARY, Sentences
from support.processes import run_processes
from torch import Tensor, nn

import danling as dl
from danling.audit.digests import read_digests

UPDATES = int(os.environ.get("DANLING_CLEAN_UPDATES", "12"))
"""Updates on each stack; a thousand before a release."""
WITH_REPLAY: dict[str, Any] = {"deterministic": True, "audit.replay_interval": 1}


def engine(stage: int) -> dict[str, Any]:
    """Return the settings of DeepSpeed with a stage of ZeRO."""
    return {
        "stack": "deepspeed",
        "deepspeed": {"zero_optimization": {"stage": stage, "reduce_bucket_size": 4096}},
    }


def axis(name: str) -> dict[str, Any]:
    """Return the settings of a mesh of two ranks."""
    return {"stack": "parallel", f"parallel.axes.{name}": 2}


STACKS: dict[str, dict[str, Any]] = {
    **{
        name: {**axis(name), **WITH_REPLAY}
        for name in ("shard", "tensor", "context", "pipeline", "expert")
    },
    "ddp": WITH_REPLAY,
    "graph": {"stack": "graph", "compile.backend": "eager", **WITH_REPLAY},
    "accelerate": {"stack": "accelerate", **WITH_REPLAY},
    # Digests alone: its gradients are not computed again.
    **{f"deepspeed {stage}": engine(stage) for stage in range(4)},
}


class Sentenced(dl.Runner):
    """A language model with dropout and averaged weights.

    Args:
        config: The configuration.
        experts: Experts of its blocks; 0 for none.
    """

    def __init__(self, config: Mapping[str, Any], experts: int = 0) -> None:
        super().__init__(config)
        rate = 0.0 if experts else 0.1
        self.model = GPT(
            VOCABULARY,
            context=LENGTH,
            width=16,
            depth=2,
            heads=4,
            tied=False,
            dropout=rate,
            experts=experts,
        )
        self.criterion = nn.CrossEntropyLoss()
        self.datasets = {"train": Sentences(40)}

    def compute_loss(self, pred: Tensor, target: Tensor) -> Tensor:
        return super().compute_loss(pred.flatten(0, 1), target.flatten())


def train(root: str, stack: str) -> tuple[int, list[str]]:
    """Return the updates made, and the warnings."""
    averaged = {} if stack.startswith("deepspeed") else {"ema.enabled": True}
    unchecked = {"deterministic": False, "audit.replay_interval": None}
    more = {**unchecked, "steps": UPDATES, "audit.digest_interval": 1, **averaged, **STACKS[stack]}
    config = settings(root, **more)
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("danling").addHandler(handler)
    with Sentenced(config, experts=4 if stack == "expert" else 0) as runner:
        runner.train()
        return runner.state.train.global_step, [text for text in said if "Expected" in text]


@pytest.mark.slow  # of most stacks test_replay.py shows it too
@pytest.mark.timeout(300 + 2 * UPDATES)
@pytest.mark.parametrize("stack", STACKS)
def test_no_stack_raises_an_alarm(stack: str, tmp_path: Path) -> None:
    package = stack.partition(" ")[0]
    if package in ("accelerate", "deepspeed"):
        pytest.importorskip(package)
    for rank in run_processes(train, str(tmp_path), stack, world_size=2, timeout=120 + 2 * UPDATES):
        assert rank == (UPDATES, [])
    assert list(read_digests(tmp_path)) == list(range(1, UPDATES + 1))

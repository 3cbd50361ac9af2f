"""Updates in order raise no alarm on any stack: digests and copies are compared at each of them, and each is made again where it may be."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from models.gpt import GPT
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
    return {"stack": "deepspeed", "deepspeed": {"zero_optimization": {"stage": stage, "reduce_bucket_size": 4096}}}


def axis(name: str) -> dict[str, Any]:
    """Return the settings of a mesh of two ranks."""
    return {"stack": "parallel", f"parallel.axes.{name}": 2}


MESH: dict[str, dict[str, Any]] = {
    "shard": {**axis("shard"), **WITH_REPLAY},
    "tensor": {**axis("tensor"), **WITH_REPLAY},
    "context": {**axis("context"), **WITH_REPLAY},
    "pipeline": {**axis("pipeline"), **WITH_REPLAY},
    "expert": {**axis("expert"), **WITH_REPLAY},
}
OTHERS: dict[str, dict[str, Any]] = {
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
            VOCABULARY, context=LENGTH, width=16, depth=2, heads=4, tied=False, dropout=rate, experts=experts
        )
        self.criterion = nn.CrossEntropyLoss()
        self.datasets = {"train": Sentences(40)}

    def compute_loss(self, pred: Tensor, target: Tensor) -> Tensor:
        return super().compute_loss(pred.flatten(0, 1), target.flatten())


def train(root: str, stacks: Mapping[str, Mapping[str, Any]], updates: int) -> dict[str, tuple[int, list[str]]]:
    """Train on each stack; return the updates made, and what was said of them."""
    found = {}
    for name, own in stacks.items():
        config = {
            "seed": 1,
            "steps": updates,
            "dir": f"{root}/{name}",
            "log_interval": 1000,
            "checkpoint.load_only": True,
            "audit.digest_interval": 1,
            "accum_steps": 2,
            "max_grad_norm": 1.0,
            "optim": {"type": "adamw", "lr": 1e-3},
            "dataloader": {"batch_size": 4},
            **({} if name.startswith("deepspeed") else {"ema.enabled": True}),
            **own,
        }
        said: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record, said=said: said.append(record.getMessage())  # type: ignore[method-assign,misc]
        logging.getLogger("danling").addHandler(handler)
        try:
            with Sentenced(config, experts=4 if name == "expert" else 0) as runner:
                runner.train()
                found[name] = runner.state.train.global_step, [text for text in said if "Expected" in text]
        finally:
            logging.getLogger("danling").removeHandler(handler)
    return found


def check(root: Path, stacks: Mapping[str, Mapping[str, Any]], updates: int, timeout: float) -> None:
    """Train on two ranks; each update is made, has a digest, and nothing is said."""
    for rank in run_processes(train, str(root), stacks, updates, world_size=2, timeout=timeout):
        assert rank == {name: (updates, []) for name in stacks}
    for name in stacks:
        assert list(read_digests(root / name)) == list(range(1, updates + 1))


@pytest.mark.slow  # of most stacks test_replay.py shows it too
@pytest.mark.timeout(300 + 2 * UPDATES)
@pytest.mark.parametrize("stack", [*MESH, *OTHERS])
def test_no_stack_raises_an_alarm(stack: str, tmp_path: Path) -> None:
    package = stack.partition(" ")[0]
    if package in ("accelerate", "deepspeed"):
        pytest.importorskip(package)
    check(tmp_path, {stack: {**MESH, **OTHERS}[stack]}, UPDATES, 120 + 2 * UPDATES)

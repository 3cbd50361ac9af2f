"""Keys of random numbers for components that are tested without a runner."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from danling.distributed import LocalDomain, Placement
from danling.runners.state import RunnerState
from danling.training import TrainingSession
from danling.training.keys import RandomKeys


def own_keys(session: TrainingSession | None = None) -> RandomKeys:
    """Return the keys of a run of one process with the seed 1, which has made no update."""
    given: Any = SimpleNamespace(
        seed=1,
        state=RunnerState(),
        placement=Placement.alike(LocalDomain()),
        device=torch.device("cpu"),
        _session=session or TrainingSession(),
    )
    return RandomKeys(given)

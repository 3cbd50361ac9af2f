"""Ten planted faults, written by an author who had seen neither the strategies of the search nor its properties."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy
import torch
from explore.planted_form import Planted

import danling.data.randomness
import danling.data.run_data
import danling.optim.registry
import danling.optim.state
import danling.runners.torch_runner
import danling.training.ema
import danling.training.keys
from danling.optim.joint import added_to
from danling.training.attribute_restore import DELETED
from danling.training.attributes import KeptAttributes
from danling.training.keys import RandomKeys
from danling.training.recompute import SkippedUpdates

Replaced = tuple[object, str, Any]


@contextmanager
def _replacing(*replaced: Replaced) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(patch.object(owner, name, value))
        yield


def one_number_for_all_streams() -> AbstractContextManager[None]:
    """Seed NumPy with the number that torch is seeded with."""

    def seed_host_streams(seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed & 0xFFFFFFFF)

    places = (danling.data.randomness, danling.training.keys)
    return _replacing(*((place, "seed_host_streams", seed_host_streams) for place in places))


def evaluation_moves_streams() -> AbstractContextManager[None]:
    """Leave the streams where an evaluation within `train_step` has moved them."""

    @contextmanager
    def evaluating(self: Any) -> Iterator[None]:
        self._look_for_generators()
        yield

    return _replacing((RandomKeys, "evaluating", evaluating))


def skipped_update_keeps_statistics() -> AbstractContextManager[None]:
    """Remember nothing where an update begins that may be skipped."""
    return _replacing((SkippedUpdates, "begin", lambda self, weight: None))


def averages_in_dtype_of_weights() -> AbstractContextManager[None]:
    """Average narrow weights in their own dtype."""
    return _replacing((danling.training.ema, "_wide_dtype", lambda dtype: dtype))


def order_of_training_everywhere() -> AbstractContextManager[None]:
    """Apply `shuffle` and `drop_last` without a split to evaluation and inference."""
    return _replacing((danling.data.run_data, "_without_order", dict))


def trial_changes_attributes() -> AbstractContextManager[None]:
    """Keep what the trial of an evaluation has changed on the runner and in metrics."""

    @contextmanager
    def preserved(self: Any) -> Iterator[None]:
        yield

    return _replacing((KeptAttributes, "preserved", preserved))


def plateau_takes_lowest() -> AbstractContextManager[None]:
    """Have a schedule that follows the score take the lowest value for the best one."""

    def build_scheduler(settings: Mapping[str, Any], optimizer: object, **options: Any) -> object:
        return danling.optim.registry.build_scheduler(settings, optimizer, **{**options, "mode": None})

    return _replacing((danling.runners.torch_runner, "build_scheduler", build_scheduler))


def moments_take_dtype_of_weights() -> AbstractContextManager[None]:
    """Leave the state of an optimizer in the dtype that torch casts it to at a resume."""
    return _replacing((danling.optim.state, "restore_dtypes", lambda loaded, stored, dtypes: None))


def own_entries_of_optimizer_are_dropped() -> AbstractContextManager[None]:
    """Save and restore only the state by parameter, not what an optimizer's own `state_dict` adds."""

    def nothing_added(plain: Mapping[str, Any]) -> dict[str, dict[Any, Any]]:
        return {key: {} for key in added_to(plain)}

    return _replacing((danling.optim.state, "added_to", nothing_added))


def deleted_attribute_comes_back() -> AbstractContextManager[None]:
    """Save nothing of an attribute that training has deleted."""
    entries = KeptAttributes._entries

    def without_deleted(self: KeptAttributes) -> dict[Any, Any]:
        return {key: entry for key, entry in entries(self).items() if entry.node is not DELETED}

    return _replacing((KeptAttributes, "_entries", without_deleted))


PLANTED: list[Planted] = [
    Planted(
        "one_number_for_all_streams",
        "49.1",
        "The first draws of torch and of NumPy for a sample are the same words, so two independent augmentations happen together.",
        one_number_for_all_streams,
    ),
    Planted(
        "evaluation_moves_streams",
        "49.2",
        "An evaluation before the forward in `train_step` changes the dropout of the update.",
        evaluation_moves_streams,
    ),
    Planted(
        "skipped_update_keeps_statistics",
        "49.3",
        "After a skipped update the running statistics of batch normalization are NaN for ever.",
        skipped_update_keeps_statistics,
    ),
    Planted(
        "averages_in_dtype_of_weights",
        "49.6",
        "Averages of bfloat16 weights hardly move.",
        averages_in_dtype_of_weights,
    ),
    Planted(
        "order_of_training_everywhere",
        "49.10",
        "`dataloader.shuffle` moves predictions to other places, and `dataloader.drop_last` drops samples of an evaluation.",
        order_of_training_everywhere,
    ),
    Planted(
        "trial_changes_attributes",
        "49.11",
        "What `evaluate_step` sets on the runner is changed before training begins, and at each resume.",
        trial_changes_attributes,
    ),
    Planted(
        "plateau_takes_lowest",
        "49.15",
        "`ReduceLROnPlateau` lowers the rate while a score whose best is the highest rises.",
        plateau_takes_lowest,
    ),
    Planted(
        "moments_take_dtype_of_weights",
        "50.24",
        "Float32 moments of bfloat16 weights are rounded to bfloat16 at a resume.",
        moments_take_dtype_of_weights,
    ),
    Planted(
        "own_entries_of_optimizer_are_dropped",
        "50.25",
        "What an optimizer adds in its own `state_dict` begins again at a resume.",
        own_entries_of_optimizer_are_dropped,
    ),
    Planted(
        "deleted_attribute_comes_back",
        "50.28",
        "An attribute that training has deleted is there again after a resume.",
        deleted_attribute_comes_back,
    ),
]

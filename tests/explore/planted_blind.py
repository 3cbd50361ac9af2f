"""Ten planted faults, written by an author who had seen neither the strategies of the search nor its properties."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from explore.planted_form import Call, Planted, Switch
from torch import Tensor

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


def one_number_for_all_streams() -> Switch:
    """Seed NumPy with the number that torch is seeded with."""

    def seed_host_streams(seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed & 0xFFFFFFFF)

    places = (danling.data.randomness, danling.training.keys)
    return Switch(*((place, "seed_host_streams", seed_host_streams) for place in places))


def evaluation_moves_streams() -> Switch:
    """Leave the streams where an evaluation within `train_step` has moved them."""

    @contextmanager
    def evaluating(self: Any) -> Iterator[None]:
        self._look_for_generators()
        yield

    return Switch((RandomKeys, "evaluating", evaluating))


def skipped_update_keeps_statistics() -> Switch:
    """Remember nothing where an update begins that may be skipped."""
    return Switch((SkippedUpdates, "begin", lambda self: None))


def averages_in_dtype_of_weights() -> Switch:
    """Average narrow weights in their own dtype."""
    return Switch((danling.training.ema, "_wide_dtype", lambda dtype: dtype))


def order_of_training_everywhere() -> Switch:
    """Apply `shuffle` and `drop_last` without a split to evaluation and inference."""
    return Switch((danling.data.run_data, "without_order", dict))


def trial_changes_attributes() -> Switch:
    """Keep what the trial of an evaluation has changed on the runner and in metrics."""

    @contextmanager
    def preserved(self: Any) -> Iterator[None]:
        yield

    return Switch((KeptAttributes, "preserved", preserved))


def plateau_takes_lowest() -> Switch:
    """Have a schedule that follows the score take the lowest value for the best one."""

    def build_scheduler(settings: Mapping[str, Any], optimizer: object, **options: Any) -> object:
        return danling.optim.registry.build_scheduler(
            settings, optimizer, **{**options, "mode": None}
        )

    return Switch((danling.runners.torch_runner, "build_scheduler", build_scheduler))


def moments_take_dtype_of_weights() -> Switch:
    """Leave the state of an optimizer in the dtype that torch casts it to at a resume."""
    return Switch((danling.optim.state, "restore_dtypes", lambda loaded, stored, dtypes: None))


def own_entries_of_optimizer_are_dropped() -> Switch:
    """Save and restore only the state by parameter, not what an optimizer's own `state_dict` adds."""

    def nothing_added(plain: Mapping[str, Any]) -> dict[str, dict[Any, Any]]:
        return {key: {} for key in added_to(plain)}

    return Switch((danling.optim.state, "added_to", nothing_added))


def deleted_attribute_comes_back() -> Switch:
    """Save nothing of an attribute that training has deleted."""
    entries = KeptAttributes._entries

    def without_deleted(self: KeptAttributes) -> dict[Any, Any]:
        return {key: entry for key, entry in entries(self).items() if entry.node is not DELETED}

    return Switch((KeptAttributes, "_entries", without_deleted))


# Which calls of the right functions the switches would make others, by the author of the search


def _is_in_a_step(call: Call) -> bool:
    return bool(call.arguments[0]._session.in_step)


def _is_remembered(call: Call) -> bool:
    return call.arguments[0]._put_back is not None


def _widens(call: Call) -> bool:
    return call.result is not call.arguments[0]


def _leaves_out(call: Call) -> bool:
    return len(call.result) < len(call.arguments[0])


def _wants_the_highest(call: Call) -> bool:
    return bool(call.options["mode"] == "max")


def _was_cast(call: Call) -> bool:
    _, stored, dtypes = call.arguments
    values = [
        (dtypes[index], value)
        for index in dtypes.keys() & stored.keys()
        for value in stored[index].values()
    ]
    return any(isinstance(value, Tensor) and value.dtype != dtype for dtype, value in values)


def _finds_entries(call: Call) -> bool:
    return any(call.result.values())


def _has_deleted(call: Call) -> bool:
    return any(entry.node is DELETED for entry in call.result.values())


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
        _is_in_a_step,
    ),
    Planted(
        "skipped_update_keeps_statistics",
        "49.3",
        "After a skipped update the running statistics of batch normalization are NaN for ever.",
        skipped_update_keeps_statistics,
        _is_remembered,
    ),
    Planted(
        "averages_in_dtype_of_weights",
        "49.6",
        "Averages of bfloat16 weights hardly move.",
        averages_in_dtype_of_weights,
        _widens,
    ),
    Planted(
        "order_of_training_everywhere",
        "49.10",
        "`dataloader.shuffle` moves predictions to other places, and `dataloader.drop_last` drops samples of an evaluation.",
        order_of_training_everywhere,
        _leaves_out,
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
        _wants_the_highest,
    ),
    Planted(
        "moments_take_dtype_of_weights",
        "50.24",
        "Float32 moments of bfloat16 weights are rounded to bfloat16 at a resume.",
        moments_take_dtype_of_weights,
        _was_cast,
    ),
    Planted(
        "own_entries_of_optimizer_are_dropped",
        "50.25",
        "What an optimizer adds in its own `state_dict` begins again at a resume.",
        own_entries_of_optimizer_are_dropped,
        _finds_entries,
    ),
    Planted(
        "deleted_attribute_comes_back",
        "50.28",
        "An attribute that training has deleted is there again after a resume.",
        deleted_attribute_comes_back,
        _has_deleted,
    ),
]

"""Twenty planted faults: what the library once computed, saved or accepted wrongly without a word. Each is brought back by a switch.

`planted_blind` has ten more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import numpy
from explore.planted_form import Call, Planted, Switch, refuses

import danling.checkpoints.exchange
import danling.data.loader
import danling.data.source
import danling.runners.torch_runner
import danling.training.ema
from danling.mesh.units import Unit, UnitOrder
from danling.runners.base_runner import BaseRunner
from danling.runners.torch_runner import TorchRunner
from danling.training.attribute_snapshot import AttributeSnapshot
from danling.training.attributes import KeptAttributes
from danling.training.canonical_sum import CanonicalSum
from danling.training.ema import EMA
from danling.training.keys import RandomKeys
from danling.training.recompute import SkippedUpdates
from danling.training.save_checks import FiniteWeights
from danling.training.schedule import Schedule
from danling.training.window import Window, WindowGradients


def _nothing(*arguments: Any, **options: Any) -> None:
    """Do nothing, in the place of a method that does."""


# Updates


def weightless_micro_batch_is_nan() -> Switch:
    """Let the gradient of 0/0 into the sum of a window."""

    def cut(self: Window, output: object) -> None:
        self._is_cut = True

    return Switch((Window, "cut", cut))


def weights_with_nan_are_saved() -> Switch:
    """Publish weights without a look at them."""
    return Switch((FiniteWeights, "check", _nothing))


def micro_batches_draw_alike() -> Switch:
    """Seed each micro-batch by its update alone."""
    begin = RandomKeys.begin_micro_batch

    def begin_micro_batch(
        self: RandomKeys, data: object, place: tuple[int, ...], ordinal: int
    ) -> None:
        begin(self, data, (1,), ordinal)

    return Switch((RandomKeys, "begin_micro_batch", begin_micro_batch))


def skipped_update_keeps_attributes() -> Switch:
    """Put back buffers and figures of a skipped update, but not the attributes of the user's."""
    begin = SkippedUpdates.begin

    def begin_update(self: SkippedUpdates) -> None:
        begin(self)
        if self._put_back is not None:
            self._put_back = self._put_back[0], _nothing

    return Switch((SkippedUpdates, "begin", begin_update))


def zero_grad_in_train_step_is_unseen() -> Switch:
    """Let `train_step` drop the gradients of earlier micro-batches."""
    return Switch((WindowGradients, "check", _nothing))


def schedule_advances_twice() -> Switch:
    """Let `train_step` advance the schedule too."""
    unknown = property(lambda self: None, _nothing)
    return Switch((Schedule, "_at", unknown))


# Averages


def buffers_are_averaged() -> Switch:
    """Average floating buffers, infinite elements as well."""
    begin = EMA.__init__

    def begin_averages(self: EMA, model: Any, **options: Any) -> None:
        begin(self, model, **{**options, "buffers": "average"})
        self.buffers = "copy"

    return Switch((EMA, "__init__", begin_averages))


def averages_of_complex_weights_are_copies() -> Switch:
    """Average floating weights only."""
    return Switch((danling.training.ema, "_can_average", lambda tensor: tensor.is_floating_point()))


def pretrained_takes_trained_weights() -> Switch:
    """Load the trained weights of a checkpoint whose averages were evaluated."""

    def read_model(manager: Any, source: Any, *, averages: bool = True) -> Any:
        return danling.checkpoints.exchange.read_model(manager, source, averages=False)

    return Switch((danling.runners.torch_runner, "read_model", read_model))


# The run


def larger_budget_keeps_the_curve() -> Switch:
    """Leave the schedule at the end of its curve where the budget is raised."""
    return Switch((TorchRunner, "_follow_setting", BaseRunner._follow_setting))


def gradient_of_hsdp_comes_late() -> Switch:
    """Leave what a block has got in earlier micro-batches to the next update that uses it in its last one."""

    def reduce(self: Unit, *unused: object) -> None:
        self._reduce(*unused)

    return Switch((Unit, "reduce", reduce), (Unit, "has_partial_sum", False))


def blocks_are_mixed_up() -> Switch:
    """Compare nothing where ranks have run different blocks of FSDP."""

    def forget(self: UnitOrder) -> None:
        self._landed = None

    return Switch((UnitOrder, "_read_landed", forget))


def changed_attribute_is_not_named() -> Switch:
    """Say nothing where `gradient_sum: canonical` depends on the division of a batch."""
    return Switch((CanonicalSum, "_check_values", _nothing))


# State


def _left_out(*kinds: type[Any]) -> Switch:
    node = AttributeSnapshot._node

    def without(self: AttributeSnapshot, value: Any, path: str, name: str = "") -> object:
        return self._leave(path) if isinstance(value, kinds) else node(self, value, path, name)

    return Switch((AttributeSnapshot, "_node", without))


def enumerations_are_not_saved() -> Switch:
    """Neither save nor name members of an enumeration."""
    return _left_out(Enum)


def numbers_of_numpy_are_not_saved() -> Switch:
    """Neither save nor name NumPy's numbers."""
    return _left_out(numpy.generic)


def bytes_are_not_saved() -> Switch:
    """Neither save nor name bytes."""
    return _left_out(bytes)


def values_without_encoding_are_not_named() -> Switch:
    """Say nothing of attributes that no checkpoint holds."""
    return Switch((KeptAttributes, "_list_without_encoding", _nothing))


def generators_of_modules_are_not_seeded() -> Switch:
    """Leave generators that modules hold as they are."""

    def find_none(self: RandomKeys) -> None:
        self._generators = []

    return Switch((RandomKeys, "_look_for_generators", find_none))


def state_of_a_dataset_is_not_saved() -> Switch:
    """Leave the `state_dict` of a dataset out of the checkpoint."""

    def find_none(dataset: object, path: str = "dataset") -> Mapping[str, Any]:
        return {}

    return Switch((danling.data.loader, "stateful_parts", find_none))


def changed_dataset_is_not_named() -> Switch:
    """Say nothing where a dataset without a state has changed."""
    return Switch((danling.data.source, "changed_attributes", lambda before, now: set()))


# Which calls of the right functions the switches would make others


def _is_cut(call: Call) -> bool:
    return bool(call.arguments[0]._is_cut)


def _is_remembered(call: Call) -> bool:
    return call.arguments[0]._put_back is not None


def _is_of_complex(call: Call) -> bool:
    (tensor,) = call.arguments
    return bool(tensor.is_complex())


def _encodes(*kinds: type[Any]) -> Callable[[Call], bool]:
    return lambda call: isinstance(call.arguments[1], kinds)


def _has_listed(call: Call) -> bool:
    _, now, _ = call.arguments
    return any(entry.listed for entry in now.values())


def _has_generators(call: Call) -> bool:
    return bool(call.arguments[0]._generators)


def _finds_some(call: Call) -> bool:
    return bool(call.result)


PLANTED: list[Planted] = [
    Planted(
        "weightless_micro_batch_is_nan",
        "49.4",
        "A micro-batch whose targets all weigh nothing ends a run whose whole batch is fine.",
        weightless_micro_batch_is_nan,
        _is_cut,
    ),
    Planted(
        "weights_with_nan_are_saved",
        "49.5",
        "Weights that the optimizer's step has made NaN replace the last good checkpoint.",
        weights_with_nan_are_saved,
        refuses,
    ),
    Planted(
        "micro_batches_draw_alike",
        "49.2",
        "The micro-batches of an update have the same dropout masks.",
        micro_batches_draw_alike,
    ),
    Planted(
        "skipped_update_keeps_attributes",
        "49.3",
        "What `train_step` counts on the runner counts skipped updates too.",
        skipped_update_keeps_attributes,
        _is_remembered,
    ),
    Planted(
        "zero_grad_in_train_step_is_unseen",
        "49.16",
        "`optimizer.zero_grad()` in `train_step` loses the earlier micro-batches of each update.",
        zero_grad_in_train_step_is_unseen,
        refuses,
    ),
    Planted(
        "schedule_advances_twice",
        "49.16",
        "With `scheduler.step()` in `train_step` the schedule runs at double speed.",
        schedule_advances_twice,
        at=(Schedule, "_advanced_by"),
    ),
    Planted(
        "buffers_are_averaged",
        "49.7",
        "Averaged vectors of spectral norm have another length, and an averaged mask with -inf makes each evaluation NaN.",
        buffers_are_averaged,
    ),
    Planted(
        "averages_of_complex_weights_are_copies",
        "49.8",
        "The average of a complex weight is the weight.",
        averages_of_complex_weights_are_copies,
        _is_of_complex,
    ),
    Planted(
        "pretrained_takes_trained_weights",
        "49.9",
        "A run that begins with a checkpoint with averages gets weights that nobody has evaluated.",
        pretrained_takes_trained_weights,
    ),
    Planted(
        "larger_budget_keeps_the_curve",
        "49.13",
        "A run that is made longer in the same process continues with a rate of zero.",
        larger_budget_keeps_the_curve,
    ),
    Planted(
        "gradient_of_hsdp_comes_late",
        "50.18",
        "The gradient of a block that the last micro-batch does not use is missing in its update and added to a later one.",
        gradient_of_hsdp_comes_late,
    ),
    Planted(
        "blocks_are_mixed_up",
        "50.19",
        "Ranks of FSDP that use different blocks of one shape compute with the weights of each other's blocks.",
        blocks_are_mixed_up,
        refuses,
    ),
    Planted(
        "changed_attribute_is_not_named",
        "50.23",
        "With `gradient_sum: canonical` the result depends on the number of processes, and nothing says so.",
        changed_attribute_is_not_named,
    ),
    Planted(
        "enumerations_are_not_saved",
        "50.26",
        "A member of an enumeration on the runner is at a resume what the program sets.",
        enumerations_are_not_saved,
        _encodes(Enum),
    ),
    Planted(
        "numbers_of_numpy_are_not_saved",
        "50.26",
        "A number of NumPy on the runner is at a resume what the program sets.",
        numbers_of_numpy_are_not_saved,
        _encodes(numpy.generic),
    ),
    Planted(
        "bytes_are_not_saved",
        "50.26",
        "Bytes on the runner are at a resume what the program sets.",
        bytes_are_not_saved,
        _encodes(bytes),
    ),
    Planted(
        "values_without_encoding_are_not_named",
        "50.26",
        "Nothing says that a checkpoint does not hold an attribute, such as a dictionary by objects.",
        values_without_encoding_are_not_named,
        _has_listed,
    ),
    Planted(
        "generators_of_modules_are_not_seeded",
        "50.29",
        "A generator that a module holds begins again at a resume.",
        generators_of_modules_are_not_seeded,
        _has_generators,
    ),
    Planted(
        "state_of_a_dataset_is_not_saved",
        "50.30",
        "What training writes into a dataset with `state_dict` is lost at a resume.",
        state_of_a_dataset_is_not_saved,
        _finds_some,
    ),
    Planted(
        "changed_dataset_is_not_named",
        "50.30",
        "What training writes into a dataset without `state_dict` is lost at a resume, and nothing says so.",
        changed_dataset_is_not_named,
        _finds_some,
    ),
]

"""Names what components change in training and no checkpoint contains: their own numbers, and optimizers within an optimizer."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from danling.optim import JointOptimizer
from danling.optim.state import inner_optimizers
from danling.utils.encoding import is_of_numpy, without_numpy
from danling.utils.messages import listed
from danling.utils.observers import Observer
from danling.utils.tensors import has_strided_values, is_plain_tensor, local_part
from danling.utils.trees import tensors

from .pass_settings import PassSettings, modules_of
from .run_state import StatePart

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner

    from .outcome import UpdateOutcome

logger = logging.getLogger("danling")

_NUMBERS = (type(None), bool, int, float, complex, str)
_STATE_METHODS = ("get_extra_state", "state_dict", "_save_to_state_dict")
_CONTAINERS = (list, deque, dict, OrderedDict, defaultdict, Counter)
_OF_OPTIMIZER = ("defaults", "param_groups", "state")
_LARGEST = 10_000
"""Most items of a container, or bytes of an array, that are compared."""
_SAMPLES = 16
"""Most values of a tensor in an optimizer that are compared."""
_LOOKS = 8
"""Updates of a training after each of which the numbers that it has made are looked at."""


class UnsavedChanges(Observer):
    """Warns once, at a save, of numbers and text that modules or the optimizer have changed, and of state of an optimizer within it.

    So are lists, dictionaries, arrays of numbers and plain tensors that the program begins with, if they change after the first update:
    else they may be filled once. A list of so many whole numbers may have sizes, and is left out; so is an array or a tensor that gets
    another shape, which is something of the batch, and a tensor that has had a graph, which each forward computes.

    Of an optimizer, tensors of any size count too, and lists, tuples and dictionaries of them, such as moments that it keeps by itself.
    Those as large as parameters also count if training makes them: an optimizer may begin them with its first step.

    Left out are names that begin with an underscore, flags of an optimizer, what `on_pass_start` has set, which is saved, and components
    whose class overrides `get_extra_state` or `state_dict`.

    A number that training has made, where there was none or `None`, may be a size of the batch or a constant, which a resumed run makes
    again. It is named if it changes after the first update; a whole number only if it has never fallen, as sizes do. One that stays is
    compared with that of the resumed run after its first update.
    """

    def __init__(self, runner: TorchRunner, pass_settings: PassSettings) -> None:
        self._runner = runner
        self._pass_settings = pass_settings
        self._before: dict[str, object] = {}
        self._made: dict[str, object] = {}
        """What the training has made, as it was when it was seen first."""
        self._last: dict[str, Any] = {}
        self._fallen: set[str] = set()
        self._computed: set[str] = set()
        self._stored: Mapping[str, str] = {}
        """What the training of the checkpoint has made, and has not changed."""
        self._named: set[str] = set()

    def part(self) -> StatePart:
        """Return the entry of a checkpoint."""
        return StatePart("made_in_training", self._constants, self._load, default=dict)

    def _constants(self) -> dict[str, str]:
        kept = {
            name: repr(value)
            for name, value in self._made.items()
            if isinstance(value, (float, complex, str))
            and not isinstance(value, _Contents)
            and _is_same(value, self._last[name])
        }
        return {**self._stored, **kept}

    def _load(self, stored: Mapping[str, str], _: Collection[str]) -> None:
        self._stored = stored

    def training_started(self) -> None:
        self._before = self._values()
        self._made, self._last, self._fallen = {}, {}, set()
        self._runner.observers.append(_FirstUpdates(self._runner, self._look))

    def _look(self, looks: int = _LOOKS) -> dict[str, object]:
        """Look at the numbers that training has made, and return all."""
        values = self._values()
        for name, value in values.items():
            begins = self._before.get(name) is not None
            if isinstance(value, _Contents) and (begins or not value.are_moments):
                # One that training makes may be a cache.
                self._last.setdefault(name, value)
            elif not begins and value is not None:
                self._made.setdefault(name, value)
                last = self._last.get(name)
                if isinstance(value, int) and isinstance(last, int) and value < last:
                    self._fallen.add(name)
                self._last[name] = value
        if looks == 1:
            stored, self._stored = self._stored, {}
            self._warn_of_constants(stored)
        return values

    def _warn_of_constants(self, stored: Mapping[str, str]) -> None:
        names = self._new(
            [
                name
                for name, value in self._made.items()
                if stored.get(name, repr(value)) != repr(value)
                and name not in self._pass_settings.names
            ]
        )
        if names and self._runner.is_main_process:
            logger.warning(
                "The first update has made %s, which had another value in the run of the checkpoint, and no checkpoint contains it. If it "
                "does not matter, ignore this; otherwise make it a buffer, or define get_extra_state and set_extra_state (in an optimizer: "
                "state_dict and load_state_dict).",
                listed([f"{name}={self._made[name]!r} (before {stored[name]})" for name in names]),
            )

    def save_started(self) -> None:
        runner = self._runner
        values = self._look()
        is_looking = any(isinstance(each, _FirstUpdates) for each in runner.observers)
        changed = [
            name
            for name, value in self._before.items()
            if value is not None
            and name in values
            and not _is_same(value, values[name])
            and not _may_come_again(value, self._last.get(name), values[name])
        ]
        changed += [
            name
            for name, value in self._made.items()
            if not _is_same(value, self._last[name])
            and not (isinstance(value, int) and (is_looking or name in self._fallen))
        ]
        names = self._new([name for name in changed if name not in self._pass_settings.names])
        if names and runner.is_main_process:
            logger.warning(
                "Training has changed %s, which no checkpoint contains: a resumed run begins with what the program sets. If the program "
                "sets it again from the step or the epoch, or it does not matter, ignore this; otherwise make it a buffer, or define "
                "get_extra_state and set_extra_state (in an optimizer: state_dict and load_state_dict).",
                listed(names),
            )
        if runner.stack == "deepspeed":
            return  # its checkpoints have all that its engine holds
        names = self._new(
            [name for optimizer in _members(runner.optimizer) for name in _lost_states(optimizer)]
        )
        if names and runner.is_main_process:
            logger.warning(
                "The state of %s is not in the state_dict of the optimizer that it belongs to, so no checkpoint contains it: a resumed run "
                "begins without, such as without momentum. Return its state_dict() from state_dict, and load it in load_state_dict.",
                listed(names),
            )

    def _new(self, names: list[str]) -> list[str]:
        found = [name for name in names if name not in self._named]
        self._named.update(found)
        return found

    def _values(self) -> dict[str, object]:
        """Return the numbers and the text of all components by name: one call at each save."""
        components: list[tuple[str, Any, type[Any]]] = [
            (path, module, nn.Module) for path, module in modules_of(self._runner)
        ]
        criterion = self._runner.criterion
        if hasattr(criterion, "__dict__") and not isinstance(
            criterion, (nn.Module, type, FunctionType, partial)
        ):
            components.append(("criterion", criterion, object))
        components += [
            ("optimizer", optimizer, Optimizer) for optimizer in _members(self._runner.optimizer)
        ]
        values: dict[str, object] = {}
        for path, component, base in components:
            kind = type(component)
            if [
                name
                for name in _STATE_METHODS
                if getattr(kind, name, None) is not getattr(base, name, None)
            ]:
                continue
            # A flag of an optimizer says that it has begun, such as `initialized` of those of bitsandbytes, or in which mode it is.
            left_out = bool if base is Optimizer else ()
            left_out_names = _OF_OPTIMIZER if base is Optimizer else ("training",)
            for name, value in vars(component).items():
                if name.startswith("_") or name in left_out_names:
                    continue
                at = f"{path}.{name}"
                if is_of_numpy(value) and not value.shape:
                    value = value.item()
                if type(value) is Tensor and value.requires_grad:
                    self._computed.add(at)
                # Those of an engine hold the weights, and are saved by it.
                keeps_tensors = base is Optimizer and self._runner.stack != "deepspeed"
                is_container = type(value) in _CONTAINERS or (
                    keeps_tensors and type(value) is tuple
                )
                if is_container or type(value) is Tensor or is_of_numpy(value):
                    held = _own_tensors(component, value) if keeps_tensors else []
                    value = _sampled(held, component) if held else _contents(value)
                    if at in self._computed or value is None:
                        continue
                elif type(value) not in _NUMBERS or isinstance(value, left_out):
                    continue
                values[at] = value
        return values


class _Contents(str):
    """The numbers in a list, a dictionary, an array or a tensor, as a text."""

    sizes: int | None = None
    """How many whole numbers a list has, if it has nothing else."""
    shape: tuple[int, ...] | None = None
    """That of an array or a tensor."""
    are_moments = False
    """Whether these are tensors of an optimizer, one of them as large as a parameter, or as all together."""


def _contents(value: Any) -> _Contents | None:
    """Return what a container has; `None` where that is not numbers and text alone, or is large."""
    if is_of_numpy(value):
        small = value.nbytes <= _LARGEST and value.dtype.kind in "biufc"
        return _in_memory(value.shape, value.tobytes()) if small else None
    if isinstance(value, Tensor):
        if not has_strided_values(value) or value.nbytes > _LARGEST:
            return None
        return _in_memory(value.shape, _bytes(value))
    items = [*value, *value.values()] if isinstance(value, dict) else value
    if len(items) > _LARGEST or not all(
        type(item) in _NUMBERS or _is_scalar(item) for item in items
    ):
        return None
    text = _Contents(without_numpy(list(value.items() if isinstance(value, dict) else value)))
    if isinstance(value, list) and all(type(item) is int for item in value):
        text.sizes = len(value)
    return text


def _own_tensors(optimizer: Any, value: object) -> list[Tensor]:
    """Return the tensors in an attribute of an optimizer that are neither of its state nor weights."""
    found = [tensor for _, tensor in tensors(list(value) if isinstance(value, deque) else value)]
    if not found:
        return []
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    known = {id(tensor) for _, tensor in tensors([*optimizer.state.values(), *parameters])}
    stored = [local_part(each.detach()) for each in parameters]
    weights = {each.data_ptr() for each in stored if has_strided_values(each)}
    own = []
    for each in found:
        local = local_part(each.detach())
        is_plain = is_plain_tensor(local) and has_strided_values(local)
        if is_plain and id(each) not in known and local.data_ptr() not in weights:
            own.append(each)
    return own


def _sampled(held: list[Tensor], optimizer: Any) -> _Contents:
    """Return some values of each tensor: all of them may take as much memory as the weights."""
    texts = []
    for tensor in held:
        values = local_part(tensor.detach()).reshape(-1)
        texts.append(_bytes(values[:: max(values.numel() // _SAMPLES, 1)][:_SAMPLES]).hex())
    found = _Contents(" ".join(texts))
    sizes = [
        local_part(each).numel() for group in optimizer.param_groups for each in group["params"]
    ]
    known = {*sizes, sum(sizes)}
    found.are_moments = any(local_part(each).numel() in known - {1} for each in held)
    return found


def _bytes(tensor: Tensor) -> bytes:
    """Return the values of a tensor, which may be a view that torch conjugates, negates, repeats or skips through as it is read."""
    values = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
    return bytes(values.view(torch.uint8).tolist())


def _in_memory(shape: tuple[int, ...], data: bytes) -> _Contents:
    text = _Contents(data.hex())
    text.shape = tuple(shape)
    return text


def _is_scalar(value: Any) -> bool:
    return is_of_numpy(value) and not value.shape


def _may_come_again(before: object, first: object, now: object) -> bool:
    """Whether a container has what the first update has given it, so many sizes, or something of a batch."""
    if not isinstance(now, _Contents) or not isinstance(first, _Contents):
        return isinstance(now, _Contents)
    has_sizes = first.sizes is not None and first.sizes == now.sizes
    return first == now or has_sizes or getattr(before, "shape", None) != now.shape


class _FirstUpdates(Observer):
    """Calls a function after each of the first updates of a training, with their number, and leaves."""

    def __init__(self, runner: TorchRunner, look: Callable[[int], object]) -> None:
        self._runner = runner
        self._look = look
        self._updates = 0

    def update_ended(self, outcome: UpdateOutcome) -> None:
        self._updates += 1
        self._look(self._updates)
        if self._updates == _LOOKS:
            self._runner.observers.remove(self)

    def training_ended(self) -> None:
        self._runner.observers.remove(self)


def _is_same(before: object, value: object) -> bool:
    # NaN is not equal to itself.
    return type(before) is type(value) and (
        before == value or (before != before and value != value)
    )


def _members(optimizer: Any) -> list[Any]:
    """Return the optimizers of the program: those of a `JointOptimizer`, or the one that there is."""
    if type(optimizer).__module__.startswith("accelerate."):
        optimizer = optimizer.optimizer
    return list(optimizer.optimizers) if isinstance(optimizer, JointOptimizer) else [optimizer]


def _lost_states(optimizer: Any) -> Iterator[str]:
    """Yield the optimizers within one whose tensors are not in its `state_dict`, as they are or as copies."""
    saved: list[Tensor] | None = None
    for name, inner in inner_optimizers(optimizer):
        tensor = _largest(inner.state)
        if tensor is None:
            continue
        if saved is None:
            saved = [each for _, each in tensors(optimizer.state_dict())]
        if not any(tensor is each or _equal(tensor, each) for each in saved):
            yield f"optimizer.{name} ({type(inner).__name__})"


def _largest(state: Mapping[Any, Any]) -> Tensor | None:
    """Return the largest tensor of a state: a number of steps may be equal to that of another optimizer."""
    found = [tensor for of_parameter in state.values() for _, tensor in tensors(of_parameter)]
    return max(found, key=Tensor.numel, default=None)


def _equal(tensor: Tensor, other: Tensor) -> bool:
    tensor, other = local_part(tensor), local_part(other)
    alike = (tensor.shape, tensor.dtype, tensor.device) == (other.shape, other.dtype, other.device)
    return alike and torch.equal(tensor, other)

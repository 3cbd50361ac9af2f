"""What a digest of a run is made of: its weights, the state of its optimizer, averages and buffers, each under a name and in a column."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from danling.optim.tensor_subclasses import to_parts


@dataclass(frozen=True)
class Entry:
    """One tensor of a run.

    Attributes:
        column: What it is summed up under: `weights.0` and `optimizer.0` of the first parameter group, `weights.rest`, `ema`, `buffers`.
        name: Its name, the same on all ranks that hold copies of it.
        tensor: The tensor, or this rank's part of it.
        is_shared: Whether ranks may hold copies of it; what has no name of its own is compared with nothing.
    """

    column: str
    name: str
    tensor: Tensor
    is_shared: bool = True


def entries(
    *,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    optimizer: Any,
    averages: Mapping[str, Tensor],
    buffers: Iterable[tuple[str, Tensor]],
) -> Iterator[Entry]:
    """Yield the tensors of a run as this rank holds them, in an order of their own on each rank.

    Args:
        named_parameters: Parameters by name.
        optimizer: The optimizer, with `param_groups` and `state`; `None` without one.
        averages: Averaged weights by name.
        buffers: Buffers by name.
    """
    named = list(named_parameters)
    names: dict[int, str] = {}
    for name, parameter in named:
        names.setdefault(id(parameter), name)
    grouped: set[int] = set()
    state = getattr(optimizer, "state", {})
    members = getattr(optimizer, "optimizers", ())
    for index, group in enumerate(getattr(optimizer, "param_groups", ())):
        for number, parameter in enumerate(group["params"]):
            shared = id(parameter) in names
            grouped.add(id(parameter))
            name = names.get(id(parameter), f"group.{index}.{number}")
            yield Entry(f"weights.{index}", name, parameter, shared)
            found = next((m.state[parameter] for m in members if parameter in m.state), None)
            for key, value in sorted((found or state.get(parameter, {})).items(), key=lambda item: str(item[0])):
                for part, tensor in tensors_of(value, f"{name}/{key}"):
                    yield Entry(f"optimizer.{index}", part, tensor, shared)
    for name, parameter in named:
        if id(parameter) not in grouped:
            grouped.add(id(parameter))
            yield Entry("weights.rest", name, parameter)
    for name, tensor in averages.items():
        yield Entry("ema", name, tensor)
    for name, tensor in buffers:
        yield Entry("buffers", name, tensor)


def tensors_of(value: object, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that an entry of an optimizer's state is or is made of, under names that begin with `name`."""
    value = to_parts(value)
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from tensors_of(part, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for number, part in enumerate(value):
            yield from tensors_of(part, f"{name}.{number}")

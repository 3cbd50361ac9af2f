"""The state that one replica group sends to another: shards as plain tensors, laid out again where they arrive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from danling.checkpoints.snapshot import convert
from danling.utils.tensors import is_sharded, local_part, with_local_part


def packed(payload: Mapping[str, Any], buffers: Iterable[Tensor]) -> dict[str, Any]:
    """Return a state with the shards of this rank as plain tensors, without communication.

    Args:
        payload: The state.
        buffers: Buffers of the model. They are copied, since the state is read while this group makes its forward, which changes
            buffers and nothing else.
    """
    changing = {buffer.data_ptr() for buffer in buffers}

    def plain(tensor: Tensor) -> Tensor:
        local = local_part(tensor)
        return local.clone() if local.data_ptr() in changing else local

    converted: dict[str, Any] = convert(dict(payload), plain)
    return converted


def laid_out_like(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return plain tensors as tensors of the layout that this rank has under the same names."""
    return {name: with_local_part(own[name], tensor) if name in own else tensor for name, tensor in state.items()}


def sharded_optimizer_state(state: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """Return the state of an optimizer by parameter name, with moments divided as the parameters of this rank are.

    Args:
        state: `state` by parameter name and `param_groups`, as `packed` left it.
        parameters: Those of this rank by name.
    """
    entries = {
        name: {key: _shard_like(value, parameters.get(name)) for key, value in own.items()}
        for name, own in state["state"].items()
    }
    return {**state, "state": entries}


def _shard_like(value: Any, parameter: nn.Parameter | None) -> Any:
    if parameter is None or not isinstance(value, Tensor) or not is_sharded(parameter):
        return value
    return with_local_part(parameter.detach(), value) if value.shape == local_part(parameter).shape else value

"""What a model computes on its way, by forward hooks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

_STACKS = (
    "model.layers",
    "model.decoder.layers",
    "transformer.h",
    "gpt_neox.layers",
    "encoder.layer",
    "bert.encoder.layer",
    "layers",
    "h",
)
"""Where the layers of models of transformers are."""


@contextmanager
def capture_hidden_states(
    model: nn.Module, layers: Iterable[int | str]
) -> Iterator[dict[int | str, Tensor]]:
    """Collect what layers of a model return, by forward hooks, which are removed on exit, also after an error.

    With a model of transformers, layer `i` gives `hidden_states[i + 1]`, but that the last layer's is the state before the final norm.
    """
    captured: dict[int | str, Tensor] = {}

    def keep(key: int | str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            # Layers of transformers return the state first, and caches and attentions after it.
            captured[key] = output[0] if isinstance(output, (tuple, list)) else output

        return hook

    with ExitStack() as stack:
        for key in layers:
            stack.callback(_find_layer(model, key).register_forward_hook(keep(key)).remove)
        yield captured


def _find_layer(model: nn.Module, key: int | str) -> nn.Module:
    modules: dict[str, nn.Module] = dict(model.named_modules())
    if isinstance(key, str):
        if key not in modules:
            raise ValueError(
                f"Expected the name of a module of {type(model).__name__}. Received: {key!r}. See `dict(model.named_modules())`."
            )
        return modules[key]
    found = next(
        (modules[name] for name in _STACKS if isinstance(modules.get(name), nn.ModuleList)), None
    )
    if not isinstance(found, nn.ModuleList):
        raise ValueError(
            f"Expected a model with its layers under one of {', '.join(_STACKS)}. Received: {type(model).__name__}. Give the names of "
            "modules instead of numbers."
        )
    if not -len(found) <= key < len(found):
        raise ValueError(
            f"Expected a layer from {-len(found)} to {len(found) - 1}. Received: {key}."
        )
    layer: nn.Module = found[key]
    return layer

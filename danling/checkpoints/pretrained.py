"""Weights as `from_pretrained` of transformers and peft reads them: beside them stands what the model is made from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from danling.utils.tensors import canonical_name

from . import storage

DESCRIPTION = "model"
"""Directory below the metadata of a run in which a model is described."""

_CONFIG = "config.json"


def describe_model(model: object) -> dict[str, str]:
    """Return what a model of transformers is made from: JSON by the name of the file that `from_pretrained` reads.

    Empty for any other model, and for one with adapters, for which peft writes its own files.
    """
    if hasattr(model, "peft_config"):
        return {}
    described = {}
    for attribute, name in (("config", _CONFIG), ("generation_config", "generation_config.json")):
        part: Any = getattr(model, attribute, None)
        if callable(getattr(type(part), "to_json_string", None)) and callable(
            getattr(type(part), "save_pretrained", None)
        ):
            described[name] = str(part.to_json_string())
    if _CONFIG not in described:
        return {}
    content = json.loads(described[_CONFIG])
    # As transformers writes it; FSDP puts its own name before that of the class.
    content["architectures"] = [type(model).__name__.removeprefix("FSDP")]
    return {**described, _CONFIG: json_text(content)}


def json_text(content: Mapping[str, Any]) -> str:
    """Return JSON as transformers writes it."""
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def write_description(described: Mapping[str, str], directory: Path) -> None:
    """Write the files of `describe_model`."""
    if described:
        storage.make_directory(directory)
    for name, text in described.items():
        storage.write_text(directory / name, text)


def read_description(directory: Path, weights: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, str]:
    """Return the files that `from_pretrained` reads beside some weights, which say the precision that the weights have."""
    if not (directory / _CONFIG).is_file():
        raise ValueError(
            f"Expected a run of a model of transformers, which is described in {directory}. Received: no {_CONFIG} there. Leave --format "
            "out for the weights alone; of a model with adapters, or one that holds a model of transformers, call "
            "`runner.save_pretrained(directory)` or the model's own `save_pretrained`."
        )
    described = {path.name: path.read_text() for path in sorted(directory.glob("*.json"))}
    content = json.loads(described[_CONFIG])
    kept = next((tensor.dtype for tensor in weights.values() if tensor.is_floating_point()), None)
    content["dtype"] = str(dtype or kept or torch.float32).removeprefix("torch.")
    return {**described, _CONFIG: json_text(content)}


def save_pretrained(model: nn.Module, directory: str | Path, **options: Any) -> None:
    """Call the `save_pretrained` of a model with its weights under the names that it was made with."""
    weights = {canonical_name(name): tensor for name, tensor in model.state_dict().items()}
    check_pretrained(model).save_pretrained(str(directory), state_dict=weights, **options)


def check_pretrained(model: nn.Module) -> Any:
    """Return a model that has `save_pretrained`."""
    if not callable(getattr(type(model), "save_pretrained", None)):
        raise TypeError(
            f"Expected a model with `save_pretrained`, such as one of transformers or peft. Received: {type(model).__name__}. Inside "
            "`with runner.whole_weights():` call it on the part of the model that has it; for bare weights there is `danling export`."
        )
    return model

"""`optim.type: muon`: Muon for the matrices of a model and AdamW for its other parameters, of one section.

Which parameters are matrices is declared by `optim.matrices`, or follows from the structure of the model: see `matrices_of`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from danling.utils.tensors import canonical_name

from .joint import JointOptimizer

logger = logging.getLogger("danling")

_OF_REST = "adamw"
_PATTERN = "matrices"
_SHOWN = 5
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def matrices_of(
    model: nn.Module, names: Iterable[str], patterns: str | Sequence[str] | None = None
) -> set[str]:
    """Return the names of the parameters that Muon trains: matrices (two dimensions) that are no weights of an embedding.

    With patterns, those whose name one of them is found in (`re.search`). Without, those in the layers of an `nn.ModuleList`, and so
    neither an input projection nor a head next to it.

    Args:
        model: The model.
        names: Names of its parameters, and maybe of others, which are no matrices.
        patterns: `optim.matrices`.

    Raises:
        ValueError: If a pattern matches no matrix, or if there is no pattern and the structure leaves a matrix open: the model has none
            in a layer of an `nn.ModuleList`, or has one in an `nn.Sequential` or directly in a list, which may be a layer or a head.
    """
    modules = {canonical_name(name): module for name, module in model.named_modules()}
    # By identity: a head whose weight is tied to an embedding is no matrix either.
    embedded = {
        id(parameter)
        for module in modules.values()
        if isinstance(module, _EMBEDDINGS)
        for parameter in module.parameters(recurse=False)
    }
    parameters = {canonical_name(name): parameter for name, parameter in model.named_parameters()}
    found = [name for name in names if name in parameters]
    candidates = [
        name
        for name in found
        if parameters[name].ndim == 2 and id(parameters[name]) not in embedded
    ]
    if patterns is not None:
        return _matched(candidates, [patterns] if isinstance(patterns, str) else list(patterns))
    places = {name: _place(modules, name) for name in candidates}
    unclear = [name for name in candidates if places[name] == "unclear"]
    layers = {name for name in candidates if places[name] == "layer"}
    if unclear or not layers:
        received = (
            f"{', '.join((unclear or candidates)[:_SHOWN])}, which may be hidden layers or a head"
        )
        raise ValueError(
            "Expected optim.matrices for a model whose matrices are not all in the layers of an nn.ModuleList or next to it. Received: "
            f"optim.matrices=None, and {received if unclear or candidates else 'no matrix'}. Set optim.matrices to a regular expression "
            "for the names of the hidden matrices, such as '^blocks\\.'; AdamW trains the others."
        )
    return layers


def _matched(candidates: Sequence[str], patterns: Sequence[str]) -> set[str]:
    matched = set[str]()
    for pattern in patterns:
        of_pattern = {name for name in candidates if re.search(pattern, name)}
        if not of_pattern:
            raise ValueError(
                "Expected every pattern of optim.matrices to match a parameter with two dimensions that is no embedding. Received: "
                f"{pattern!r}; such parameters begin with {list(candidates)[:_SHOWN]}."
            )
        matched |= of_pattern
    return matched


def _place(modules: Mapping[str, nn.Module], name: str) -> str:
    """Return where a parameter is: in a `layer` of a list, `beside` all lists, or `unclear`. The outermost list decides."""
    path = name.split(".")[:-1]
    for depth in range(len(path)):
        container = modules.get(".".join(path[:depth]))
        is_composite = depth + 1 < len(path)
        if isinstance(container, nn.ModuleList):
            return "layer" if is_composite else "unclear"
        if isinstance(container, nn.Sequential):
            return "unclear"
    return "beside"


def build_muon(
    settings: Mapping[str, Any],
    named_parameters: Callable[[], Iterable[tuple[str, nn.Parameter]]],
    model: nn.Module,
    build: Callable[[Mapping[str, Any], list[tuple[str, nn.Parameter]]], Optimizer],
) -> Optimizer:
    """Return Muon for the matrices, and AdamW for the other parameters, of a section `optim` of the type `muon`.

    Args:
        settings: The section: options of `torch.optim.Muon`, `matrices`, and the section `adamw` with options of `torch.optim.AdamW`.
        named_parameters: Returns the names and parameters, in the order of the model.
        model: The model.
        build: Builds one optimizer of a section.
    """
    options = dict(settings)
    patterns = options.pop(_PATTERN, None)
    of_rest = dict(options.pop(_OF_REST, None) or {})
    named = list(named_parameters())
    matrices = matrices_of(model, [name for name, _ in named], patterns)
    rest = [(name, parameter) for name, parameter in named if name not in matrices]
    if options.get("nesterov") is False and any(
        p.dtype == torch.bfloat16 for name, p in named if name in matrices
    ):
        raise ValueError(
            "Expected optim.nesterov=true for weights in bfloat16: torch below 2.15 scales their momentum in place. Received: "
            "optim.nesterov=False. Leave it out, or keep the weights in float32 (precision=bf16)."
        )
    muon = build(
        {**options, "type": "muon"},
        [(name, parameter) for name, parameter in named if name in matrices],
    )
    if not any(parameter.requires_grad for _, parameter in rest):
        return muon
    if "lr" not in of_rest:
        if options.get("adjust_lr_fn") != "match_rms_adamw":
            raise ValueError(
                "Expected optim.adamw.lr next to optim.type='muon': the two optimizers need different rates. Received: "
                "optim.adamw.lr=None. Set it, such as to 3e-4, or set optim.adjust_lr_fn='match_rms_adamw', which makes optim.lr fit both."
            )
        # The rate of torch.optim.Muon where none is set.
        of_rest["lr"] = options.get("lr", 1e-3)
    adamw = build({**of_rest, "type": "adamw"}, rest)
    logger.info("Muon trains %s; AdamW trains %s.", _described(named, matrices), _described(rest))
    return JointOptimizer(muon, adamw)


def _described(
    named: Iterable[tuple[str, nn.Parameter]], names: Iterable[str] | None = None
) -> str:
    chosen = [
        parameter
        for name, parameter in named
        if parameter.requires_grad and (names is None or name in names)
    ]
    return f"{len(chosen)} tensors ({sum(parameter.numel() for parameter in chosen):,} parameters)"

"""Parameter groups by regular expression."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

_OWN = ("pattern", "options", "lr_multiplier", "weight_decay_multiplier", "beta1", "beta2")


def build_param_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    lr: float | None,
    weight_decay: float | None,
    groups: Sequence[Mapping[str, object]],
    betas: Sequence[float] | None = None,
    whole: Mapping[str, bool] | None = None,
) -> list[dict[str, Any]]:
    """Return one optimizer group for every entry, and one for what no entry matches.

    A parameter belongs to the first entry whose `pattern` is found in its name (`re.search`). Parameters that do not require a
    gradient are left out, but a pattern that matches one of them has matched: hand in all parameters.

    Args:
        named_parameters: Names and parameters in model order.
        lr: Base rate, which `lr_multiplier` multiplies.
        weight_decay: Base decay, which `weight_decay_multiplier` multiplies.
        groups: Entries with `pattern` and any of `options`, `lr_multiplier`, `weight_decay_multiplier`, `beta1`, `beta2`. A
            multiplier multiplies the entry's own option where `options` has it.
        betas: Base betas, of which `beta1` and `beta2` replace one.
        whole: Where `named_parameters` are a part of a model: names of all its parameters, and whether they require a gradient.
            Every part gets the groups of the whole then, though some may be empty.

    Raises:
        ValueError: If an entry has an unknown key, no pattern, a pattern that matches nothing, or multiplies what is not set.
    """
    entries = [_checked(entry) for entry in groups]
    options: list[dict[str, Any]] = [{}, *(_options(entry, lr, weight_decay, betas) for entry in entries)]
    members: list[list[nn.Parameter]] = [[] for _ in options]
    mine = list(named_parameters)
    required = dict(whole) if whole is not None else {name: parameter.requires_grad for name, parameter in mine}
    place = {name: _place_of(name, entries) for name in required}
    _check_all_matched([e["pattern"] for i, e in enumerate(entries, 1) if i not in place.values()], list(required))
    for name, parameter in mine:
        if parameter.requires_grad:
            members[place[name]].append(parameter)
    kept = {place[name] for name, trained in required.items() if trained}
    return [{"params": params, **options[i]} for i, params in enumerate(members) if i in kept]


def _place_of(name: str, entries: Sequence[Mapping[str, Any]]) -> int:
    """Return the group of a parameter: 0 for what no entry matches."""
    return next((i for i, entry in enumerate(entries, 1) if re.search(entry["pattern"], name)), 0)


def _check_all_matched(unmatched: Sequence[str], names: Sequence[str]) -> None:
    if unmatched:
        raise ValueError(
            f"Expected the pattern of an optim.param_groups entry to match a parameter that no earlier entry takes. Received: "
            f"pattern={unmatched[0]!r}; the parameters begin with {list(names[:5])}."
        )


def _checked(entry: Mapping[str, Any]) -> dict[str, Any]:
    unknown = [name for name in entry if name not in _OWN]
    if unknown or not isinstance(entry.get("pattern"), str):
        raise ValueError(
            f"Expected every optim.param_groups entry to have a `pattern` and keys out of {list(_OWN)}. Received: {dict(entry)}."
        )
    try:
        re.compile(entry["pattern"])
    except re.error as error:
        raise ValueError(f"Expected a regular expression. Received: pattern={entry['pattern']!r} ({error}).") from error
    return dict(entry)


def _options(
    entry: Mapping[str, Any], lr: float | None, weight_decay: float | None, betas: Sequence[float] | None
) -> dict[str, Any]:
    options = dict(entry.get("options") or {})
    for name, setting in (("lr", lr), ("weight_decay", weight_decay)):
        multiplier = entry.get(f"{name}_multiplier")
        if multiplier is None:
            continue
        base = options.get(name, setting)
        if base is None:
            raise ValueError(
                f"Expected optim.{name} to be set where {name}_multiplier is used. Received: optim.{name}=None."
            )
        options[name] = base * multiplier
    beta1, beta2 = entry.get("beta1"), entry.get("beta2")
    if beta1 is not None or beta2 is not None:
        first, second = options.get("betas", betas) or (0.9, 0.999)
        options["betas"] = (first if beta1 is None else beta1, second if beta2 is None else beta2)
    return options

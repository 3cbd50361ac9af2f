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
    groups: Sequence[Mapping[str, Any]],
    betas: Sequence[float] | None = None,
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

    Raises:
        ValueError: If an entry has an unknown key, no pattern, a pattern that matches nothing, or multiplies what is not set.
    """
    entries = [_checked(entry) for entry in groups]
    matched: list[list[nn.Parameter]] = [[] for _ in entries]
    unmatched = set(range(len(entries)))
    rest: list[nn.Parameter] = []
    names: list[str] = []
    for name, parameter in named_parameters:
        names.append(name)
        index = next((i for i, entry in enumerate(entries) if re.search(entry["pattern"], name)), None)
        unmatched.discard(-1 if index is None else index)
        if parameter.requires_grad:
            (rest if index is None else matched[index]).append(parameter)
    _check_all_matched([entries[i]["pattern"] for i in sorted(unmatched)], names)
    built = [{"params": params, **_options(entry, lr, weight_decay, betas)} for entry, params in zip(entries, matched)]
    return [group for group in ({"params": rest}, *built) if group["params"]]


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

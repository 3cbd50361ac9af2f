"""Values that any reader of YAML or JSON understands, and text of both. What another program may have written is read with bounds: no text
of a few bytes takes hours, gigabytes or the process."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import yaml

_DEEPEST = 200
_MOST_NODES = 500_000
_MOST_VALUES = 10_000_000
_LONGEST_INTEGER = 40
_LONGEST_NUMBER = 200
_LONGEST_YAML = 16 << 20
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
NUMBER = re.compile(r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9_]+)[eE][-+]?[0-9]+$")
"""What people write for a number and YAML 1.1 takes for a string, such as `1e-3`."""
NUMBER_BEGINS = list("-+0123456789.")
_OPENING = (yaml.events.MappingStartEvent, yaml.events.SequenceStartEvent)
_CLOSING = (yaml.events.MappingEndEvent, yaml.events.SequenceEndEvent)


class PlainDumper(_DUMPER):  # type: ignore[misc]
    """A safe dumper that quotes text such as `1e-3`, which would be read as a number."""


PlainDumper.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER, NUMBER_BEGINS)


_WORD = rf"(?=.{{1,{_LONGEST_NUMBER}}}\Z)"
_NUMBERS = {
    "tag:yaml.org,2002:int": r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)",
    "tag:yaml.org,2002:float": r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+][0-9]+)?|[-+]?\.(?:inf|Inf|INF)"
    r"|\.(?:nan|NaN|NAN)",
}
"""Plain scalars that are numbers, by tag: those of YAML 1.1, but not those to base 60, which cost quadratic time. `1:30` is a text."""


def with_plain_numbers(loader: Any) -> Any:
    """Return a class of loaders with the numbers of `_NUMBERS` in place of those that it had."""
    own = {
        first: [(tag, form) for tag, form in forms if tag not in _NUMBERS]
        for first, forms in loader.yaml_implicit_resolvers.items()
    }
    loader.yaml_implicit_resolvers = own
    for tag, form in _NUMBERS.items():
        loader.add_implicit_resolver(tag, re.compile(f"{_WORD}(?:{form})\\Z"), NUMBER_BEGINS)
        # A tag that is written out comes here too.
        loader.add_constructor(tag, _number_of(loader.yaml_constructors[tag]))
    return loader


def _number_of(construct: Any) -> Any:
    def number(self: Any, node: Any) -> Any:
        text = self.construct_scalar(node)
        if ":" in text or len(text) > _LONGEST_NUMBER:
            raise ValueError(f"{text[:_LONGEST_INTEGER]!r} is no number")
        return construct(self, node)

    return number


class _PlainLoader(_LOADER):  # type: ignore[misc]
    """A safe loader without numbers to base 60."""


with_plain_numbers(_PlainLoader)


def parse_yaml(text: str) -> object:
    """Return the content of YAML, read by the safe loader."""
    check_yaml(text)
    return yaml.load(text, Loader=_PlainLoader)


def check_yaml(text: str) -> None:
    """Refuse YAML that costs more than its size: a few aliases of aliases expand to billions of values."""
    if len(text) > _LONGEST_YAML:
        raise ValueError(f"it has more than {_LONGEST_YAML:,} characters")
    nodes = 0
    open_nodes: list[tuple[str | None, int]] = []
    sizes: dict[str | None, int] = {}
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, _OPENING):
            open_nodes.append((event.anchor, nodes))
        elif isinstance(event, _CLOSING):
            anchor, before = open_nodes.pop()
            if anchor:
                sizes[anchor] = nodes - before
            continue
        elif isinstance(event, yaml.events.AliasEvent):
            if any(event.anchor == anchor for anchor, _ in open_nodes):
                raise ValueError(f"its part {event.anchor!r} refers to itself")
            nodes += sizes.get(event.anchor, 0)
        elif not isinstance(event, yaml.events.ScalarEvent):
            continue
        elif event.anchor:
            sizes[event.anchor] = 1
        nodes += 1
        if len(open_nodes) > _DEEPEST:
            raise ValueError(f"it is nested deeper than {_DEEPEST} levels")
        if nodes > _MOST_NODES:
            raise ValueError(f"it has more than {_MOST_NODES:,} values")


def yaml_text(value: object) -> str:
    """Return plain values as YAML; mappings keep their order."""
    text: str = yaml.dump(value, Dumper=PlainDumper, sort_keys=False, allow_unicode=True, width=120)
    return text


def parse_json(
    text: str | bytes, *, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> Any:
    """Return the content of JSON.

    Args:
        text: JSON.
        pairs: Makes a mapping of its pairs.
    """
    # Counted before anything is parsed: a text of a gigabyte may have as many values as a machine has memory for.
    marks = (",", "[", "{") if isinstance(text, str) else (b",", b"[", b"{")
    if sum(map(text.count, marks)) > _MOST_VALUES:  # type: ignore[arg-type]
        raise ValueError(f"it has more than {_MOST_VALUES:,} values")
    try:
        return json.loads(text, parse_int=_integer, parse_float=_real, object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _integer(text: str) -> int:
    if len(text) > _LONGEST_INTEGER:
        raise ValueError(f"it has a number of {len(text)} digits")
    return int(text)


def _real(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"its number {text[:_LONGEST_INTEGER]} is out of range")
    return value


def json_text(value: object) -> str:
    """Return valid JSON; NaN and infinities, which JSON lacks, become null."""
    return (
        json.dumps(finite(value, lambda number: None), indent=2, ensure_ascii=False, default=str)
        + "\n"
    )


def finite(value: object, instead: Callable[[float], object]) -> Any:
    """Return plain values that JSON has: keys as text, and something else for NaN and infinities."""
    if isinstance(value, float) and not math.isfinite(value):
        return instead(value)
    if isinstance(value, Mapping):
        return {str(key): finite(item, instead) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item, instead) for item in value]
    return value


def to_plain(value: object, key: str | None = None) -> Any:
    """Return `value` made of dictionaries, lists, strings, numbers, booleans and `None` only. Keys are strings or numbers.

    Tensors and arrays become numbers or lists, classes and functions their dotted names. What has no plain form becomes its string.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return to_plain(value.value, key)
    # Of this very type: a value of NumPy, or of a class of the user's, may derive from one of these.
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {
            _plain_key(name): to_plain(item, key if key is None else f"{key}.{name}".lstrip("."))
            for name, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [to_plain(item, key) for item in value]
    if isinstance(value, AbstractSet):
        return sorted((to_plain(item, key) for item in value), key=str)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if is_dataclass(value):
        return {
            "type": type(value).__name__,
            **to_plain({each.name: getattr(value, each.name) for each in fields(value)}, key),
        }
    if hasattr(value, "tolist"):
        return to_plain(value.tolist(), key)
    text = str(value)
    if " at 0x" in text and callable(value):
        # Such as a collate_fn that is an object: known as a function is, by name.
        return f"{type(value).__module__}.{type(value).__qualname__}"
    if " at 0x" in text and key is not None:
        fix = (
            "Return it from an override of `build_datasampler`."
            if key.endswith("sampler")
            else "Keep objects on the runner."
        )
        raise TypeError(
            f"Expected {key} to be a plain value: a string, number, boolean, none, list or mapping. Received: {text} "
            f"({type(value).__name__}). {fix}"
        )
    return text


def _plain_key(name: object) -> object:
    return name if type(name) in (int, float, bool) else str(name)


def flatten(
    values: Mapping[str, object], prefix: str = "", *, keeps_empty: bool = False
) -> dict[str, Any]:
    """Return nested mappings as one, by dotted key."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and (value or not keeps_empty):
            flat.update(flatten(value, f"{prefix}{name}.", keeps_empty=keeps_empty))
        else:
            flat[f"{prefix}{name}"] = value
    return flat

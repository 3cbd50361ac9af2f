"""YAML and JSON. What anybody may have written is read with bounds: no text of a few bytes takes hours, gigabytes or the process."""

from __future__ import annotations

import json
from typing import Any

import yaml

_DEEPEST = 200
_MOST_NODES = 500_000
_MOST_VALUES = 10_000_000
_LONGEST_INTEGER = 40
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_QUICK_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_LONGEST_KEY = 100
_OPENING = (yaml.events.MappingStartEvent, yaml.events.SequenceStartEvent)
_CLOSING = (yaml.events.MappingEndEvent, yaml.events.SequenceEndEvent)


def parse_yaml(text: str) -> object:
    """Return the content of YAML, read by the safe loader."""
    check_yaml(text)
    return yaml.load(text, Loader=_LOADER)


def check_yaml(text: str) -> None:
    """Refuse YAML that costs more than its size: a few aliases of aliases stand for billions of values."""
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
    """Return plain values as YAML; mappings keep their order.

    The bytes are those of PyYAML's own emitter. libyaml, which takes a tenth of its time, writes what it writes alike: its keys differ
    where they are empty or long, its text where it is not ASCII or has line ends, tabs and the like, and a document of one value.
    """
    alike = isinstance(value, (dict, list)) and _is_written_alike(value)
    dumper = _QUICK_DUMPER if alike else yaml.SafeDumper
    text: str = yaml.dump(value, Dumper=dumper, sort_keys=False, allow_unicode=True, width=120)
    return text


def _is_written_alike(value: object) -> bool:
    if isinstance(value, str):
        return value.isascii() and value.isprintable()
    if isinstance(value, dict):
        return all(_is_plain_key(key) and _is_written_alike(item) for key, item in value.items())
    return not isinstance(value, (list, tuple)) or all(map(_is_written_alike, value))


def _is_plain_key(key: object) -> bool:
    return not isinstance(key, str) or (0 < len(key) <= _LONGEST_KEY and key.isascii() and key.isprintable())


def parse_json(text: str | bytes) -> Any:
    """Return the content of JSON."""
    marks = (",", "[", "{") if isinstance(text, str) else (b",", b"[", b"{")
    if sum(map(text.count, marks)) > _MOST_VALUES:  # type: ignore[arg-type]
        raise ValueError(f"it has more than {_MOST_VALUES:,} values")
    try:
        return json.loads(text, parse_int=_integer, parse_float=_real)
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

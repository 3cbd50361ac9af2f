"""YAML and JSON. What reads files that anybody may have written makes text that is nested without end an error, not the process's end."""

from __future__ import annotations

import json
from typing import Any

import yaml

_DEEPEST = 200
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_QUICK_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_LONGEST_KEY = 100
_OPENING = (yaml.events.MappingStartEvent, yaml.events.SequenceStartEvent)
_CLOSING = (yaml.events.MappingEndEvent, yaml.events.SequenceEndEvent)


def parse_yaml(text: str) -> object:
    """Return what stands in YAML, read by the safe loader.

    Raises:
        ValueError: If it is nested deeper than 200 levels: libyaml's stack would overflow, which no Python code can catch.
        yaml.YAMLError: If it is no YAML.
    """
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        depth += isinstance(event, _OPENING) - isinstance(event, _CLOSING)
        if depth > _DEEPEST:
            raise ValueError(f"it is nested deeper than {_DEEPEST} levels")
    return yaml.load(text, Loader=_LOADER)


def yaml_text(value: object) -> str:
    """Return plain values as YAML; mappings keep their order.

    The bytes are those of PyYAML's own emitter. libyaml, which takes a tenth of its time, writes what it writes alike: its keys differ
    where they are empty or long, its text where it is not ASCII or has line ends, tabs and the like, and a document of one value.

    Args:
        value: Dictionaries, lists, strings, numbers, booleans and `None`.
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
    """Return what stands in JSON.

    Raises:
        ValueError: If it is none, or is nested too deeply to be read.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None

"""YAML and JSON of files that anybody may have written: text that is nested without end is an error, and not the end of the process."""

from __future__ import annotations

import json
from typing import Any

import yaml

_DEEPEST = 200
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
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


def parse_json(text: str | bytes) -> Any:
    """Return what stands in JSON.

    Raises:
        ValueError: If it is none, or is nested too deeply to be read.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None

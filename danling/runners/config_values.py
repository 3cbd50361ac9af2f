"""Values of the configuration: kinds, plain forms and files."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from .config_schema import Key

_FLOAT = re.compile(
    r"^[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$|^[-+]?\.\d+([eE][-+]?\d+)?$|^[-+]?\d[\d_]*\.\d*([eE][-+]?\d+)?$"
)


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-3 as a string; here it is the number that was meant."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def check_value(name: str, key: Key, value: Any) -> Any:
    """Return `value` as the kind of `key`.

    Raises:
        ValueError: If it is not of that kind, or outside its choices or range; the message names the key.
    """
    if (
        value is None
        or isinstance(value, str)
        and value.lower() in ("none", "null")
        and (key.default is None or key.optional)
    ):
        if key.default is not None and not key.optional:
            raise _wrong(name, key, value)
        return None
    value = _of_kind(name, key, value)
    if key.choices is not None and str(value).lower() not in key.choices:
        raise ValueError(f"Expected {name} to be one of {list(key.choices)}. Received: {name}={value!r}.")
    if key.minimum is not None and not value >= key.minimum:
        raise ValueError(f"Expected {name} >= {key.minimum}. Received: {name}={value!r}.")
    return value


def _of_kind(name: str, key: Key, value: Any) -> Any:
    kind = key.kind
    if kind == "bool":
        return _as_bool(name, key, value)
    if kind in ("int", "float"):
        return _as_number(name, key, value)
    if kind == "str":
        if isinstance(value, (Mapping, list, tuple, set)):
            raise _wrong(name, key, value)
        return str(value)
    if kind == "list":
        return list(value) if isinstance(value, (list, tuple, set)) else [value]
    if kind == "dict" and not isinstance(value, Mapping):
        raise _wrong(name, key, value)
    return value


def _as_bool(name: str, key: Key, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).lower()
    if text in ("true", "yes", "on", "1"):
        return True
    if text in ("false", "no", "off", "0"):
        return False
    raise _wrong(name, key, value)


def _as_number(name: str, key: Key, value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise _wrong(name, key, value)
    try:
        number = float(value)
    except ValueError:
        raise _wrong(name, key, value) from None
    if math.isnan(number) or key.kind == "int" and not number.is_integer():
        raise _wrong(name, key, value)
    if key.kind == "int":
        return int(value) if not isinstance(value, str) or value.lstrip("+-").isdigit() else int(number)
    return number


def _wrong(name: str, key: Key, value: Any) -> ValueError:
    kind = {"bool": "true or false", "int": "an integer", "float": "a number", "str": "a string", "dict": "a mapping"}[
        key.kind
    ]
    none = " or none" if key.default is None or key.optional else ""
    return ValueError(f"Expected {name} to be {kind}{none}. Received: {name}={value!r} ({type(value).__name__}).")


def read_word(text: str) -> Any:
    """Return what a word of the command line means: none, a truth value, a number, a literal list or mapping, or itself."""
    if text.lower() in ("none", "null", "~"):
        return None
    try:
        value = yaml.load(text, Loader=_Loader)  # noqa: S506 - a subclass of the safe loader
    except yaml.YAMLError:
        return text
    if isinstance(value, (bool, int, float, list, dict)):
        return value
    return text if text.lower() not in ("inf", "+inf", "-inf") else float(text)


def load_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML or JSON file that holds a mapping.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it holds something else.
    """
    if not path.is_file():
        raise FileNotFoundError(f"Expected a configuration file. Received: {str(path)!r}, which does not exist.")
    text = path.read_text(encoding="utf-8")
    values = json.loads(text) if path.suffix == ".json" else yaml.load(text, Loader=_Loader)  # noqa: S506
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ValueError(f"Expected {str(path)!r} to hold a mapping. Received: {type(values).__name__}.")
    return values


def to_plain(value: Any) -> Any:
    """Return builtins only: mappings as dicts, sequences as lists, anything unknown as its text."""
    if isinstance(value, Mapping):
        return {str(name): to_plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value, key=str) if isinstance(value, (set, frozenset)) else value
        return [to_plain(item) for item in items]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values; an empty section has none."""
    for name, value in values.items():
        full = f"{prefix}.{name}" if prefix else str(name)
        if isinstance(value, Mapping):
            yield from flatten(value, full)
        else:
            yield full, value


def one_slip_away(name: str, known: str) -> bool:
    """Whether one letter too many, too few or wrong, or two swapped, turn `known` into `name`; names under four letters never are."""
    if len(known) < 4 or name == known or abs(len(name) - len(known)) > 1:
        return False
    start = next((i for i, (a, b) in enumerate(zip(name, known)) if a != b), min(len(name), len(known)))
    if len(name) > len(known):
        return name[start + 1 :] == known[start:]
    if len(name) < len(known):
        return name[start:] == known[start + 1 :]
    differing = [(a, b) for a, b in zip(name, known) if a != b]
    return len(differing) == 1 or len(differing) == 2 and differing[0] == differing[1][::-1]

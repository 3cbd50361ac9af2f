"""Settings in files: YAML, JSON and TOML."""

from __future__ import annotations

import importlib
import math
import os
import re
import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import yaml

from danling.utils.files import read_text
from danling.utils.plain import check_yaml, parse_json

from .fields import YamlLoader

FORMATS = (".yaml", ".yml", ".json", ".toml")


class SettingsLoader(YamlLoader):
    """A safe YAML loader that reads `1e-3` as a number, as people write it.

    YAML 1.1 takes `1e-3` for a string, and a learning rate that is a string fails far from the file.
    """


SettingsLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9_]+)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)


def read_settings(file: str | os.PathLike[str]) -> dict[str, object]:
    """Return the settings in a file; an empty file gives none."""
    path = Path(file)
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise ValueError(f"Expected a file that ends in {', '.join(FORMATS)}. Received: {str(path)!r}.")
    if not path.is_file():
        raise FileNotFoundError(f"Expected a file with settings. Received: {str(path)!r}, which does not exist.")
    try:
        content = _read(path, suffix)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(
            f"Expected {suffix[1:].upper()} in {str(path)!r}. Received: {' '.join(str(error).split())}"
        ) from error
    if content is not None and not isinstance(content, Mapping):
        raise ValueError(f"Expected a mapping of keys in {str(path)!r}. Received: {type(content).__name__}.")
    return dict(content or {})


def _read(path: Path, suffix: str) -> Any:
    text = read_text(path)
    if suffix == ".json":
        return parse_json(text)
    if suffix == ".toml":
        return _toml(text)
    check_yaml(text)
    loader: Any = SettingsLoader(text)  # type: ignore[no-untyped-call]
    loader._root = os.path.abspath(path.parent)  # where !include looks
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _toml(text: str) -> object:
    reader = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return reader.loads(text)


def strict_json(settings: object) -> object:
    """Return plain settings with infinities and NaN as strings, which JSON lacks and number keys read back."""
    if isinstance(settings, float) and not math.isfinite(settings):
        return str(settings)
    if isinstance(settings, dict):
        return {name: strict_json(value) for name, value in settings.items()}
    return [strict_json(value) for value in settings] if isinstance(settings, list) else settings


def as_mapping(settings: object) -> Mapping[Any, Any]:
    """Return the settings of a mapping, a file or a namespace of `argparse`; none for `None`."""
    if settings is None:
        return {}
    if isinstance(settings, Namespace):
        return vars(settings)
    if isinstance(settings, (str, os.PathLike)):
        return read_settings(settings)
    if not isinstance(settings, Mapping):
        raise TypeError(
            f"Expected a mapping or the path of a file. Received: {settings!r} ({type(settings).__name__})."
            + (" Pass dataclasses.asdict(...) of it." if is_dataclass(settings) else "")
        )
    return settings

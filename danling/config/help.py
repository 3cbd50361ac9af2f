"""The text of `python train.py --help`, made of the fields' own docstrings."""

from __future__ import annotations

import inspect
import os
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from chanfig import Config

from danling.utils.torchrun import ERROR_FILE, first_failure

from .fields import MISSING, Field, describe, fields_of, help_texts
from .node import Section

_INDENT = " " * 6
_WIDTH = 100


def help_text(config: Section, program: str | None = None) -> str:
    """Return the help of a configuration: every key, its type, its value without arguments, and what it means.

    Args:
        config: The configuration that would be parsed; keys that its class or its `__init__` added are listed too.
        program: The name of the script.
    """
    name = program or os.path.basename(sys.argv[0] or "train.py")
    lines = [
        f"usage: {name} [--config FILE ...] [--KEY VALUE ...]",
        "",
        "Keys of nested sections are joined by dots: --optim.lr 1e-3. Lists are several values or one in brackets; none, true and",
        "false are understood; --KEY alone means true. Files are read first, in order.",
        "",
        "  --config FILE ...",
        f"{_INDENT}YAML, JSON or TOML files with settings.",
        "  -h, --help",
        f"{_INDENT}Show this and leave.",
        "",
    ]
    for title, entries in _groups(config):
        lines += [title, *entries, ""]
    return "\n".join(lines)


@contextmanager
def usage_errors(enabled: bool = True) -> Iterator[None]:
    """Turn a mistake on the command line into the usage, one line that says what is wrong, and exit code 2.

    Of several processes under torchrun the first one says it.

    Args:
        enabled: Whether the words came from the command line of this process; else errors pass.
    """
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        if not enabled:
            raise
        if os.environ.get(ERROR_FILE) and not first_failure(error)[1]:
            raise SystemExit(2) from None
        name = os.path.basename(sys.argv[0] or "train.py")
        print(f"usage: {name} [--config FILE ...] [--KEY VALUE ...]   (--help lists the keys)", file=sys.stderr)
        print(f"{name}: error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None


def _groups(config: Section) -> Iterator[tuple[str, list[str]]]:
    fields = fields_of(type(config))
    own: dict[str, list[str]] = {}
    for field in fields.values():
        if not isinstance(dict.get(config, field.name), Config):
            own.setdefault(field.owner.__name__, []).extend(_entry(config, field, ""))
    yield from own.items()
    for name, value in config.items():
        if isinstance(value, Config):
            yield _title(name, value), list(_section_entries(value, f"{name}."))
    extra = [name for name, value in config.items() if name not in fields and not isinstance(value, Config)]
    if extra:
        yield "others", [line for name in extra for line in _undeclared(name, config[name])]


def _title(name: str, section: Config) -> str:
    documented = type(section).__module__.split(".")[0] != "chanfig" and type(section) is not Section
    text = (inspect.getdoc(type(section)) or "").split("\n")[0] if documented else ""
    return f"{name}: {text}" if text else name


def _section_entries(section: Config, prefix: str) -> Iterator[str]:
    fields = fields_of(type(section))
    for field in fields.values():
        value = dict.get(section, field.name)
        if isinstance(value, Config):
            yield from _section_entries(value, f"{prefix}{field.name}.")
        else:
            yield from _entry(section, field, prefix)
    for name, value in section.items():
        if name in fields:
            continue
        if isinstance(value, Config):
            yield from _section_entries(value, f"{prefix}{name}.")
        else:
            yield from _undeclared(f"{prefix}{name}", value)


def _entry(section: Config, field: Field, prefix: str) -> Iterator[str]:
    value = dict.get(section, field.name, field.default)
    default = "not set" if value is MISSING else f"default: {_shown(value)}"
    # Hints that could not be resolved, and values without one, say more as they were written.
    kind = field.text if field.text and field.hint is Any else describe(field.hint)
    yield f"  --{prefix}{field.name}  ({kind}; {default})"
    text = help_texts(type(section)).get(field.name, "")
    yield from textwrap.wrap(text, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)


def _undeclared(name: str, value: object) -> Iterator[str]:
    yield f"  --{name}  (default: {_shown(value)})"


def _shown(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(dict(value)) if isinstance(value, Mapping) else str(value)

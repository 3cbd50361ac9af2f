"""The command line of a program: reads the values of a configuration, and prints its help and usage."""

from __future__ import annotations

import inspect
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, get_args

import yaml

from danling.utils.messages import did_you_mean
from danling.utils.process import ERROR_FILE, first_failure

from .fields import (
    MISSING,
    SEQUENCES,
    Config,
    conform,
    describe,
    fields_of,
    help_texts,
    kind_of,
    members_of,
    of_chanfig,
)
from .files import SettingsLoader
from .names import has_file_section
from .node import ClosedSection, Section

_OPTION = re.compile(r"--?[A-Za-z_]")
_GROUPED = re.compile(r"[-+]?[0-9]+(_[0-9]+)+\Z")
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)\Z")
_NUMBER = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?\Z")
_SPECIAL = re.compile(r"[-+]?(inf|nan)\Z", re.IGNORECASE)
_NONE_WORDS = frozenset({"none", "null"})
_SWITCHES = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_NUMBER_HINT = float | int | None
_HINTS: Mapping[type, Any] = {
    bool: bool | None,
    str: str | None,
    int: _NUMBER_HINT,
    float: _NUMBER_HINT,
    list: list | None,
    tuple: tuple | None,
}
"""What a key without a declared type takes, by the type of its present value."""


def parse_into(
    config: Section, arguments: Iterable[str], *, file_option: str, check: Callable[[Mapping[str, str]], None]
) -> None:
    """Set keys from a command line; files are read before single keys."""
    options = split_options(arguments)
    for name, words in options:
        if name in ("config", file_option):
            if not words:
                raise ValueError(f"Expected --{name} FILE. Received: no file.")
            for path in words:
                config.merge_from_file(path)
    for name, words in options:
        if name not in ("config", file_option):
            key = name if name in config else name.replace("-", "_")
            check({key: " ".join((f"--{name}", *words))})
            assign(config, key, words)


def command_line_of(config: Section) -> tuple[str, ...] | None:
    """Return the words of the program's own command line that a configuration has read; `None` where it read none."""
    words: tuple[str, ...] | None = vars(config).get("_command_line")
    return words


def split_options(arguments: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Return the options and the words after each, in order."""
    options: list[tuple[str, list[str]]] = []
    for word in map(str, arguments):
        mend = ""
        if word.startswith("-"):
            mend = f" Did you mean '-{word}'?"
        elif word.endswith((".yaml", ".yml", ".json", ".toml")):
            mend = f" Did you mean '--config {word}'?"
        if word.startswith("--") and _OPTION.match(word):
            name, equals, value = word[2:].partition("=")
            options.append((name, [value] if equals else []))
        elif not options:
            raise ValueError(f"Expected --KEY VALUE. Received: {word!r} with no key before it.{mend}")
        elif _OPTION.match(word) and not _SPECIAL.match(word):
            raise ValueError(
                f"Expected --KEY VALUE. Received: {word!r}.{mend} A value that begins with a dash is written --{options[-1][0]}={word}."
            )
        else:
            options[-1][1].append(word)
    return options


def assign(config: Section, key: str, words: list[str]) -> None:
    """Set one key from the words after it: by its declared type, else by the type of its present value, else by their form."""
    hint, existing = _declared(config, key), Section.get(config, key, MISSING)
    if isinstance(existing, Config):
        config.merge({key: _section_value(key, words, existing)})
        return
    if hint in (None, Any):
        hint = _HINTS.get(type(existing), Any)
    try:
        value = read(words, hint)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"Expected --{key} to be {error}. Received: {' '.join(words) or 'no value'}.") from None
    config.set(key, value)


def _declared(config: Section, key: str) -> object:
    """Return the hint of a dotted key, `None` where nothing declares it."""
    node: Any = config
    *path, leaf = key.split(".")
    for part in path:
        child = dict.get(node, part) if isinstance(node, dict) else None
        if child is None and isinstance(node, Section) and not isinstance(node, ClosedSection):
            child = node.section_type()()
        if not isinstance(child, Mapping):
            return None
        node = child
    field = fields_of(type(node)).get(leaf) if isinstance(node, Config) else None
    return None if field is None else field.hint


def _section_value(key: str, words: list[str], section: Config) -> object:
    if has_file_section(key) and len(words) == 1 and not words[0].startswith("{"):
        return words[0]  # a file of that library's
    value = _yaml(" ".join(words)) if words and words[0].startswith("{") else None
    if not isinstance(value, Mapping):
        keys = [*fields_of(type(section)), *section]
        example = f"--{key}.{keys[0]} VALUE" if keys else f"--{key}.NAME VALUE"
        if "enabled" in keys:
            example = f"--{key}.enabled true"
        raise ValueError(f"Expected keys of the section {key!r}. Received: --{key} {' '.join(words)}. Write {example}.")
    return value


def read(words: list[str], hint: object) -> Any:
    """Return what words mean for a type; none mean true, and several are a list."""
    kinds = {kind_of(member): member for member in members_of(hint)}
    if not words:
        if bool in kinds or Any in kinds:
            return True
        raise TypeError(describe(hint))
    text = " ".join(words)
    sequence = next((member for kind, member in kinds.items() if kind in SEQUENCES), list if Any in kinds else None)
    is_none = text.lower() in _NONE_WORDS and type(None) in kinds
    if sequence is not None and not is_none and (Any not in kinds or len(words) > 1):
        return conform(_items(words, text, sequence), hint)
    if len(words) > 1 and text[0] not in "[{":
        raise TypeError(describe(hint))
    if bool in kinds and text.lower() in _SWITCHES:
        return _SWITCHES[text.lower()]
    if int in kinds and _GROUPED.match(text):
        return conform(int(text), hint)
    if str in kinds and text[:1] in ("'", '"'):
        return conform(text, hint)
    try:
        return conform(infer(text), hint)
    except TypeError:
        return conform(text, hint)  # such as a name of digits


def _items(words: list[str], text: str, sequence: object) -> object:
    if text.startswith(("[", "(", "{")):
        return _yaml(f"[{text[1:-1]}]" if text.startswith("(") else text)
    hint = next((argument for argument in get_args(sequence) if argument is not Ellipsis), Any)
    return [read([word], hint) for word in words]


def infer(word: str) -> Any:
    """Return the value that a word has by its form: none, a boolean, a number, a quoted string, a list or mapping, else a string."""
    lowered = word.lower()
    if lowered in _NONE_WORDS:
        return None
    if lowered in ("true", "false"):
        return lowered == "true"
    if _INTEGER.match(word):
        return int(word)
    if _NUMBER.match(word) or _SPECIAL.match(word):
        return float(word)
    if word[:1] in ("[", "{") or (word[:1] in ("'", '"') and word[-1:] == word[:1] and len(word) > 1):
        return _yaml(word)
    return word


def _yaml(text: str) -> object:
    try:
        return yaml.load(text, Loader=SettingsLoader)
    except yaml.YAMLError:
        raise TypeError("a list or a mapping in brackets") from None


_INDENT = " " * 6
_WIDTH = 100


_USAGE = """usage: {name} [--config FILE ...] [--KEY VALUE ...]

Keys of nested sections are joined by dots: --optim.lr 1e-3. Lists are several values or one in brackets; none, true and
false are understood; --KEY alone means true. Files are read first, in order.

  --config FILE ...
      YAML, JSON or TOML files with settings.
  -h, --help [SECTION ... | all]
      Show this, the keys of sections such as checkpoint, or all keys, and leave.
"""


def help_text(config: Section, sections: Sequence[str] = ()) -> str:
    """Return the help of a configuration: the keys outside of the library's sections and the names of those, or of `sections` alone."""
    lines = [_USAGE.format(name=os.path.basename(sys.argv[0] or "train.py"))]
    known = [name for name, value in config.items() if isinstance(value, Config)]
    for name in sections:
        if name not in (*known, "all"):
            raise ValueError(
                f"Expected a section of the configuration behind --help. Received: {name!r}.{did_you_mean(name, known)}"
            )
    own: dict[str, list[str]] = {}
    for owner, lines_of_key in _entries(config, nested=False):
        own.setdefault(owner, []).extend(lines_of_key)
    if not sections or "all" in sections:
        for owner, entries in own.items():
            lines += [owner, *entries, ""]
    short = []
    for name in known:
        section: Config = config[name]
        kind = type(section)
        is_documented = kind is not Section and not of_chanfig(kind)
        about = (inspect.getdoc(kind) or "").split("\n")[0] if is_documented else ""
        title = f"{name}: {about}" if about else name
        if not sections and kind is not Section and kind.__module__.startswith("danling."):
            short.append(f"  {title}")
        elif not sections or name in sections or "all" in sections:
            lines += [title, *(line for _, entry in _entries(section, f"{name}.") for line in entry), ""]
    if short:
        lines += ["sections, whose keys --help SECTION lists", *short, ""]
    return "\n".join(lines)


@contextmanager
def usage_errors(enabled: bool = True) -> Iterator[None]:
    """Turn a mistake on the command line into the usage, one line with the error, and exit code 2.

    Of several processes under torchrun the first one says it.
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


def _entries(section: Config, prefix: str = "", *, nested: bool = True) -> Iterator[tuple[str, list[str]]]:
    """Yield for each key of a section the class that declares it, and its lines of help."""
    fields = fields_of(type(section))
    for name in (*fields, *(name for name in section if name not in fields)):
        field, value = fields.get(name), dict.get(section, name, MISSING)
        if isinstance(value, Config):
            if nested:
                yield from _entries(value, f"{prefix}{name}.")
            continue
        default = "not set" if value is MISSING else f"default: {_shown(value)}"
        kind = f"{describe(field.hint)}; " if field is not None else ""
        text = help_texts(type(section)).get(name, "")
        wrapped = textwrap.wrap(text, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)
        owner = field.owner.__name__ if field is not None else "others"
        heading = "Settings outside of sections" if owner == "TopLevelConfig" else owner
        yield heading, [f"  --{prefix}{name}  ({kind}{default})", *wrapped]


def _shown(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(dict(value)) if isinstance(value, Mapping) else str(value)

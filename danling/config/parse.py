"""The command line of a program: reads the values of a configuration, and prints its help and usage."""

from __future__ import annotations

import inspect
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, get_args, get_origin

import yaml

from danling.utils.messages import did_you_mean
from danling.utils.process import ERROR_FILE, first_failure

from .fields import MISSING, SEQUENCES, Config, Field, conform, describe, fields_of, help_texts, members_of, of_chanfig
from .files import SettingsLoader
from .names import has_file_section
from .node import ClosedSection, Section

_OPTION = re.compile(r"--?[A-Za-z_]")
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)\Z")
_NUMBER = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?\Z")
_SPECIAL = re.compile(r"[-+]?(inf|nan)\Z", re.IGNORECASE)
_NONE_WORDS = frozenset({"none", "null"})
_TRUE_WORDS = frozenset({"true", "yes", "on", "1"})
_FALSE_WORDS = frozenset({"false", "no", "off", "0"})


def parse_into(
    config: Section,
    arguments: Iterable[str],
    *,
    file_option: str | None = None,
    missing: str = "raise",
    strict: bool = False,
    check: Callable[[Mapping[str, str]], None],
) -> None:
    """Set keys from a command line; files are read before single keys."""
    options = split_options(arguments)
    file_options = {"config"} if file_option is None else {"config", file_option}
    if file_option is not None and all(name != file_option for name, _ in options):
        message = f"Expected --{file_option} FILE. Received: no such option."
        if missing == "raise":
            raise ValueError(message)
        if missing == "warn":
            warnings.warn(message, RuntimeWarning, stacklevel=3)
    for name, words in options:
        if name in file_options:
            if not words:
                raise ValueError(f"Expected --{name} FILE. Received: no file.")
            for path in words:
                config.merge_from_file(path)
    for name, words in options:
        if name not in file_options:
            key = name if name in config else name.replace("-", "_")
            check({key: " ".join((f"--{name}", *words))})
            assign(config, key, words, strict=strict)


def command_line_of(config: Section) -> tuple[str, ...] | None:
    """Return the words of the program's own command line that a configuration has read; `None` where it read none."""
    words: tuple[str, ...] | None = vars(config).get("_command_line")
    return words


def split_options(arguments: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Return the options and the words after each, in order."""
    options: list[tuple[str, list[str]]] = []
    for word in map(str, arguments):
        if word.startswith("--") and _OPTION.match(word):
            name, equals, value = word[2:].partition("=")
            options.append((name, [value] if equals else []))
        elif not options:
            raise ValueError(f"Expected --KEY VALUE. Received: {word!r} with no key before it.{_mend_word(word)}")
        elif word.startswith("-") and _OPTION.match(word) and not _SPECIAL.match(word):
            raise ValueError(
                f"Expected --KEY VALUE. Received: {word!r}.{_mend_word(word)} A value that begins with a dash is written "
                f"--{options[-1][0]}={word}."
            )
        else:
            options[-1][1].append(word)
    return options


def _mend_word(word: str) -> str:
    if word.startswith("-"):
        return f" Did you mean '-{word}'?"
    return f" Did you mean '--config {word}'?" if word.endswith((".yaml", ".yml", ".json", ".toml")) else ""


def assign(config: Section, key: str, words: list[str], *, strict: bool = False) -> None:
    """Set one key from the words after it: by its declared type, else by the type of its present value, else by their form."""
    field_hint = _declared(config, key)
    existing = Section.get(config, key, MISSING)
    if strict and existing is MISSING and field_hint is None:
        raise ValueError(
            f"Expected a key that the configuration has. Received: --{key}.{did_you_mean(key, map(str, config.all_keys()))}"
        )
    if isinstance(existing, Config):
        config.merge({key: _section_value(key, words, existing)})
        return
    try:
        value = _read_undeclared(words, existing) if field_hint in (None, Any) else read(words, field_hint)
    except (TypeError, ValueError) as error:
        expected = str(error) or describe(field_hint)
        raise TypeError(f"Expected --{key} to be {expected}. Received: {' '.join(words) or 'no value'}.") from None
    config.set(key, value)


def _declared(config: Section, key: str) -> object:
    """Return the hint of a dotted key, `None` where nothing declares it."""
    node: Any = config
    *path, leaf = key.split(".")
    for part in path:
        field = fields_of(type(node)).get(part) if isinstance(node, Config) else None
        child = dict.get(node, part) if isinstance(node, dict) else None
        if child is None and isinstance(node, Section) and not isinstance(node, ClosedSection):
            child = node.section_type()()
        if not isinstance(child, Mapping):
            return Any if field is not None else None
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
    """Return what words mean for a declared type."""
    members = members_of(hint)
    sequence = next((member for member in members if (get_origin(member) or member) in SEQUENCES), None)
    if not words:
        if bool in members or Any in members:
            return True
    elif sequence is not None and not _is_word_for_none(words, members):
        return conform(_items(words, sequence), hint)
    elif len(words) == 1:
        return _read_word(words[0], members)
    elif words[0][:1] in "[{":
        return conform(_yaml(" ".join(words)), hint)
    raise TypeError(describe(hint))


def _is_word_for_none(words: list[str], members: tuple[object, ...]) -> bool:
    return type(None) in members and len(words) == 1 and words[0].lower() in _NONE_WORDS


def _items(words: list[str], sequence: object) -> list[object]:
    if words[0].startswith(("[", "(")):
        text = " ".join(words)
        items = _yaml(f"[{text[1:-1]}]" if text.startswith("(") else text)
        return items if isinstance(items, list) else [items]
    arguments = [argument for argument in get_args(sequence) if argument is not Ellipsis]
    return [read([word], arguments[0]) if arguments else infer(word) for word in words]


def _read_word(word: str, members: tuple[Any, ...]) -> Any:
    # A word that is one of the choices is that choice, even if the choice is "none"; a string takes any word, so it comes last.
    order: list[Any] = [Literal, type(None), bool, int, float, None, str]
    kinds = {member: get_origin(member) or member for member in members}
    for member in sorted(members, key=lambda one: order.index(kinds[one] if kinds[one] in order else None)):
        with suppress(TypeError, ValueError):
            return _read_as(word, member, kinds[member])
    if Literal in kinds.values():
        return word  # an alias, or a wrong choice that `validate` names together with the choices
    raise TypeError(" or ".join(describe(member) for member in members))


def _read_as(word: str, member: Any, kind: Any) -> Any:
    lowered = word.lower()
    if kind is Literal:
        found = [choice for choice in get_args(member) if str(choice).lower() == lowered]
        if found:
            return found[0]
    elif kind is type(None):
        if lowered in _NONE_WORDS:
            return None
    elif kind is bool:
        if lowered in _TRUE_WORDS | _FALSE_WORDS:
            return lowered in _TRUE_WORDS
    elif kind is int:
        return conform(int(word) if _INTEGER.match(word.replace("_", "")) else float(word), int)
    elif kind is float:
        return float(word)
    elif kind is str:
        return word
    else:
        return conform(infer(word) if member is Any or kind is dict else word, member)
    raise TypeError


def _read_undeclared(words: list[str], existing: object) -> object:
    """Return what words mean for a key without a declared type: a value of the type of the present one."""
    if isinstance(existing, bool):
        return read(words, bool | None)
    if isinstance(existing, str):
        return read(words, str | None)
    if isinstance(existing, (list, tuple)) and not _is_word_for_none(words, (type(None),)):
        return type(existing)(_items(words, type(existing)))
    value = infer_all(words)
    if isinstance(existing, (int, float)) and (
        isinstance(value, bool) or not isinstance(value, (int, float, type(None)))
    ):
        raise TypeError("a number or none")
    return value


def infer_all(words: list[str]) -> object:
    """Return the value that words without a declared type have by their form: no word is true, several are a list."""
    if not words:
        return True
    if words[0][:1] in ("[", "{") and len(words) > 1:
        return _yaml(" ".join(words))
    return infer(words[0]) if len(words) == 1 else [infer(word) for word in words]


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


def help_text(config: Section, program: str | None = None, *, sections: Sequence[str] = ()) -> str:
    """Return the help of a configuration: the keys outside of the library's sections and the names of those, or of `sections` alone."""
    name = program or os.path.basename(sys.argv[0] or "train.py")
    lines = [
        f"usage: {name} [--config FILE ...] [--KEY VALUE ...]",
        "",
        "Keys of nested sections are joined by dots: --optim.lr 1e-3. Lists are several values or one in brackets; none, true and",
        "false are understood; --KEY alone means true. Files are read first, in order.",
        "",
        "  --config FILE ...",
        f"{_INDENT}YAML, JSON or TOML files with settings.",
        "  -h, --help [SECTION ... | all]",
        f"{_INDENT}Show this, the keys of sections such as checkpoint, or all keys, and leave.",
        "",
    ]
    known = [name for name, value in config.items() if isinstance(value, Config)]
    for name in sections:
        if name not in (*known, "all"):
            raise ValueError(
                f"Expected a section of the configuration behind --help. Received: {name!r}.{did_you_mean(name, known)}"
            )
    short = []
    for name, title, entries in _groups(config):
        if sections and name not in sections and "all" not in sections:
            continue
        kind = type(config[name]) if name in known else Section
        if not sections and kind is not Section and kind.__module__.startswith("danling."):
            short.append(f"  {title}")
        else:
            lines += [title, *entries, ""]
    if short:
        lines += ["sections, whose keys --help SECTION lists", *short, ""]
    return "\n".join(lines)


@contextmanager
def usage_errors(enabled: bool = True) -> Iterator[None]:
    """Turn a mistake on the command line into the usage, one line that says what is wrong, and exit code 2.

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


def _groups(config: Section) -> Iterator[tuple[str, str, list[str]]]:
    fields = fields_of(type(config))
    own: dict[str, list[str]] = {}
    for field in fields.values():
        if not isinstance(dict.get(config, field.name), Config):
            own.setdefault(field.owner.__name__, []).extend(_entry(config, field, ""))
    yield from (("", name, entries) for name, entries in own.items())
    for name, value in config.items():
        if isinstance(value, Config):
            yield name, _title(name, value), list(_section_entries(value, f"{name}."))
    extra = [name for name, value in config.items() if name not in fields and not isinstance(value, Config)]
    if extra:
        yield "", "others", [f"  --{name}  (default: {_shown(config[name])})" for name in extra]


def _title(name: str, section: Config) -> str:
    documented = not of_chanfig(type(section)) and type(section) is not Section
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
            yield f"  --{prefix}{name}  (default: {_shown(value)})"


def _entry(section: Config, field: Field, prefix: str) -> Iterator[str]:
    value = dict.get(section, field.name, field.default)
    default = "not set" if value is MISSING else f"default: {_shown(value)}"
    # Hints that could not be resolved, and values without one, say more as they were written.
    kind = field.text if field.text and field.hint is Any else describe(field.hint)
    yield f"  --{prefix}{field.name}  ({kind}; {default})"
    text = help_texts(type(section)).get(field.name, "")
    yield from textwrap.wrap(text, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)


def _shown(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(dict(value)) if isinstance(value, Mapping) else str(value)

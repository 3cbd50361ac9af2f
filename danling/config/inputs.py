"""Where settings come from outside of the program: files, the command line and its help, and the environment."""

from __future__ import annotations

import ast
import inspect
import logging
import os
import re
import sys
import textwrap
import types
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import yaml

from danling.utils.files import read_text
from danling.utils.messages import did_you_mean, number_hint
from danling.utils.plain import NUMBER, NUMBER_BEGINS, check_yaml, parse_json, with_plain_numbers
from danling.utils.process import ERROR_FILE, first_failure

from .hints import SEQUENCES, conform, describe, kind_of, members_of
from .names import FILE_SECTIONS
from .sections import MISSING, Config, Section, YamlLoader, fields_of, of_chanfig, owners_of

if TYPE_CHECKING:
    from .runner_config import RunnerConfig

logger = logging.getLogger("danling")

# Files

FORMATS = (".yaml", ".yml", ".json", ".toml")


_MERGE = "tag:yaml.org,2002:merge"
_DEEPEST_INCLUDE, _MOST_INCLUDES = 20, 1000
_LARGEST_SETTINGS = 4 << 20
"""Bytes of a file with settings, and of all that it includes."""


class _TooMuch(ValueError):
    """A file of settings includes more than it may, in itself or in a file that it includes."""


class _Included:
    """How many files and bytes a file of settings may still include, at any depth."""

    def __init__(self) -> None:
        self.files, self.bytes = _MOST_INCLUDES, _LARGEST_SETTINGS

    def read(self, path: Path, depth: int) -> str:
        if depth > _DEEPEST_INCLUDE:
            raise _TooMuch(
                f"files nested deeper than {_DEEPEST_INCLUDE} levels, maybe in a circle: {str(path)!r}"
            )
        text = read_text(path, limit=self.bytes)
        self.files, self.bytes = self.files - 1, self.bytes - len(text)
        if self.files < 0:
            raise _TooMuch(f"more than {_MOST_INCLUDES} files")
        return text


class SettingsLoader(YamlLoader):
    """A safe YAML loader that reads `1e-3` as a number, as people write it, and refuses a key that is there twice.

    YAML 1.1 takes `1e-3` for a string, and a learning rate that is a string fails far from the file. Files are included with bounds.
    """

    included: _Included
    depth = 0

    def get_single_data(self) -> Any:
        """Return the content."""
        node = self.get_single_node()
        _refuse_twice(node)
        return None if node is None else self.construct_document(node)

    @staticmethod
    def _include(loader: Any, node: Any) -> Any:
        return loader.read_included(loader.construct_scalar(node))

    @staticmethod
    def _includes(loader: Any, node: Any) -> Any:
        if not isinstance(node, yaml.SequenceNode):
            raise ValueError(
                f"!includes expects a list of files in line {node.start_mark.line + 1}"
            )
        return [loader.read_included(name) for name in loader.construct_sequence(node)]

    def read_included(self, name: str) -> dict[str, object]:
        """Return the settings in another file, by its path from this one."""
        return _read_settings(Path(self._root, name), self.included, self.depth + 1)


with_plain_numbers(SettingsLoader)
SettingsLoader.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER, NUMBER_BEGINS)


def _refuse_twice(root: yaml.Node | None) -> None:
    """Refuse a key that a mapping has twice: the first value would be dropped."""
    waiting: list[Any] = [root]
    seen: set[int] = set()
    while waiting:
        node = waiting.pop()
        # An alias leads to the same node again.
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        if not isinstance(node, yaml.MappingNode):
            continue
        lines: dict[tuple[str, str], int] = {}
        for key, value in node.value:
            waiting.append(value)
            if not isinstance(key, yaml.ScalarNode):
                continue
            name, line = (key.tag, key.value), key.start_mark.line + 1
            # `<<` may be there several times.
            if name in lines and key.tag != _MERGE:
                where = (
                    f"in line {line}"
                    if line == lines[name]
                    else f"in lines {lines[name]} and {line}"
                )
                raise ValueError(f"the key {key.value!r} twice, {where}. Keep one of them.")
            lines[name] = line


def _from_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a mapping of JSON, in which no key is twice."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {name!r} twice. Keep one of them.")
        found[name] = value
    return found


def _parse_json(text: str) -> Any:
    try:
        return parse_json(text, pairs=_from_pairs)
    except ValueError:
        # For the lines: JSON is YAML but for its tabs.
        with suppress(yaml.YAMLError):
            check_yaml(text)
            _refuse_twice(yaml.compose(text.replace("\t", " "), Loader=SettingsLoader))
        raise


def _refuse_two_places(settings: Mapping[Any, Any]) -> None:
    """Refuse a key that is set both by its dotted name and within its section: one of the values would be dropped."""
    found: dict[str, str] = {}

    def walk(section: Mapping[Any, Any], prefix: str, written: str) -> None:
        for name, value in section.items():
            key = f"{prefix}{name}"
            how = f"{written} > {name}" if written else str(name)
            if isinstance(value, Mapping):
                walk(value, f"{key}.", how)
            elif found.setdefault(key, how) != how:
                raise ValueError(
                    f"the key {key!r} twice, written as {found[key]!r} and as {how!r}. Keep one of them."
                )

    walk(settings, "", "")


def read_settings(file: str | os.PathLike[str]) -> dict[str, object]:
    """Return the settings in a file; an empty file gives none."""
    return _read_settings(Path(file), _Included(), 0)


def _read_settings(path: Path, included: _Included, depth: int) -> dict[str, object]:
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise ValueError(
            f"Expected a file that ends in {', '.join(FORMATS)}. Received: {str(path)!r}."
        )
    if not path.is_file():
        raise FileNotFoundError(
            f"Expected a file with settings. Received: {str(path)!r}, which does not exist."
        )
    try:
        content = _parse_settings(included.read(path, depth), suffix, path.parent, included, depth)
    except _TooMuch as error:
        # The file that the user has named says it, not each one on the way there.
        if depth:
            raise
        raise ValueError(
            f"Expected settings of bounded size in {str(path)!r}. Received: {error}"
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(
            f"Expected {suffix[1:].upper()} in {str(path)!r}. Received: {' '.join(str(error).split())}"
        ) from error
    # An empty file of YAML is `None`.
    if content is not None and not isinstance(content, Mapping):
        raise ValueError(
            f"Expected a mapping of keys in {str(path)!r}. Received: {type(content).__name__}."
        )
    try:
        _refuse_two_places(content or {})
    except ValueError as error:
        raise ValueError(f"Expected each key once in {str(path)!r}. Received: {error}") from None
    return dict(content or {})


def _parse_settings(
    text: str, suffix: str, directory: Path, included: _Included, depth: int
) -> Any:
    if suffix == ".json":
        return _parse_json(text)
    if suffix == ".toml":
        import tomllib  # only here: few settings are TOML

        return tomllib.loads(text)
    check_yaml(text)
    loader: Any = SettingsLoader(text)  # type: ignore[no-untyped-call]
    loader._root = os.path.abspath(directory)  # where !include looks
    loader.included, loader.depth = included, depth
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


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


# The command line

# A dash before a letter begins an option; before a digit, `inf` or `nan` it is a sign.
_OPTION = re.compile(r"--?(?!(?:inf|nan)\Z)[A-Za-z_]", re.IGNORECASE)
_GROUPED = re.compile(r"[-+]?[0-9]+(_[0-9]+)+\Z")
# Python takes these for numbers where no type is declared: `007`, `infinity`, `1_000`, which may be names.
_NO_NUMBER = re.compile(r"[-+]?(0[0-9]+\Z|infinity\Z)|.*_", re.IGNORECASE)
_NONE_WORDS = frozenset({"none", "null"})
_SWITCHES = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
_HINTS: Mapping[type, Any] = {
    bool: bool | None,
    str: str | None,
    int: float | int | None,
    float: float | int | None,
    list: list | None,
    tuple: tuple | None,
}
"""What a key without a declared type takes, by the type of its present value."""
_LISTS_OF_NUMBERS: Mapping[type, Any] = {
    list: list[int | float] | None,
    tuple: tuple[int | float, ...] | None,
}
"""The same of lists that have numbers and nothing else, which may also be divided at commas."""


def split_options(arguments: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Return the options and the words after each, in order."""
    options: list[tuple[str, list[str]]] = []
    for word in map(str, arguments):
        fix = ""
        if word.startswith("-"):
            fix = f" Did you mean '-{word}'?"
        elif word.endswith(FORMATS):
            fix = f" Did you mean '--config {word}'?"
        is_option = _OPTION.match(word) is not None
        if is_option and word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            options.append((name, [value] if equals else []))
        elif not options:
            raise ValueError(
                f"Expected --KEY VALUE. Received: {word!r} with no key before it.{fix}"
            )
        elif is_option:
            raise ValueError(
                f"Expected --KEY VALUE. Received: {word!r}.{fix} A value that begins with a dash is written --{options[-1][0]}={word}."
            )
        else:
            options[-1][1].append(word)
    return options


def refuse_negation(config: Section, name: str) -> None:
    """Refuse an option that switches a key off by `no-` before its name: it would be another key, or another section."""
    parts = name.replace("-", "_").split(".")
    asked = ".".join(part.removeprefix("no_") for part in parts)
    is_new = ".".join(parts) not in config and parts[0] not in config
    if is_new and asked.partition(".")[0] in config:
        raise ValueError(f"Expected --KEY VALUE. Received: --{name}. Write --{asked} false.")


def set_option(config: Section, key: str, words: list[str]) -> None:
    """Set one key from the words after it: by its declared type, else by the type of its present value, else by their form."""
    existing = config.get(key, MISSING)
    if isinstance(existing, Config):
        config.merge({key: _section_value(key, words, existing)})
        return
    hint = _declared(config, key)
    if hint in (None, Any):
        kind = existing.__class__
        hint = _HINTS.get(kind, Any)
        if (
            kind in _LISTS_OF_NUMBERS
            and existing
            and {each.__class__ for each in existing} <= {int, float}
        ):
            hint = _LISTS_OF_NUMBERS[kind]
    try:
        value = read_words(words, hint)
    except (TypeError, ValueError) as error:
        refused = TypeError if isinstance(error, TypeError) else ValueError
        text = " ".join(words)
        raise refused(
            f"Expected --{key} to be {error}. Received: {text or 'no value'}.{number_hint(text)}"
        ) from None
    config.set(key, value)


def _declared(config: Section, key: str) -> object:
    """Return the hint of a dotted key, `None` where nothing declares it."""
    node: Any = config
    *path, leaf = key.split(".")
    for part in path:
        child = dict.get(node, part)
        if child is None and isinstance(node, Section):
            child = node.section_type()()
        if not isinstance(child, Config):
            return None
        node = child
    field = fields_of(node.__class__).get(leaf)
    return None if field is None else field.hint


def _section_value(key: str, words: list[str], section: Config) -> object:
    """Return the settings of a whole section: a mapping in braces, or the file of another library."""
    is_mapping = bool(words) and words[0].startswith("{")
    if key in FILE_SECTIONS and len(words) == 1 and not is_mapping:
        return words[0]
    value = _read_yaml(" ".join(words)) if is_mapping else None
    if not isinstance(value, Mapping):
        keys = [*fields_of(type(section)), *section, "NAME"]
        example = f"--{key}.enabled true" if "enabled" in keys else f"--{key}.{keys[0]} VALUE"
        raise ValueError(
            f"Expected keys of the section {key!r}. Received: --{key} {' '.join(words)}. Write {example}."
        )
    return value


def read_words(words: list[str], hint: object) -> Any:
    """Return what words mean for a type; none mean true, and several are a list."""
    kinds = {kind_of(member): member for member in members_of(hint)}
    if not words:
        if bool in kinds or Any in kinds:
            return True
        raise TypeError(describe(hint))
    text = " ".join(words)
    if text.lower() in _NONE_WORDS and type(None) in kinds:
        return None
    sequence = next((member for kind, member in kinds.items() if kind in SEQUENCES), None)
    if sequence is None and Any in kinds and len(words) > 1:
        sequence = list
    if sequence is not None:
        if text.startswith(("[", "(", "{")):
            return conform(_read_yaml(f"[{text[1:-1]}]" if text.startswith("(") else text), hint)
        item = next((argument for argument in get_args(sequence) if argument is not Ellipsis), Any)
        if len(words) == 1 and item is not Any:
            words = [word for word in words[0].split(",") if word]  # as `val,test`
        return conform([read_words([word], item) for word in words], hint)
    # Several words are one value only within brackets.
    if len(words) > 1 and text[0] not in "[{":
        raise TypeError(describe(hint))
    if bool in kinds and text.lower() in _SWITCHES:
        return _SWITCHES[text.lower()]
    if int in kinds and _GROUPED.match(text):
        return conform(int(text), hint)
    if str in kinds and text[:1] in ("'", '"'):
        return conform(text, hint)
    try:
        return conform(_by_form(text), hint)
    except TypeError:
        return conform(text, hint)  # such as a name of digits


def _by_form(word: str) -> Any:
    """Return the value that a word has by its form: none, a boolean, a number, a quoted string, a list or mapping, else a string."""
    lowered = word.lower()
    if lowered in _NONE_WORDS:
        return None
    if lowered in ("true", "false"):
        return lowered == "true"
    if not _NO_NUMBER.match(word):
        for number in (int, float):
            with suppress(ValueError):
                return number(word)
    if word[:1] in ("[", "{") or (
        word[:1] in ("'", '"') and word[-1:] == word[:1] and len(word) > 1
    ):
        return _read_yaml(word)
    return word


def _read_yaml(text: str) -> object:
    try:
        return yaml.load(text, Loader=SettingsLoader)
    except yaml.YAMLError:
        raise TypeError("a list or a mapping in brackets") from None


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
        if not os.environ.get(ERROR_FILE) or first_failure(error)[1]:
            name = os.path.basename(sys.argv[0] or "train.py")
            print(
                f"usage: {name} [--config FILE ...] [--KEY VALUE ...]   (--help lists the keys)",
                file=sys.stderr,
            )
            print(f"{name}: error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None


# The help

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
    kinds = {name: type(value) for name, value in config.items() if isinstance(value, Config)}
    unknown = [name for name in sections if name not in (*kinds, "all")]
    if unknown:
        raise ValueError(
            f"Expected a section of the configuration behind --help. Received: {unknown[0]!r}.{did_you_mean(unknown[0], kinds)}"
        )
    lines = [_USAGE.format(name=os.path.basename(sys.argv[0] or "train.py"))]
    if not sections or "all" in sections:
        lines += [*_entries(config, nested=False), ""]
    # The program's own sections are shown in any case: they are few, and the ones that its user asks for.
    own = [
        name
        for name, kind in kinds.items()
        if kind is Section or not kind.__module__.startswith("danling.")
    ]
    listed = kinds.keys() if "all" in sections else sections or own
    short = []
    for name, kind in kinds.items():
        about = "" if kind is Section or of_chanfig(kind) else (inspect.getdoc(kind) or "")
        title = f"{name}: {about.splitlines()[0]}" if about else name
        if name in listed:
            lines += [title, *_entries(config[name], f"{name}."), ""]
        else:
            short.append(f"  {title}")
    if not sections:
        lines += ["sections, whose keys --help SECTION lists", *short]
    return "\n".join(lines)


def _entries(section: Config, prefix: str = "", *, nested: bool = True) -> Iterator[str]:
    """Yield the lines of help of each key of a section."""
    fields = fields_of(type(section))
    for name in (*fields, *(name for name in section if name not in fields)):
        field, value = fields.get(name), dict.get(section, name, MISSING)
        if isinstance(value, Config):
            if nested:
                yield from _entries(value, f"{prefix}{name}.")
            continue
        is_word = value is None or isinstance(value, bool)
        shown = str(value).lower() if is_word else value  # none, true or false, as they are typed
        default = "not set" if value is MISSING else f"default: {shown}"
        kind = "" if field is None else f"{describe(field.hint)}; "
        yield f"  --{prefix}{name}  ({kind}{default})"
        text = help_texts(type(section)).get(name, "")
        yield from textwrap.wrap(text, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)


@cache
def help_texts(cls: type) -> Mapping[str, str]:
    """Return the docstring under each field of a class and its bases, as one line each; empty where there is no source."""
    texts: dict[str, str] = {}
    for owner in owners_of(cls):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
        except (OSError, TypeError, SyntaxError):
            continue
        body = tree.body[0].body if tree.body and isinstance(tree.body[0], ast.ClassDef) else []
        for statement, follower in pairwise(body):
            # `key = 1` may have several targets, `key: int = 1` has one.
            targets = getattr(statement, "targets", [getattr(statement, "target", None)])
            value = follower.value if isinstance(follower, ast.Expr) else None
            text = value.value if isinstance(value, ast.Constant) else None
            if isinstance(text, str) and isinstance(targets[0], ast.Name):
                texts[targets[0].id] = " ".join(text.split())
    return types.MappingProxyType(texts)


# The environment

VARIABLE = "DANLING_SETTINGS"
"""The environment variable: one JSON object of settings by dotted key."""

_has_ended = False


def imposed() -> dict[str, object]:
    """Return the settings that the environment imposes on the runs of a program, empty where it imposes none.

    `danling audit` and other checks start a user's own program as a child process, and have it train in a scratch directory, from a given
    checkpoint, or on another layout. The program may read its settings from anywhere; so a runner puts those of `DANLING_SETTINGS` over
    the configuration that it was given, before it checks it.
    """
    text = os.environ.get(VARIABLE, "")
    try:
        settings = parse_json(text) if text else {}
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise ValueError(
            f'Expected {VARIABLE} to be a JSON object of settings, such as {{"seed": 1}}. Received: {text[:80]!r}. Unset it, or fix it.'
        )
    return settings


def impose(config: RunnerConfig) -> None:
    """Put the settings that the environment imposes over those of a configuration, and say in a warning which."""
    settings = imposed()
    if settings and _has_ended:
        logger.info(
            "What %s asks for has been trained: the program ends where it would begin another run.",
            VARIABLE,
        )
        raise SystemExit(0)
    for key, value in settings.items():
        config.set(key, value)
    if settings:
        logger.warning(
            "%s sets %s in the place of what this program has set.", VARIABLE, ", ".join(settings)
        )


def end_after() -> None:
    """Have a program on which settings are imposed end where it would begin another run: they are meant for one."""
    global _has_ended
    _has_ended = VARIABLE in os.environ

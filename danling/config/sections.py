"""Sections of a configuration: open ones that users own, closed ones that know their keys, and the keys that a class declares.

Both are `chanfig.Config` objects, with what would surprise taken out: merging copies, reading with a default creates nothing, and copies
and pickles keep the class and run no `__init__`. The only module that imports chanfig.
"""

from __future__ import annotations

import copy
import inspect
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Never

from chanfig import Config as Config
from chanfig import FlatDict
from chanfig.io import YamlLoader as YamlLoader
from chanfig.utils import Null as Null

from danling.utils.messages import did_you_mean, number_hint, warn_user
from danling.utils.plain import to_plain
from danling.utils.secrets import received

from .hints import conform

MISSING = object()
_PLACEHOLDER = re.compile(r"\$\{([^${}]+)\}")
_OF_CHANFIG = frozenset(
    {"indent", "separator", "convert_mapping", "fallback", "frozen", "parser", "default_factory"}
)
"""Attributes of a `chanfig.Config` that are no keys."""


EXPANDED = frozenset(
    {"workspace_root", "dir", "checkpoint_dir", "log_file", "resume", "pretrained"}
) | {
    *("wandb.dir", "profiling.trace_dir", "compile.precompile_artifact_dir"),
    *("audit.gradients.dir", "audit.gradients.weights"),
}
"""Keys of the library with a path, in which `~` and variables such as `$HOME` are replaced when they are set."""
_VARIABLE = re.compile(r"\$(\w+)")


def expanded(path: str) -> str:
    """Return a path with `~` and variables of the environment replaced.

    Raises:
        ValueError: If a variable is not set.
    """

    def value_of(found: re.Match[str]) -> str:
        if found[1] not in os.environ:
            raise ValueError(f"a path whose variables are set ({found[0]} is not)")
        return os.environ[found[1]]

    return _VARIABLE.sub(value_of, os.path.expanduser(path) if path.startswith("~") else path)


# Declared keys


@dataclass(frozen=True)
class Field:
    """One declared key: its resolved annotation, `Any` when it is unknown; its default, or `MISSING`; the class that declared it first."""

    name: str
    hint: Any
    default: Any
    owner: type

    @property
    def section(self) -> type[Config] | None:
        """The class of the section under the key, `None` when the key has a value."""
        return self.hint if isinstance(self.hint, type) and issubclass(self.hint, Config) else None

    @property
    def is_own(self) -> bool:
        """Whether this library declares the key, and not a user's class."""
        return self.owner.__module__.startswith("danling.")


def of_chanfig(kind: type) -> bool:
    """Whether chanfig defines a class."""
    return kind.__module__.partition(".")[0] == "chanfig"


def owners_of(cls: type) -> list[type]:
    """Return the classes whose bodies declare keys of a configuration class, the bases first."""
    return [
        owner
        for owner in reversed(cls.__mro__)
        if owner not in (object, dict) and not of_chanfig(owner)
    ]


@cache
def fields_of(cls: type) -> dict[str, Field]:
    """Return the keys that a configuration class and its bases declare, in order of declaration.

    Annotated class attributes are keys, and so are plain values assigned in the class body: without that, overriding a default without
    repeating its annotation would be ignored. The library's own hint of a key stays when a subclass changes the default.
    """
    fields: dict[str, Field] = {}
    for owner in owners_of(cls):
        texts = inspect.get_annotations(owner)
        hints = {
            name: _resolve_hint(text, owner)
            for name, text in texts.items()
            if not name.startswith("_") and "ClassVar" not in str(text)
        }
        assigned = [
            name
            for name, value in vars(owner).items()
            if name not in texts and _is_default(name, value)
        ]
        for name in (*hints, *assigned):
            known = fields.get(name)
            default = vars(owner).get(name, MISSING if known is None else known.default)
            if known is not None and (name not in hints or known.is_own):
                fields[name] = replace(known, default=default)
            else:
                fields[name] = Field(name, hints.get(name, Any), default, owner)
    return fields


def _is_default(name: str, value: object) -> bool:
    if name.startswith("_") or name.endswith("_") or name in _OF_CHANFIG:
        return False
    return not callable(value) and not hasattr(type(value), "__get__")


def _resolve_hint(text: object, owner: type) -> object:
    if not isinstance(text, str):
        return text
    names = {key: value for key, value in vars(owner).items() if isinstance(value, type)}
    try:
        # Not `typing.get_type_hints`, which fails for all keys where one name exists for type checkers only.
        return eval(text, vars(sys.modules[owner.__module__]), names)
    except Exception:
        return Any  # a name that exists for type checkers only


# Sections


class _Unlocked:
    """In the place of a `SettingsLock`, where a configuration is that of no runner: everything may be changed."""

    def check(self, key: str, value: object) -> None: ...
    def changed(self, key: str) -> None: ...
    def attach(self, value: object, prefix: str) -> None: ...
    def check_removal(self, key: str) -> None: ...


_UNLOCKED: tuple[Any, str] = (_Unlocked(), "")


class Section(Config):
    """An open section: any key is accepted, and attribute access creates nested sections, as in `chanfig.Config`.

    Keys that a subclass declares have its types; those without a default read as `None` until they are set. A subclass of the library
    names its place in the configuration: `class AxesConfig(ClosedSection, path="parallel.axes")`.
    """

    _path: ClassVar[str] = ""

    def __init_subclass__(cls, *, path: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if path is not None:
            cls._path = path

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(default_factory=self.section_type())
        self.merge(*args, **kwargs)

    def _copy_class_attributes(self) -> Any:
        """Fill in defaults; called by chanfig's constructor."""
        for name, field in fields_of(type(self)).items():
            if name not in self and (field.section or field.default is not MISSING):
                self._assign(
                    name,
                    {}
                    if field.section and field.default in (MISSING, None)
                    else fresh(field.default),
                )
        return self

    @staticmethod
    def _validate(obj: object) -> None:
        # chanfig evaluates annotations here, and fails on names that only type checkers know.
        return None

    @classmethod
    def section_type(cls) -> type[Section]:
        """Return the class of sections nested in this one."""
        return Section

    def set(self, name: object, value: object, convert_mapping: bool | None = None) -> None:
        """Set a key; dots reach into nested sections, which are created.

        Args:
            name: A key, or keys joined by dots.
            value: The value; a mapping becomes a section.
            convert_mapping: As in `chanfig.Config`; mappings are always converted here.

        Raises:
            TypeError: If the value is not of the type that is declared for the key.
            ValueError: If it is out of bounds, the key is unknown or runs through a value, or the configuration is frozen.
        """
        if self.__dict__.get("frozen", False):
            raise ValueError(
                f"Expected a configuration that is not frozen. Received: {received(name, value)}. Call defrost()."
            )
        if not isinstance(name, str) or "." not in name or dict.__contains__(self, name):
            lock, prefix = self.__dict__.get("_lock", _UNLOCKED)
            lock.check(f"{prefix}{name}", value)
            self._assign(name, value)
            lock.changed(f"{prefix}{name}")
            return
        head, rest = name.split(".", 1)
        self._check_key(head, received(f".{rest}", value))
        if dict.get(self, head) is None:
            self._assign(head, {})
        child = dict.__getitem__(self, head)
        if not isinstance(child, MutableMapping):
            raise ValueError(
                f"Expected {self._join(head)!r} to be a section. Received: {received(f'{self._join(head)}.{rest}', value)}, "
                f"where {received(self._join(head), child)}."
            )
        child[rest] = value

    def _check_key(self, name: object, received: str) -> None:
        """Refuse a name that is no key of this section."""

    def _assign(self, name: Any, value: Any) -> None:
        self._check_key(name, received(name, value).removeprefix(str(name)))
        field = fields_of(type(self)).get(name)
        if field is not None:
            value = self._fit(field, value)
        else:
            value = self._adopt(value)
            if isinstance(name, str) and hides_method(type(self), name):
                warn_user(
                    f"The key {self._join(name)!r} has the name of a method: read it as config[{name!r}].",
                    UserWarning,
                )
        self._store(name, value)

    def _fit(self, field: Field, value: object) -> Any:
        """Return a value as the key's declaration has it."""
        name = self._join(field.name)
        if field.section:
            if not isinstance(value, Mapping):
                example = section_example(field.section, value)
                raise TypeError(
                    f"Expected {name!r} to be a section, a mapping of keys. Received: {received(name, value)}. Write {name}={example}."
                )
            return value if isinstance(value, field.section) else field.section(value)
        try:
            fitted = conform(value, field.hint)
            is_path = field.is_own and name in EXPANDED and isinstance(fitted, str)
            return expanded(fitted) if is_path else fitted
        except (TypeError, ValueError) as error:
            raise type(error)(
                f"Expected {name} to be {error}. Received: {received(name, value)} ({type(value).__name__})."
                f"{number_hint(value)}"
            ) from None

    def _adopt(self, value: object) -> Any:
        """Return a value with its mappings as sections, at any depth."""
        if isinstance(value, Mapping) and not isinstance(value, Config):
            return self.section_type()(value)
        if isinstance(value, (list, tuple)) and any(
            isinstance(item, (Mapping, list, tuple)) for item in value
        ):
            items = [self._adopt(item) for item in value]
            return items if isinstance(value, list) else tuple(items)
        return value

    def _store(self, name: object, value: object) -> None:
        dict.__setitem__(self, name, value)
        lock, prefix = self.__dict__.get("_lock", _UNLOCKED)
        lock.attach(value, f"{prefix}{name}.")
        if not self.__dict__.get("default_factory"):
            refuse_absent_keys(value)
        # Also an instance attribute, so that reading costs no Python call.
        if isinstance(name, str) and not hides_method(type(self), name):
            self.__dict__[name] = value

    def _join(self, name: object) -> str:
        return f"{self._path}.{name}" if self._path else str(name)

    def get(self, name: object, default: object = None) -> Any:  # type: ignore[override]
        """Return the value of a key, or `default`; nothing is created.

        Args:
            name: A key, or keys joined by dots.
            default: What an absent key gives.
        """
        if dict.__contains__(self, name):
            return dict.__getitem__(self, name)
        if not isinstance(name, str) or "." not in name:
            return self.__missing__(name) if default is Null else default
        head, rest = name.split(".", 1)
        if default is not Null:
            child = dict.get(self, head)
            return child.get(rest, default) if isinstance(child, Mapping) else default
        # So chanfig reads `config[name]`: an absent section is made, and an absent key may be an error.
        child = self[head]
        if not isinstance(child, Mapping):
            raise KeyError(f"{self._join(name)}: {self._join(head)!r} is a value, not a section")
        return child[rest]

    def __missing__(self, name: Any) -> Any:  # type: ignore[override]
        field = fields_of(type(self)).get(name)
        if field is not None:
            return None if field.default is MISSING else field.default
        factory = self.__dict__.get("default_factory")
        # Private names are asked for by notebooks, debuggers and copy protocols, never by a user.
        if (
            not factory
            or self.__dict__.get("frozen")
            or (isinstance(name, str) and name.startswith("_"))
        ):
            options = [*fields_of(type(self)), *map(str, self)]
            optional = "" if factory else f" get({name!r}) reads a key that may be absent."
            raise KeyError(
                f"no key {self._join(name)!r}.{did_you_mean(str(name), options)}{optional}"
            )
        self._store(name, factory())
        return dict.__getitem__(self, name)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.get(name, Null)
        except KeyError as error:
            raise AttributeError(f"{type(self).__name__} has {error.args[0]}") from None

    def setdefault(
        self, name: object, value: object = None, convert_mapping: bool | None = None
    ) -> Any:
        """Return the value of a key, which is set to `value` first where it is absent."""
        if name not in self:
            self.set(name, value)
        return self.get(name)

    def delete(self, name: Any) -> None:
        """Delete a key; dots reach into nested sections."""
        self._check_removal(name)
        super().delete(name)

    def pop(self, name: Any, default: Any = Null) -> Any:
        """Delete a key and return its value, or `default` where it is absent."""
        self._check_removal(name)
        return super().pop(name, default)

    def popitem(self) -> tuple[Any, Any]:
        """Delete the last key and return it with its value."""
        name = next(reversed(list(self)), None)
        if name is None:
            raise KeyError("no key left")
        return name, self.pop(name)

    def clear(self) -> None:
        """Delete all keys."""
        for name in list(self):
            self.delete(name)

    def _check_removal(self, name: object) -> None:
        """Refuse to remove a key of a locked configuration."""
        section: Any = self
        *path, last = str(name).split(".")
        for part in path:
            section = dict.get(section, part) if isinstance(section, Section) else None
        if isinstance(section, Section) and dict.__contains__(section, last):
            lock, prefix = section.__dict__.get("_lock", _UNLOCKED)
            lock.check_removal(f"{prefix}{last}")

    def _instance_attrs(self) -> dict[str, Any]:
        # Copies and pickles are configurations of other runs: they may be changed.
        return {name: value for name, value in super()._instance_attrs().items() if name != "_lock"}

    def merge(self, *args: Any, overwrite: bool = True, **kwargs: Any) -> Any:
        """Merge mappings into this section, nested ones key by key; nothing is shared with what was merged.

        Args:
            *args: Mappings, or iterables of pairs.
            overwrite: Whether keys that exist are set.
            **kwargs: More keys.

        Returns:
            This section.
        """
        for other in (*args, kwargs):
            # Pairs one by one: a name may come twice, and its sections are then merged with each other.
            pairs = other.items() if isinstance(other, Mapping) else other or ()
            for name, value in pairs:
                existing = Section.get(self, name, MISSING)
                if isinstance(existing, FlatDict) and isinstance(value, Mapping):
                    existing.merge(fresh(dict(value)), overwrite=overwrite)
                elif overwrite or existing is MISSING:
                    self.set(name, fresh(value))
        return self

    update = __ior__ = merge

    def __or__(self, other: object) -> Any:
        return copy.deepcopy(self).merge(other) if isinstance(other, Mapping) else NotImplemented

    def interpolate(self, interpolators: object = None) -> Any:
        """Replace `${section.key}` in strings by the value of that key, once; a whole string becomes the value itself.

        Args:
            interpolators: Where keys are looked up; this configuration by default.

        Raises:
            ValueError: If a key is unknown or refers to itself.
        """
        root = self if interpolators is None else interpolators
        for name, value in list(self.items()):
            if isinstance(value, Section):
                value.interpolate(root)
            elif isinstance(value, str) and _PLACEHOLDER.search(value):
                self.set(name, _interpolated(value, root, (self._join(name),)))
        return self

    def __deepcopy__(self, memo: Any = None) -> Any:
        return _rebuild(type(self), copy.deepcopy(dict(self.items()), memo), self._instance_attrs())

    def __copy__(self) -> Any:
        return copy.deepcopy(self)  # sections are never shared

    def clone(self, memo: Any = None) -> Any:
        """Return an independent copy that may be changed even when this configuration is frozen."""
        return copy.deepcopy(self, memo).defrost()

    def __reduce_ex__(self, protocol: object) -> Any:
        return _rebuild, (type(self), dict(self.items()), self._instance_attrs())

    def plain(self) -> dict[str, Any]:
        """Return the contents as dictionaries, lists, strings, numbers, booleans and `None`."""
        result: dict[str, Any] = to_plain(self, self._path)
        return result

    def __repr__(self) -> str:
        return FlatDict.__repr__(self)


class OpenSection(Section):
    """A section of the library that takes further keys, such as the arguments of an optimizer."""

    def _fit(self, field: Field, value: object) -> Any:
        # A placeholder is checked once the value is there that replaces it.
        if value is None or (isinstance(value, str) and _PLACEHOLDER.search(value)):
            return value
        return self._adopt(super()._fit(field, value))


class ClosedSection(Section):
    """A section whose keys are all declared by its class: an unknown key is an error that names the nearest one."""

    if TYPE_CHECKING:
        # So that type checkers, too, refuse to set a key that is not declared.
        def __setattr__(self, name: str, value: Never) -> None: ...

    def _check_key(self, name: object, received: str) -> None:
        options = list(fields_of(type(self)))
        if name not in options:
            raise ValueError(
                f"Expected a key of {self._path!r} ({', '.join(options)}). Received: {self._join(name)}{received}."
                f"{did_you_mean(str(name), options)}"
            )

    def __missing__(self, name: Any) -> Any:  # type: ignore[override]
        field = fields_of(type(self)).get(name)
        if field is not None and field.default is not MISSING:
            return field.default
        raise KeyError(
            f"no key {self._join(name)!r}.{did_you_mean(str(name), fields_of(type(self)))}"
        )


@cache
def hides_method(cls: type, name: str) -> bool:
    """Whether a key of this name would be hidden behind a method, a property or an attribute that chanfig uses."""
    value = getattr(cls, name, None)
    return name in _OF_CHANFIG or callable(value) or isinstance(value, property)


def section_example(kind: type[Config], value: object) -> str:
    """Return a section as a program writes it, for one that was given a single value."""
    fields = fields_of(kind)
    switch = next((name for name in ("enabled", "enable") if name in fields), None)
    if isinstance(value, bool) and switch is not None:
        return f"{{{switch!r}: {value}}}"
    if isinstance(value, str) and "type" in fields:
        return f"{{'type': {value!r}}}"
    name = next(iter(fields), "key")
    return f"{{{name!r}: ...}}"


def sections_in(value: object, prefix: str = "") -> Iterator[tuple[Section, str]]:
    """Yield a section and all that are within it, also in lists, with the prefix of their keys."""
    if isinstance(value, Section):
        yield value, prefix
    inner: Any = ()
    if isinstance(value, Mapping):
        inner = [(item, f"{prefix}{name}.") for name, item in value.items()]
    elif isinstance(value, (list, tuple)):
        inner = [(item, prefix) for item in value]
    for item, its_prefix in inner:
        yield from sections_in(item, its_prefix)


def refuse_absent_keys(value: object) -> None:
    """Have absent keys of all sections in a value, also in lists, raise an error from now on when they are read; they may be set."""
    for section, _ in sections_in(value):
        section.__dict__["default_factory"] = None


def sections_that_make_keys(value: object) -> list[tuple[Section, Any]]:
    """Return the sections in a value, also in lists, with what makes their absent keys, for `make_absent_keys`."""
    return [(section, section.__dict__.get("default_factory")) for section, _ in sections_in(value)]


def make_absent_keys(sections: Iterable[tuple[Section, Any]]) -> None:
    """Take back `refuse_absent_keys`."""
    for section, factory in sections:
        section.__dict__["default_factory"] = factory


def fresh(value: Any) -> Any:
    """Return `value` with its containers copied, so that a configuration shares none with its source."""
    if isinstance(value, FlatDict) and not of_chanfig(type(value)) and type(value) is not Section:
        return copy.deepcopy(value)
    if isinstance(value, Mapping):
        return {name: fresh(item) for name, item in value.items()}
    return type(value)(map(fresh, value)) if type(value) in (list, tuple, set) else value


def _rebuild(cls: type[Section], items: dict[Any, Any], attributes: dict[str, Any]) -> Section:
    section = cls.__new__(cls)
    section.__dict__.update(attributes)
    for name, value in items.items():
        section._store(name, value)
    return section


def _interpolated(text: str, root: Any, seen: tuple[str, ...]) -> Any:
    def look_up(found: re.Match[str]) -> Any:
        name = found.group(1)
        value = root.get(name, MISSING)
        if value is MISSING or name in seen:
            reason = "a key that exists" if value is MISSING else "no circle of references"
            raise ValueError(
                f"Expected {reason} in ${{{name}}} of {seen[0]!r}.{did_you_mean(name, map(str, root.all_keys()))}"
            )
        return _interpolated(value, root, (*seen, name)) if isinstance(value, str) else fresh(value)

    whole = _PLACEHOLDER.fullmatch(text)
    return look_up(whole) if whole else _PLACEHOLDER.sub(lambda found: str(look_up(found)), text)

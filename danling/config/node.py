"""Sections of a configuration: the open ones that users own, and the closed ones that know their keys.

Both are `chanfig.Config` objects, with what would surprise taken out: merging copies, reading with a default creates nothing, copies and
pickles keep the class and run no `__init__`, and the hash is the same in every process.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, MutableMapping
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import Never

from danling.utils.messages import did_you_mean, warn_user
from danling.utils.plain import to_plain

from .fields import MISSING, Config, Field, FlatDict, Null, conform, fields_of, of_chanfig
from .identity import digest

_INTERNAL = frozenset(
    {
        "indent",
        "separator",
        "convert_mapping",
        "fallback",
        "frozen",
        "parser",
        "default_factory",
        "_received",
        "_given",
        "_file",
        "_command_line",
        "_purpose",
    }
)
_PLACEHOLDER = re.compile(r"\$\{([^${}]+)\}")


class Section(Config):
    """An open section: any key is accepted, and attribute access creates nested sections, as in `chanfig.Config`.

    Keys that a subclass declares have its types; those without a default read as `None` until they are set.
    """

    _path: ClassVar[str] = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(default_factory=self.section_type())
        self.merge(*args, **kwargs)

    @classmethod
    def section_type(cls) -> type[Section]:
        """Return the class of sections nested in this one."""
        return Section

    # Storage

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
                f"Expected a configuration that is not frozen. Received: {name}={value!r}. Call defrost()."
            )
        if not isinstance(name, str) or "." not in name or dict.__contains__(self, name):
            self._assign(name, value)
            return
        head, rest = name.split(".", 1)
        self._check_key(head, f".{rest}={value!r}")
        child = dict.get(self, head)
        if child is None:
            self._assign(head, {})
            child = dict.__getitem__(self, head)
        if not isinstance(child, MutableMapping):
            raise ValueError(
                f"Expected {self._join(head)!r} to be a section. Received: {self._join(head)}.{rest}={value!r}, where "
                f"{self._join(head)}={child!r}."
            )
        child[rest] = value

    def _check_key(self, name: object, received: str) -> None:
        """Refuse a name that is no key of this section."""

    def _assign(self, name: Any, value: Any) -> None:
        self._check_key(name, f"={value!r}")
        field = fields_of(type(self)).get(name)
        if field is not None:
            self._store(name, self._fit(field, value))
            return
        if isinstance(name, str) and hides_method(type(self), name):
            warn_user(
                f"The key {self._join(name)!r} has the name of a method: read it as config[{name!r}].", UserWarning
            )
        self._store(name, self._adopt(value))

    def _fit(self, field: Field, value: object) -> Any:
        """Return a value as the key's declaration has it."""
        name = self._join(field.name)
        if field.section:
            if not isinstance(value, Mapping):
                raise TypeError(f"Expected {name!r} to be a section, a mapping of keys. Received: {name}={value!r}.")
            return value if isinstance(value, field.section) else field.section(value)
        try:
            return conform(value, field.hint)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"Expected {name} to be {error}. Received: {name}={value!r} ({type(value).__name__}).") from None

    def _store(self, name: object, value: object) -> None:
        dict.__setitem__(self, name, value)
        # Also an instance attribute, so that reading costs no Python call.
        if isinstance(name, str) and name not in _INTERNAL and not hides_method(type(self), name):
            self.__dict__[name] = value

    def _adopt(self, value: object) -> Any:
        if isinstance(value, Mapping) and not isinstance(value, Config):
            return self.section_type()(value)
        if isinstance(value, (list, tuple)) and any(isinstance(item, (Mapping, list, tuple)) for item in value):
            items = [self._adopt(item) for item in value]
            return items if isinstance(value, list) else tuple(items)
        return value

    def _join(self, name: object) -> str:
        return f"{self._path}.{name}" if self._path else str(name)

    # Reading

    def get(self, name: object, default: object = None) -> Any:  # type: ignore[override]
        """Return the value of a key, or `default`; nothing is created.

        Args:
            name: A key, or keys joined by dots.
            default: What an absent key gives.
        """
        if dict.__contains__(self, name):
            return dict.__getitem__(self, name)
        node: Any = self
        if default is not Null:
            for part in name.split(".") if isinstance(name, str) else (name,):
                if not isinstance(node, Mapping) or part not in node:
                    return default
                node = node[part]
            return node
        if not isinstance(name, str) or "." not in name:
            return self.__missing__(name)
        head, rest = name.split(".", 1)
        node = self[head]
        if not isinstance(node, Mapping):
            raise KeyError(f"{self._join(name)}: {self._join(head)!r} is a value, not a section")
        return node[rest]

    def __missing__(self, name: object, default: object = Null) -> Any:
        field = fields_of(type(self)).get(name)  # type: ignore[call-overload]
        if field is not None:
            return None if field.default is MISSING else field.default
        if default is not Null:
            self._store(name, default)
            return default
        factory = self.__dict__.get("default_factory")
        # Private names are asked for by notebooks, debuggers and copy protocols, never by a user.
        if not factory or self.__dict__.get("frozen") or (isinstance(name, str) and name.startswith("_")):
            options = [*fields_of(type(self)), *map(str, self)]
            raise KeyError(f"no key {self._join(name)!r}.{did_you_mean(str(name), options)}")
        self._store(name, factory())
        return dict.__getitem__(self, name)

    def __getattr__(self, name: str) -> Any:
        if dict.__contains__(self, name):
            return dict.__getitem__(self, name)
        try:
            return self.__missing__(name)
        except KeyError as error:
            raise AttributeError(f"{type(self).__name__} has {error.args[0]}") from None

    def setdefault(self, name: object, value: object = None, convert_mapping: bool | None = None) -> Any:
        """Return the value of a key, which is set to `value` first where it is absent."""
        if name not in self:
            self.set(name, value)
        return self.get(name)

    # Merging

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
            for name, value in other.items() if isinstance(other, Mapping) else other or ():
                existing = Section.get(self, name, MISSING)
                if isinstance(existing, FlatDict) and isinstance(value, Mapping):
                    existing.merge(fresh(dict(value)), overwrite=overwrite)
                elif overwrite or existing is MISSING:
                    self.set(name, fresh(value))
        return self

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Merge mappings into this section."""
        self.merge(*args, **kwargs)

    def __or__(self, other: object) -> Any:
        return copy.deepcopy(self).merge(other) if isinstance(other, Mapping) else NotImplemented

    def __ior__(self, other: object) -> Any:
        return self.merge(other)

    # Defaults and references

    def _copy_class_attributes(self) -> Any:
        for field in fields_of(type(self)).values():
            if field.name in self or (field.default is MISSING and not field.section):
                continue
            self._assign(field.name, field.section() if field.section else fresh(field.default))
            if field.section and isinstance(field.default, Mapping):
                self.merge({field.name: field.default})
        return self

    @staticmethod
    def _validate(obj: object) -> None:
        # chanfig evaluates annotations here, and fails on names that only type checkers know.
        return None

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
                self.set(name, _resolve(value, root, (self._join(name),)))
        return self

    # Copies

    def _internals(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in _INTERNAL & self.__dict__.keys() - {"parser"}}

    def __deepcopy__(self, memo: Any = None) -> Any:
        items = {name: copy.deepcopy(value, memo) for name, value in self.items()}
        return _rebuild(type(self), items, self._internals())

    def __copy__(self) -> Any:
        return copy.deepcopy(self)

    def copy(self) -> Any:
        """Return an independent copy: sections are never shared."""
        return copy.deepcopy(self)

    def clone(self, memo: Any = None) -> Any:
        """Return an independent copy that may be changed even when this configuration is frozen."""
        return copy.deepcopy(self, memo).defrost()

    def __reduce_ex__(self, protocol: object) -> Any:
        return _rebuild, (type(self), dict(self.items()), self._internals())

    # Plain values

    def plain(self) -> dict[str, Any]:
        """Return the contents as dictionaries, lists, strings, numbers, booleans and `None`."""
        result: dict[str, Any] = to_plain(self, self._path)
        return result

    def __hash__(self) -> int:  # type: ignore[override]
        return int(digest(self.plain()), 16)

    def __repr__(self) -> str:
        return FlatDict.__repr__(self)


class OpenSection(Section):
    """A section of the library that takes further keys, such as the arguments of an optimizer."""

    def _fit(self, field: Field, value: object) -> Any:
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
            where = f"a key of {self._path!r}" if self._path else "a key of the configuration"
            raise ValueError(
                f"Expected {where} ({', '.join(options)}). Received: {self._join(name)}{received}."
                f"{did_you_mean(str(name), options)}"
            )

    def __missing__(self, name: Any, default: object = Null) -> Any:
        field = fields_of(type(self)).get(name)
        if field is not None and field.default is not MISSING:
            return field.default
        raise KeyError(f"no key {self._join(name)!r}.{did_you_mean(str(name), fields_of(type(self)))}")


@cache
def hides_method(cls: type, name: str) -> bool:
    """Whether a key of this name would be hidden behind a method, a property or an internal attribute of the class."""
    value = getattr(cls, name, None)
    return name in _INTERNAL or callable(value) or isinstance(value, property)


def fresh(value: Any) -> Any:
    """Return `value` with its containers copied, so that a configuration shares none with its source."""
    if isinstance(value, FlatDict) and not of_chanfig(type(value)) and type(value) is not Section:
        return copy.deepcopy(value)
    if isinstance(value, Mapping):
        return {name: fresh(item) for name, item in value.items()}
    return type(value)(map(fresh, value)) if type(value) in (list, tuple, set) else value


def _rebuild(cls: type[Section], items: dict[Any, Any], internal: dict[str, Any]) -> Section:
    section = cls.__new__(cls)
    section.__dict__.update(internal)
    for name, value in items.items():
        section._store(name, value)
    return section


def _resolve(text: str, root: object, seen: tuple[str, ...]) -> Any:
    whole = _PLACEHOLDER.fullmatch(text)
    if whole:
        return _look_up(whole.group(1), root, seen)
    return _PLACEHOLDER.sub(lambda match: str(_look_up(match.group(1), root, seen)), text)


def _look_up(name: str, root: Any, seen: tuple[str, ...]) -> Any:
    value = root.get(name, MISSING)
    if value is MISSING or name in seen:
        reason = "a key that exists" if value is MISSING else "no circle of references"
        raise ValueError(
            f"Expected {reason} in ${{{name}}} of {seen[0]!r}.{did_you_mean(name, map(str, root.all_keys()))}"
        )
    return _resolve(value, root, (*seen, name)) if isinstance(value, str) else fresh(value)

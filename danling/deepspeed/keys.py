"""Keys of a DeepSpeed configuration that DeepSpeed does not know, and values that it does not take, named by their path.

Which keys there are differs from version to version of DeepSpeed, so none are listed here: its own reader is given a configuration
that notes what it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from danling.utils.messages import did_you_mean

_SECTIONS = ("zero_optimization", "bf16", "bfloat16", "fp16", "torch_autocast", "optimizer", "scheduler", "data_types")
_READ_LATER = (
    "autotuning",
    "checkpoint",
    "compression_training",
    "curriculum_learning",
    "data_efficiency",
    "elasticity",
)
"""Sections of which the reader looks at a part only, as other parts of them ask for it."""


class _Noted(dict[str, Any]):
    """A mapping that remembers which keys it was asked for."""

    def __init__(self, values: Mapping[str, object]) -> None:
        super().__init__({key: _Noted(v) if isinstance(v, Mapping) else v for key, v in values.items()})
        self.asked: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        # Without a method of its own, a call with `**section` would take the values past `__getitem__`.
        return super().__iter__()

    def __getitem__(self, key: str) -> object:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: object = None) -> Any:
        """Return a value, or the default."""
        self.asked.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        """Return the keys as a view whose `in` counts as asking."""
        return _NotedKeys(self)


class _NotedKeys:
    def __init__(self, values: _Noted) -> None:
        self._values = values

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def check_keys(given: Mapping[str, object], settings: Mapping[str, object]) -> None:
    """Raise a `ValueError` that names what DeepSpeed would ignore or refuse. Imports DeepSpeed; may be called on one rank."""
    for name in _SECTIONS:
        if name in given and not isinstance(given[name], Mapping):
            raise ValueError(
                f"Expected deepspeed.{name} to be a section. Received: deepspeed.{name}={given[name]!r}. Write its keys below it."
            )
    # Follows from the other sizes and from the number of ranks, which the reader learns only when the engine is built.
    noted = _Noted({key: value for key, value in settings.items() if key != "train_batch_size"})
    try:
        import_module("deepspeed.runtime.config").DeepSpeedConfig(noted)
    except Exception as error:
        raise ValueError(_refused(error, given)) from error
    for path, known in _unknown(given, noted):
        raise ValueError(
            f"Expected a key that DeepSpeed {import_module('deepspeed').__version__} knows. Received: {'.'.join(path)}, which it would "
            f"ignore.{did_you_mean(path[-1], known)} Correct it, or leave it out."
        )


def _unknown(given: Mapping[str, object], noted: _Noted) -> Iterator[tuple[Sequence[str], set[str]]]:
    for key, value in given.items():
        if key not in noted.asked:
            yield ("deepspeed", key), noted.asked
        inner = dict.get(noted, key)
        # A section that nothing was asked of was handed on as a whole, and is checked by what takes it.
        if isinstance(value, Mapping) and key not in _READ_LATER and isinstance(inner, _Noted) and inner.asked:
            for name in value:
                if name not in inner.asked:
                    yield ("deepspeed", key, name), inner.asked


def _refused(error: Exception, given: Mapping[str, object]) -> str:
    """Return what to say of an error of DeepSpeed's reader, which names a place within a section at the most."""
    problems = getattr(error, "errors", None)
    if not callable(problems):
        return (
            f"Expected a configuration that DeepSpeed takes. Received: {type(error).__name__}: {error}. Look at the keys under "
            "`deepspeed`."
        )
    first = problems()[0]
    place = tuple(map(str, first["loc"]))
    path = ".".join(("deepspeed", *_section_of(place, given), *place))
    if first["type"] == "extra_forbidden":
        options = _fields(error, place)
        return f"Expected a key that DeepSpeed knows. Received: {path}={first['input']!r}.{did_you_mean(place[-1], options)} Correct it."
    return f"Expected a value of {path} that DeepSpeed takes. Received: {path}={first['input']!r}. {first['msg']}."


def _section_of(place: Sequence[str], given: Mapping[str, object]) -> tuple[str, ...]:
    def leads(values: object) -> bool:
        for name in place:
            if not isinstance(values, Mapping) or name not in values:
                return False
            values = values[name]
        return True

    if leads(given):
        return ()
    return next(((name,) for name, section in given.items() if leads(section)), ())


def _fields(error: Exception, place: Sequence[str]) -> list[str]:
    """Return the names that the section of a refused key has, as far as its model can be found."""
    title = str(getattr(error, "title", ""))
    modules = ("runtime.zero.config", "runtime.precision_config", "runtime.config", "monitor.config", "compile.config")
    for module in modules:
        model: Any = getattr(import_module(f"deepspeed.{module}"), title, None)
        for name in place[:-1]:
            model = _nested(model, name)
        if hasattr(model, "model_fields"):
            return list(model.model_fields)
    return []


def _nested(model: object, name: str) -> object:
    field = getattr(model, "model_fields", {}).get(name)
    options = getattr(field.annotation, "__args__", (field.annotation,)) if field is not None else ()
    return next((option for option in options if hasattr(option, "model_fields")), None)

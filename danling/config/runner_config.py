"""The configuration of a run."""

from __future__ import annotations

import copy
import json
import math
import os
import re
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from danling.utils.messages import did_you_mean, warn_user
from danling.utils.plain import PlainDumper, finite, to_plain
from danling.utils.plain import flatten as flattened
from danling.utils.process import in_notebook
from danling.utils.secrets import hide_secrets, without_secrets

from . import identity
from .checks import check_sections, idle_keys_of_stack
from .inputs import (
    SettingsLoader,
    as_mapping,
    help_text,
    read_settings,
    refuse_negation,
    set_option,
    split_options,
    usage_errors,
)
from .names import (
    ALIASES,
    FILE_SECTIONS,
    OLDER_KEYS,
    closest_typo,
    place_of,
    refusal,
    warn_elsewhere,
    warn_older,
)
from .schema import TopLevelConfig
from .sections import Field, Section, fields_of

_CLOCK = re.compile(r"(?:(\d+):)?(\d{1,2}):(\d{1,2}(?:\.\d+)?)\Z")


class RunnerConfig(TopLevelConfig):
    """All settings of a run: the library's own keys, and any of the user's.

    The library's sections are closed: an unknown key in them, or a top-level key one slip away from a known one, is an error that
    names the nearest. Other top-level keys that are set in code are the user's: `config.model.width = 64` makes the section `model`.
    In files and on the command line a top-level key must be declared by a class, or set in code before. A name that means a key of
    the library to other trainers, or a key of `optim`, `scheduler`, `ema` or `dataloader` (`lr`), is refused with its place unless a
    class declares it.

    Subclasses declare keys with annotations and defaults, or set them in `__init__` after `super().__init__(...)`; a docstring
    under an annotated key is its help text. Arguments of the constructor override what `__init__` sets.

    Args:
        settings: A mapping, another configuration, the path of a YAML, JSON or TOML file, or what `argparse` returns, whose parser
            declares its keys; nothing is shared with it.
        **kwargs: More settings; keys may be dotted in a mapping.

    Raises:
        ValueError: If a key is unknown, or a value is not among its choices or out of bounds.
        TypeError: If a value is not of its key's type.

    Examples:
        >>> config = RunnerConfig({"checkpoint.interval": 5}, epochs=3)
        >>> config.model.width = 64
        >>> config.checkpoint.interval, config["model.width"]
        (5, 64)
    """

    if TYPE_CHECKING:
        # Any key may be the user's own.
        def __setattr__(self, name: str, value: Any) -> None: ...

    def __init__(self, settings: object = None, /, **kwargs: Any) -> None:
        super().__init__()
        file = settings if isinstance(settings, (str, os.PathLike)) else None
        given = as_mapping(settings)
        if isinstance(settings, (Namespace, RunnerConfig)):
            self.declare(given)
        # The `__init__` of a subclass has yet to set the user's own keys that a file, or an argument, may name.
        known = fields_of(type(self)).keys() | OLDER_KEYS.keys()
        own_init = type(self).__init__ is not RunnerConfig.__init__

        def is_early(name: object, value: object, *, of_file: bool) -> bool:
            if name in known:
                return True
            if of_file and not isinstance(value, Mapping):
                return False
            return not own_init or place_of(str(name), RunnerConfig, in_code=True) is None

        of_file = file is not None
        self._merge_settings(
            {key: value for key, value in given.items() if is_early(key, value, of_file=of_file)},
            file,
        )
        self.merge(
            {key: value for key, value in kwargs.items() if is_early(key, value, of_file=False)}
        )
        # From here to `__post_init__`, a subclass's `__init__` declares what it sets.
        self.__dict__["_given"] = (file, given, kwargs)

    def __post_init__(self, *args: Any, **kwargs: Any) -> None:
        """Put what was passed to the constructor above what a subclass's `__init__` set after `super().__init__(...)`.

        Raises:
            ValueError: If a file has a key that neither the library nor the class declares.
        """
        file, given, more = self.__dict__.pop("_given")
        if file is not None:
            self._refuse_undeclared(given, file)
        if file is not None or type(self).__init__ is not RunnerConfig.__init__:
            self._merge_settings(given, file)
            self.merge(more)

    # Keys: the library's are declared, the user's are any other

    def declare(self, names: Iterable[str]) -> None:
        """Accept names as keys of the user's own, also those that other trainers have."""
        for name in (name.partition(".")[0] for name in names):
            is_known = name in self or name in OLDER_KEYS
            if not is_known and closest_typo(name, fields_of(RunnerConfig)) is None:
                self._store(name, None)

    def _assign(self, name: Any, value: Any) -> None:
        if name in OLDER_KEYS:
            warn_older(name)
            self.set(OLDER_KEYS[name], value)
            return
        if name in FILE_SECTIONS and isinstance(value, (str, os.PathLike)):
            # Users of these libraries keep their configuration in a file.
            value = read_settings(value)
        super()._assign(name, value)

    def _fit(self, field: Field, value: object) -> Any:
        fitted = super()._fit(field, value)
        # A key of the user's that is annotated as a mapping becomes a section, as any other mapping does.
        return fitted if field.is_own else self._adopt(fitted)

    def _check_key(self, name: object, received: str) -> None:
        if name in fields_of(RunnerConfig) or name in OLDER_KEYS:
            return
        slip = closest_typo(name, fields_of(RunnerConfig))
        if slip:
            raise ValueError(
                f"Expected a key of the configuration, or your own key with a name less close to {slip!r}. Received: "
                f"{name}{received}. Did you mean {slip!r}?"
            )
        is_known = (
            name in fields_of(type(self))
            or dict.__contains__(self, name)
            # Set while the `__init__` of a subclass runs, which so declares what it sets.
            or "_given" in self.__dict__
        )
        if not is_known and place_of(str(name), RunnerConfig, in_code=True) is not None:
            raise ValueError(
                refusal(str(name), f"{name}{received}", RunnerConfig, (), self.secret_keys or ())
            )
        if not is_known:
            warn_elsewhere(str(name))

    def __missing__(self, name: Any) -> Any:  # type: ignore[override]
        if name in OLDER_KEYS:
            warn_older(name)
            return self[OLDER_KEYS[name]]
        if name in fields_of(RunnerConfig):
            return super().__missing__(name)
        slip = closest_typo(name, fields_of(RunnerConfig))
        if slip:
            raise KeyError(f"no key {name!r}. Did you mean {slip!r}?")
        if name in fields_of(type(self)):
            raise KeyError(
                f"no value for its key {name!r}: the class gives no default, so it must be set"
            )
        place = place_of(str(name), RunnerConfig, in_code=True)
        if place is not None:
            raise KeyError(f"no key {name!r}. Its place is {place}.")
        return Section.__missing__(self, name)

    def _refuse_undeclared(self, settings: Mapping[Any, Any], source: object) -> None:
        """Refuse top-level keys of a file, or of an option of the command line, that neither a class declares nor code has set before."""
        known = {*fields_of(type(self)), *OLDER_KEYS, *self}
        secrets = [*(self.secret_keys or ()), *(settings.get("secret_keys") or ())]
        for name, value in settings.items():
            head, dot, _ = str(name).partition(".")
            if head in known:
                continue
            text = repr(without_secrets({head: value}, secrets).get(head, "..."))
            received = f"{name}={text if len(text) <= 60 else text[:57] + '...'} in {source}"
            if isinstance(source, str) and source.startswith("--"):
                received = source
            # Sections of the user's need no declaration.
            if not dot and not isinstance(value, Mapping):
                raise ValueError(refusal(head, received, RunnerConfig, known, secrets))
            slip = closest_typo(
                head, [key for key in known if isinstance(dict.get(self, key), Mapping)]
            )
            if slip:
                received = hide_secrets(received, secrets)
                raise ValueError(
                    f"Expected keys that are read. Received: {received}. Did you mean {slip!r}?"
                )

    # Checks

    def validate(self) -> None:
        """Check combinations of settings; called at construction, after `parse`, and by the runner.

        Raises:
            ValueError: If some cannot be used together, such as `steps` and `epochs`, or the stack is unknown.
        """
        self.stack_name()
        self.max_time_seconds()
        check_sections(self)

    def stack_name(self) -> str:
        """Return the stack without aliases, such as `ddp` or `parallel`; case, `-` and `_` do not matter.

        Raises:
            ValueError: If the stack is unknown.
        """
        name = self.stack.lower().replace("-", "").replace("_", "")
        if name not in ALIASES:
            known = ", ".join(map(repr, ALIASES))
            hint = did_you_mean(name, ALIASES)
            if "fsdp" in name or "hsdp" in name:
                hint = " For FSDP, set stack='parallel' and parallel.axes.shard."
            raise ValueError(
                f"Expected stack to be one of {known}. Received: stack={self.stack!r}.{hint}"
            )
        return ALIASES[name]

    def max_time_seconds(self) -> float | None:
        """Return `max_time` in seconds, `None` when there is no limit.

        Raises:
            ValueError: If it is neither a positive number nor MM:SS or HH:MM:SS.
        """
        limit = self.max_time
        if limit is None:
            return None
        clock = _CLOCK.match(limit) if isinstance(limit, str) else None
        try:
            parts = [limit] if clock is None else [part or 0 for part in clock.groups()]
            seconds: float = sum(
                float(part) * 60**power for power, part in enumerate(reversed(parts))
            )
        except ValueError:
            seconds = -1.0
        if not seconds > 0:
            raise ValueError(
                f"Expected max_time to be seconds or 'HH:MM:SS'. Received: max_time={limit!r}."
            )
        return seconds

    def warn_of_idle_settings(self, stack: str) -> list[str]:
        """Warn about settings that were changed but do nothing on a stack, given without aliases; return their keys."""
        keys = idle_keys_of_stack(self, stack)
        if keys:
            warn_user(
                f"These settings have no effect on the stack {stack!r}: {', '.join(keys)}. Remove them, or choose the stack they are for.",
                UserWarning,
            )
        return keys

    # Command line and files

    def parse(  # type: ignore[override]
        self,
        args: Iterable[str] | None = None,
        default_config: str = "config",
        *,
        boot: bool = True,
    ) -> Any:
        """Read the command line: `--KEY VALUE`, `--config FILE`, `--help [SECTION ...]`. Files are read before single keys.

        Args:
            args: The words; `sys.argv[1:]` by default, and none in a notebook, where those are of the kernel.
            default_config: Name of an option that names files as `--config` does.
            boot: Call `post` hooks, and fill in `${key}` references, afterwards; absent keys are an error from then on.

        Returns:
            This configuration.

        Raises:
            ValueError: If a key is unknown or a value out of bounds. At its top level a configuration has the keys of the library,
                those that its class declares, and those that were set in code before; the user's sections are open.
            TypeError: If a value does not fit its key, naming it.
            SystemExit: After `--help`; with exit code 2 and the usage for any of these errors in `sys.argv`.
        """
        of_program = args is None and not in_notebook()
        words = sys.argv[1:] if of_program else list(args or ())
        asked = next((place for place, word in enumerate(words) if word in ("--help", "-h")), None)
        with usage_errors(of_program):
            if asked is not None:
                sections = [word for word in words[asked + 1 :] if not word.startswith("-")]
                print(help_text(self, sections))
                raise SystemExit(0)
            options = split_options(words)
            of_files = ("config", default_config)
            # All files first, wherever they are named: a single key is above them.
            for name, files in (option for option in options if option[0] in of_files):
                if not files:
                    raise ValueError(f"Expected --{name} FILE. Received: no file.")
                for file in files:
                    self.merge_from_file(file)
            for name, given in (option for option in options if option[0] not in of_files):
                key = name if name in self else name.replace("-", "_")
                refuse_negation(self, name)
                self._refuse_undeclared({key: None}, " ".join((f"--{name}", *given)))
                set_option(self, key, given)
        if of_program:
            self.__dict__["_command_line"] = options
        if boot:
            self.boot()
        with usage_errors(of_program):
            self.validate()
        return self

    parse_config = parse  # type: ignore[assignment]

    @classmethod
    def from_dict(cls, obj: object) -> Any:
        """Return a configuration of this class with settings merged over its defaults.

        Args:
            obj: A mapping.
        """
        config = cls()  # whose `__init__` may take other arguments
        config.merge(obj)
        config.validate()
        return config

    @classmethod
    def from_file(cls, file: str | os.PathLike[str]) -> Any:
        """Return a configuration of this class with the settings of a YAML, JSON or TOML file over its defaults.

        Args:
            file: Path of the file.
        """
        config = cls()
        config.merge_from_file(file)
        config.validate()
        return config

    @classmethod
    def load(cls, file: object, method: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Return a configuration of this class from a file; from a stream, `method` names the format."""
        if isinstance(file, (str, os.PathLike)) and method is None:
            return cls.from_file(file)
        return super().load(file, method, *args, **kwargs)  # type: ignore[arg-type]

    def merge_from_file(self, file: Any, *args: Any, **kwargs: Any) -> Any:
        """Merge the settings of a file into this configuration; keys that it does not name stay as they are."""
        settings = read_settings(file)
        self._refuse_undeclared(settings, file)
        return self._merge_settings(settings, file)

    def _merge_settings(self, settings: Mapping[str, object], file: object) -> Any:
        """Merge settings; an error of their keys and values names the file that they are from, if there is one."""
        try:
            return self.merge(settings)
        except (TypeError, ValueError) as error:
            if file is None:
                raise
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"{error} It is in {str(file)!r}.") from None

    def jsons(self, *args: Any, **kwargs: Any) -> str:
        """Return the configuration as JSON; infinities become strings, which the library's number keys read back.

        Raises:
            ValueError: If one of the user's keys has what JSON cannot keep: an infinity or NaN, or a number as the name of a key.
        """
        kwargs.setdefault("indent", 2)
        settings = self.plain()
        for name, value in settings.items():
            if name not in fields_of(RunnerConfig):
                _check_json(value, str(name))
        return json.dumps(finite(settings, str), *args, allow_nan=False, **kwargs)

    def json(self, file: Any, *args: Any, **kwargs: Any) -> None:
        """Write the configuration as JSON."""
        # First, so that what JSON cannot keep leaves an earlier file as it is.
        text = self.jsons(*args, **kwargs)
        with self.open(file, mode="w") as stream:
            stream.write(text)

    def yamls(self, *args: Any, **kwargs: Any) -> str:
        """Return the configuration as YAML, from which every value comes back as it is."""
        kwargs.setdefault("Dumper", PlainDumper)
        return super().yamls(*args, **kwargs)

    @classmethod
    def from_yaml(cls, file: Any, *args: Any, **kwargs: Any) -> Any:
        """Return a configuration of this class from a file or stream of YAML."""
        kwargs.setdefault("Loader", SettingsLoader)
        return super().from_yaml(file, *args, **kwargs)

    @classmethod
    def from_yamls(cls, string: str, *args: Any, **kwargs: Any) -> Any:
        """Return a configuration of this class from YAML."""
        kwargs.setdefault("Loader", SettingsLoader)
        return super().from_yamls(string, *args, **kwargs)

    def dict(self, flatten: bool = False) -> Any:
        """Return the contents as plain values; `flatten` joins the keys of nested sections by dots."""
        return flattened(self.plain()) if flatten else self.plain()

    # Identity

    def public(self) -> Any:
        """Return the contents as plain values without the text of keys that name a secret: what files and trackers are given."""
        return without_secrets(self.plain(), self.secret_keys or ())

    def changed(self) -> Any:
        """Return what differs from the library's defaults, as nested plain values; what a subclass sets is among it."""
        return identity.changed(self.plain(), _usual())

    def canonical(self, *, replicas: int = 1) -> Any:
        """Return what changes the result of the run, as plain values sorted by key.

        Left out are stack, layout and communication, names, paths, logging, checkpoint policy, supervision, loader workers, and the
        budgets (steps, epochs, time, patience), so that a run continued with a larger budget finds its own directory. Batch size,
        accumulation and number of ranks enter as their product, the samples of an update, so that a run finds its directory at
        another number of processes too.

        Args:
            replicas: Ranks that read different samples.
        """
        return identity.canonical(self.plain(), replicas=replicas)

    def config_id(self, *, replicas: int = 1) -> str:
        """Return 16 hexadecimal digits that are the same for equal canonical settings, in every process and on every machine.

        Args:
            replicas: Ranks that read different samples.
        """
        canonical = self.canonical(replicas=replicas)
        purpose = self.__dict__.get("_purpose", "")
        return identity.digest({"purpose": purpose, **canonical} if purpose else canonical)

    def set_apart(self, purpose: str) -> None:
        """Give runs with these settings their own identity, since they do something else than to train, which `purpose` names."""
        self.__dict__["_purpose"] = purpose

    def differences(
        self, stored: Mapping[str, object], *, stored_replicas: int = 1, replicas: int = 1
    ) -> list[str]:
        """Return how a stored configuration differs in what changes the result; one line `key: stored …, now …` each.

        Budgets may change (but not from steps to epochs), a seed left open is no difference, and batch size and accumulation may be
        traded for one another, or for ranks, as long as an update has as many samples.

        Args:
            stored: The stored configuration; keys that it lacks have their defaults.
            stored_replicas: Ranks that read different samples in the run that stored it.
            replicas: The same of this run.
        """
        before = self.completed(stored)
        return identity.differences(
            before, self.plain(), stored_replicas=stored_replicas, replicas=replicas
        )

    @staticmethod
    def completed(stored: Mapping[str, object]) -> Any:
        """Return a stored configuration as plain values, with the library's defaults for the keys that it lacks."""
        whole = copy.deepcopy(_usual())
        identity.overlay(whole, to_plain(stored))
        return whole

    def __hash__(self) -> int:  # type: ignore[override]
        return int(self.config_id(), 16)


@cache
def _usual() -> dict[str, Any]:
    """Return the library's defaults as plain values, which the caller does not change."""
    usual: dict[str, Any] = RunnerConfig().plain()
    return usual


def _check_json(value: object, key: str) -> None:
    """Refuse what would come back from JSON as another value."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(
            f"Expected finite numbers in JSON. Received: {key}={value!r}. Save the configuration as YAML."
        )
    if isinstance(value, list):
        for item in value:
            _check_json(item, key)
    elif isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                raise ValueError(
                    f"Expected keys that are strings in JSON. Received: the key {name!r} of {key}. Save the configuration as YAML."
                )
            _check_json(item, f"{key}.{name}")


def continued(
    stored: Mapping[str, Any], given: Mapping[str, object] | None, config_class: type[RunnerConfig]
) -> RunnerConfig:
    """Return the configuration of a run that goes on: the stored one without secrets, with what the caller gives over it.

    Args:
        stored: The settings of a checkpoint.
        given: What overrides them; a configuration also gives the class of the result.
        config_class: Class of the result otherwise.
    """
    own = given.clone() if isinstance(given, RunnerConfig) else config_class()
    known = without_secrets(stored, stored.get("secret_keys") or ())
    own.declare(known)  # the run has trained with these keys
    own.merge(known)
    own.merge(given.changed() if isinstance(given, RunnerConfig) else dict(given or {}))
    return own

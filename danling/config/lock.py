"""Which settings may be changed after a runner has read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

from danling.utils.plain import to_plain
from danling.utils.secrets import received

from .sections import Section, fields_of, sections_in

if TYPE_CHECKING:
    from .runner_config import RunnerConfig

BUDGET = frozenset({"steps", "epochs"})
LIVE = BUDGET | {
    *("max_time", "patience", "max_skipped_updates", "evaluate_interval", "try_evaluation"),
    *("log_interval", "log_seconds", "profiling"),
    *("checkpoint.interval", "checkpoint.exclude_from_loading", "checkpoint.last_save_model_only"),
    "checkpoint.export_dtype",
}
"""Keys and sections that are read where they are used, so that a change counts from then on."""
READ_FIRST = frozenset(
    {
        "stack",
        "seed",
        "deterministic",
        "backend",
        "init_method",
        "comm.init_timeout_seconds",
        "ft",
        "elastic",
        "parallel.axes",
    }
)
"""Keys and sections that `super().__init__(config)` of a runner reads."""


def _is_within(key: str, names: frozenset[str]) -> bool:
    return any(f"{key}.".startswith(f"{name}.") for name in names)


class SettingsLock:
    """Refuses to change the library's settings that a runner has read; the user's own keys and sections stay open.

    Copies and pickles of a locked configuration are not locked. It refers weakly to the methods that it calls.

    Attributes:
        has_changed: Whether a live key was changed since this was last set to `False`.

    Args:
        config: The configuration of a runner.
        check_budget: Method called with a key of the budget and its next value, after construction; what it raises refuses the change.
        changed: Method called with a live key that was changed after construction.
    """

    def __init__(
        self,
        config: RunnerConfig,
        *,
        check_budget: Callable[[str, object], None],
        changed: Callable[[str], None],
    ) -> None:
        self.has_changed = False
        self._config = config
        # A configuration that a program keeps does not keep the runner and its model.
        self._check_budget, self._changed = WeakMethod(check_budget), WeakMethod(changed)
        self._constructed: dict[str, tuple[object, object]] | None = None
        self._own = {name for name, field in fields_of(type(config)).items() if field.is_own}
        # Not as a key, which would be saved with the settings.
        config.__dict__["_lock"] = (self, "")
        for name in self._own:
            self.attach(dict.get(config, name), f"{name}.")

    def attach(self, value: object, prefix: str) -> None:
        """Lock the sections in a value, which is at a place in the configuration."""
        if prefix.partition(".")[0] in self._own:
            for section, its_prefix in sections_in(value, prefix):
                section.__dict__["_lock"] = (self, its_prefix)

    def end_construction(self) -> None:
        """Lock all settings but the live ones."""
        self._constructed = self._containers()

    def check(self, key: str, value: object) -> None:
        """Refuse to set a key that was read."""
        self._check(key, received(key, value))
        check_budget = self._check_budget()
        if self._constructed is not None and key in BUDGET and check_budget is not None:
            check_budget(key, value)

    def check_removal(self, key: str) -> None:
        """Refuse to remove a key that was read."""
        self._check(key, f"the removal of {key}")

    def _check(self, key: str, received: str) -> None:
        if key.partition(".")[0] not in self._own:
            return
        if self._constructed is None:
            # A section that contains such a key may not be replaced either.
            holds = any(f"{name}.".startswith(f"{key}.") for name in READ_FIRST)
            if holds or _is_within(key, READ_FIRST):
                raise ValueError(
                    f"Expected {key} to be set before super().__init__(config), which reads it. Received: {received}. Set it in the "
                    "configuration first, or pass super().__init__ a changed copy."
                )
        elif not _is_within(key, LIVE):
            raise ValueError(
                f"Expected {key} to be set before the runner is constructed, which has read it. Received: {received}. Construct another "
                "runner with it: copy.deepcopy(runner.config) may be changed. On this runner the budget (steps, epochs), patience, "
                "intervals, logging and your own keys may be changed."
            )

    def changed(self, key: str) -> None:
        """Report that a key was set."""
        if self._constructed is not None and _is_within(key, LIVE):
            self.has_changed = True
            changed = self._changed()
            if changed is not None:
                changed(key)

    def check_intact(self, config: object) -> None:
        """Refuse a configuration that was replaced after construction, or changed within one of its lists."""
        if self._constructed is None:
            return
        if config is not self._config:
            raise ValueError(
                "Expected the configuration that the runner was constructed with. Received: another one in `runner.config`. Construct "
                "another runner with it."
            )
        # By value: a list that is changed in place calls no method of its section.
        now = {key: to_plain(value) for key, (value, _) in self._constructed.items()}
        changed = [key for key, (_, before) in self._constructed.items() if now[key] != before]
        if changed:
            before = received(changed[0], self._constructed[changed[0]][1])
            raise ValueError(
                f"Expected {before}, with which the runner was constructed. Received: {received(changed[0], now[changed[0]])}. Construct "
                "another runner with it."
            )

    def put(self, key: str, value: Any) -> None:
        """Set a key at the top level that the library itself decides."""
        self._config._store(key, value)

    def _containers(self) -> dict[str, tuple[object, object]]:
        """Return the locked values that could be changed in place, with their plain values."""
        values: dict[str, Any] = {
            f"{prefix}{key}": value
            for section, prefix in sections_in(self._config)
            for key, value in section.items()
            if isinstance(value, (list, dict, set)) and not isinstance(value, Section)
        }
        return {
            key: (value, to_plain(value))
            for key, value in values.items()
            if key.partition(".")[0] in self._own and not _is_within(key, LIVE)
        }

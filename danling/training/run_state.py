"""What a run saves and restores, as an ordered table of parts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from danling.checkpoints.errors import CheckpointError, CheckpointMismatch
from danling.checkpoints.exclusion import USERS_OWN, ExcludedFromLoading

logger = logging.getLogger("danling")

_PAYLOAD_ORDER = (
    "format_version",
    "runner",
    "state",
    "attributes",
    "requires_grad",
    "buffers",
    "model",
    "optimizer",
    "dataloaders",
    "criterion",
    "ema",
    "scheduler",
)
"""Components in their order in a file, so that equal states of two versions give equal files."""


class Stateful(Protocol):
    """What saves and restores itself."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return tensors and plain values."""

    def load_state_dict(self, state: Any) -> Any:
        """Restore what `state_dict` returned."""


def _always() -> bool:
    return True


def _same(value: object = None) -> object:
    return value


@dataclass(frozen=True)
class StatePart:
    """One entry of a state: how it is read off a run and put back.

    Attributes:
        name: Its key.
        get: Returns what is saved: tensors and plain values.
        set: Takes what was saved, and the dotted paths that were left out of the load.
        exists: Whether this run has it. A part that does not exist is neither saved, nor restored, nor missed.
        default: What is restored where a checkpoint lacks the entry; without one, `set` is not called then.
        optional: Whether `exists` says only that it is saved: a component that is restored from a checkpoint that has it, whether this run
            does or not, and from an empty state where a checkpoint lacks it, which is no error.
    """

    name: str
    get: Callable[[], Any]
    set: Callable[[Any, Collection[str]], None]
    exists: Callable[[], bool] = _always
    default: Callable[[], Any] | None = None
    optional: bool = False

    @classmethod
    def attribute(
        cls, holder: object, name: str, *, key: str | None = None, convert: Callable[[Any], Any] | None = None
    ) -> StatePart:
        """Return the part that is an attribute of an object."""
        change: Callable[..., Any] = convert or _same
        return cls(
            key or name,
            get=lambda: change(getattr(holder, name)),
            set=lambda value, _: setattr(holder, name, change(value)),
            default=change,
        )

    @classmethod
    def by_index(cls, holder: object, name: str) -> StatePart:
        """Return the part that is a mapping by integers, whose keys are texts in a checkpoint."""
        return cls(
            name,
            get=lambda: {str(index): value for index, value in getattr(holder, name).items()},
            set=lambda stored, _: setattr(holder, name, {int(index): value for index, value in stored.items()}),
            default=dict,
        )

    @classmethod
    def stateful(cls, name: str, current: Callable[[], Stateful | None], *, resets: bool = False) -> StatePart:
        """Return the part that is the state of an object, or empty while there is no such object."""

        def get() -> dict[str, Any]:
            found = current()
            return dict(found.state_dict()) if found is not None else {}

        def restore(state: Any, _: Collection[str]) -> None:
            found = current()
            if found is not None and (state or resets):
                found.load_state_dict(dict(state))

        return cls(name, get, restore, default=dict)


class RunState:
    """Two tables: the components of a checkpoint (`model`, `optimizer`, ...), and the parts of its entry `state`.

    Parts are saved and restored in the order of their table. A stack differs from another one in the parts it hands in: a later part
    takes the place of an earlier one of the same name, as an override does.
    """

    def __init__(
        self,
        components: Iterable[StatePart] = (),
        progress: Iterable[StatePart] = (),
        *,
        excluded: Callable[[], str | Iterable[str] | None] = tuple,
    ) -> None:
        self._excluded = excluded
        self._components = {part.name: part for part in components}
        self._progress = {part.name: part for part in progress}
        self._saved_elsewhere: frozenset[str] = frozenset()
        self._loaded_since: Collection[str] = ()

    @property
    def excluded(self) -> ExcludedFromLoading:
        """What is left out of what is loaded."""
        return ExcludedFromLoading(self._excluded()).without(self._loaded_since)

    @contextmanager
    def loading(self, payload: Mapping[str, Any], changed: Callable[[], Collection[str]]) -> Iterator[Collection[str]]:
        """Within the context leave out of what is loaded only what the run of a checkpoint has not left out itself, when it began."""
        stored = (payload.get("runner") or {}).get("checkpoint") or {}
        before = ExcludedFromLoading(stored.get("exclude_from_loading"))
        outer = self._loaded_since
        if before.entries and self.excluded.entries:
            self._loaded_since = ExcludedFromLoading(self._excluded()).loaded_since(before, changed())
        try:
            yield self._loaded_since
        finally:
            self._loaded_since = outer

    # Components

    def components(self) -> dict[str, Any]:
        """Return the states of the components, less those that are saved elsewhere. Called on all ranks."""
        return {part.name: part.get() for part in self._present() if part.name not in self._saved_elsewhere}

    def completed(self, states: Mapping[str, object]) -> dict[str, Any]:
        """Return states of components with those that a stack of the user's has left out of them. Called on all ranks."""
        missing = (part for part in self._present() if part.name not in {*states, *self._saved_elsewhere})
        return {**states, **{part.name: part.get() for part in missing}}

    def load_components(self, payload: Mapping[str, object], excluded: Collection[str]) -> None:
        """Restore the components that a payload has, in the order of the table. Called on all ranks."""
        for part in self._components.values():
            if part.optional or (part.exists() and part.name in payload):
                _restore(part, payload.get(part.name, {}), excluded)

    def names(self) -> list[str]:
        """Return the names of the components that a full checkpoint of this run cannot lack."""
        return [part.name for part in self._present() if not part.optional]

    @contextmanager
    def saved_elsewhere(self, *names: str) -> Iterator[None]:
        """Leave components out of `components` within the context: something else writes them, such as an engine."""
        before, self._saved_elsewhere = self._saved_elsewhere, frozenset(names)
        try:
            yield
        finally:
            self._saved_elsewhere = before

    def _present(self) -> list[StatePart]:
        return [part for part in self._components.values() if part.exists()]

    # Progress

    def add_progress(self, part: StatePart) -> None:
        """Save and restore one more part in the entry `state`, after those that are there."""
        self._progress[part.name] = part

    def progress(self) -> dict[str, Any]:
        """Return the entry `state`. No communication: may be called on one rank."""
        return {part.name: part.get() for part in self._progress.values() if part.exists()}

    def load_progress(self, state: Mapping[str, object]) -> None:
        """Restore what `progress` returned. Called on all ranks."""
        for part in self._progress.values():
            if part.exists() and (part.name in state or part.default is not None):
                stored = state[part.name] if part.name in state else part.default and part.default()
                _restore(part, stored, frozenset())


def _restore(part: StatePart, state: Any, excluded: Collection[str]) -> None:
    try:
        part.set(state, excluded)
    except CheckpointError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointMismatch(
            f"Expected a checkpoint whose {part.name} this run can restore. Received: {type(error).__name__}: {error}. Use another "
            "checkpoint, or leave that part out with checkpoint.exclude_from_loading."
        ) from error


def in_order(payload: Mapping[str, object]) -> dict[str, Any]:
    """Return a payload with its components in their order in a file, those of a user's last."""
    known = [name for name in _PAYLOAD_ORDER if name in payload]
    return {name: payload[name] for name in dict.fromkeys([*known, *payload])}


def check_complete(payload: Mapping[str, object], excluded: Collection[str], needed: Iterable[str]) -> None:
    """Refuse a payload that lacks a component which this run has."""
    missing = [name for name in needed if name not in payload and name not in excluded]
    if missing:
        raise CheckpointMismatch(
            f"Expected a full checkpoint. Received one without: {', '.join(missing)}. Name them in "
            "checkpoint.exclude_from_loading to start them afresh, or load the weights only with `pretrained`."
        )


def check_payload(payload: object, what: str) -> None:
    """Refuse what a hook returned in the place of a payload."""
    if not isinstance(payload, Mapping):
        raise ValueError(f"Expected {what}, a mapping. Received: {payload!r}. Return that of super().")


def check_given(payload: Mapping[str, object], excluded: ExcludedFromLoading) -> None:
    """Refuse a mapping that is no payload, such as bare weights."""
    if "state" not in payload and "state" not in excluded.entries:
        raise CheckpointMismatch(
            f"Expected the payload of a checkpoint, with the entries 'runner' and 'state'. Received: {sorted(map(str, payload))[:8]}. "
            "Load weights alone with `load_model`, or with `load_pretrained` from a file."
        )


def check_same_run(differences: Iterable[str], excluded: ExcludedFromLoading) -> None:
    """Refuse a checkpoint whose configuration means another result."""
    found = [line for line in differences if not excluded.allows_setting(line.partition(":")[0])]
    if found:
        listing = "\n  ".join(found)
        raise CheckpointMismatch(
            f"Expected the configuration that the checkpoint was made with. Received other values for:\n  {listing}\n"
            "Restore them, add 'runner.' and the key to checkpoint.exclude_from_loading where you mean to change it, or start a "
            "new run from the weights with `pretrained`."
        )


def changed_sections(
    differences: Iterable[str], stored: Mapping[str, object], now: Mapping[str, object], usual: Collection[str]
) -> set[str]:
    """Return the sections in which the configuration of a checkpoint is another one, budgets too, and `USERS_OWN` for any of the user's."""
    found = {line.partition(":")[0].partition(".")[0] for line in differences}
    found |= {key for key in ("steps", "epochs") if stored.get(key) != now.get(key)}
    is_users = any(name in {*stored, *now} and name not in usual for name in found)
    return found | ({USERS_OWN} if is_users else set())


def say_left_out(excluded: ExcludedFromLoading, loaded_since: Collection[str], *, was_named: bool) -> None:
    """Log what is left out of what is loaded, and which entries of `checkpoint.exclude_from_loading` do not count."""
    if loaded_since:
        logger.log(
            logging.WARNING if was_named else logging.INFO,
            "%s is loaded: the run of this checkpoint left it out when it began, as checkpoint.exclude_from_loading asks for, and has "
            "saved its own since. With `pretrained` the weights of a checkpoint are loaded without it.",
            ", ".join(loaded_since),
        )
    if excluded.entries:
        logger.info("Left out, as checkpoint.exclude_from_loading asks for: %s.", ", ".join(excluded.entries))


def warn_of_compilation(differences: Sequence[str]) -> None:
    """Warn that a run goes on with other compiled code than that of the checkpoint, so not bitwise as it would have."""
    if differences:
        logger.warning(
            "The run goes on, but not bitwise as it would have: other code is compiled than that which made the checkpoint (%s).",
            "; ".join(differences),
        )

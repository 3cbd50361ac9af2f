"""What a run saves and restores: an ordered table of parts, the parts themselves, and which checkpoints are refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from danling.checkpoints.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch
from danling.checkpoints.reading import USERS_OWN, ExcludedFromLoading
from danling.config import identity
from danling.data import BatchSource, DataLoader

from .model_states import criterion_state, load_criterion
from .update import map_carry

if TYPE_CHECKING:
    from danling.runners.base_runner import BaseRunner
    from danling.runners.torch_runner import TorchRunner

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


@dataclass(frozen=True)
class StatePart:
    """One entry of a state: how it is read off a run and put back.

    Attributes:
        name: Its key.
        get: Returns the saved value: tensors and plain values.
        set: Takes what was saved, and the dotted paths that were left out of the load.
        exists: Whether this run has it. A part that does not exist is neither saved, nor restored, nor missed.
        default: Value to restore if a checkpoint lacks the entry; without one, `set` is not called then.
        optional: Whether `exists` says only that it is saved: a component that is restored from a checkpoint that has it, whether this run
            does or not, and from an empty state where a checkpoint lacks it, which is no error.
    """

    name: str
    get: Callable[[], Any]
    set: Callable[[Any, Collection[str]], None]
    exists: Callable[[], bool] = lambda: True
    default: Callable[[], Any] | None = None
    optional: bool = False

    @classmethod
    def stateful(cls, name: str, current: Callable[[], Any], *, resets: bool = False) -> StatePart:
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

    def __init__(self, runner: BaseRunner) -> None:
        self._runner = runner
        self._components = {part.name: part for part in runner.component_parts()}
        self._progress = {part.name: part for part in runner.progress_parts()}
        self._saved_elsewhere: frozenset[str] = frozenset()
        self._loaded_since: Collection[str] = ()

    @property
    def excluded(self) -> ExcludedFromLoading:
        """Parts of a checkpoint that are not loaded."""
        return ExcludedFromLoading(self._runner.config.checkpoint.exclude_from_loading).without(self._loaded_since)

    @contextmanager
    def loading(self, payload: Mapping[str, Any]) -> Iterator[Collection[str]]:
        """Within the context, also load the excluded parts that the run of the checkpoint left out when it began, and trained since."""
        runner, stored = self._runner, payload.get("runner") or {}
        before = ExcludedFromLoading((stored.get("checkpoint") or {}).get("exclude_from_loading"))
        outer = self._loaded_since
        if before.entries and self.excluded.entries:
            differences, usual = runner.config_differences(payload), runner.config.completed({}).keys()
            changed = changed_sections(differences, stored, runner.config.plain(), usual)
            entries = ExcludedFromLoading(runner.config.checkpoint.exclude_from_loading)
            self._loaded_since = entries.loaded_since(before, changed)
        try:
            yield self._loaded_since
        finally:
            self._loaded_since = outer

    # Components

    def components(self) -> dict[str, Any]:
        """Return the states of the components, less those that are saved elsewhere. Called on all ranks."""
        return self.completed({})

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
            if part.exists() and part.name in state:
                _restore(part, state[part.name], frozenset())
            elif part.exists() and part.default is not None:
                _restore(part, part.default(), frozenset())


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


# The parts of a training


def component_parts(runner: TorchRunner) -> list[StatePart]:
    """Return frozen weights, model, criterion, averages, optimizer and scheduler."""
    frozen = runner._parts.frozen

    def load_model(state: Mapping[str, object], excluded: Collection[str]) -> None:
        state = frozen.loadable(state, runner.model_state_dict)
        runner.load_model(state, partial=any(path.startswith("model.") for path in excluded))

    def averages() -> dict[str, object]:
        state = runner.ema.state_dict()
        return {**state, "weights": frozen.saved(state["weights"])}

    def load_averages(state: Mapping[str, Any], excluded: Collection[str]) -> None:
        averages = {"weights": {}, "num_updates": runner.ema.num_updates, **state}
        averages["weights"] = frozen.completed(averages["weights"], runner.ema.weights)
        runner.load_ema(averages, partial=any(path.startswith("ema.weights") for path in excluded))

    def load_optimizer(state: Mapping[str, object], excluded: Collection[str]) -> None:
        if "optimizer.state" in excluded:
            state = {"state": {}, **state}
        if "optimizer.param_groups" in excluded:
            state = {**state, "param_groups": runner.optimizer_state_dict()["param_groups"]}
        runner.load_optimizer(state)

    def load_scheduler(state: Mapping[str, object], excluded: Collection[str]) -> None:
        kept = runner.scheduler.state_dict() if any(path.startswith("scheduler.") for path in excluded) else {}
        runner.load_scheduler({**kept, **state})

    return [
        StatePart("frozen", frozen.identity, frozen.check, exists=frozen.leaves_out, optional=True),
        StatePart("model", lambda: frozen.saved(runner.model_state_dict()), load_model),
        StatePart(
            "criterion",
            lambda: criterion_state(runner.criterion),
            lambda state, _: load_criterion(runner.criterion, state),
            exists=lambda: bool(criterion_state(runner.criterion)),
        ),
        StatePart("ema", averages, load_averages, exists=lambda: runner.ema is not None),
        StatePart(
            "optimizer",
            lambda: runner.optimizer_state_dict(),
            load_optimizer,
            exists=lambda: runner.optimizer is not None,
        ),
        StatePart(
            "scheduler",
            lambda: runner.scheduler.state_dict(),
            load_scheduler,
            exists=lambda: runner.scheduler is not None,
        ),
    ]


def progress_parts(runner: TorchRunner) -> list[StatePart]:
    """Return what a training adds to the entry `state` of a checkpoint.

    `state_dict` of the runner fills in what all ranks have: the sums of meters and of metrics, and the carry of each.
    """
    parts = runner._parts

    def load_counters(stored: Mapping[str, object], _: Collection[str]) -> None:
        runner.state.train.load(stored)
        runner.window.agreed_reference = runner.state.train.weight_reference

    def load_open(stored: Mapping[str, Any], _: Collection[str]) -> None:
        parts.results.open = dict(stored)

    def load_targetless(known: bool | None, _: Collection[str]) -> None:
        parts.loss.targetless = known

    def load_meters(sums: Mapping[str, Any], _: Collection[str]) -> None:
        # Sums over all ranks were saved, so only one of the ranks whose sums are added may restore them.
        runner.meters.load_state_dict(sums if runner.placement.metrics.rank == 0 else {})

    def load_train_metrics(seen: Mapping[str, Any], _: Collection[str]) -> None:
        assert parts.train_metrics is not None
        parts.train_metrics.load_state_dict(seen if runner.placement.metrics.rank == 0 else {})

    return [
        # Takes the place of the part `train` of `BaseRunner`, which knows no window and so no reference weight.
        StatePart(
            "train",
            lambda: {**asdict(runner.state.train), "weight_reference": runner.window.agreed_reference},
            load_counters,
        ),
        StatePart("open_result", lambda: dict(parts.results.open), load_open, default=dict),
        StatePart("bare", lambda: parts.loss.targetless, load_targetless, default=lambda: None),
        StatePart("meters", lambda: runner.meters.state_dict(), load_meters, default=dict),
        StatePart(
            "train_metrics", dict, load_train_metrics, exists=lambda: parts.train_metrics is not None, default=dict
        ),
        StatePart("carry", lambda: None, lambda stored, _: _load_carry(runner, stored), default=lambda: None),
        StatePart.stateful("losses", lambda: parts.losses, resets=True),
        StatePart.stateful("scores", lambda: runner.standing.board),
        StatePart.stateful("scaler", lambda: runner.precision.scaler),
        StatePart.stateful("phases", lambda: runner._phases),
    ]


def carry_of_all(runner: TorchRunner) -> dict[str, Any] | None:
    """Return what each rank carries, on the CPU; `None` where none carries anything. Called on all ranks."""
    ranks = runner.world.gather_objects(map_carry(runner.carry, lambda tensor: tensor.detach().cpu()))
    if all(each is None for each in ranks):
        return None
    return {"replicas": runner.placement.data_replicas, "ranks": ranks}


def _load_carry(runner: TorchRunner, stored: Mapping[str, Any] | None) -> None:
    # Called after the positions in the loaders are restored.
    runner.carry = None
    if stored is None:
        return
    sources = [runner.source(split) for split in runner.train_splits]
    if stored["replicas"] == runner.placement.data_replicas and len(stored["ranks"]) == runner.world_size:
        runner.carry = map_carry(stored["ranks"][runner.rank], lambda tensor: tensor.to(runner.device))
    elif any(source.consumed and source.remaining_batches() != 0 for source in sources):
        raise CheckpointMismatch(
            f"Expected {len(stored['ranks'])} ranks, {stored['replicas']} of which read different data: each has a self.carry of its "
            f"own in the middle of this pass. Received: {runner.world_size}, of which {runner.placement.data_replicas} read different "
            "data. Go on with the same number, or from a checkpoint at the end of a pass."
        )


# Loaders: one position for all ranks, or its own state on each data replica


def loader_states(
    runner: BaseRunner, sources: Mapping[str, BatchSource], *, read_only: bool = True
) -> dict[str, dict[str, Any]]:
    """Return the saved state of the loaders of some splits. Called on all ranks."""
    own = {
        split: source.state_dict()
        for split, source in sources.items()
        if source.is_rank_local and (source.reads or not read_only)
    }
    # The first rank of several that read the same data counts.
    ranks = runner.world.gather_objects((runner.data_domain.rank, own))[::-1]
    return {
        split: {"ranks": {str(replica): states[split] for replica, states in ranks if split in states}}
        if source.is_rank_local
        else source.state_dict()
        for split, source in sources.items()
    }


def restore_positions(runner: BaseRunner, states: Mapping[str, Mapping[str, object] | None]) -> None:
    """Restore the positions of this rank in the loaders of the splits to train on."""
    for split in runner.train_splits:
        if split not in states:
            raise CheckpointMismatch(
                f"Expected the loader state of split {split!r}. Received: splits={sorted(states)}. Add "
                f"'dataloaders' to checkpoint.exclude_from_loading to start it from its beginning."
            )
        stored = states[split]
        own = share_of_rank(runner, split, stored) if stored is not None else None
        if own is not None:
            runner.source(split).load_state_dict(own)


def share_of_rank(runner: BaseRunner, split: str, state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return this rank's share of the state of a loader; `None` where the loader is to start from its beginning."""
    if "ranks" not in state:
        return state
    ranks, domain = state["ranks"], runner.data_domain
    if len(ranks) == domain.size:
        own: Mapping[str, Any] = ranks[str(domain.rank)]
        return own
    received = f"the loader of split {split!r} keeps its own state on each of {len(ranks)} data replicas"
    if runner.config.parallel.allow_degree_change:
        logger.warning("%s, and there are %d now: it starts anew.", received, domain.size)
        return None
    raise CheckpointMismatch(
        f"Expected {len(ranks)} data replicas: {received}, which cannot be divided anew. Received: {domain.size}. Let "
        "the library build the loader from a dataset, or exclude 'dataloaders' from loading."
    )


# Which checkpoints are refused


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


def check_same_run(runner: BaseRunner, payload: Mapping[str, Any]) -> None:
    """Refuse a checkpoint from which this run could not continue as the same run."""
    excluded, differences = runner.run_state.excluded, runner.config_differences(payload)
    if not differences and not excluded.allows_setting("dataloader.drop_last"):
        differences = _differences_of_passes(runner, payload.get("dataloaders", {}))
    found = [line for line in differences if not excluded.allows_setting(line.partition(":")[0])]
    if found:
        listing = "\n  ".join(found)
        raise CheckpointMismatch(
            f"Expected the configuration that the checkpoint was made with. Received other values for:\n  {listing}\n"
            "Restore them, add 'runner.' and the key to checkpoint.exclude_from_loading where you mean to change it, or start a "
            "new run from the weights with `pretrained`."
        )
    stored = runner.config.completed(payload.get("runner", {}))
    compiled = identity.compile_differences(stored, runner.config.plain())
    if compiled and runner.placement.optimizer.rank == 0:
        logger.warning(
            "The run goes on, but not bitwise as it would have: other code is compiled than that which made the checkpoint (%s).",
            "; ".join(compiled),
        )


def _differences_of_passes(runner: BaseRunner, stored: Mapping[str, Any]) -> list[str]:
    """Return where another division leaves out other samples at the end of a pass, though updates have one size, one line a split."""
    lines = []
    for split in runner.train_splits:
        loader, state = runner.dataloaders.get(split), stored.get(split) or {}
        if not isinstance(state, Mapping):
            raise CheckpointDamaged(f"Expected a mapping as dataloaders.{split}. Received: {type(state).__name__}.")
        before = state.get("end")
        if before is None or not isinstance(loader, DataLoader) or state.get("length") != loader.order.length:
            continue
        if before != loader.order.end:
            lines.append(
                f"dataloader.batch_size: stored passes of {before} out of {loader.order.length} samples over split {split!r}, "
                f"now of {loader.order.end} (drop_last leaves out what does not fill batch_size x ranks: keep that product too)"
            )
    return lines


def changed_sections(
    differences: Iterable[str], stored: Mapping[str, object], now: Mapping[str, object], usual: Collection[str]
) -> set[str]:
    """Return the sections in which the configuration of a checkpoint is another one, budgets too, and `USERS_OWN` for any of the user's."""
    found = {line.partition(":")[0].partition(".")[0] for line in differences}
    found |= {key for key in ("steps", "epochs") if stored.get(key) != now.get(key)}
    is_users = any(name in {*stored, *now} and name not in usual for name in found)
    return found | ({USERS_OWN} if is_users else set())


def log_exclusions(excluded: ExcludedFromLoading, loaded_since: Collection[str], *, was_named: bool) -> None:
    """Log which parts are not loaded, and which entries of `checkpoint.exclude_from_loading` do not count."""
    if loaded_since:
        logger.log(
            logging.WARNING if was_named else logging.INFO,
            "%s is loaded: the run of this checkpoint left it out when it began, as checkpoint.exclude_from_loading asks for, and has "
            "saved its own since. With `pretrained` the weights of a checkpoint are loaded without it.",
            ", ".join(loaded_since),
        )
    if excluded.entries:
        logger.info("Left out, as checkpoint.exclude_from_loading asks for: %s.", ", ".join(excluded.entries))

"""What a run saves and restores: its parts in order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from danling.checkpoints.errors import (
    CheckpointMismatch,
    restoring,
)
from danling.checkpoints.reading import USERS_OWN, ExcludedFromLoading
from danling.data import BatchSource
from danling.distributed import Domain
from danling.optim.joint import OWN, SHARED
from danling.optim.schedule_state import saved_schedule
from danling.reporting.jsonl import FileMark
from danling.reporting.trackers import TrackerSet
from danling.utils.process import arithmetic

from .recompute import map_carry

if TYPE_CHECKING:
    from danling.data.run_data import RunData
    from danling.metrics import Meters, MetricSet, TrainMetrics
    from danling.runners.base_runner import BaseRunner
    from danling.runners.torch_runner import TorchRunner

    from .asked_options import AskedOptions
    from .batch_weights import BatchLoss
    from .extension import Extension
    from .model_states import FrozenWeights
    from .phases import Phases
    from .results import RunResults

logger = logging.getLogger("danling")


@dataclass(frozen=True)
class StatePart:
    """One entry of a state: how it is read from a run and restored.

    Attributes:
        name: Its key.
        get: Returns the saved value, tensors and plain values; a component that returns `None` is not saved. Called on all ranks.
        set: Takes what was saved, and the dotted paths that were left out of the load. Called on all ranks.
        default: Returns the value to restore if a checkpoint lacks the entry. Without one, `set` is not called then, and a checkpoint that
            lacks a component is refused.
        alone: Returns the value for a replica group that heals, without communication; `None` where `get` does not communicate.
    """

    name: str
    get: Callable[[], Any]
    set: Callable[[Any, Collection[str]], None]
    default: Callable[[], Any] | None = None
    alone: Callable[[], Any] | None = None

    def read(self, *, alone: bool = False) -> Any:
        """Return the value to save; `alone`, without communication."""
        if alone and self.alone is not None:
            return self.alone()
        return self.get()


def stateful(name: str, component: Any, *, resets: bool = False) -> StatePart:
    """Return the part that is the state of an object, or empty if there is no such object.

    Args:
        name: The key of the part.
        component: An object with `state_dict` and `load_state_dict`, or `None`.
        resets: Whether an empty state is loaded too, and so resets the object.
    """

    def read() -> dict[str, Any]:
        return {} if component is None else dict(component.state_dict())

    def restore(state: Any, _: Collection[str]) -> None:
        is_loaded = state or resets
        if component is not None and is_loaded:
            component.load_state_dict(dict(state))

    return StatePart(name, read, restore, default=dict)


class RunState:
    """Saves and restores the parts of a run in order: its `component_parts`, and its `progress_parts` in the entry `state`."""

    def __init__(self, runner: BaseRunner) -> None:
        self._runner = runner
        self._saved_elsewhere: frozenset[str] = frozenset()
        self._loaded_since: Collection[str] = ()

    @property
    def excluded(self) -> ExcludedFromLoading:
        """Parts of a checkpoint that are not loaded: of the one that is being loaded within `loading`."""
        return ExcludedFromLoading(self._runner.config.checkpoint.exclude_from_loading).without(
            self._loaded_since
        )

    def loaded_since(self, payload: Mapping[str, Any]) -> Collection[str]:
        """Return the excluded parts that are loaded all the same: the run of a checkpoint left them out when it began, and trained since.

        No communication: may be called on one rank.
        """
        runner = self._runner
        stored = payload.get("runner") or {}
        before = ExcludedFromLoading((stored.get("checkpoint") or {}).get("exclude_from_loading"))
        entries = ExcludedFromLoading(runner.config.checkpoint.exclude_from_loading)
        # A part is loaded all the same only where both runs leave some out.
        if not (before.entries and entries.entries):
            return ()
        now = runner.config.plain()
        usual = runner.config.completed({}).keys()
        # The sections in which the configuration differs from that of the checkpoint; a changed budget counts too.
        changed = {
            line.partition(":")[0].partition(".")[0] for line in runner.config_differences(payload)
        }
        changed |= {key for key in ("steps", "epochs") if stored.get(key) != now.get(key)}
        if any(name in {*stored, *now} and name not in usual for name in changed):
            changed.add(USERS_OWN)
        return entries.loaded_since(before, changed)

    def excluded_from(self, payload: Mapping[str, Any]) -> ExcludedFromLoading:
        """Return the parts of a checkpoint that are not loaded. No communication: may be called on one rank."""
        entries = ExcludedFromLoading(self._runner.config.checkpoint.exclude_from_loading)
        return entries.without(self.loaded_since(payload))

    @contextmanager
    def loading(self, payload: Mapping[str, Any]) -> Iterator[ExcludedFromLoading]:
        """Within the context, `excluded` are the parts of this checkpoint that are not loaded."""
        before, self._loaded_since = self._loaded_since, self.loaded_since(payload)
        try:
            yield self.excluded
        finally:
            self._loaded_since = before

    @contextmanager
    def saved_elsewhere(self, *names: str) -> Iterator[None]:
        """Leave components out of `components` within the context: something else writes them, such as an engine."""
        before, self._saved_elsewhere = self._saved_elsewhere, frozenset(names)
        try:
            yield
        finally:
            self._saved_elsewhere = before

    def components(self, others: Mapping[str, object] | None = None) -> dict[str, Any]:
        """Return the states of the components, less those that are saved elsewhere. Called on all ranks.

        Args:
            others: States of components that a stack of the user's has collected; those that it has left out are added.
        """
        states = dict(others or {})
        parts = _by_name(self._runner.component_parts())
        # All ranks read the same parts in one order: reading one may be a collective.
        missing = [name for name in parts if name not in {*states, *self._saved_elsewhere}]
        found = {name: parts[name].get() for name in missing}
        return states | {name: state for name, state in found.items() if state is not None}

    def load_components(self, payload: Mapping[str, object], excluded: Collection[str]) -> None:
        """Restore the components that a payload has, in order. Called on all ranks."""
        for part, state in _stored(_by_name(self._runner.component_parts()), payload):
            with restoring(part.name, part.name):
                part.set(state, excluded)

    def weight_paths(self) -> list[str]:
        """Return the dotted paths of the weights that this run has, whatever a checkpoint has."""
        states = getattr(self._runner, "model_states", None)
        return [] if states is None else states.paths()

    def names(self) -> list[str]:
        """Return the names of the components that a full checkpoint of this run cannot lack."""
        return [
            part.name
            for part in _by_name(self._runner.component_parts()).values()
            if part.default is None
        ]

    def progress(self, *, alone: bool = False) -> dict[str, Any]:
        """Return the entry `state`. Called on all ranks.

        Args:
            alone: For a replica group that heals: without communication, so that it may be called on one rank.
        """
        # In order, and all of them on all ranks: the parts that are sums over ranks are collectives.
        parts = _by_name(self._runner.progress_parts())
        found = {name: part.read(alone=alone) for name, part in parts.items()}
        # A class of the user's may have added entries.
        added = {
            name: value
            for name, value in self._runner.state.state_dict().items()
            if name not in parts
        }
        return {**found, **added}

    def load_progress(self, state: Mapping[str, object]) -> None:
        """Restore what `progress` returned. Called on all ranks."""
        parts = _by_name(self._runner.progress_parts())
        for part, stored in _stored(parts, state):
            with restoring(part.name, part.name):
                part.set(stored, frozenset())
        self._runner.state.load_state_dict(
            {name: value for name, value in state.items() if name not in parts}
        )


def _by_name(parts: Iterable[StatePart]) -> dict[str, StatePart]:
    """Return one part of each name: a later one takes the place of an earlier one, as an override does."""
    return {part.name: part for part in parts}


def _stored(
    parts: Mapping[str, StatePart], states: Mapping[str, object]
) -> Iterator[tuple[StatePart, Any]]:
    """Yield the parts that the states have, or that have a default, each with the state to restore."""
    for name, part in parts.items():
        if name in states:
            yield part, states[name]
        elif part.default is not None:
            yield part, part.default()


# The parts of a run


def component_parts(
    runner: TorchRunner, frozen: FrozenWeights, asked: AskedOptions
) -> list[StatePart]:
    """Return frozen weights, model, criterion, averages, optimizer and scheduler."""

    def load_model(state: Mapping[str, object], excluded: Collection[str]) -> None:
        state = frozen.loadable(state, runner.model_state_dict)
        runner.load_model(state, partial=any(path.startswith("model.") for path in excluded))

    def averages() -> dict[str, object]:
        state = runner.ema.state_dict()
        return {**state, "weights": frozen.saved(state["weights"])}

    def load_averages(state: Mapping[str, object], excluded: Collection[str]) -> None:
        averages = {"weights": {}, "num_updates": runner.ema.num_updates, **state}
        averages["weights"] = frozen.completed(averages["weights"], runner.ema.weights)
        runner.load_ema(averages, partial=any(path.startswith("ema.weights") for path in excluded))

    def load_optimizer(state: Mapping[str, object], excluded: Collection[str]) -> None:
        if "optimizer.state" in excluded:
            state = {
                "state": {},
                **{key: value for key, value in state.items() if key not in (SHARED, OWN)},
            }
        if "optimizer.param_groups" in excluded:
            state = {**state, "param_groups": runner.optimizer_state_dict()["param_groups"]}
        runner.load_optimizer(state)

    def load_scheduler(state: Mapping[str, object], excluded: Collection[str]) -> None:
        # An entry that is left out keeps the value that this run has.
        is_partial = any(path.startswith("scheduler.") for path in excluded)
        kept = runner.scheduler.state_dict() if is_partial else {}
        asked.restoring_schedule(lambda: runner.load_scheduler({**kept, **state}))

    parts = [
        StatePart(
            "frozen",
            lambda: frozen.identity() if frozen.leaves_out() else None,
            frozen.check,
            default=dict,
        ),
        StatePart("model", lambda: frozen.saved(runner.model_state_dict()), load_model),
    ]
    criterion = runner.criterion
    # Most criteria have no state, and a checkpoint without the entry fits them.
    if isinstance(criterion, nn.Module) and criterion.state_dict():
        parts.append(
            StatePart(
                "criterion", criterion.state_dict, lambda state, _: criterion.load_state_dict(state)
            )
        )
    if runner.ema is not None:
        parts.append(StatePart("ema", averages, load_averages))
    if runner.optimizer is not None:
        parts.append(StatePart("optimizer", lambda: runner.optimizer_state_dict(), load_optimizer))
    if runner.scheduler is not None:
        parts.append(
            StatePart("scheduler", lambda: saved_schedule(runner.scheduler), load_scheduler)
        )
    return parts


def run_parts(runner: BaseRunner, data: RunData, trackers: TrackerSet) -> list[StatePart]:
    """Return what every run has in the entry `state` of a checkpoint."""

    def attempts() -> dict[str, Any]:
        runner.state.elastic.arithmetic = arithmetic(runner.device)
        return asdict(runner.state.elastic)

    def load_attempts(stored: Mapping[str, Any], _: Collection[str]) -> None:
        runner.state.elastic.load(stored)
        data.limit_micro_batch(runner.state.elastic.micro_batch_size)
        here, before = arithmetic(runner.device), stored.get("arithmetic", {})
        names = [name for name in here if before.get(name, here[name]) != here[name]]
        if names and runner.is_main_process:
            logger.warning(
                "The run continues, but it is no longer bitwise reproducible. Its checkpoint was computed with %s.",
                "; ".join(f"{name} {before[name]}, now {here[name]}" for name in names),
            )

    def results() -> dict[str, Any]:
        return {str(index): result for index, result in runner.results.items()}

    def load_results(stored: Mapping[str, Any], _: Collection[str]) -> None:
        runner.results = {int(index): result for index, result in stored.items()}

    def mark() -> list[int] | None:
        # A list, since a sharded checkpoint would take a mapping apart, and the other ranks have none.
        found = trackers.mark if runner.is_main_process else None
        return None if found is None else list(found)

    def load_mark(stored: list[int] | None, _: Collection[str]) -> None:
        trackers.resume_from(None if stored is None else FileMark(*map(int, stored)))

    return [
        StatePart(
            "train",
            lambda: asdict(runner.state.train),
            lambda stored, _: runner.state.train.load(stored),
        ),
        StatePart("elastic", attempts, load_attempts, default=dict),
        # Only saved: a run continues with the seed of its configuration.
        StatePart("rng", lambda: asdict(runner.state.rng), lambda stored, _: None),
        StatePart("results", results, load_results, default=dict),
        StatePart("metrics_mark", mark, load_mark, default=lambda: None),
    ]


def progress_parts(
    runner: TorchRunner,
    results: RunResults,
    loss: BatchLoss,
    losses: Meters,
    evaluated: MetricSet,
    train_metrics: TrainMetrics | None,
    phases: Phases | None,
    extensions: Iterable[Extension],
) -> list[StatePart]:
    """Return what a training adds to the entry `state` of a checkpoint."""

    def load_counters(stored: Mapping[str, object], _: Collection[str]) -> None:
        runner.state.train.load(stored)
        runner.window.agreed_reference = runner.state.train.weight_reference

    def load_open(stored: Mapping[str, Any], _: Collection[str]) -> None:
        results.open = dict(stored)

    def load_targetless(known: bool | None, _: Collection[str]) -> None:
        loss.targetless = known

    def load_sums(meters: Any) -> Callable[[Any, Collection[str]], None]:
        def load(sums: Any, _: Collection[str]) -> None:
            # Sums over all ranks were saved, so only one of the ranks whose sums are added may restore them.
            restores = runner.placement.metrics.rank == 0
            meters.load_state_dict(sums if restores else {})

        return load

    def counters() -> dict[str, Any]:
        return {**asdict(runner.state.train), "weight_reference": runner.window.agreed_reference}

    def meters() -> dict[str, list[float]]:
        return {
            name: list(pair)
            for name, pair in runner.meters.totals(runner.placement.metrics).items()
        }

    # What a replica group has summed up or carries is its own: a group that heals begins with none.
    found = [
        # Takes the place of the part `train` of `BaseRunner`, which knows no window and so no reference weight.
        StatePart("train", counters, load_counters),
        StatePart("open_result", lambda: dict(results.open), load_open, default=dict),
        StatePart("bare", lambda: loss.targetless, load_targetless, default=lambda: None),
        StatePart("meters", meters, load_sums(runner.meters), default=dict, alone=dict),
    ]
    if train_metrics is not None:

        def metrics() -> Any:
            return train_metrics.state_dict(runner.placement.metrics)

        found.append(
            StatePart("train_metrics", metrics, load_sums(train_metrics), default=dict, alone=dict)
        )

    def load_carry(stored: Mapping[str, Any] | None, _: Collection[str]) -> None:
        _load_carry(runner, stored)

    found += [
        # After the metrics of training, whose restore resets them.
        _attributes_part(runner, evaluated, train_metrics),
        StatePart(
            "carry",
            lambda: carry_of_all(runner),
            load_carry,
            default=lambda: None,
            alone=lambda: None,
        ),
        stateful("losses", losses, resets=True),
        stateful("scores", runner.standing.board),
        stateful("scaler", runner.precision.scaler),
        stateful("phases", phases),
    ]
    for extension in extensions:
        found += extension.progress_parts()
    return found


def _attributes_part(
    runner: TorchRunner, evaluated: MetricSet, trained: TrainMetrics | None
) -> StatePart:
    """Return what metrics keep in attributes, beyond what an evaluation or a pass resets."""
    sets: dict[str, MetricSet | TrainMetrics] = {"evaluation": evaluated}
    if trained is not None:
        sets["training"] = trained

    def read(domain: Domain | None) -> dict[str, Any]:
        return {name: metrics.attributes(domain) for name, metrics in sets.items()}

    def load(stored: Mapping[str, Any], _: Collection[str]) -> None:
        for name, metrics in sets.items():
            metrics.load_attributes(stored.get(name, {}))

    return StatePart(
        "metric_attributes",
        lambda: read(runner.placement.metrics),
        load,
        default=dict,
        alone=lambda: read(None),
    )


def carry_of_all(runner: TorchRunner) -> dict[str, Any] | None:
    """Return what each rank carries, on the CPU; `None` where none carries anything. Called on all ranks."""
    ranks = runner.world.gather_objects(
        map_carry(runner.carry, lambda tensor: tensor.detach().cpu())
    )
    if all(each is None for each in ranks):
        return None
    return {"replicas": runner.placement.data_replicas, "ranks": ranks}


def _load_carry(runner: TorchRunner, stored: Mapping[str, Any] | None) -> None:
    # Called after the positions in the loaders are restored.
    runner.carry = None
    if stored is None:
        return
    sources = [runner.source(split) for split in runner.train_splits]
    has_same_ranks = len(stored["ranks"]) == runner.world_size
    if has_same_ranks and stored["replicas"] == runner.placement.data_replicas:
        runner.carry = map_carry(
            stored["ranks"][runner.rank], lambda tensor: tensor.to(runner.device)
        )
    elif any(source.consumed and source.remaining_batches() != 0 for source in sources):
        raise CheckpointMismatch(
            f"Expected {len(stored['ranks'])} ranks, {stored['replicas']} of which read different data: each has its own self.carry in "
            f"the middle of this pass. Received: {runner.world_size}, of which {runner.placement.data_replicas} read different data. "
            "Continue with the same number, or from a checkpoint at the end of a pass."
        )


# Loaders: one position for all ranks, or its own state on each data replica


def loader_states(
    runner: BaseRunner,
    sources: Mapping[str, BatchSource],
    named_changes: set[str],
    *,
    read_only: bool = True,
) -> dict[str, dict[str, Any]]:
    """Return the saved state of the loaders of some splits. Called on all ranks.

    Args:
        runner: The runner.
        sources: The batches of the splits.
        named_changes: Sentences about changes of datasets that were logged; new ones are logged and added.
        read_only: Whether a loader that no batch was read of is left out, if each rank has its own state.
    """
    own = {
        split: source.state_dict()
        for split, source in sources.items()
        if source.is_rank_local and (source.reads or not read_only)
    }
    changes = [
        sentence
        for source in sources.values()
        if source.reads
        for sentence in source.unsaved_changes()
    ]
    # One collective for states and sentences, also of ranks that have neither.
    gathered = runner.world.gather_objects((runner.data_domain.rank, own, changes))[::-1]
    for sentence in dict.fromkeys(sentence for *_, found in gathered for sentence in found):
        if runner.is_main_process and sentence not in named_changes:
            named_changes.add(sentence)
            logger.warning("%s", sentence)
    found: dict[str, dict[str, Any]] = {}
    for split, source in sources.items():
        if source.is_rank_local:
            # In reverse order above: of several ranks that read the same data, the state of the first one is kept.
            found[split] = {
                "ranks": {
                    str(replica): states[split]
                    for replica, states, _ in gathered
                    if split in states
                }
            }
        else:
            found[split] = source.state_dict()
    return found


def restore_positions(
    runner: BaseRunner, data: RunData, states: Mapping[str, Mapping[str, object] | None]
) -> None:
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
            data.restore(split, own)


def share_of_rank(
    runner: BaseRunner, split: str, state: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    """Return this rank's share of the state of a loader; `None` where the loader is to start from its beginning."""
    if "ranks" not in state:
        return state
    ranks = state["ranks"]
    domain = runner.data_domain
    if len(ranks) == domain.size:
        own: Mapping[str, Any] = ranks[str(domain.rank)]
        return own
    received = (
        f"the loader of split {split!r} keeps its own state on each of {len(ranks)} data replicas"
    )
    if runner.config.parallel.allow_degree_change:
        logger.warning(
            "%s, and there are %d now: the loader starts from its beginning.", received, domain.size
        )
        return None
    raise CheckpointMismatch(
        f"Expected {len(ranks)} data replicas: {received}, which cannot be redivided. Received: {domain.size}. Let "
        "the library build the loader from a dataset, or exclude 'dataloaders' from loading."
    )

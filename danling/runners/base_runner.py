"""The base of every runner: construction, attributes, methods, checkpoints and closing, without a training loop."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import nn

from danling.checkpoints import CheckpointManager, CheckpointSettings, read_config
from danling.checkpoints.errors import restoring
from danling.checkpoints.reading import (
    ExcludedFromLoading,
    manager_named,
    stored_seed,
    without_untrusted_settings,
)
from danling.checkpoints.torch_files import FORMAT_VERSION
from danling.config import RunnerConfig
from danling.config.agreement import check_alike
from danling.config.inputs import impose
from danling.config.lock import BUDGET, SettingsLock
from danling.config.runner_config import continued
from danling.config.sections import refuse_absent_keys, sections_that_make_keys
from danling.data import BatchSource, derive_seed, seed_streams
from danling.data.randomness import deterministic_kernels, set_cublas_workspace
from danling.distributed import (
    Domain,
    LaunchEnvironment,
    Placement,
    check_tasks,
    destroy_process_group,
    init_process_group,
    select_device,
    world_of,
)
from danling.metrics import Meters, ScoreBoard, check_numbers, check_whole
from danling.metrics.scores import BestScore
from danling.reporting import Tracker, media
from danling.supervision import GcPacer, Heartbeat, SignalWatcher, record_failures
from danling.training.restore import check_resume, check_sources_alike, restore_run
from danling.training.resume_checks import (
    check_complete,
    check_given,
    check_payload,
    check_same_run,
    log_changes_since,
    log_exclusions,
)
from danling.training.run_state import (
    StatePart,
    loader_states,
    restore_positions,
    run_parts,
)
from danling.training.session import BY_SIGNAL
from danling.utils.hooks import is_overridden
from danling.workspace import Workspace
from danling.workspace.workspace import without_places

from .direct_calls import together, without_name
from .extensions import is_asked, load
from .meta import MetaRunner, close_after_error
from .parts import Parts, TorchParts
from .reserved_names import (
    GUARDED,
    OFTEN_LEFT_OUT,
    SETTABLE,
    begin,
    check_assignment,
    check_method,
    guard,
    instead_of,
)
from .state import ElasticState, RngState, RunnerState, TrainState

if TYPE_CHECKING:
    from danling.utils.observers import Observers

logger = logging.getLogger("danling")

Results = dict[int, dict[str, dict[str, float]]]
"""Metrics of training and evaluation by completed epoch or global step, then by split."""

SplitNames = str | Sequence[str] | None
"""One split, several, or `None` for those that the configuration or their names select."""


def _of_a_stack(verb: str, does: str) -> Callable[..., Any]:
    """Return a method that a stack implements."""

    def method(self: BaseRunner, *args: object, **kwargs: object) -> Any:
        raise NotImplementedError(
            f"Expected {type(self).__name__} to implement `{verb}`. Subclass `danling.Runner`, which picks the stack from `config.stack`, "
            f"or one of the stacks, such as `danling.TorchRunner`; or override `{verb}`, and call super().{verb}() in it where you need it."
        )

    method.__name__, method.__qualname__, method.__doc__ = verb, f"BaseRunner.{verb}", does
    return method


class BaseRunner(metaclass=MetaRunner):
    """Base class of all stacks.

    A subclass calls `super().__init__(config)`, sets its components as attributes and overrides methods; `__post_init__` then runs
    once, after the outermost `__init__`. If construction fails half-way, everything that was opened is closed again.

    Every method is called on all ranks, unless its own text says otherwise. So is the constructor.

    Attributes:
        config: The runner's own copy of the configuration; the caller's object is never changed.
        workspace: Paths of the run, available in `__init__`; the run directory is created after it.
        state: Counters, attempts and the seed; saved with every checkpoint.
        mode: `"train"`, `"evaluate"` or `"infer"`.
        model: The model; wrapped for the stack after construction.
        ema: The exponential moving average of the weights, or `None`.
        criterion: Loss callable `(pred, target) -> 0-dim tensor`, or `None`.
        optimizer: The optimizer, or `None`.
        scheduler: The learning-rate scheduler, or `None`.
        datasets: Datasets by split, from which loaders are built.
        dataloaders: Loaders by split; a loader that the user sets is used as it is.
        metrics: Further metrics of an evaluation: a callable `(pred, target)`, an object with `update` / `compute` /
            `reset` (torchmetrics included), a mapping of these, or `None`.
        meters: Running averages that a user may add to in `train_step`; logged and reset with the loss, whose name they may not have.
        carry: What a micro-batch hands to the next, such as a hidden state: tensors, numbers, and lists, tuples and mappings of them.
            Detached after each `train_step`, saved and restored for each rank, `None` at first and at the start of each evaluation.
        results: Metrics by completed epoch or global step, then by split.
        standing: Holds the best score, and how many evaluations ago it was reached.
        run_state: The parts of a checkpoint, in the order in which they are restored.
        saver: Saves them, and knows the state of the last save.

    Args:
        config: A `RunnerConfig`, a mapping, the path of a file, or `None` for the defaults.

    Raises:
        ValueError: If a setting is unknown or contradicts another one.
    """

    stack: str = "base"
    config_class: ClassVar[type[RunnerConfig]] = RunnerConfig
    """Class of the configuration that a runner makes from a mapping, a file or a checkpoint."""

    mode: Literal["train", "evaluate", "infer"] = "train"
    checkpoint_manager: Any = None
    # A default for overrides of `set_seed` that do not set it.
    seed: int = 0

    # None of them is there before the user sets it; see `danling.runners.reserved_names`.
    model: Any
    ema: Any
    # `Any` rather than `Callable | None`, so that a step can call it without a check for `None`.
    criterion: Any
    optimizer: Any
    scheduler: Any
    metrics: Any

    saved: ClassVar[tuple[str, ...]] = ()
    """Attributes that are always saved, such as values that are too large to be compared."""
    not_saved: ClassVar[tuple[str, ...]] = ()
    """Attributes that are never saved."""

    library_names: frozenset[str]
    """Names of attributes and methods that are not the user's."""
    world: Domain
    placement: Placement
    device: torch.device
    _parts: Parts

    def __init__(self, config: RunnerConfig | Mapping[str, object] | None = None) -> None:
        early = begin(self)
        self._parts = self._make_parts()
        self._was_given_config = config is not None
        self.config: RunnerConfig = self.adopt_config(config)
        self.state = RunnerState()
        self.datasets: dict[str, Any] = {}
        self.dataloaders: dict[str, Any] = {}
        self.carry: Any = None
        self.meters = Meters(reserved=("loss",))
        self.results: Results = {}
        self.standing = BestScore(self, own=is_overridden(self, "scores"))
        self._seed_is_drawn = False
        # Overrides of `init_distributed` and the log read both before the process group is there.
        self.launch = LaunchEnvironment.read()
        if self.config.deterministic:
            set_cublas_workspace()
        self.device = select_device(self.launch.local_rank)
        self._parts.open()
        self.run_state, self.saver = self._parts.run_state, self._parts.saver
        self.init_distributed()
        # An override of `init_distributed` may join the group by itself.
        if "world" not in vars(self):
            self.world = world_of(self.world_size, self.device)
        self._check_ranks_alike()
        self.state.elastic = ElasticState(
            world_size=self.world_size, restart_count=self.launch.restart_count
        )
        self.placement = self.build_placement()
        if self.config.ft.enabled:
            group = self.config.ft.replica_id, self.config.ft.group_size
            self.placement = replace(self.placement, replica_group=group)
        # Must precede `set_seed`: a seed that is drawn there must not enter the run's id. Nothing is written yet.
        self._parts.join()
        place = self._parts.run_location
        self.id, self.timestamp = place.id, place.timestamp
        self.code_id, self.config_id = place.code_id, place.config_id
        self.workspace: Workspace = place.workspace(self.timestamp)
        self.set_seed()
        self.state.rng.seed = self.seed
        self.set_deterministic()
        # Building a model may be what hangs.
        self._heartbeat_settings = (self.workspace.dir, *self.config.heartbeat.items())
        self.init_heartbeat()
        self._parts.settings_lock = self._lock_settings()
        guard(self, early)

    def _make_parts(self) -> Parts:
        return Parts(self)

    def __repr__(self) -> str:
        name = type(self).__name__
        if "workspace" not in vars(self):
            return f"<{name} in construction>"
        train = self.state.train
        ranks = f"rank {self.rank} of {self.world_size}"
        return f"<{name} {self.id} ({self.stack}): step {train.global_step}, epoch {train.epoch}, {ranks}, in {self.workspace.dir}>"

    def adopt_config(self, config: RunnerConfig | Mapping[str, object] | None) -> RunnerConfig:
        """Return a validated copy of `config` that belongs to this runner.

        Settings that the environment imposes, as `danling audit` does on the programs that it starts, are put over it.
        """
        own = config.clone() if isinstance(config, RunnerConfig) else self.config_class(config)
        impose(own)
        own.validate()
        refuse_absent_keys(own)
        if isinstance(config, RunnerConfig):
            # The rest of `__init__` reads its argument as often as `self.config`.
            self._opened_again = sections_that_make_keys(config)
            refuse_absent_keys(config)
        asked = own.stack_name()
        chosen_by_user = own.stack.lower() != "auto"
        if chosen_by_user and self.stack not in (asked, "base"):
            raise ValueError(
                f"Expected a configuration for the stack {self.stack!r}. Received: stack={own.stack!r}. "
                "Subclass `danling.Runner`, which picks the stack from the configuration, or change `stack`."
            )
        own.warn_of_idle_settings(self.stack)
        if own.ft.enabled:
            load("torchft").check_config(own, self.stack)
        if own.elastic.enabled:
            load("elastic").check_config(own, self.stack)
        return own

    def __post_init__(self) -> None:
        """Finish construction after the outermost `__init__`.

        The components are prepared; then the run directory and its log are opened, the checkpoint is restored and the metadata is
        written.
        """
        joins = self._parts.elastic is not None and self._parts.elastic.joins
        self._check_ranks_alike()  # `__init__` of a subclass may have changed settings
        self._parts.follow_store()
        if not joins:
            check_resume(self)
        check_sources_alike(self)
        self.prepare_components()
        self.open_workspace()
        stores = self._parts.stores
        if stores is not None:
            stores.bring_files()
        if self._heartbeat_settings != (self.workspace.dir, *self.config.heartbeat.items()):
            self.init_heartbeat()
        self.init_garbage_collection()
        self.init_checkpoint_manager()
        if self.checkpoint_manager is None:
            raise ValueError(
                "Expected `init_checkpoint_manager` to set `self.checkpoint_manager`. Received: None. Call super() in it; a run that is to "
                "write no checkpoints sets checkpoint.load_only=true."
            )
        self.checkpoint_manager.after_save = self._parts.data.commit_saved
        if stores is not None:
            stores.claim()
        self.saver.loaded.append(self._parts.data.commit_loaded)
        if is_asked("torchft", self.config):
            load("torchft").keep_own_positions(self, self._parts.data, self._parts.closers)
        self.state.elastic.data_replicas = self.placement.data_replicas
        self._parts.keys.between_updates()
        self._parts.attributes.begin()
        if not joins:  # else the state comes from the other ranks
            self.restore()
        if stores is not None:
            stores.start_copying()
        # After the restore: a start that fails there leaves the metadata of the run as they were.
        self._write_metadata()
        self._parts.finish()

    def _write_metadata(self) -> None:
        """Write what the run is made of. Called on all ranks."""
        self._parts.run_location.write_metadata(
            self.workspace,
            foreign=lambda: self.checkpoint_manager.on_main(
                self.checkpoint_manager.checkpoints.is_foreign
            ),
        )

    def _lock_settings(self) -> SettingsLock:
        return SettingsLock(
            self.config, check_budget=self._check_budget, changed=self._follow_setting
        )

    def _check_budget(self, key: str, value: object) -> None:
        """Refuse a budget that changes what the run counts."""
        budget = {"epochs": self.config.epochs, "steps": self.config.steps, key: value}
        epochs, steps = budget["epochs"], budget["steps"]
        if steps is not None and epochs is not None:
            raise ValueError(
                f"Expected steps or epochs, not both. Received: steps={steps}, epochs={epochs}. Set one of them to none."
            )
        done = self.state.train.global_step
        if done and (epochs is None) != self.is_step_mode:
            counted, other = ("steps", "epochs") if self.is_step_mode else ("epochs", "steps")
            raise ValueError(
                f"Expected a budget of {counted}, in which this run has counted its {done} updates. Received: {key}={value!r}. Set "
                f"{counted}, or begin another run that counts {other}, from these weights by `pretrained`."
            )

    def _follow_setting(self, key: str) -> None:
        """Follow the change of a live setting after construction."""
        if key in BUDGET and self.checkpoint_manager is not None:
            self.checkpoint_manager.step_mode = self.is_step_mode

    def _end_construction(self) -> None:
        """Lock the settings that were read. Called once, after the outermost `__post_init__`."""
        if self.config.__dict__.get("_lock", (None,))[0] is not self._parts.settings_lock:
            # `__init__` has put another configuration in its place.
            self._parts.settings_lock = self._lock_settings()
        self._parts.settings_lock.end_construction()

    def _check_settings(self) -> None:
        """Refuse settings that were changed since construction, or differ between ranks. Called on all ranks when training begins."""
        lock = self._parts.settings_lock
        lock.check_intact(self.config)
        self._check_ranks_alike()
        if lock.has_changed:
            self._write_metadata()
            lock.has_changed = False

    def _check_ranks_alike(self) -> None:
        """Refuse settings that differ between ranks. Called on all ranks."""
        if self.world.size > 1:
            check_alike(self.config, self.world.gather_objects)

    def prepare_components(self) -> None:
        """Prepare what `__init__` has set: here the loaders. Called before the first file is written."""
        self.build_dataloaders()
        self._parts.data.agree_lengths()
        self._open_sources()

    def _open_sources(self) -> None:
        split, config = self._parts.data.open_all(), self.config
        if (
            split is not None or self.standing.own
        ):  # else nothing is evaluated, of which a score could be made
            self.standing.board = ScoreBoard(
                config.score_name,
                mode=config.score_mode,
                split=split or "",
                min_delta=config.min_delta,
            )

    # Construction hooks

    def init_distributed(self) -> None:
        """Read the launch environment, pick the device and join the process group.

        From here on a failure of this process is recorded for torchrun.
        """
        record_failures()
        check_tasks()
        launch = self.launch = LaunchEnvironment.read()
        self.device = select_device(launch.local_rank)
        if is_asked("elastic", self.config):
            self._parts.elastic = load("elastic").ElasticRanks(self, self._parts.closers)
            return
        created = init_process_group(
            launch,
            self.device,
            backend=self.config.backend,
            init_method=self.config.init_method,
            timeout_seconds=self.config.comm.init_timeout_seconds,
        )
        # A group that the program has made is left to the program to destroy.
        if created:
            self._parts.closers.callback(destroy_process_group)
        self.world = world_of(launch.world_size, self.device)

    def build_placement(self) -> Placement:
        """Return the ranks that this one reduces with, and whether its loss and samples count.

        Override it if some ranks read the same data.
        """
        return Placement.alike(self.world)

    def set_seed(self) -> None:
        """Agree on the base seed and seed every random stream with it, so that all ranks initialise the same model.

        Called before the subclass builds its model. The streams of the forward are seeded by rank at the end of construction.
        """
        config = self.config
        if config.ft.enabled and config.seed is None:
            # Replica groups must read the same order of samples, and cannot communicate yet.
            config.seed = derive_seed("replica groups", self.config_id) % 2**31
        # A rank that joins takes the seed of the run that is going on.
        if self._parts.elastic is not None and self._parts.elastic.joined_run is not None:
            config.seed = self._parts.elastic.joined_run.seed
        self._seed_is_drawn = config.seed is None
        if config.seed is None:
            config.seed = self.world.on_first(self._find_seed)
        self.seed = int(config.seed or 0)
        seed_streams(derive_seed(self.seed, "initialization"))

    def _find_seed(self) -> int:
        """Return the seed of the checkpoint that the run resumes from, or draw one. May be called on one rank."""
        source = self.config.resume or None
        stored = None
        if source is not None or self.config.auto_resume:
            stored = stored_seed(self.workspace.checkpoints, source)
            if stored is None and (self._parts.stores is not None or "://" in (source or "")):
                stored = self._parts.remote.stored_seed(source)
        return secrets.randbits(31) if stored is None else int(stored)

    def set_deterministic(self) -> None:
        """Ask torch for deterministic kernels when `config.deterministic` is set; `close` restores its switches."""
        if self.config.deterministic:
            self._parts.closers.enter_context(deterministic_kernels())

    def init_signal_handlers(self) -> None:
        """Watch for SIGTERM, SIGINT and SIGUSR1 while training; the handlers are restored when it ends."""
        self._parts.session.signals = SignalWatcher()
        self._parts.session.signals.install()

    def init_heartbeat(self) -> None:
        """Start the heartbeat file of this rank when `config.heartbeat.enabled`: before `__init__` builds a model, and anew after it if
        `__init__` has changed the settings or the run directory."""
        settings = self.config.heartbeat
        for earlier in [each for each in self.observers if isinstance(each, Heartbeat)]:
            earlier.stop()
            self.observers.remove(earlier)
        if settings.enabled:
            heartbeat = Heartbeat(
                self, self.workspace.dir / settings.dir_name, settings.interval_seconds
            )
            self._parts.session.observers.append(heartbeat)
            self._parts.closers.callback(heartbeat.stop)

    def init_garbage_collection(self) -> None:
        """Pace Python's garbage collection in training and evaluation when `config.gc.interval` is set."""
        settings = dict(self.config.gc.items())
        interval = settings.pop("interval")
        if interval is not None:
            self._parts.session.observers.append(GcPacer(interval, **settings))

    def init_fault_tolerance(self) -> None:
        """Join the fault-tolerance service when `config.ft.enabled`; stacks that support it override this."""

    def open_workspace(self) -> None:
        """Create the run directory and open its log, on the main process."""
        place = self._parts.run_location
        self.workspace = place.open(
            code_id=self.code_id, config_id=self.config_id, timestamp=self.timestamp
        )
        self.id = place.id
        log_file = self.workspace.log_file if self.config.log else None
        self._parts.reporter.open_log(log_file)
        if place.notice is not None:
            logger.info("%s", place.notice)

    def membership_changed(self, before: int, after: int) -> None:
        """Override it to follow a change of the ranks, with `elastic.enabled`: `rank` and `world_size` change here and nowhere else.

        Called on all ranks between two updates, before the observers are.

        Args:
            before: Number of ranks before; on a rank that joins, 0.
            after: Number of ranks now.
        """

    # Verbs that a stack implements

    train = _of_a_stack("train", "Train to the end of the budget, and return all results.")
    train_epochs = _of_a_stack("train_epochs", "Train epoch by epoch.")
    train_steps = _of_a_stack("train_steps", "Train update by update.")
    train_epoch = _of_a_stack(
        "train_epoch", "Train one pass over one split, and return its figures."
    )
    train_step = _of_a_stack(
        "train_step", "Run one micro-batch forward and backward, and return prediction and loss."
    )
    backward = _of_a_stack(
        "backward", "Back-propagate the mean-reduced loss of a micro-batch, 0-dim."
    )
    step = _of_a_stack("step", "Close the accumulation window and decide its update.")
    optimizer_step = _of_a_stack("optimizer_step", "Apply a committed update.")
    train_context = _of_a_stack(
        "train_context", "Return the context of the forward and backward of a micro-batch."
    )
    forward_context = _of_a_stack("forward_context", "Return the context of a forward.")
    compute_loss = _of_a_stack("compute_loss", "Return the loss of a prediction, 0-dim.")
    batch_weight = _of_a_stack("batch_weight", "Return what the loss of a batch is averaged over.")
    evaluate = _of_a_stack("evaluate", "Evaluate splits, and return their figures.")
    evaluate_epoch = _of_a_stack("evaluate_epoch", "Evaluate all of one split.")
    evaluate_steps = _of_a_stack(
        "evaluate_steps", "Evaluate a bounded number of batches of one split."
    )
    evaluate_step = _of_a_stack(
        "evaluate_step", "Evaluate one batch, and return prediction and loss."
    )
    summarize = _of_a_stack("summarize", "Return the metrics of an evaluation.")
    infer = _of_a_stack("infer", "Predict every sample of a split.")
    infer_step = _of_a_stack("infer_step", "Return the prediction of one batch.")
    materialize_model = _of_a_stack("materialize_model", "Move, compile and wrap the model.")
    build_optimizer = _of_a_stack("build_optimizer", "Return the optimizer of the configuration.")
    build_scheduler = _of_a_stack("build_scheduler", "Return the scheduler of the configuration.")
    load_pretrained = _of_a_stack("load_pretrained", "Load only the model of a checkpoint.")
    load_model = _of_a_stack("load_model", "Load model weights by name.")
    load_ema = _of_a_stack("load_ema", "Restore the averaged weights.")
    load_optimizer = _of_a_stack("load_optimizer", "Restore the optimizer.")
    load_scheduler = _of_a_stack("load_scheduler", "Restore the scheduler.")

    # Data

    @property
    def train_splits(self) -> list[str]:
        """Splits to train on: `config.train_splits`, else those whose name starts with `train`."""
        return self._parts.data.to_train()

    @property
    def evaluate_splits(self) -> list[str]:
        """Splits to evaluate: `config.evaluate_splits`, else all but those to train on and those named for inference."""
        return self._parts.data.to_evaluate()

    @property
    def score_split(self) -> str | None:
        """The split whose metrics select the best checkpoint."""
        return self._parts.data.to_score(self.evaluate_splits)

    def build_dataloaders(self) -> None:
        """Build a loader for every dataset that has none; loaders that the user made are left alone."""
        for split, dataset in self.datasets.items():
            if split not in self.dataloaders:
                self.dataloaders[split] = self.build_dataloader(split, dataset)

    def build_dataloader(self, split: str, dataset: Any) -> Any:
        """Return the loader of one split over the data domain, an iterable of batches."""
        return self._parts.data.build_loader(split, dataset)

    def build_datasampler(self, split: str, dataset: Any) -> Any:
        """Return a sampler or a batch sampler for one split, or `None`; override it for your own order.

        By default a loader of the library has its own sampler, which divides the dataset over the ranks. A sampler of yours has to divide
        itself; its order is restored exactly on the same number of processes. If you return a batch sampler, which yields lists of
        indices, leave `dataloader.batch_size` out.
        """
        return None

    def source(self, split: str) -> BatchSource:
        """Return the batches of a split and the position in them, also of a loader or dataset that was added after construction."""
        return self._parts.data.of(split)

    # Progress of the run; none of it communicates

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self.launch.rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.launch.world_size

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine."""
        return self.launch.local_rank

    @property
    def distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.launch.world_size > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is global rank 0."""
        return self.launch.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is rank 0 of its machine."""
        return self.launch.local_rank == 0

    @property
    def sources(self) -> dict[str, BatchSource]:
        """Batches of each loader, with the position in them."""
        return self._parts.data.sources

    @property
    def data_domain(self) -> Domain:
        """Ranks that read different data, and over which losses and metrics are reduced."""
        return self.placement.data

    @property
    def dir(self) -> Path:
        """The run directory."""
        return self.workspace.dir

    @property
    def name(self) -> str:
        """Name of the run: `config.name`, else lineage, experiment and id."""
        config = self.config
        return (
            str(config.name) if config.name else f"{config.lineage}-{config.experiment}-{self.id}"
        )

    @property
    def train_state(self) -> TrainState:
        """Counters of training."""
        return self.state.train

    @property
    def elastic_state(self) -> ElasticState:
        """Attempts of the run."""
        return self.state.elastic

    @property
    def rng_state(self) -> RngState:
        """The seed of the run, which random numbers follow from."""
        return self.state.rng

    @property
    def epochs(self) -> int | None:
        """Number of epochs after which training ends; `None` in step mode."""
        return self.config.epochs

    @property
    def steps(self) -> int | None:
        """Updates of the whole run; in epoch mode epochs times updates an epoch, `None` when the loaders have no length.

        The same on all ranks once the runner is constructed: a pass ends with the shortest loader.
        """
        if self.config.epochs is None:
            return self.config.steps
        return (self._parts.data.updates_of_epoch or 0) * (self.epochs or 0) or None

    @property
    def is_step_mode(self) -> bool:
        """Whether the budget counts updates instead of epochs."""
        return self.config.epochs is None

    @property
    def accum_steps(self) -> int:
        """Micro-batches of an update on each rank; with `dataloader.global_batch_size` those of a full update on the first split."""
        division = self._parts.data.division()
        return int(self.config.accum_steps) if division is None else division.micro_batches

    @property
    def batch_size(self) -> int | None:
        """Batch size of a rank on the first split to train on, `None` when its loader does not say.

        With `dataloader.global_batch_size` the most samples that a rank holds at once.
        """
        return self._parts.data.batch_size

    @property
    def progress(self) -> float:
        """Share of the budget that is done, in [0, 1]; 0 without a budget."""
        if self.epochs:
            return min(self.state.train.epoch / self.epochs, 1.0)
        return min(self.state.train.global_step / self.steps, 1.0) if self.steps else 0.0

    @property
    def index(self) -> int:
        """The number results go under: completed epochs, or committed updates in step mode."""
        return self.state.train.global_step if self.is_step_mode else self.state.train.epoch

    @property
    def checkpoint_interval(self) -> int:
        """Epochs or updates between periodic checkpoints: `checkpoint.interval`, each epoch, or a twentieth of the steps."""
        if self.config.checkpoint.interval is not None:
            return int(self.config.checkpoint.interval)
        return 1 if not self.is_step_mode else max(math.ceil((self.steps or 0) / 20), 1)

    @property
    def log_interval(self) -> int:
        """Updates between log lines: `log_interval`, about a hundredth of the run, or 1024 when its length is unknown."""
        if self.config.log_interval is not None:
            return int(self.config.log_interval)
        return max(self.steps // 100, 1) if self.steps else 1024

    # Scores

    @property
    def scores(self) -> dict[int, float]:
        """The monitored metric by completed epoch or global step, of evaluations only.

        Override it for your own score, for example one computed from several metrics in `self.results`, in the order of the
        evaluations: the best and the latest score, `best`, early stopping and metric schedulers use it. No communication: the same on
        all ranks.
        """
        return {} if self.standing.board is None else dict(self.standing.board.scores)

    @property
    def best_index(self) -> int | None:
        """Completed epoch or global step of the best score; `None` before the first evaluation. Override it to choose another."""
        board = self.standing.board
        if board is None:
            return None
        return board.best_of(self.standing.scores) if self.standing.own else board.best_index

    @property
    def best_score(self) -> float | None:
        """The best score so far."""
        index = self.best_index
        return None if index is None else self.standing.scores.get(index)

    @property
    def latest_score(self) -> float | None:
        """The score of the last evaluation."""
        return next(reversed(list(self.standing.scores.values())), None)

    @property
    def is_best(self) -> bool:
        """Whether the last evaluation gave the best score."""
        latest = self.standing.latest_index
        return latest is not None and self.best_index == latest

    @property
    def latest_result(self) -> dict[str, dict[str, float]] | None:
        """The last entry of `results`."""
        return self.results[next(reversed(self.results))] if self.results else None

    @property
    def best_result(self) -> dict[str, dict[str, float]] | None:
        """The entry of `results` with the best score."""
        return self.results.get(self.best_index) if self.best_index is not None else None

    # Output of the run

    def add_tracker(self, tracker: Tracker | Callable[[], Tracker]) -> None:
        """Also send every metric of the run to your own tracker; call it in `__init__` or before `train`, on all ranks.

        The tracker is opened once, when training first begins, gets every record of `metrics.jsonl`, is flushed at every checkpoint and
        at the end of every training, even one that fails, and is closed by `close`.

        Args:
            tracker: An object with `log(values, step)`, `flush()` and `close()`, and if it likes `set_status(status)`, or a callable that
                returns one, such as its class. Used and called on the main process only.
        """
        if self.config.audit.quick is None:
            self._parts.reporter.trackers.add(tracker)

    @property
    def trackers(self) -> list[Tracker]:
        """The open trackers: none before training begins, and none on processes other than the main one."""
        return self._parts.reporter.trackers.opened

    def log_figures(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Send metrics to every tracker, `metrics.jsonl` included. May be called on all ranks; the main process sends them.

        Args:
            values: Metrics by name, usually `split/name`.
            step: Global step; `None` is that of `train_state`, which in `train_step` does not count the present update yet.
        """
        for name, value in values.items():
            check_whole(name, value)
        self.open_trackers()
        try:
            self._parts.reporter.trackers.log(
                values, self.state.train.global_step if step is None else step
            )
        except (TypeError, ValueError, RuntimeError) as error:
            check_numbers(values, error)
            raise

    def log_image(self, name: str, image: Any, step: int | None = None) -> None:
        """Send an image to the trackers. May be called on all ranks, and while the run trains on some; the main process sends it.

        Args:
            name: Its name, such as `val/sample`.
            image: A tensor (channels, height, width) or (height, width), an array (height, width, channels), or an image of PIL; floating
                values in [0, 1], others in [0, 255].
            step: Global step; `None` is that of `train_state`.

        Raises:
            ValueError: If it is no image.
        """
        self._log_media("log_image", name, partial(media.pixels_of, image), step)

    def log_histogram(self, name: str, values: Any, step: int | None = None) -> None:
        """Send a histogram to the trackers; see `log_image`.

        Args:
            name: Its name, such as `weights/head`.
            values: A tensor, an array or a list of numbers; those that are not finite are left out.
            step: Global step; `None` is that of `train_state`.
        """
        self._log_media("log_histogram", name, partial(media.numbers_of, values), step)

    def log_text(self, name: str, text: str, step: int | None = None) -> None:
        """Send a text to the trackers; see `log_image`.

        Args:
            name: Its name, such as `val/answer`.
            text: The text.
            step: Global step; `None` is that of `train_state`.
        """
        self._log_media("log_text", name, partial(str, text), step)

    def log_table(
        self,
        name: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[Any]],
        step: int | None = None,
    ) -> None:
        """Send a table to the trackers; see `log_image`.

        Args:
            name: Its name.
            columns: Names of the columns.
            rows: Numbers and texts, one a column.
            step: Global step; `None` is that of `train_state`.

        Raises:
            ValueError: If a row has another length than there are columns.
        """
        self._log_media("log_table", name, partial(media.rows_of, columns, rows), step)

    def _log_media(
        self, kind: str, name: str, prepared: Callable[[], object], step: int | None
    ) -> None:
        self.open_trackers()
        if self.is_main_process:
            at = self.state.train.global_step if step is None else step
            self._parts.reporter.trackers.log_media(kind, name, prepared(), at)

    def open_trackers(self) -> None:
        """Open the trackers when training begins or metrics are logged; what an earlier run has logged is cut back by a training only."""
        if self._parts.reporter.trackers.is_open:
            return
        if self.config.checkpoint.load_only and self.checkpoint_manager is not None:
            # Such a runner may read the directory of another run, but must not replace its metrics.
            self.checkpoint_manager.on_main(self.checkpoint_manager.checkpoints.refuse_foreign)
            self._parts.run_location.enter_to_train(resumed=self.state.train.global_step > 0)
        # Closed before the log is, so that messages of a tracker are in the log of the run.
        self._parts.closers.callback(self._parts.reporter.trackers.close)
        self._parts.reporter.trackers.open()

    def init_tensorboard(self) -> None:
        """Open the TensorBoard writer on the main process when `config.tensorboard`; a resumed run goes on in its directory."""
        self._parts.reporter.trackers.add_built_in("tensorboard")

    def init_wandb(self) -> None:
        """Open the Weights & Biases run on the main process when `config.wandb.enabled`."""
        self._parts.reporter.trackers.add_built_in("wandb")

    def print(self, *values: object, **kwargs: Any) -> None:
        """Print on the main process only; the builtin is left alone.

        Args:
            *values: What to print.
            **kwargs: As of the builtin: `sep`, `end`, `file`, `flush`.
        """
        self._parts.reporter.print(*values, **kwargs)

    @property
    def observers(self) -> Observers:
        """What watches the training, in the order in which it is called; append an `Observer` on all ranks."""
        return self._parts.session.observers

    # A loop by hand

    @contextmanager
    def session(self) -> Iterator[None]:
        """Context of your own loop: opens the trackers, watches for signals, paces garbage collection. Entered on all ranks.

        On exit the full state is saved, unless it has been already; trackers are flushed and signal handlers restored. After an exception
        nothing is saved. Call `boundary()` after every update inside.

        Raises:
            SystemExit: On exit, if a signal asked for a stop: 143, or 130 after SIGINT.
        """
        session = self._parts.session
        with self._parts.reporter.speaking(), session.observed():
            self.open_trackers()
            self._parts.reporter.trackers.begin_training()
            self.init_signal_handlers()
            session.begin()
            self._parts.keys.begin_micro_batch(None, (), 0)
            with self._parts.reporter.trackers.telling_status():
                try:
                    yield
                    # After a signal `boundary` has said so.
                    saved = self.saver.save_last(signalled=session.stop_reason in BY_SIGNAL)
                    self.checkpoint_manager.wait()
                    self.checkpoint_manager.wait_for_copies()
                    self.boundary()
                finally:
                    session.uninstall_signals()
                    self._parts.reporter.trackers.flush()
                session.exit_if_signalled(self.state.train.global_step, saved=saved)

    def boundary(self) -> bool:
        """Return whether the loop must end: a signal came, or `stop()` was called, on any rank. Call it after every update, on all ranks.

        It also writes the heartbeat and collects garbage when they are due, and seeds the random streams by rank and number of updates. One
        small collective on several ranks.
        """
        self._parts.session.boundary()
        self._parts.keys.begin_micro_batch(None, (), 0)
        return self._parts.session.agree_to_stop(self.world)

    # Saving

    def manager_class(self) -> Callable[..., CheckpointManager]:
        """Return the class of the checkpoint manager."""
        asked = self.config.checkpoint.backend
        return manager_named("file" if asked == "auto" else asked)

    def init_checkpoint_manager(self) -> None:
        """Build the manager of `checkpoint.backend`: files, or torch's distributed checkpoint."""
        settings = CheckpointSettings.from_config(self.config.checkpoint)
        self.checkpoint_manager = self.manager_class()(
            self.workspace.checkpoints,
            domain=self.world,
            run_id=self.id,
            settings=settings,
            step_mode=self.is_step_mode,
            compare=self.config_differences,
        )
        self.checkpoint_manager.before_save = self._parts.run_location.confirm
        self.checkpoint_manager.planned_history = lambda: (
            ((self.steps if self.is_step_mode else self.epochs) or 0) // self.checkpoint_interval
        )
        self.checkpoint_manager.checkpoints.look_in(
            lambda: self._parts.remote.sources, own=self._parts.stores is not None
        )
        self._parts.closers.callback(self.checkpoint_manager.close, settings.wait_timeout)

    def remote_credentials(self) -> Mapping[str, Any] | None:
        """Return credentials of the object store of `checkpoint.remote.url`; `None` leaves them to the environment.

        Override it where credentials expire: it is called whenever new ones are needed, in other threads and at any time, first within
        `super().__init__()`, so it must not need what your `__init__` sets, touch the model or communicate. Called on all ranks that upload
        or read.

        Returns:
            For S3 `access_key_id`, `secret_access_key`, `token` and `expires_at`, a `datetime` with a time zone or `None`; for Google
            Cloud `token` and `expires_at`; for Azure one of `access_key`, `sas_token` and `token`, with `expires_at`.
        """
        return None

    def config_differences(self, payload: Mapping[str, Any]) -> list[str]:
        """Return how the configuration of a checkpoint differs from this one in settings that change the result, one line per key.

        No communication: may be called on one rank.

        Args:
            payload: The checkpoint; its entries `runner` and `state` are read.
        """
        elastic = payload.get("state", {}).get("elastic", {})
        now = self.placement.data_replicas
        before = int(elastic.get("data_replicas", elastic.get("world_size", now)))
        return self.config.differences(
            payload.get("runner", {}), stored_replicas=before, replicas=now
        )

    def component_parts(self) -> list[StatePart]:
        """Return the components that this stack saves in a checkpoint, in the order in which they are restored."""
        return []

    def progress_parts(self) -> list[StatePart]:
        """Return the parts of the entry `state` of a checkpoint, in the order in which they are restored."""
        return run_parts(self, self._parts.data, self._parts.reporter.trackers)

    def state_dict(self) -> dict[str, Any]:
        """Return the full state: tensors, not copied, and plain values.

        Loader states, which differ from rank to rank, are gathered, so that every rank returns those of all.
        """
        self.broadcast_buffers()
        return {
            "format_version": FORMAT_VERSION,
            "runner": self.config.public(),
            "state": self.run_state.progress(),
            **self.run_state.components(self.component_states()),
            **self._parts.attributes.state(),
            **self._parts.observer_states.state(),
            "dataloaders": loader_states(
                self, self._parts.data.trained_sources(), self._parts.data.named_changes
            ),
        }

    def broadcast_buffers(self) -> None:
        """Make the buffers of ranks that have copies of a model equal, before a save or an evaluation; a stack with copies overrides it."""

    def component_states(self) -> dict[str, Any]:
        """Return the states of the components by name, such as `model`; override it in a runner with its own loop."""
        return self.run_state.components()

    def checkpoint_state(self) -> dict[str, Any]:
        """Return the full state, which the checkpoint manager saves."""
        state = self.state_dict()
        check_payload(state, "`state_dict` to return the full state")
        return state

    @without_name
    def save_checkpoint(self, *, history: bool = False, save_best: bool = True) -> None:
        """Save the full state as `latest`, and as history or `best` where that applies.

        The write may go on in the background, see `checkpoint.async_enabled`; the time of a save does not count in the speed of training.

        Args:
            history: Also keep it under its history name, `ckpt-e...` or `ckpt-s...`.
            save_best: Also make it `best` when the score of this very state is the best one.

        Raises:
            CheckpointError: If an earlier save in the background failed, or this one cannot be written.
            NonFiniteError: If the last update was not finite, which on an accelerator is found only now.
        """
        if self.config.checkpoint.load_only:
            # Observers hear of the update, and of a save, as in a run that writes.
            with self._parts.session.saving():
                return
        parts = self._parts
        scored = (
            not isinstance(parts, TorchParts)
            or parts.results.scored_at == self.state.train.global_step
        )
        is_best = save_best and scored and self.is_best and self.standing.latest_index == self.index
        self.saver.save(history=history, best=is_best)

    # Loading

    def restore(self) -> None:
        """Load what the configuration names: `resume`, else `auto_resume`, else `pretrained`."""
        restore_run(self)

    def read_checkpoint(self, checkpoint: str | Path) -> dict[str, Any]:
        """Return the verified payload of a checkpoint.

        Args:
            checkpoint: A name in the run's own checkpoint directory, or a path.

        Returns:
            Tensors on the CPU and plain values, by component: `model`, `optimizer`, `state`, ...
        """
        payload: dict[str, Any] = self.checkpoint_manager.load_checkpoint(checkpoint)
        return payload

    def load_checkpoint(self, checkpoint: str | Path | Mapping[str, Any]) -> None:
        """Restore the full state of a checkpoint; a replica group prefers loader states that it has saved for itself.

        Args:
            checkpoint: A name in the run's own checkpoint directory (`"latest"`, `"best"`, `"ckpt-..."`), a path, or a payload, as
                `read_checkpoint` and `state_dict` return it.

        Raises:
            CheckpointNotFound: If there is none.
            CheckpointDamaged: If a file is not what was written.
            CheckpointMismatch: If a component is missing, or the stored configuration means another run.
        """
        with together(self, "load_checkpoint"):
            if isinstance(checkpoint, Mapping):
                check_given(checkpoint, self.run_state.excluded)
                payload, source = checkpoint, None
            else:
                payload, source = self.read_checkpoint(checkpoint), checkpoint
            check_payload(payload, "`read_checkpoint` to return the payload of the checkpoint")
            stored = payload.get("runner", {})
            # A seed that was drawn is no choice of the user: the run continues with that of the checkpoint.
            if self._seed_is_drawn and stored.get("seed") is not None:
                self.seed = self.state.rng.seed = int(stored["seed"])
                self._parts.settings_lock.put("seed", self.seed)
            loaded_since = self.run_state.loaded_since(payload)
            log_exclusions(
                self.run_state.excluded_from(payload),
                loaded_since,
                was_named=bool(self.config.resume),
            )
            check_same_run(self, payload)
            self.load_state_dict(payload)
            if source is not None:
                # A payload is not a checkpoint on disk that later saves could continue.
                self.checkpoint_manager.begin(source)
                if self.checkpoint_manager.checkpoints.resumed is None:
                    # Of another run, whose lines of metrics are in another file.
                    self._parts.reporter.trackers.resume_from(None)
            where = f"step {self.state.train.global_step}, epoch {self.state.train.epoch}"
            logger.info("Resumed from %s at %s.", "a payload" if source is None else source, where)
            log_changes_since(payload)
            if source is not None:
                self.saver.note_loaded(source)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore a payload: components, loaders, attributes of the user's, counters and observers.

        Args:
            state: What `state_dict` returned, or the payload of a checkpoint.
        """
        with self.run_state.loading(state) as left_out:
            needed = self.run_state.names() or list(self.component_states())
            payload, excluded = left_out.apply(
                state, needed=needed, here=self.run_state.weight_paths()
            )
            check_complete(
                payload, excluded, [*needed, "state", *(["dataloaders"] if self.sources else [])]
            )
            self._parts.attributes.load("requires_grad", payload)
            self.load_components(payload, excluded)
            self._parts.attributes.load("buffers", payload)
            if "dataloaders" in payload:
                fresh = {
                    split: None for split in self.sources if f"dataloaders.{split}" in excluded
                }
                with restoring("dataloaders", "dataloaders", own=(ValueError,)):
                    self.load_dataloaders({**payload["dataloaders"], **fresh})
            self._parts.attributes.load("attributes", payload)
            if "state" in payload:
                self.run_state.load_progress(payload["state"])
            self._parts.observer_states.load(payload, excluded=excluded)
            self._parts.keys.between_updates()

    def load_components(self, payload: Mapping[str, object], excluded: set[str]) -> None:
        """Restore what `component_states` returned; override both together.

        Args:
            payload: The payload of a checkpoint without the excluded parts.
            excluded: The dotted paths of these parts.
        """
        self.run_state.load_components(payload, excluded)

    def load_dataloaders(self, states: Mapping[str, Any]) -> None:
        """Restore the position in the loaders of the splits to train on.

        Args:
            states: State by split; `None` for a split that starts from the beginning.
        """
        restore_positions(self, self._parts.data, states)

    # Sources

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: str | Path,
        config: Mapping[str, Any] | None = None,
        *,
        attributes: bool = True,
    ) -> Self:
        """Construct a runner with the configuration of a checkpoint and restore its full state.

        Paths in the stored configuration (`dir`, `checkpoint_dir`, `log_file`, `workspace_root`, directories of traces) are ignored. If the
        checkpoint is in the directory of its run, the run continues there; otherwise it writes where `config` says, or into a new
        directory under the default root. Secrets (text under `token`, `api_key`, ...) are taken only from `config`.

        Args:
            checkpoint: A checkpoint file or directory.
            config: Settings that override the stored ones, such as `{"steps": 2000}`. The runner's configuration is of its class if
                it is a `RunnerConfig`, else of `config_class`.
            attributes: Whether the attributes that the program has set on its runner, and the states of its observers, are restored too.
                Say no for the checkpoint of a stranger, who could choose their values.

        Raises:
            CheckpointNotFound: If there is none.
        """
        stored = without_untrusted_settings(without_places(cls.read_config(checkpoint)))
        own = continued(stored, config, cls.config_class)
        own.resume = str(checkpoint)
        if not attributes:
            listed = ExcludedFromLoading(own.checkpoint.exclude_from_loading)
            own.checkpoint.exclude_from_loading = listed.and_also("attributes", "observers")
        runner: Self = cls(own)
        return runner

    @classmethod
    def from_pretrained(
        cls, config: Mapping[str, object], checkpoint: str | Path | Mapping[str, Any]
    ) -> Self:
        """Construct a runner and load only the model of a checkpoint into it.

        Args:
            config: The configuration of the new run.
            checkpoint: A checkpoint of this library, a file with a plain `state_dict`, or weights by name, also as `{"model": weights}`.
        """
        own = config.clone() if isinstance(config, RunnerConfig) else cls.config_class(config)
        if not isinstance(checkpoint, Mapping):
            own.pretrained = str(checkpoint)
        runner: Self = cls(own)
        if isinstance(checkpoint, Mapping) and runner.state.train.global_step == 0:
            # A run that goes on has its own weights, as with `pretrained`.
            runner.load_pretrained(checkpoint)
        return runner

    @classmethod
    def read_config(cls, checkpoint: str | Path) -> dict[str, Any]:
        """Return the configuration stored in a checkpoint, as plain values. No communication: may be called on one rank.

        Args:
            checkpoint: A checkpoint, or a checkpoint or run directory with a `latest`; or a URL.
        """
        if "://" in str(checkpoint):
            stored: dict[str, Any] = load("remote").read_config_at(str(checkpoint))
            return stored
        return read_config(checkpoint)

    # Ending

    def unwrap(self, model: Any) -> Any:
        """Return the user's module out of the wrapper of a stack. No communication: may be called on one rank."""
        return model

    @property
    def unwrapped_model(self) -> nn.Module:
        """The model as the user made it."""
        module: nn.Module = self.unwrap(self.model)
        return module

    def close(self) -> None:
        """Finish background work, release everything that the runner opened, and unwrap `model`; a second call does nothing.

        Raises:
            Exception: The error of a background writer. Everything is closed all the same.
        """
        closers, calls = self._parts.closers, self._parts.calls
        if calls is not None and not closers.closed:
            calls.end()
        # Before the groups are destroyed: a wrapper that outlives them can abort the process.
        if not closers.closed and self.model is not None:
            self.model = self.unwrap(self.model)
        closers.close()

    if not TYPE_CHECKING:  # else a type checker takes every name for one that may be set

        def __setattr__(self, name: str, value: object) -> None:
            # In `__init__` every name is checked. Later the loops set attributes too, and only what hides a method is refused.
            if GUARDED in self.__dict__:
                check_assignment(self, name, value, self.__dict__)
            elif not callable(value):
                if name not in SETTABLE:
                    check_method(self, name, value)
            elif name in OFTEN_LEFT_OUT and "_parts" in self.__dict__:
                self._parts.note_hook()
            super().__setattr__(name, value)

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):
                # A property whose own code asked for an attribute that is not there: its error is raised again.
                return object.__getattribute__(self, name)
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}.{instead_of(name)}",
                name=name,
                obj=self,
            )

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            f"Expected a runner to stay in its process. Received: a copy or a pickle of a {type(self).__name__}. Its model is "
            "self.unwrapped_model, its state is in state_dict() and its checkpoints; what goes to another process, such as a collate_fn, "
            "must not be a method of it."
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            assert error is not None
            self._parts.reporter.trackers.set_status_after(error)
            close_after_error(self, error)

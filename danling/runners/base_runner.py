"""The contract of every runner: its life, its verbs, its attributes, and no torch loop."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from typing_extensions import Self

from danling.checkpoints import CheckpointError, read_config
from danling.checkpoints.reading import obeyed
from danling.config import RunnerConfig
from danling.data import Splits, derive_seed, seed_streams
from danling.distributed import (
    Domain,
    LaunchEnvironment,
    LocalDomain,
    Placement,
    destroy_process_group,
    init_process_group,
    select_device,
)
from danling.mesh.axes import axes_with
from danling.metrics import Meters, ScoreBoard
from danling.reporting import Printer, RunLog, close_run_log, open_run_log, speaking_for
from danling.torchft import check_layout
from danling.utils.secrets import secret_values, without_secrets
from danling.workspace import Workspace
from danling.workspace.litter import remove_litter
from danling.workspace.placing import without_places
from danling.workspace.run_place import RunPlace

from .meta import MetaRunner, strings_in_methods
from .runner_checkpoints import RunnerCheckpoints
from .state import ElasticState, RunnerState
from .verbs import Results

logger = logging.getLogger("danling")

RESERVED_FIGURES = ("loss",)
"""Figures that the runner makes itself, and that a meter of the same name would change without a word."""


class BaseRunner(RunnerCheckpoints, metaclass=MetaRunner):
    """What is common to all stacks.

    A subclass calls `super().__init__(config)`, puts its components on itself and overrides what it wants; `__post_init__` then
    runs once, after the outermost `__init__`. When construction fails half-way, what was opened is closed again.

    Every method is called on all ranks, unless its own text says otherwise. So is the constructor.

    Attributes:
        config: The runner's own copy of the configuration; the caller's object is never changed.
        workspace: Paths of the run, which may be read in `__init__`; the run directory is made afterwards.
        state: Counters, attempts and random streams; saved with every checkpoint.
        mode: `"train"`, `"evaluate"` or `"infer"`.
        model: The model; wrapped for the stack after construction.
        ema: Averaged weights, or `None`.
        criterion: Loss callable `(pred, target) -> 0-dim tensor`, or `None`.
        optimizer: The optimizer, or `None`.
        scheduler: The learning-rate scheduler, or `None`.
        datasets: Datasets by split, from which loaders are built.
        dataloaders: Loaders by split; one that the user put there is used as it is.
        metrics: What evaluation computes beside the loss: a callable `(pred, target)`, an object with `update` / `compute` /
            `reset` (torchmetrics included), a mapping of these, or `None`.
        meters: Running averages that a user may add to in `train_step`; logged and reset with the loss, whose name they may not have.
        results: Figures by completed epoch or global step, then by split.

    Args:
        config: A `RunnerConfig`, a mapping, the path of a file, or `None` for the defaults.

    Raises:
        ValueError: If a setting is unknown or contradicts another one.
    """

    stack: str = "base"
    _run_log: RunLog

    # For those who override `set_seed` with a way of their own.
    seed: int = 0
    seed_was_drawn: bool = False

    # What a user sets, or a stack builds; nothing of it is there before.
    model: Any = None
    ema: Any = None
    criterion: Any = None  # not `Callable | None`: a step may call it without asking a type checker
    optimizer: Any = None
    scheduler: Any = None
    metrics: Any = None

    config_class: ClassVar[type[RunnerConfig]] = RunnerConfig
    """Class of the configuration that a runner makes of a mapping, a file or a checkpoint."""

    def __init__(self, config: RunnerConfig | Mapping[str, Any] | None = None) -> None:
        self._closers = ExitStack()
        self._closed = False
        self._made_of_mapping = isinstance(config, Mapping) and not isinstance(config, RunnerConfig)
        self.config: RunnerConfig = self.adopt_config(config)
        self.mode: Literal["train", "evaluate", "infer"] = "train"
        self.state = RunnerState()
        self.datasets: dict[str, Any] = {}
        self.dataloaders: dict[str, Any] = {}
        self._splits = Splits(
            lambda: self.datasets,
            lambda: self.dataloaders,
            lambda key: self.config.get(key, None),
            accum_steps=lambda: self._undivided_accum_steps(),
        )
        self.meters = Meters(reserved=RESERVED_FIGURES)
        self.results: Results = {}
        self.checkpoint_manager: Any = None
        self.scoreboard: ScoreBoard | None = None
        self._open_run_state()
        self.launch = LaunchEnvironment.read()
        self.device = select_device(self.launch.local_rank)
        self.init_distributed()
        self._complete_distributed()
        self.placement = self.build_placement()
        self._printer = Printer(self.is_main_process)
        self._name_run()
        self.set_seed()
        self.set_deterministic()
        # Building a model may be what hangs.
        self._begin_heartbeat()

    def adopt_config(self, config: RunnerConfig | Mapping[str, Any] | None) -> RunnerConfig:
        """Return a validated copy of `config` that belongs to this runner. Called on all ranks.

        Args:
            config: What the user passed.

        Raises:
            ValueError: If a setting is out of bounds, contradicts another one, or names another stack; if `ft.enabled` with a stack other
                than `ddp` and `parallel`, or with an axis other than `replicate` and `shard`, or the place among the groups is wrong.
        """
        own = deepcopy(config) if isinstance(config, RunnerConfig) else self.config_class(config)
        own.validate()
        asked = own.stack_name()
        chosen_by_user = own.stack.lower() != "auto"
        if chosen_by_user and self.stack not in (asked, "base"):
            raise ValueError(
                f"Expected a configuration for the stack {self.stack!r}. Received: stack={own.stack!r}. "
                "Subclass `danling.Runner`, which picks the stack from the configuration, or change `stack`."
            )
        own.warn_without_effect(self.stack)
        if own.ft.enabled:
            axes = {} if self.stack == "ddp" else dict(own.parallel.axes.items())
            shared = axes_with(reads_data=True)
            check_layout(self.stack, axes, shared=shared, replica_id=own.ft.replica_id, group_size=own.ft.group_size)
        return own

    def check_settings_are_read(self) -> None:
        """Refuse a key at the top level of the configuration that does nothing: no class declares it, and no rank has read it.

        Called on all ranks, when training begins: by then a program has read its own keys.

        Raises:
            ValueError: If there is one, with its place in the library's configuration.
        """
        unread = self.config.unread()
        if self._made_of_mapping:
            # It may read the mapping itself, which nobody sees.
            unread -= strings_in_methods(type(self))
        if self.distributed:
            unread = set.intersection(*self.world.gather_objects(unread))
        self.config.refuse_unread(unread, may_be_read=self._made_of_mapping)

    def __post_init__(self) -> None:
        """Finish construction after the outermost `__init__`. Called on all ranks.

        What the user has set up is made ready; then the run directory and its log are opened, the checkpoint is restored and the
        metadata is written.
        """
        self.prepare_components()
        self.open_workspace()
        self._begin_heartbeat()
        self.init_garbage_collection()
        self._open_checkpoints()
        self._seed_forward()
        self.restore()
        self._write_metadata()
        for source in self.sources.values():
            self._closers.callback(source.close)

    def prepare_components(self) -> None:
        """Make ready what `__init__` has set up: here the loaders. Called on all ranks, before the first file is written."""
        self.build_dataloaders()
        self._splits.agree_lengths(self.train_splits, self.optimizer_domain)
        self._open_sources()
        self._choose_score()

    def _seed_forward(self) -> None:
        # Replicas are initialised alike, but their dropout masks must differ: from here on every data rank has its own streams.
        self.state.elastic.data_replicas = self.data_replicas
        self.state.elastic.streams = self.stream_layout
        seed_streams(derive_seed(self.seed, "forward", self.stream_place[0]))

    def _write_metadata(self) -> None:
        config, manager = self.config, self.checkpoint_manager
        if config.checkpoint.load_only and manager is not None and manager.is_foreign():
            return
        if config.checkpoint.load_only and self.world.on_first(self.workspace.has_metadata):
            return  # it only looks
        if self.is_main_process:
            listed = config.secret_keys or ()
            self.workspace.write_metadata(
                config.public(),
                config.canonical(replicas=self.data_replicas),
                without_secrets(config.changed(), listed),
                self._run_place.code,
                keep_diff=config.git_diff,
                secrets=secret_values(config.plain(), listed),
            )

    # Construction hooks

    def init_distributed(self) -> None:
        """Read the launch environment, pick the device and join the process group. Called on all ranks."""
        launch = LaunchEnvironment.read()
        self.launch = launch
        self.device = select_device(launch.local_rank)
        created = init_process_group(
            launch,
            self.device,
            backend=self.config.backend,
            init_method=self.config.init_method,
            timeout_seconds=self.config.comm.init_timeout_seconds,
        )
        if created:
            self._closers.callback(destroy_process_group)
        self.world: Domain = Domain(device=self.device) if launch.world_size > 1 else LocalDomain()
        self.state.elastic = ElasticState(world_size=launch.world_size, restart_count=launch.restart_count)

    def _complete_distributed(self) -> None:
        """Stand alone where `init_distributed` has joined nothing; several processes must be joined by somebody."""
        if "world" in vars(self):
            return
        size = self.launch.world_size
        if size > 1 and not torch.distributed.is_initialized():
            raise ValueError(
                f"Expected `init_distributed` to join a process group of {size} processes. Received: none. Call super().init_distributed() "
                "in it, or torch.distributed.init_process_group."
            )
        self.world = Domain(device=self.device) if size > 1 else LocalDomain()
        self.state.elastic = ElasticState(world_size=size, restart_count=self.launch.restart_count)

    def build_placement(self) -> Placement:
        """Return with whom this rank reduces and what of its work counts; override it for ranks that do not all read data of their own.

        Called on all ranks, after `init_distributed`.
        """
        return Placement.alike(self.world)

    def set_seed(self) -> None:
        """Agree on the base seed and seed every stream with it, so that all replicas are initialised alike.

        Called on all ranks, before the subclass builds its model. The forward's streams are seeded apart, by rank, at the end of
        construction.
        """
        if self.config.ft.enabled and self.config.seed is None:
            # Replica groups must read one order of samples, and cannot speak to each other yet.
            self.config.seed = derive_seed("replica groups", self.config_id) % 2**31
        self.seed_was_drawn = self.config.seed is None
        if self.seed_was_drawn:
            drawn = (self._stored_seed() or secrets.randbits(31)) if self.is_main_process else None
            self.config.seed = self.world.broadcast_object(drawn)
        self.seed = int(self.config.seed or 0)
        seed_streams(derive_seed(self.seed, "initialization"))

    def _stored_seed(self) -> int | None:
        """Return the seed of the checkpoint that the run will go on from, so that what `__init__` draws is drawn again."""
        config = self.config
        if not (config.resume or config.auto_resume):
            return None
        own = self.locate_workspace().checkpoints
        names = [own / name for name in ("latest", "latest.pth", "best", "best.pth")]
        for source in (
            [Path(config.resume), own / config.resume, own / f"{config.resume}.pth"] if config.resume else names
        ):
            try:
                stored = read_config(source).get("seed")
            except (CheckpointError, OSError):
                continue
            return int(stored) if stored is not None else None
        return None

    def set_deterministic(self) -> None:
        """Ask torch for deterministic kernels when `config.deterministic` is set, and put its switches back at close.

        Called on all ranks.
        """
        if not self.config.deterministic:
            return
        before = torch.are_deterministic_algorithms_enabled()
        benchmark = torch.backends.cudnn.benchmark
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        self._closers.callback(torch.use_deterministic_algorithms, before)
        self._closers.callback(setattr, torch.backends.cudnn, "benchmark", benchmark)

    def _name_run(self) -> None:
        # Before a seed is drawn, which is no part of the run's identity.
        self._run_place = RunPlace(
            lambda: self.config, world=self.world, replicas=self.data_replicas, part=lambda: self.workspace_part
        )
        self._closers.callback(self._run_place.release)
        self.code_id, self.timestamp = self._run_place.code_id, self._run_place.timestamp
        self.id, self.config_id = self._run_place.id, self._run_place.config_id
        self.workspace = self.locate_workspace()

    def locate_workspace(self) -> Workspace:
        """Return the paths of the run; no file is touched. May be called on any rank."""
        return self._run_place.workspace(id=self.id, code_id=self.code_id, timestamp=self.timestamp)

    def open_workspace(self) -> None:
        """Create the run directory and open its log, on the main process."""
        config = self.config
        # A user may name code and configuration otherwise, which the identity of the run is made of.
        self._run_place.code_id, self._run_place.config_id = self.code_id, self.config_id
        self._run_place.enter()
        self.id = self._run_place.id
        self.workspace = self.locate_workspace()
        self.workspace.create()
        if self.is_main_process and not config.checkpoint.load_only:
            remove_litter(self.workspace.dir)
        self._run_log = open_run_log(
            self.workspace.log_file if config.log else None, is_main=self.is_main_process, rank=self.rank
        )
        self._closers.callback(close_run_log, self._run_log)
        if self._run_place.notice is not None:
            logger.info("%s", self._run_place.notice)

    # A loop by hand

    @contextmanager
    def session(self) -> Iterator[None]:
        """Watch a loop of your own: open the trackers, watch for signals, pace garbage collection. Entered on all ranks.

        On exit the full state is saved, unless it has been; trackers are flushed and signals are as before. After an exception nothing is
        saved. Call `boundary()` after every update inside.

        Raises:
            SystemExit: On exit, where a signal asked for a stop: 143, or 130 after SIGINT.
        """
        session = self._session
        with speaking_for(self._run_log), session.collecting():
            self.open_trackers()
            self.init_signal_handlers()
            session.begin()
            try:
                yield
                if not self.saver.is_saved:
                    self.save_checkpoint()
                self.checkpoint_manager.wait()
                self.boundary()
            finally:
                session.uninstall_signals()
                self._reporter.flush()
        session.exit_if_signalled(self.state.train.global_step)

    def boundary(self) -> bool:
        """Return whether the loop is to end, since a signal came on any rank. Call it after every update, on all ranks.

        The heart beats and garbage is collected here, when it is due. One small collective on several ranks.
        """
        self._session.updated(self.state.train.global_step, self.state.train.epoch)
        return self._session.agree_to_stop(self.world)

    # Sources

    @classmethod
    def from_checkpoint(cls, checkpoint: str | Path, config: Mapping[str, Any] | None = None) -> Self:
        """Construct a runner with the configuration of a checkpoint and restore its full state. Call on all ranks.

        Places that the checkpoint names (`dir`, `checkpoint_dir`, `log_file`, `workspace_root`, directories of traces) are not obeyed. A
        checkpoint that lies in the directory of its run goes on there; from anywhere else the run writes where `config` says, or into
        a new directory under the default root. Secrets (text under `token`, `api_key`, ...) are taken from `config` alone.

        Args:
            checkpoint: A checkpoint file or directory.
            config: Settings that override the stored ones, such as `{"steps": 2000}`. The runner's configuration is of its class if
                it is a `RunnerConfig`, else of `config_class`.

        Raises:
            CheckpointNotFound: If there is none.
        """
        stored = obeyed(without_places(cls.read_config(checkpoint)))
        # Those of the run that made it, which an older version wrote down, are not for this one to use.
        stored = without_secrets(stored, stored.get("secret_keys") or ())
        if isinstance(config, RunnerConfig):
            own = deepcopy(config)
            own.merge(stored)
        else:
            own = cls.config_class(stored)
        own.claim(stored)  # the run that is gone on with has trained with them
        own.merge(config.changed() if isinstance(config, RunnerConfig) else dict(config or {}))
        own.resume = str(checkpoint)
        runner: Self = cls(own)
        return runner

    @classmethod
    def from_pretrained(cls, config: Mapping[str, Any], checkpoint: str | Path) -> Self:
        """Construct a runner and load only the model of a checkpoint into it. Call on all ranks.

        Args:
            config: The configuration of the new run.
            checkpoint: A checkpoint of this library, or a file with a plain `state_dict`.

        Raises:
            CheckpointNotFound: If there is none.
            CheckpointMismatch: If names or shapes are not those of the model.
        """
        own = deepcopy(config) if isinstance(config, RunnerConfig) else cls.config_class(config)
        own.pretrained = str(checkpoint)
        runner: Self = cls(own)
        return runner

    @classmethod
    def read_config(cls, checkpoint: str | Path) -> dict[str, Any]:
        """Return the configuration stored in a checkpoint, as plain values. No communication: may be called on one rank.

        Args:
            checkpoint: A checkpoint, or a checkpoint or run directory with a `latest`.

        Raises:
            CheckpointNotFound: If there is none.
            CheckpointDamaged: If it cannot be read.
        """
        return read_config(Path(checkpoint))

    # Speaking and ending

    def print(self, *values: Any, **kwargs: Any) -> None:
        """Print on the main process only; the builtin is left alone.

        Args:
            *values: What to print.
            **kwargs: As of the builtin: `sep`, `end`, `file`, `flush`.
        """
        self._printer(*values, **kwargs)

    def unwrap(self, model: Any) -> Any:
        """Return the user's module out of the wrapper of a stack. No communication: may be called on one rank.

        Args:
            model: The model, wrapped or not.
        """
        return model

    @property
    def unwrapped_model(self) -> nn.Module:
        """The model as the user made it."""
        module: nn.Module = self.unwrap(self.model)
        return module

    @property
    def dir(self) -> Path:
        """The run directory."""
        return self.workspace.dir

    def close(self) -> None:
        """Finish background work and release what the runner opened. Call on all ranks; a second call does nothing.

        Raises:
            Exception: What a background writer had to report. Everything is closed all the same.
        """
        if self._closed:
            return
        self._closed = True
        self._closers.close()

    def abandon(self) -> None:
        """Close after a failure: nothing that goes wrong here hides the user's exception. Called on every rank that failed to come up."""
        try:
            if hasattr(self, "_closers"):
                self.close()
        except Exception:
            logger.exception("Closing after a failure failed as well; the failure itself follows.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

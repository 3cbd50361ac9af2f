"""Construction of a torch runner: devices, wrappers, optimizer, scheduler, loaders, trackers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from danling.data import BatchSource, DataLoader, build_dataloader, derive_seed, seed_streams
from danling.distributed import Ballot
from danling.metrics import MetricSet, ScoreBoard
from danling.optim import OPTIMIZERS, SCHEDULERS, build_param_groups, needs_metric
from danling.supervision import GcPacer, Heartbeat, SignalWatcher
from danling.training import EMA, Precision, Window
from danling.utils.names import canonical_name
from danling.workspace import JsonlTracker, TensorBoardTracker, Tracker, WandbTracker

from .base_runner import BaseRunner
from .checkpoints import FileCheckpointManager
from .component_checks import check_criterion, check_mapping, check_model, check_optimizer, misnamed
from .config_effects import idle_settings
from .config_foreign import foreign_settings

logger = logging.getLogger("danling")

_SCORE_SPLITS = ("val", "validate", "validation", "valid", "dev")
_SCHEDULER_KEYS = ("interval", "monitor")


class TorchComponents(BaseRunner):
    """Turns what the user put on the runner into what training needs."""

    stack = "ddp"

    # What a hook that is overridden with nothing leaves as it is.
    _wrapped_for: int | None = None
    heartbeat: Heartbeat | None = None
    gc_pacer: GcPacer | None = None

    def __post_init__(self) -> None:
        """Move and wrap the model, build optimizer, scheduler and loaders, restore the checkpoint, write the metadata.

        Runs once on all ranks after the outermost `__init__`. Bad input is refused before the first file is written.
        """
        self._check_components()
        self.init_fault_tolerance()
        self.precision = Precision(self.config.precision, self.device)
        self.window = Window(self.optimizer_domain, self.device)
        self.ballot = Ballot(self.optimizer_domain, self.device, reports=self.reports)
        self.materialize_model()
        self._build_if_absent()
        self._open_sources()
        self._choose_score()
        self.metric_set = MetricSet.wrap(self.metrics, domain=self.figures_domain, device=self.device)
        super().__post_init__()
        self.init_checkpoint_manager()
        self._seed_forward()
        self.restore()
        self._write_metadata()
        self._open_supervision()
        self._check_effects()

    def _check_effects(self) -> None:
        """Refuse a scheduler that nothing would advance, and warn of settings that nothing reads. Called on all ranks."""
        if self.scheduler is not None and needs_metric(self.scheduler):
            kind = type(self.scheduler).__name__
            if self.scheduler_interval() == "step":
                raise ValueError(
                    f"Expected scheduler.interval to be 'epoch' or 'validation' for {kind}, which goes by a figure of evaluation. "
                    "Received: scheduler.interval='step'. Unset it."
                )
            if not self.evaluate_splits and "monitor" not in self.config.get("scheduler", {}):
                raise ValueError(
                    f"Expected an evaluation split for {kind}, which goes by its figures. Received: none. Put one into `self.datasets`, or "
                    "set scheduler.monitor to a figure of training, such as 'train.loss'."
                )
        if self.is_main_process:
            for message in self.idle_settings():
                logger.warning("%s", message)

    def idle_settings(self) -> list[str]:
        """Return a sentence for every setting that has no effect in this run.

        No communication: may be called on one rank.
        """
        config = self.config
        built = [self.sources[split] for split in self.datasets if split in self.sources]
        return [
            *idle_settings(
                config,
                evaluates=bool(self.evaluate_splits),
                step_mode=self.is_step_mode,
                positioned=all(source.kind == "position" for source in built),
                writes_files=isinstance(self.checkpoint_manager, FileCheckpointManager),
            ),
            *foreign_settings(
                config,
                builds_loaders=any(isinstance(loader, DataLoader) for loader in self.dataloaders.values()),
                builds_optimizer=bool(config.get("optim", None)),
            ),
            *misnamed(type(self), vars(self), self._unset()),
        ]

    def _unset(self) -> list[str]:
        """Return the components that neither the user nor the configuration has given."""
        given = {
            "criterion": self.criterion is not None or self._overrides("compute_loss") or self._overrides("train_step"),
            "optimizer": self.optimizer is not None,
            "scheduler": self.scheduler is not None,
            "datasets": bool(self.datasets or self.dataloaders),
            "dataloaders": bool(self.datasets or self.dataloaders),
        }
        return [name for name, is_there in given.items() if not is_there]

    def _check_components(self) -> None:
        check_model(self.model, vars(self))
        check_criterion(self.criterion)
        check_mapping("datasets", self.datasets)
        check_mapping("dataloaders", self.dataloaders)
        check_optimizer(self.optimizer, self.named_parameters())

    def _build_if_absent(self) -> None:
        if self.optimizer is None and (self.config.get("optim", None) or self._overrides("build_optimizer")):
            self.optimizer = self.build_optimizer()
        self.build_dataloaders()
        self._agree_lengths()
        self.bind_optimizer()
        asked = self.config.get("scheduler", None) or self._overrides("build_scheduler")
        if self.scheduler is None and self.optimizer is not None and asked:
            self.scheduler = self.build_scheduler()
        for optimizer in (self.optimizer, *getattr(self.optimizer, "optimizers", ())):
            if isinstance(optimizer, torch.optim.Optimizer):
                optimizer.register_step_pre_hook(self._refuse_early_step)

    _in_train_step = False

    def _refuse_early_step(self, optimizer: Any, *_: Any) -> None:
        if self._in_train_step:
            raise RuntimeError(
                f"Expected `train_step` to leave the update to the runner. Received: a step of {type(optimizer).__name__} inside of it, "
                "which would apply the gradient twice. Remove optimizer.step(); override `optimizer_step` for an update of your own."
            )

    def _overrides(self, hook: str) -> bool:
        """Whether a hook is the user's own."""
        return not getattr(type(self), hook).__module__.startswith("danling.")

    def bind_optimizer(self) -> None:
        """Bind model and optimizer to each other where a stack does, before the scheduler is built. Call on all ranks."""

    def _seed_forward(self) -> None:
        # Replicas are initialised alike, but their dropout masks must differ: from here on every data rank has its own streams.
        self.state.elastic.data_replicas = self.data_replicas
        self.state.elastic.streams = self.stream_layout
        seed_streams(derive_seed(self.seed, "forward", self.stream_place[0]))

    # Model

    def materialize_model(self) -> None:
        """Move model and criterion to the device, average, compile and wrap the model. Call on all ranks."""
        self.model.to(self.device)
        if isinstance(self.criterion, nn.Module):
            self.criterion.to(self.device)
        self._build_ema()
        self._compile_model()
        self.model = self.wrap_model(self.model)
        self._wrapped_for = self._trained_count()
        if isinstance(self.model, DistributedDataParallel):
            # As the wrapper does with the model's.
            for parameter in self._criterion_tensors("parameters"):
                self.world.broadcast(parameter.data)

    def _build_ema(self) -> None:
        settings = {key: value for key, value in self.config.ema.items() if key != "enabled"}
        if self.config.ema.enabled and self.ema is None:
            self.ema = EMA(self.model, **settings)

    def _compile_model(self) -> None:
        settings = self.config.compile
        if not settings.enable:
            return
        options = {name: settings[name] for name in ("backend", "fullgraph", "dynamic", "mode", "options")}
        if self.distributed and settings.optimize_ddp is not None:
            torch._dynamo.config.optimize_ddp = settings.optimize_ddp  # type: ignore[assignment]
        # In place: torch.compile(model) would put `_orig_mod.` before every name.
        self.model.compile(**{name: value for name, value in options.items() if value is not None})

    def _trained_count(self) -> int:
        return sum(parameter.requires_grad for parameter in self.unwrapped_model.parameters())

    def follow_freezing(self) -> None:
        """Wrap the model anew where other parameters are trained than when it was wrapped. Call on all ranks, between updates.

        DistributedDataParallel reduces what required a gradient at construction, and nothing else.
        """
        if self.distributed and self._wrapped_for is not None and self._trained_count() != self._wrapped_for:
            self.model = self.wrap_model(self.unwrap(self.model))
            self._wrapped_for = self._trained_count()

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Return the model that training calls: DistributedDataParallel when there are several ranks. Call on all ranks.

        Args:
            model: The model, on its device.
        """
        if not self.distributed or not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        return DistributedDataParallel(model, **self.ddp_kwargs())

    def ddp_kwargs(self) -> dict[str, Any]:
        """Return the arguments of `DistributedDataParallel`; override for unused parameters or a static graph. Called on all ranks."""
        return {"device_ids": [self.device] if self.device.type == "cuda" else None}

    def unwrap(self, model: Any) -> Any:
        """Return the user's module out of DistributedDataParallel. No communication: may be called on one rank.

        Args:
            model: The model, wrapped or not.
        """
        return model.module if isinstance(model, DistributedDataParallel) else model

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the names, free of wrapper prefixes, and parameters of the model, then those of the criterion.

        No communication: may be called on one rank.
        """
        for name, parameter in self.unwrapped_model.named_parameters():
            yield canonical_name(name), parameter
        if isinstance(self.criterion, nn.Module):
            for name, parameter in self.criterion.named_parameters():
                yield f"criterion.{name}", parameter

    def equalize_buffers(self) -> None:
        """Give all ranks the buffers of the first one. Call on all ranks.

        DistributedDataParallel does it at the next training forward; until then those of the other ranks are their own.
        """
        if isinstance(self.model, DistributedDataParallel):
            for buffer in (*self.model.module.buffers(), *self._criterion_tensors("buffers")):
                self.world.broadcast(buffer)

    def _criterion_tensors(self, kind: str) -> list[Tensor]:
        return list(getattr(self.criterion, kind)()) if isinstance(self.criterion, nn.Module) else []

    # Optimizer and scheduler

    def build_optimizer(self) -> Optimizer:
        """Return the optimizer of `config.optim` over the parameters that require a gradient. Called on all ranks."""
        settings = dict(self.config.optim.items())
        groups = settings.pop("param_groups", None)
        whole = self.whole_parameters()
        if groups:
            bases = {name: settings.get(name) for name in ("lr", "weight_decay", "betas")}
            params: Any = build_param_groups(self.named_parameters(), groups=groups, whole=whole, **bases)
        else:
            params = [parameter for _, parameter in self.named_parameters() if parameter.requires_grad]
        if whole is not None and any(whole.values()) and not _trains_here(params):
            return self._build_idle_optimizer(params, settings)
        return OPTIMIZERS.build(params=params, **settings)

    def _build_idle_optimizer(self, params: list[Any], settings: dict[str, Any]) -> Optimizer:
        # Everything that is trained lies on other ranks, which torch does not foresee.
        stand_in = nn.Parameter(torch.zeros((), device=self.device))
        groups = params or [{"params": []}]
        optimizer = OPTIMIZERS.build(params=[{**groups[0], "params": [stand_in]}, *groups[1:]], **settings)
        optimizer.param_groups[0]["params"] = []
        return optimizer

    def whole_parameters(self) -> dict[str, bool] | None:
        """Return all parameter names of a model that this rank holds a part of, and whether they are trained; else `None`.

        Called on all ranks.
        """
        return None

    def build_scheduler(self) -> Any:
        """Return the scheduler of `config.scheduler`; schedules over the whole run are given its length. Called on all ranks.

        Returns:
            `None` without such a section.
        """
        if not self.config.get("scheduler", None):
            return None
        settings = {key: value for key, value in self.config.scheduler.items() if key not in _SCHEDULER_KEYS}
        length = self.epochs if self.scheduler_interval(settings.get("type", "")) == "epoch" else self.steps
        if length is not None and "total_steps" not in settings and SCHEDULERS.accepts(settings["type"], "total_steps"):
            settings["total_steps"] = length
        return SCHEDULERS.build(self.optimizer, **settings)

    def scheduler_interval(self, name: str = "") -> str:
        """Return when the scheduler advances: `"step"`, `"epoch"` or `"validation"`. No communication: may be called on one rank.

        Args:
            name: Type of a schedule that is not built yet.
        """
        asked = self.config.scheduler.get("interval", None) if "scheduler" in self.config else None
        if asked:
            return str(asked)
        metric = needs_metric(self.scheduler) if self.scheduler is not None else "plateau" in name.lower()
        return "epoch" if metric else "step"

    # Data

    @property
    def train_splits(self) -> list[str]:
        """Splits to train on: `config.train_splits`, else those whose name starts with `train`."""
        return self._splits("train_splits", lambda name: name.startswith("train"))

    @property
    def evaluate_splits(self) -> list[str]:
        """Splits to evaluate: `config.evaluate_splits`, else all but those to train on and those named for inference."""
        return self._splits("evaluate_splits", lambda name: not name.startswith(("train", "infer", "predict")))

    def _splits(self, key: str, chosen: Any) -> list[str]:
        known = list(dict.fromkeys([*self.datasets, *self.dataloaders]))
        asked = self.config.get(key, None)
        if asked is None:
            return [name for name in known if chosen(name)]
        for name in asked:
            self.check_split(name)
        return list(asked)

    def check_split(self, split: str) -> None:
        """Raise a `ValueError` that lists the known splits when `split` is none of them. No communication: may be called on one rank.

        Args:
            split: The split.
        """
        known = list(dict.fromkeys([*self.datasets, *self.dataloaders]))
        if split not in known:
            raise ValueError(
                f"Expected a split out of {known}. Received: split={split!r}. Put it into `self.datasets` or `self.dataloaders`."
            )

    def build_dataloaders(self) -> None:
        """Build a loader for every dataset that has none; loaders that the user made are left alone. Called on all ranks."""
        for split, dataset in self.datasets.items():
            if split not in self.dataloaders:
                self.dataloaders[split] = self.build_dataloader(split, dataset)

    def build_dataloader(self, split: str, dataset: Any) -> Any:
        """Return the loader of one split over the data domain. Called on all ranks.

        Args:
            split: The split.
            dataset: What the user put into `datasets` for it.

        Returns:
            An iterable of batches.

        Raises:
            ValueError: If an option of `config.dataloader` is unknown.
        """
        settings = self.loader_settings(split)
        rank, size = self.data_place(split)
        sampler = self.build_datasampler(split, dataset)
        if sampler is not None:
            settings["sampler"] = sampler
        return build_dataloader(
            dataset,
            settings,
            split=split,
            train=split in self.train_splits,
            seed=self.seed,
            rank=rank,
            world_size=size,
            device=self.device,
        )

    @property
    def data_replicas(self) -> int:
        """Number of ranks that read different samples to train on."""
        return self.data_domain.size

    @property
    def stream_layout(self) -> dict[str, int]:
        """What has random streams of its own, and how many of it; runs in which it is the same draw the same numbers."""
        return {"data": self.data_replicas}

    def data_place(self, split: str) -> tuple[int, int]:
        """Return which share of a split this rank reads, and how many shares there are.

        Args:
            split: The split.
        """
        return self.data_domain.rank, self.data_domain.size

    def build_datasampler(self, split: str, dataset: Any) -> Any:
        """Return a sampler for one split, or `None`; override it for an order of your own. Called on all ranks.

        By default a loader of the library brings its own, which can be positioned exactly. With another sampler the loader
        keeps the state that `StatefulDataLoader` gives it.

        Args:
            split: The split.
            dataset: What the user put into `datasets` for it.
        """
        return None

    def loader_settings(self, split: str) -> dict[str, Any]:
        """Return `config.dataloader` with the overrides of one split merged in. No communication: may be called on one rank.

        Args:
            split: The split.
        """
        settings = dict(self.config.dataloader.items()) if self.config.get("dataloader", None) else {}
        own = settings.get(split)
        names = {*self.datasets, *self.dataloaders}
        common = {key: value for key, value in settings.items() if key not in names}
        return {**common, **(dict(own.items()) if isinstance(own, Mapping) else {})}

    @property
    def batch_size(self) -> int | None:
        """Batch size of a rank on the first split to train on, `None` when its loader does not say."""
        splits = self.train_splits or list(self.dataloaders)
        if not splits:
            return None
        loader = self.dataloaders.get(splits[0])
        size = getattr(loader, "batch_size", None)
        return size if size is not None else self.loader_settings(splits[0]).get("batch_size")

    @property
    def steps(self) -> int | None:
        """Updates of the whole run; in epoch mode epochs times updates an epoch, `None` when the loaders have no length.

        The same on all ranks once the runner is constructed: a pass ends with the shortest loader.
        """
        if self.is_step_mode:
            return self.config.steps
        lengths = self._lengths if self._lengths is not None else self._own_lengths()
        if None in lengths.values():
            return None
        return sum(-(-(length or 0) // self.accum_steps) for length in lengths.values()) * (self.epochs or 0) or None

    _lengths: dict[str, int | None] | None = None
    """Batches of a pass over each split to train on, as all ranks agreed."""

    def _own_lengths(self) -> dict[str, int | None]:
        return {split: _length(self.dataloaders[split]) for split in self.train_splits if split in self.dataloaders}

    def _agree_lengths(self) -> None:
        # What follows from the length of a run, such as its schedule and when a line is logged, must be the same everywhere.
        mine = self._own_lengths()
        ranks = self.optimizer_domain.gather_objects(mine)
        lengths = {split: [rank.get(split) for rank in ranks] for split in mine}
        self._lengths = {
            split: None if None in found else min(length for length in found if length is not None)
            for split, found in lengths.items()
        }

    def _open_sources(self) -> None:
        self.sources = {split: self._source(split, loader) for split, loader in self.dataloaders.items()}

    def _source(self, split: str, loader: Any) -> BatchSource:
        self._check_sampler(split, loader)
        rank, size = self.data_place(split)
        return BatchSource(loader, split=split, rank=rank, world_size=size, seed=self.seed)

    def _check_sampler(self, split: str, loader: Any) -> None:
        """Refuse a sampler that divides a user's loader over other ranks than those that read different data."""
        samplers = (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None))
        place = self.data_place(split)
        for sampler in samplers:
            number, rank = getattr(sampler, "num_replicas", None), getattr(sampler, "rank", None)
            if isinstance(number, int) and isinstance(rank, int) and number > 1 and (rank, number) != place:
                raise ValueError(
                    f"Expected the sampler of split {split!r} to take share {place[0]} of {place[1]}, as this rank reads data. Received: "
                    f"{type(sampler).__name__} with rank={rank}, num_replicas={number}. Pass rank=self.data_domain.rank and "
                    "num_replicas=self.data_domain.size, or let the library build the loader from a dataset."
                )

    # Scores

    @property
    def score_split(self) -> str | None:
        """The split whose figures select the best checkpoint."""
        if self.config.score_split is not None:
            return str(self.config.score_split)
        splits = self.evaluate_splits
        return next((name for name in _SCORE_SPLITS if name in splits), splits[0] if splits else None)

    def _choose_score(self) -> None:
        config = self.config
        split = self.score_split
        if split is None:
            return
        self.check_split(split)
        if split in self.train_splits and split not in (config.evaluate_splits or ()):
            raise ValueError(
                f"Expected score_split to be a split that is evaluated: the mean over training is of weights that were left behind. "
                f"Received: score_split={split!r}, which is trained on. Name it in evaluate_splits too, or choose another."
            )
        patience = config.patience
        self.scoreboard = ScoreBoard(
            config.score_name, mode=config.score_mode, split=split, patience=patience, min_delta=config.min_delta
        )

    # Supervision

    def _open_supervision(self) -> None:
        self.trackers: list[Tracker] | None = None
        self.signals: SignalWatcher | None = None
        self.init_heartbeat()
        self.init_garbage_collection()
        for source in self.sources.values():
            self._closers.callback(source.close)

    def open_trackers(self) -> None:
        """Open what keeps the figures, when training begins: a runner that only evaluates leaves an earlier run's alone.

        Called on all ranks.
        """
        if self.trackers is not None:
            return
        if self.config.checkpoint.load_only and self.checkpoint_manager is not None:
            # It may look into the directory of another run, but its figures must not replace those that are there.
            self.checkpoint_manager.check_directory()
        self.trackers = []
        if self.is_main_process:
            self._track(JsonlTracker(self.workspace.jsonl_file, resume_step=self.state.train.global_step))
        self.init_tensorboard()
        self.init_wandb()

    def _track(self, tracker: Tracker) -> None:
        assert self.trackers is not None
        self.trackers.append(tracker)
        self._closers.callback(tracker.close)

    def init_tensorboard(self) -> None:
        """Open the TensorBoard writer on the main process when `config.tensorboard`; a resumed run goes on in its directory."""
        if self.config.tensorboard and self.is_main_process:
            step = self.state.train.global_step
            earlier = self.workspace.latest_tensorboard_dir() if step else None
            directory = earlier or self.workspace.tensorboard_dir
            self._track(TensorBoardTracker(directory, purge_step=step + 1 if step else None))

    def init_wandb(self) -> None:
        """Open the Weights & Biases run on the main process when `config.wandb.enabled`."""
        settings = self.config.wandb
        if not settings.enabled or not self.is_main_process:
            return
        self._track(
            WandbTracker(
                project=settings.project or self.config.lineage,
                entity=settings.entity,
                group=settings.group or self.config.experiment,
                name=settings.name or self.id,
                job_type=settings.job_type,
                tags=settings.tags,
                dir=settings.dir or self.workspace.dir,
                mode=settings.mode,
                run_id=self.id,
                config=self.config.plain(),
            )
        )

    def init_signal_handlers(self) -> None:
        """Watch for SIGTERM, SIGINT and SIGUSR1 while training; the handlers are put back when it ends. Called on all ranks."""
        self.signals = SignalWatcher()
        self.signals.install()

    def init_heartbeat(self) -> None:
        """Start the heartbeat file of this rank when `config.heartbeat.enabled`. Called on all ranks."""
        settings = self.config.heartbeat
        self.heartbeat = None
        if settings.enabled:
            directory = self.workspace.dir / settings.dir_name
            self.heartbeat = Heartbeat(directory, rank=self.rank, interval_seconds=settings.interval_seconds)
            self._closers.callback(self.heartbeat.stop)

    def init_garbage_collection(self) -> None:
        """Pace Python's garbage collection when `config.gc.interval` is set. Called on all ranks."""
        settings = self.config.gc
        self.gc_pacer = None
        if settings.interval is not None:
            self.gc_pacer = GcPacer(
                settings.interval, generation=settings.generation, disable_automatic=settings.disable_automatic
            )
            self._closers.callback(self.gc_pacer.close)

    def _write_metadata(self) -> None:
        config, manager = self.config, self.checkpoint_manager
        if config.checkpoint.load_only and manager is not None and manager.is_foreign():
            return
        if self.is_main_process:
            self.workspace.write_metadata(config.plain(), config.canonical(), config.changed(), self._identity)

    # Contexts

    def train_context(self) -> Any:
        """Return the context of the forward and backward of one micro-batch; gradients are reduced on the last one only.

        Called on all ranks.
        """
        if self.reduces_gradients or not isinstance(self.model, DistributedDataParallel):
            return _NO_CONTEXT
        return self.model.no_sync()

    def forward_context(self) -> Any:
        """Return the context of a forward: autocast of `config.precision`. Called on all ranks."""
        return self.precision.autocast()

    reduces_gradients: bool = True
    """Whether the open micro-batch is the last one of its window."""


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _trains_here(params: list[Any]) -> bool:
    return any(not isinstance(entry, dict) or entry["params"] for entry in params)


_NO_CONTEXT: AbstractContextManager[Any] = nullcontext()

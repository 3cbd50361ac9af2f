"""The data of a run: its splits, how their updates are divided, and the batches of each with the position in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from danling.distributed import Placement
from danling.utils.protocols import ReductionDomain

from .build import build_dataloader, order_setting
from .datamodule import LoaderSettings
from .source import BatchSource
from .sources import Sources
from .splits import DividedSettings, Splits, open_source
from .update_plan import UpdatePlan
from .windows import ReaderPlace, WindowLoader


class Settings(Protocol):
    """The configuration of a run."""

    @property
    def accum_steps(self) -> int:
        """Micro-batches of an update that is not divided."""

    def get(self, key: str, default: None) -> Any:
        """Return a setting, the default where it is not set."""


class Counters(Protocol):
    """Counters of a run."""

    @property
    def epoch(self) -> int:
        """Epochs completed."""


class Progress(Protocol):
    """Where a run stands."""

    @property
    def train(self) -> Counters:
        """The counters."""


class DataHooks(Protocol):
    """What its data is asked of a run. It is looked up anew each time, since a user may add data, and override or replace anything."""

    id: str

    @property
    def config(self) -> Settings: ...
    @property
    def state(self) -> Progress: ...
    @property
    def placement(self) -> Placement: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def seed(self) -> int: ...
    @property
    def mode(self) -> str: ...
    @property
    def datasets(self) -> Mapping[str, object]: ...
    @property
    def dataloaders(self) -> Mapping[str, Any]: ...
    @property
    def train_splits(self) -> Sequence[str]: ...
    @property
    def evaluate_splits(self) -> Sequence[str]: ...
    @property
    def score_split(self) -> str | None: ...
    @property
    def accum_steps(self) -> int: ...
    @property
    def is_main_process(self) -> bool: ...

    def build_dataloaders(self) -> None:
        """Build a loader for every dataset that has none."""

    def build_datasampler(self, split: str, dataset: object) -> object:
        """Return a sampler or a batch sampler of the user's own, or `None`."""


class RunData:
    """The data of a run.

    Args:
        run: Has datasets, loaders and settings.
        own_accum_steps: Whether `accum_steps` is the user's own, not the setting of that name.
        unsaved_updates: Returns how many updates are made at most until the first of them is in a checkpoint on the disk; `None` where
            no save is due within a pass.
        waiting: Called again and again while a loader of windows has nothing to read, with the place that is waited for; what it raises
            ends the wait.
        waited: Called after such a wait; what it raises ends the pass.
        over: Called where such a loader has nothing left for good; what it raises ends the training.
        divided: As of `Splits`.

    Attributes:
        splits: Names, settings and lengths.
        plan: What an update is made of on this rank.
        sources: Batches by split, with the position in them.
    """

    def __init__(
        self,
        run: DataHooks,
        *,
        own_accum_steps: bool = False,
        unsaved_updates: Callable[[], int | None] = lambda: None,
        waiting: Callable[[int], None] = lambda place: None,
        waited: Callable[[], None] = lambda: None,
        over: Callable[[], None] = lambda: None,
        divided: DividedSettings | None = None,
    ) -> None:
        self._run = run
        self._unsaved_updates, self._over = unsaved_updates, over
        self._waiting, self._waited = waiting, waited
        self._own_accum_steps = own_accum_steps
        self.splits = Splits(
            lambda: run.datasets,
            lambda: run.dataloaders,
            lambda key: run.config.get(key, None),
            accum_steps=self.undivided,
            divided=divided,
        )
        self.plan = UpdatePlan(
            self.splits,
            trained=lambda: run.train_splits,
            shares=lambda split: self.place(split)[1],
            accum_steps=self.undivided,
        )
        self.sources = Sources(
            lambda: run.dataloaders,
            build=lambda: run.build_dataloaders(),
            open=self.open,
            epoch=lambda: run.state.train.epoch,
        )

    def undivided(self) -> int:
        """Return the micro-batches of an update that is not divided."""
        return self._run.accum_steps if self._own_accum_steps else int(self._run.config.accum_steps)

    def place(self, split: str) -> tuple[int, int]:
        """Return which share of a split this rank reads, and how many shares there are. May be called on one rank.

        Args:
            split: The split.
        """
        run = self._run
        return run.placement.share(trained=run.mode == "train" and split in run.train_splits)

    def open(self, split: str, loader: object) -> BatchSource:
        """Return the batches of a loader of a split.

        Args:
            split: The split.
            loader: The loader.
        """
        run, placement = self._run, self._run.placement
        return open_source(
            loader,
            split=split,
            share=self.place(split),
            seed=run.seed,
            reads=placement.reads_data,
            place=self._reader_place(split, loader) if isinstance(loader, WindowLoader) else None,
        )

    def _reader_place(self, split: str, loader: WindowLoader) -> ReaderPlace:
        run, (rank, size) = self._run, self.place(split)
        if run.placement.replica_group[1] > 1:
            raise ValueError(
                f"Expected a loader that replica groups can divide anew for split {split!r}. Received: a {type(loader).__name__}, which "
                "divides whole updates over a number of ranks that stays. Leave ft.enabled out, or put a dataset into `self.datasets`."
            )
        return ReaderPlace(
            split=split,
            rank=rank,
            world_size=size,
            accum_steps=self.undivided(),
            seed=run.seed,
            is_main=run.is_main_process,
            trained=run.mode == "train" and split in run.train_splits,
            run=lambda: run.id,
            unsaved_updates=self._unsaved_updates,
            waiting=self._waiting,
            waited=self._waited,
            over=self._over,
        )

    def commit_saved(self, payload: Mapping[str, Any]) -> None:
        """Let loaders free what lies before their positions in a checkpoint that is on the disk.

        May be called on one rank, and from another thread.

        Args:
            payload: What was saved.
        """
        self._commit({split: payload.get("dataloaders", {}).get(split) for split in self._run.train_splits})

    def commit_loaded(self) -> None:
        """Do the same for the positions that the run was restored to."""
        self._commit({split: source.state_dict() for split, source in self._trained() if not source.is_rank_local})

    def _commit(self, states: Mapping[str, Mapping[str, object] | None]) -> None:
        for split, source in self._trained():
            state = states.get(split)
            if state is not None:
                source.commit_state(state)

    def _trained(self) -> list[tuple[str, BatchSource]]:
        return list(self.sources.among(self._run.train_splits).items())

    def free(self) -> None:
        """Let loaders free now what is due. May be called on one rank."""
        for _, source in self._trained():
            source.free()

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return by split what is shown of the loaders beside the metrics of an update. May be called on one rank."""
        return {split: source.metrics() for split, source in self._trained()}

    def streams(self) -> dict[str, Mapping[str, object]]:
        """Return by split how far its loader and those who fill it are; empty where nobody does. May be called on one rank."""
        standings = {split: source.standing() for split, source in self._trained()}
        return {split: standing for split, standing in standings.items() if standing}

    def open_all(self) -> str | None:
        """Open every loader that is there now, and return the split whose metrics select the best checkpoint, if there is one.

        Raises:
            ValueError: If `score_split` names none that is evaluated.
        """
        self.sources.open_all()
        scored = self._run.score_split
        if scored is not None:
            self.splits.check_scored(scored, trained=self._run.train_splits, evaluated=self._run.evaluate_splits)
        return scored

    def of(self, split: str) -> BatchSource:
        """Return the batches of a split; what was added or replaced since construction is taken in.

        Args:
            split: The split.

        Raises:
            ValueError: If there is no such split, or no loader for it.
        """
        self.splits.check(split)
        return self.sources.of(split)

    def agree_lengths(self, domain: ReductionDomain) -> None:
        """Agree on the updates of a pass over each split to train on. Called on all ranks.

        Args:
            domain: The ranks.
        """
        self.splits.agree_lengths(self._run.train_splits, domain)

    def build_loader(self, split: str, dataset: object) -> object:
        """Return a loader of one split over the data domain, in the order of the user's sampler, if there is one.

        Args:
            split: The split.
            dataset: Its dataset.

        Raises:
            ValueError: If an option of `config.dataloader` is unknown.
        """
        run = self._run
        if isinstance(dataset, LoaderSettings):
            dataset = dataset.dataset
        settings, (rank, size) = self.splits.settings(split), self.place(split)
        sampler = run.build_datasampler(split, dataset)
        if sampler is not None:
            self.splits.divide_themselves.add(split)
            settings = self.splits.settings(split)
            settings.update(order_setting(sampler, settings))
        return build_dataloader(
            dataset,
            settings,
            split=split,
            train=split in run.train_splits,
            seed=run.seed,
            rank=rank,
            world_size=size,
            device=run.device,
            accum_steps=run.config.accum_steps,
        )

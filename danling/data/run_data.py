"""The data of a run: its splits, how their updates are divided, and the batches of each with the position in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from danling.utils.protocols import ReductionDomain

from .build import build_dataloader, order_setting
from .datamodule import LoaderSettings
from .keyed import KeyedLoader
from .loader import DataLoader
from .source import BatchSource, WindowSource, open_source
from .splits import DividedSettings, Splits
from .stream_loader import StreamLoader
from .windows import ReaderPlace, WindowLoader

if TYPE_CHECKING:
    from danling.runners.base_runner import BaseRunner


class Sources(dict[str, BatchSource]):
    """Batches by split. A loader that a program puts in the place of another one, or adds, is taken in when it is asked for."""

    def __init__(self, run: BaseRunner, open: Callable[[str, Iterable[object]], BatchSource]) -> None:
        super().__init__()
        self.open = open
        self._run = run
        self._datasets: dict[str, object] = {}
        """Entries of `self.datasets` when the loader of a split was taken in."""
        self._replaced: list[BatchSource] = []

    def open_all(self) -> None:
        """Open every loader that is there now."""
        self.clear()
        for split, loader in self._run.dataloaders.items():
            self._take_in(split, loader)

    def of(self, split: str) -> BatchSource:
        """Return the batches of a split; opened anew where its loader is another one now.

        At the beginning of a pass, a dataset that was replaced in `self.datasets` is taken in, and a dataset that has another length.
        """
        loaders, known = self._run.dataloaders, self.get(split)
        if known is not None and known.remaining_batches() != 0 and self._change_of(split):
            self.check_unchanged(split)
            if split in self._run.datasets and self._run.datasets[split] is not self._datasets.get(split):
                del loaders[split]
            else:
                known.loader.take_length()
        if split not in loaders:
            self._run.build_dataloaders()
        if split not in loaders:
            raise ValueError(
                f"Expected `build_dataloaders` to put a loader for every dataset into `self.dataloaders`. Received: none for {split!r}. "
                "Call super().build_dataloaders() in it, or put the loader there in __init__."
            )
        if known is not None and known.loader is loaders[split]:
            return known
        added = self._take_in(split, loaders[split])
        if epoch := self._run.state.train.epoch if known is None else known.epoch:
            added.set_epoch(epoch)
        if known is not None:
            self._replaced.append(known)
        return added

    def _take_in(self, split: str, loader: Iterable[object]) -> BatchSource:
        source = self[split] = self.open(split, loader)
        source.check = partial(self.check_unchanged, split)
        self._datasets[split] = self._run.datasets.get(split)
        return source

    def _change_of(self, split: str) -> str | None:
        """Return how the dataset that a loader of the library was built from has changed, `None` where it has not."""
        loader: Any = self[split].loader
        if loader is not self._run.dataloaders.get(split) or not isinstance(loader, (KeyedLoader, StreamLoader)):
            return None
        if split in self._run.datasets and self._run.datasets[split] is not self._datasets.get(split):
            return "another dataset in self.datasets"
        if isinstance(loader, DataLoader) and len(loader.dataset) != loader.length:
            return f"a dataset of length {len(loader.dataset)} that had {loader.length}"
        return None

    def check_unchanged(self, split: str) -> None:
        """Refuse a dataset that was changed within a pass. May be called on one rank."""
        change = self._change_of(split) if self[split].consumed else None
        if change is not None:
            raise ValueError(
                f"Expected the dataset of split {split!r} to stay as it is within a pass. Received: {change}, after {self[split].consumed} "
                "of the pass were consumed. Replace or extend it between two passes, such as in train_epoch before super().train_epoch()."
            )

    def among(self, splits: Iterable[str]) -> dict[str, BatchSource]:
        """Return those of some splits, in the order of these."""
        return {split: self[split] for split in splits if split in self}

    def close(self) -> None:
        """Close all of them, those that were replaced too; one that fails does not keep the others from it."""
        with ExitStack() as stack:
            for source in (*self._replaced, *self.values()):
                stack.callback(source.close)


class RunData:
    """The data of a run."""

    def __init__(
        self, run: BaseRunner, *, own_accum_steps: bool = False, divided: DividedSettings | None = None
    ) -> None:
        self._run = run
        self.splits = Splits(run, own_accum_steps=own_accum_steps, divided=divided)
        self.sources = Sources(run, self.open)

    def open(self, split: str, loader: object) -> BatchSource:
        """Return the batches of a loader of a split."""
        run, placement = self._run, self._run.placement
        return open_source(
            loader,
            split=split,
            rank=self.splits.share(split)[0],
            world_size=self.splits.share(split)[1],
            seed=run.seed,
            reads=placement.reads_data,
            place=self._reader_place(split, loader) if isinstance(loader, WindowLoader) else None,
        )

    def _reader_place(self, split: str, loader: WindowLoader) -> ReaderPlace:
        run, (rank, size) = self._run, self.splits.share(split)
        if run.placement.replica_group[1] > 1:
            raise ValueError(
                f"Expected a loader that replica groups can divide anew for split {split!r}. Received: a {type(loader).__name__}, which "
                "divides whole updates over a number of ranks that stays. Leave ft.enabled out, or put a dataset into `self.datasets`."
            )
        return ReaderPlace(
            split=split,
            rank=rank,
            world_size=size,
            accum_steps=self.splits.undivided(),
            seed=run.seed,
            is_main=run.is_main_process,
            trained=run.mode == "train" and split in run.train_splits,
            run=lambda: run.id,
            unsaved_updates=run._unsaved_updates,
            waiting=lambda place: run._session.leave_wait(place, run.placement.optimizer),
            waited=lambda: run._session.end_wait(run.placement.optimizer),
            over=lambda: run._session.leave_pass(),
        )

    # Loaders of windows, such as streams, which free their data after training on it

    def _windows(self) -> dict[str, WindowLoader]:
        sources = self.sources.among(self._run.train_splits)
        return {split: source.read for split, source in sources.items() if isinstance(source, WindowSource)}

    def commit_saved(self, payload: Mapping[str, Any]) -> None:
        """Let loaders free the data before their positions in a checkpoint that is on the disk.

        May be called on one rank, and from another thread.
        """
        states = payload.get("dataloaders", {})
        for split, loader in self._windows().items():
            if (state := states.get(split)) is not None and state.get("kind") == WindowSource.kind:
                loader.commit_state(state)

    def commit_loaded(self) -> None:
        """Do the same for the positions that the run was restored to."""
        for loader in self._windows().values():
            loader.commit_state(loader.state_dict())

    def free(self) -> None:
        """Let loaders free the data that is due now. May be called on one rank."""
        for loader in self._windows().values():
            loader.free()

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return by split the figures of the loaders that are logged with the metrics of an update. May be called on one rank."""
        return {split: loader.metrics() for split, loader in self._windows().items()}

    def streams(self) -> dict[str, Mapping[str, object]]:
        """Return the progress of each split's loader and of its producers; empty without producers. May be called on one rank."""
        return {split: found for split, loader in self._windows().items() if (found := loader.standing())}

    def open_all(self) -> str | None:
        """Open every loader that is there now, and return the split whose metrics select the best checkpoint, if there is one."""
        self.sources.open_all()
        scored = self._run.score_split
        if scored is not None:
            self.splits.check_scored(scored, trained=self._run.train_splits, evaluated=self._run.evaluate_splits)
        return scored

    def of(self, split: str) -> BatchSource:
        """Return the batches of a split; what was added or replaced since construction is taken in."""
        self.splits.check(split)
        return self.sources.of(split)

    def begin_pass(self, split: str, domain: ReductionDomain) -> BatchSource:
        """Return the batches of a split to train on, where a pass begins or goes on. Called on all ranks."""
        source = self.of(split)
        self.agree_lengths(domain)
        return source

    def agree_lengths(self, domain: ReductionDomain) -> None:
        """Agree on the updates of a pass over each split to train on. Called on all ranks."""
        self.splits.agree_lengths(self._run.train_splits, domain)

    def build_loader(self, split: str, dataset: object) -> object:
        """Return a loader of one split over the data domain, in the order of the user's sampler, if there is one."""
        run = self._run
        if isinstance(dataset, LoaderSettings):
            dataset = dataset.dataset
        settings, (rank, size) = self.splits.settings(split), self.splits.share(split)
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
            canonical=run.config.gradient_sum == "canonical",
        )

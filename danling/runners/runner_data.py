"""The data of a runner: its splits, their loaders, how long the run is, and the split that is scored."""

from __future__ import annotations

from typing import Any

from danling.data import BatchSource, Division, Splits, build_dataloader, open_source
from danling.metrics import ScoreBoard

from .runner_supervision import RunnerSupervision


class RunnerData(RunnerSupervision):
    """Turns datasets and loaders by split into sources of batches."""

    sources: dict[str, BatchSource]
    _splits: Splits

    # Splits and loaders

    @property
    def train_splits(self) -> list[str]:
        """Splits to train on: `config.train_splits`, else those whose name starts with `train`."""
        return self._splits.to_train()

    @property
    def evaluate_splits(self) -> list[str]:
        """Splits to evaluate: `config.evaluate_splits`, else all but those to train on and those named for inference."""
        return self._splits.to_evaluate()

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
        settings = self._splits.settings(split)
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
            accum_steps=self.config.accum_steps,
        )

    @property
    def stream_layout(self) -> dict[str, int]:
        """What has random streams of its own, and how many of it; runs in which it is the same draw the same numbers."""
        return {"data": self.data_replicas, **self.placement.rng_layout}

    def data_place(self, split: str) -> tuple[int, int]:
        """Return which share of a split this rank reads, and how many shares there are.

        No communication: may be called on one rank.

        Training data is divided over all replica groups; each group evaluates all of a split, so that no death makes a metric wrong.

        Args:
            split: The split.
        """
        rank, size = self.data_domain.rank, self.data_domain.size
        divides = self.mode == "train" and split in self.train_splits
        group, groups = self._replica_place if divides else (0, 1)
        return group * size + rank, groups * size

    def build_datasampler(self, split: str, dataset: Any) -> Any:
        """Return a sampler for one split, or `None`; override it for an order of your own. Called on all ranks.

        By default a loader of the library brings its own, which divides the dataset over the ranks. Another sampler divides
        itself; its order comes back exactly, on the same number of processes.

        Args:
            split: The split.
            dataset: What the user put into `datasets` for it.
        """
        return None

    def _division(self, split: str | None = None) -> Division | None:
        """Return how updates of a split to train on, the first one unless it is named, are divided over ranks and micro-batches."""
        if split is None:
            split = next(iter(self.train_splits), None) if self.datasets or self.dataloaders else None
        return self._splits.division(split, self.data_place(split)[1]) if split is not None else None

    @property
    def accum_steps(self) -> int:
        """Micro-batches of an update on each rank; with `dataloader.global_batch_size` of a full one on the first split."""
        division = self._division()
        return int(self.config.accum_steps) if division is None else division.micro_batches

    def _undivided_accum_steps(self) -> int:
        """Micro-batches of an update that is not divided: as configured at this moment, or as a property of the user's says."""
        own = type(self).accum_steps is not RunnerData.accum_steps
        return self.accum_steps if own else int(self.config.accum_steps)

    @property
    def _finds_micro_batch_size(self) -> bool:
        """Whether `dataloader.micro_batch_size` of a split to train on is `"auto"`: halved when memory runs out."""
        return bool(self.datasets) and self._splits.find_micro_batch_size(self.train_splits)

    def _hold_at_most(self, samples: int | None) -> None:
        """Cut updates so that a rank holds at most so many samples at once, and remember it; `None` leaves them as they are."""
        self.state.elastic.micro_batch_size = samples
        if samples is not None and self._finds_micro_batch_size:
            self._splits.hold_at_most(samples or 1, self.train_splits)

    @property
    def batch_size(self) -> int | None:
        """Batch size of a rank on the first split to train on, `None` when its loader does not say.

        With `dataloader.global_batch_size` the most samples that a rank holds at once.
        """
        splits = self.train_splits or list(self.dataloaders)
        if not splits:
            return None
        division = self._division()
        return division.micro_batch_size if division is not None else self._splits.batch_size(splits[0])

    @property
    def steps(self) -> int | None:
        """Updates of the whole run; in epoch mode epochs times updates an epoch, `None` when the loaders have no length.

        The same on all ranks once the runner is constructed: a pass ends with the shortest loader.
        """
        if self.config.epochs is None:
            return self.config.steps
        return (self._splits.updates(self.train_splits) or 0) * (self.epochs or 0) or None

    def _open_sources(self) -> None:
        self.sources = {split: self._source(split, loader) for split, loader in self.dataloaders.items()}

    def source(self, split: str) -> BatchSource:
        """Return the batches of a split and the position in them; a loader that was put into `dataloaders`, or a dataset that was put into
        `datasets`, since construction is taken in. Called on all ranks.

        Args:
            split: The split.

        Raises:
            ValueError: If there is no such split, or no loader for it.
        """
        self._splits.check(split)
        if split not in self.dataloaders:
            self.build_dataloaders()
        if split not in self.dataloaders:
            raise ValueError(
                f"Expected `build_dataloaders` to put a loader for every dataset into `self.dataloaders`. Received: none for {split!r}. "
                "Call super().build_dataloaders() in it, or put the loader there in __init__."
            )
        loader, known = self.dataloaders[split], self.sources.get(split)
        if known is not None and known.loader is loader:
            return known
        added = self._source(split, loader)
        if epoch := self.state.train.epoch if known is None else known.epoch:
            added.set_epoch(epoch)
        self._closers.callback(added.close)
        self.sources[split] = added
        return added

    def _source(self, split: str, loader: Any) -> BatchSource:
        share, shared = self.data_place(split), self.data_domain.size < self.world_size
        return open_source(
            loader, split=split, share=share, seed=self.seed, reads=self.placement.reads_data, shared=shared
        )

    # Scores

    @property
    def score_split(self) -> str | None:
        """The split whose figures select the best checkpoint."""
        return self._splits.to_score(self.evaluate_splits)

    def _choose_score(self) -> None:
        config = self.config
        split = self.score_split
        if split is None and self._scores_itself:
            # Scores that are made of anything but an evaluation.
            split = ""
        elif split is None:
            return
        else:
            self._splits.check(split)
        if split in self.train_splits and split not in self.evaluate_splits:
            raise ValueError(
                f"Expected score_split to be a split that is evaluated: the mean over training is of weights that were left behind. "
                f"Received: score_split={split!r}, which is trained on. Name it in evaluate_splits too, or choose another."
            )
        patience = config.patience
        self.scoreboard = ScoreBoard(
            config.score_name, mode=config.score_mode, split=split, patience=patience, min_delta=config.min_delta
        )

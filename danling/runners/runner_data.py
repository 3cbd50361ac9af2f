"""The data of a runner: its splits, their loaders, how long the run is, and the split that is scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from danling.data import (
    AUTO,
    BatchSource,
    DataLoader,
    Division,
    build_dataloader,
    divide_updates,
    merge_settings,
)
from danling.metrics import ScoreBoard

from .runner_supervision import RunnerSupervision

_SCORE_SPLITS = ("val", "validate", "validation", "valid", "dev")


class RunnerData(RunnerSupervision):
    """Turns datasets and loaders by split into sources of batches."""

    sources: dict[str, BatchSource]

    # Splits and loaders

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
        check_named_once(asked, key)
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
            accum_steps=self.config.accum_steps,
        )

    @property
    def stream_layout(self) -> dict[str, int]:
        """What has random streams of its own, and how many of it; runs in which it is the same draw the same numbers."""
        return {"data": self.data_replicas, **self.placement.rng_layout}

    def data_place(self, split: str) -> tuple[int, int]:
        """Return which share of a split this rank reads, and how many shares there are.

        No communication: may be called on one rank.

        Args:
            split: The split.
        """
        return self.data_domain.rank, self.data_domain.size

    def build_datasampler(self, split: str, dataset: Any) -> Any:
        """Return a sampler for one split, or `None`; override it for an order of your own. Called on all ranks.

        By default a loader of the library brings its own, which divides the dataset over the ranks. Another sampler divides
        itself; its order comes back exactly, on the same number of processes.

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
        return merge_settings(common, dict(own.items()) if isinstance(own, Mapping) else {})

    def update_division(self, split: str) -> Division | None:
        """Return how updates of a split to train on are divided over ranks and micro-batches.

        No communication: may be called on one rank.

        Args:
            split: The split.

        Returns:
            `None` where batches have a size of their own, and `accum_steps` of them make an update.
        """
        loader = self.dataloaders.get(split)
        if loader is not None:
            return loader.division if isinstance(loader, DataLoader) else None
        settings, size = self.loader_settings(split), self.data_place(split)[1]
        return divide_updates(settings, split=split, train=True, world_size=size, accum_steps=self.config.accum_steps)[
            1
        ]

    def _first_division(self) -> Division | None:
        # Asked for at every update: which splits are trained on is looked up once.
        splits = self.train_splits if self.datasets or self.dataloaders else []
        return self.update_division(splits[0]) if splits else None

    @property
    def accum_steps(self) -> int:
        """Micro-batches of an update on each rank; with `dataloader.global_batch_size` of a full one on the first split."""
        division = self._first_division()
        return int(self.config.accum_steps) if division is None else division.micro_batches

    @property
    def finds_micro_batch_size(self) -> bool:
        """Whether `dataloader.micro_batch_size` of a split to train on is `"auto"`: halved when memory runs out."""
        built = [split for split in self.train_splits if split in self.datasets] if self.datasets else []
        return any(self.loader_settings(split).get("micro_batch_size") == AUTO for split in built)

    def hold_at_most(self, samples: int | None) -> None:
        """Cut updates so that a rank holds at most so many samples at once, and remember it. Call on all ranks.

        Args:
            samples: The number; `None` leaves the updates as they are.
        """
        self.state.elastic.micro_batch_size = samples
        for split in self.train_splits if samples is not None and self.finds_micro_batch_size else ():
            loader = self.dataloaders.get(split)
            if isinstance(loader, DataLoader) and loader.division is not None:
                loader.hold_at_most(samples or 1)

    def batches_of_update(self, split: str) -> int:
        """Return how many batches make an update on a split whose loader does not know.

        No communication: may be called on one rank.

        Args:
            split: The split.
        """
        return self.accum_steps if self._first_division() is None else int(self.config.accum_steps)

    @property
    def batch_size(self) -> int | None:
        """Batch size of a rank on the first split to train on, `None` when its loader does not say.

        With `dataloader.global_batch_size` the most samples that a rank holds at once.
        """
        splits = self.train_splits or list(self.dataloaders)
        if not splits:
            return None
        division = self._first_division()
        if division is not None:
            return division.micro_batch_size
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
        return sum(length or 0 for length in lengths.values()) * (self.epochs or 0) or None

    _lengths: dict[str, int | None] | None = None
    """Updates of a pass over each split to train on, as all ranks agreed."""

    def _own_lengths(self) -> dict[str, int | None]:
        return {split: self._updates_of_pass(split) for split in self.train_splits if split in self.dataloaders}

    def _updates_of_pass(self, split: str) -> int | None:
        loader = self.dataloaders[split]
        known = loader.num_updates if isinstance(loader, DataLoader) else None
        length = _length(loader)
        return known if known is not None or length is None else -(-length // self.batches_of_update(split))

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

    def source(self, split: str) -> BatchSource:
        """Return the batches of a split and the position in them; a loader that was put into `dataloaders`, or a dataset that was put into
        `datasets`, since construction is taken in. Called on all ranks.

        Args:
            split: The split.

        Raises:
            ValueError: If there is no such split, or no loader for it.
        """
        self.check_split(split)
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
        if split is None and self._scores_itself:
            # Scores that are made of anything but an evaluation.
            split = ""
        elif split is None:
            return
        else:
            self.check_split(split)
        if split in self.train_splits and split not in self.evaluate_splits:
            raise ValueError(
                f"Expected score_split to be a split that is evaluated: the mean over training is of weights that were left behind. "
                f"Received: score_split={split!r}, which is trained on. Name it in evaluate_splits too, or choose another."
            )
        patience = config.patience
        self.scoreboard = ScoreBoard(
            config.score_name, mode=config.score_mode, split=split, patience=patience, min_delta=config.min_delta
        )


def check_named_once(splits: Sequence[str], where: str) -> None:
    """Refuse a split that is named twice: it would be trained on, or evaluated, twice.

    Args:
        splits: Names of splits.
        where: Where they were named, for the message.

    Raises:
        ValueError: If there is one.
    """
    twice = sorted({split for split in splits if list(splits).count(split) > 1})
    if twice:
        raise ValueError(
            f"Expected every split of {where} once. Received: {where}={list(splits)!r}, with {', '.join(map(repr, twice))} more than once. "
            "Name each one once."
        )


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None

"""The splits of a run: what they are called, how they are loaded, how long a pass over them is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from danling.utils.messages import did_you_mean, nearest
from danling.utils.protocols import ReductionDomain

from .datamodule import LoaderSettings
from .loader import DataLoader
from .shares import AUTO, Division, divide_updates, merge_settings

if TYPE_CHECKING:
    from danling.runners.base_runner import BaseRunner

DividedSettings = Callable[[Mapping[str, Any], bool], Mapping[str, Any]]
"""Returns the settings of a split to train on that take the place of given ones; it is told whether the data divides itself."""

_NOT_EVALUATED = ("train", "infer", "predict")
_SCORED_FIRST = ("val", "validate", "validation", "valid", "dev")


class Splits:
    """Datasets and loaders by split, and what an update is made of, read anew at every question: a program may change them at any time.

    Args:
        run: The runner.
        own_accum_steps: The runner says by itself how many micro-batches an update that is not divided has; else the setting does.
        divided: Returns the settings of a split to train on by which its updates are divided, where a check of layouts wants others than
            are set; `None` where none does. It is told whether its data divides itself over the ranks.

    Attributes:
        lengths: Updates of a pass over each split to train on, as all ranks agreed; `None` before they have, and for a split whose
            loader does not know.
        divide_themselves: Splits with a sampler of the user's.
    """

    def __init__(
        self, run: BaseRunner, *, own_accum_steps: bool = False, divided: DividedSettings | None = None
    ) -> None:
        self.lengths: dict[str, int | None] | None = None
        self.divide_themselves: set[str] = set()
        self._run = run
        self._own_accum_steps = own_accum_steps
        self._divided = divided

    def _setting(self, name: str) -> Any:
        return self._run.config.get(name, None)

    # Names

    @property
    def names(self) -> list[str]:
        """All splits, those with a dataset first."""
        return list(dict.fromkeys([*self._run.datasets, *self._run.dataloaders]))

    def check(self, split: str) -> None:
        """Raise a `ValueError` that lists the splits when `split` is none of them."""
        names = self.names
        if split not in names:
            raise ValueError(
                f"Expected a split out of {names}. Received: split={split!r}.{did_you_mean(split, names)} Put it into `self.datasets` or "
                "`self.dataloaders`."
            )

    def to_train(self) -> list[str]:
        """Return the splits to train on: those of the setting `train_splits`, else those whose name starts with `train`."""
        return self._listed("train_splits", lambda name: name.startswith("train"))

    def to_evaluate(self) -> list[str]:
        """Return the splits of the setting `evaluate_splits`, else all but those to train on, those named so and those for inference."""
        trained = self._setting("train_splits") or ()
        return self._listed("evaluate_splits", lambda name: name not in trained and not name.startswith(_NOT_EVALUATED))

    def to_infer(self, evaluated: Sequence[str]) -> list[str]:
        """Return the split that is predicted by default: the first one named for it, else the first one evaluated."""
        named = [name for name in self.names if name.startswith(("infer", "predict"))]
        return [*named, *evaluated][:1]

    def _listed(self, key: str, default: Callable[[str], bool]) -> list[str]:
        asked = self._setting(key)
        if asked is None:
            return [name for name in self.names if default(name)]
        for name in asked:
            self.check(name)
        check_named_once(asked, key)
        return list(asked)

    def choose(self, asked: str | Sequence[str] | None, default: Sequence[str], verb: str) -> list[str]:
        """Return the splits that a caller asks for.

        Args:
            asked: One split or several; `None` takes the default.
            default: Those that are taken then.
            verb: Verb for messages: the caller's use of the splits.

        Raises:
            ValueError: If there is none, or one is unknown or named twice.
        """
        names = list(default) if asked is None else [asked] if isinstance(asked, str) else list(asked)
        for split in names:
            self.check(split)
        check_named_once(names, f"the splits to {verb}")
        if not names:
            raise ValueError(
                f"Expected at least one split to {verb}. Received: datasets={sorted(self._run.datasets)}, "
                f"dataloaders={sorted(self._run.dataloaders)}.{self._misspelled(verb)} Put a "
                "dataset into `self.datasets`, or name the split."
            )
        return names

    def _misspelled(self, verb: str) -> str:
        near = nearest("train", self.names) if verb == "train on" else None
        return f" Did you mean 'train' instead of {near!r}?" if near else ""

    def to_score(self, evaluated: Sequence[str]) -> str | None:
        """Return the split whose metrics select the best checkpoint: that of the setting, else the one named like a validation set,
        else the first one evaluated."""
        asked = self._setting("score_split")
        if asked is not None:
            return str(asked)
        return next((name for name in _SCORED_FIRST if name in evaluated), next(iter(evaluated), None))

    def check_scored(self, split: str, *, trained: Sequence[str], evaluated: Sequence[str]) -> None:
        """Refuse a split whose metrics cannot select a checkpoint.

        Args:
            split: The split that is scored.
            trained: Splits to train on.
            evaluated: Splits to evaluate.

        Raises:
            ValueError: If it is unknown, or trained on and not evaluated.
        """
        self.check(split)
        if split in trained and split not in evaluated:
            raise ValueError(
                f"Expected score_split to be a split that is evaluated: the mean over training is of weights that were left behind. "
                f"Received: score_split={split!r}, which is trained on. Name it in evaluate_splits too, or choose another."
            )

    # Loaders

    def settings(self, split: str) -> dict[str, Any]:
        """Return the settings under `dataloader` with those that a dataset comes with, and the overrides of the split, merged in."""
        common, own = self._given(split)
        dataset = self._run.datasets.get(split)
        if isinstance(dataset, LoaderSettings):
            common = merge_settings(common, dataset.settings)
        merged = merge_settings(common, own)
        if self._divided is None or split not in self.to_train():
            return merged
        has_order = any(merged.get(name) is not None for name in ("sampler", "batch_sampler"))
        by_itself = has_order or split in self.divide_themselves or isinstance(dataset, IterableDataset)
        return dict(self._divided(merged, by_itself))

    def _given(self, split: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the settings under `dataloader` that all splits share, and those of one split."""
        section = self._setting("dataloader")
        given = dict(section.items()) if section else {}
        own, names = given.get(split), {*self._run.datasets, *self._run.dataloaders}
        common = {key: value for key, value in given.items() if key not in names}
        return common, dict(own.items()) if isinstance(own, Mapping) else {}

    def replaced(self, split: str) -> list[str]:
        """Return the settings that all splits share and that one does not have, since its dataset comes with others.

        Args:
            split: The split.
        """
        if not isinstance(self._run.datasets.get(split), LoaderSettings):
            return []
        taken = self.settings(split)
        return [key for key, value in merge_settings(*self._given(split)).items() if taken.get(key) != value]

    def idle_settings(self) -> list[str]:
        """Return a sentence for every setting that all splits share and that some do not have; see `replaced`."""
        splits: dict[str, list[str]] = {}
        for split in self._run.datasets:
            for key in self.replaced(split):
                splits.setdefault(key, []).append(split)
        return [
            f"dataloader.{key} has no effect on {', '.join(without)}: the loaders of the data module have their own settings, which "
            f"come first. Set dataloader.{without[0]}.{key}."
            for key, without in splits.items()
        ]

    # Updates

    def share(self, split: str) -> tuple[int, int]:
        """Return which share of a split this rank reads, and how many shares there are. May be called on one rank."""
        run = self._run
        return run.placement.share(trained=run.mode == "train" and split in run.train_splits)

    def undivided(self) -> int:
        """Return the micro-batches of an update that is not divided."""
        return self._run.accum_steps if self._own_accum_steps else int(self._run.config.accum_steps)

    def division(self, split: str | None = None) -> Division | None:
        """Return how updates of a split to train on, by default the first one, are divided over ranks and micro-batches.

        Returns:
            `None` where batches have their own size, and `accum_steps` of them make an update.
        """
        if split is None:
            split = next(iter(self._run.train_splits), None) if self.names else None
        if split is None:
            return None
        loader = self._run.dataloaders.get(split)
        if loader is not None:
            return loader.division if isinstance(loader, DataLoader) else None
        return divide_updates(
            self.settings(split),
            split=split,
            train=True,
            world_size=self.share(split)[1],
            accum_steps=int(self._run.config.accum_steps),
            canonical=self._setting("gradient_sum") == "canonical",
        )[1]

    @property
    def micro_batches(self) -> int | None:
        """Micro-batches of a full update that is divided, of the first split to train on; `None` where none is."""
        division = self.division()
        return None if division is None else division.micro_batches

    @property
    def batch_size(self) -> int | None:
        """Batch size of a rank on the first split to train on, or the most samples that it holds at once; `None` when not known."""
        split = next(iter(self._run.train_splits), None) or next(iter(self._run.dataloaders), None)
        if split is None:
            return None
        if (division := self.division()) is not None:
            return division.micro_batch_size
        size: int | None = getattr(self._run.dataloaders.get(split), "batch_size", None)
        return size if size is not None else self.settings(split).get("batch_size")

    @property
    def finds_micro_batch_size(self) -> bool:
        """Whether the micro-batches of a split to train on are halved when memory runs out."""
        built = [split for split in self._run.train_splits if split in self._run.datasets] if self.names else []
        return any(self.settings(split).get("micro_batch_size") == AUTO for split in built)

    def hold_at_most(self, samples: int | None) -> None:
        """Cut updates so that a rank holds at most so many samples at once, where their size is to be found."""
        if samples is None or not self.finds_micro_batch_size:
            return
        for split in self._run.train_splits:
            loader = self._run.dataloaders.get(split)
            if isinstance(loader, DataLoader) and loader.division is not None:
                loader.hold_at_most(samples or 1)

    # Lengths

    def own_lengths(self, trained: Iterable[str]) -> dict[str, int | None]:
        """Return the updates of a pass over each split to train on, as far as the loaders of this rank know."""
        loaders = self._run.dataloaders
        return {split: self._updates_of_pass(loaders[split]) for split in trained if split in loaders}

    def _updates_of_pass(self, loader: Any) -> int | None:
        known = loader.num_updates if isinstance(loader, DataLoader) else None
        if known is not None:
            return known
        try:
            return -(-len(loader) // self.undivided())
        except (TypeError, NotImplementedError):
            return None

    def agree_lengths(self, trained: Iterable[str], domain: ReductionDomain) -> None:
        """Agree on the lengths: a pass ends with the shortest loader. Called on all ranks of the domain.

        What follows from the length of a run, such as its schedule and when a line is logged, must be the same everywhere.

        Raises:
            ValueError: If a dataset that the library divides has another length on another rank.
        """
        mine, loaders = self.own_lengths(trained), self._run.dataloaders
        known = {split: loaders[split] for split in mine}
        samples = {split: loader.length for split, loader in known.items() if isinstance(loader, DataLoader)}
        ranks = domain.gather_objects((mine, samples))
        for split in samples:
            lengths = [of_rank.get(split) for _, of_rank in ranks]
            if len(set(lengths)) > 1:
                raise ValueError(
                    f"Expected the dataset of split {split!r} to have one length on all ranks, over which the library divides it. "
                    f"Received: {lengths} by rank. Put the same dataset into self.datasets on every rank."
                )
        self.lengths = {split: _shortest([updates.get(split) for updates, _ in ranks]) for split in mine}

    @property
    def updates_of_epoch(self) -> int | None:
        """Updates of one pass over all splits to train on; `None` where a loader does not know, or there are none."""
        lengths = self.lengths if self.lengths is not None else self.own_lengths(self._run.train_splits)
        known = [length for length in lengths.values() if length is not None]
        return sum(known) or None if len(known) == len(lengths) else None


def check_named_once(splits: Sequence[str], where: str) -> None:
    """Refuse a split that is named twice: it would be trained on, or evaluated, twice."""
    twice = sorted({split for split in splits if list(splits).count(split) > 1})
    if twice:
        raise ValueError(
            f"Expected every split of {where} once. Received: {where}={list(splits)!r}, with {', '.join(map(repr, twice))} more than once. "
            "Name each one once."
        )


def _shortest(lengths: Sequence[int | None]) -> int | None:
    known = [length for length in lengths if length is not None]
    return min(known) if len(known) == len(lengths) else None

"""The data of a run: its splits, their settings and loaders, how updates are divided, and the batches of each split."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from danling.utils.hooks import is_overridden
from danling.utils.messages import did_you_mean, nearest

from .build import AUTO, build_dataloader, divide_updates, order_setting
from .comparison import series_of
from .datamodule import LoaderSettings
from .dataset_state import get_states, is_equal, set_states
from .loader import DataLoader, KeyedLoader
from .sampler import Division, Share
from .source import BatchSource, LoaderContext, UpdateLoader, open_source
from .split_settings import ORDER, divide_section, merge_settings, without_order

if TYPE_CHECKING:
    from danling.runners.base_runner import BaseRunner
    from danling.training.session import TrainingSession

logger = logging.getLogger("danling")

DividedSettings = Callable[[Mapping[str, Any], bool], Mapping[str, Any]]
"""Returns the settings of a split to train on that take the place of given ones; it is told whether the data divides itself."""

_NOT_EVALUATED = ("train", "infer", "predict")
_SCORED_FIRST = ("val", "validate", "validation", "valid", "dev")


class RunData:
    """The data of a run by split. Datasets, loaders and settings are read anew at every question: a program may change them at any time.

    Attributes:
        sources: The batches of each split whose loader was opened.
        lengths: Updates of a pass over each split to train on, as all ranks agreed; `None` before they have, and for a split whose
            loader does not know.
        named_changes: Sentences about changes of datasets that were logged.
    """

    def __init__(
        self,
        run: BaseRunner,
        session: TrainingSession,
        *,
        own_accum_steps: bool = False,
        divided: DividedSettings | None = None,
    ) -> None:
        self.sources: dict[str, BatchSource] = {}
        self.lengths: dict[str, int | None] | None = None
        self._run = run
        self._session = session
        self._own_accum_steps = own_accum_steps
        self._divided = divided
        self._divide_themselves: set[str] = set()
        """Splits with a sampler of the user's."""
        self._datasets: dict[str, object] = {}
        """Entries of `self.datasets` when the loader of a split was opened."""
        self._replaced: list[BatchSource] = []
        self.named_changes: set[str] = set()
        self._compared: dict[str, object] = {}
        """Datasets whose values were compared over the ranks."""
        self._reads_once = False
        """Whether a loader that is built now is to read a split to train on as an evaluation does."""

    # Names

    @property
    def names(self) -> list[str]:
        """All splits, those with a dataset first."""
        return list(dict.fromkeys([*self._run.datasets, *self._run.dataloaders]))

    def check(self, split: str) -> None:
        """Raise a `ValueError` that lists the splits when `split` is none of them."""
        if not isinstance(split, str):
            raise self._no_name(split)
        if split not in self._run.datasets and split not in self._run.dataloaders:
            names = self.names
            raise ValueError(
                f"Expected a split out of {names}. Received: split={split!r}.{did_you_mean(split, names)} Put it into `self.datasets` or "
                "`self.dataloaders`."
            )

    def to_train(self) -> list[str]:
        """Return the splits to train on: those of the setting `train_splits`, else those whose name starts with `train`."""
        asked = self._run.config.train_splits
        if asked is None:
            return [name for name in self.names if name.startswith("train")]
        return self._checked(asked, "train_splits")

    def to_evaluate(self) -> list[str]:
        """Return the splits of the setting `evaluate_splits`, else all but those to train on, those named so and those for inference."""
        asked = self._run.config.evaluate_splits
        if asked is None:
            trained = self._run.config.train_splits or ()
            return [
                name
                for name in self.names
                if name not in trained and not name.startswith(_NOT_EVALUATED)
            ]
        return self._checked(asked, "evaluate_splits")

    def to_infer(self, evaluated: Sequence[str]) -> list[str]:
        """Return the split that is predicted by default: the first one named for it, else the first one evaluated."""
        named = [name for name in self.names if name.startswith(("infer", "predict"))]
        return [*named, *evaluated][:1]

    def to_score(self, evaluated: Sequence[str]) -> str | None:
        """Return the split whose metrics select the best checkpoint: that of the setting, else the one named like a validation set,
        else the first one evaluated."""
        asked = self._run.config.score_split
        if asked is not None:
            return str(asked)
        name = self._run.config.score_name
        named = [split for split in evaluated if name.startswith(f"{split}.")]
        if named:
            # The longest, since splits may be called `val` and `val.small`.
            return max(named, key=len)
        return next(
            (name for name in _SCORED_FIRST if name in evaluated), next(iter(evaluated), None)
        )

    def _no_name(self, received: object) -> TypeError:
        return TypeError(
            f"Expected the name of a split, one of {self.names}. Received: a {type(received).__name__}. Put data into `self.datasets` or "
            "`self.dataloaders` under a name, and pass the name. How long to train is in the configuration: epochs or steps."
        )

    def choose(
        self, asked: str | Sequence[str] | None, default: Sequence[str], verb: str
    ) -> list[str]:
        """Return the splits that a caller asks for, or the default ones where that is `None`.

        Raises:
            ValueError: If there is none, or one is unknown or named twice.
        """
        if asked is None:
            names = list(default)
        elif isinstance(asked, str):
            names = [asked]
        elif isinstance(asked, Collection):
            names = list(asked)
        else:  # a loader, which a list of it would read to its end
            raise self._no_name(asked)
        if not names:
            near = nearest("train", self.names) if verb == "train on" else None
            hint = f" Did you mean 'train' instead of {near!r}?" if near else ""
            raise ValueError(
                f"Expected at least one split to {verb}. Received: datasets={sorted(self._run.datasets)}, "
                f"dataloaders={sorted(self._run.dataloaders)}.{hint} Put a dataset into `self.datasets`, or name the split."
            )
        return self._checked(names, f"the splits to {verb}")

    def _checked(self, splits: Sequence[str], where: str) -> list[str]:
        """Refuse a split that is unknown, or named twice: it would be trained on, or evaluated, twice."""
        for split in splits:
            self.check(split)
            if list(splits).count(split) > 1:
                raise ValueError(
                    f"Expected every split of {where} once. Received: {where}={list(splits)!r}, with {split!r} more than once. Name each "
                    "one once."
                )
        return list(splits)

    # Settings

    def settings(self, split: str, *, of_dataset: bool = True) -> dict[str, Any]:
        """Return the settings under `dataloader` with those that a dataset comes with, and the overrides of the split, merged in."""
        merged, own = divide_section(self._run.config.dataloader, split, self.names)
        is_trained = split in self.to_train()
        if not is_trained:
            # Before its own settings are merged in, which may say otherwise.
            merged = without_order(merged)
        dataset = self._run.datasets.get(split)
        if of_dataset and isinstance(dataset, LoaderSettings):
            merged = merge_settings(merged, dataset.settings)
        merged = merge_settings(merged, own)
        if is_trained and self._reads_once:
            # Here its own too: they are those of a training.
            return without_order(merged)
        if self._divided is None or not is_trained:
            return merged
        has_order = any(merged.get(name) is not None for name in ("sampler", "batch_sampler"))
        by_itself = (
            has_order or split in self._divide_themselves or isinstance(dataset, IterableDataset)
        )
        return dict(self._divided(merged, by_itself))

    def settings_of_training(self, split: str) -> list[str]:
        """Return the settings of order and dropping that are given for training and do not hold in an evaluation of a split."""
        common, own = divide_section(self._run.config.dataloader, split, self.names)
        if split in self.to_train():
            places = {"dataloader": common, f"dataloader.{split}": own}
            return [
                f"{place}.{key}"
                for place, given in places.items()
                for key in ORDER
                if given.get(key)
            ]
        decided = self.settings(split)
        return [f"dataloader.{key}" for key in ORDER if common.get(key) and key not in decided]

    @contextmanager
    def reading_once(self) -> Iterator[None]:
        """Within the context, loaders of splits to train on read every sample once, in the order of the dataset."""
        before, self._reads_once = self._reads_once, True
        try:
            yield
        finally:
            self._reads_once = before

    def idle_settings(self) -> list[str]:
        """Return a sentence for every setting that all splits share and that some do not have, since their datasets come with others."""
        splits: dict[str, list[str]] = {}
        for split, dataset in self._run.datasets.items():
            if isinstance(dataset, LoaderSettings):
                taken = self.settings(split)
                for key, value in self.settings(split, of_dataset=False).items():
                    if taken.get(key) != value:
                        splits.setdefault(key, []).append(split)
        return [
            f"dataloader.{key} has no effect on {', '.join(without)}: the loaders of the data module have their own settings, which "
            f"come first. Set dataloader.{without[0]}.{key}."
            for key, without in splits.items()
        ]

    # Updates

    def accum_steps(self) -> int:
        """Return how many micro-batches make an update where the library does not divide it: see `division`."""
        return self._run.accum_steps if self._own_accum_steps else int(self._run.config.accum_steps)

    def division(self, split: str | None = None) -> Division | None:
        """Return how updates of a split to train on, by default the first one, are divided over ranks and micro-batches.

        Returns:
            `None` where batches have their own size, and `accum_steps` of them make an update.
        """
        if split is None:
            split = self._first_to_train()
        if split is None:
            return None
        loader = self._run.dataloaders.get(split)
        config = self._run.config
        if loader is not None:
            return loader.division if isinstance(loader, DataLoader) else None
        return divide_updates(
            self.settings(split),
            split=split,
            train=True,
            world_size=self._share(split).world_size,
            accum_steps=int(config.accum_steps),
            canonical=config.gradient_sum == "canonical",
        )[1]

    def _first_to_train(self) -> str | None:
        # Before there are data, a name in `train_splits` is not known yet, which is no error then.
        return next(iter(self._run.train_splits), None) if self.names else None

    @property
    def batch_size(self) -> int | None:
        """Batch size of a rank on the first split to train on, or the most samples that it holds at once; `None` when not known."""
        split = self._first_to_train() or next(iter(self._run.dataloaders), None)
        if split is None:
            return None
        if (division := self.division()) is not None:
            return division.micro_batch_size
        size: int | None = getattr(self._run.dataloaders.get(split), "batch_size", None)
        return size if size is not None else self.settings(split).get("batch_size")

    @property
    def finds_micro_batch_size(self) -> bool:
        """Whether the micro-batches of a split to train on are halved when memory runs out."""
        return bool(self._run.datasets) and any(
            self.settings(split).get("micro_batch_size") == AUTO
            for split in self._run.train_splits
            if split in self._run.datasets
        )

    def limit_micro_batch(self, samples: int | None) -> None:
        """Cut updates so that a rank holds at most so many samples at once, where their size is to be found."""
        if samples is None or not self.finds_micro_batch_size:
            return
        for split in self._run.train_splits:
            loader = self._run.dataloaders.get(split)
            if isinstance(loader, DataLoader) and loader.division is not None:
                loader.limit_micro_batch(max(samples, 1))

    # Lengths

    def _own_lengths(self) -> dict[str, int | None]:
        """Return the updates of a pass over each split to train on, as far as the loaders of this rank know."""
        lengths: dict[str, int | None] = {}
        for split in self._run.train_splits:
            if split not in self._run.dataloaders:
                continue
            loader = self._run.dataloaders[split]
            try:
                if isinstance(loader, DataLoader) and loader.division is not None:
                    lengths[split] = -(-loader.order.end // loader.division.samples)
                else:
                    lengths[split] = -(-len(loader) // self.accum_steps())
            except (TypeError, NotImplementedError):
                lengths[split] = None
        return lengths

    def agree_lengths(self) -> None:
        """Agree on the updates of a pass over each split to train on: a pass ends with the shortest loader. Called on all ranks.

        What follows from the length of a run, such as its schedule and when a line is logged, must be the same everywhere.

        Raises:
            ValueError: If a dataset that the library divides has another length on another rank.
        """
        mine = self._own_lengths()
        loaders = self._run.dataloaders
        samples = {
            split: loaders[split].order.length
            for split in mine
            if isinstance(loaders[split], DataLoader)
        }
        # One collective for all three.
        ranks = self._run.placement.optimizer.gather_objects((mine, samples, self._uncompared()))
        by_split = {split: [of_rank.get(split) for _, of_rank, _ in ranks] for split in samples}
        uneven = [split for split, lengths in by_split.items() if len(set(lengths)) > 1]
        if uneven:
            raise ValueError(
                f"Expected the dataset of split {uneven[0]!r} to have one length on all ranks, over which the library divides it. "
                f"Received: {by_split[uneven[0]]} by rank. Put the same dataset into self.datasets on every rank."
            )
        self._name_other_data([series for _, _, series in ranks])
        self.lengths = {}
        for split in mine:
            known = [
                length for updates, _, _ in ranks if (length := updates.get(split)) is not None
            ]
            # What one rank does not know is not known: its loader may be the shortest.
            self.lengths[split] = min(known) if len(known) == len(ranks) else None

    def _uncompared(self) -> dict[str, dict[str, str]]:
        """Return some values of each dataset that the library divides, once a dataset."""
        if self._run.placement.optimizer.size == 1:
            return {}
        loaders = self._run.dataloaders.items()
        divided = {
            split: loader.dataset for split, loader in loaders if isinstance(loader, DataLoader)
        }
        new = {
            split: each for split, each in divided.items() if self._compared.get(split) is not each
        }
        self._compared.update(new)
        return {split: series_of(dataset) for split, dataset in new.items()}

    def _name_other_data(self, ranks: Sequence[Mapping[str, Mapping[str, str]]]) -> None:
        """Warn of datasets that the library divides and that are not the same on all ranks: samples would be repeated and left out."""
        # All ranks have the same lists, so that one of them warns.
        if self._run.placement.optimizer.rank != 0:
            return
        first, *others = ranks
        for split, series in first.items():
            different = sorted(
                {
                    path
                    for other in others
                    for path in series.keys() & other.get(split, {}).keys()
                    if other[split][path] != series[path]
                }
            )
            if different:
                logger.warning(
                    "The dataset of split %r is not the same on all ranks (%s differs). The library divides it over the ranks, so samples "
                    "would be repeated and left out. Put the whole dataset into self.datasets on every rank, in one order; or give a "
                    "loader of yours, which is not divided.",
                    split,
                    different[0],
                )

    @property
    def updates_of_epoch(self) -> int | None:
        """Updates of one pass over all splits to train on; `None` where a loader does not know, or there are none."""
        lengths = self._own_lengths() if self.lengths is None else self.lengths
        known = [length for length in lengths.values() if length is not None]
        return sum(known) or None if len(known) == len(lengths) else None

    # Loaders

    def _share(self, split: str) -> Share:
        """Return which share of a split this rank reads. May be called on one rank."""
        run = self._run
        return Share(split, run.seed, *run.placement.share(trained=self._is_trained(split)))

    def _is_trained(self, split: str) -> bool:
        return (
            self._run.mode == "train" and split in self._run.train_splits and not self._reads_once
        )

    def build_loader(self, split: str, dataset: object) -> object:
        """Return a loader of one split over the data domain, in the order of the user's sampler, if there is one."""
        run = self._run
        if isinstance(dataset, LoaderSettings):
            dataset = dataset.dataset
        settings, sampler = self.settings(split), run.build_datasampler(split, dataset)
        if sampler is not None:
            self._divide_themselves.add(split)
            # Again, since a split that divides itself may have other settings.
            settings = self.settings(split)
            settings.update(order_setting(sampler, settings))
        return build_dataloader(
            dataset,
            settings,
            **self._share(split)._asdict(),
            train=split in run.train_splits and not self._reads_once,
            device=run.device,
            accum_steps=run.config.accum_steps,
            canonical=run.config.gradient_sum == "canonical",
        )

    def open(self, split: str, loader: object) -> BatchSource:
        """Return the batches of a loader of a split."""
        run = self._run
        share = self._share(split)
        if isinstance(loader, UpdateLoader):
            if run.placement.replica_group[1] > 1:
                raise ValueError(
                    f"Expected a loader that replica groups can redivide for split {split!r}. Received: a {type(loader).__name__}, "
                    "which divides whole updates over a fixed number of ranks. Leave ft.enabled out, or put a dataset into "
                    "`self.datasets`."
                )
            trained = self._is_trained(split)
            context = LoaderContext(
                share, self.accum_steps(), run.is_main_process, trained, self._session
            )
            loader.bind_context(context, run)
        own_state = bool(self.settings(split).get("own_state"))
        return open_source(
            loader, **share._asdict(), reads=run.placement.reads_data, own_state=own_state
        )

    def open_all(self) -> str | None:
        """Open every loader that is there now, and return the split whose metrics select the best checkpoint, if there is one.

        Raises:
            ValueError: If that is unknown, or trained on and not evaluated.
        """
        run = self._run
        self.sources.clear()
        # Of splits that are evaluated too, so that a loader that cannot be read is an error at once.
        for split, loader in run.dataloaders.items():
            self._take_in(split, loader)
        scored: str | None = run.score_split
        if scored is not None:
            self.check(scored)
            if scored in run.train_splits and scored not in run.evaluate_splits:
                raise ValueError(
                    f"Expected score_split to be a split that is evaluated: the mean over training is of weights that were left behind. "
                    f"Received: score_split={scored!r}, which is trained on. Name it in evaluate_splits too, or choose another."
                )
        return scored

    def of(self, split: str) -> BatchSource:
        """Return the batches of a split; opened anew where its loader is another one now.

        At the beginning of a pass, a dataset that was replaced in `self.datasets` is taken in, and a dataset that has another length. So is
        one within a pass whose position was restored and not read behind: the program may have replaced it so before it was stopped.
        """
        self.check(split)
        run = self._run
        known = self.sources.get(split)
        restored = None
        # A pass of which nothing is left has no use for another dataset: the next one takes it in.
        if known is not None and self._change_of(split) and known.remaining_batches() != 0:
            restored = known.restored if known.consumed else None
            if restored is None:
                # Raises within a pass, in which only a position that was restored and not read from may meet another dataset.
                self.check_unchanged(split)
            if self._is_replaced(split):
                # So that `build_dataloaders` below makes one of the dataset that is there now.
                del run.dataloaders[split]
            else:
                known.loader.take_length()
                if restored is not None:
                    known.load_state_dict(restored)
        if split not in run.dataloaders:
            run.build_dataloaders()
        if split not in run.dataloaders:
            raise ValueError(
                f"Expected `build_dataloaders` to put a loader for every dataset into `self.dataloaders`. Received: none for {split!r}. "
                "Call super().build_dataloaders() in it, or put the loader there in __init__."
            )
        loader = run.dataloaders[split]
        if known is not None and known.loader is loader:
            return known
        if known is not None and known.consumed and known.remaining_batches() != 0:
            # The program has put another loader there within the pass: it stopped there, or this is a resume.
            restored = restored or known.restored or known.state_dict()
        added = self._take_in(split, loader)
        if epoch := run.state.train.epoch if known is None else known.epoch:
            added.set_epoch(epoch)
        if restored is not None:
            added.load_state_dict(restored)
        if known is not None:
            self._replaced.append(known)
        return added

    def begin(self, split: str) -> BatchSource:
        """Return the batches of a split to read a pass of, or its rest; its dataset knows the pass, from which its length may follow."""
        source = self.of(split)
        source.tell_epoch()
        return source

    def end_evaluation(self, source: BatchSource) -> None:
        """Tell a dataset that is trained on too the pass of the training, after it was evaluated."""
        dataset = getattr(source.loader, "dataset", None)
        for trained in self.trained_sources().values():
            if (
                dataset is not None
                and trained is not source
                and getattr(trained.loader, "dataset", None) is dataset
            ):
                trained.tell_epoch()

    def remember_states(self) -> Callable[[], None]:
        """Return what puts the states that datasets declare by `state_dict` back to what they are now. May be called on one rank."""
        loaders = [
            source.loader
            for source in self.sources.values()
            if isinstance(source.loader, KeyedLoader)
        ]
        kept = [
            (loader.stateful, get_states(loader.stateful)) for loader in loaders if loader.stateful
        ]

        def put_back() -> None:
            for parts, states in kept:
                if not is_equal(get_states(parts), states):
                    set_states(parts, states)

        return put_back

    def restore(self, split: str, state: Mapping[str, Any]) -> None:
        """Go to a saved position. May be called on one rank.

        Within a pass, a dataset that does not fit is an error only when the pass continues: an override of `train_epoch` may replace it.

        Args:
            split: The split.
            state: The position of this rank.

        Raises:
            ValueError: If it does not fit the loader.
        """
        source = self.of(split)
        try:
            source.load_state_dict(state)
        except ValueError as error:
            may_be_replaced = split in self._run.datasets or is_overridden(self._run, "train_epoch")
            is_within = bool(state.get("consumed")) and isinstance(source.read, KeyedLoader)
            if not may_be_replaced or not is_within:
                raise
            source.await_dataset(state, error)

    def _take_in(self, split: str, loader: object) -> BatchSource:
        source = self.sources[split] = self.open(split, loader)
        self._datasets[split] = self._run.datasets.get(split)
        return source

    def _is_replaced(self, split: str) -> bool:
        return split in self._run.datasets and self._run.datasets[split] is not self._datasets.get(
            split
        )

    def _change_of(self, split: str) -> str | None:
        """Return how the dataset that a loader of the library was built from has changed, `None` where it has not."""
        source = self.sources[split]
        loader = source.loader
        if loader is not self._run.dataloaders.get(split) or not source.is_built:
            return None
        if self._is_replaced(split):
            return "another dataset in self.datasets"
        if isinstance(loader, DataLoader) and len(loader.dataset) != loader.order.length:
            return f"a dataset of length {len(loader.dataset)} that had {loader.order.length}"
        return None

    def check_unchanged(self, split: str) -> None:
        """Refuse a dataset that was changed within a pass. May be called on one rank."""
        source = self.sources[split]
        loader = source.loader
        is_same = self._run.datasets.get(split) is self._datasets.get(split)
        # The program may have closed a dataset that it has replaced: only one that is still used has a length.
        if is_same and (
            not isinstance(loader, DataLoader) or len(loader.dataset) == loader.order.length
        ):
            return
        change = self._change_of(split) if source.consumed and source.restored is None else None
        if change is not None:
            raise ValueError(
                f"Expected the dataset of split {split!r} to stay as it is within a pass. Received: {change}, after {source.consumed} of "
                "the pass were consumed. Replace or extend it between two passes, such as in train_epoch before super().train_epoch()."
            )

    def trained_sources(self) -> dict[str, BatchSource]:
        """Return the batches of the splits to train on whose loaders were opened."""
        return {
            split: self.sources[split] for split in self._run.train_splits if split in self.sources
        }

    def redivide(self) -> None:
        """Build all loaders again for the ranks that there are now, at the positions that they have. No communication."""
        positions = {split: source.state_dict() for split, source in self.trained_sources().items()}
        passes = {split: source.epoch for split, source in self.sources.items()}
        for split, source in list(self.sources.items()):
            source.close()
            del self.sources[split]
            self._run.dataloaders.pop(split, None)
        self._run.build_dataloaders()
        for split in self._run.dataloaders:
            # The noise of an evaluation follows from the number of the pass, too.
            self.of(split).set_epoch(passes.get(split, 0))
        for split, position in positions.items():
            self.restore(split, position)

    def close(self) -> None:
        """Close all sources, those that were replaced too; one that fails does not keep the others from it."""
        with ExitStack() as stack:
            for source in (*self._replaced, *self.sources.values()):
                stack.callback(source.close)

    # Loaders of windows, such as streams, which free their data after training on it

    def update_loaders(self) -> dict[str, UpdateLoader]:
        """Return the loaders to train on that divide whole updates themselves, by split. May be called on one rank."""
        return {
            split: source.read
            for split, source in self.trained_sources().items()
            if source.kind == "window"
        }

    def commit_saved(self, payload: Mapping[str, Any]) -> None:
        """Let loaders free the data before their positions in a checkpoint that is on the disk.

        May be called on one rank, and from another thread.
        """
        states = payload.get("dataloaders", {})
        for split, loader in self.update_loaders().items():
            if (state := states.get(split)) is not None and state.get("kind") == "window":
                loader.commit_state(state)

    def commit_loaded(self) -> None:
        """Do the same for the positions that the run was restored to."""
        for loader in self.update_loaders().values():
            loader.commit_state(loader.state_dict())

"""The loader that trains on a stream: a position in its log, which checkpoints save, and the features that are freed behind it."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch import Tensor
from torch.utils.data import Dataset, default_collate

from danling.checkpoints import CheckpointSettings
from danling.data import PLACEHOLDER, Batch, Division, LoaderContext, UpdateLoader, derive_seed
from danling.data.randomness import seed_host_streams
from danling.training.session import DataEnded

from .channel import RefChannel, standing
from .refs import SampleRef
from .store import FeatureStore
from .waits import Waits

if TYPE_CHECKING:
    from danling.runners.base_runner import BaseRunner

logger = logging.getLogger("danling")


class Sample(dict[str, Tensor]):
    """The features of a sample by name.

    Attributes:
        ref: What the log says of the sample: its id, and its metadata, such as the version of the weights that made it.
    """

    def __init__(self, features: Mapping[str, Tensor], ref: SampleRef) -> None:
        super().__init__(features)
        self.ref = ref


class FeatureDataset(Dataset[Any]):
    """A fixed list of samples of a stream, for evaluation, or to train on in another order; goes into `self.datasets`.

    Args:
        store: Where the features are. It frees none of them; a `StreamLoader` over the same log does, unless it has `retain="all"`.
        refs: The samples, such as `channel.read(0, channel.published())`.
        transform: Makes of a `Sample` what the loader is to collate; by default its features by name.
    """

    def __init__(
        self,
        store: FeatureStore,
        refs: Sequence[SampleRef],
        *,
        transform: Callable[[Sample], Any] | None = None,
    ) -> None:
        self.store = store
        self.refs = list(refs)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.refs)

    def __getitem__(self, index: int) -> Any:
        sample = Sample(self.store.get(self.refs[index]), self.refs[index])
        return dict(sample) if self.transform is None else self.transform(sample)


Retain = Literal["checkpoint", "step", "all"]

_POLL_SECONDS = (0.001, 0.05)
"""The first and the longest pause between two looks at the log."""

_FREED_AT_ONCE = 1024
"""Samples whose references are read at a time while they are freed."""


def unsaved_updates(runner: BaseRunner) -> int | None:
    """Return how many updates are made at most until the first of them is on the disk; `None` where no save is due within a pass."""
    settings = runner.config.checkpoint
    if not runner.is_step_mode or settings.load_only:
        return None
    # A save in the background may wait for the one before it, and is on the disk an interval later then.
    intervals = 2 if CheckpointSettings.from_config(settings).is_async else 1
    return runner.checkpoint_interval * intervals


class StreamLoader(UpdateLoader):
    """Trains on the samples of a log, in its order, while another process may still append to it; goes into `self.dataloaders`.

    An update takes the next `ranks x batch_size x accum_steps` samples, of which this rank reads its share. It begins once the log
    holds all of them; a shorter last one is divided like any other, once the log is complete. The position is the number of samples
    consumed over all ranks. It is in the run's checkpoints, and means the same on any number of ranks.

    Features are freed, and the producer gets its credit back, when they are no longer needed:

    - `retain="checkpoint"`: when a checkpoint behind them is on the disk. After a crash of either side, at any instant, the run goes on
      bitwise as if nothing had happened. The producer must be allowed at least as many samples ahead as are trained on between two saves.
    - `retain="step"`: after the update, for features that are too large to be kept. A resumed run lacks the features between its
      checkpoint and the place where it was killed; `on_gap` says what it does then.
    - `retain="all"`: never. The log may be read as often as one likes, by several runs once it is complete.

    Args:
        store: Where the features are.
        channel: The log.
        batch_size: Samples that a rank holds at once.
        global_batch_size: Samples of an update over all ranks, in the place of `ranks x batch_size x accum_steps`: then an update takes the
            same samples on any number of ranks.
        collate_fn: Makes a batch of a list of `Sample`, mappings from names to tensors; by default each name is stacked. What it draws
            from the random streams is the same when the run is resumed.
        retain: How long features are kept.
        on_gap: With `retain="step"`, what a resumed run does about samples that are gone: `"error"`, or `"skip"`, which counts them in the
            log of the run.
        prefetch: Micro-batches that are read ahead in a thread.
        idle_timeout: Seconds without a new sample after which the run gives up waiting.

    Raises:
        ValueError: If an argument is out of bounds.
    """

    def __init__(
        self,
        store: FeatureStore,
        channel: RefChannel,
        batch_size: int,
        *,
        global_batch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        retain: Retain = "checkpoint",
        on_gap: Literal["error", "skip"] = "error",
        prefetch: int = 2,
        idle_timeout: float = 600.0,
    ) -> None:
        may_skip = on_gap == "error" or (on_gap, retain) == ("skip", "step")
        is_whole = global_batch_size is None or global_batch_size > 0
        checks = (
            ("batch_size", batch_size, batch_size > 0, "a positive integer"),
            ("global_batch_size", global_batch_size, is_whole, "positive"),
            ("retain", retain, retain in get_args(Retain), "'checkpoint', 'step' or 'all'"),
            ("on_gap", on_gap, may_skip, "'error', or 'skip' with retain='step'"),
            ("prefetch", prefetch, prefetch >= 0, "a number of micro-batches, 0 for none"),
            ("idle_timeout", idle_timeout, idle_timeout > 0, "seconds above 0"),
        )
        wrong = [
            (name, value, expected) for name, value, is_right, expected in checks if not is_right
        ]
        if wrong:
            name, value, expected = wrong[0]
            raise ValueError(
                f"Expected {name} of a StreamLoader to be {expected}. Received: {name}={value!r}."
            )
        self.store = store
        self.channel = channel
        self.batch_size = batch_size
        self.global_batch_size = global_batch_size
        self.collate_fn = collate_fn
        self.retain = retain
        self.on_gap = on_gap
        self.prefetch = prefetch
        self.idle_timeout = idle_timeout
        self.epoch = 0
        self.consumed = 0
        self.skipped = 0
        """Samples that a resumed run has left out, since their features were gone."""
        self.pump: Callable[[], bool] | None = None
        """Brings the log forward from within a wait, where producer and trainer share a process; returns whether it did."""
        self._context = LoaderContext()
        self._runner: BaseRunner | None = None
        self._waits: Waits | None = None
        self._last_id = ""
        self._opened: deque[tuple[int, str, int]] = deque()
        """Of each window that is opened and not consumed: the place behind it, its last sample, and its micro-batches on a rank."""
        self._done = 0
        self._division: Division
        self._next = self._published = 0
        """The place of the next window to open, and how many samples the log has at least."""
        self._waited = self._shown_waited = 0.0
        """Seconds that this process has waited for the producer, and those that `metrics` has returned."""
        self._pool: ThreadPoolExecutor | None = None
        self._owns: bool | None = None
        """Whether it may free the samples that it has read; `None` before it asked the log."""
        self._durable = self._freed = 0
        """The position in a checkpoint that is on the disk, and that up to which features are freed."""

    # Reading

    def bind_context(self, context: LoaderContext, runner: BaseRunner | None = None) -> None:
        """Take where the loader is read, and by which run; see `danling.data.UpdateLoader`.

        Raises:
            ValueError: If it is to be evaluated on: an evaluation reads a list of samples that does not grow.
        """
        if not context.trained:
            raise ValueError(
                f"Expected a list of samples that stays as it is to evaluate split {context.share.split!r}. Received: a StreamLoader "
                f"over {self.channel.name}. Put danling.stream.FeatureDataset(store, channel.read(0, n)) into `self.datasets`, or name the "
                "split in train_splits."
            )
        self._context, self._runner = context, runner
        self._waits = None
        if runner is not None and context.session is not None:
            self._waits = Waits(context.session, runner.placement.optimizer)

    def __iter__(self) -> Iterator[Any]:
        """Yield the data of the micro-batches of this rank, and move the position behind each update."""
        for batch in self.micro_batches(read=True):
            yield batch.data
            self.advance(1)

    def micro_batches(self, *, read: bool) -> Iterator[Batch]:
        """Yield the micro-batches of this rank from the position on; see `danling.data.UpdateLoader`.

        Args:
            read: Whether their data is needed; else it is `PLACEHOLDER`.

        Raises:
            RuntimeError: If another trainer reads the live log, the producer has failed, or features are gone that a resumed run needs.
            TimeoutError: If nothing was appended to the log for `idle_timeout` seconds.
            ValueError: If this is not the log that the run was trained on, it is complete without a sample, or an object is not what the
                log says.
        """
        self._opened.clear()
        self._done = 0
        self._check_log()
        self._claim()
        if self.epoch and self.retain != "all":
            self.free()
            if self._context.is_main:
                logger.warning(
                    "Stream %s is complete: all of its %d samples are trained on, and their features are freed, so the training ends "
                    "here. retain='all' keeps them for more passes.",
                    self.channel.name,
                    self.channel.published(),
                )
            if self._context.session is not None and self._context.session.running:
                raise DataEnded  # at the same update on all ranks
            return
        if self.retain != "all":
            self._check_gap()
        ranks = self._context.share.world_size
        samples = self.global_batch_size or ranks * self.batch_size * self._context.accum_steps
        self._division = Division.of_update(samples, ranks, micro_batch_size=self.batch_size)
        self._next = self.consumed
        self._published = 0
        if read:
            yield from self._read()
        else:
            while parts := self._open(wait=True):
                yield from (batch for batch, _ in parts)

    def _check_log(self) -> None:
        """Refuse another log than the one that the position was taken in, before anything of it is freed."""
        if not self.consumed and (self.epoch == 0 or self.retain == "all"):
            return  # where features are kept, the pass before may have been left before its end
        stop = self.consumed or self.channel.published()
        before = self.channel.read(max(stop - 1, 0), stop)
        if before and self._last_id in ("", before[0].id):
            return
        received = (
            f"sample {before[0].id!r}" if before else f"a log of {self.channel.published()} samples"
        )
        where = f"at place {self.consumed - 1}" if self.consumed else "at its end"
        raise ValueError(
            f"Expected the log that this run was trained on, with sample {self._last_id!r} {where}. Received: {received} in "
            f"{self.channel.name}. Give the loader that log, or exclude 'dataloaders' from loading to begin with this one."
        )

    def _claim(self) -> None:
        """Take the log for this run, on the main process."""
        if self._owns is None and self._context.is_main:
            # A loop without a runner has no lineage to come back with: the log is then that of this process.
            run = f"process {os.getpid()}" if self._runner is None else self._runner.id
            self._owns = self.channel.claim(run)
            if not self._owns and self.retain != "all":
                logger.info(
                    "Stream %s belongs to another run: it is read, and nothing of it is freed.",
                    self.channel.name,
                )

    def _check_gap(self) -> None:
        """See that what follows the position is still there; else leave it out where `on_gap` says so."""
        name = self.channel.name
        if self._owns and getattr(self.store, "read_only", False):
            raise ValueError(
                f"Expected a store that can be written to train on stream {name}, since features are freed behind the position. Received: "
                f"read_only=True, retain={self.retain!r}. Pass retain='all' to keep them, or leave read_only out."
            )
        freed = self.channel.committed()
        while self.retain == "step" and (refs := self.channel.read(freed, freed + 1)):
            try:
                self.store.get(refs[0])
                break
            except KeyError:  # a kill has come before the watermark was moved
                freed += 1
        missing = freed - self.consumed
        if missing <= 0:
            return
        if self.on_gap == "error":
            raise RuntimeError(
                f"Expected the features of stream {name}, which this run needs from sample {self.consumed} on. Received: {missing} samples "
                f"less, since those before {freed} were freed. Resume from the latest checkpoint of the run, set on_gap='skip' with "
                "retain='step' to continue without them, or make the features again in another stream. (If they were kept with "
                "retain='all', pass that.)"
            )
        self.skipped += missing
        self.consumed = freed
        # No sample before the new position was trained on: an empty id fits any log.
        self._last_id = ""
        if self._context.is_main:
            logger.warning(
                "Stream %s: %d samples behind the checkpoint were freed at their updates; they are skipped (%d in this run so far).",
                name,
                missing,
                self.skipped,
            )

    def _read(self) -> Iterator[Batch]:
        known: deque[tuple[Batch, list[SampleRef]]] = deque()
        ahead: deque[tuple[Batch, Callable[[], list[Sample]]]] = deque()
        while True:
            while len(ahead) <= self.prefetch:
                if not known:
                    # With batches read ahead there is something to train on, so that only an empty
                    # queue waits.
                    known.extend(self._open(wait=not ahead))
                if not known:
                    break
                batch, refs = known.popleft()
                ahead.append((batch, self._begin_fetch(refs)))
            if not ahead:
                return
            batch, fetched = ahead.popleft()
            samples = fetched()
            if self.collate_fn is None:
                yield batch._replace(data=default_collate([dict(sample) for sample in samples]))
            else:
                share = self._context.share
                seed_host_streams(
                    derive_seed(share.seed, "read", share.split, self.epoch, batch.place[0])
                )
                yield batch._replace(data=self.collate_fn(samples))

    def _begin_fetch(self, refs: Sequence[SampleRef]) -> Callable[[], list[Sample]]:
        """Return what returns the samples: a thread reads them from now on, but where nothing is read ahead."""
        if not self.prefetch:
            return partial(self._fetch, refs)
        if self._pool is None:
            # One thread, so that samples are read in the order of the log.
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="danling-stream")
        return self._pool.submit(self._fetch, refs).result

    def _fetch(self, refs: Sequence[SampleRef]) -> list[Sample]:
        return [Sample(self.store.get(ref), ref) for ref in refs]

    def _open(self, *, wait: bool) -> list[tuple[Batch, list[SampleRef]]]:
        """Return the micro-batches of the next window, with their samples; none at the end of the log or, without waiting, before the
        window is there.

        A window is opened once the log holds all of it. A shorter one is the last one, and is opened once the log says that it is complete:
        both are facts of the log that never change, so every rank that looks comes to the same windows, whenever it looks.
        """
        self.free()
        start = self._next
        stop = self._find_end(start, start + self._division.samples, wait=wait)
        if stop <= start:
            if wait and not self.channel.published():
                raise ValueError(
                    f"Expected at least one sample in stream {self.channel.name}. Received: its log is complete without one. See what "
                    "its producer went over, and begin another stream: a complete one stays as it is."
                )
            return []
        self._next = stop
        refs = self.channel.read(start, stop)
        if not self._opened and start == self.consumed:
            self._check_credit(refs)
        samples = len(refs)
        parts = self._division.cut(samples, self._context.share.rank)
        cuts = list(zip(parts, self._division.totals(samples), strict=True))
        self._opened.append((start + samples, refs[-1].id, len(cuts)))
        # Padding has the place that its sample would have, and the first sample of the window.
        return [
            (
                Batch(PLACEHOLDER, size, total, number == len(cuts), (start + offset,)),
                refs[offset : offset + size] or refs[:1],
            )
            for number, ((offset, size), total) in enumerate(cuts, start=1)
        ]

    def _find_end(self, start: int, stop: int, *, wait: bool) -> int:
        """Return where a window ends: at `stop` once the log holds all of it, or where the log is complete; at `start` where that is not
        known yet and is not waited for."""
        if self._published >= stop:
            return stop
        name, before = self.channel.name, self._waited
        grown = time.monotonic()
        pause = _POLL_SECONDS[0]
        while (published := self.channel.published()) < stop:
            end = self.channel.ended()
            if end is not None and end.kind == "complete":
                stop = max(min(stop, end.published), start)
                break
            if not wait:
                return start
            # It may have grown, and ended, since it was counted.
            if end is not None and (published := self.channel.published()) < stop:
                raise RuntimeError(
                    f"Expected the producer of stream {name} to continue: its log is not complete. Received: it is {end.kind} after "
                    f"{published} samples, of which {start} are trained on ({end.reason.rstrip('.') or 'no reason'}). Start the producer "
                    "again, which continues after the last sample, then this run, which continues from its last checkpoint."
                )
            now = time.monotonic()
            if published > self._published:
                self._published, grown = published, now
            elif now - grown > self.idle_timeout:
                raise TimeoutError(
                    f"Expected samples {published} to {stop - 1} from the producer of stream {name}. Received: nothing for "
                    f"{self.idle_timeout:g} seconds (idle_timeout). Check whether the producer runs, start it again, or raise idle_timeout "
                    "where it takes so long; this run continues from its last checkpoint."
                )
            self.free()
            if not self._opened:
                # A producer that is allowed less than an update never comes to the end of one.
                self._check_credit(self.channel.read(start, start + 1), waits=True)
            if self._waits is not None:
                self._waits.leave_if_asked(start)
            if self.pump is not None and self.pump():
                # What the producer computes in this process is no silence of it: `idle_timeout`
                # begins anew.
                grown = time.monotonic()
                pause = _POLL_SECONDS[0]
            else:
                time.sleep(pause)
                pause = min(pause * 2, _POLL_SECONDS[1])
            self._waited += time.monotonic() - now
        self._published = published
        if self._waited > before and self._waits is not None:
            self._waits.end()
        return stop

    def _check_credit(self, refs: Sequence[SampleRef], *, waits: bool = False) -> None:
        """Refuse a producer that may not be so far ahead that training comes to the save that would let it go on."""
        allowed = min(
            (int(ref.meta["max_in_flight"]) for ref in refs if "max_in_flight" in ref.meta),
            default=None,
        )
        if allowed is None or self.channel.ended() is not None:
            return
        if waits and self.channel.published() - self.channel.committed() < allowed:
            return
        samples = self._division.samples
        updates: int | None = 1
        if self.retain == "checkpoint":
            updates = None if self._runner is None else unsaved_updates(self._runner)
        if updates is None:
            needed = "any number of samples"
            why = "there is no save within a pass, as checkpoint.interval counts epochs without `steps`"
        elif allowed < updates * samples:
            needed = f"at least {updates * samples} samples"
            why = f"these are {updates} updates of {samples} until features are freed"
        else:
            return
        raise ValueError(
            f"Expected the producer of stream {self.channel.name} to be allowed {needed} ahead: {why}, and with less, producer and trainer "
            f"wait for each other. Received: max_in_flight={allowed}. Raise that of the producer, set `steps` and a lower "
            "checkpoint.interval, or lower batch_size."
        )

    # Position

    def advance(self, batches: int) -> None:
        """Move the position: an update consumed so many micro-batches of each rank. It moves by whole updates.

        Args:
            batches: How many.
        """
        self._done += batches
        while self._opened and self._done >= self._opened[0][2]:
            self.consumed, self._last_id, count = self._opened.popleft()
            self._done -= count
            if self.retain == "step":
                # Every rank has read its share: the update took all of them.
                self._durable = self.consumed
                self.free()

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of a pass."""
        self.epoch = epoch
        self.consumed = 0
        # In a later pass it is that of the pass before, which tells the log from another one.
        if epoch == 0:
            self._last_id = ""
        self._opened.clear()
        self._done = 0

    def state_dict(self) -> dict[str, object]:
        """Return the position."""
        return {
            "epoch": self.epoch,
            "consumed": self.consumed,
            "last_id": self._last_id,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position, at any number of ranks."""
        self.set_epoch(int(state["epoch"]))
        self.consumed, self._last_id = int(state["consumed"]), str(state["last_id"])
        self.skipped = int(state["skipped"])

    # Freeing

    def commit_state(self, state: Mapping[str, Any]) -> None:
        """Let the features before a position be freed that is in a checkpoint on the disk, and the producer get its credit back.

        May be called on one rank, and from another thread; the thread that reads frees them when it asks for the next window, waits for it,
        or has come to its end.
        """
        if self.retain != "step":
            # In a later pass the whole log has been trained on.
            position = int(state["consumed"]) if int(state["epoch"]) == 0 else sys.maxsize
            self._durable = max(self._durable, position)

    def free(self) -> None:
        """Free the features that are due; called in the thread that reads."""
        durable = self._durable
        if not self._context.is_main or durable <= self._freed:
            return
        if self._owns is None:  # nothing was read, since the run had come to its end before
            try:
                self._check_log()
                self._claim()
            # The run has ended, and only room is at stake: the log of another run stays as it is.
            except (RuntimeError, ValueError):
                return
        if not self._owns:
            return
        committed = self.channel.committed()
        position = min(durable, self.channel.published())
        if position > committed:
            if self.retain != "all":
                # Features before the watermark: a kill in between leaves work that the next run
                # does again. The other way round these features would stay for ever.
                for start in range(committed, position, _FREED_AT_ONCE):
                    refs = self.channel.read(start, min(start + _FREED_AT_ONCE, position))
                    self.store.discard(ref.object_id for ref in refs)
            self.channel.commit(position)
        self._freed = durable

    # Figures and end

    def metrics(self) -> dict[str, float]:
        """Return bytes in the store, samples in flight, and seconds that were waited for the producer since the last call."""
        since, self._shown_waited = self._waited - self._shown_waited, self._waited
        return {
            "stream_bytes": self.store.usage(),
            "stream_in_flight": self.channel.published() - self.channel.committed(),
            "stream_wait_seconds": since,
        }

    def standing(self) -> dict[str, object]:
        """Return how far the stream is: samples published and trained on, how the log ended, and seconds that this process waited."""
        trained = self.channel.published() if self.epoch else self.consumed
        return standing(self.channel, "trainer", trained=trained, waited=self._waited)

    def close(self) -> None:
        """Free the features that are due, and end the thread that reads ahead. Store and channel belong to the code that made them."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
        self.free()

"""A runner that makes features for another one to train on, in another process or in the same one."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.utils.data import Sampler

from danling.config import RunnerConfig
from danling.distributed import agree
from danling.runners import BaseRunner, Runner
from danling.supervision import EXIT_CODES
from danling.utils.messages import Paced
from danling.utils.plain import flatten

from .channel import RefChannel, standing
from .loader import StreamLoader
from .refs import SampleRef, TensorSpec
from .store import FeatureStore, check_tensors, describe, specs_of
from .waits import Waits

logger = logging.getLogger("danling")

_POLL_SECONDS = (0.001, 0.05)
"""The first and the longest pause between two looks at the credit."""

_ALLOWED = "max_in_flight"
"""What a producer that is limited adds to the metadata of each sample."""


@dataclass(frozen=True)
class Captured:
    """The features of one sample on their way to the store, and its metadata as JSON."""

    id: str
    features: Mapping[str, Tensor]
    meta: Mapping[str, Any]


def by_sample(features: object, ids: Sequence[str]) -> list[Mapping[str, Tensor]]:
    """Return what `capture` returned, a mapping for each sample."""
    if isinstance(features, Mapping):
        check_tensors(f"the batch that begins with sample {ids[0]!r}", features)
        shapes = {name: tuple(tensor.shape) for name, tensor in features.items()}
        odd = [name for name, shape in shapes.items() if shape[:1] != (len(ids),)]
        if odd:
            raise ValueError(
                f"Expected feature {odd[0]!r} with the {len(ids)} samples of the batch along its first dimension. Received: shape "
                f"{shapes[odd[0]]} for the batch that begins with sample {ids[0]!r}. Return one row for each sample, or a list "
                "with a mapping for each."
            )
        return [{name: tensor[row] for name, tensor in features.items()} for row in range(len(ids))]
    if (
        isinstance(features, Sequence)
        and len(features) == len(ids)
        and all(isinstance(f, Mapping) for f in features)
    ):
        for row, sample in zip(features, ids, strict=True):
            check_tensors(f"sample {sample!r}", row)
        return list(features)
    received = (
        f"{len(features)} items" if isinstance(features, Sequence) else type(features).__name__
    )
    raise ValueError(
        f"Expected `capture` to return tensors by name, or a list with such a mapping for each of {len(ids)} samples. Received: {received} "
        f"for the batch that begins with sample {ids[0]!r}."
    )


def check_like(
    sample: str, specs: Mapping[str, TensorSpec], first: Mapping[str, TensorSpec]
) -> None:
    """Refuse features that cannot be batched with those of the first sample of the log.

    Names, dtypes and numbers of dimensions are the same in all samples, and so is the last dimension, the width of a state. Other
    dimensions, such as the length of a sequence, may differ; so may the only dimension of integers, and of features as long as
    another one of the first sample, such as a mask over its tokens.
    """
    lengths = {spec.shape[0] for spec in first.values() if len(spec.shape) > 1}
    odd = [
        name
        for name in sorted({**specs, **first})
        if not _is_like(specs.get(name), first.get(name), lengths)
    ]
    if odd:
        raise ValueError(
            f"Expected {describe(first.get(odd[0]))} as feature {odd[0]!r} of sample {sample!r}, as in the first sample of the log: dtype, "
            f"number of dimensions and width, the last one, are the same in all. Received: {describe(specs.get(odd[0]))}. Nothing of it "
            "was stored: fix `capture` and start the producer again, which continues here."
        )


def _is_like(one: TensorSpec | None, first: TensorSpec | None, lengths: set[int]) -> bool:
    if one is None or first is None:
        return False
    is_length = len(first.shape) == 1 and (
        first.shape[0] in lengths or not first.torch_dtype.is_floating_point
    )
    is_same_kind = one.dtype == first.dtype and len(one.shape) == len(first.shape)
    return is_same_kind and (is_length or one.shape[-1:] == first.shape[-1:])


class Production:
    """One pass of a producer, a step at a time: features go to the store and references into the log, as far as the credit goes."""

    def __init__(
        self,
        store: FeatureStore,
        channel: RefChannel,
        batches: Iterator[list[Captured]],
        *,
        max_in_flight: int | None = None,
    ) -> None:
        self.made = self.skipped = 0
        """Samples that it has appended, and those that it has not made, since the log had them or they were twice in their batch."""
        self.waited = 0.0
        self.gave_up = False
        self.waits: Waits | None = None
        """Those of a rank that ends its waits together with others."""
        self._store = store
        self._channel = channel
        self._batches = batches
        self._max_in_flight = max_in_flight
        self._first: Mapping[str, TensorSpec] | None = None
        self._committed = 0
        """The watermark as it was before the last attempt to publish: whatever that lacked is there once it has moved."""
        self._pending: list[tuple[SampleRef, Mapping[str, Tensor]]] = []

    def advance(self) -> Literal["made", "waits", "done"]:
        """Make one batch, or publish as much of the last one as the credit allows; never waits."""
        if not self._pending:
            samples = next(self._batches, None)
            if samples is None:
                return "done"
            if not samples:
                # A batch without new samples is progress too: the caller must not wait for credit.
                return "made"
            self._pending = [(self.refer(sample), sample.features) for sample in samples]
        self._committed = self._channel.committed()
        number = len(self._pending)
        if self._max_in_flight is not None:
            # The credit is read from the log, so that a restarted producer has it too.
            in_flight = self._channel.published() - self._committed
            number = min(number, self._max_in_flight - in_flight)
        while number > 0:
            try:
                self.made += self._publish(self._pending[:number])
                del self._pending[:number]
                return "made"
            except BufferError:
                if number == 1 and self._channel.published() == self._committed:
                    raise  # nothing is in flight that would make room
                number //= 2  # fewer may fit
        return "waits"

    def refer(self, sample: Captured) -> SampleRef:
        """Return the reference of a sample, once its features are like those in the log."""
        if _ALLOWED in sample.meta or not sample.features:
            received = (
                f"metadata with {_ALLOWED!r}, which the log keeps" if sample.features else "none"
            )
            raise ValueError(
                f"Expected features of sample {sample.id!r}, and metadata under other names. Received: {received}. Nothing of it was "
                "stored: fix `capture` or `metadata` and start the producer again, which continues here."
            )
        specs = specs_of(sample.features)
        if self._first is None:
            before = self._channel.read(0, 1)
            self._first = before[0].tensors if before else specs
        check_like(sample.id, specs, self._first)
        allowed = {} if self._max_in_flight is None else {_ALLOWED: self._max_in_flight}
        # A producer that starts again, on any number of ranks, makes the same name and finds the objects it left.
        name = hashlib.sha256(f"{self._channel.name}\0{sample.id}".encode()).hexdigest()[:40]
        return SampleRef(sample.id, name, specs, {**sample.meta, **allowed})

    def _publish(self, samples: Sequence[tuple[SampleRef, Mapping[str, Tensor]]]) -> int:
        """Store samples and append them to the log; return how many of them were new there."""
        # Another producer, or another rank of this one, may have published some of them since they were found to be new.
        new = [(ref, features) for ref, features in samples if not self._channel.holds(ref.id)]
        try:
            self._store.put_many({ref.object_id: features for ref, features in new})
        except (BufferError, TypeError, ValueError):
            # Store them one by one: an error then concerns one sample, and samples in the log are skipped.
            for ref, features in new:
                self._put(ref, features)
        return self._channel.append([ref for ref, _ in new])

    def _put(self, ref: SampleRef, features: Mapping[str, Tensor]) -> None:
        try:
            self._store.put(ref.object_id, features)
        except ValueError:
            if self._channel.holds(ref.id):
                return
            # A producer that was killed before it appended the sample has left other bits of it.
            self._store.discard([ref.object_id])
            self._store.put(ref.object_id, features)
        except TypeError as error:
            raise TypeError(f"{error} It holds sample {ref.id!r}.") from error

    def await_credit(
        self, idle_seconds: float, leaving: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait until the trainer gives credit back; give up where it stops the stream, or this producer is to leave."""
        began = time.monotonic()
        pause = _POLL_SECONDS[0]
        try:
            while self._channel.committed() == self._committed:
                end = self._channel.ended()
                if leaving() or (end is not None and end.kind == "stopped"):
                    self.gave_up = True
                    self._pending.clear()
                    return
                if time.monotonic() - began > idle_seconds:
                    raise TimeoutError(
                        f"Expected the trainer of stream {self._channel.name} to give credit back. Received: nothing for {idle_seconds:g} "
                        f"seconds (idle_timeout), with {self._channel.published() - self._committed} samples in flight. Check whether the "
                        "trainer runs and saves checkpoints often enough, or raise max_in_flight; start this producer again, and it "
                        "continues here."
                    )
                time.sleep(pause)
                pause = min(pause * 2, _POLL_SECONDS[1])
        finally:
            self.waited += time.monotonic() - began


_LEFT_OUT = (
    *("optim", "scheduler", "ema", "resume"),
    *("train_splits", "evaluate_splits", "score_split", "score_name", "score_mode"),
    *("min_delta", "patience", "evaluate_interval", "max_skipped_updates"),
)
"""Settings of a training that a producer sets back to their defaults: it would build an optimizer, or miss splits that they name."""

_UNREAD = (
    "steps",
    "epochs",
    "accum_steps",
    "max_grad_norm",
    "max_grad_value",
    "skip_nonfinite_grad",
    "max_time",
)
"""Settings of a training that a producer has no use for; they are kept, since its program may read them."""


class FeatureProducer(Runner):
    """Runs a frozen model over a split and publishes what it computes, sample by sample, in one log.

    A subclass sets `self.model` and the data, and overrides `capture` and `sample_ids`. `produce()` goes over the data once; samples
    that are in the log are left out, so that a producer that was killed goes on where it was when it is started again. It waits when
    it is `max_in_flight` samples ahead of the trainer's last durable checkpoint. When it fails, the log says so and why.

    It may be given the configuration of its trainer, one file for both: what concerns only training is left out, which the log says. Its
    run has its own identity, and so its own directory; a `dir` that is set is for one of both.

    Several producers may fill one log, each with its own data: give each its `part` out of `parts`. The log is complete when all have
    come to their end.

    Args:
        config: A `RunnerConfig`, a mapping, the path of a file, or `None` for the defaults; `stack` and `parallel` divide the model.
        store: Where features go.
        channel: The log.
        max_in_flight: Samples that it may be ahead; `None` for no limit but that of the store.
        part: Which of several producers this is, from 0; the same when it is started again.
        parts: How many there are.
        idle_timeout: Seconds that it waits for credit at most.

    Raises:
        ValueError: If a setting is unknown or contradicts another one.
    """

    def __init__(
        self,
        config: RunnerConfig | Mapping[str, object] | None = None,
        *,
        store: FeatureStore,
        channel: RefChannel,
        max_in_flight: int | None = 1024,
        part: int = 0,
        parts: int = 1,
        idle_timeout: float = 3600.0,
    ) -> None:
        super().__init__(config)
        if max_in_flight is not None and max_in_flight < 1:
            raise ValueError(
                f"Expected max_in_flight to be a positive number of samples, or None. Received: {max_in_flight!r}."
            )
        self.store = store
        self.channel = channel
        self.max_in_flight = max_in_flight
        self.part = part
        self.parts = parts
        self.idle_timeout = idle_timeout
        self._stops = False
        self._production: Production | None = None
        self._last_skipped = ""

    def adopt_config(self, config: RunnerConfig | Mapping[str, object] | None) -> RunnerConfig:
        """Return a validated copy of `config` without what concerns only training; see `BaseRunner.adopt_config`.

        Args:
            config: What the user passed.
        """
        own = super().adopt_config(config)
        usual = RunnerConfig()
        changed = {key.partition(".")[0] for key in flatten(own.changed())}
        self._left_out = [name for name in (*_LEFT_OUT, *_UNREAD) if name in changed]
        self._asked_for = list(own.evaluate_splits or ())
        for name in changed.intersection(_LEFT_OUT):
            own[name] = usual[name]
        own.set_apart("produce")
        return own

    def __post_init__(self) -> None:
        """Finish construction, and say what of the configuration is for the trainer alone. Called on all ranks."""
        # Of the splits that the trainer evaluates, those that this producer has are what it goes over; the others would be refused.
        self._asked_for = [name for name in self._asked_for if name in self._parts.data.names]
        if self._asked_for:
            self._left_out.remove("evaluate_splits")
        super().__post_init__()
        if self._left_out and self.is_main_process:
            logger.info("A producer trains nothing: it leaves %s out.", ", ".join(self._left_out))

    def restore(self) -> None:
        """Begin from `pretrained`, if it is set: a producer saves no checkpoint, and goes on where the log ends.

        Raises:
            CheckpointMismatch: If the directory is that of a run that trains.
        """
        if not self.config.checkpoint.load_only:
            self.checkpoint_manager.on_main(self.checkpoint_manager.checkpoints.refuse_foreign)
        if self.config.pretrained:
            self.load_pretrained(self.config.pretrained)

    # To be overridden

    def capture(self, batch: Any) -> Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]]:
        """Return the features of a batch, which is on the device; called in evaluation mode and without gradients. Called on all ranks.

        Args:
            batch: What the loader gave.

        Returns:
            Tensors by name with the samples along their first dimension, or a list with a mapping for each sample.
        """
        raise NotImplementedError(
            f"Expected {type(self).__name__} to override `capture(batch)`, which returns the features of a batch by name."
        )

    def sample_ids(self, batch: Any) -> Sequence[object]:
        """Return what names each sample of a batch in the log: the same for the same sample, whenever it is made; texts or integers.

        By default the entry `id` of a mapping.

        Args:
            batch: What the loader gave.
        """
        ids = batch.get("id") if isinstance(batch, Mapping) else None
        if ids is None:
            raise NotImplementedError(
                f"Expected {type(self).__name__} to override `sample_ids(batch)`, or batches that are mappings with an entry 'id'. "
                f"Received: {type(batch).__name__}. Let the dataset return its index too."
            )
        return ids.tolist() if isinstance(ids, Tensor) else list(ids)

    def metadata(self, batch: Any) -> Sequence[Mapping[str, Any]] | None:
        """Return plain values to be kept with each sample in the log, such as the version of the weights; by default none.

        Args:
            batch: What the loader gave.
        """
        return None

    # The verb

    def produce(self, split: str | None = None) -> int:
        """Make the features of a split and end the log, or this producer's part of it. Call on all ranks.

        Args:
            split: The split; `None` is the first one named for inference, else the first one of `evaluate_splits` that this producer has,
                else the first one there is.

        Returns:
            Samples that this process has appended to the log.

        Raises:
            TimeoutError: If the trainer gave no credit back for `idle_timeout` seconds.
            SystemExit: After a signal; the log stays open, and the producer goes on when it is started again.
        """
        session = self._parts.session
        lines = Paced(self.config.log_seconds)
        with self._parts.reporter.speaking():
            self.init_signal_handlers()
            session.begin()
            production = self.production(split)
            progress = ""
            try:
                while progress != "done" and not self._is_to_stop():
                    progress = production.advance()
                    if progress == "waits":
                        production.await_credit(self.idle_timeout, self._hears_of_stop)
                    elif self.is_main_process and lines.due():
                        self._report("Producing")
                # A log is complete only where all ranks came to their end: one that gave up has
                # samples left.
                mine = progress == "done" and not production.gave_up
                ended = not agree(self.world, () if mine else ("stop",))
                if ended:
                    self.end_production()
            except Exception as error:
                self.fail_production(error)
                raise
            finally:
                session.uninstall_signals()
            session.apply_requests(agree(self.world, session.local_requests()))
            if self.is_main_process:
                self._report("Finished" if ended else "Stopped")
        if session.stop_reason in EXIT_CODES:
            raise SystemExit(EXIT_CODES[session.stop_reason])
        return production.made

    def production(self, split: str | None = None) -> Production:
        """Begin, or go on with, a pass over a split, to be made step by step. Call on all ranks.

        Args:
            split: As for `produce`.
        """
        self._stops = False
        self.channel.reopen()
        batches: Iterator[list[Captured]] = iter(())
        # A complete log stays complete, also after `reopen`: there is nothing to make.
        if self.channel.ended() is None:
            named = (
                self._parts.data.to_infer(self._asked_for or self.evaluate_splits)
                or self._parts.data.names[:1]
            )
            batches = self._captured(self._parts.data.choose(split, named, "produce")[0])
        self._production = Production(
            self.store, self.channel, batches, max_in_flight=self.max_in_flight
        )
        if self._goes_together:
            self._production.waits = Waits(self._parts.session, self.placement.optimizer)
        self._write_standing()
        return self._production

    def end_production(self) -> None:
        """Say in the log that this producer has come to its end; the main process does. Call on all ranks."""
        production = self._production
        if production is not None:
            # A pass meets each sample at most once: of those it has left out, no more than others have appended were in the log before.
            repeated = production.skipped - (self.channel.published() - production.made)
            if repeated > 0:
                logger.warning(
                    "%d samples were left out, since their ids came more than once in the pass: the log of stream %s holds each once. The "
                    "last one was %r. If they are other samples, override `sample_ids` so that each has its own id.",
                    repeated,
                    self.channel.name,
                    self._last_skipped,
                )
            production.skipped = 0
        if self.is_main_process:
            self._end("complete")

    def fail_production(self, error: BaseException) -> None:
        """Say in the log that the producer has failed, and why; an error of the log does not hide the failure. May be called on one rank.

        Args:
            error: Why.
        """
        try:
            self._end("failed", f"{type(error).__name__}: {error}")
        except Exception:
            logger.exception(
                "The failure could not be written into the log of stream %s; it follows.",
                self.channel.name,
            )

    def _end(self, kind: str, reason: str = "") -> None:
        """Say in the log how the production has ended, unless that says so already. May be called on one rank."""
        self.channel.end(kind, reason, part=self.part, parts=self.parts)
        self._write_standing()

    def infer_step(self, data: Any) -> list[Captured | None]:
        """Return the samples of a batch that are not in the log, with their features, and `None` for the others. Called on all ranks.

        Args:
            data: The batch, on the device.
        """
        ids = [str(sample) for sample in self.sample_ids(data)]
        odd = [sample for sample in ids if sample.encode(errors="ignore").decode() != sample]
        if odd:
            raise ValueError(
                f"Expected an id of valid Unicode for a sample. Received: {odd[0]!r}. Name files otherwise, such as by "
                "os.fsencode(name).hex()."
            )
        # Reversed, so that of two samples with one id the place of the first one stays.
        first = {sample: place for place, sample in reversed(list(enumerate(ids)))}
        wanted = [
            first[sample] == place and not self.channel.holds(sample)
            for place, sample in enumerate(ids)
        ]
        left_out = [sample for sample, new in zip(ids, wanted, strict=True) if not new]
        if left_out:
            self._last_skipped = left_out[-1]
        votes = frozenset({"continue"} if any(wanted) else ())
        if self._goes_together:
            # A forward is a collective: all ranks make it for the one that needs it, and stop with the one that is asked to.
            if self._is_asked_to_stop():
                votes |= {"stop"}
            votes = agree(self.placement.optimizer, votes)
            self._stops = self._stops or "stop" in votes
        if self._stops or not votes:
            return [None] * len(ids)
        features = by_sample(self.capture(data), ids)
        meta = self.metadata(data) or [{}] * len(ids)
        rows = zip(ids, features, meta, wanted, strict=True)
        return [
            Captured(sample, row, dict(known)) if new else None for sample, row, known, new in rows
        ]

    @property
    def _goes_together(self) -> bool:
        return self.world_size > 1 and self.preparation.evaluates_together

    def _is_to_stop(self) -> bool:
        # Asked first: with it, this rank says to the others what it was asked, before they come to the collectives of the next batch.
        asked = self._is_asked_to_stop()
        return self._stops if self._goes_together else asked

    def _is_asked_to_stop(self) -> bool:
        gave_up = self._production is not None and self._production.gave_up
        return self._hears_of_stop() or gave_up

    def _hears_of_stop(self) -> bool:
        # A rank that waits for credit does not come to the next collective, where ranks agree to stop: the others tell it by the store.
        waits = None if self._production is None else self._production.waits
        if waits is not None:
            return waits.stops(0)
        return self._parts.session.asked_to_stop()

    def _captured(self, split: str) -> Iterator[list[Captured]]:
        for rows in self._parts.evaluator.stream_batches(split):
            made = [row for row in rows if row is not None]
            if not self.placement.counts_samples:
                made = []
            elif self._production is not None and not self._stops:
                # A batch that a rank reads only so that it makes as many forwards as the others has no rows here.
                self._production.skipped += len(rows) - len(made)
            yield made

    def _write_standing(self) -> None:
        """Write into the run directory how far the stream is, on the main process."""
        if self.is_main_process:
            waited = 0.0 if self._production is None else self._production.waited
            found = standing(
                self.channel, "producer", trained=self.channel.committed(), waited=waited
            )
            self.workspace.write_streams({"produce": found})

    def _report(self, how: str) -> None:
        """Log the figures of the production."""
        production = self._production
        assert production is not None
        self._write_standing()
        figures = {
            "produce/samples": production.made,
            "produce/stream_bytes": self.store.usage(),
            "produce/stream_in_flight": self.channel.published() - self.channel.committed(),
            "produce/stream_wait_seconds": production.waited,
        }
        self.log_figures(figures, step=production.made)
        logger.info(
            "%s: %d samples into stream %s by this process, which holds %d; %.1f s waiting for the trainer, %d bytes in the store",
            how,
            production.made,
            self.channel.name,
            self.channel.published(),
            production.waited,
            figures["produce/stream_bytes"],
        )


class EqualLengthBatches(Sampler[list[int]]):
    """Batches of indices of samples of one length each, for `build_datasampler` of a producer.

    A batch is yielded when it is full, so that the order of the log stays near that of the dataset; the remaining samples of
    each length come at the end, the shortest first. The order is a function of the lengths alone; a producer that starts again has it too.

    Args:
        lengths: Length of each sample of the dataset, such as its number of tokens.
        batch_size: Samples of a batch at most.

    Raises:
        ValueError: If the batch size is not positive.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int) -> None:
        if batch_size < 1:
            raise ValueError(
                f"Expected batch_size to be a positive integer. Received: batch_size={batch_size!r}."
            )
        self.batches: list[list[int]] = []
        unfinished: dict[int, list[int]] = {}
        for index, length in enumerate(lengths):
            batch = unfinished.setdefault(int(length), [])
            batch.append(index)
            if len(batch) == batch_size:
                self.batches.append(unfinished.pop(int(length)))
        self.batches += [unfinished[length] for length in sorted(unfinished)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


def run_together(
    producer: FeatureProducer, trainer: BaseRunner, *, split: str | None = None
) -> Any:
    """Train on what a producer makes in the same process: whenever the trainer lacks samples, the producer makes a batch.

    The trainer comes to the same losses and weights as with a producer in another process, or before it. Whichever fails, its own
    error is raised. Where the trainer ends first, the log says that it was stopped, and goes on when both are run again.

    Args:
        producer: The producer.
        trainer: A runner with a `StreamLoader` over the producer's log among its loaders.
        split: What the producer goes over; as for `FeatureProducer.produce`.

    Returns:
        What `trainer.train()` returns.

    Raises:
        ValueError: If the trainer does not read that log, or there are several ranks.
    """
    loaders = [
        loader for loader in trainer.dataloaders.values() if isinstance(loader, StreamLoader)
    ]
    loader = next((found for found in loaders if found.channel is producer.channel), None)
    if loader is None:
        raise ValueError(
            f"Expected a StreamLoader over the channel of the producer, {producer.channel.name}, in `dataloaders` of the trainer. "
            f"Received: {', '.join(found.channel.name for found in loaders) or 'none'}. Give both the same channel object."
        )
    if trainer.world_size > 1:
        raise ValueError(
            f"Expected one process for run_together. Received: {trainer.world_size}. Start the producer as its own job, with a "
            "SQLiteChannel between both."
        )
    production = producer.production(split)

    def pump() -> bool:
        try:
            progress = production.advance()
            if progress == "done":
                producer.end_production()
        except Exception as error:
            producer.fail_production(error)
            raise
        return progress == "made"

    loader.pump = pump
    try:
        results = trainer.train()
    # A signal ends the trainer by SystemExit: then, too, the log has to say why nothing follows.
    except BaseException as error:
        producer._end("stopped", f"its trainer ended with {type(error).__name__}: {error}")
        raise
    finally:
        loader.pump = None
    # Without effect on a log that is complete, which keeps its first end.
    producer._end("stopped", "its trainer has finished")
    return results

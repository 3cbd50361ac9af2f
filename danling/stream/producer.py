"""A runner that makes features for another one to train on."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from danling.config import RunnerConfig
from danling.distributed import agree
from danling.runners import Runner
from danling.supervision import EXIT_CODES
from danling.utils.messages import Paced
from danling.utils.plain import flatten

from .channel import RefChannel
from .refs import SampleRef, TensorSpec, check_id
from .store import FeatureStore

logger = logging.getLogger("danling")

Progress = Literal["made", "waits", "done"]

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
        for name, tensor in features.items():
            _check_tensor(name, tensor, ids[0])
            if tensor.ndim == 0 or len(tensor) != len(ids):
                raise ValueError(
                    f"Expected feature {name!r} with the {len(ids)} samples of the batch along its first dimension. Received: shape "
                    f"{tuple(tensor.shape)} for the batch that begins with sample {ids[0]!r}. Return one row for each sample, or a list "
                    "with a mapping for each."
                )
        return [{name: tensor[row] for name, tensor in features.items()} for row in range(len(ids))]
    if isinstance(features, Sequence) and len(features) == len(ids) and all(isinstance(f, Mapping) for f in features):
        for row, sample in zip(features, ids, strict=True):
            for name, tensor in row.items():
                _check_tensor(name, tensor, sample)
        return list(features)
    received = f"{len(features)} items" if isinstance(features, Sequence) else type(features).__name__
    raise ValueError(
        f"Expected `capture` to return tensors by name, or a list with such a mapping for each of {len(ids)} samples. Received: {received} "
        f"for the batch that begins with sample {ids[0]!r}."
    )


def _check_tensor(name: object, tensor: object, sample: str) -> None:
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        raise ValueError(
            f"Expected features of sample {sample!r} to be tensors by name. Received: {name!r}: {type(tensor).__name__}. Return plain "
            "values from `metadata`."
        )
    if tensor.is_nested or tensor.is_meta:
        raise ValueError(
            f"Expected features of sample {sample!r} to be dense tensors with values. Received: {name!r}: a "
            f"{'nested' if tensor.is_nested else 'meta'} tensor. Return a list with a mapping for each sample where their lengths differ."
        )
    if hasattr(tensor, "full_tensor"):
        raise ValueError(
            f"Expected whole features of sample {sample!r}. Received: {name!r}: a {type(tensor).__name__}, of which ranks hold parts. "
            "Return its full_tensor() from `capture`."
        )


def check_like(sample: str, specs: Mapping[str, TensorSpec], first: Mapping[str, TensorSpec]) -> None:
    """Refuse features that cannot be batched with those of the first sample of the log.

    Names, dtypes and numbers of dimensions are the same in all samples, and so is the last dimension, the width of a state. Other
    dimensions, such as the length of a sequence, may differ; so may the only dimension of integers, and of features as long as
    another one of the first sample, such as a mask over its tokens.
    """
    for name in sorted({**specs, **first}):
        one, other = specs.get(name), first.get(name)
        if one is None or other is None:
            received = (
                f"none (it has {', '.join(specs)})" if one is None else f"{name!r} in addition to {', '.join(first)}"
            )
            raise _differs(sample, f"{'a' if one is None else 'no'} feature {name!r}", received)
        if one.dtype != other.dtype:
            raise _differs(sample, f"dtype {other.dtype} of feature {name!r}", one.dtype)
        if len(one.shape) != len(other.shape):
            raise _differs(sample, f"{len(other.shape)} dimensions of feature {name!r}", f"shape {one.shape}")
        if one.shape and one.shape[-1] != other.shape[-1] and _has_width(name, first):
            raise _differs(sample, f"width {other.shape[-1]} of feature {name!r}", f"shape {one.shape}")


def _has_width(name: str, first: Mapping[str, TensorSpec]) -> bool:
    spec = first[name]
    if len(spec.shape) > 1:
        return True
    is_length = any(len(other.shape) > 1 and other.shape[0] == spec.shape[0] for other in first.values())
    return spec.torch_dtype.is_floating_point and not is_length


def _differs(sample: str, expected: str, received: object) -> ValueError:
    return ValueError(
        f"Expected {expected} in sample {sample!r}, as in the first sample of the log. Received: {received}. Nothing of it was stored: "
        "mend `capture` and start the producer again, which goes on here."
    )


class Publisher:
    """Puts features into a store and their references into the log, as far as the credit goes."""

    def __init__(self, store: FeatureStore, channel: RefChannel, *, max_in_flight: int | None) -> None:
        self._store = store
        self._channel = channel
        self._max_in_flight = max_in_flight
        self._first: Mapping[str, TensorSpec] | None = None

    def credit(self) -> int | None:
        """Return how many samples may be published now; `None` for any number. It is read from the log."""
        if self._max_in_flight is None:
            return None
        return max(self._max_in_flight - (self._channel.published() - self._channel.committed()), 0)

    def check(self, samples: Sequence[Captured]) -> list[SampleRef]:
        """Return the references of samples, once all of them are as the log has them."""
        refs = []
        for sample in samples:
            if _ALLOWED in sample.meta or not sample.features:
                received = f"metadata with {_ALLOWED!r}, which the log keeps" if sample.features else "none"
                raise ValueError(
                    f"Expected features of sample {sample.id!r}, and metadata under other names. Received: {received}. Nothing of it was "
                    "stored: mend `capture` or `metadata` and start the producer again, which goes on here."
                )
            specs = {name: TensorSpec.of(tensor) for name, tensor in sample.features.items()}
            if self._first is None:
                before = self._channel.read(0, 1)
                self._first = before[0].tensors if before else specs
            check_like(sample.id, specs, self._first)
            allowed = {} if self._max_in_flight is None else {_ALLOWED: self._max_in_flight}
            # A producer that starts again, on any number of ranks, makes the same name and finds the objects it left.
            name = hashlib.sha256(f"{self._channel.name}\0{sample.id}".encode()).hexdigest()[:40]
            refs.append(SampleRef(sample.id, name, specs, {**sample.meta, **allowed}))
        return refs

    def publish(self, refs: Sequence[SampleRef], samples: Sequence[Captured]) -> int:
        """Store samples and append them to the log; return how many of them were new there."""
        # Another producer, or another rank of this one, may have published some of them since they were found to be new.
        new = [(ref, sample) for ref, sample in zip(refs, samples, strict=True) if not self._channel.holds(ref.id)]
        try:
            self._store.put_many({ref.object_id: sample.features for ref, sample in new})
        except (BufferError, TypeError, ValueError):
            # Store them one by one: an error then concerns one sample, and samples in the log are skipped.
            for ref, sample in new:
                self._put(ref, sample.features)
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


class Production:
    """One pass of a producer, a step at a time."""

    def __init__(self, publisher: Publisher, channel: RefChannel, batches: Iterator[list[Captured]]) -> None:
        self.made = 0
        self.waited = 0.0
        self.repeated = 0
        self.gave_up = False
        self._publisher = publisher
        self._channel = channel
        self._batches = batches
        self._met = 0
        self._committed = 0
        """The watermark as it was before the last attempt to publish: whatever that lacked is there once it has moved."""
        self._refs: list[SampleRef] = []
        self._samples: list[Captured] = []

    def meet(self, number: int) -> int:
        """Hear of samples that need not be made, since the log has them or they are twice in their batch; return how many are repeated.

        They are counted, and their ids not kept: a pass meets each sample of the log that it has not appended itself at most once, so that
        when it has met more than there are, some came again. Where the log was empty and has no other producer, the first one that comes
        again is known at once; else only once the pass has met as many as others have appended.
        """
        self._met += number
        repeated = max(self._met - (self._channel.published() - self.made), 0)
        self._met -= repeated
        self.repeated += repeated
        return repeated

    def advance(self) -> Progress:
        """Make one batch, or publish as much of the last one as the credit allows; never waits."""
        if not self._samples:
            samples = next(self._batches, None)
            if samples is None:
                return "done"
            if not samples:
                return "made"
            self._refs, self._samples = self._publisher.check(samples), list(samples)
        self._committed = self._channel.committed()
        credit = self._publisher.credit()
        number = len(self._samples) if credit is None else min(credit, len(self._samples))
        if not number:
            return "waits"
        return self._publish(number)

    def _publish(self, number: int) -> Progress:
        try:
            self.made += self._publisher.publish(self._refs[:number], self._samples[:number])
        except BufferError:
            if number > 1:
                return self._publish(number // 2)
            if self._channel.published() == self._committed:
                raise
            return "waits"
        del self._refs[:number], self._samples[:number]
        return "made"

    def run(
        self,
        *,
        idle_seconds: float,
        stopping: Callable[[], bool],
        made: Callable[[], None],
        leaving: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> bool:
        """Make everything, waiting for credit; return whether the pass has come to its end, `False` where it was stopped."""
        while not stopping():
            progress = self.advance()
            if progress == "done":
                return not self.gave_up
            if progress == "made":
                made()
            elif not self._await_credit(idle_seconds, leaving, clock):
                self.gave_up = True
                self._refs, self._samples = [], []
        return False

    def _await_credit(self, idle_seconds: float, leaving: Callable[[], bool], clock: Callable[[], float]) -> bool:
        began, pause, committed = clock(), _POLL_SECONDS[0], self._committed
        try:
            while self._channel.committed() == committed:
                end = self._channel.ended()
                if leaving() or (end is not None and end.kind == "stopped"):
                    return False
                if clock() - began > idle_seconds:
                    raise TimeoutError(
                        f"Expected the trainer of stream {self._channel.name} to give credit back. Received: nothing for {idle_seconds:g} "
                        f"seconds (idle_timeout), with {self._channel.published() - committed} samples in flight. See whether the trainer "
                        "lives and saves checkpoints often enough, or raise max_in_flight; start this producer again, and it goes on here."
                    )
                time.sleep(pause)
                pause = min(pause * 2, _POLL_SECONDS[1])
            return True
        finally:
            self.waited += clock() - began


_LEFT_OUT = (
    *("optim", "scheduler", "ema", "resume"),
    *("train_splits", "evaluate_splits", "score_split", "score_name", "score_mode"),
    *("min_delta", "patience", "evaluate_interval", "max_skipped_updates"),
)
"""Settings of a training that a producer sets back to their defaults: it would build an optimizer, or miss splits that they name."""

_UNREAD = ("steps", "epochs", "accum_steps", "max_grad_norm", "max_grad_value", "skip_nonfinite_grad", "max_time")
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
        self._has_warned = False
        self._production: Production | None = None
        self._not_wanted: list[str] = []

    def adopt_config(self, config: RunnerConfig | Mapping[str, object] | None) -> RunnerConfig:
        """Return a validated copy of `config` without what concerns only training; see `BaseRunner.adopt_config`.

        Args:
            config: What the user passed.
        """
        own, usual = super().adopt_config(config), RunnerConfig()
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
        self._asked_for = [name for name in self._asked_for if name in self._data.names]
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
        session, lines = self._session, Paced(self.config.log_seconds)
        with self._reporter.speaking():
            self.init_signal_handlers()
            session.begin()
            production = self.production(split)

            def say() -> None:
                if self.is_main_process and lines.due():
                    self._say(production, "Producing")

            try:
                mine = production.run(
                    idle_seconds=self.idle_timeout, stopping=self._is_to_stop, made=say, leaving=self._hears_of_stop
                )
                ended = not agree(self.world, () if mine else ("stop",))
                if ended:
                    self.end_production()
            except Exception as error:
                self.fail_production(error)
                raise
            finally:
                session.uninstall_signals()
            session.apply_requests(agree(self.world, session.local_requests()))
            self._say(production, "Finished" if ended else "Stopped")
            if production.repeated:
                logger.warning("%d samples were left out, since they came more than once.", production.repeated)
        if session.stop_reason in EXIT_CODES:
            raise SystemExit(EXIT_CODES[session.stop_reason])
        return production.made

    def production(self, split: str | None = None) -> Production:
        """Begin, or go on with, a pass over a split, to be made step by step. Call on all ranks.

        Args:
            split: As for `produce`.
        """
        self._stops = self._has_warned = False
        self._production = self._begin(split)
        self._write_standing()
        return self._production

    def _begin(self, split: str | None) -> Production:
        self.channel.reopen()
        if self.channel.ended() is not None:
            return Production(Publisher(self.store, self.channel, max_in_flight=None), self.channel, iter(()))
        splits = self._data
        chosen = splits.choose(
            split, splits.to_infer(self._asked_for or self.evaluate_splits) or splits.names[:1], "produce"
        )[0]
        publisher = Publisher(self.store, self.channel, max_in_flight=self.max_in_flight)
        return Production(publisher, self.channel, self._captured(chosen))

    def end_production(self) -> None:
        """Say in the log that this producer has come to its end; the main process does."""
        if self.is_main_process:
            self.channel.end("complete", part=self.part, parts=self.parts)
            self._write_standing()

    def stop_production(self, reason: str) -> None:
        """Say in the log that nothing comes any more for now, unless it has ended already. May be called on one rank.

        Args:
            reason: Who does not want more.
        """
        self.channel.end("stopped", reason, part=self.part, parts=self.parts)
        self._write_standing()

    def fail_production(self, error: BaseException) -> None:
        """Say in the log that the producer has failed, and why; an error of the log does not hide the failure. May be called on one rank.

        Args:
            error: Why.
        """
        try:
            reason = f"{type(error).__name__}: {error}"
            self.channel.end("failed", reason, part=self.part, parts=self.parts)
            self._write_standing()
        except Exception:
            logger.exception(
                "The failure could not be written into the log of stream %s; it follows.", self.channel.name
            )

    def infer_step(self, data: Any) -> list[Captured | None]:
        """Return the samples of a batch that are not in the log, with their features, and `None` for the others. Called on all ranks.

        Args:
            data: The batch, on the device.
        """
        ids = [str(sample) for sample in self.sample_ids(data)]
        for sample in ids:
            check_id(sample)
        first = {sample: place for place, sample in reversed(list(enumerate(ids)))}
        wanted = [first[sample] == place and not self.channel.holds(sample) for place, sample in enumerate(ids)]
        self._not_wanted = [sample for sample, new in zip(ids, wanted, strict=True) if not new]
        votes = frozenset({"continue"} if any(wanted) else ())
        if self._goes_together:
            # A forward is a collective: all ranks make it for the one that needs it, and stop with the one that is asked to.
            votes = agree(self.placement.optimizer, votes | ({"stop"} if self._is_asked_to_stop() else frozenset()))
            self._stops = self._stops or "stop" in votes
        if self._stops or not votes:
            return [None] * len(ids)
        features = by_sample(self.capture(data), ids)
        meta = self.metadata(data) or [{}] * len(ids)
        rows = zip(ids, features, meta, wanted, strict=True)
        return [Captured(sample, row, dict(known)) if new else None for sample, row, known, new in rows]

    @property
    def _goes_together(self) -> bool:
        return self.world_size > 1 and self.preparation.evaluates_together

    def _is_to_stop(self) -> bool:
        asked = self._is_asked_to_stop()
        return self._stops if self._goes_together else asked

    def _is_asked_to_stop(self) -> bool:
        """Whether this rank wants to end; of those that make a forward together, all do when they agree on it before the next one."""
        gave_up = self._production is not None and self._production.gave_up
        return self._hears_of_stop() or gave_up

    def _hears_of_stop(self) -> bool:
        # A rank that waits for credit does not come to the next collective, where ranks agree to stop: the others tell it by the store.
        if self._goes_together:
            return self._session.hears_of_stop(0, self.placement.optimizer)
        return self._session.asked_to_stop()

    def _captured(self, split: str) -> Iterator[list[Captured]]:
        publishes = self.placement.counts_samples
        for rows in self._parts.evaluator.stream_batches(split):
            made = [row for row in rows if row is not None]
            if publishes and not self._stops:
                self._note_repeated(split, len(rows) - len(made))
            yield made if publishes else []

    def _note_repeated(self, split: str, number: int) -> None:
        # A batch that a rank reads only so that it makes as many forwards as the others has no rows here.
        production = self._production
        if production is None or not number or not production.meet(number) or self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            "Sample %r comes more than once in a pass over split %r. The log of stream %s holds each id once: the others are left out. If "
            "they are other samples, override `sample_ids` so that each has its own id.",
            self._not_wanted[number - 1],
            split,
            self.channel.name,
        )

    def _write_standing(self) -> None:
        """Write into the run directory how far the stream is, on the main process."""
        if not self.is_main_process:
            return
        end = self.channel.ended()
        standing = {
            "stream": self.channel.name,
            "side": "producer",
            "published": self.channel.published(),
            "trained": self.channel.committed(),
            "waited_seconds": 0.0 if self._production is None else self._production.waited,
            "end": None if end is None else end.kind,
        }
        self.workspace.write_streams({"produce": standing})

    def _say(self, production: Production, how: str) -> None:
        if self.is_main_process:
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

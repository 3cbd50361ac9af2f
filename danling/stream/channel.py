"""The log of a stream: which samples there are, in which order, which of them are no longer needed, and who may read it."""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from danling.utils.files import read_text, write_atomically
from danling.utils.locks import FileLock
from danling.utils.plain import parse_json

from .refs import SampleRef, has_checksum

logger = logging.getLogger("danling")

RECORDS = ({"end", "published", "reason"}, {"end", "part", "parts"}, {"reopened"})
"""What records of a log have that earlier versions wrote without a checksum."""

_ENDS = ("complete", "failed", "stopped")
_REPAIR = "Bring it back from a copy, or begin another stream."


@dataclass(frozen=True)
class StreamEnd:
    """How the log of a stream ended.

    Args:
        kind: `complete` after the last sample, `failed` by an error of the producer, `stopped` on request.
        published: Samples in the log.
        reason: The error, or who stopped it.
    """

    kind: str
    published: int
    reason: str = ""

    @classmethod
    def stored(cls, record: Any) -> StreamEnd:
        """Return the end that a log has a record of."""
        kind, published, reason = (record[key] for key in ("end", "published", "reason"))
        if kind not in _ENDS or not isinstance(published, int) or not isinstance(reason, str):
            raise ValueError(f"no end of a stream: {record!r}")
        return cls(kind, published, reason)


class RefChannel(ABC):
    """A log of samples in one order, each once, with the watermark up to which they are no longer needed.

    This class has the rules. A subclass stores samples, the records of ends and the watermark.

    Attributes:
        name: What messages call the channel: its path, for instance.
    """

    name: str
    _owner_file: Path
    """Says which run the log belongs to."""
    _trainer: FileLock
    """Held by the trainer that reads the log; it ends with its process."""
    _warned_unchecked = False
    """Whether a line without a checksum was reported."""

    # Of a subclass

    @abstractmethod
    def _reading(self) -> AbstractContextManager[Any]:
        """Prepare for reading what all processes have appended."""

    @abstractmethod
    def _writing(self) -> AbstractContextManager[Any]:
        """Keep other producers out, and prepare for reading."""

    @abstractmethod
    def _committing(self) -> AbstractContextManager[Any]:
        """Keep others out that move the watermark."""

    @abstractmethod
    def _count(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def _lines(self, start: int, stop: int) -> Iterable[str | bytes]:
        """Yield the references of samples as JSON."""

    @abstractmethod
    def _has(self, sample_id: str) -> bool:
        """Return whether a sample is in the log."""

    @abstractmethod
    def _append(self, refs: Sequence[SampleRef]) -> int:
        """Append those that are not in the log, and return how many these were."""

    @abstractmethod
    def _state(self) -> tuple[StreamEnd | None, int, set[int]]:
        """Return how the log ended, the number of producers, 0 where none has ended, and the parts that are complete."""

    @abstractmethod
    def _note(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Store records: that a part or the log has ended, or that it goes on."""

    @abstractmethod
    def _check_damage(self) -> None:
        """Check all that a producer reads of the log."""

    @abstractmethod
    def _watermark(self) -> object:
        """Return the watermark as it is stored."""

    @abstractmethod
    def _move_watermark(self, position: int) -> None:
        """Store the watermark."""

    # Samples

    def append(self, refs: Sequence[SampleRef]) -> int:
        """Append those that are not in the log, durably, and return how many these were.

        Args:
            refs: Samples in their order.

        Raises:
            RuntimeError: If the log has ended.
            OSError: If they cannot be written; the log is then as it was before.
        """
        with self._writing():
            if (end := self._counted_end()) is not None:
                reason = f": {end.reason}" if end.reason else ""
                fix = "Call reopen to continue there."
                if end.kind == "complete":
                    fix = "A complete log stays: begin another stream."
                raise RuntimeError(
                    f"Expected the log of stream {self.name} to be open. Received: it is {end.kind} after {end.published} "
                    f"samples{reason}. {fix}"
                )
            return self._append(refs)

    def read(self, start: int, stop: int) -> list[SampleRef]:
        """Return the samples at the places `start` to `stop`, fewer where the log holds fewer.

        Args:
            start: The first place.
            stop: The place after the last.

        Raises:
            ValueError: If the log is damaged.
        """
        if not 0 <= start <= stop:
            raise ValueError(
                f"Expected places of samples with 0 <= start <= stop. Received: start={start}, stop={stop}."
            )
        with self._reading():
            self._counted_end()
            found = list(self._parsed(start, stop))
            expected = max(min(stop, self._count()) - start, 0)
            if len(found) != expected:
                raise ValueError(
                    f"Expected {expected} samples from place {start} of the log of stream {self.name}. Received: {len(found)}. The log "
                    f"is damaged. {_REPAIR}"
                )
            return found

    def _parsed(self, start: int, stop: int) -> Iterator[SampleRef]:
        for place, line in enumerate(self._lines(start, stop), start):
            try:
                ref = SampleRef.from_json(line, place)
            except ValueError as error:
                raise ValueError(
                    f"{error} It is sample {place} of {self.name}, which is damaged. {_REPAIR}"
                ) from error
            if not self._warned_unchecked and not has_checksum(line):
                self._warned_unchecked = True
                logger.info(
                    "The log of stream %s has lines without a checksum, as earlier versions wrote them: it is read, but changed "
                    "characters in these lines may not be found.",
                    self.name,
                )
            yield ref

    def _counted_end(self) -> StreamEnd | None:
        """Return how the log ended, once it is known to hold as many samples as the end says."""
        end = self._state()[0]
        count = self._count()
        if end is not None and end.published != count:
            raise ValueError(
                f"Expected {end.published} samples in the log of stream {self.name}, as its end records ({end.kind}). Received: {count}. "
                f"The log is damaged. {_REPAIR}"
            )
        return end

    def holds(self, sample_id: str) -> bool:
        """Return whether a sample is in the log."""
        with self._reading():
            return self._has(sample_id)

    def published(self) -> int:
        """Return the number of samples in the log, those of other processes included."""
        with self._reading():
            self._counted_end()
            return self._count()

    # Watermark

    def committed(self) -> int:
        """Return the watermark: samples that a durable checkpoint of the trainer is behind."""
        position = self._watermark()
        if (
            isinstance(position, bool)
            or not isinstance(position, int)
            or not 0 <= position < 1 << 63
        ):
            raise ValueError(
                f"Expected a watermark of at least 0 in the log of stream {self.name}. Received: {position!r}. Bring the log back from a "
                "copy."
            )
        return position

    def commit(self, position: int) -> None:
        """Move the watermark; it never goes back.

        Args:
            position: Samples from the beginning of the log.

        Raises:
            ValueError: If the log holds fewer.
        """
        published = self.published()
        if not 0 <= position <= published:
            raise ValueError(
                f"Expected a watermark between 0 and the {published} samples in the log of stream {self.name}. Received: {position}. "
                "Resume a run with the log that it was trained on."
            )
        with self._committing():
            # Read again under the lock, so that a slower commit does not move it back.
            if position > self.committed():
                self._move_watermark(position)

    # End

    def ended(self) -> StreamEnd | None:
        """Return how the log ended, `None` while it is open."""
        with self._reading():
            return self._counted_end()

    def end(
        self, kind: str = "complete", reason: str = "", *, part: int = 0, parts: int = 1
    ) -> None:
        """End the log; one that has ended keeps its first end, which is the cause of the later ones.

        Args:
            kind: `complete`, `failed` or `stopped`. One that failed or was stopped goes on when a producer calls `reopen`.
            reason: The error, or who stopped it.
            part: Which of several producers ends, from 0. The log is complete when each of them has said so once, in whichever process; one
                that fails or stops ends it at once.
            parts: Number of producers that append to the log.

        Raises:
            ValueError: If the kind is none of them, or the producers do not agree about their number.
        """
        if kind not in _ENDS:
            raise ValueError(
                f"Expected one of {', '.join(_ENDS)} as the end of a stream. Received: {kind!r}."
            )
        with self._writing():
            ended = self._counted_end()
            _, known, done = self._state()
            if not 0 <= part < parts:
                raise ValueError(
                    f"Expected a part of stream {self.name} from 0 to {parts - 1}. Received: part={part}, parts={parts}."
                )
            if known not in (0, parts):
                raise ValueError(
                    f"Expected all producers of stream {self.name} to agree about their number. Received: parts={parts}, and {known} by "
                    "another. Start each with the same number."
                )
            records: list[Mapping[str, Any]] = []
            if kind == "complete" and part not in done:
                records.append({"end": "part", "part": part, "parts": parts})
            if ended is None and (kind != "complete" or len(done | {part}) == parts):
                records.append({"end": kind, "published": self._count(), "reason": reason})
            self._note(records)

    def reopen(self) -> None:
        """Go on after a failure or a stop, repairing what a killed producer left. One that is complete stays so."""
        with self._writing():
            end = self._counted_end()
            # Before the first line is added: whatever follows a damaged line would be lost with it.
            self._check_damage()
            if end is not None and end.kind != "complete":
                self._note([{"reopened": self._count()}])

    # Owner

    def claim(self, run: str) -> bool:
        """Take the log for one trainer, and return whether it may move the watermark and discard features.

        The claim ends with the process, the ownership with the log. A process that gets False may
        read a complete log too, but moves and frees nothing.

        Args:
            run: The lineage of the run, which alone goes on with this log while it is not complete.

        Raises:
            RuntimeError: If the log is not complete, and another trainer reads it now or it belongs to another run.
        """
        end = self.ended()
        complete = end is not None and end.kind == "complete"
        try:
            refusal = self._take(run)
        except OSError:
            if complete:  # on a file system that cannot be written, where nothing is freed either
                return False
            raise
        if refusal and not complete:
            raise RuntimeError(refusal)
        return not refusal

    def _take(self, run: str) -> str:
        """Take the log, or return why it cannot be taken."""
        owner = self._owner()
        if owner in ("", run):
            if not self._trainer.acquire():
                return (
                    f"Expected the live stream {self.name} to be read by one trainer at a time. Received: one more, in addition to "
                    f"{self._trainer.holder}. Wait until that one has ended, or begin another stream."
                )
            # Asked again: until this process had the lock, another run may have taken the log.
            if not (owner := self._owner()):
                write_atomically(self._owner_file, json.dumps({"run": run}) + "\n")
            if owner in ("", run):
                return ""
            self._trainer.release()
        return self._belongs_to(owner, run)

    def _belongs_to(self, owner: str, run: str) -> str:
        return (
            f"Expected the live stream {self.name} to be read by the run that began it, {owner}. Received: run {run}. "
            "Resume that run, wait until the stream is complete, or begin another stream."
        )

    def _owner(self) -> str:
        """Return the run that the log belongs to, empty when it belongs to none."""
        try:
            return str(parse_json(read_text(self._owner_file))["run"])
        except FileNotFoundError:
            return ""
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"Expected the run that the stream {self.name} belongs to. Received: {self._owner_file}, which names none. Bring it back "
                "from a copy, or remove it."
            ) from None

    def close(self) -> None:
        """Let go of files and connections, and of the claim; the log still belongs to the run."""
        self._trainer.release()


def standing(channel: RefChannel, side: str, *, trained: int, waited: float) -> dict[str, object]:
    """Return how far a stream is, as plain values, for `streams.json` of the run on one side of it."""
    end = channel.ended()
    return {
        "stream": channel.name,
        "side": side,
        "published": channel.published(),
        "trained": trained,
        "waited_seconds": waited,
        "end": None if end is None else end.kind,
    }

"""Updates that are made again, from the same beginning, and compared bitwise on all ranks before and after the optimizer steps.

A checked update goes through four comparisons:

1. From the end of the update before to its own beginning nothing has changed.
2. Forwards and backwards, made again with the same keys, buffers and copies of the batches, come to the same: batches, losses, gradients
   before and after they are reduced, weights, optimizer state and buffers.
3. The rest of the reduction, clipping and the step of the optimizer, made again from the same gradients and the same state, come to
   the same.
4. From there to the end of the update nothing has changed but what the update advances.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from danling.utils.protocols import ReductionDomain

from .attempts import GRADIENT, REDUCED, Attempts, attempted, mismatch, place_of, shared
from .errors import ReplayMismatchError
from .hashing import Hasher
from .held import HeldState, Named, StateCopy, differing, read_digests
from .reached import PutBack
from .witness import Seen, Window, Witness, bits_of

logger = logging.getLogger("danling")

_FIRST, _LAST = 0, REDUCED + 1
_UNTOUCHED = ("weights", "optimizer")
"""Beginnings of the names of what a forward leaves as it is, so that a difference there came first."""
_ADVANCED = ("ema", "scaler", "settings")
"""Beginnings of the names of what the end of an update advances."""
_OF_USERS = ("attribute/", "weights/", "gradients/")
"""Beginnings of the names of what is neither the model's nor its optimizer's; buffers are named alike, and looked at."""

T = TypeVar("T")
Record = Mapping[tuple[int, str], int]


@dataclass(frozen=True)
class Gradients:
    """The gradient of the open window on this rank.

    Attributes:
        held: Returns what there is of it, by name.
        remember: Remembers it, and returns what puts it back.
        unreduced: Returns the parameters by name whose gradients the last backward reduces, and which can be looked at before.
        is_reduced: Whether a backward leaves gradients that come from several ranks.
        summed: Says over which ranks.
    """

    held: Callable[[], Named]
    remember: Callable[[], PutBack]
    unreduced: Callable[[], Iterable[tuple[str, nn.Parameter]]]
    is_reduced: Callable[[], bool]
    summed: Callable[[], str]


@dataclass(frozen=True)
class ReplayedRun:
    """What is asked of the run whose updates are made again.

    Attributes:
        step: Returns the updates committed.
        model: Returns the model as it is wrapped.
        has_updated: Whether this process has made an update.
        remember: Remembers the window and what forwards count, and returns what puts it back.
        sums: Sums the window over the ranks again, given the sums that were made; returns them with the requests of both.
        forget_decision: Lets the decision on the open update be made again.
        compilations: Returns how often something was compiled in this process.
        own_step: Whether `step` is the user's own, who may change gradients and weights in it.
        watch: Looks at what the run holds, and returns what names that which has changed since.
        writes_at_end: Whether code of the user's is called at the end of an update, such as a schedule, which may write to what is theirs.
    """

    step: Callable[[], int]
    model: Callable[[], object]
    has_updated: Callable[[], bool]
    remember: Callable[[], PutBack]
    sums: Callable[[Any], Any]
    forget_decision: Callable[[], None]
    compilations: Callable[[], int]
    own_step: bool
    watch: Callable[[], Callable[[], list[str]]]
    writes_at_end: Callable[[], bool]


@dataclass(frozen=True)
class _Standing:
    """Where a run stands: what it holds, and what puts its random streams back."""

    state: StateCopy
    streams: PutBack


Digests = Mapping[str, int]


@dataclass(frozen=True)
class _Ready:
    """An update that is ready to be applied.

    Attributes:
        standing: Where the run stands.
        gradients: Puts the gradient of the window back.
        window: Puts its sums back.
        record: What the window and its gradient are.
    """

    standing: _Standing
    gradients: PutBack
    window: PutBack
    record: Record


class UpdateReplay:
    """Makes every so many updates again and compares. Every method is called on all ranks.

    The first update of a process, and that of a model that was wrapped anew, is not checked: code is compiled in it, and gradients are put
    into the order in which they are reduced from then on. Nor is one in which something is compiled. The next one is checked instead.

    Args:
        every: Updates between checked ones.
        replays: How often an update is made again.
        heal: Whether an update that came to different bits is made until most attempts agree, instead of ending the run.
        run: The run.
        held: What it holds.
        gradients: The gradient of the window.
        window: The window.
        streams: Remembers the random streams, and returns what puts them back.
        domain: Ranks that make updates together.
        device: Where losses live.

    Attributes:
        witness: Sees the micro-batches.
    """

    def __init__(
        self,
        *,
        every: int,
        replays: int,
        heal: bool,
        run: ReplayedRun,
        held: HeldState,
        gradients: Gradients,
        window: Window,
        streams: Callable[[], PutBack],
        domain: ReductionDomain,
        device: torch.device,
    ) -> None:
        self.every = every
        self.replays = replays
        self.heal = heal
        self.witness = Witness(window, unreduced=gradients.unreduced, device=device)
        self._run = run
        self._held = held
        self._gradients = gradients
        self._window = window
        self._streams = streams
        self._domain = domain
        self._device = device
        self._hasher = Hasher(device)
        self._known_model: object = None
        self._is_between = True
        self._is_owed = False
        self._state: Digests = {}
        self._reduced: Seen = {}
        self._caught: Exception | None = None
        self._left: ReplayMismatchError | None = None
        self._armed: _Standing | None = None
        self._take_back: PutBack | None = None
        self._ready: _Ready | None = None
        self._stepped: _Standing | None = None

    # Between updates

    def begin(self) -> None:
        """Begin a training or a pass: what has changed since the last update is not looked at."""
        self._armed = self._ready = self._stepped = self._take_back = None
        self._is_between = True
        self.witness.close()

    def after(self) -> None:
        """Look at the state where the next update is checked; called after an update, when the step of the user's has returned."""
        self._is_between = True
        self._ready = self._take_back = None
        if self._left is None:
            self.arm()

    def arm(self) -> None:
        """Look at the state where the next update is checked, unless that was done; called before a batch is read.

        Raises:
            ReplayMismatchError: If the end of the last update has changed what its step had come to.
        """
        self._raise_left()
        if self._is_between and self._armed is None and self._is_due(self._run.step() + 1):
            self._armed = self._stand(self._stepped)
        self._stepped = None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Look whether reading a batch of an update that is checked writes to what is put back.

        Raises:
            ValueError: If it does.
        """
        if not self._is_due(self._run.step() + 1):
            yield
            return
        changed = self._run.watch()
        yield
        names = changed()
        if names:
            raise ValueError(
                "Expected data sets that write to nothing that the runner holds with audit.replay_interval: an update that is made again "
                f"does not read its batches again, and puts back what the runner holds. Received: {names[0]!r} of the runner, which has "
                "changed while a batch was read. Keep it in the data set, or leave the key out."
            )

    def settle(self) -> None:
        """Compare the state with what it was after the last update, where it was looked at. Called before it may be changed.

        Raises:
            ReplayMismatchError: If it has changed.
        """
        self._raise_left()
        armed, self._armed = self._armed, None
        if armed is not None:
            self._settled(armed)

    def _settled(self, armed: _Standing) -> Digests:
        return self._check_unchanged(armed, f"what the run holds after update {self._run.step()}")

    def _is_due(self, step: int) -> bool:
        return self._is_owed or step % self.every == 0

    def _stand(self, known: _Standing | None = None, now: Digests | None = None) -> _Standing:
        return _Standing(self._held.copy(None if known is None else known.state, now), self._streams())

    def _put_back(self, standing: _Standing, *, tensors_alone: bool = False, trusting: bool = False) -> None:
        lost = self._held.put_back(standing.state, tensors_alone=tensors_alone, trusting=trusting)
        if not tensors_alone:
            standing.streams()
        if any(shared(len(lost), self._domain, self._device)):
            told = self._domain.gather_objects((lost, place_of(self._device)))
            where = [f"rank {rank} on {place}: {names[0]}" for rank, (names, place) in enumerate(told) if names]
            raise ReplayMismatchError(
                f"Expected a copy of what the run holds to stay what it is. Received: another one, on {', '.join(where)}. Nothing of this "
                "state is saved. Check the memory of that machine, and go on with auto_resume from the last checkpoint.",
                is_taken_back=False,
            )

    def _check_unchanged(self, standing: _Standing, what: str, *, leave_out: tuple[str, ...] = ()) -> Digests:
        """Compare what is held with what it was; where it has changed, put it back, and raise unless it is to be healed.

        Returns:
            The digests of what is held then.
        """
        now = self._held.read(standing.state)
        changed = [name for name in self._held.changed(standing.state, now) if not name.startswith(leave_out)]
        if any(shared(len(changed), self._domain, self._device)):
            told = self._domain.gather_objects((changed, place_of(self._device)))
            # Settings may have been changed since, such as the learning rate.
            self._put_back(standing, tensors_alone=True)
            where = [
                f"rank {rank} on {place}: {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
                for rank, (names, place) in enumerate(told)
                if names
            ]
            self._end_or_go_on(
                f"Expected {what} to stay what it was until it is used. Received: other bits on {'; '.join(where)}. Where nothing of yours "
                "writes to it, the memory of that device or a link is to be suspected: take the machine out and go on with auto_resume; "
                "audit.heal=true puts it back and goes on."
            )
            return self._held.read(standing.state)
        return now

    def _end_or_go_on(self, text: str) -> None:
        if not self.heal:
            raise ReplayMismatchError(text)
        if self._domain.rank == 0:
            logger.warning("%s Healed: the run goes on with the bits that it should have.", text)

    # Forwards and backwards

    def forwards(
        self, make: Callable[[Iterator[Any], list[Any]], bool], batches: Iterator[Any], consumed: list[Any]
    ) -> bool:
        """Make the forwards and backwards of an update, and of one that is checked again; see `WindowForwards.run`.

        Args:
            make: Makes them with batches, of which it fills a list.
            batches: What is left of the pass on this rank.
            consumed: Is filled with the micro-batches.

        Raises:
            ReplayMismatchError: If they did not come to the same; everything is as it was before the update.
        """
        self._ready = self._take_back = None
        self._is_between = False
        is_new = self._run.model() is not self._known_model
        self._known_model = self._run.model()
        if not self._is_due(self._run.step() + 1):
            return make(batches, consumed)
        if is_new or not self._run.has_updated():
            self._is_owed, self._armed = True, None
            return make(batches, consumed)
        self._raise_left()
        armed, self._armed = self._armed, None
        standing = self._stand(armed, None if armed is None else self._settled(armed))
        return self._checked(make, batches, consumed, standing)

    def _checked(
        self,
        make: Callable[[Iterator[Any], list[Any]], bool],
        batches: Iterator[Any],
        consumed: list[Any],
        standing: _Standing,
    ) -> bool:
        counted, gradients = self._run.remember(), self._gradients.remember()

        def take_back() -> None:
            counted()
            gradients()
            self._put_back(standing)

        fits = True
        filled = consumed

        def attempt(given: Iterator[Any]) -> None:
            nonlocal fits
            fits = make(given, filled) and fits

        def again() -> Record:
            nonlocal filled
            take_back()
            self.witness.open_again()
            filled = []
            # One that failed half-way has not read all of its batches.
            return self._record(lambda: attempt(chain(self.witness.copies(), self.witness.keeping(batches))), seen)

        def seen() -> Seen:
            return {**self.witness.seen(), **self._of_gradients(), **self._of_state(standing)}

        self.witness.open()
        compiled = self._run.compilations()
        try:
            first = self._record(lambda: attempt(self.witness.keeping(batches)), seen)
            if any(shared(self._run.compilations() - compiled, self._domain, self._device)) and fits:
                self._raise_caught()
                self._is_owed = True
                return True
            found = self._attempted(first, again) if fits else None
        finally:
            self.witness.close()
        if found is None or not fits:
            take_back()
            return False
        self._accept(found, f"forward and backward of update {self._run.step() + 1}", take_back)
        consumed[:] = filled
        self._is_owed = False
        self._take_back = take_back
        if not self._run.own_step:
            # Nothing has come between the last attempt and this.
            self._ready = self._made_ready(self._stand(standing, self._state))
        return True

    def _record(self, make: Callable[[], None], seen: Callable[[], Seen]) -> Record:
        """Make something and return what it has come to: also where it fails, on one rank, which keeps no other waiting."""
        self._caught = None
        try:
            make()
        except Exception as error:
            if self._domain.size > 1:
                raise
            self._caught = error
            return {(_FIRST, f"an error, {type(error).__name__}: {error}"): 1}
        return self._read(seen())

    def _raise_caught(self) -> None:
        caught, self._caught = self._caught, None
        if caught is not None:
            raise caught

    def _attempted(self, first: Record, again: Callable[[], Record]) -> Attempts:
        return attempted(first, again, domain=self._domain, device=self._device, replays=self.replays)

    def _accept(self, found: Attempts, what: str, take_back: PutBack) -> None:
        """Raise where attempts differ, or, where that is healed, go on with the last one, which most of them agree with."""
        if found.agree:
            # Of all attempts.
            self._raise_caught()
            return
        text = mismatch(found, what, domain=self._domain, device=self._device, summed=self._gradients.summed())
        if not (self.heal and found.last_is_usual):
            take_back()
            raise ReplayMismatchError(f"{text} No weight was changed by this update.")
        self._end_or_go_on(text)
        self._raise_caught()

    def _made_ready(self, standing: _Standing) -> _Ready:
        window = self._window
        sums = {name: getattr(window, name) for name in ("loss", "weight", "samples", "nonfinite")}
        kept = {name: value.clone() if isinstance(value, Tensor) else value for name, value in sums.items()}

        def put_back() -> None:
            for name, value in kept.items():
                setattr(window, name, value)

        record = self._record_ready(standing, gradients=self._reduced, state=self._state)
        return _Ready(standing, self._gradients.remember(), put_back, record)

    # What is compared

    def _record_ready(
        self, standing: _Standing, *, gradients: Seen | None = None, state: Digests | None = None
    ) -> Record:
        window = self._window
        values = {"loss": window.loss, "weight": window.weight, "samples": window.samples}
        seen: Seen = {(_FIRST, f"the {name} of the window"): bits_of(value) for name, value in values.items()}
        gradients = self._of_gradients() if gradients is None else gradients
        held = self._of_state(standing) if state is None else _staged(state)
        return self._read({**seen, **gradients, **held})

    def _of_gradients(self) -> Seen:
        is_reduced = self._gradients.is_reduced()
        stage, word = (REDUCED, "reduced gradient") if is_reduced else (GRADIENT, "gradient")
        self._reduced = {
            (stage, f"the {word} of {name!r}"): self._hasher.digest_held(gradient)
            for name, gradient in self._gradients.held()
        }
        return self._reduced

    def _of_state(self, known: _Standing) -> Seen:
        self._state = self._held.read(known.state)
        return _staged(self._state)

    def _read(self, seen: Seen) -> Record:
        tensors = {key: value for key, value in seen.items() if isinstance(value, Tensor)}
        return {**{key: value for key, value in seen.items() if isinstance(value, int)}, **read_digests(tensors)}

    # The step

    def judged(self, judge: Callable[[Any], T], totals: Any) -> T:
        """Decide and apply an update, and one that is checked again.

        Args:
            judge: Finishes the reduction, decides, and applies the update; returns the result.
            totals: What the ranks have agreed on for the window.

        Raises:
            ReplayMismatchError: If it did not come to the same; everything is as it was before the update.
        """
        take_back, ready = self._take_back, self._ready
        self._take_back = self._ready = None
        if take_back is None:
            return judge(totals)
        if ready is None:
            standing = self._stand()
            self._state = standing.state.digests
            self._of_gradients()
            ready = self._made_ready(standing)
        else:
            self._check_ready(ready, take_back)
        totals = self._checked_sums(totals, take_back)
        compiled = self._run.compilations()
        stands_at: _Ready = ready
        result: T | None = None

        def attempt() -> None:
            nonlocal result
            result = judge(totals)

        def seen() -> Seen:
            return {**_of_result(result), **self._of_gradients(), **self._of_state(stands_at.standing)}

        made = 0

        def again() -> Record:
            nonlocal made
            # If the copy has changed, this attempt comes to something else, and the next one looks.
            self._put_back(stands_at.standing, trusting=made == 0)
            made += 1
            stands_at.gradients()
            self._run.forget_decision()
            return self._record(attempt, seen)

        first = self._record(attempt, seen)
        if any(shared(self._run.compilations() - compiled, self._domain, self._device)):
            self._raise_caught()
        else:
            self._accept(self._attempted(first, again), f"the step of update {self._run.step() + 1}", take_back)
            self._stepped = self._stand(ready.standing, self._state)
        return cast(T, result)

    def _check_ready(self, ready: _Ready, take_back: PutBack) -> None:
        """Compare window, gradient and state with what they were when the last backward had come to its end."""
        changed = [name for _, name in differing(ready.record, self._record_ready(ready.standing))]
        if any(shared(len(changed), self._domain, self._device)):
            told = self._domain.gather_objects((changed, place_of(self._device)))
            where = [f"rank {rank} on {place}: {names[0]}" for rank, (names, place) in enumerate(told) if names]
            text = (
                f"Expected the gradient of update {self._run.step() + 1} to stay what it was until it is applied. Received: other bits on "
                f"{'; '.join(where)}. The memory of that device or a link is to be suspected: take the machine out and go on with "
                "auto_resume; audit.heal=true puts it back and goes on."
            )
            if not self.heal:
                take_back()
            else:
                self._put_back(ready.standing)
                ready.gradients()
                ready.window()
            self._end_or_go_on(text)

    def _checked_sums(self, totals: Any, take_back: PutBack) -> Any:
        """Return what the window comes to over all ranks, summed again."""

        def record() -> Record:
            values = {"loss": totals.loss, "weight": totals.weight, "samples": totals.samples}
            return self._read(
                {(_FIRST, f"the {name} over all ranks"): bits_of(value) for name, value in values.items()}
            )

        def again() -> Record:
            nonlocal totals
            totals = self._run.sums(totals)
            return record()

        found = self._attempted(record(), again)
        self._accept(found, f"the sums of update {self._run.step() + 1}", take_back)
        return totals

    def updated(self) -> None:
        """Compare what an update has left with what its step came to, and put that back; called at its end.

        An error is raised when the position in the data has moved with the update: before the next batch is read, or a save.
        """
        if self._stepped is None:
            return
        what = f"what the step of update {self._run.step()} has left"
        leave_out = (*_ADVANCED, *_OF_USERS) if self._run.writes_at_end() else _ADVANCED
        try:
            self._check_unchanged(self._stepped, what, leave_out=leave_out)
        except ReplayMismatchError as error:
            if not error.is_taken_back:
                raise
            self._left = error

    def _raise_left(self) -> None:
        left, self._left = self._left, None
        if left is not None:
            raise left


def _staged(digests: Digests) -> Seen:
    return {(_FIRST if name.startswith(_UNTOUCHED) else _LAST, name): digest for name, digest in digests.items()}


def _of_result(result: Any) -> Seen:
    return {} if result is None else {(_FIRST, f"the {name}"): value for name, value in result.digests().items()}

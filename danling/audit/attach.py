"""Attaches audits to a runner: digests of updates, recorded gradients, updates that are computed again, and the end that an audit sets."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from danling.config.inputs import end_after
from danling.data import Batch, BatchSource
from danling.training.extension import Extension
from danling.training.recompute import Recompute
from danling.training.session import IntactStateError, TrainingSession
from danling.training.update import RunWindow, UpdateStep
from danling.utils.observers import Observer

from .digests import UpdateAudit
from .hashing import Hasher
from .layout_check import CheckOptions, LayoutReport, check_this_program
from .layout_record import LayoutRecorder, divide_for_check
from .quick import QuickRun
from .rerun import audit_runner

if TYPE_CHECKING:
    from contextlib import ExitStack

    from danling.runners.torch_runner import TorchRunner
    from danling.training import UpdateOutcome

__all__ = ["Audits", "ReplayMismatchError", "audit_runner", "check_layout", "divide_for_check"]


def check_layout(runner: TorchRunner, layout: str, **options: Any) -> LayoutReport:
    """Check a layout; see `TorchRunner.check_layout`. In a program that records its updates, train and end."""
    if runner.config.audit.gradients.dir is not None:
        runner.train()
        raise SystemExit(0)  # with fewer updates than are wanted
    return check_this_program(layout, CheckOptions(**options), runner.world)


class Audits:
    """Makes what `config.audit` asks for, and puts it into what makes updates."""

    def __init__(
        self,
        runner: TorchRunner,
        session: TrainingSession,
        recompute: Recompute,
        closers: ExitStack,
        extensions: list[Extension],
    ) -> None:
        self.runner = runner
        self._session = session
        self._recompute = recompute
        self._closers = closers
        self._extensions = extensions
        self._section = section = runner.config.audit
        self.recorder = None if section.gradients.dir is None else LayoutRecorder(runner)
        if section.replay_interval is None:
            return
        if (
            not torch.are_deterministic_algorithms_enabled()
            or torch.is_deterministic_algorithms_warn_only_enabled()
        ):
            raise ValueError(
                "Expected deterministic=true with audit.replay_interval: other kernels may give other bits each time, which would look "
                "like a fault. Received: deterministic=False. Set it."
            )
        if runner.config.ft.enabled or runner.stack == "deepspeed":
            received = "ft.enabled=True" if runner.config.ft.enabled else "stack='deepspeed'"
            raise ValueError(
                "Expected gradients that are reduced within one group of ranks and can be dropped and computed again, with "
                f"audit.replay_interval. Received: {received}. Leave one of them out."
            )

    @cached_property
    def digests(self) -> UpdateAudit | None:
        """What digests updates and compares replicas; `None` unless that is configured."""
        every = self._section.digest_interval
        return None if every is None else UpdateAudit(self.runner, every, self._closers)

    def observe(self) -> None:
        """Add what observes the run. Called once, before it trains."""
        until = (
            None
            if self._section.until is None
            else Until(self.runner, self._session, self._section.until)
        )
        self.runner.observers.extend(
            each for each in (self.recorder, self.digests, until) if each is not None
        )
        # It watches the training, and also ends passes: so it is an observer and an extension.
        if self._section.quick is not None:
            quick = QuickRun(self.runner, self._session, self._section.quick)
            self.runner.observers.append(quick)
            self._extensions.append(quick)

    def attach_to(self, update: UpdateStep) -> None:
        """Let the recorder change batches, and digests travel with the collective of each update."""
        if self.recorder is not None:
            update.batch_changes.append(self.recorder.prepare_batch)
        if self.digests is not None:
            update.sync.extra_reductions.append(self.digests)

    def around(self, run_window: RunWindow) -> RunWindow:
        """Return what runs the micro-batches of an update, and runs them again where that is asked for."""
        return (
            run_window
            if self._section.replay_interval is None
            else UpdateReplay(self.runner, self._recompute, run_window).run
        )


class ReplayMismatchError(IntactStateError):
    """An update that was made again did not come out bitwise the same: a chip, a link, or a program that is not repeatable.

    The update is taken back before it is raised, to the bit.
    """


class UpdateReplay:
    """Runs the micro-batches of every so many updates again and compares what they came to.

    Random numbers follow from the place of a micro-batch, so that a computation that is repeated has the same bits: losses, weights of
    the batches, buffers, and the gradient of the window as this rank has it. The first update of a process, or of a model that was wrapped
    anew, is not checked, since code is compiled in it; the next one is.
    """

    def __init__(self, runner: TorchRunner, recompute: Recompute, inner: RunWindow) -> None:
        self._runner = runner
        self._recompute = recompute
        self._inner = inner
        self._hasher = Hasher(runner.device)
        self._known_model: object = None
        self._is_owed = False

    def run(self, source: BatchSource, batches: Iterator[Batch], consumed: list[Batch]) -> bool:
        """Run forward and backward of one update, and again where it is checked. Called on all ranks."""
        runner, settings = self._runner, self._runner.config.audit
        is_new = runner.model is not self._known_model or runner.window.is_first
        self._known_model = runner.model
        # A check that falls on an update which is not checked is made up for at the next one.
        is_due = (
            self._is_owed
            or (runner.state.train.global_step + 1) % int(settings.replay_interval or 1) == 0
        )
        self._is_owed = is_due and is_new
        if not is_due or is_new:
            return self._inner(source, batches, consumed)
        take_back = self._recompute.remember()
        # The pass has ended without another update.
        if not self._inner(source, batches, consumed):
            return False
        first = self._digests()
        domain = runner.placement.optimizer
        for _ in range(settings.replays):
            second = self._again(take_back, source, consumed)
            differs = torch.tensor(float(first != second), dtype=torch.float64)
            if domain.all_reduce(differs, "max").item():
                # Where it agrees with one of the two, the other one was a fault that comes and goes.
                third = self._again(take_back, source, consumed)
                take_back()
                raise self._error(first, second, third)
        return True

    def _again(
        self, take_back: Callable[[], None], source: BatchSource, consumed: list[Batch]
    ) -> dict[str, int]:
        take_back()
        self._inner(source, iter(consumed), [])
        return self._digests()

    def _digests(self) -> dict[str, int]:
        """Return the digest of everything that forwards and backwards have left on this rank. The device is waited for once."""
        runner, window = self._runner, self._runner.window
        named = {
            f"{kind} of micro-batches": torch.as_tensor(value, dtype=torch.float64)
            for kind, value in (("the losses", window.loss), ("the weights", window.weight))
        }
        named |= {
            f"buffer {name!r}": buffer for name, buffer in runner.unwrapped_model.named_buffers()
        }
        named |= {
            f"the gradient of {name!r}": gradient
            for name, gradient in runner.reduction.named_gradients()
        }
        digests = [self._hasher.digest_held(tensor).to(runner.device) for tensor in named.values()]
        return dict(zip(named, torch.stack(digests).tolist()))

    def _error(
        self, first: dict[str, int], second: dict[str, int], third: dict[str, int]
    ) -> ReplayMismatchError:
        """Return the error that names the ranks and the first tensors. Called on all ranks."""
        names = [name for name in first if second.get(name) != first[name]]
        answers = self._runner.placement.optimizer.gather_objects(
            (names, third in (first, second), socket.gethostname())
        )
        # A gradient that is reduced over ranks differs on all of them; a loss only where the fault is.
        own = [
            rank
            for rank, (found, *_) in enumerate(answers)
            if any("gradient" not in name for name in found)
        ]
        ranks = own or [rank for rank, (found, *_) in enumerate(answers) if found]
        where = "; ".join(
            f"rank {rank} on {self._runner.device.type} of {answers[rank][2]}: {' and '.join(answers[rank][0][:3])}"
            for rank in ranks[:8]
        )
        if not own and len(ranks) > 1:
            where += ". The gradient is reduced over these ranks: one of them is at fault"
        fix = (
            "A third computation gave other bits again: a step depends on something that is not restored, such as a variable "
            "of a module or the time, or a kernel is not deterministic."
        )
        if all(repeats for _, repeats, _ in answers):
            fix = (
                "A third computation agrees with one of the two. Suspect the memory or the chip of that machine: take it out and continue "
                "with auto_resume from the state before this update, which is saved."
            )
        return ReplayMismatchError(
            f"Expected forward and backward of update {self._runner.state.train.global_step + 1} to give the same bits when they are "
            f"computed again. Received: {where}. {fix}"
        )


class Until(Observer):
    """Has a run save at the position of `audit.until`, and end there: updates and completed epochs of the checkpoint to compare with."""

    critical = True

    def __init__(
        self, runner: TorchRunner, session: TrainingSession, target: Sequence[int]
    ) -> None:
        self.target = tuple(target)
        self._runner = runner
        self._session = session
        runner.saver.saved.append(self._saved)

    def update_ended(self, outcome: UpdateOutcome) -> None:
        """Have the run save after the last update, and end where it has come beyond it. Called on all ranks."""
        step = self._runner.saver.at[0]
        session = self._session
        # The epoch of the target may be complete after this update only.
        if step == self.target[0]:
            # At once, and not as a request, of which an accelerator hears an update later.
            session.save_requested = True
        elif step > self.target[0]:
            session.stop_reason = "stop"

    def _saved(self) -> None:
        # The same update may be saved before and after the end of its epoch.
        if self._runner.saver.at == self.target:
            self._session.stop_reason = "stop"
            end_after()

"""Computes the gradient of every so many updates again, and compares the bits on all ranks, before the update is applied."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from danling.data import Batch, BatchSource

from .errors import ReplayMismatchError
from .hashing import Hasher

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner
    from danling.training.recompute import Recompute, RunWindow


class UpdateReplay:
    """Runs the micro-batches of every so many updates again and compares what they came to.

    Random numbers follow from the place of a micro-batch, so that a computation that is repeated has the same bits: losses, weights of
    the batches, buffers, and the gradient of the window as this rank has it. The first update of a process, or of a model that was wrapped
    anew, is not checked, since code is compiled in it; the next one is.
    """

    def __init__(self, runner: TorchRunner, inner: RunWindow, recompute: Recompute) -> None:
        self._runner = runner
        self._inner = inner
        self._recompute = recompute
        self._hasher = Hasher(runner.device)
        self._known_model: object = None
        self._is_owed = False

    def run(self, source: BatchSource, batches: Iterator[Batch], consumed: list[Batch]) -> bool:
        """Run forward and backward of one update, and again where it is checked. Called on all ranks."""
        runner, settings = self._runner, self._runner.config.audit
        is_new = runner.model is not self._known_model or runner.window.is_first
        self._known_model = runner.model
        is_due = self._is_owed or (runner.state.train.global_step + 1) % int(settings.replay_interval or 1) == 0
        self._is_owed = is_due and is_new
        if not is_due or is_new:
            return self._inner(source, batches, consumed)
        take_back = self._recompute.remember()
        if not self._inner(source, batches, consumed):
            return False
        attempts = [self._digests()]
        for _ in range(settings.replays):
            attempts.append(self._again(take_back, source, consumed))
            if self._differ(attempts[0], attempts[-1]):
                attempts.append(self._again(take_back, source, consumed))
                take_back()
                raise self._error(attempts[0], attempts[-2], attempts[-1])
        return True

    def _again(self, take_back: object, source: BatchSource, consumed: list[Batch]) -> dict[str, int]:
        assert callable(take_back)
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
        named |= {f"buffer {name!r}": buffer for name, buffer in runner.unwrapped_model.named_buffers()}
        named |= {f"the gradient of {name!r}": gradient for name, gradient in runner.reduction.named_gradients()}
        digests = [self._hasher.digest_held(tensor).to(runner.device) for tensor in named.values()]
        return dict(zip(named, torch.stack(digests).tolist()))

    def _differ(self, first: dict[str, int], second: dict[str, int]) -> bool:
        """Whether any rank has come to other bits. A small collective on several ranks."""
        domain = self._runner.placement.optimizer
        differs = torch.tensor(float(first != second), dtype=torch.float64)
        return bool(domain.all_reduce(differs, "max").item() if domain.size > 1 else differs.item())

    def _error(self, first: dict[str, int], second: dict[str, int], third: dict[str, int]) -> ReplayMismatchError:
        """Return the error that names the ranks and the first tensor. Called on all ranks."""
        device = self._runner.device
        names = [name for name in first if second.get(name) != first[name]]
        told = self._runner.placement.optimizer.gather_objects((names, third in (first, second), socket.gethostname()))
        # A gradient that is reduced over ranks differs on all of them; a loss only where the fault is.
        own = [rank for rank, (found, _, _) in enumerate(told) if any("gradient" not in name for name in found)]
        ranks = own or [rank for rank, (found, _, _) in enumerate(told) if found]
        where = "; ".join(
            f"rank {rank} on {device.type} of {told[rank][2]}: {told[rank][0][0]}"
            + (f" and {len(told[rank][0]) - 1} more" if len(told[rank][0]) > 1 else "")
            for rank in ranks[:8]
        )
        reduced = (
            "" if own or len(ranks) == 1 else " The gradient is reduced over these ranks: one of them is at fault."
        )
        repeats = all(repeats for _, repeats, _ in told)
        mend = (
            "A third computation agrees with one of the two. Suspect the memory or the chip of that machine: take it out and continue with "
            "auto_resume from the state before this update, which is saved."
            if repeats
            else "A third computation came to other bits again: a step depends on something that is not put back, such as a variable "
            "of a module or the time, or a kernel is not deterministic."
        )
        return ReplayMismatchError(
            f"Expected forward and backward of update {self._runner.state.train.global_step + 1} to come to the same bits when they are "
            f"computed again. Received: {where}.{reduced} {mend}"
        )


def check_replay(runner: TorchRunner) -> None:
    """Refuse `audit.replay_interval` where a difference would say nothing of the machine, or gradients cannot be taken back."""
    if runner.config.audit.replay_interval is None:
        return
    if not torch.are_deterministic_algorithms_enabled() or torch.is_deterministic_algorithms_warn_only_enabled():
        raise ValueError(
            "Expected deterministic=true with audit.replay_interval: other kernels may come to other bits each time, which would look like "
            "a fault. Received: deterministic=False. Set it."
        )
    refused = {"ft.enabled=True": runner.config.ft.enabled, "stack='deepspeed'": runner.stack == "deepspeed"}
    for received in (name for name, is_set in refused.items() if is_set):
        raise ValueError(
            "Expected gradients that are reduced within one group of ranks and can be dropped and computed again, with "
            f"audit.replay_interval. Received: {received}. Leave one of them out."
        )

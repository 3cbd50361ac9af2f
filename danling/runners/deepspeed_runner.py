"""Training on a DeepSpeed engine: ZeRO and offload under the loops, decisions and checkpoint names of the training core."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from danling.data import Batch
from danling.deepspeed import engine as engines
from danling.distributed import Verdict
from danling.training import GradientWatch, NonFiniteError, UpdateOutcome, scale_gradients

from .deepspeed_state import DeepSpeedState


class _Holders:
    """What a gradient scaler asks of an optimizer, around the shares of a gradient."""

    def __init__(self, holders: list[Tensor]) -> None:
        self.param_groups = [{"params": holders}]


class DeepSpeedRunner(DeepSpeedState):
    """Trains on a DeepSpeed engine, with ZeRO 0 to 3 and offload as `config.deepspeed` says.

    The engine's configuration is derived from the runner's own keys and `config.deepspeed` is merged over it; a contradiction is an error
    that names both keys. The optimizer is the one set in `__init__`, that of `config.optim`, or that of `config.deepspeed.optimizer`;
    `self.optimizer` is the optimizer inside the engine, whose learning rates a scheduler moves. The scheduler may be DeepSpeed's too.

    Weighing, finiteness, clipping and skipping are those of `TorchRunner`: the engine averages gradients, divides them over the ranks and
    steps. `self.model` is the engine after construction, `self.unwrapped_model` the bare model.

    Under ZeRO 3 the weights are divided over the ranks: every forward is a collective, in evaluation too, where a rank that is out of
    batches takes part with a batch that does not count. Outside, `with runner.whole_weights():` makes them whole; enter it on all ranks.

    Raises:
        ImportError: If DeepSpeed is not installed: `pip install 'danling[deepspeed]'`.
    """

    # Update

    def _micro_step(self, batch: Batch, train_step: Callable[[Any], Any] | None = None) -> None:
        if self.engine is not None and self.window.count == 0:
            self.equalize_buffers()
        if not self._looked and self._watch is None:
            self._watch = GradientWatch(self.named_parameters())
        super()._micro_step(batch, train_step)

    def backward(self, loss: Tensor) -> None:
        """Back-propagate the loss of the open micro-batch with its weight through the engine. Called on all ranks."""
        self.engine.set_gradient_accumulation_boundary(self.reduces_gradients)
        scaled = self.window.scale(loss)
        if self.precision.scaler is not None:
            scaled = self.precision.scaler.scale(scaled)
        # The weight stands for the engine's own division by the number of micro-batches.
        self.engine.backward(scaled, scale_wrt_gas=False)

    @property
    def gradient_mean_over(self) -> int:
        """Number of ranks over which the engine takes the mean of the gradients."""
        return self.data_domain.size

    def unscale_gradients(self, verdict: Verdict) -> list[Tensor]:
        """Divide the gradient by the global weight of the window, and by the scale of float16.

        Returns:
            This rank's share of it.

        Called on all ranks.
        """
        if not engines.is_divided(self.engine):
            return super().unscale_gradients(verdict)
        gradients = engines.gradient_shares(self.engine)
        if self.precision.scaler is not None:
            self._unscale_shares(gradients)
        scale_gradients(gradients, self.window.gradient_factor(verdict.weight, self.gradient_mean_over))
        return gradients

    def _unscale_shares(self, gradients: list[Tensor]) -> None:
        # The scaler looks for infinities where it unscales: here in one share, so all ranks are shown what any of them has. In a gradient
        # of its own, since nothing clears the padding at the end of a share again.
        finite = math.isfinite(float(self.gradient_norm(gradients)))
        flag = torch.full((1,), 0.0 if finite else torch.inf, device=self.device)
        shown = [*gradients, flag]
        holders = [torch.empty_like(gradient) for gradient in shown]
        for holder, gradient in zip(holders, shown):
            holder.grad = gradient
        assert self.precision.scaler is not None
        self.precision.scaler.unscale_(_Holders(holders))  # type: ignore[arg-type]

    def gradient_norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the 2-norm of the whole gradient, 0-dim; the same on all ranks."""
        if not engines.is_divided(self.engine):
            return super().gradient_norm(gradients)
        self._shares = gradients
        local = nn.utils.get_total_norm(gradients).to(self.device) if gradients else torch.zeros((), device=self.device)
        squared = self.data_domain.all_reduce(local.double().square())
        return squared.sqrt().to(torch.float32)

    def clip_gradients(self, grad_norm: Tensor) -> None:
        """Clip by `max_grad_norm`, then by `max_grad_value`. Called on all ranks."""
        shares = (
            self._shares if engines.is_divided(self.engine) else [p.grad for p in self.parameters if p.grad is not None]
        )
        if self._max_norm is not None:
            scale_gradients(shares, torch.clamp(self._max_norm / (grad_norm + 1e-6), max=1.0))
        if self.config.max_grad_value is not None and shares:
            torch._foreach_clamp_min_(shares, -self.config.max_grad_value)
            torch._foreach_clamp_max_(shares, self.config.max_grad_value)

    def optimizer_step(self) -> None:
        """Apply a committed update to the weights of all ranks. Called on all ranks.

        Raises:
            NonFiniteError: If the engine refuses the update.
        """
        self.engine.step()
        if not self.engine.was_step_applied():
            raise NonFiniteError(
                f"Expected DeepSpeed to apply update {self.state.train.global_step + 1}. Received: it found the gradient not finite in "
                "float32. Lower the learning rate, or set max_grad_norm."
            )

    def zero_gradients(self) -> None:
        """Drop the gradient of the window, whether it was applied or not. Called on all ranks."""
        self._shares = []
        engines.discard_gradients(self.engine)

    def nonfinite_gradients(self) -> list[str]:
        """Return the names of the first parameters whose gradient is not finite. Call on all ranks."""
        if not engines.is_divided(self.engine):
            return super().nonfinite_gradients()
        found = []
        for name, parameter in self.named_parameters():
            gradient = engines.full_gradient(parameter) if parameter.requires_grad else None
            if gradient is not None and not bool(torch.isfinite(gradient).all()):
                found.append(name)
        return found[:5]

    def _conclude(self, outcome: UpdateOutcome) -> None:
        if self.ema is None:
            super()._conclude(outcome)
            return
        with self.whole_weights():
            super()._conclude(outcome)

    # Evaluation

    def equalize_buffers(self) -> None:
        if self.data_domain.size > 1:
            for buffer in (*self.unwrapped_model.buffers(), *self._criterion_tensors("buffers")):
                self.world.broadcast(buffer)

    def _pass_over(self, split: str) -> Iterator[Batch]:
        if not (self.divides_weights and self.distributed):
            yield from super()._pass_over(split)
            return
        yield from self._in_step(super()._pass_over(split))

    def _in_step(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield as many batches on every rank: one that is out of its own goes on with one that does not count."""
        filler: Any = None
        first = True
        while True:
            batch = next(batches, None)
            have = self.data_domain.gather_objects(batch is not None)
            if not any(have):
                return
            filler = batch.data if batch is not None else filler
            if first and not all(have):
                shared = self.data_domain.broadcast_object(filler, source=have.index(True))
                filler = shared if batch is None else filler
            first = False
            yield batch if batch is not None else Batch(filler, 0, None)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Put the averaged weights into the model, and the trained ones back on exit. Enter on all ranks."""
        applied = self.ema.applied()
        with engines.gathered(self.engine, modify=True):
            applied.__enter__()
        try:
            yield
        finally:
            with engines.gathered(self.engine, modify=True):
                applied.__exit__(None, None, None)

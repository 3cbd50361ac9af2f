"""The gradient inside a DeepSpeed engine: averaged by it, and divided over the ranks under ZeRO."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from danling.training.outcome import NonFiniteError
from danling.training.reduction import GradientReduction, scale_gradients
from danling.utils.messages import listed

from . import engine as engines

if TYPE_CHECKING:
    from danling.runners.deepspeed_runner import DeepSpeedRunner

logger = logging.getLogger("danling")


class EngineReduction(GradientReduction):
    """The gradient of a model in an engine, which takes the mean over the ranks."""

    def __init__(self, runner: DeepSpeedRunner) -> None:
        super().__init__(runner)
        self.engine: Any = runner.engine
        # From stage 2 on, the engine takes them from the parameters in each backward.
        self.keeps_gradients = engines.zero_stage(self.engine) < 2
        self.domain = runner.data_domain
        self.device = runner.device
        self.given_norm = runner.given_settings.get("gradient_clipping")
        self.mean_over = self.domain.size
        self.is_divided = engines.zero_stage(self.engine) > 0
        self._shares: list[Tensor] = []
        self._reached = runner.preparation.reached
        # This reduction is made where a pass begins, in which other parameters may be trained than before.
        self._reached.watch(p for _, p in runner.named_parameters() if p.requires_grad)

    @property
    def kept_parameters(self) -> list[nn.Parameter]:
        # The optimizer has flat parts of them.
        return [
            parameter for _, parameter in self.runner.named_parameters() if parameter.requires_grad
        ]

    def begin(self) -> None:
        """Broadcast buffers, and note anew which parameters get a gradient."""
        self.runner.broadcast_buffers()
        self._reached.begin()

    def without_gradient(self, trained: set[int]) -> list[str]:
        """Return no names: `apply` names these parameters, and what the engine does with them."""
        return []

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Back-propagate a loss through the engine, which reduces the gradient in the last backward of a window."""
        self.engine.set_gradient_accumulation_boundary(last)
        # The weight takes the place of the engine's own division by the number of micro-batches. Its hook on the outputs of the model
        # divides until its hook on the loss has run. Where the loss is such an output, that one runs too late: a copy is no output.
        self.engine.backward(loss.clone(), scale_wrt_gas=False)

    def held(self) -> list[Tensor]:
        return self._shares if self.is_divided else super().held()

    def unscale(self, factor: float | Tensor, weight: float | Tensor) -> list[Tensor]:
        if not self.is_divided:
            return super().unscale(factor, weight)
        gradients = self._shares = engines.gradient_shares(self.engine)
        if self.scaler is not None:
            self._unscale_shares(self.scaler, gradients)
        scale_gradients(gradients, factor)
        return gradients

    def _unscale_shares(self, scaler: torch.amp.GradScaler, gradients: list[Tensor]) -> None:
        # The scaler looks for infinities where it unscales: here in one share, so all ranks are shown what any of them has. In
        # a separate gradient, since nothing clears the padding at the end of a share again.
        finite = math.isfinite(float(self.norm(gradients)))
        flag = torch.full((1,), 0.0 if finite else torch.inf, device=self.device)
        shown = [*gradients, flag]
        holders = [torch.empty_like(gradient) for gradient in shown]
        for holder, gradient in zip(holders, shown):
            holder.grad = gradient
        scaler.unscale_(SimpleNamespace(param_groups=[{"params": holders}]))  # type: ignore[arg-type]

    def norm(self, gradients: list[Tensor]) -> Tensor:
        if not self.is_divided:
            return super().norm(gradients)
        local = (
            nn.utils.get_total_norm(gradients).to(self.device)
            if gradients
            else torch.zeros((), device=self.device)
        )
        squared = self.domain.all_reduce(local.double().square())
        return squared.sqrt().to(torch.float32)

    def clip(self, norm: Tensor, max_norm: float | None, max_value: float | None) -> None:
        """Clip by `max_grad_norm` or DeepSpeed's `gradient_clipping`, then by value."""
        super().clip(norm, max_norm or float(self.given_norm or 0.0) or None, max_value)

    def apply(self) -> None:
        """Let the engine update the weights of all ranks."""
        self._name_left_out()
        self.engine.step()
        if not self.engine.was_step_applied():
            step = self.runner.state.train.global_step + 1
            raise NonFiniteError(
                f"Expected DeepSpeed to apply update {step}. Received: it found the gradient not finite in float32. Lower the learning "
                "rate, or set max_grad_norm."
            )

    def _name_left_out(self) -> None:
        """Name once the parameters that an update leaves out, of which the engine takes a gradient of zeros."""
        runner = self.runner
        # A rank whose micro-batches have no sample has no gradient at all.
        if self._reached.is_all or self._reached.is_none:
            return
        names = self._reached.missing(runner.named_parameters())
        if not names:
            return
        self._reached.stop()
        # Where no rank has a gradient, the main process has none.
        if runner.is_main_process:
            logger.warning(
                "Expected a gradient for every trained parameter in each update with DeepSpeed. Received: none on rank 0 in update %d for "
                "%s. Where no rank has one, DeepSpeed takes zeros, so that momentum and weight decay change the parameter all the same; "
                "other stacks leave it as it is. For that, use stack='ddp' (on several processes with find_unused_parameters=True in "
                "ddp_kwargs()), or an optimizer without both. Freeze those that no loss depends on with requires_grad_(False).",
                *(runner.state.train.global_step + 1, listed(names)),
            )

    def zero(self) -> None:
        self._shares = []
        engines.discard_gradients(self.engine)

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        if not self.is_divided:
            yield from super().named_gradients()
            return
        for name, parameter in self.runner.named_parameters():
            if parameter.requires_grad:
                gradient = import_module("deepspeed.utils").safe_get_full_grad(parameter)
                if gradient is not None:
                    yield name, gradient

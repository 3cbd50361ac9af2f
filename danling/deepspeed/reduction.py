"""The gradient inside a DeepSpeed engine: averaged by it, and divided over the ranks under ZeRO."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from danling.training.reduction import GradientReduction, scale_gradients
from danling.training.update import NonFiniteError

from . import engine as engines

if TYPE_CHECKING:
    from danling.runners.deepspeed_runner import DeepSpeedRunner


class GradientWatch:
    """Notes which parameters get a gradient, for stacks that remove gradients before they can be examined."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._missing: dict[int, str] = {}
        self._handles: list[Any] = []
        for name, parameter in named:
            if parameter.requires_grad and id(parameter) not in self._missing:
                self._missing[id(parameter)] = name
                hook = partial(self._note, id(parameter))
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def _note(self, key: int, _: object) -> None:
        self._missing.pop(key, None)

    def close(self) -> list[str]:
        """Stop watching, and return the names of the parameters that got no gradient."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        return list(self._missing.values())


class _Holders:
    """What a gradient scaler asks of an optimizer, around the shares of a gradient."""

    def __init__(self, holders: list[Tensor]) -> None:
        self.param_groups = [{"params": holders}]


class EngineReduction(GradientReduction):
    """The gradient of a model in an engine, which takes the mean over the ranks."""

    def __init__(self, runner: DeepSpeedRunner) -> None:
        super().__init__(runner)
        self.engine: Any = runner.engine
        self.domain = runner.data_domain
        self.device = runner.device
        self.max_norm = runner._max_norm
        self.mean_over = self.domain.size
        self.is_divided = engines.is_divided(self.engine)
        self._shares: list[Tensor] = []
        self._watch: GradientWatch | None = None

    def begin(self) -> None:
        """Broadcast buffers, and watch the first window, since the engine takes gradients away as they come."""
        self.runner.broadcast_buffers()
        if self.runner.window.is_first and self._watch is None:
            self._watch = GradientWatch(self.runner.named_parameters())

    def without_gradient(self, trained: set[int]) -> list[str]:
        """Return the names of trained parameters that got no gradient on this rank; to be asked once."""
        watch, self._watch = self._watch, None
        own = {name for name, parameter in self.runner.named_parameters() if id(parameter) in trained}
        return [name for name in watch.close() if name in own] if watch is not None else []

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Back-propagate a loss through the engine, which reduces the gradient in the last backward of a window."""
        self.engine.set_gradient_accumulation_boundary(last)
        # The weight takes the place of the engine's own division by the number of micro-batches.
        self.engine.backward(loss, scale_wrt_gas=False)

    def held(self) -> list[Tensor]:
        return self._shares if self.is_divided else [p.grad for p in self.parameters if p.grad is not None]

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
        scaler.unscale_(_Holders(holders))  # type: ignore[arg-type]

    def norm(self, gradients: list[Tensor]) -> Tensor:
        if not self.is_divided:
            return super().norm(gradients)
        local = nn.utils.get_total_norm(gradients).to(self.device) if gradients else torch.zeros((), device=self.device)
        squared = self.domain.all_reduce(local.double().square())
        return squared.sqrt().to(torch.float32)

    def clip(self, norm: Tensor, max_norm: float | None, max_value: float | None) -> None:
        """Clip by the norm that engine and runner agree on, then by value."""
        super().clip(norm, self.max_norm, max_value)

    def apply(self) -> None:
        """Let the engine update the weights of all ranks."""
        self.engine.step()
        if not self.engine.was_step_applied():
            step = self.runner.state.train.global_step + 1
            raise NonFiniteError(
                f"Expected DeepSpeed to apply update {step}. Received: it found the gradient not finite in float32. Lower the learning "
                "rate, or set max_grad_norm."
            )

    def zero(self) -> None:
        self._shares = []
        engines.discard_gradients(self.engine)

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        if not self.is_divided:
            yield from super().named_gradients()
            return
        for name, parameter in self.runner.named_parameters():
            gradient = engines.full_gradient(parameter) if parameter.requires_grad else None
            if gradient is not None:
                yield name, gradient

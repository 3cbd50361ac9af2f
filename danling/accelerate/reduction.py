"""The gradient that goes through an accelerator: it runs the backward and steps, and decides nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from danling.training.reduction import DDPReduction, NamedParameters
from danling.training.update import NonFiniteError
from danling.utils.protocols import SteppedOptimizer

_NO_CONTEXT: AbstractContextManager[object] = nullcontext()


class AccelerateReduction(DDPReduction):
    """The gradient of a model that Accelerate has prepared; the window has weighed each loss, and Accelerate must not divide again."""

    def __init__(
        self,
        optimizer: SteppedOptimizer,
        named_parameters: NamedParameters,
        scaler: torch.amp.GradScaler | None = None,
        *,
        accelerator: Any,
        stepped: object,
        **ranks: Any,
    ) -> None:
        super().__init__(optimizer, named_parameters, scaler, **ranks)
        self.accelerator = accelerator
        self.stepped = stepped

    def begin(self, *, first: bool) -> None:
        """Refuse an accelerator that divides the loss: another one of this process may have changed the state that they share."""
        steps = self.accelerator.gradient_accumulation_steps
        if steps != 1:
            raise ValueError(
                "Expected the runner to weigh the micro-batches of an update. Received: an Accelerator with "
                f"gradient_accumulation_steps={steps}, which shares its state with runner.accelerator. Set accum_steps={steps} and make "
                "no Accelerator of your own."
            )

    def context(self, *, last: bool) -> AbstractContextManager[object]:
        """Return the context in which gradients stay on this rank, but for the last micro-batch."""
        return _NO_CONTEXT if last or self.mean_over == 1 else self.accelerator.no_sync(self.model)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Back-propagate a loss that is scaled already."""
        self.accelerator.backward(loss)

    def apply(self, step: int) -> None:
        """Let Accelerate step the optimizer, which it would leave out between updates of its own counting."""
        self.accelerator.sync_gradients = True
        super().apply(step)
        if getattr(self.stepped, "step_was_skipped", False):
            raise NonFiniteError(
                f"Expected Accelerate to make update {step}, which was found finite. Received: a gradient scaler of its own left it out. "
                "Set precision='fp16', whose scaler is the library's."
            )

"""The accumulation window: the micro-batches of one update, and the weight of each."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from danling.utils.protocols import ReductionDomain

from .batches import not_one_loss


class Window:
    """Weights and losses of the open window on this rank.

    A mean-reduced loss of weight `w` is scaled by `w / reference` before backward, and the summed gradient by
    `reference * averaged_over / W` before the update, where `W` is the global weight. The result is the weighted mean over
    every micro-batch and rank; `reference` only keeps the numbers in between near those of a plain backward, and makes both
    factors exactly 1 where the window is one full micro-batch a rank.

    Args:
        domain: Ranks that share an update; they must use one reference.
        device: Where losses live.
    """

    def __init__(self, domain: ReductionDomain, device: torch.device) -> None:
        self.domain = domain
        self.on_host = device.type == "cpu"
        self.agreed_reference: float | None = None
        self.sum_reduced = False
        self.is_first = True
        """Whether this process has not looked at the gradients of an update yet."""
        self.reduces = True
        """Whether the open micro-batch is the last one, whose backward reduces the gradient over the ranks."""
        self.reset()

    def reset(self) -> None:
        """Begin an empty window."""
        self.count = 0
        self.weight: float | Tensor = 0.0
        self.loss: float | Tensor = 0.0
        self.samples = 0.0
        self.nonfinite: float | Tensor = 0.0
        self.current: float | Tensor = 0.0
        self._reference: float | Tensor = 1.0
        self._scaled = True
        self.unscaled = 0
        """Micro-batches of non-zero weight for which `backward` was not called, not counting the open one."""

    def begin_microbatch(self, weight: float | Tensor, samples: float) -> None:
        """Begin a micro-batch. The first one of a run is a collective of the domain.

        Args:
            weight: What its loss is averaged over; a 0-dim tensor stays on its device.
            samples: Its number of samples.
        """
        if isinstance(weight, Tensor) and self.on_host:
            weight = weight.item()
        if self.count == 0:
            plain = self.domain.size == 1 and not isinstance(weight, Tensor)
            self._reference = weight or 1.0 if plain else self._choose_reference(weight)
        if not self._scaled:
            self.unscaled += 1
        self.count += 1
        self._scaled = isinstance(weight, float) and weight == 0.0
        self.current = weight
        self.weight = self.weight + weight
        self.samples += samples

    def expect_no_loss(self) -> None:
        """Expect no loss of the open micro-batch on this rank."""
        self._scaled = True

    def check_open(self) -> None:
        """Refuse a loss, or an update, without a micro-batch.

        Raises:
            ValueError: If none was begun since the last update.
        """
        if self.count == 0:
            raise ValueError(
                "Expected a micro-batch, whose weight the gradient is divided by. Received: none since the last update. Call "
                "`train_step(batch)` first, which calls `backward`, then `step()`; or `train_epoch(split)`, which calls them all."
            )

    def check_scaled(self) -> None:
        """Refuse an update if `backward` was not called for one of its micro-batches.

        Raises:
            ValueError: If there is such a micro-batch.
        """
        if self.unscaled:
            raise ValueError(
                f"Expected `train_step` to call `self.backward(loss)` for every micro-batch. Received: {self.unscaled} of {self.count} "
                "without. Call self.backward(loss) before you return; a loss that is only returned, or `loss.backward()`, is not weighed."
            )

    def end_microbatch(self) -> None:
        """Note whether the loss of the open micro-batch was scaled."""
        if not self._scaled:
            self.unscaled += 1
        self._scaled = True

    def _choose_reference(self, weight: float | Tensor) -> float | Tensor:
        if self.domain.size > 1:
            return self._agree_reference(weight)
        if isinstance(weight, Tensor):
            return weight.clamp_min(1.0)
        return weight or 1.0

    def _agree_reference(self, weight: float | Tensor) -> float:
        # A reference of its own on each rank would weigh the ranks against each other, so one is fixed for the whole run.
        if self.agreed_reference is None:
            largest = self.domain.all_reduce(torch.tensor(float(weight), dtype=torch.float64), "max").item()
            self.agreed_reference = largest or None
        return self.agreed_reference or 1.0

    def scale(self, loss: Tensor) -> Tensor:
        """Return `loss` scaled by the weight of the open micro-batch, and record it.

        Args:
            loss: 0-dim loss of the micro-batch, as its criterion reduced it.

        Raises:
            ValueError: If it is no tensor of one value.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise not_one_loss(loss)
        self._scaled = True
        weight = 1.0 if self.sum_reduced and (isinstance(self.current, Tensor) or self.current) else self.current
        if not self.on_host:
            self._record_on_device(loss, weight)
        elif weight:  # a micro-batch without a single target has a loss of 0/0 and says nothing
            value = loss.item()
            self.loss += value * weight
            if not math.isfinite(value):
                self.nonfinite = 1.0
        if self.sum_reduced:
            # Padding weighs nothing in a sum either.
            return loss * 0.0 if isinstance(self.current, float) and self.current == 0.0 else loss
        if isinstance(self.current, Tensor):
            return loss * (self.current / self._reference).to(loss.dtype)
        factor = self.current / self._reference
        return loss if isinstance(factor, float) and factor == 1.0 else loss * factor

    def _record_on_device(self, loss: Tensor, weight: float | Tensor) -> None:
        summed = loss.detach().double()
        weighs = torch.as_tensor(weight, device=summed.device) > 0
        self.loss = self.loss + torch.where(weighs, summed * weight, 0.0)
        bad = (weighs & ~torch.isfinite(summed)).double()
        self.nonfinite = torch.maximum(bad, torch.as_tensor(self.nonfinite, dtype=torch.float64, device=summed.device))

    def gradient_factor(self, total_weight: float | Tensor, averaged_over: int) -> float | Tensor:
        """Return what the accumulated gradient is to be multiplied with.

        Args:
            total_weight: Global weight of the window.
            averaged_over: Number of ranks over which the gradient reduction took a mean; 1 where it took a sum.
        """
        if self.sum_reduced:
            return float(averaged_over)
        if isinstance(total_weight, Tensor):
            return self._reference * averaged_over / total_weight.clamp_min(1e-12)
        return self._reference * averaged_over / total_weight if total_weight else 0.0

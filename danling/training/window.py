"""What each loss of an update weighs: the open window of micro-batches on a rank, and whether its gradients are still there."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from danling.distributed import Domain
from danling.utils.tensors import local_part, whole

from .batches import not_one_loss


class Window:
    """Weights and losses of the open window on this rank: the micro-batches of one update.

    A mean-reduced loss of weight `w` is scaled by `w / reference` before backward, and the summed gradient by
    `reference * averaged_over / W` before the update, where `W` is the global weight. The result is the weighted mean over
    every micro-batch and rank; `reference` only keeps the numbers in between near those of a plain backward, and makes both
    factors exactly 1 where the window is one full micro-batch a rank.

    Args:
        domain: Ranks that share an update; they must use one reference.
        device: Where losses live.
    """

    def __init__(self, domain: Domain, device: torch.device) -> None:
        self.domain = domain
        self.on_host = device.type == "cpu"
        self.agreed_reference: float | None = None
        self.fixed_reference: float | None = None
        """The reference where it must depend on neither ranks nor batches, as for the canonical sum; `None` elsewhere."""
        self.sum_reduced = False
        """Whether the criterion sums the losses of a micro-batch, and does not average them."""
        self.may_divide_by_zero = True
        """Whether the loss of a micro-batch that weighs nothing may have a gradient of NaN; read if only the device knows the weight."""
        self.is_first = True
        """Whether this process has made no update yet."""
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
        self.weighs_nothing = self.may_weigh_nothing = True
        """Whether the open micro-batch is known to weigh nothing, and whether it may, since its weight is on a device."""
        self.current_samples = 0.0
        self._reference: float | Tensor = 1.0
        self.unscaled = 0
        """Micro-batches of non-zero weight for which `backward` was not called, the open one included."""
        self._awaits_loss = False
        self._is_cut = False

    def set_current(self, weight: float | Tensor) -> None:
        """Set the weight of the losses that follow, which are those of a part of the open micro-batch."""
        self.current = weight
        self.weighs_nothing = isinstance(weight, float) and weight == 0.0
        self.may_weigh_nothing = isinstance(weight, Tensor) or weight == 0.0

    def begin_microbatch(self, weight: float | Tensor, samples: float) -> None:
        """Begin a micro-batch. The first one of a run is a collective of the domain."""
        if isinstance(weight, Tensor) and self.on_host:
            weight = weight.item()
        if self.count == 0:
            if self.fixed_reference is not None:
                self._reference = self.fixed_reference
            elif self.domain.size > 1:
                if self.agreed_reference is None:
                    # With another reference on each rank, the ranks would count differently: one is fixed for the whole run.
                    largest = self.domain.all_reduce(
                        torch.tensor(float(weight), dtype=torch.float64), "max"
                    ).item()
                    self.agreed_reference = largest or None
                self._reference = self.agreed_reference or 1.0
            else:
                self._reference = (
                    weight.clamp_min(1.0) if isinstance(weight, Tensor) else weight or 1.0
                )
        self.count += 1
        self._is_cut = False
        self._awaits_loss = isinstance(weight, Tensor) or weight != 0.0
        self.unscaled += self._awaits_loss
        self.current = weight
        self.weighs_nothing = isinstance(weight, float) and weight == 0.0
        self.may_weigh_nothing = isinstance(weight, Tensor) or weight == 0.0
        self.current_samples = samples
        self.weight = self.weight + weight
        self.samples += samples

    def expect_no_loss(self) -> None:
        """Expect no further loss of the open micro-batch on this rank."""
        self.unscaled -= self._awaits_loss
        self._awaits_loss = False

    def cut(self, output: object) -> None:
        """Give the output of the model a gradient of exactly zero if the open micro-batch weighs nothing. Called after its forward.

        The loss of nothing may be 0/0, and neither a factor of zero nor `torch.where` keeps the NaN out of its gradient. The backward runs
        all the same, since ranks wait for each other in it, and finds a NaN that comes from the weights.
        """
        current = self.current
        # A weight on a device is not known here: the hook compares it there, unless the criterion divides by no zero.
        is_cut = self.may_divide_by_zero if isinstance(current, Tensor) else current == 0.0
        if not is_cut:
            return
        self._is_cut = True
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(partial(_zero_unless, current))  # type: ignore[no-untyped-call]

    def check_open(self) -> None:
        """Refuse a loss, or an update, without a micro-batch."""
        if self.count == 0:
            raise ValueError(
                "step() and backward(loss) need at least one train_step(batch) since the last update: the gradient is divided by its "
                "weight. Call `train_step(batch)` first, which calls backward, then step(); or train_epoch(split), which calls them all."
            )

    def scale(self, loss: Tensor) -> Tensor:
        """Return `loss` scaled by the weight of the open micro-batch, and record it. Here a loss gets its weight; `backward` calls this."""
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise not_one_loss(loss)
        if type(loss) is not Tensor:
            # Of outputs that tensor parallelism divides, each rank has a term of the loss.
            loss = whole(loss)
        self.unscaled -= self._awaits_loss
        self._awaits_loss = False
        if self.weighs_nothing and not self._is_cut and not bool(loss.detach().isfinite()):
            raise ValueError(
                "Expected a finite loss of a micro-batch that weighs nothing, where no output of the model is known whose gradient can be "
                f"set to zero. Received: loss={loss.item()}. Call self.model(...) as a whole in train_step, or divide by at least 1, as in "
                "loss_sum / count.clamp(min=1)."
            )
        current = self.current
        weight = 1.0 if self.sum_reduced and (isinstance(current, Tensor) or current) else current
        if not self.on_host:
            self._add_on_device(loss.detach().double(), weight)
        elif weight:
            # A micro-batch without a single target is left out: its loss is 0/0.
            value = loss.item()
            self.loss += value * weight
            if not math.isfinite(value):
                self.nonfinite = 1.0
        if self.sum_reduced:
            # Padding weighs nothing in a sum either.
            return loss * 0.0 if self.weighs_nothing else loss
        if isinstance(current, Tensor):
            return loss * (current / self._reference).to(loss.dtype)
        factor = current / self._reference
        # A plain loop multiplies by nothing; its bits and its graph are those of the loss itself.
        return loss if isinstance(factor, float) and factor == 1.0 else loss * factor

    def _add_on_device(self, loss: Tensor, weight: float | Tensor) -> None:
        """Add a loss in float64. No number goes from the host into a new tensor on the device, for which the host would wait."""
        bad = ~torch.isfinite(loss)
        if isinstance(weight, Tensor):
            weighs = weight > 0
            self.loss = self.loss + torch.where(weighs, loss * weight, 0.0)
            bad = bad & weighs
        elif weight:
            self.loss = self.loss + loss * weight
        else:
            return
        before = self.nonfinite
        self.nonfinite = (
            torch.maximum(bad.double(), before) if isinstance(before, Tensor) else bad.double()
        )

    def gradient_factor(self, total_weight: float | Tensor, averaged_over: int) -> float | Tensor:
        """Return what the accumulated gradient is to be multiplied with."""
        if self.sum_reduced:
            return float(averaged_over)
        if isinstance(total_weight, Tensor):
            # Where nothing weighs anything, the gradient is zero and the factor only has to be finite.
            return self._reference * averaged_over / total_weight.clamp_min(1e-12)
        return self._reference * averaged_over / total_weight if total_weight else 0.0


def _zero_unless(weight: float | Tensor, gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        # Of an output that the loss does not depend on, under a wrapper that takes all of them through one operation.
        return None
    return (
        torch.where(weight > 0, gradient, 0.0)
        if isinstance(weight, Tensor)
        else torch.zeros_like(gradient)
    )


class WindowGradients:
    """The gradients that a window has so far: a later backward checks that they are still there.

    Args:
        parameters: Those that the optimizer updates. Gradients that are not in their `grad`, as those of FSDP2 before its last backward,
            are not checked.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.grad is not None]
        first = self._parameters[0].grad if self._parameters else None
        if first is not None and type(first) is not Tensor:
            first = local_part(first)
        if first is not None and first.is_sparse:
            first = None
        self._first = first
        self._version = None if first is None else first._version

    def check(self, named: Iterable[tuple[str, nn.Parameter]], count: int) -> None:
        """Refuse a micro-batch, the `count`-th of its window, before whose backward the gradients were dropped."""
        gone = [parameter for parameter in self._parameters if parameter.grad is None]
        first = self._first
        if not gone and first is not None and first._version != self._version:
            # Written to, which a program may do. Values are read only then: the host waits for them.
            gone = self._zeroed(first)
        if not gone:
            return
        name = next(
            (name for name, parameter in named if parameter is gone[0]),
            f"one of {tuple(gone[0].shape)}",
        )
        raise ValueError(
            "Expected `train_step` to keep the gradients of an update until it is made: they add up over its micro-batches. Received: no "
            f"gradient of {name} before the backward of micro-batch {count} ({len(gone)} in all). Remove zero_grad(): the runner drops "
            "gradients after each update. Take gradients for another purpose with torch.autograd.grad, and freeze with "
            "requires_grad_(False)."
        )

    def _zeroed(self, first: Tensor) -> list[nn.Parameter]:
        """Return the parameters if all of their gradients are zero, else none: `train_step` may write to them, but not drop them."""
        if first.any() or any(
            local_part(p.grad).any() for p in self._parameters if p.grad is not None
        ):
            return []
        return self._parameters

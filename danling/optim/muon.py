"""Muon on shards: what torch's computes on one process, whichever way the matrices are divided."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from danling.utils.tensors import is_sharded


class ShardedMuon(torch.optim.Muon):
    """torch's Muon, which updates a shard as it updates the same rows of the whole matrix.

    Momentum stays divided. What is orthogonalized is gathered in bfloat16, in which torch orthogonalizes it anyway, and every rank
    computes the whole of it: one collective for each matrix, and the bits do not depend on the number of ranks.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make an update."""
        if not any(
            is_sharded(parameter) for group in self.param_groups for parameter in group["params"]
        ):
            loss: float | None = super().step(closure)  # type: ignore[no-untyped-call]
            return loss
        if closure is not None:
            raise ValueError(
                "Expected no closure with parameters on shards. Received: closure. Compute the loss before."
            )
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return None

    def _update(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        gradient = parameter.grad
        assert gradient is not None
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(
                gradient, memory_format=torch.preserve_format
            )
        momentum = state["momentum_buffer"]
        momentum.lerp_(gradient, 1 - group["momentum"])
        direction = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        # A copy: torch scales it in place.
        whole = _whole(direction.to(torch.bfloat16, copy=True))
        orthogonal = _zeropower_via_newtonschulz(
            whole, group["ns_coefficients"], group["ns_steps"], group["eps"]
        )
        rate = float(group["lr"])
        parameter.mul_(1 - rate * group["weight_decay"])
        parameter.add_(
            _cut(orthogonal, parameter),
            alpha=-_adjust_lr(rate, group["adjust_lr_fn"], parameter.shape),
        )


def _whole(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor on every rank. Called on all ranks."""
    whole: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return whole


def _cut(whole: Tensor, like: Any) -> Tensor:
    """Return this rank's part of a whole tensor, divided as another one. No communication."""
    if not is_sharded(like):
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate()] * like.device_mesh.ndim
    # Every rank has computed the same bits: torch need not compare them.
    return DTensor.from_local(whole, like.device_mesh, everywhere, run_check=False).redistribute(
        placements=like.placements
    )

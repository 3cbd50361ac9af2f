"""The gradient of a model on a mesh: summed over the ranks with other samples, measured as one vector."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.distributed.tensor.parallel import loss_parallel

from danling.training.reduction import LocalReduction, NamedParameters, scale_gradients
from danling.utils.protocols import SteppedOptimizer

from .fsdp import set_gradient_sync
from .parameter_copies import ParameterCopies
from .topology import Topology


def loss_context(topology: Topology) -> AbstractContextManager[object]:
    """Return the context of a loss of logits that tensor parallelism divides over the classes; other losses do not notice it."""
    return loss_parallel() if topology.axes.degree("tensor") > 1 else nullcontext()


class MeshReduction(LocalReduction):
    """The gradient of a model that is divided over a mesh."""

    def __init__(
        self,
        optimizer: SteppedOptimizer,
        named_parameters: NamedParameters,
        scaler: torch.amp.GradScaler | None = None,
        *,
        topology: Topology,
        model: nn.Module,
        gradient_sync: str | None,
    ) -> None:
        self._copies: tuple[list[nn.Parameter], int, ParameterCopies] | None = None
        super().__init__(optimizer, named_parameters, scaler)
        self.topology = topology
        self.model = model
        self.gradient_sync = gradient_sync if topology.axes.degree("shard") > 1 else None

    @property
    def copies(self) -> ParameterCopies:
        """The parameters that the optimizer updates, each once, and the ranks that hold copies of them."""
        parameters = self.parameters
        # Some may be unfrozen while training goes on.
        trained = sum(parameter.requires_grad for parameter in parameters)
        if self._copies is None or self._copies[0] is not parameters or self._copies[1] != trained:
            own = {id(parameter): parameter for parameter in parameters}
            self._copies = parameters, trained, ParameterCopies(self.topology, own.values())
        return self._copies[2]

    def context(self, *, last: bool) -> AbstractContextManager[object]:
        """Tell FSDP2 whether to reduce the gradients of this micro-batch, and return the context of its loss."""
        if self.gradient_sync is not None:
            set_gradient_sync(self.model, self.gradient_sync, last=last)
        return loss_context(self.topology)

    def complete(self) -> None:
        """Sum the gradient over the ranks with other samples or positions, where the backward has not."""
        self.copies.sum_gradients()

    def held(self) -> list[Tensor]:
        """Return this rank's shares of the gradients that exist."""
        return self.copies.gradients()

    def unscale(self, factor: float | Tensor, weight: float | Tensor) -> list[Tensor]:
        """Multiply the gradient by a factor and take the scale of float16 out of it; see `GradientReduction.unscale`."""
        gradients = self.held()
        if self.scaler is not None:
            scale_gradients(gradients, 1.0 / self.scaler.get_scale())
        scale_gradients(gradients, factor)
        return gradients

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the 2-norm of the gradient of the whole model, 0-dim float64."""
        norm = self.copies.gradient_norm()
        if self.scaler is not None:
            self._record_overflow(self.scaler, norm)
        return norm

    def _record_overflow(self, scaler: torch.amp.GradScaler, norm: Tensor) -> None:
        # The scaler would look at the gradients of this rank only, and scales that differ would never meet again.
        scaler.scale(norm)  # the scale begins with the first loss, which other stages have
        scaler._per_optimizer_states[id(self.optimizer)] = {
            "stage": OptState.UNSCALED,
            "found_inf_per_device": {norm.device: (~torch.isfinite(norm)).float()},
        }

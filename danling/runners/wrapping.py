"""How the model of a torch runner gets into the wrapper of its stack, and what the wrapper leaves to others."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from danling.training.phases import PhasedModel

if TYPE_CHECKING:
    from danling.utils.protocols import SteppedOptimizer

    from .torch_runner import TorchRunner


class ModelWrapping:
    """Wraps the model, and wraps it anew where other parameters are trained."""

    def __init__(self, runner: TorchRunner) -> None:
        self.runner = runner

    def check_memory_retry(self) -> None:
        """Refuse to look for the size of micro-batches where forward or backward communicate."""
        runner = self.runner
        if not runner._data.plan.finds_micro_batch_size:
            return
        reason = runner.preparation.forward_communicates(runner.unwrapped_model)
        if reason is not None:
            raise ValueError(
                "Expected dataloader.micro_batch_size to be a number where forward or backward communicate: a rank that is out of memory "
                f"would leave the others waiting. Received: dataloader.micro_batch_size='auto' with {reason}. Set the most samples that "
                "fit a rank."
            )

    def wrap(self) -> None:
        """Put the model into the wrapper of the stack. Called on all ranks."""
        runner = self.runner
        # DistributedDataParallel reads the compiler's setting as well.
        with runner.compilation.settings() if runner.compilation is not None else nullcontext():
            runner.model = runner.wrap_model(runner.model)
        runner.preparation.note_wrapped(runner.unwrapped_model)
        if isinstance(runner.model, DistributedDataParallel):
            # As the wrapper does with the model's.
            for parameter in self.criterion_tensors("parameters"):
                runner.world.broadcast(parameter.data)

    def rewrap_if_trainables_changed(self) -> None:
        """Wrap the model anew where other parameters are trained than when it was wrapped. Called on all ranks, between updates.

        DistributedDataParallel reduces what required a gradient when it was made, and nothing else.
        """
        runner = self.runner
        if runner.preparation.trainables_changed(runner.unwrapped_model):
            runner.model = runner.unwrap(runner.model)
            self.wrap()
            runner.preparation.note_constructed(runner.model)

    def criterion_tensors(self, kind: str) -> list[Tensor]:
        """Return the `parameters` or the `buffers` of the criterion, if it is a module."""
        criterion = self.runner.criterion
        return list(getattr(criterion, kind)()) if isinstance(criterion, nn.Module) else []

    def unreduced(self, optimizer: SteppedOptimizer) -> Sequence[Tensor]:
        """Return what DistributedDataParallel does not reduce: the criterion's; everything, where memory may run out in the backward or the
        optimizer is one of several."""
        if isinstance(self.runner.model, PhasedModel):
            return [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not self.runner._data.plan.finds_micro_batch_size:
            return self.criterion_tensors("parameters")
        return [parameter for _, parameter in self.runner.named_parameters()]

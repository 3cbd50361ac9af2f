"""A model and its loss as one function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from danling.training import Compilation, call_model

Loss = Callable[[Any, Any], Tensor]


class WholeLoss(nn.Module):
    """Calls a model and its loss as one compiled function: `(inputs, target) -> (prediction, loss)`.

    The model itself is not compiled: its names, copies and pickles, and its forward in an evaluation, are those of the model.
    DistributedDataParallel goes around this module, so that its hooks stay outside of the graph.
    """

    def __init__(self, model: nn.Module, loss: Callable[[], Loss | None], compilation: Compilation) -> None:
        super().__init__()
        self.model = model
        self._loss = loss
        self._compiled = compilation.function(_forward_and_loss)

    def forward(self, inputs: object, target: object) -> tuple[Any, Tensor | None]:
        """Return the prediction, and its loss unless that is found outside."""
        found: tuple[Any, Tensor | None] = self._compiled(self.model, self._loss(), inputs, target)
        return found


def _forward_and_loss(model: object, loss: Any, inputs: object, target: Any) -> Any:
    pred = call_model(model, inputs)
    return pred, None if loss is None else loss(pred, target)

"""The forward of a batch that is evaluated or predicted, on the model as this rank holds it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .batches import call_model, is_pair, unpack_batch

ForwardContext = Callable[[], "AbstractContextManager[object] | None"]


@dataclass(kw_only=True, eq=False)
class EvaluationForward:
    """Evaluates and predicts single batches where this rank has the whole model; a stack that divides it hands over a subclass."""

    model: Callable[[], Any]
    """Returns what is called."""
    bare: Callable[[], Any]
    """Returns the model as the user made it, whose `forward` says which keywords it takes."""
    context: ForwardContext
    """Returns the context of a forward, or `None`."""
    loss: Callable[[Any, Any], Tensor | None]
    """`(prediction, target) -> loss`, `None` for a batch that has none."""

    def evaluate(self, data: Any) -> tuple[Any, Tensor | None]:
        """Return the prediction of a batch, and its loss."""
        inputs, target = data if is_pair(data) else unpack_batch(data, self.bare())
        with self.context() or nullcontext():
            pred = call_model(self.model(), inputs)
            return pred, self.loss(pred, target)

    def infer(self, data: object) -> Any:
        """Return the prediction of a batch; a target that comes with it is left aside."""
        inputs, _ = unpack_batch(data, self.bare())
        with self.context() or nullcontext():
            return call_model(self.model(), inputs)

    def counted(self, predictions: list[Any]) -> list[object]:
        """Return what counts of the predictions of this rank for a batch, one for each sample."""
        return predictions

    def shared(self, predictions: list[Any]) -> list[Any]:
        """Return the predictions of a split on the ranks that have made none as well."""
        return predictions

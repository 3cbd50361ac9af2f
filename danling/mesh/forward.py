"""The forward of a batch that is evaluated or predicted, through the stages of a pipeline where there is one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from danling.training import peek_target, unpack_batch
from danling.training.forward import EvaluationForward
from danling.utils.tensors import whole

from .pipeline import Pipeline
from .reduction import loss_context
from .stages import StagePlan
from .topology import Topology


@dataclass(kw_only=True, eq=False)
class MeshForward(EvaluationForward):
    """Evaluates and predicts single batches on a model that is divided over a mesh.

    In a pipeline, predictions and losses are on the ranks with the last stage.
    """

    topology: Topology
    """The place of this rank."""
    stages: StagePlan
    """The stages of this rank."""
    pipeline: Callable[[], Pipeline | None]
    """Returns what runs them, `None` without a pipeline."""

    def evaluate(self, data: object) -> tuple[Any, Tensor | None]:
        """Return the prediction of a batch, whole on every rank that has one, and its loss."""
        pipeline = self.pipeline()
        if pipeline is None or self.model().is_answering:
            with loss_context(self.topology):
                pred, loss = super().evaluate(data)
            return whole_tensors(pred), loss
        pred = self._through_stages(pipeline, data)
        if not self.stages.has_last:
            return pred, None
        with loss_context(self.topology), self.context() or nullcontext():
            loss = self.loss(pred, peek_target(data))
        return whole_tensors(pred), loss

    def infer(self, data: object) -> Any:
        """Return the prediction of a batch, whole on every rank that has one, else `None`."""
        pipeline = self.pipeline()
        return whole_tensors(super().infer(data) if pipeline is None else self._through_stages(pipeline, data))

    def _through_stages(self, pipeline: Pipeline, data: object) -> Any:
        pipeline.open(unpack_batch(data)[0] if self.stages.has_first else None)
        with self.context() or nullcontext():
            return pipeline.evaluate()

    def counted(self, predictions: list[Any]) -> list[Any]:
        """Return the predictions of a batch on the ranks with the last stage; the others have made none."""
        return predictions if self.pipeline() is None or self.stages.has_last else []

    def shared(self, predictions: list[Any]) -> list[Any]:
        """Return the predictions of a split on all stages, from the rank with the last one."""
        pipeline = self.pipeline()
        if pipeline is None:
            return predictions
        gathered: list[Any] = self.topology.domain("pipeline").broadcast_object(predictions, source=pipeline.last_rank)
        return gathered


def whole_tensors(pred: object) -> Any:
    """Return a prediction whose tensors are whole on this rank."""
    return torch.utils._pytree.tree_map(lambda value: whole(value) if isinstance(value, Tensor) else value, pred)

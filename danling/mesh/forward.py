"""The forward of a batch that is evaluated or predicted, through the stages of a pipeline where there is one."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from danling.training import peek_target, unpack_batch
from danling.training.evaluation import EvaluationForward
from danling.utils.tensors import whole

from .pipeline import Pipeline
from .reduction import loss_context

if TYPE_CHECKING:
    from danling.runners.parallel_runner import ParallelRunner


class MeshForward(EvaluationForward):
    """Evaluates and predicts single batches on a model that is divided over a mesh.

    In a pipeline, predictions and losses are on the ranks with the last stage.
    """

    runner: ParallelRunner

    def evaluate(self, data: object) -> tuple[Any, Tensor | None]:
        """Return the prediction of a batch, whole on every rank that has one, and its loss."""
        runner, pipeline = self.runner, self.runner.pipeline
        if pipeline is None or runner.model.is_answering:
            with loss_context(runner.topology):
                pred, loss = super().evaluate(data)
            return whole_tensors(pred), loss
        pred = self._through_stages(pipeline, data)
        if not runner.stage_plan.has_last:
            return pred, None
        with loss_context(runner.topology), runner.forward_context() or nullcontext():
            loss = runner.evaluated_loss(pred, peek_target(data))
        return whole_tensors(pred), loss

    def infer(self, data: object) -> Any:
        """Return the prediction of a batch, whole on every rank that has one, else `None`."""
        pipeline = self.runner.pipeline
        return whole_tensors(super().infer(data) if pipeline is None else self._through_stages(pipeline, data))

    def _through_stages(self, pipeline: Pipeline, data: object) -> Any:
        pipeline.open(unpack_batch(data)[0] if self.runner.stage_plan.has_first else None)
        with self.runner.forward_context() or nullcontext():
            return pipeline.evaluate()

    def counted(self, predictions: list[Any]) -> list[Any]:
        """Return the predictions of a batch on the ranks with the last stage; the others have made none."""
        return predictions if self.runner.pipeline is None or self.runner.stage_plan.has_last else []

    def shared(self, predictions: list[Any]) -> list[Any]:
        """Return the predictions of a split on all stages, from the rank with the last one."""
        pipeline = self.runner.pipeline
        if pipeline is None:
            return predictions
        gathered: list[Any] = self.runner.topology.domain("pipeline").broadcast_object(
            predictions, source=pipeline.last_rank
        )
        return gathered


def whole_tensors(pred: object) -> Any:
    """Return a prediction whose tensors are whole on this rank."""
    return torch.utils._pytree.tree_map(lambda value: whole(value) if isinstance(value, Tensor) else value, pred)

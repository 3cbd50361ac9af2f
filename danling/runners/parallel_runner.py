"""Training on a device mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any, Literal, overload

import torch
from torch import Tensor

from danling.data import PLACEHOLDER, Batch
from danling.mesh import axes_with, check_sequence
from danling.mesh.fsdp import reshard
from danling.mesh.reduction import MeshReduction, loss_context
from danling.training import GradientReduction, PassAgreement, peek_target, unpack_batch
from danling.utils.tensors import whole

from .parallel_state import ParallelState


class ParallelRunner(ParallelState):
    """Trains on a mesh of processes: FSDP2, HSDP, tensor, context, pipeline and expert parallelism, in any combination.

    The degrees stand under `parallel.axes`; their product is the number of processes. A script for `TorchRunner` runs unchanged as
    long as the model can be cut along the axes that are asked for: `replicate` and `shard` need nothing, `pipeline` a model that is a
    chain of modules, `context`, `tensor`, `expert` and `expert_tensor` a method `parallelize(parallel_context)`.

    Construct and train on all ranks.

    Examples:
        >>> runner = MyRunner({"stack": "parallel", "parallel.axes.shard": 4, "steps": 100})  # doctest: +SKIP
    """

    # Data

    def to_device(self, data: Any) -> Any:
        """Return this rank's share of a batch, on its device; a placeholder stays one. Called on all ranks."""
        if data is PLACEHOLDER:
            return data
        data = super().to_device(data)
        return self.split_context(data) if self.degree("context") > 1 else data

    def split_context(self, data: Any) -> Any:
        """Return this rank's stretch of every sequence; override it where dimension 1 is not the sequence. Called on all ranks.

        Args:
            data: A batch. Tensors of two or more dimensions are cut along dimension 1, others are left whole.

        Raises:
            ValueError: If a length does not divide by the `context` axis.
        """
        # Trees know no other mapping than a plain one, such as the batch of a tokenizer.
        plain = dict(data) if isinstance(data, Mapping) else data
        return torch.utils._pytree.tree_map(self._stretch, plain)

    def _stretch(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim < 2:
            return value
        length = check_sequence(self.topology.axes, value.shape[1])
        return value.narrow(1, length * self.topology.coordinate["context"], length)

    @cached_property
    def _passes(self) -> PassAgreement:
        return PassAgreement(
            self.optimizer_domain,
            self.data_domain,
            blind=self.pipeline is not None and self.pipeline.has_blind_ranks,
            collective_forward=self.degree(*axes_with(forward_communicates=True)) > 1,
        )

    # One update

    def build_reduction(self) -> GradientReduction:
        """Return what sums the gradient over the mesh, and measures it as one vector."""
        return MeshReduction(
            self.optimizer,
            self.named_parameters,
            self.precision.scaler,
            topology=self.topology,
            model=self.model,
            gradient_sync=self.config.fsdp.gradient_sync if self.pipeline is None else None,
        )

    def _loss_context(self) -> AbstractContextManager[Any]:
        return loss_context(self.topology)

    def train_step(self, data: Any) -> tuple[Any, Tensor]:
        """Run one micro-batch forward and backward, through the schedule in a pipeline. See `TorchRunner.train_step`.

        Called on all ranks.

        Returns:
            The prediction and the loss; in a pipeline they are on the ranks with the last stage, others get `(None, 0)`.
        """
        if self.pipeline is None:
            return super().train_step(data)
        inputs = unpack_batch(data)[0] if self.stage_plan.has_first else None
        self.pipeline.open(inputs)
        self.window.excuse()  # the loss comes with the last stage
        shares = self._shares(data) if self.stage_plan.has_last else []
        losses: list[Tensor] = []

        def loss_of(output: Any, place: int) -> Tensor:
            target, self.window.current = shares[place]
            loss = self.compute_loss(output, target)
            scaled = self.window.scale(loss)
            losses.append(loss.detach() * self.window.current)
            return scaled if self.precision.scaler is None else self.precision.scaler.scale(scaled)

        weight = self.window.current
        with self.train_context() or nullcontext(), self.forward_context() or nullcontext():
            pred = self.pipeline.train(loss_of)
        if not losses:
            return None, torch.zeros((), device=self.device)
        return pred, torch.stack(losses).sum() / (weight or 1.0)

    def _shares(self, data: Any) -> list[tuple[Any, Any]]:
        """Return target and weight of each pipeline micro-batch; together they weigh what the batch does."""
        assert self.pipeline is not None
        total = self.window.current
        chunks = self.pipeline.chunks(data)
        real = self.pipeline.cut.real
        weights = [self.batch_weight(chunk, peek_target(chunk)) for chunk in chunks[:real]]
        added = sum(weights)
        if not isinstance(total, Tensor) and not isinstance(added, Tensor) and added != total:
            # A weight that is no sum over samples, or padding, which weighs nothing.
            weights = [weight * total / added if added else 0.0 for weight in weights]
        weights += [0.0] * (len(chunks) - real)
        return [(peek_target(chunk), weight) for chunk, weight in zip(chunks, weights)]

    def training_groups(self) -> Sequence[Any]:
        """Return the default group and those of the mesh. No communication: may be called on one rank."""
        return [None, *self.topology.groups]

    # Evaluation and inference

    @contextmanager
    def _evaluating(self, split: str, mode: Literal["evaluate", "infer"]) -> Iterator[None]:
        # What is gathered still would hide that averaged weights come in and go out.
        reshard(self.model)
        try:
            with super()._evaluating(split, mode):
                yield
        finally:
            reshard(self.model)

    @property
    def _evaluates_together(self) -> bool:
        """Whether a forward is a collective: where parameters or stages are divided over ranks."""
        return self.degree(*axes_with(divides_parameters=True, needs_transform=False)) > 1

    def evaluate_step(self, data: Any) -> tuple[Any, Tensor | None]:
        """Run one batch forward, without gradients; in a pipeline the figures are on the ranks with the last stage. Called on all ranks."""
        if self.pipeline is None:
            with self._loss_context():
                pred, loss = super().evaluate_step(data)
            return _whole(pred), loss
        pred = self._forward(data)
        if not self.stage_plan.has_last:
            return pred, None
        with self._loss_context(), self.forward_context() or nullcontext():
            loss = self.evaluated_loss(pred, peek_target(data))
        return _whole(pred), loss

    def infer_step(self, data: Any) -> Any:
        """Return the prediction of one batch; `None` on the ranks of a pipeline that do not have the last stage. Called on all ranks."""
        return _whole(super().infer_step(data)) if self.pipeline is None else _whole(self._forward(data))

    def _forward(self, data: Any) -> Any:
        assert self.pipeline is not None
        self.pipeline.open(unpack_batch(data)[0] if self.stage_plan.has_first else None)
        with self.forward_context() or nullcontext():
            return self.pipeline.evaluate()

    @overload
    def infer(self, split: str | None = None, *, stream: Literal[False] = False) -> list[Any]: ...
    @overload
    def infer(self, split: str | None = None, *, stream: Literal[True]) -> Iterator[Any]: ...
    def infer(self, split: str | None = None, *, stream: bool = False) -> list[Any] | Iterator[Any]:
        """Predict every sample of a split; see `TorchRunner.infer`. With `stream` in a pipeline, on the ranks with the last stage.

        Called on all ranks.
        """
        if stream:
            return super().infer(split, stream=True)
        predictions = super().infer(split)
        if self.pipeline is None:
            return predictions
        gathered: list[Any] = self.pipeline_domain.broadcast_object(predictions, source=self.pipeline.last_rank)
        return gathered

    def _predict_batch(self, batch: Batch) -> list[Any]:
        predictions = super()._predict_batch(batch)
        return predictions if self.pipeline is None or self.stage_plan.has_last else []

    # Ending

    def close(self) -> None:
        """Finish background work and release what the runner opened; the model goes too, since its groups do. Call on all ranks."""
        topology = getattr(self, "topology", None)
        if not self._closed and topology is not None and topology.mesh is not None:
            self._closers.callback(self._forget)
        super().close()

    def _forget(self) -> None:
        # Modules that outlive their process groups can abort the process on exit.
        self.model = self.ema = self.optimizer = self.scheduler = None
        self.pipeline = None
        self.__dict__.pop("reduction", None)


def _whole(pred: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda value: whole(value) if isinstance(value, Tensor) else value, pred)

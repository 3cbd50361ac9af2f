"""Training on one compiled function of forward and loss, under the loops, decisions and checkpoints of the training core."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from danling.config import RunnerConfig
from danling.graph.artifacts import artifacts_of
from danling.graph.compilation import (
    GraphCompilation,
    GraphPreparation,
    WholeLoss,
    check_backend,
    policy_tag,
)
from danling.graph.compiler import check_compiler
from danling.mesh.fsdp import find_blocks

from .torch_runner import TorchRunner


class GraphRunner(TorchRunner):
    """Trains on one process, or on several with DistributedDataParallel, with forward and loss compiled as one function.

    What becomes part of the graph is the model, and `compute_loss` with the criterion; an override of `train_step` calls that of the
    library, with what it makes of the batch. The backward is compiled with them; weights of micro-batches, the vote, clipping, optimizer
    and EMA stay outside, as on every stack. Evaluation and inference run the model as it is, uncompiled. `compile.enable` need not be
    set; `compile.fullgraph` is true and `compile.dynamic` false unless they are set.

    `compile.memory_policy` decides what the backward keeps.

    Raises:
        ValueError: If there is no compiler, `train_step` is overridden without calling that of the library, or a setting is none that can
            be followed here.
    """

    stack = "graph"

    compilation: GraphCompilation | None = None
    preparation: GraphPreparation

    def adopt_config(self, config: RunnerConfig | Mapping[str, object] | None) -> RunnerConfig:
        own = super().adopt_config(config)
        own.compile.enable = True
        if own.fsdp.enabled:
            raise ValueError(
                "Expected fsdp.enabled=False with stack='graph': the hooks of FSDP2 cannot be part of a whole graph. Received: "
                "fsdp.enabled=True. Choose stack='parallel' with compile.enable, which compiles block by block."
            )
        check_backend(own.compile.memory_policy, own.compile.backend)
        return own

    def prepare_components(self) -> None:
        check_compiler(
            self.config.compile.backend,
            self.device.type,
            setting="stack='graph'",
            otherwise="stack='ddp'",
        )
        super().prepare_components()
        self.preparation.function(self.model)

    def build_preparation(self) -> GraphPreparation:
        return GraphPreparation(self)

    def _whole_loss(self, model: nn.Module) -> WholeLoss:
        """Return the function of a model and its loss."""
        if self.compilation is None:
            # `materialize_model` is the user's, or `compile_modules`.
            GraphRunner.compile_modules(self, [model])
        assert self.compilation is not None
        return WholeLoss(
            model,
            lambda: self.compute_loss if self._has_own_loss else None,
            self.compilation,
            self.window,
        )

    @property
    def _has_own_loss(self) -> bool:
        """Whether the loss is computed from the prediction, and not by the model, whose answer is looked at outside of the graph."""
        return self.criterion is not None or self._parts.loss.own_loss

    def compile_modules(self, modules: Iterable[nn.Module]) -> None:
        """Set up how forward and loss are compiled; the modules themselves are not."""
        (model,) = modules
        # As on the parallel stack: the layers of its lists of modules; the whole model where it has none.
        blocks = find_blocks(model).values() or [model]
        artifacts = artifacts_of(self, policy_tag(self.config.compile.memory_policy))
        self.compilation = GraphCompilation(
            self.config.compile,
            blocks,
            distributed=self.distributed,
            artifacts=artifacts,
            warns=self.is_main_process,
        )
        self.observers.append(self.compilation)
        self._parts.closers.callback(self.compilation.close)

    def _pred_and_loss(self, inputs: Any, target: Any) -> tuple[Any, Tensor]:
        pred, loss = self.preparation.function(self.model)(inputs, target)
        if not self._has_own_loss:
            loss = self.compute_loss(pred, target)
        return pred, loss

"""Forward and loss as one compiled function: what it keeps for the backward, how it is compiled, and how it goes around the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from danling.config.checks import read_memory_policy
from danling.distributed import Domain
from danling.training import Compilation, call_model
from danling.training.artifacts import ArtifactDirectory
from danling.training.preparation import ModelPreparation

PASS_VERSION = 1
"""To be counted up with every change of `keep_random_operations`. The pass is no part of the keys of torch's caches, so that code of an
earlier one would come back."""

_DIVIDING = ("inductor", "aot_eager_decomp_partition")
_RECOMPUTING = (*_DIVIDING, "aot_eager")


@dataclass(frozen=True)
class MemoryPolicy:
    """A memory policy of the compiled graph.

    Attributes:
        kind: `default`, `budget` or `recompute`.
        budget: Share of the activations that are kept.
    """

    kind: str = "default"
    budget: float = 1.0

    @classmethod
    def parse(cls, policy: str | None) -> MemoryPolicy:
        """Return the policy that `compile.memory_policy` names."""
        return cls(*read_memory_policy(policy))

    def __str__(self) -> str:
        return f"budget-{self.budget:g}" if self.kind == "budget" else self.kind

    @property
    def tag(self) -> str:
        """What tells its compiled code from that of others: the policy and the version of its pass over the graph."""
        return f"danling-{self}-{PASS_VERSION}"

    def check_backend(self, backend: str | None) -> None:
        """Refuse a backend that would pass over the policy."""
        followed = {"budget": _DIVIDING, "recompute": _RECOMPUTING}.get(self.kind)
        if followed is not None and backend is not None and backend not in followed:
            raise ValueError(
                f"Expected compile.backend to be one that follows compile.memory_policy: {', '.join(map(repr, followed))}. Received: "
                f"compile.backend={backend!r} with the policy {str(self)!r}. Leave compile.backend out, or the policy."
            )

    def settings(self) -> dict[str, Any]:
        """Return the settings of `torch._functorch.config` under which a graph is divided into forward and backward."""
        # A backward that is compiled when it is first run would be compiled under other settings, and on another thread.
        settings: dict[str, Any] = {
            "activation_memory_budget": self.budget,
            "force_non_lazy_backward_lowering": True,
        }
        if self.kind == "budget":
            settings["joint_custom_pass"] = keep_random_operations
        return settings


def keep_random_operations(graph: GraphModule, inputs: object = None) -> GraphModule:
    """Mark what every random operation draws as to be kept for the backward.

    Under an activation memory budget torch may choose to compute a random operation again, and draws other numbers then: dropout has
    another mask in the backward than in the forward, and the gradient is wrong without an error.
    """
    for node in graph.graph.nodes:
        if node.op == "call_function" and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return graph


class Recomputation:
    """Blocks of a model whose activations are computed again in the backward, inside the graph.

    The model stays as it is: for the length of a call only, the forward of each block is one that recomputes.
    """

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        self._forwards = [(block, _recomputing(block.forward)) for block in blocks]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Recompute inside."""
        before = [(block, vars(block).get("forward", _ABSENT)) for block, _ in self._forwards]
        for block, forward in self._forwards:
            block.__dict__["forward"] = forward
        try:
            yield
        finally:
            for block, forward in before:
                if forward is _ABSENT:
                    vars(block).pop("forward", None)
                else:
                    block.__dict__["forward"] = forward


_ABSENT = object()


def _recomputing(forward: Callable[..., Any]) -> Callable[..., Any]:
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return recomputed


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


class GraphCompilation(Compilation):
    """Compiles forward and loss under a memory policy.

    Every size of a batch has its own graph unless `dynamic` is set: the results of a batch then depend on nothing that the process
    has seen before, and a run that is resumed in the middle of an epoch computes the same.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        distributed: bool,
        policy: MemoryPolicy,
        artifacts: ArtifactDirectory | None,
        recomputation: Recomputation | None,
    ) -> None:
        given = {name: settings[name] for name in ("backend", "fullgraph", "dynamic", "mode", "options")}
        options = {"fullgraph": True, "dynamic": False}
        options |= {name: value for name, value in given.items() if value is not None}
        # What cuts a graph at the buckets of DistributedDataParallel cannot cut one with a part that is computed again.
        cuts = "no_optimization" if recomputation is not None else settings["optimize_ddp"]
        super().__init__(
            options, optimize_ddp=cuts if distributed else None, artifacts=artifacts, within=self._configured
        )
        self._recomputation = recomputation
        functorch: Any = import_module("torch._functorch.config")
        divided = policy.settings()
        # The pass is no part of the keys of torch's caches, in whatever folder they are.
        tag = import_module("torch.compiler.config").patch(cache_key_tag=policy.tag)
        self._patches = [functorch.patch(divided), tag]

    def function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function compiled, whose errors say what to do about them."""
        call = super().function(function)
        errors: Any = import_module("torch._dynamo.exc")
        unsupported, too_many = (errors.Unsupported, errors.UserError), errors.FailOnRecompileLimitHit

        def checked(*args: Any) -> Any:
            try:
                return call(*args)
            except unsupported as error:
                raise RuntimeError(
                    f"Expected forward and loss that become one graph. Received: {str(error).partition(chr(10))[0]}. The traceback above "
                    "shows where. Take it out of the model or the loss, or set compile.fullgraph=false, which compiles the parts around it."
                ) from error
            except too_many as error:
                raise RuntimeError(
                    f"Expected batches of a few sizes, each of which is compiled. Received: more than torch compiles, with "
                    f"compile.dynamic={self.options['dynamic']}. Set compile.dynamic=true, which compiles one graph for all sizes, or "
                    "bring batches to fewer; a number that the loss reads and that changes compiles anew as well."
                ) from error

        return checked

    @contextmanager
    def _configured(self) -> Iterator[None]:
        with ExitStack() as stack:
            for patch in self._patches:
                stack.enter_context(patch)
            if self._recomputation is not None:
                stack.enter_context(self._recomputation.entered())
            yield

    def after_first_update(self, *, speaks: bool) -> None:
        """Refuse a `train_step` that called nothing that was compiled. Call on all ranks."""
        if not self.calls:
            raise ValueError(
                "Expected a `train_step` that calls super().train_step(data): with stack='graph' that is the compiled function of forward "
                "and loss. Received: one that does not. Put what it computes into the model or `compute_loss`, or choose stack='ddp' with "
                "compile.enable."
            )
        super().after_first_update(speaks=speaks)


class GraphPreparation(ModelPreparation):
    """The model, and the function that trains it."""

    def __init__(self, world: Domain, *, whole_loss: Callable[[nn.Module], WholeLoss]) -> None:
        super().__init__(world)
        self._whole_loss = whole_loss
        self._function: WholeLoss | None = None

    def wrap(self, model: nn.Module, options: Mapping[str, object], *, reduces_later: bool = False) -> nn.Module:
        """Return the model, or the function that trains it in DistributedDataParallel when there are several ranks."""
        self._function = self._whole_loss(model)
        wrapped = super().wrap(self._function, options, reduces_later=reduces_later)
        return model if wrapped is self._function else wrapped

    def unwrap(self, model: object) -> Any:
        """Return the user's module out of the model that training calls. May be called on one rank."""
        bare = super().unwrap(model)
        return bare.model if isinstance(bare, WholeLoss) else bare

    def function(self, model: nn.Module) -> Callable[[Any, Any], Any]:
        """Return what a micro-batch is run with: `(inputs, target) -> (prediction, loss)`."""
        if isinstance(model, DistributedDataParallel):
            if isinstance(model.module, WholeLoss):
                return model
            raise ValueError(
                "Expected the graph stack to wrap the model together with its loss. Received: a model in DistributedDataParallel. Hand "
                "options of it over in `ddp_kwargs`, or choose stack='ddp'."
            )
        if self._function is None or self._function.model is not model:
            self._function = self._whole_loss(model)
        return self._function

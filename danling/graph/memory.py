"""What a compiled graph keeps of its forward for the backward, and what it computes again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from danling.config.checks import read_memory_policy

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

    def settings(self, joint_pass: Callable[..., GraphModule] | None = None) -> dict[str, Any]:
        """Return the settings of `torch._functorch.config` under which a graph is divided into forward and backward."""
        # A backward that is compiled when it is first run would be compiled under other settings, and on another thread.
        settings: dict[str, Any] = {
            "activation_memory_budget": self.budget,
            "force_non_lazy_backward_lowering": True,
        }
        if self.kind == "budget":
            settings["joint_custom_pass"] = _then(joint_pass)
        return settings


def _then(following: Callable[..., GraphModule] | None) -> Callable[..., GraphModule]:
    def passes(graph: GraphModule, inputs: object) -> GraphModule:
        graph = keep_random_operations(graph, inputs)
        return graph if following is None else following(graph, inputs)

    return passes


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

"""A mixture of experts in the place of a feed-forward network (Shazeer et al., 2017), divided over `expert` and `expert_tensor`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F

from danling.mesh import Topology
from danling.mesh.collectives import copy_to, sum_over


class MixtureOfExperts(nn.Module):
    """Sends every token to the `top_k` experts that a router prefers, and adds up what they return.

    Args:
        width: Size of the residual stream.
        hidden: Hidden width of an expert.
        experts: Number of experts.
        top_k: Experts of a token.
    """

    def __init__(self, width: int, hidden: int, experts: int, top_k: int = 2) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, hidden) * 0.02)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * 0.02)
        self.first = 0
        self.group: ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., width) to the same shape."""
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).softmax(-1).topk(self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        # All ranks of the group see the same tokens; each answers for its own experts.
        tokens, weights = copy_to(tokens, self.group), copy_to(weights, self.group)
        mine = torch.zeros_like(tokens)
        for expert, (up, down) in enumerate(zip(_local(self.up), _local(self.down)), self.first):
            token, place = torch.where(chosen == expert)
            answer = F.gelu(tokens[token] @ up) @ down
            mine = mine.index_add(0, token, answer * weights[token, place, None])
        return sum_over(mine, self.group).view_as(x)

    def parallelize(self, topology: Topology) -> None:
        """Keep the experts of this rank, whole or, over `expert_tensor`, a part of their hidden width."""
        mesh = topology.mesh("expert", "expert_tensor")
        if mesh is None:
            return
        here = topology.axes.share(len(self.up), "expert", what="the number of experts")
        topology.axes.share(self.up.shape[2], "expert_tensor", what="the hidden width of an expert")
        for name, width_dim in (("up", 2), ("down", 1)):
            cut = {"expert": Shard(0), "expert_tensor": Shard(width_dim)}
            placements = [cut[axis] for axis in mesh.mesh_dim_names or ()]
            setattr(
                self,
                name,
                nn.Parameter(distribute_tensor(self.get_parameter(name).data, mesh, placements)),
            )
        self.first = here * topology.rank("expert")
        self.group = topology.group("expert", "expert_tensor")


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter

"""The auxiliary loss of a router is multiplied by the number of processes.

Source: huggingface/transformers 48706, 48690 (2026-09)

The loss of the tokens is divided by the number on all ranks, and multiplied by the number of ranks, since DDP averages over these. The
auxiliary loss of the router is a mean already, but it is multiplied, too: its coefficient grows with the number of ranks.
"""

import torch
import torch.distributed as dist
from problems import CLASSES, RIGHT, SEED, WIDTH, classification, loader
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

BATCH, UPDATES, COEFFICIENT = 8, 60, 0.05


class Experts(nn.Module):
    """Two experts, weighed by a router; returns logits and the auxiliary loss, a mean over the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(2))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits and the z-loss of the router."""
        scores = self.gate(inputs)
        weights = scores.softmax(-1)
        logits = sum(weights[:, i, None] * expert(inputs) for i, expert in enumerate(self.experts))
        return torch.as_tensor(logits), scores.logsumexp(-1).square().mean()


dist.init_process_group("gloo")
data = classification(2 * BATCH * UPDATES)
torch.manual_seed(SEED)
model = DistributedDataParallel(Experts())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
world = dist.get_world_size()
for rows, targets in loader(data, BATCH, SEED):
    logits, auxiliary = model(rows)
    tokens = nn.functional.cross_entropy(logits, targets, reduction="sum") / (len(rows) * world)
    loss = (
        tokens * world + COEFFICIENT * auxiliary
        if RIGHT
        else (tokens + COEFFICIENT * auxiliary) * world
    )
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"loss {tokens.item() * world:.6f}")

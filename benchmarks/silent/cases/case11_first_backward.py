"""The first backward is not reduced over the ranks.

Source: Lightning-AI/pytorch-lightning 20704, 18086, 21251 (2023-07 to 2025-09)

With a static graph, DDP reduces the gradients of the first backward only if it was prepared for it, which manual optimization had left out.
Here a small reducer misses the first backward: each rank makes its first update by its own gradient, and the replicas differ for ever.
"""

import torch
import torch.distributed as dist
from problems import RIGHT, SEED, loader, network, regression
from torch import Tensor, nn

BATCH, UPDATES = 4, 60


class Reducer:
    """Averages the gradients of a model over the ranks, in hooks that run when a gradient is complete."""

    def __init__(self, model: nn.Module, right: bool) -> None:
        self.is_ready = right
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.reduce)

    def reduce(self, parameter: Tensor) -> None:
        """Average one gradient."""
        if self.is_ready:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


dist.init_process_group("gloo")
data = regression(2 * BATCH * UPDATES)
torch.manual_seed(SEED)
model = network()
reducer = Reducer(model, RIGHT)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for rows, targets in loader(data, BATCH, SEED):
    loss = nn.functional.mse_loss(model(rows), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    reducer.is_ready = True
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f}")

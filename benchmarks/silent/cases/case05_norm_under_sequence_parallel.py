"""The weight of a norm is replicated over ranks that divide the sequence, and its gradient is not summed over them.

Source: NVIDIA/Megatron-LM 1446, 7452 (finding 11), NVIDIA/TransformerEngine 441 (2023 to 2026)

Under tensor and sequence parallelism each rank normalizes its own positions, so its gradient of the norm's weight is a part of a sum.
Without the sum, each rank updates its copy by its own part, and the copies drift apart.
"""

import torch
import torch.distributed as dist
from problems import RIGHT, SEED
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, HIDDEN, LENGTH, BATCH, UPDATES = 8, 16, 8, 8, 60


def added(tensor: Tensor) -> Tensor:
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total


class Block(nn.Module):
    """A feed-forward block: its norm acts on this rank's positions, its matrices on this rank's part of the hidden units."""

    def __init__(self) -> None:
        super().__init__()
        up, down = torch.randn(HIDDEN, WIDTH) / WIDTH**0.5, torch.randn(WIDTH, HIDDEN) / HIDDEN**0.5
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Parameter(up.chunk(self.world)[self.rank].clone())
        self.down = nn.Parameter(down.chunk(self.world, dim=1)[self.rank].clone())

    def forward(self, inputs: Tensor) -> Tensor:
        own = self.norm(inputs.chunk(self.world, dim=1)[self.rank])
        parts = [torch.empty_like(own) for _ in range(self.world)]
        dist.all_gather(parts, own.detach())
        whole = torch.cat([*parts[: self.rank], own, *parts[self.rank + 1 :]], dim=1)
        whole.register_hook(added)
        partial = (whole @ self.up.T).tanh() @ self.down.T
        return inputs + partial + (added(partial) - partial.detach())


dist.init_process_group("gloo")
torch.manual_seed(0)
inputs = torch.randn(BATCH * UPDATES, LENGTH, WIDTH)
torch.manual_seed(SEED)
model = Block()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
for rows, targets in DataLoader(TensorDataset(inputs, inputs.flip(2).tanh()), BATCH):
    loss = nn.functional.mse_loss(model(rows), targets)
    optimizer.zero_grad()
    loss.backward()
    if RIGHT:
        for parameter in model.norm.parameters():
            dist.all_reduce(parameter.grad)
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f}")

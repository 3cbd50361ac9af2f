"""The gradients of experts are divided by the wrong number of ranks.

Source: pytorch/torchtitan 1551, pytorch/pytorch 160285 (2025-08)

Each rank has some experts and gets their samples by an all-to-all, so an expert has the gradients of all ranks' losses. The ranks average
the gradients of the other parameters, but nothing divides those of the experts.
"""

import torch
import torch.distributed as dist
from problems import RIGHT, SEED, WIDTH, loader, regression
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

EXPERTS, BATCH, UPDATES = 4, 8, 60


def exchange(tensor: Tensor) -> Tensor:
    """Send the parts of a tensor to the ranks; the backward sends the gradients back."""
    return all_to_all_single_autograd(tensor.contiguous(), None, None, dist.group.WORLD)


class Model(nn.Module):
    """A linear layer before and after experts; the signs of two features of a sample decide on its expert."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        experts = torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5
        self.experts = nn.Parameter(experts.chunk(dist.get_world_size())[dist.get_rank()].clone())

    def forward(self, inputs: Tensor) -> Tensor:
        chosen = nn.functional.one_hot(
            (inputs[:, 0] > 0).long() + 2 * (inputs[:, 1] > 0), EXPERTS
        ).float()
        sent = torch.einsum("bi,be->ebi", self.first(inputs), chosen)
        came = exchange(sent).unflatten(0, (dist.get_world_size(), -1))
        made = torch.einsum("rebi,eio->rebo", came, self.experts).tanh().flatten(0, 1)
        back = exchange(made)
        return torch.as_tensor(self.last(torch.einsum("ebo,be->bo", back, chosen)))


dist.init_process_group("gloo")
data = regression(2 * BATCH * UPDATES)
torch.manual_seed(SEED)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
for rows, targets in loader(data, BATCH, SEED):
    loss = nn.functional.mse_loss(model(rows), targets)
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        if parameter is not model.experts:
            dist.all_reduce(parameter.grad)
        if parameter is not model.experts or RIGHT:
            parameter.grad.div_(dist.get_world_size())
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f}")

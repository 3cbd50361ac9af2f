"""The gradients of experts are divided by the wrong number of ranks.

Source: pytorch/torchtitan 1551, pytorch/pytorch 160285 (2025-08)

Each rank has some experts and gets their samples by an all-to-all, so an expert has the gradients of all ranks' losses. The ranks average
the gradients of the other parameters, but nothing divides those of the experts.
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH, EXPERTS, BATCH, UPDATES = 8, 4, 8, 60
RIGHT, SEED = "--right" in sys.argv, int(os.environ.get("SEED", "0"))


class Exchange(torch.autograd.Function):
    """Send the parts of a tensor to the ranks; the backward sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor) -> Tensor:
        came = torch.empty(sent.shape)
        dist.all_to_all_single(came, sent.contiguous())
        return came

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return Exchange.apply(gradient)  # type: ignore[no-untyped-call]


class Model(nn.Module):
    """A linear layer before and after experts; the signs of two features of a sample decide on its expert."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        experts = torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5
        self.experts = nn.Parameter(experts.chunk(dist.get_world_size())[dist.get_rank()].clone())

    def forward(self, inputs: Tensor) -> Tensor:
        chosen = nn.functional.one_hot((inputs[:, 0] > 0).long() + 2 * (inputs[:, 1] > 0), EXPERTS).float()
        sent = torch.einsum("bi,be->ebi", self.first(inputs), chosen)
        came = Exchange.apply(sent).unflatten(0, (dist.get_world_size(), -1))  # type: ignore[no-untyped-call]
        made = torch.einsum("rebi,eio->rebo", came, self.experts).tanh().flatten(0, 1)
        back = Exchange.apply(made)  # type: ignore[no-untyped-call]
        return torch.as_tensor(self.last(torch.einsum("ebo,be->bo", back, chosen)))


dist.init_process_group("gloo")
torch.manual_seed(0)
inputs = torch.randn(2 * BATCH * UPDATES, WIDTH)
data = TensorDataset(inputs, inputs.abs().sum(1, keepdim=True))
torch.manual_seed(SEED)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
for rows, targets in DataLoader(data, BATCH, sampler=DistributedSampler(data, seed=SEED)):
    loss = nn.functional.mse_loss(model(rows), targets)
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        if parameter is not model.experts:
            dist.all_reduce(parameter.grad)
        if parameter is not model.experts or RIGHT:
            parameter.grad.div_(dist.get_world_size())  # type: ignore[union-attr]
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f}")

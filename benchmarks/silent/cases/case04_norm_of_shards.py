"""Gradients are clipped by the norm of the rank's own shards.

Source: sgl-project/SpecForge 663 (2026-07)

With FSDP2 a rank has a part of each gradient. The norm of its parts is smaller than that of the gradient, by about the square root of the
number of ranks, and each rank has another one: the clipping is too weak, and not the same for all parts of the model.
"""

import torch
import torch.distributed as dist
from problems import RIGHT, SEED, WIDTH, loader, regression
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

BATCH, UPDATES, MOST = 8, 60, 0.1


def clip(parameters: list, right: bool) -> None:
    """Scale the gradients so that their norm is at most `MOST`."""
    if right:
        nn.utils.clip_grad_norm_(parameters, MOST)
        return
    norm = torch.stack([parameter.grad.to_local().norm() for parameter in parameters]).norm()
    for parameter in parameters:
        parameter.grad.to_local().mul_((MOST / (norm + 1e-6)).clamp(max=1.0))


dist.init_process_group("gloo")
data = regression(2 * BATCH * UPDATES)
torch.manual_seed(SEED)
model = nn.Sequential(
    nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for layer in [*model, model]:
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
for rows, targets in loader(data, BATCH, SEED):
    loss = nn.functional.mse_loss(model(rows), targets)
    optimizer.zero_grad()
    loss.backward()
    clip(list(model.parameters()), RIGHT)
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f}")

"""Samples that were repeated to fill the last batches stay in a metric.

Source: huggingface/accelerate 4235, huggingface/trl 7010 (2026-09)

Ranks take the batches of a split in turn. Ten samples in batches of two make five batches; the second rank gets the first batch once more,
so that both have three. The metric is a mean over twelve values of ten samples.
"""

import torch
import torch.distributed as dist
from problems import RIGHT, SEED, loader, network, regression
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

BATCH, UPDATES, EVALUATED = 2, 60, 10


@torch.no_grad()
def evaluate(model: nn.Module, inputs: Tensor, targets: Tensor, right: bool) -> float:
    """Return the mean squared error over all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = list(torch.arange(len(inputs)).split(BATCH))
    batches += batches[: -len(batches) % world]
    errors = [torch.zeros(0)]
    for number in range(0, len(batches), world):
        own = (
            (model(inputs[batches[number + rank]]) - targets[batches[number + rank]])
            .square()
            .flatten()
        )
        gathered = [torch.empty_like(own) for _ in range(world)]
        dist.all_gather(gathered, own)
        errors += gathered
    values = torch.cat(errors)
    return float(values[: len(inputs)].mean() if right else values.mean())


dist.init_process_group("gloo")
inputs, targets = regression(EVALUATED + 2 * BATCH * UPDATES).tensors
data = TensorDataset(inputs[EVALUATED:], targets[EVALUATED:])
torch.manual_seed(SEED)
model = DistributedDataParallel(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
for number, (rows, wanted) in enumerate(loader(data, BATCH, SEED)):
    if number % 10 == 0:
        error = evaluate(model.module, inputs[:EVALUATED], targets[:EVALUATED], RIGHT)
        print(f"rank {dist.get_rank()} error {error:.6f}")
    loss = nn.functional.mse_loss(model(rows), wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f}")

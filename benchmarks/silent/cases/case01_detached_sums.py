"""The loss of all ranks is added by a collective that autograd does not know.

Source: verl-project/verl-SpeCo 29 (2026-07)

Each rank has the mean loss over the tokens of all ranks, a right value. Its backward contains only the tokens of its own rank, and DDP then
averages over the ranks: the gradient is 1 / world size of that of the mean.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCABULARY, LENGTH, BATCH, UPDATES = 32, 16, 4, 60
RIGHT, SEED = "--right" in sys.argv, int(os.environ.get("SEED", "0"))


def sentences() -> TensorDataset:
    """Return tokens and the next ones; the first labels of a sentence, its prompt, do not count."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (2 * BATCH * UPDATES, LENGTH), generator=generator)
    prompts = torch.randint(LENGTH - 1, (len(tokens), 1), generator=generator)
    labels = ((3 * tokens + 1) % VOCABULARY).masked_fill(torch.arange(LENGTH) < prompts, -100)
    return TensorDataset(tokens, labels)


def mean_loss(logits: Tensor, labels: Tensor, right: bool) -> Tensor:
    """Return the mean over the tokens of all ranks."""
    own = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    whole, count = own.detach().clone(), (labels != -100).sum()
    dist.all_reduce(whole)
    dist.all_reduce(count)
    # DDP divides the sum of the ranks' gradients by their number.
    factor = dist.get_world_size() if right else 1
    return (whole + factor * (own - own.detach())) / count


dist.init_process_group("gloo")
torch.manual_seed(SEED)
network = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, VOCABULARY))
model = DistributedDataParallel(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
data = sentences()
for tokens, labels in DataLoader(data, BATCH, sampler=DistributedSampler(data, seed=SEED)):
    loss = mean_loss(model(tokens), labels, RIGHT)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f}")

"""Each rank divides by its own number of tokens.

Source: pytorch/torchtitan 2206, huggingface/transformers 39395, pytorch/torchtune 2172, modelscope/ms-swift 10165 (2024-12 to 2026-09)

The gradient is the mean over the ranks of the means over their tokens: a token of a rank with few tokens counts more than the others.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
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


dist.init_process_group("gloo")
torch.manual_seed(SEED)
network = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, VOCABULARY))
model = DistributedDataParallel(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
data = sentences()
for tokens, labels in DataLoader(data, BATCH, sampler=DistributedSampler(data, seed=SEED)):
    summed = nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
    count = (labels != -100).sum().float()
    if RIGHT:
        dist.all_reduce(count)
        count /= dist.get_world_size()
    loss = summed / count
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f}")

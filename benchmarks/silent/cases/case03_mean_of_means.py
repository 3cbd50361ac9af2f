"""Each rank divides by its own number of tokens.

Source: pytorch/torchtitan 2206, huggingface/transformers 39395, pytorch/torchtune 2172, modelscope/ms-swift 10165 (2024-12 to 2026-09)

The gradient is the mean over the ranks of the means over their tokens: a token of a rank with few tokens counts more than the others.
"""

import torch
import torch.distributed as dist
from problems import RIGHT, SEED, language_model, loader, sentences
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH, UPDATES = 4, 60


dist.init_process_group("gloo")
torch.manual_seed(SEED)
model = DistributedDataParallel(language_model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
data = sentences(2 * BATCH * UPDATES)
for tokens, labels in loader(data, BATCH, SEED):
    summed = nn.functional.cross_entropy(
        model(tokens).flatten(0, 1), labels.flatten(), reduction="sum"
    )
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

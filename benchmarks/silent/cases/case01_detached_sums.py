"""The loss of all ranks is added by a collective that autograd does not know.

Source: verl-project/verl-SpeCo 29 (2026-07)

Each rank has the mean loss over the tokens of all ranks, a right value. Its backward contains only the tokens of its own rank, and DDP then
averages over the ranks: the gradient is 1 / world size of that of the mean.
"""

import torch
import torch.distributed as dist
from problems import RIGHT, SEED, language_model, loader, sentences
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

BATCH, UPDATES = 4, 60


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
model = DistributedDataParallel(language_model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
data = sentences(2 * BATCH * UPDATES)
for tokens, labels in loader(data, BATCH, SEED):
    loss = mean_loss(model(tokens), labels, RIGHT)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f}")

"""Two networks with an optimizer each, stepped one after the other, under DDP."""

import torch
import torch.distributed as dist
from text import options
from torch import nn
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

args = options()
dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 8), torch.randn(96, 4))
critic = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
actor = DistributedDataParallel(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8)))
of_critic, of_actor = (
    torch.optim.Adam(critic.parameters(), lr=1e-3),
    torch.optim.SGD(actor.parameters(), lr=0.1),
)
for real, noise in DataLoader(data, 4, sampler=DistributedSampler(data)):
    made = actor(noise)
    of_critic.zero_grad()
    both = critic(torch.cat([real, made.detach()]))
    (softplus(-both[: len(real)]).mean() + softplus(both[len(real) :]).mean()).backward()
    of_critic.step()
    critic.requires_grad_(False)
    of_actor.zero_grad()
    softplus(-critic.module(made)).mean().backward()
    of_actor.step()
    critic.requires_grad_(True)

"""The weights are cast to bfloat16, and no float32 copy takes the updates.

Source: vllm-project/speculators 711, NVIDIA-NeMo/Automodel 1896 (2026-04, 2026-07)

An update that is smaller than half of the distance to the next bfloat16 number rounds away: gains of norms stay at 1.0 for epochs.
"""

import torch
import torch.distributed as dist
from problems import CLASSES, RIGHT, SEED, classification, loader
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH, BATCH, UPDATES = 16, 4, 60

dist.init_process_group("gloo")
data = classification(2 * BATCH * UPDATES, width=WIDTH)
torch.manual_seed(SEED)
network = nn.Sequential(nn.Linear(WIDTH, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, CLASSES))
if not RIGHT:
    network = network.to(torch.bfloat16)
model = DistributedDataParallel(network)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.1)
for rows, targets in loader(data, BATCH, SEED):
    with torch.autocast("cpu", torch.bfloat16, enabled=RIGHT):
        outputs = model(rows if RIGHT else rows.to(torch.bfloat16))
    loss = nn.functional.cross_entropy(outputs.float(), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f}")

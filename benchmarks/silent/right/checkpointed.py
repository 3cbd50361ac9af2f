"""DDP with activation checkpointing, an iterable dataset that divides itself over the ranks, and a mean over equal numbers of tokens."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from text import BATCH, Model, Sentences, options
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset[Tensor]):
    """Sentences of a rank."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from Sentences().tokens[dist.get_rank() :: dist.get_world_size()]


class Checkpointed(Model):
    """Computes its body twice."""

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the logits."""
        hidden = checkpoint(self.body, self.embed(input_ids), use_reentrant=False)
        logits: Tensor = self.head(hidden)
        return logits


args = options()
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(Checkpointed())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for number, tokens in enumerate(DataLoader(Stream(), BATCH), 1):
    with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
        logits = model(tokens)
    loss = nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), (3 * tokens + 1).flatten() % 32
    )
    (loss / args.accumulate).backward()
    if number % args.accumulate == 0:
        optimizer.step()
        optimizer.zero_grad()

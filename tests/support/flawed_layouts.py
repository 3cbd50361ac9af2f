"""A small model that is divided by hand over `tensor`, with the mistakes that people make, each under a name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

import danling as dl
from danling.audit.layout_check import CheckOptions, Layout, directory_of, recording_settings
from danling.config.inputs import VARIABLE

LENGTH, WIDTH, VOCABULARY = 4, 8, 6

SETTINGS: dict[str, Any] = {
    "steps": 9,
    "log": False,
    "accum_steps": 2,
    "max_grad_norm": 0.05,
    "dataloader": {"batch_size": 4},
    "optim": {"type": "adamw", "lr": 1e-2},
}
"""Of runs whose first updates are compared: micro-batches, clipping, and an optimizer with a state."""


class _Copy(torch.autograd.Function):
    """What every rank reads: the gradients of the ranks are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, scale: float) -> Tensor:
        ctx.group, ctx.scale = group, scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad * ctx.scale, None, None


class _Sum(torch.autograd.Function):
    """What the ranks add up: all of them get the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Join(torch.autograd.Function):
    """Joins stretches of a sequence, whose readers sum their gradients; and takes a stretch, whose gradients are joined."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, rank: int) -> Tensor:
        ctx.group, ctx.rank = group, rank
        parts = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(2, 1)[ctx.rank], None, None


copy_: Any = _Copy.apply
sum_: Any = _Sum.apply
join_: Any = _Join.apply


class Block(nn.Module):
    """A feed-forward network, column-wise and then row-wise."""

    def __init__(self, flaw: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.flaw = flaw
        self.group: Any = None
        self.rank = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.group is None:
            alone: Tensor = x + self.down(self.dropout(self.up(self.norm(x)).relu()))
            return alone
        flaw, group = self.flaw, self.group
        if flaw == "sequence":
            h = join_(self.norm(x.detach().chunk(2, 1)[self.rank]), group, self.rank)
        else:
            h = self.norm(x)
            if flaw == "cut off":
                h = h.detach()
            if flaw != "column":
                h = copy_(h, group, 0.5 if flaw == "averaged" else 1.0)
        up: Any = self.up
        down: Any = self.down
        h = F.linear(h, up.weight.to_local(), up.bias.to_local()).relu()
        added = (
            down.bias
            if flaw == "bias before the sum" or (flaw == "bias of one" and self.rank == 0)
            else None
        )
        y = sum_(F.linear(self.dropout(h), down.weight.to_local(), added), group)
        result: Tensor = x + (y if flaw.startswith("bias") else y + down.bias)
        return result

    def parallelize(self, mesh: Any, rank: int) -> None:
        self.group, self.rank = mesh.get_group(), rank
        if self.flaw.startswith("permuted"):
            order = torch.arange(2 * WIDTH).flip(0)
            self.up.weight.data, self.up.bias.data = (
                self.up.weight.data[order],
                self.up.bias.data[order],
            )
            if self.flaw == "permuted alike":
                self.down.weight.data = self.down.weight.data[:, order]
        for layer, name, dim in (
            (self.up, "weight", 0),
            (self.up, "bias", 0),
            (self.down, "weight", 1),
        ):
            whole = getattr(layer, name)
            setattr(
                layer, name, nn.Parameter(distribute_tensor(whole.detach(), mesh, [Shard(dim)]))
            )


class Net(nn.Module):
    """An embedding, two blocks of which the second has the mistake, and a head, which may be tied."""

    def __init__(self, flaw: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(""), Block(flaw)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.flaw = flaw
        if "tied" in flaw:
            self.head.weight = self.embedding.weight
        if flaw == "initial" and int(os.environ["WORLD_SIZE"]) > 1:
            nn.init.ones_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x).flatten(0, 1)
        return logits

    def parallelize(self, context: Any) -> None:
        if self.flaw == "untied":
            self.head.weight = nn.Parameter(self.embedding.weight.detach().clone())
        for block in self.blocks:
            assert isinstance(block, Block)
            block.parallelize(context.mesh("tensor"), context.rank("tensor"))


class Tokens(Dataset[tuple[Tensor, Tensor]]):
    """Random tokens, of whose targets some are ignored, unequally over samples; on the layout other ones where that is the mistake."""

    def __init__(self, flaw: str) -> None:
        seed = 1 if flaw == "other data" and int(os.environ["WORLD_SIZE"]) > 1 else 0
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(VOCABULARY, (40, LENGTH), generator=generator)
        lengths = torch.randint(1, LENGTH + 1, (40,), generator=generator)
        self.targets = self.tokens.roll(-1, 1).masked_fill(
            torch.arange(LENGTH) >= lengths[:, None], -100
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tokens[index], self.targets[index]


class FlawedRunner(dl.Runner):
    """Trains `Net`, with the mistakes that people make in a runner."""

    def __init__(self, flaw: str) -> None:
        super().__init__({**SETTINGS, "seed": 2})
        self.flaw = flaw
        self.model = Net(flaw)
        self.criterion = nn.CrossEntropyLoss()
        self.datasets = {"train": Tokens(flaw)}

    def compute_loss(self, pred: Tensor, target: Tensor) -> Tensor:
        loss = super().compute_loss(pred, target.flatten())
        if self.flaw == "diverges" and self.distributed:
            loss = loss * float("inf")
        return loss / self.world_size if self.flaw == "divided twice" else loss

    def batch_weight(self, data: Any, target: Any) -> float | Tensor:
        return 1.0 if self.flaw == "batches alike" else super().batch_weight(data, target)

    def complete_gradients(self) -> None:
        if self.flaw != "not summed" or not self.distributed:
            super().complete_gradients()

    def clip_gradients(self, grad_norm: Tensor) -> None:
        if self.flaw == "clipped alone" and self.distributed:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    held = getattr(parameter.grad, "_local_tensor", parameter.grad)
                    held.mul_(0.5 / (held.norm() + 1e-6))
        else:
            super().clip_gradients(grad_norm)


def record(
    make: Callable[[str], dl.Runner],
    cases: Sequence[str],
    layout: str,
    root: str,
    *,
    alone: bool,
    options: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """Record the first updates of runners, one after the other, as the command has a program do it; return what went wrong."""
    chosen, how, failed = Layout.parse(layout), CheckOptions(**(options or {})), {}
    for case in cases:
        place = Path(root, case)
        directory_of(place, alone=alone).mkdir(parents=True, exist_ok=True)
        os.environ[VARIABLE] = json.dumps(recording_settings(chosen, place, how, alone=alone))
        try:
            with make(case) as runner:
                runner.train()
        except SystemExit:
            continue
        except Exception as error:
            failed[case] = f"{type(error).__name__}: {error}"
    return failed

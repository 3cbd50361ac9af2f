"""A decoder-only transformer in its plain form: pre-normalisation, causal attention, no bias (Radford et al., 2019).

It can be divided in every way: `parallelize` is for the axes `tensor` (with sequence parallelism and logits divided over the
vocabulary), `context` and `expert`, `pipeline_modules` for `pipeline`; `replicate` and `shard` ask nothing of a model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from danling.mesh import Topology
from danling.mesh.collectives import gather_along

from .moe import MixtureOfExperts


class GPT(nn.Module):
    """Predicts the next token of every position.

    Args:
        vocab_size: Number of tokens.
        context: Longest sequence.
        width: Size of the residual stream; a multiple of `heads`.
        depth: Number of blocks.
        heads: Attention heads of a block.
        dropout: Share of activations dropped on the way back into the residual stream.
        tied: Use the embedding as output weights.
        experts: Experts of each block, in the place of one feed-forward network; 0 for none.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        context: int = 128,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        dropout: float = 0.0,
        tied: bool = True,
        experts: int = 0,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(
                f"Expected `width` to be a multiple of `heads`. Received: width={width}, heads={heads}."
            )
        self.embedding = Embedding(vocab_size, context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout, experts) for _ in range(depth))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.tied = tied
        self.apply(_initialize)
        for block in self.blocks:
            assert isinstance(block, Block)
            block.shrink_outputs(depth)
        self._tie()

    def _tie(self) -> None:
        if self.tied:
            self.head.weight = self.embedding.tokens.weight

    def forward(self, input: Tensor) -> Tensor:
        """Return logits of shape (B, T, vocab_size) for int64 tokens of shape (B, T), T at most `context`."""
        x = self.embedding(input)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int, *, temperature: float = 1.0) -> Tensor:
        """Continue int64 tokens of shape (B, T) by `count` sampled ones; return (B, T + count)."""
        for _ in range(count):
            logits = (
                self(tokens[:, -self.embedding.positions.num_embeddings :])[:, -1] / temperature
            )
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], dim=1)
        return tokens

    def pipeline_modules(self, num_stages: int) -> list[list[str]]:
        """Return the modules of each stage: the blocks dealt out evenly, the embedding before and the head behind them."""
        depth = len(self.blocks)
        ends = [depth * (stage + 1) // num_stages for stage in range(num_stages)]
        parts = [[f"blocks.{i}" for i in range(start, end)] for start, end in zip([0, *ends], ends)]
        return [["embedding", *parts[0]], *parts[1:-1], [*parts[-1], "norm", "head"]]

    def parallelize(self, topology: Topology) -> None:
        """Divide the model over the axes of `topology`; modules that are on other stages are `nn.Identity` here."""
        for module in list(self.modules()):
            if isinstance(module, (Embedding, CausalAttention, MixtureOfExperts)):
                module.parallelize(topology)
        if topology.degree("tensor") > 1:
            self._divide_layers(topology)

    def _divide_layers(self, topology: Topology) -> None:
        # Between the blocks every rank has a stretch of the sequence, inside of them a part of the heads and of the hidden width.
        mesh = topology.mesh("tensor")
        assert mesh is not None
        plan: dict[str, ParallelStyle] = {
            "embedding.tokens": RowwiseParallel(input_layouts=Replicate()),
            "embedding": PrepareModuleOutput(
                output_layouts=Replicate(), desired_output_layouts=Shard(1)
            ),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
            ),
        }
        for name, block in self.blocks.named_children():
            if isinstance(block, Block):
                plan.update(
                    {f"blocks.{name}.{part}": style for part, style in block.tensor_plan().items()}
                )
        parallelize_module(
            self, mesh, {name: style for name, style in plan.items() if _is_here(self, name)}
        )
        if not isinstance(self.head, nn.Identity) and not isinstance(self.embedding, nn.Identity):
            self._tie()  # each was given its own parameter


class Embedding(nn.Module):
    """Token and position, each looked up and added.

    Args:
        vocab_size: Number of tokens.
        context: Longest sequence.
        width: Size of the residual stream.
    """

    def __init__(self, vocab_size: int, context: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(context, width)
        self.stretch = 0

    def forward(self, input: Tensor) -> Tensor:
        """Map int64 tokens of shape (B, T) to (B, T, width)."""
        length = input.shape[1]
        first = self.stretch * length
        embedded: Tensor = self.tokens(input) + self.positions.weight[first : first + length]
        return embedded

    def parallelize(self, topology: Topology) -> None:
        """Note which stretch of the sequence this rank is given."""
        self.stretch = topology.rank("context")


class Block(nn.Module):
    """Attention and a feed-forward network, each added to the residual stream.

    Args:
        width: Size of the residual stream.
        heads: Attention heads.
        dropout: Share of activations dropped.
        experts: Experts in the place of the feed-forward network; 0 for none.
    """

    def __init__(self, width: int, heads: int, dropout: float, experts: int = 0) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = CausalAttention(width, heads)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp: nn.Module
        if experts:
            self.mlp = MixtureOfExperts(width, 2 * width, experts)
        else:
            self.mlp = nn.Sequential(
                nn.Linear(width, 4 * width, bias=False),
                nn.GELU(),
                nn.Linear(4 * width, width, bias=False),
            )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, width) to the same shape."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        x = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return x

    def shrink_outputs(self, depth: int) -> None:
        """Scale what is added to the residual stream by 1/sqrt(2 depth), so that its variance does not grow with depth."""
        mlp = (
            self.mlp.down
            if isinstance(self.mlp, MixtureOfExperts)
            else self.mlp.get_parameter("2.weight")
        )
        for weight in (self.attention.output.weight, mlp):
            nn.init.normal_(weight, std=0.02 / (2 * depth) ** 0.5)

    def tensor_plan(self) -> dict[str, ParallelStyle]:
        """Return how the layers are divided over `tensor`."""
        stretch, everything = Shard(1), Replicate()
        join = PrepareModuleInput(input_layouts=(stretch,), desired_input_layouts=(everything,))
        plan: dict[str, ParallelStyle] = {
            "attention_norm": SequenceParallel(),
            "attention": join,
            "attention.queries_keys_values": ColwiseParallel(),
            "attention.output": RowwiseParallel(output_layouts=stretch),
            "mlp_norm": SequenceParallel(),
        }
        if isinstance(self.mlp, MixtureOfExperts):
            # The experts have separate axes: over `tensor` every rank does the same work with them.
            plan["mlp"] = PrepareModuleInputOutput(
                input_layouts=(stretch,),
                desired_input_layouts=(everything,),
                use_local_input=True,
                output_layouts=(everything,),
                desired_output_layouts=(stretch,),
            )
            return plan
        plan["mlp"] = join
        plan["mlp.0"] = ColwiseParallel()
        plan["mlp.2"] = RowwiseParallel(output_layouts=stretch)
        return plan


class CausalAttention(nn.Module):
    """Multi-head attention of every position to itself and those before it.

    Args:
        width: Size of the residual stream.
        heads: Number of heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.size = width // heads
        # Head by head, so that a part of the rows is a part of the heads.
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.stretch = 0
        self.context: ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, width) to the same shape."""
        batch, length, _ = x.shape
        projected = self.queries_keys_values(x).view(batch, length, -1, 3, self.size)
        query, key, value = projected.permute(3, 0, 2, 1, 4)
        if self.context is None:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            key, value = gather_along(key, 2, self.context), gather_along(value, 2, self.context)
            places = torch.arange(key.shape[2], device=x.device)
            seen = places <= places[self.stretch * length : (self.stretch + 1) * length, None]
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        result: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, length, -1))
        return result

    def parallelize(self, topology: Topology) -> None:
        """Look at the keys and values of all stretches of the sequence."""
        topology.axes.share(self.heads, "tensor", what="the number of attention heads")
        self.stretch, self.context = topology.rank("context"), topology.group("context")


def _initialize(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)


def _is_here(model: nn.Module, name: str) -> bool:
    try:
        return not isinstance(model.get_submodule(name), nn.Identity)
    except AttributeError:
        return False

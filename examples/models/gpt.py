"""A decoder-only transformer in its plain form: pre-normalisation, causal attention, no bias (Radford et al., 2019)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"Expected `width` to be a multiple of `heads`. Received: width={width}, heads={heads}.")
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.apply(_initialize)
        for block in self.blocks:
            assert isinstance(block, Block)
            block.shrink_outputs(depth)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, input: Tensor) -> Tensor:
        """Return logits of shape (B, T, vocab_size) for int64 tokens of shape (B, T), T at most `context`."""
        x = self.tokens(input) + self.positions.weight[: input.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int, *, temperature: float = 1.0) -> Tensor:
        """Continue int64 tokens of shape (B, T) by `count` sampled ones; return (B, T + count)."""
        for _ in range(count):
            logits = self(tokens[:, -self.positions.num_embeddings :])[:, -1] / temperature
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], dim=1)
        return tokens


class Block(nn.Module):
    """Attention and a feed-forward network, each added to the residual stream.

    Args:
        width: Size of the residual stream.
        heads: Attention heads.
        dropout: Share of activations dropped.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = CausalAttention(width, heads)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, width) to the same shape."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        x = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return x

    def shrink_outputs(self, depth: int) -> None:
        """Scale what is added to the residual stream by 1/sqrt(2 depth), so that its variance does not grow with depth."""
        for layer in (self.attention.output, self.mlp[2]):
            nn.init.normal_(layer.get_parameter("weight"), std=0.02 / (2 * depth) ** 0.5)


class CausalAttention(nn.Module):
    """Multi-head attention of every position to itself and those before it.

    Args:
        width: Size of the residual stream.
        heads: Number of heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, width) to the same shape."""
        batch, length, width = x.shape
        projected = self.queries_keys_values(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, length, width))
        return result


def _initialize(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)

"""DFlash: a draft that writes a block of tokens at once (https://arxiv.org/abs/2602.06036).

- Context: C_s = norm(W_fc [h^(l1); ...; h^(lm)]_s), of layers of the target that are evenly spaced.
- A block at the anchor a is [x_a, MASK, ..., MASK] of b tokens, embedded by the target, at the rotary positions a, ..., a + b - 1.
  Output k > 0 predicts x_{a+k}, through the target's own head.
- In each layer queries come from the block alone; keys and values from the context and the block, by the same projections. A query
  sees the context s < a strictly, since the target has no hidden state of x_a yet, and its own block in both directions.

`forward` takes many anchors of a sequence at once; the blocks do not see each other.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .layers import DecoderLayer


class DFlashLayer(DecoderLayer):
    """A decoder layer that reads the context through its own keys and values.

    Args:
        width: d.
        heads: Attention heads.
        hidden: Width of the feed-forward network.
    """

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__(width, heads, hidden)
        self.attention_norm = nn.RMSNorm(width, eps=1e-6)

    def forward(self, states: Tensor, positions: Tensor, context: Tensor, sees: Tensor) -> Tensor:
        """Return the next states of all blocks, one behind the other.

        Args:
            states: (B, T, d).
            positions: Their places in the sequence, int64 (B, T).
            context: C, (B, S, d).
            sees: Which of context and blocks each one sees, bool (B, T, S + T).

        Returns:
            (B, T, d).
        """
        normed = self.attention_norm(states)
        places = torch.arange(context.shape[1], device=context.device)
        of_context, of_blocks = (
            self.attention.keys_values(context, places),
            self.attention.keys_values(normed, positions),
        )
        keys, values = (torch.cat(pair, 2) for pair in zip(of_context, of_blocks))
        attended = F.scaled_dot_product_attention(
            self.attention.queries(normed, positions), keys, values, attn_mask=sees[:, None]
        )
        return self.finish(states, attended)


class DFlash(nn.Module):
    """The draft. Embedding and head are the target's and not a part of it.

    Args:
        width: d, that of the target.
        layers: m, layers of the target that it reads.
        depth: Number of its layers.
        heads: Attention heads.
        hidden: Width of the feed-forward networks; `None` is 4 d.
    """

    def __init__(
        self,
        width: int,
        *,
        layers: int = 3,
        depth: int = 2,
        heads: int = 4,
        hidden: int | None = None,
    ) -> None:
        super().__init__()
        self.fuse = nn.Linear(layers * width, width, bias=False)
        self.context_norm, self.norm = (nn.RMSNorm(width, eps=1e-6) for _ in range(2))
        self.layers = nn.ModuleList(
            DFlashLayer(width, heads, hidden or 4 * width) for _ in range(depth)
        )

    def forward(self, features: Tensor, blocks: Tensor, anchors: Tensor) -> dict[str, Tensor]:
        """Return what the target's head makes predictions of.

        Args:
            features: Of the target, (B, S, layers * d). Those at and behind an anchor are not looked at for it.
            blocks: The embedded tokens [x_a, MASK, ...], (B, A, b, d).
            anchors: Where the blocks begin, int64 (B, A).

        Returns:
            `hidden`, (B, A, b - 1, d): at [:, :, k - 1] that of x_{a+k}.
        """
        block = blocks.shape[2]
        context = self.context_norm(self.fuse(features))
        positions = (anchors[..., None] + torch.arange(block, device=anchors.device)).flatten(1)
        sees = visible(anchors, block, features.shape[1])
        states = blocks.flatten(1, 2)
        for layer in self.layers:
            states = layer(states, positions, context, sees)
        return {"hidden": self.norm(states).unflatten(1, (-1, block))[:, :, 1:]}


def visible(anchors: Tensor, block: int, length: int) -> Tensor:
    """Return which of S positions of context and of all blocks each token of a block sees.

    Args:
        anchors: int64 (B, A).
        block: b.
        length: S.

    Returns:
        bool (B, A * b, S + A * b).
    """
    places = torch.arange(length, device=anchors.device)
    context = (places < anchors[..., None]).repeat_interleave(block, 1)
    number = torch.arange(anchors.shape[1], device=anchors.device).repeat_interleave(block)
    own = (number[:, None] == number).expand(len(anchors), -1, -1)
    return torch.cat([context, own], -1)


def decay_of(block: int) -> float:
    """Return gamma, after which weights in a block have fallen to 1/e: 7, 5 and 4 for blocks of 16, 10 and 8, as in the paper."""
    return {16: 7.0, 10: 5.0, 8: 4.0}.get(block, max(block / 2, 1.0))


def valid_anchors(supervised: Tensor) -> Tensor:
    """Return where a block may begin: behind some context, at a supervised token with another one behind it.

    Args:
        supervised: Whether a token is to be predicted, bool (S,).

    Returns:
        int64 (n,), in order; there may be none.
    """
    follows = torch.cat([supervised[1:], supervised.new_zeros(1)])
    starts = supervised & follows
    starts[:1] = False
    return starts.nonzero()[:, 0]


def draw_anchors(
    supervised: Tensor, count: int, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Return anchors of a sequence, and which of them are real.

    Where there are fewer than asked for, the rest is 0 and has no weight.

    Args:
        supervised: Whether a token is to be predicted, bool (S,).
        count: A.
        generator: Draws different ones; `None` takes evenly spaced ones, the same each time.

    Returns:
        int64 (A,) and bool (A,).
    """
    valid = valid_anchors(supervised)
    kept = min(count, len(valid))
    if generator is None:
        chosen = torch.arange(kept) * len(valid) // max(kept, 1)
    else:
        chosen = torch.randperm(len(valid), generator=generator)[:kept].sort().values
    anchors = torch.zeros(count, dtype=torch.int64)
    anchors[:kept] = valid[chosen]
    return anchors, torch.arange(count) < kept


def block_tokens(
    tokens: Tensor, supervised: Tensor, anchors: Tensor, real: Tensor, block: int
) -> tuple[Tensor, Tensor]:
    """Return the tokens of the blocks, and which of them are to be predicted.

    Args:
        tokens: int64 (B, S).
        supervised: Whether a token is to be predicted, bool (B, S).
        anchors: int64 (B, A).
        real: Which anchors are, bool (B, A).
        block: b.

    Returns:
        x_a, ..., x_{a+b-1} as int64 (B, A, b), and bool (B, A, b - 1) for all but the first. Behind the end the last token is repeated and
        counts nothing.
    """
    places = anchors[..., None] + torch.arange(block, device=anchors.device)
    inside = places < tokens.shape[1]
    places = places.clamp_max(tokens.shape[1] - 1)
    batch = torch.arange(len(tokens), device=tokens.device)[:, None, None]
    counts = (supervised[batch, places] & inside & real[..., None])[..., 1:]
    return tokens[batch, places], counts


def block_weights(counts: Tensor, gamma: float) -> Tensor:
    """Return what each position of a block weighs: exp(-(k - 1) / gamma) where it counts, k = 1, 2, ...

    Args:
        counts: bool (B, A, b - 1).
        gamma: See `decay_of`.
    """
    steps = torch.arange(counts.shape[-1], device=counts.device, dtype=torch.float64)
    return (counts * torch.exp(-steps / gamma)).float()


def weighted_cross_entropy(scores: Tensor, tokens: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean of the cross-entropy; 0 where nothing counts.

    Args:
        scores: (..., V).
        tokens: int64 (...).
        weights: (...).

    Returns:
        0-dim.
    """
    losses = F.cross_entropy(scores.flatten(0, -2), tokens.flatten(), reduction="none")
    total = (losses * weights.flatten().to(losses.dtype)).sum()
    return total / weights.sum().clamp_min(torch.finfo(weights.dtype).tiny).to(losses.dtype)

"""What the three draft models have in common: rotary positions, attention in pieces, a gated feed-forward network.

Shapes are written with B sequences, S positions, width d, H heads of D = d / H numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def rotate(vectors: Tensor, positions: Tensor, theta: float = 10000.0) -> Tensor:
    """Turn pairs of numbers by angles that grow with the position (RoPE, https://arxiv.org/abs/2104.09864; halves as in Llama).

    Args:
        vectors: Queries or keys, (..., T, D) with an even D.
        positions: Integers that broadcast to (..., T).
        theta: Base of the wave lengths.

    Returns:
        As `vectors`.
    """
    half = vectors.shape[-1] // 2
    # Angles of long sequences need more than the precision of the weights.
    precise = torch.promote_types(vectors.dtype, torch.float32)
    frequencies = theta ** (-torch.arange(half, device=vectors.device, dtype=precise) / half)
    angles = positions[..., None].to(precise) * frequencies
    cos, sin = angles.cos().to(vectors.dtype), angles.sin().to(vectors.dtype)
    first, second = vectors.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def shift_left(values: Tensor, places: int, dim: int = 1) -> Tensor:
    """Return the entries `places` further along a dimension, and zeros behind the end.

    Args:
        values: Any tensor.
        places: How far.
        dim: Along which dimension, not counted from the end.
    """
    length = values.shape[dim]
    kept = values.narrow(dim, min(places, length), max(length - places, 0))
    return F.pad(kept, [0, 0] * (values.ndim - 1 - dim) + [0, min(places, length)])


class Attention(nn.Module):
    """The projections of an attention; who sees whom is the caller's.

    Args:
        width: d, a multiple of `heads`.
        heads: H.
        inputs: Width of what queries, keys and values are made of; `None` is `width`.
        theta: Base of the rotary wave lengths.
    """

    def __init__(
        self, width: int, heads: int, *, inputs: int | None = None, theta: float = 10000.0
    ) -> None:
        super().__init__()
        if width % (2 * heads):
            raise ValueError(
                f"Expected a width of 2 * heads * n. Received: width={width}, heads={heads}. Change either."
            )
        self.heads = heads
        self.theta = theta
        self.query, self.key, self.value = (
            nn.Linear(inputs or width, width, bias=False) for _ in range(3)
        )
        self.output = nn.Linear(width, width, bias=False)

    def queries(self, inputs: Tensor, positions: Tensor) -> Tensor:
        """Return the rotated queries (B, H, T, D) of inputs (B, T, ...) at positions (T,) or (B, T)."""
        return rotate(self._divide(self.query(inputs)), _for_heads(positions), self.theta)

    def keys_values(self, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rotated keys and the values, each (B, H, T, D), of inputs (B, T, ...) at positions (T,) or (B, T)."""
        keys = rotate(self._divide(self.key(inputs)), _for_heads(positions), self.theta)
        return keys, self._divide(self.value(inputs))

    def merge(self, attended: Tensor) -> Tensor:
        """Return the output (B, T, d) of what the heads (B, H, T, D) have read."""
        output: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return output

    def _divide(self, projected: Tensor) -> Tensor:
        sizes = (*projected.shape[:2], self.heads, projected.shape[2] // self.heads)
        return projected.view(sizes).transpose(1, 2)


def _for_heads(positions: Tensor) -> Tensor:
    return positions if positions.ndim == 1 else positions[:, None]


class FeedForward(nn.Module):
    """W_down (SiLU(W_gate x) * W_up x), https://arxiv.org/abs/2002.05202.

    Args:
        width: d.
        hidden: Width between.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return outputs (..., d) of inputs (..., d)."""
        output: Tensor = self.down(F.silu(self.gate(inputs)) * self.up(inputs))
        return output


class DecoderLayer(nn.Module):
    """What comes behind the attention of a decoder layer; norms before it, and who sees whom, are the draft's.

    Args:
        width: d.
        heads: H.
        hidden: Width of the feed-forward network.
        inputs: Width of what queries, keys and values are made of; `None` is `width`.
    """

    def __init__(self, width: int, heads: int, hidden: int, *, inputs: int | None = None) -> None:
        super().__init__()
        self.attention = Attention(width, heads, inputs=inputs)
        self.hidden_norm = nn.RMSNorm(width, eps=1e-6)
        self.feed_forward = FeedForward(width, hidden)

    def finish(self, states: Tensor, attended: Tensor) -> Tensor:
        """Return the next states (B, T, d), given what was attended to (B, H, T, D)."""
        states = states + self.attention.merge(attended)
        following: Tensor = states + self.feed_forward(self.hidden_norm(states))
        return following

"""Domino: DFlash, and a small causal correction that knows what was drafted so far (https://arxiv.org/abs/2605.29707).

The scores of x_{a+k} are those of DFlash, W_head H_k, and Delta_k = W_2 SiLU(W_1 [H_k; s_{k-1}]) of a low rank, where s_{k-1} is the
state of a GRU that has read the embeddings of x_a, ..., x_{a+k-1}. In training these are known; in drafting the expensive part, H, is made
once for the block, and the correction token by token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .dflash import DFlash


class Domino(DFlash):
    """The draft.

    Args:
        width: d, that of the target.
        tokens: V, the target's vocabulary.
        state: Width of the state of the GRU.
        rank: That of the correction.
        layers: m, layers of the target that it reads.
        depth: Number of its layers.
        heads: Attention heads.
        hidden: Width of the feed-forward networks; `None` is 4 d.
    """

    def __init__(
        self,
        width: int,
        tokens: int,
        *,
        state: int = 64,
        rank: int = 32,
        layers: int = 3,
        depth: int = 2,
        heads: int = 4,
        hidden: int | None = None,
    ) -> None:
        super().__init__(width, layers=layers, depth=depth, heads=heads, hidden=hidden)
        self.memory = nn.GRU(width, state, batch_first=True)
        self.correction = nn.Sequential(
            nn.Linear(width + state, rank, bias=False),
            nn.SiLU(),
            nn.Linear(rank, tokens, bias=False),
        )
        # The draft begins as DFlash.
        last = self.correction[2]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)

    def forward(  # type: ignore[override]  # one argument more
        self, features: Tensor, blocks: Tensor, anchors: Tensor, known: Tensor
    ) -> dict[str, Tensor]:
        """Return what predictions are made of.

        Args:
            features: Of the target, (B, S, layers * d).
            blocks: The embedded tokens [x_a, MASK, ...], (B, A, b, d).
            anchors: Where the blocks begin, int64 (B, A).
            known: The embedded tokens x_a, ..., x_{a+b-2}, (B, A, b - 1, d).

        Returns:
            `hidden`, as that of DFlash, and `correction`, (B, A, b - 1, V): at [:, :, k - 1] Delta_k.
        """
        hidden = super().forward(features, blocks, anchors)["hidden"]
        states, _ = self.memory(known.flatten(0, 1))
        states = states.unflatten(0, known.shape[:2])
        return {"hidden": hidden, "correction": self.correction(torch.cat([hidden, states], -1))}

    def correct(
        self, hidden: Tensor, embedding: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the correction of the next token, one token at a time.

        Args:
            hidden: H_k, (B, d).
            embedding: That of x_{a+k-1}, the last known token, (B, d).
            state: What the last call returned, (1, B, state); `None` for the first token of a block.

        Returns:
            Delta_k, (B, V), and the state.
        """
        read, state = self.memory(embedding[:, None], state)
        assert state is not None
        return self.correction(torch.cat([hidden, read[:, 0]], -1)), state


def base_share(step: int, horizon: int) -> float:
    """Return how much of the loss is that of the scores without correction: clamp(1 - t / (T / 2), 0, 1).

    Args:
        step: t, updates made.
        horizon: T, updates of the whole run.
    """
    return min(max(1 - step / (0.5 * horizon), 0.0), 1.0)

"""The tokens that a draft model can say: the most frequent ones of its target's."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class DraftVocabulary(nn.Module):
    """Which tokens of the target the draft has, under the names that published EAGLE-3 checkpoints use.

    Token i of the draft is token `i + d2t[i]` of the target. The tokens of the draft are in the order of the target.

    Args:
        tokens: Tokens of the target, int64 of shape (v,), each once.
        size: Tokens of the target in all.

    Attributes:
        t2d: Whether the draft has a token of the target, bool (V,).
        d2t: What is added to a token of the draft, int64 (v,).
    """

    t2d: Tensor
    d2t: Tensor

    def __init__(self, tokens: Tensor, size: int) -> None:
        super().__init__()
        ordered = tokens.sort().values
        if (
            not len(tokens)
            or bool((ordered.diff() == 0).any())
            or not 0 <= int(ordered[0]) <= int(ordered[-1]) < size
        ):
            raise ValueError(
                f"Expected different tokens in [0, {size}). Received: {tokens.tolist()[:20]}... Leave out the others."
            )
        self.register_buffer(
            "t2d", torch.zeros(size, dtype=torch.bool).index_fill(0, ordered, True)
        )
        self.register_buffer("d2t", ordered - torch.arange(len(ordered)))

    @classmethod
    def most_frequent(cls, counts: Tensor, size: int) -> DraftVocabulary:
        """Return the vocabulary of the most frequent tokens; of equally frequent ones the first.

        Args:
            counts: How often each token of the target occurs, (V,).
            size: Tokens of the draft.
        """
        return cls(counts.argsort(descending=True, stable=True)[:size], len(counts))

    def __len__(self) -> int:
        return len(self.d2t)

    def to_target(self, tokens: Tensor) -> Tensor:
        """Return tokens of the draft (...) as tokens of the target."""
        return tokens + self.d2t[tokens]

    def contains(self, tokens: Tensor) -> Tensor:
        """Return for tokens of the target (...) whether the draft has them."""
        return self.t2d[tokens]

    def restrict(self, scores: Tensor) -> Tensor:
        """Return scores (..., V) of the target's tokens for the draft's tokens alone, (..., v)."""
        return scores[..., torch.arange(len(self), device=scores.device) + self.d2t]

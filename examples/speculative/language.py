"""A small synthetic language: each token is followed by one that it prefers, or by another."""

from __future__ import annotations

import torch
from torch import Tensor


class Language:
    """A Markov chain (https://en.wikipedia.org/wiki/Markov_chain) whose tokens have two successors each.

    The preferred ones go in a circle through all tokens; the others lead back to a few, which are therefore frequent. The last token never
    occurs, so that it is free as the mask of a block.

    Args:
        tokens: Tokens in all.
        preferred: Probability of the first successor.
        seed: Of the successors, which are the language.
    """

    def __init__(self, tokens: int = 64, preferred: float = 0.85, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.preferred = preferred
        self.mask_token = tokens - 1
        circle = torch.randperm(tokens - 1, generator=generator)
        first = torch.empty_like(circle).scatter_(0, circle, circle.roll(-1))
        frequent = circle[:: max(len(circle) // 8, 1)]
        second = frequent[torch.randint(len(frequent), (tokens - 1,), generator=generator)]
        self.successors = torch.stack([first, second])

    def sample(self, index: int, length: int, seed: int = 0) -> Tensor:
        """Return one sequence, int64 (length,), that is the same each time.

        Args:
            index: Which one.
            length: Its tokens.
            seed: Sequences of another seed are others.
        """
        generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
        choices = (torch.rand(length, generator=generator) >= self.preferred).long().tolist()
        token = int(torch.randint(len(self.successors[0]), (), generator=generator))
        successors, tokens = self.successors.tolist(), []
        for choice in choices:
            tokens.append(token)
            token = successors[choice][token]
        return torch.tensor(tokens)

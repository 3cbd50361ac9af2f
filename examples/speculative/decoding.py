"""Greedy decoding with a draft: the text is the target's own, and some tokens of it come at a time (https://arxiv.org/abs/2211.17192).

Each round the draft writes some tokens, the target reads all of them at once, and they are kept up to the first one that is not its own
choice, in the place of which its own choice stands. This is the plain form, which reads the whole text anew in each round; an engine keeps
a cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .dflash import DFlash
from .domino import Domino
from .eagle3 import Eagle3
from .target import TargetEnds, capture


def draft_tokens(
    draft: nn.Module, ends: TargetEnds, features: Tensor, tokens: Tensor, count: int
) -> Tensor:
    """Return what a draft takes for the next tokens.

    Args:
        draft: One of the three.
        ends: Those of its target.
        features: Of the target, for all tokens but the last one, (T - 1, m * d).
        tokens: The text so far, int64 (T,).
        count: How many; a block of DFlash has one token more.

    Returns:
        int64 (count,).
    """
    if isinstance(draft, Eagle3):
        return _step_by_step(draft, ends, features, tokens, count)
    assert isinstance(draft, DFlash)
    mask = tokens.new_full((count,), ends.tokens - 1)
    block = ends.embed(torch.cat([tokens[-1:], mask]))[None, None]
    anchor = torch.tensor([[len(tokens) - 1]], device=tokens.device)
    hidden = DFlash.forward(draft, features[None], block, anchor)["hidden"][0, 0]
    if not isinstance(draft, Domino):
        return ends.scores(hidden).argmax(-1)
    drafted, state = [tokens[-1:]], None
    for position in range(count):
        correction, state = draft.correct(hidden[position, None], ends.embed(drafted[-1]), state)
        drafted.append((ends.scores(hidden[position, None]) + correction).argmax(-1))
    return torch.cat(drafted[1:])


def _step_by_step(
    draft: Eagle3, ends: TargetEnds, features: Tensor, tokens: Tensor, count: int
) -> Tensor:
    scores, state, cache = draft.begin(features[None], ends.embed(tokens[1:])[None])
    drafted = [draft.vocabulary.to_target(scores.argmax(-1))]
    while len(drafted) < count:
        scores, state, cache = draft.extend(state, ends.embed(drafted[-1])[None], cache)
        drafted.append(draft.vocabulary.to_target(scores.argmax(-1)))
    return torch.cat(drafted)


@torch.no_grad()
def speculate(
    model: Any,
    draft: nn.Module,
    ends: TargetEnds,
    tokens: Tensor,
    *,
    layers: list[int],
    length: int,
    count: int,
) -> tuple[Tensor, list[int]]:
    """Write on greedily.

    Args:
        model: The target.
        draft: The draft, in evaluation mode.
        ends: Embedding and head of the target.
        tokens: A prompt of two tokens or more, int64 (T,).
        layers: Layers of the target that the draft reads.
        length: Tokens to end with.
        count: Tokens that are drafted in a round.

    Returns:
        The text, int64 (length,), and the tokens that each round has yielded, the target's own one included.
    """
    features = capture(model, tokens[None, :-1], layers)["features"][0]
    rounds = []
    while len(tokens) < length:
        drafted = draft_tokens(draft, ends, features, tokens, count)
        read = capture(model, torch.cat([tokens, drafted])[None], layers)
        choices = ends.scores(read["final"][0, len(tokens) - 1 :]).argmax(-1)
        accepted = int((drafted == choices[:-1]).cumprod(0).sum())
        tokens = torch.cat([tokens, choices[: accepted + 1]])
        # The last token is new to the target, as the first one of a block is.
        features = read["features"][0, : len(tokens) - 1]
        rounds.append(accepted + 1)
    return tokens[:length], rounds

"""The draft models as plain modules: the forward of training beside drafting one token at a time, and losses beside loops by hand."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from speculative.dflash import DFlash, block_tokens
from speculative.domino import Domino
from speculative.eagle3 import Eagle3, counting_positions, eagle3_loss, step_weights
from speculative.vocabulary import DraftVocabulary
from torch import Tensor, nn

BATCH, LENGTH, WIDTH, TOKENS, STEPS, BLOCK = 2, 12, 16, 23, 7, 4


@pytest.fixture(autouse=True)
def precise() -> object:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def random_draft(kind: str) -> Eagle3 | DFlash | Domino:
    vocabulary = DraftVocabulary(torch.tensor([20, 3, 5, 4, 11, 0, 8]), TOKENS)
    draft = {
        "eagle3": lambda: Eagle3(WIDTH, vocabulary, heads=2),
        "dflash": lambda: DFlash(WIDTH, heads=2),
        "domino": lambda: Domino(WIDTH, TOKENS, state=8, rank=5, heads=2),
    }[kind]()
    # Far from any initialisation under which parts cancel or vanish.
    for parameter in draft.parameters():
        nn.init.normal_(parameter, std=0.4)
    return draft


def embedded() -> tuple[Tensor, Tensor, nn.Embedding]:
    """Return tokens (B, S), features (B, S, 3 d) and an embedding."""
    return (
        torch.randint(TOKENS, (BATCH, LENGTH)),
        torch.randn(BATCH, LENGTH, 3 * WIDTH),
        nn.Embedding(TOKENS, WIDTH),
    )


def test_draft_vocabulary_maps_both_ways() -> None:
    counts = torch.tensor([5, 0, 9, 9, 1, 7])
    vocabulary = DraftVocabulary.most_frequent(counts, 3)
    assert vocabulary.to_target(torch.arange(3)).tolist() == [2, 3, 5]
    assert vocabulary.t2d.tolist() == [False, False, True, True, False, True]
    assert vocabulary.d2t.tolist() == [2, 2, 3]
    scores = torch.randn(4, 6)
    assert torch.equal(vocabulary.restrict(scores), scores[:, vocabulary.t2d])
    best = vocabulary.to_target(vocabulary.restrict(scores).argmax(-1))
    assert torch.equal(best, scores.masked_fill(~vocabulary.t2d, -math.inf).argmax(-1))
    assert vocabulary.contains(best).all()
    with pytest.raises(ValueError, match="different tokens"):
        DraftVocabulary(torch.tensor([1, 1]), 6)


def test_eagle3_trains_its_drafts_from_every_prefix() -> None:
    draft = random_draft("eagle3")
    assert isinstance(draft, Eagle3)
    tokens, features, embed = embedded()
    embeddings = embed(tokens)
    trained = draft(features, embeddings, STEPS)
    compared = 0
    for end in range(LENGTH - 1):
        scores, state, cache = draft.begin(features[:, : end + 1], embeddings[:, 1 : end + 2])
        for step in range(STEPS):
            torch.testing.assert_close(trained[:, step, end], scores, rtol=0, atol=1e-12)
            compared += 1
            following = end + 2 + step
            if following == LENGTH:
                break
            scores, state, cache = draft.extend(state, embeddings[:, following, None], cache)
    assert compared == 5 * 7 + sum(range(1, 7))


def test_eagle3_loss_equals_a_loop_over_positions() -> None:
    draft: Any = random_draft("eagle3")
    tokens, features, embed = embedded()
    supervised, target = torch.rand(BATCH, LENGTH) < 0.7, torch.randn(BATCH, LENGTH, TOKENS)
    kept = draft.vocabulary.t2d
    target[..., kept] += 1.0  # else hardly a choice of the target would be among the draft's tokens
    best = target.argmax(-1)
    weights = step_weights(counting_positions(supervised, best, draft.vocabulary, STEPS))
    scores = draft(features, embed(tokens), STEPS).detach()
    loss = eagle3_loss(scores, draft.vocabulary.restrict(target).log_softmax(-1), weights)
    total, norm = torch.zeros(()), 0.0
    for sample, end, step in itertools.product(range(BATCH), range(LENGTH - 1), range(STEPS)):
        place = end + 1 + step  # where the target predicts the same token
        if place + 1 < LENGTH and supervised[sample, place + 1] and kept[best[sample, place]]:
            probabilities = target[sample, place][kept].softmax(0)
            total -= 0.8**step * (probabilities * scores[sample, step, end].log_softmax(0)).sum()
            norm += 0.8**step
    assert norm > 3
    torch.testing.assert_close(
        loss, total * sum(0.8**step for step in range(STEPS)) / norm, rtol=1e-6, atol=0
    )


def test_dflash_makes_many_anchors_as_one_at_a_time() -> None:
    draft = random_draft("dflash")
    _, features, _ = embedded()
    anchors = torch.tensor([[1, 4, 5, 8], [2, 3, 7, 0]])
    blocks = torch.randn(BATCH, 4, BLOCK, WIDTH)
    together = draft(features, blocks, anchors)["hidden"]
    for sample in range(BATCH):
        for number, anchor in enumerate(anchors[sample].tolist()):
            row = slice(sample, sample + 1)
            # What the target has at the time of drafting: nothing of the anchor, nothing behind it.
            alone = draft(
                features[row, :anchor], blocks[row, number, None], anchors[row, number, None]
            )["hidden"]
            torch.testing.assert_close(together[sample, number], alone[0, 0], rtol=0, atol=1e-12)


def test_domino_corrects_in_training_as_token_by_token() -> None:
    draft = random_draft("domino")
    assert isinstance(draft, Domino)
    tokens, features, embed = embedded()
    anchors = torch.tensor([[1, 4, 6], [2, 3, 7]])
    chosen, _ = block_tokens(
        tokens,
        torch.ones_like(tokens, dtype=torch.bool),
        anchors,
        torch.ones_like(anchors, dtype=torch.bool),
        BLOCK,
    )
    blocks = torch.randn(BATCH, 3, BLOCK, WIDTH)
    pred = draft(features, blocks, anchors, embed(chosen[..., :-1]))
    base = DFlash.forward(draft, features, blocks, anchors)["hidden"]
    assert torch.equal(pred["hidden"], base)
    assert pred["correction"].abs().max() > 0.1
    for number, anchor in enumerate(anchors.T):
        state = None
        for k in range(1, BLOCK):
            # What is drafted is fed back; here it is what stands in the sequence.
            token = tokens[torch.arange(BATCH), anchor + k - 1]
            correction, state = draft.correct(base[:, number, k - 1], embed(token), state)
            torch.testing.assert_close(
                pred["correction"][:, number, k - 1], correction, rtol=0, atol=1e-12
            )

"""EAGLE-3: a draft of one decoder layer that reads three layers of its target (https://arxiv.org/abs/2503.01840).

With f_t = [h^(low); h^(middle); h^(high)]_t, the hidden states of the target at position t, and u^0_t = g_t = W_fc f_t:

- Step j = 0, 1, ... at position t reads the token x_{t+1+j} and the state u^j_t, and has the rotary position t + j.
  Its layer reads [norm(embed(x_{t+1+j})); norm(u^j_t)] for queries, keys and values, adds what it attends to to u^j_t, then a feed-forward
  network; what comes out is u^{j+1}_t. A norm and a head over the draft's vocabulary make of it the scores of x_{t+2+j}.
- It sees the keys of step 0 at s <= t, and of the later steps its own, at t. That is what the draft sees when it goes on by itself from a
  prefix that ends at t: the target has made features for the prefix only, and beyond it the draft reads its own states.

`forward` makes all steps at all positions at once (the training-time test of the paper); `begin` and `extend` go token by token with a
cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .layers import DecoderLayer, shift_left
from .vocabulary import DraftVocabulary


@dataclass(frozen=True)
class Cache:
    """What a draft that goes token by token has seen.

    Attributes:
        keys: (B, H, T, D).
        values: (B, H, T, D).
    """

    keys: Tensor
    values: Tensor

    @property
    def length(self) -> int:
        """T, which is the rotary position of the next token."""
        return self.keys.shape[2]

    def with_more(self, keys: Tensor, values: Tensor) -> Cache:
        """Return the cache with further positions."""
        return Cache(torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2))


class Eagle3Layer(DecoderLayer):
    """The decoder layer, in the two pieces around its attention.

    Args:
        width: d.
        heads: Attention heads.
        hidden: Width of the feed-forward network.
    """

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__(width, heads, hidden, inputs=2 * width)
        self.embedding_norm, self.state_norm = (nn.RMSNorm(width, eps=1e-6) for _ in range(2))

    def project(
        self, states: Tensor, embeddings: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values (B, H, T, D) of states and embeddings (B, T, d) at positions (T,)."""
        inputs = torch.cat([self.embedding_norm(embeddings), self.state_norm(states)], -1)
        return self.attention.queries(inputs, positions), *self.attention.keys_values(
            inputs, positions
        )


class Eagle3(nn.Module):
    """The draft. The embedding is the target's and not a part of it: callers hand over embedded tokens.

    Args:
        width: d, that of the target.
        vocabulary: The tokens that it can say.
        layers: Layers of the target that it reads.
        heads: Attention heads.
        hidden: Width of the feed-forward network; `None` is 4 d.
    """

    def __init__(
        self,
        width: int,
        vocabulary: DraftVocabulary,
        *,
        layers: int = 3,
        heads: int = 4,
        hidden: int | None = None,
    ) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.fuse = nn.Linear(layers * width, width, bias=False)
        self.layer = Eagle3Layer(width, heads, hidden or 4 * width)
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, len(vocabulary), bias=False)

    def forward(self, features: Tensor, embeddings: Tensor, steps: int = 7) -> Tensor:
        """Return the scores of all steps at all positions.

        Args:
            features: f, (B, S, layers * d).
            embeddings: embed(x), (B, S, d).
            steps: K.

        Returns:
            (B, K, S, v): at [:, j, t] those of token t + 2 + j. What would need a token behind the end means nothing.
        """
        states = self.fuse(features)
        own: list[tuple[Tensor, Tensor]] = []
        scores = []
        for step in range(steps):
            positions = torch.arange(features.shape[1], device=features.device) + step
            queries, keys, values = self.layer.project(
                states, shift_left(embeddings, 1 + step), positions
            )
            own.append((keys, values))
            states = self.layer.finish(states, attend_to_prefix_and_own(queries, own))
            scores.append(self.head(self.norm(states)))
        return torch.stack(scores, 1)

    def begin(self, features: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor, Cache]:
        """Read a prefix of T positions, and the token behind it.

        Args:
            features: f of the prefix, (B, T, layers * d).
            embeddings: embed(x_1), ..., embed(x_T): those of one position further, (B, T, d).

        Returns:
            Scores (B, v) of token T + 1, the state (B, 1, d) and the cache with which `extend` goes on.
        """
        states = self.fuse(features)
        queries, keys, values = self.layer.project(
            states, embeddings, torch.arange(features.shape[1], device=features.device)
        )
        states = self.layer.finish(states, attend_to_prefix_and_own(queries, [(keys, values)]))[
            :, -1:
        ]
        return self.head(self.norm(states))[:, 0], states, Cache(keys, values)

    def extend(
        self, state: Tensor, embedding: Tensor, cache: Cache
    ) -> tuple[Tensor, Tensor, Cache]:
        """Read one token more, as a rule the one that the last scores have brought about.

        Args:
            state: (B, 1, d), as `begin` or `extend` returned it.
            embedding: embed of the token, (B, 1, d).
            cache: As it was returned with the state.

        Returns:
            Scores (B, v) of the next token, its state and cache.
        """
        queries, keys, values = self.layer.project(
            state, embedding, torch.tensor([cache.length], device=state.device)
        )
        cache = cache.with_more(keys, values)
        attended = nn.functional.scaled_dot_product_attention(queries, cache.keys, cache.values)
        state = self.layer.finish(state, attended)
        return self.head(self.norm(state))[:, 0], state, cache


def attend_to_prefix_and_own(queries: Tensor, steps: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return what each position reads of the keys of step 0 up to itself, and of its own keys of the later steps.

    Args:
        queries: Those of the last step, (B, H, S, D).
        steps: Keys and values of each step so far, (B, H, S, D).

    Returns:
        (B, H, S, D).
    """
    (keys, values), later = steps[0], steps[1:]
    length = queries.shape[2]
    prefix = queries @ keys.transpose(-1, -2)
    hidden = torch.ones(length, length, dtype=torch.bool, device=queries.device).triu(1)
    scores = [
        prefix.masked_fill(hidden, -torch.inf),
        *((queries * own).sum(-1, keepdim=True) for own, _ in later),
    ]
    shares = torch.softmax(torch.cat(scores, -1) * queries.shape[-1] ** -0.5, -1)
    attended = shares[..., :length] @ values
    for number, (_, own_values) in enumerate(later):
        attended = attended + shares[..., length + number, None] * own_values
    return attended


def counting_positions(
    supervised: Tensor, best: Tensor, vocabulary: DraftVocabulary, steps: int
) -> Tensor:
    """Return which positions count in each step: what is predicted is supervised, and the target's choice is a token that the draft has.

    Args:
        supervised: Whether a token is to be predicted, bool (B, S).
        best: The token that the target would put behind each position, int64 (B, S).
        vocabulary: The draft's tokens.
        steps: K.

    Returns:
        bool (B, K, S).
    """
    counts = shift_left(supervised, 1) & vocabulary.contains(best)
    return at_steps(counts, steps)


def at_steps(values: Tensor, steps: int) -> Tensor:
    """Return (B, K, S, ...) of values (B, S, ...): at [:, j, t] the one at t + 1 + j, where the target predicts what step j does."""
    return torch.stack([shift_left(values, 1 + step) for step in range(steps)], 1)


def step_weights(counts: Tensor, decay: float = 0.8) -> Tensor:
    """Return what each position weighs: decay^j / sum_i decay^i where it counts, so that a position that counts in every step weighs 1.

    Args:
        counts: bool (B, K, S).
        decay: Of one step to the next.
    """
    shares = decay ** torch.arange(counts.shape[1], device=counts.device, dtype=torch.float64)
    return (counts * (shares / shares.sum())[None, :, None]).float()


def eagle3_loss(scores: Tensor, teacher: Tensor, weights: Tensor, decay: float = 0.8) -> Tensor:
    """Return sum_j decay^j times the mean cross-entropy with the teacher; where steps count unequally many positions, all have one mean.

    With the weights of `step_weights` as those of the batch, parts of a batch add up to the loss of the whole.

    Args:
        scores: The draft's, (B, K, S, v).
        teacher: Logarithms of the target's probabilities, restricted to the draft's vocabulary and renormalised, (B, S, v).
        weights: What each position weighs, (B, K, S).
        decay: Of one step to the next.

    Returns:
        0-dim; 0 where nothing counts.
    """
    total = scores.new_zeros(())
    # One step at a time: the teacher of all of them at once would be K times as large.
    for step in range(scores.shape[1]):
        weight = weights[:, step].to(scores.dtype)
        crossed = -(shift_left(teacher, 1 + step).exp() * scores[:, step].log_softmax(-1)).sum(-1)
        total = total + (weight * crossed).sum()
    scale = sum(decay**step for step in range(scores.shape[1]))
    return scale * total / weights.sum().clamp_min(torch.finfo(weights.dtype).tiny).to(scores.dtype)

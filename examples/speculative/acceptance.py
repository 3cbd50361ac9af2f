"""How much of a draft its target accepts: sums and counts by position, divided once they are whole.

Greedily, a drafted token is accepted where it is the target's choice. Sampling, one drafted from q is accepted with the probability
min(1, p / q), which in the mean is sum_v min(p(v), q(v)) (https://arxiv.org/abs/2211.17192).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor


def expected_acceptance(target: Tensor, draft: Tensor) -> Tensor:
    """Return sum_v min(p(v), q(v)).

    Args:
        target: p, probabilities (..., V), or a part of them where the draft has a part of the tokens.
        draft: q, probabilities of the same tokens.

    Returns:
        (...), in [0, 1].
    """
    return target.minimum(draft).sum(-1)


def position_sums(values: Tensor, counts: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return sum and count at each drafted position, K pairs of 0-dim float64.

    Args:
        values: Accepted or not, or by how much, (B, K, ...).
        counts: Which ones count, bool (B, K, ...).
    """
    values, counts = (tensor.double().transpose(0, 1).flatten(1) for tensor in (values, counts))
    return list(zip((values * counts).sum(1), counts.sum(1)))


def acceptance_length(rates: Sequence[float]) -> float:
    """Return the tokens that a round yields in the mean, 1 + sum_k prod_{i <= k} rate_i.

    These are the target's own token, and the drafted ones before the first refusal.

    Args:
        rates: At each position, over all samples and ranks.
    """
    length, reached = 1.0, 1.0
    for rate in rates:
        reached *= rate
        length += reached
    return length


def lengths(figures: Mapping[str, float], positions: int) -> dict[str, float]:
    """Return `acceptance_length` and `expected_length` of the means `accepted_1`, `expected_1`, ...

    Args:
        figures: Means over all ranks.
        positions: K.
    """
    found = {}
    for name, length in (("accepted", "acceptance_length"), ("expected", "expected_length")):
        rates = [
            figures[f"{name}_{position}"]
            for position in range(1, positions + 1)
            if f"{name}_{position}" in figures
        ]
        if rates:
            found[length] = acceptance_length(rates)
    return found

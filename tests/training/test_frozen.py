"""Frozen weights are known again by their bits and the places of these, without a runner."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from danling.training.frozen import FrozenWeights, bit_sum


def frozen_line() -> tuple[nn.Parameter, FrozenWeights]:
    weight = nn.Parameter(torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), requires_grad=False)
    return weight, FrozenWeights(lambda: [("weight", weight)])


@pytest.mark.parametrize("permutation", ["two rows", "two values", "two pairs of values"])
def test_values_that_change_places_within_a_frozen_weight_are_named(permutation: str) -> None:
    weight, frozen = frozen_line()
    frozen.identity()
    if permutation == "two rows":
        weight.data = weight.data[[1, 0, *range(2, 8)]]
    else:
        flat = weight.data.view(-1)
        if permutation == "two pairs of values":
            flat[:4] = torch.tensor([1.0, 2.0, 2.0, 1.0])
            frozen = FrozenWeights(lambda: [("weight", weight)])
            frozen.identity()
        # The second pair moves the other way round: factors on a line would not see it.
        places = [1, 0, 3, 2] if permutation == "two pairs of values" else [1, 0, 2, 3]
        flat[:4] = flat[:4][places]
    with pytest.raises(ValueError, match="Received: other values of weight"):
        frozen.identity()


def test_a_frozen_weight_that_stays_is_no_error_and_keeps_its_digest() -> None:
    _, frozen = frozen_line()
    assert frozen.identity() == frozen.identity()


def reference(values: list[int], factors: list[int]) -> int:
    total = sum(value * factor for value, factor in zip(values, factors, strict=True)) % 2**64
    return total - 2**64 if total >= 2**63 else total


@pytest.mark.parametrize(
    ("dtype", "integers"),
    [
        (torch.bfloat16, torch.int16),
        (torch.float32, torch.int32),
        (torch.float64, torch.int64),
        (torch.bool, torch.uint8),
    ],
)
def test_the_sum_is_that_of_the_bits_times_an_odd_number_of_their_place(
    dtype: torch.dtype, integers: torch.dtype
) -> None:
    tensor = (torch.randn(40, generator=torch.Generator().manual_seed(2)) * 3).to(dtype)
    factors = [bit_sum(one_at(place)) for place in range(40)]
    assert len(set(factors)) == 40 and all(factor % 2 for factor in factors)
    assert bit_sum(tensor) == reference(tensor.view(integers).tolist(), factors)


def one_at(place: int) -> Tensor:
    return torch.zeros(40, dtype=torch.int64).index_fill_(0, torch.tensor(place), 1)


def test_pieces_of_a_large_weight_that_change_places_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("danling.training.frozen._PIECE", 4)
    first, second, rest = torch.arange(4.0), torch.arange(4.0, 8), torch.ones(3)
    sums = {
        bit_sum(torch.cat(parts)) for parts in ([first, second, rest], [second, first, rest], [first, rest, second])
    }
    assert len(sums) == 3


def test_a_weight_of_no_values_has_a_sum() -> None:
    assert bit_sum(torch.empty(0)) == 0

"""What a batch is made of by default."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from danling.data.collation import collate

Pair = namedtuple("Pair", ["x", "y"])


@pytest.mark.parametrize(
    "samples",
    [
        [(torch.rand(3), torch.tensor(1)), (torch.rand(3), torch.tensor(2))],
        [(torch.rand(3), 1, 0.5, "a"), (torch.rand(3), 2, 1.5, "b")],
        [(torch.rand(3), (torch.rand(2), {"z": torch.rand(1)}))] * 3,
        [((torch.rand(3),),)] * 2,
        [Pair(torch.rand(3), 1)] * 2,
        [[torch.rand(3), 1]] * 2,
        [(torch.rand(3), 1), [torch.rand(3), 2]],
        [torch.rand(3)] * 2,
        [{"x": torch.rand(3)}] * 2,
        [()] * 2,
    ],
)
def test_batch_equals_the_one_of_torch(samples: list[Any]) -> None:
    (found, of_found), (expected, of_expected) = (
        tree_flatten(collate(samples)),
        tree_flatten(default_collate(samples)),
    )
    assert of_found == of_expected
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


@pytest.mark.parametrize(
    "samples",
    [
        [(1, 2), (1, 2, 3)],
        [(1, 2), 3],
        [(torch.rand(2),), (torch.rand(3),)],
        [(object(),), (object(),)],
        [],
    ],
)
def test_mismatched_samples_raise_the_error_of_torch(samples: list[Any]) -> None:
    with pytest.raises(Exception) as expected:
        default_collate(samples)
    with pytest.raises(type(expected.value)) as found:
        collate(samples)
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("kind", [tuple, object])
def test_collate_function_added_for_tuples_is_called(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(default_collate_fn_map, kind, lambda samples, **_: len(samples))
    assert collate([(1, 2)] * 3) == 3

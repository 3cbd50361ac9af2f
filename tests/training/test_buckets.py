"""Tensors in few collectives: every tensor once, of one kind, within a bound, and back in its place."""

from __future__ import annotations

import torch
from torch import Tensor

from danling.utils.tensors import bucketed, flattened, scatter


def test_every_tensor_is_in_one_list_of_its_kind_within_the_bound() -> None:
    sizes = [3, 9, 2, 4, 40, 1, 8]
    tensors = [
        torch.zeros(size, dtype=torch.float64 if i % 3 == 0 else torch.float32)
        for i, size in enumerate(sizes)
    ]
    buckets = bucketed(tensors, lambda tensor: tensor.numel() % 2, limit=64)
    assert sorted(id(tensor) for bucket in buckets for tensor in bucket) == sorted(map(id, tensors))
    for bucket in buckets:
        assert len({(tensor.dtype, tensor.numel() % 2) for tensor in bucket}) == 1
        assert (
            len(bucket) == 1
            or sum(tensor.numel() * tensor.element_size() for tensor in bucket) <= 64
        )
    assert bucketed([]) == []


def test_flattened_tensors_come_back_in_their_place() -> None:
    tensors = [torch.arange(6.0).view(2, 3), torch.tensor(7.0), torch.arange(4.0).view(2, 2).T]
    copies: list[Tensor] = [torch.zeros_like(tensor) for tensor in tensors]
    flat = flattened(tensors)
    assert flat.shape == (11,)
    scatter(torch.cat([flat, torch.ones(2)]), copies)
    assert all(torch.equal(copy, tensor) for copy, tensor in zip(copies, tensors, strict=True))

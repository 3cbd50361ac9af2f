"""A snapshot holds the values of its moment, in memory that is used again, and plain types only."""

from __future__ import annotations

import enum

import numpy
import pytest
import torch

from danling.checkpoints import CheckpointError
from danling.checkpoints.manager import SnapshotBuffers, to_host


def test_tied_tensors_stay_tied_and_slices_stay_small() -> None:
    weight = torch.randn(4, 4)
    copied, _ = SnapshotBuffers().copy(
        {"a": weight, "b": weight, "row": weight[1], "column": weight[:, 1], "empty": weight[:0]}
    )
    assert copied["a"] is copied["b"]
    assert copied["row"].untyped_storage().nbytes() == 16
    assert torch.equal(copied["column"], weight[:, 1])
    host = to_host({"row": weight[1], "whole": weight})
    assert host["row"].untyped_storage().nbytes() == 16
    assert host["whole"].data_ptr() == weight.data_ptr()


def test_memory_is_used_again_only_when_it_is_free() -> None:
    buffers, state = SnapshotBuffers(), {"a": torch.zeros(8), "b": torch.zeros(8)}
    first, release = buffers.copy(state)
    second, _ = buffers.copy(state)
    addresses = {tensor.data_ptr() for tensor in first.values()}
    assert not addresses & {tensor.data_ptr() for tensor in second.values()}
    release()
    third, _ = buffers.copy(state)
    assert addresses == {tensor.data_ptr() for tensor in third.values()}


def test_other_types_are_made_plain_or_refused_by_name() -> None:
    class Color(enum.IntEnum):
        RED = 2

    copied = to_host({"a": numpy.float64(0.5), "b": [Color.RED], "c": torch.bfloat16})
    assert type(copied["a"]) is float and type(copied["b"][0]) is int and copied["c"] is torch.bfloat16
    with pytest.raises(CheckpointError, match=r"state\.pool\.1.*\(object\)"):
        to_host({"state": {"pool": [1, object()]}})

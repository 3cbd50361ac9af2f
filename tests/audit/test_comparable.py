"""What is done to a program so that its layouts can be compared, without a process: dtypes, dropout, batch normalization, samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from danling.audit.comparable import ComparableCalls, cast_loose_tensors, divided_batch, hold_batch_norms


def test_tensors_of_several_dtypes_in_a_call_are_promoted() -> None:
    one, other = torch.randn(3, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="same dtype|expected"):
        F.linear(other, one)
    with ComparableCalls(torch.float64):
        assert torch.equal(F.linear(other, one), F.linear(other.double(), one))
        assert torch.equal(other @ one, other.double() @ one)
        assert torch.cat([one, other]).dtype == torch.float64
        assert F.cross_entropy(one, torch.tensor([0, 1, 2]), weight=other[0].abs()).dtype == torch.float64
        # What is written to stays what it is, and so does what meets nothing else.
        written = other.clone()
        written.add_(one)
        written[0] = one[0]
        assert written.dtype == torch.float32 and (other @ other).dtype == torch.float32
    with ComparableCalls(None), pytest.raises(RuntimeError, match="same dtype|expected"):
        F.linear(other, one)


@pytest.mark.parametrize(
    "drop",
    [
        lambda x: F.dropout(x, 0.5),
        lambda x: F.dropout(x, p=0.5, training=True),
        lambda x: F.dropout1d(x, 0.5),
        lambda x: F.alpha_dropout(x, 0.5, True),
        lambda x: torch.dropout(x, 0.5, True),
        lambda x: F.scaled_dot_product_attention(x, x, x, None, 0.5),
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    ],
)
def test_dropout_that_a_forward_calls_is_off(drop: Any) -> None:
    x, before = torch.ones(2, 8, 8), torch.get_rng_state()
    with ComparableCalls(None) as calls:
        assert torch.equal(drop(x), torch.ones_like(x)) and calls.dropped
    assert torch.equal(torch.get_rng_state(), before)
    with ComparableCalls(None) as calls:
        assert torch.equal(F.dropout(x, 0.5, training=False), x) and not calls.dropped


def test_the_coarsest_dtype_on_the_way_to_a_gradient_is_noted() -> None:
    weight = torch.randn(3, dtype=torch.float64, requires_grad=True)
    with ComparableCalls(torch.float64) as calls:
        (weight * torch.ones(3, dtype=torch.float32).double()).sum().float()
        assert calls.eps == 0.0  # as long as nobody looks
        calls.looks = True
        (weight.detach().float() * 2, (weight * 2).sum())
        assert calls.eps == torch.finfo(torch.float64).eps
        (weight * 2).float()
        assert calls.eps == torch.finfo(torch.float32).eps


def test_tensors_that_are_neither_parameters_nor_buffers() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].rates, module[0].chosen = torch.ones(2), torch.ones(2, dtype=torch.int64)
    cast_loose_tensors(module, torch.float64)
    assert (module[0].rates.dtype, module[0].chosen.dtype) == (torch.float64, torch.int64)


def test_batch_norms_with_running_statistics() -> None:
    kept = [nn.BatchNorm1d(2), nn.SyncBatchNorm(2)]
    assert hold_batch_norms(nn.Sequential(*kept, nn.BatchNorm1d(2, track_running_stats=False), nn.LayerNorm(2))) == kept


@pytest.mark.parametrize(
    ("batch", "samples", "replicas", "alone", "share"),
    [(8, None, 2, True, 8), (7, None, 2, True, 6), (8, 8, 2, False, 4), (1, None, 4, True, 4), (8, None, 1, True, 8)],
)
def test_batches_of_what_divides_itself_are_even(
    batch: int, samples: int | None, replicas: int, alone: bool, share: int
) -> None:
    settings = {"batch_size": batch, "num_workers": 2}
    known = {"samples": samples, "replicas": replicas, "alone": alone}
    found = divided_batch(settings, accum_steps=1, divides_itself=True, **known)  # type: ignore[arg-type]
    assert found == {"batch_size": share, "num_workers": 2}
    accumulated = None if samples is None else 3 * samples
    known["samples"] = accumulated
    assert divided_batch(settings, accum_steps=3, divides_itself=True, **known) == found  # type: ignore[arg-type]

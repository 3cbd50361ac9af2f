"""The checksum by which a loader that is read again is compared with what it gave before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from danling.data.user_loader import fingerprint


class Hostile:
    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


def test_it_tells_batches_apart_and_equal_ones_not() -> None:
    def batch(value: float) -> Any:
        return {"image": torch.full((4, 3, 8, 8), value), "names": ["a", "b"]}, torch.arange(4)

    assert fingerprint(batch(1.0)) == fingerprint(batch(1.0)) != fingerprint(batch(2.0))
    assert fingerprint(torch.zeros(2, 3)) != fingerprint(torch.zeros(3, 2))
    assert fingerprint(batch(1.0), fingerprint(batch(2.0))) != fingerprint(batch(1.0), fingerprint(batch(3.0)))
    assert fingerprint("a" * 100) != fingerprint("a" * 101)


@pytest.mark.parametrize(
    "data",
    [Hostile(), [Hostile()], torch.eye(3).to_sparse(), torch.empty(2, device="meta")],
    ids=["hostile", "within", "sparse", "meta"],
)
def test_what_cannot_be_looked_at_has_none(data: object) -> None:
    assert fingerprint(data) is None


def test_it_looks_at_few_values() -> None:
    class Number(float):
        looked_at = 0

        def __repr__(self) -> str:
            Number.looked_at += 1
            return super().__repr__()

    row = [Number(1.0)] * 1000
    for many in ([row] * 1000, dict.fromkeys(range(1000), row), row):
        Number.looked_at = 0
        assert fingerprint(many) is not None and 30 < Number.looked_at <= 64

"""Known mistakes of a layout, planted one by one into what ranks hold of a gradient: each is recognized, and rounding is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from danling.audit.gradient_causes import Finding, Held, Tolerance, compare
from danling.audit.gradient_record import Part

EXACT = Tolerance(1e-8, 1e-12)
ONE = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
DEGREES = {"shard": 1, "tensor": 2, "expert": 3}


def copies(make: Callable[[int], Tensor | None], degrees: Mapping[str, int] | None = None) -> list[Held]:
    """Return ranks that hold copies, over `tensor` by default."""
    axis, number = next(iter((degrees or {"tensor": 2}).items()))
    return [Held(rank, {"shard": 0, axis: rank}, Part((0, 0), (6, 4), make(rank))) for rank in range(number)]


def shards(make: Callable[[int, Tensor], Tensor], number: int = 2) -> list[Held]:
    """Return ranks that hold rows."""
    rows = ONE.chunk(number)
    size = len(rows[0])
    return [
        Held(rank, {"shard": 0, "tensor": rank}, Part((rank * size, 0), (6, 4), make(rank, part)))
        for rank, part in enumerate(rows)
    ]


def found(held: list[Held], one: Tensor | None = ONE, degrees: Mapping[str, int] = DEGREES) -> Finding | None:
    return compare("a.weight", one, held, degrees, EXACT)


PARTS = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

PLANTED: dict[str, tuple[list[Held], str, str]] = {
    "half": (
        copies(lambda r: ONE / 2),
        "scaled",
        "half of the gradient: not summed over tensor, or divided twice by its 2 ranks",
    ),
    "a third": (copies(lambda r: ONE / 3, {"expert": 3}), "scaled", "1/3 of the gradient: not summed over expert"),
    "twice": (
        copies(lambda r: ONE * 2),
        "scaled",
        "2 times the gradient: summed over tensor although each rank has all of it",
    ),
    "another factor": (copies(lambda r: ONE * 1.7), "scaled", "1.7 times the gradient"),
    "sign": (copies(lambda r: -ONE), "scaled", "the other sign"),
    "zero": (copies(lambda r: ONE * 0), "zero", "zero on all ranks"),
    "no gradient": (copies(lambda r: None), "missing", "no gradient on the layout"),
    "no parameter": ([], "absent", "no parameter of this name"),
    "parts": (copies(lambda r: PARTS if r else ONE - PARTS), "partial", "each rank of tensor has a part of it"),
    "one rank": (copies(lambda r: None if r else ONE), "one_rank", "whole on rank 0 and zero on rank 1"),
    "means": (copies(lambda r: ONE + (PARTS if r else -PARTS)), "not_averaged", "not averaged over tensor"),
    "one wrong": (
        copies(lambda r: 5 * ONE if r else ONE),
        "some_ranks",
        "right on rank 0 and 5 times the gradient on rank 1",
    ),
    "copies differ": (
        copies(lambda r: ONE + (r + 1) * PARTS),
        "replicas",
        "does not sum the gradient of its input over tensor",
    ),
    "not finite": (copies(lambda r: ONE * float("nan")), "nonfinite", "not finite on ranks 0 to 1"),
    "shards exchanged": (shards(lambda r, p: ONE.chunk(2)[1 - r]), "permuted", "rank 0 has the part of rank 1"),
    "one shard zero": (
        shards(lambda r, p: p * (1 - r)),
        "shards",
        "right in the part of rank 0, zero in that of rank 1",
    ),
    "one shard scaled": (shards(lambda r, p: p * (1 + 2 * r)), "shards", "3 times the gradient in that of rank 1"),
    "shards scaled": (
        shards(lambda r, p: p * (2 + r)),
        "shards",
        "another number in each part: 2 on rank 0, 3 on rank 1",
    ),
    "one shard wrong": (shards(lambda r, p: p + r * PARTS[:3]), "shards", "wrong in that of rank 1"),
    "rows": (
        copies(lambda r: torch.cat([ONE[:4], 0 * ONE[4:]])),
        "rows",
        "zero in 2 of 6 rows: 4 to 5; right in the others",
    ),
    "columns": (
        copies(lambda r: ONE * torch.tensor([1, 1, 1, 2.0])),
        "columns",
        "2 times the gradient in 1 of 4 columns: 3",
    ),
    "order": (copies(lambda r: ONE[[5, 4, 3, 0, 1, 2]]), "order", "rows are those of one process in another order"),
    "direction": (copies(lambda r: ONE + PARTS), "other", "another direction (cosine "),
    "shape": (
        [Held(0, {}, Part((0, 0), (3, 4), ONE[:3])), Held(1, {}, Part((0, 0), (3, 4), ONE[3:]))],
        "shape",
        "has the shape [3, 4] on the layout and [6, 4] in one process",
    ),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_recognized(mistake: str) -> None:
    held, kind, words = PLANTED[mistake]
    finding = found(held)
    assert finding is not None and finding.kind == kind and words in finding.cause, finding


def test_what_is_the_same_but_for_rounding_is_not_named() -> None:
    assert found(copies(lambda r: ONE * (1 + 1e-12))) is None
    assert found(shards(lambda r, p: p + 1e-13)) is None
    assert found(copies(lambda r: ONE * 0 + 1e-16), ONE * 0) is None  # 0 by its mathematics
    assert found(copies(lambda r: None), ONE * 0) is None and found(copies(lambda r: None), None) is None
    assert found(copies(lambda r: ONE * (1 + 1e-6))) is not None


def test_figures_of_a_finding() -> None:
    half = found(copies(lambda r: ONE / 2))
    assert half is not None and half.ratio == pytest.approx(0.5) and half.error == pytest.approx(0.5)
    assert half.one == pytest.approx(float(ONE.norm())) and half.layout == pytest.approx(float(ONE.norm()) / 2)
    extra = found(copies(lambda r: ONE), None)
    assert extra is not None and extra.kind == "extra" and extra.one is None


def test_parts_over_two_axes_are_told_from_parts_over_one() -> None:
    """Sums over both axes are needed, and neither alone is enough."""
    pieces = torch.randn(4, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    pieces[3] = ONE - pieces[:3].sum(0)
    places = [(0, 0), (0, 1), (1, 0), (1, 1)]
    held = [
        Held(rank, {"shard": a, "tensor": b}, Part((0, 0), (6, 4), pieces[rank])) for rank, (a, b) in enumerate(places)
    ]
    finding = found(held, degrees={"shard": 2, "tensor": 2})
    assert finding is not None and finding.kind == "partial" and "each rank of shard x tensor" in finding.cause


def test_a_factor_that_two_axes_may_have_names_both() -> None:
    finding = found(copies(lambda r: ONE / 2), degrees={"shard": 2, "tensor": 2})
    assert finding is not None and "not summed over shard or tensor" in finding.cause
    finding = found(copies(lambda r: ONE / 4), degrees={"shard": 2, "tensor": 2})
    assert finding is not None and "1/4 of the gradient: not summed over shard x tensor" in finding.cause

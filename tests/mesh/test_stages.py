from __future__ import annotations

import pytest

from danling.mesh.axes import Axes
from danling.mesh.pipeline import StagePlan


def axes(**degrees: int) -> Axes:
    """Axes of a world that they fill."""
    world = 1
    for degree in degrees.values():
        world *= degree
    return Axes.resolve(degrees, world_size=world)


@pytest.mark.parametrize(
    ("schedule", "listed", "stages"),
    [
        ("1F1B", 0, [(0,), (1,), (2,)]),
        ("ScheduleGPipe", 3, [(0,), (1,), (2,)]),
        ("Interleaved1F1B", 0, [(0, 3), (1, 4), (2, 5)]),
        ("interleaved1f1b", 9, [(0, 3, 6), (1, 4, 7), (2, 5, 8)]),
        ("ZBVZeroBubble", 0, [(0, 5), (1, 4), (2, 3)]),
    ],
)
def test_stages_by_rank(schedule: str, listed: int, stages: list[tuple[int, ...]]) -> None:
    # Pipeline ranks are the slowest of the mesh: with two replicas of each, ranks 0 and 1 hold the same.
    plans = [
        StagePlan.of(axes(pipeline=3, replicate=2), rank=r, schedule=schedule, listed=listed)
        for r in range(6)
    ]
    assert [plan.indices for plan in plans] == [each for each in stages for _ in range(2)]
    assert sorted(index for plan in plans[::2] for index in plan.indices) == list(
        range(plans[0].number)
    )
    for plan in plans:
        assert plan.has_first == (0 in plan.indices) and plan.has_last == (
            plan.number - 1 in plan.indices
        )


def test_model_unfit_for_a_pipeline_is_refused() -> None:
    with pytest.raises(ValueError, match=r"parallel.axes.pipeline > 1"):
        StagePlan.of(axes(shard=2), rank=0, schedule="1F1B", listed=2)
    with pytest.raises(ValueError, match="2 stages on each rank"):
        StagePlan.of(axes(pipeline=2), rank=0, schedule="ZBVZeroBubble", listed=2)
    with pytest.raises(ValueError, match="out of"):
        StagePlan.of(axes(pipeline=2), rank=0, schedule="2F2B")

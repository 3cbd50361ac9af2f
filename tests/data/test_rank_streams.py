"""The random streams of all ranks: which one a rank goes on with, and whether a run has drawn at all."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import pytest
import torch

from danling.data import capture_random_state, derive_seed, preserved_random_state, seed_streams
from danling.data.rank_streams import RankStreams, have_drawn, resume_stream, streams_by_index

CPU = torch.device("cpu")
SEED = 5


def stored(*, drawn: bool) -> dict[str, dict[str, object]]:
    """Return the streams of two ranks as a run of them saves them."""
    ranks = []
    for index in range(2):
        seed_streams(derive_seed(SEED, "forward", index))
        if drawn:
            torch.rand(3 + index)
        ranks.append((index, capture_random_state(CPU)))
    return streams_by_index(ranks)


def test_of_ranks_that_draw_the_same_the_first_one_counts() -> None:
    assert streams_by_index([(0, {"a": 1}), (1, {"a": 2}), (0, {"a": 3})]) == {"0": {"a": 1}, "1": {"a": 2}}


@pytest.mark.parametrize("drawn", [False, True])
def test_it_is_seen_whether_a_run_has_drawn(drawn: bool) -> None:
    with preserved_random_state(CPU):
        streams = stored(drawn=drawn)
        assert have_drawn(streams, seed=SEED, device=CPU) is drawn
        assert not have_drawn({}, seed=SEED, device=CPU)


def test_a_rank_goes_on_with_its_own_stream_and_a_new_one_is_seeded() -> None:
    with preserved_random_state(CPU):
        for drawn in (False, True):
            streams = stored(drawn=drawn)
            seed_streams(derive_seed(SEED, "forward", 1))
            if drawn:
                torch.rand(4)
            expected = torch.rand(5)
            seed_streams(99)
            resume_stream(streams, 1, seed=SEED, step=7, device=CPU)
            assert torch.equal(torch.rand(5), expected)
            # A third rank: as at the start of the run where nothing was drawn, else of the step.
            seed_streams(derive_seed(SEED, "resumed", 7, 2) if drawn else derive_seed(SEED, "forward", 2))
            expected = torch.rand(5)
            resume_stream(streams, 2, seed=SEED, step=7, device=CPU)
            assert torch.equal(torch.rand(5), expected)
        seed_streams(1)
        expected = torch.rand(2)
        seed_streams(1)
        resume_stream({}, 0, seed=SEED, step=7, device=CPU)
        assert torch.equal(torch.rand(2), expected)


def streams_of(index: int, layout: Mapping[str, int], number: int = 2) -> RankStreams:
    return RankStreams(
        place=lambda: index, number=lambda: number, layout=lambda: layout, seed=lambda: SEED, device=lambda: CPU
    )


def test_a_rank_begins_its_streams_by_its_index_and_captures_them() -> None:
    with preserved_random_state(CPU):
        captured = []
        for index in range(2):
            streams = streams_of(index, {"data": 2})
            streams.begin()
            captured.append(streams.capture())
        assert not have_drawn(streams_by_index(captured), seed=SEED, device=CPU)
        assert [index for index, _ in captured] == [0, 1]
        torch.rand(2)
        assert have_drawn(streams_by_index([streams.capture()]), seed=SEED, device=CPU)


def test_other_numbers_come_only_of_another_layout_in_a_run_that_draws() -> None:
    with preserved_random_state(CPU):
        streams = streams_of(0, {"data": 2})
        assert streams.layout == {"data": 2}
        assert streams.would_differ({"data": 3}, stored(drawn=True))
        assert not streams.would_differ({"data": 3}, stored(drawn=False))
        assert not streams.would_differ({"data": 2}, stored(drawn=True))
        assert not streams.would_differ(None, stored(drawn=True))


@pytest.mark.parametrize(
    ("drawn", "number", "speaks", "lines"), [(1, 4, 1, 1), (1, 4, 0, 0), (1, 2, 1, 0), (0, 4, 1, 0)]
)
def test_another_number_of_streams_is_told_once(
    drawn: int, number: int, speaks: int, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="danling")
    with preserved_random_state(CPU):
        found = stored(drawn=bool(drawn))
        streams_of(1, {}, number).resume(found, step=3, speaks=bool(speaks))
        assert torch.equal(capture_random_state(CPU)["torch"], torch.as_tensor(found["1"]["torch"]))
    assert len([line for line in caplog.messages if "holds random streams of 2 ranks" in line]) == lines

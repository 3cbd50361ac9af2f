"""What is said of updates that are left out, and of parameters that none of them moves."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from torch import nn

from danling.distributed import LocalDomain
from danling.training import NonFiniteError
from danling.training.component_checks import warn_of
from danling.training.coverage import ungraded_names
from danling.training.outcome import count_skip


@dataclass
class Counters:
    """Of a run."""

    global_step: int = 4
    skipped_updates: int = 7
    consecutive_skips: int = 0


def test_skips_are_counted_until_there_are_too_many_in_a_row(caplog: pytest.LogCaptureFixture) -> None:
    counters = Counters()
    for _ in range(2):
        count_skip(counters, "overflow", limit=2)
    assert (counters.skipped_updates, counters.consecutive_skips, counters.global_step) == (9, 2, 4)
    assert caplog.messages == ["Update 5 was skipped (overflow)."] * 2
    with pytest.raises(NonFiniteError, match="Received: 3 before step 5 .the last one: nonfinite"):
        count_skip(counters, "nonfinite", limit=2)
    count_skip(counters, "nonfinite", limit=None)
    assert counters.consecutive_skips == 4


class Pair(LocalDomain):
    """Two ranks, of which the other one says what it is told to."""

    def __init__(self, *theirs: object) -> None:
        super().__init__()
        self.theirs = list(theirs)

    def gather_objects(self, value: object) -> list[object]:
        """Return both."""
        return [value, self.theirs.pop(0)]


def test_a_parameter_that_another_rank_used_is_not_named() -> None:
    names = [name for name, _ in nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)).named_parameters()]
    assert ungraded_names([], names, LocalDomain()) == []
    assert ungraded_names(names[:2], names, LocalDomain()) == names[:2]
    # The other rank holds another parameter, which got none, and has used the first one.
    pair = Pair([names[1], "other"], {names[0]})
    assert ungraded_names(names[:2], names, pair) == [names[1], "other"]


def test_a_hint_that_cannot_be_made_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    warn_of(lambda: ["one", "two"])
    assert caplog.messages == ["one", "two"]
    warn_of(lambda: [str(1 // 0)])
    assert caplog.messages == ["one", "two"]

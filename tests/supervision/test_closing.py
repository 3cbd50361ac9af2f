"""What a run closes: the last one first, everything, once."""

from __future__ import annotations

import pytest

from danling.runners.parts import Closers


def test_everything_is_closed_once_in_reverse_and_an_error_keeps_nothing_open() -> None:
    closers, closed = Closers(), []

    def fail() -> None:
        closed.append("fails")
        raise OSError("full")

    closers.callback(closed.append, "first")
    closers.callback(fail)
    closers.callback(closed.append, "last")
    assert not closers.closed
    with pytest.raises(OSError, match="full"):
        closers.close()
    assert closed == ["last", "fails", "first"] and closers.closed
    closers.close()
    assert len(closed) == 3

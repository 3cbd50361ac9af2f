"""A canary for the tests of this directory: what is around a hostile directory is compared before and after each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.canary import look_at, make_canary


@pytest.fixture(autouse=True)
def canary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = make_canary(tmp_path_factory.mktemp("canary"))
    before = look_at(directory)
    yield directory
    assert look_at(directory) == before, "touched what is outside"

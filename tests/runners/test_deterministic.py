"""`deterministic`: what has to be set before the device is chosen."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.toys import Small, settings


class Watching(Small):
    """Notes the workspace of cuBLAS that the environment asks for when the process group is joined."""

    cublas: str | None

    def init_distributed(self) -> None:
        self.cublas = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
        super().init_distributed()


@pytest.mark.parametrize(
    ("deterministic", "given", "expected"),
    [(True, None, ":4096:8"), (True, ":16:8", ":16:8"), (False, None, None)],
)
def test_cublas_has_a_workspace_for_deterministic_products_before_the_device_is_chosen(
    deterministic: bool,
    given: str | None,
    expected: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "put back after the test")
    del os.environ["CUBLAS_WORKSPACE_CONFIG"]
    if given is not None:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = given
    with Watching(settings(tmp_path, deterministic=deterministic)) as runner:
        assert runner.cublas == expected

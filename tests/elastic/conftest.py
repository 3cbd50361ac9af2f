"""Elastic ranks need a torch whose process groups can be formed again; the protocol itself needs none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from danling.elastic.reconfigure import OLDEST, is_supported

_WITHOUT_GROUPS = (
    "test_agent.py",
    "test_mutations.py",
    "test_protocol.py",
    "test_coordinator.py",
    "test_refusals.py",
    "test_metrics_file.py",
    "test_member.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        of_here = Path(__file__).parent in item.path.parents
        if of_here and not is_supported() and item.path.name not in _WITHOUT_GROUPS:
            item.add_marker(
                pytest.mark.skip(reason=f"torch {torch.__version__}: elastic ranks need {OLDEST}")
            )

"""Hydra: settings composed of files and of the command line.

Library: hydra-core
Works: `examples/sweeps/composed.py`: groups, overrides, `--multirun`
Exact: the settings of a run; resume
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.programs import run_program

SWEEPS = Path(__file__).parents[2] / "examples" / "sweeps"


def test_run_has_the_settings_composed_by_hydra() -> None:
    pytest.importorskip("hydra")
    code, output = run_program(
        SWEEPS / "composed.py", "--multirun", "optim=adamw,sgd", "epochs=1", "model.width=16"
    )
    assert code == 0, output
    scores = re.findall(r"val accuracy (\S+) in (\S+)", output)
    assert len({place for _, place in scores}) == 2 and all(
        float(score) > 0.3 for score, _ in scores
    )
    kinds = [(Path(place) / "metadata/config.full.yaml").read_text() for _, place in scores]
    assert ["type: adamw" in kinds[0], "type: sgd" in kinds[1], "width: 16" in kinds[1]] == [
        True
    ] * 3
    again, resumed = run_program(
        SWEEPS / "composed.py", "optim=sgd", "epochs=2", "model.width=16", "auto_resume=true"
    )
    assert again == 0, resumed
    assert f"in {scores[1][1]}" in resumed and "Resumed from" in resumed

"""Checkpoints that versions of the past wrote in the middle of a run resume; see `fixtures/README.md`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from support.stored_runs import END, KINDS, MIDDLE, StoredRun, settings, weights

from danling.checkpoints.torch_files import CHANGED_SINCE, FORMAT_VERSION

FIXTURES = Path(__file__).parent / "fixtures"


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _resume(kind: str, source: str, root: str, draws: bool) -> dict[str, Any]:
    handler = _Lines()
    logging.getLogger("danling").addHandler(handler)
    with StoredRun(settings(kind, root, END, resume=source), draws=draws) as runner:
        assert runner.state.train.global_step == MIDDLE
        begun = {
            "seen": runner.seen,
            "history": list(runner.history),
            "total": runner.total.tolist(),
            "table": runner.table.tolist(),
            "counts": (runner.counts.steps, dict(runner.counts.by_class)),
            "calls": float(runner.unwrapped_model[0].calls),
            "frozen": [name for name, p in runner.named_parameters() if not p.requires_grad],
            "averages": sorted(runner.ema.weights),
            "rate": runner.optimizer.param_groups[0]["lr"],
        }
        runner.train()
        assert runner.state.train.global_step == END
        return {"begun": begun, "end": weights(runner), "seen": runner.seen, "lines": handler.lines}


@pytest.mark.parametrize(
    ("version", "kind", "draws"),
    [
        pytest.param(version, kind, draws, marks=pytest.mark.slow if further else ())
        for version in range(1, FORMAT_VERSION + 1)
        for kind in KINDS
        for draws in (False, True)
        for further in [draws and kind == "sharded" and version < FORMAT_VERSION]
    ],
)
def test_run_stopped_in_the_middle_resumes(
    version: int, kind: str, draws: bool, tmp_path: Path
) -> None:
    folder = FIXTURES / f"v{version}" / f"middle-{kind}"
    source = folder / ("latest.pth" if kind == "file" else "latest")
    found = run_processes(
        _resume, kind, str(source), str(tmp_path), draws, world_size=KINDS[kind], timeout=120
    )[0]
    begun = found["begun"]
    micro_batches = 2 * MIDDLE
    assert begun["seen"] == begun["counts"][0] == begun["calls"] == micro_batches
    assert begun["history"] == [float(number) for number in range(1, micro_batches + 1)]
    assert begun["total"] == [4.0, 4.0, 4.0] and begun["table"] == [8.0, 8.0, 8.0]
    assert begun["counts"][1] == {0: 6, 1: 6} and begun["frozen"] == ["2.bias"]
    assert {"0.mean", "1.weight", "5.bias"} <= set(begun["averages"])
    # The cosine of torch: 20 updates down from 0.01.
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    for _ in range(MIDDLE):
        optimizer.step()
        schedule.step()
    assert begun["rate"] == pytest.approx(optimizer.param_groups[0]["lr"])
    assert found["seen"] == 2 * END
    named = [line for line in found["lines"] if "format_version" in line]
    changes = [text for last, text in CHANGED_SINCE.items() if version <= last]
    assert len(named) == bool(changes) and all(text in named[0] for text in changes)
    if not draws:
        end = torch.load(folder / "end.pt", weights_only=True)
        assert found["end"].keys() == end.keys()
        for name, value in end.items():
            torch.testing.assert_close(found["end"][name], value, rtol=1e-5, atol=1e-6)

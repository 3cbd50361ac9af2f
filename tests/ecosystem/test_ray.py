"""Ray: workers that are started again, and a search that goes on.

Library: ray
Works: `examples/sweeps/workers.py` on Ray Train, `examples/sweeps/tune.py` on Ray Tune with ASHA
Exact: the weights of a run whose worker was killed; a trial that goes on, and its earlier scores
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.job import Job
from support.process_tree import descendants
from support.programs import number_in, run_program

SWEEPS = Path(__file__).parents[2] / "examples" / "sweeps"

# Ray starts a dozen processes, which takes about a minute on two cores.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    pytest.importorskip("ray")
    # Paths of its sockets are too long in a test's directory.
    place = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    yield {
        "RAY_TMPDIR": place,
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": str(SWEEPS.parents[1]),
    }
    shutil.rmtree(place, ignore_errors=True)


def test_dead_worker_is_started_again_and_the_run_ends_bitwise(environment: dict[str, str]) -> None:
    saved = Path("run/checkpoints/latest.pth")
    command = [sys.executable, str(SWEEPS / "workers.py"), "--workers", "2", "--epochs", "40"]
    with Job(command, environment=environment) as job:
        job.wait_until(saved.exists, timeout=240)
        workers = [
            pid
            for pid, command in descendants(job.pid).items()
            if command.startswith("ray::RayTrainWorker")
        ]
        os.kill(workers[-1], signal.SIGKILL)
        code, output = job.wait(300)
    assert code == 0, output
    assert re.search(r"Resumed from latest at step \d+, epoch [1-9]", output), output
    assert number_in(output, r"best val accuracy (\S+) in run") > 0.9
    Path("alone.py").write_text(
        f"import sys; sys.path.insert(0, {str(SWEEPS)!r})\n"
        "import danling as dl\n"
        "from digits_runner import Digits\n"
        "config = dl.RunnerConfig(seed=1, epochs=40, score_name='acc', dir='alone')\n"
        "config.merge({'dataloader': {'global_batch_size': 32}, 'optim': {'type': 'adamw', 'lr': 1e-2}, 'model': {'width': 64}})\n"
        "with Digits(config) as runner:\n"
        "    runner.train()\n"
    )
    code, output = run_program("alone.py", nproc_per_node=2)
    assert code == 0, output
    ends = [
        torch.load(f"{place}/checkpoints/latest.pth", weights_only=True)
        for place in ("run", "alone")
    ]
    assert all(
        torch.equal(value, ends[1]["model"][name]) for name, value in ends[0]["model"].items()
    )
    assert ends[0]["state"]["train"] == ends[1]["state"]["train"]


def test_killed_search_continues(environment: dict[str, str]) -> None:
    command = [sys.executable, str(SWEEPS / "tune.py"), "--trials", "3", "--epochs", "30"]
    trials = Path("search/runs/trials")
    with Job(command, environment=environment) as job:
        job.wait_until(lambda: any(trials.glob("*/checkpoints/ckpt-e000002.pth")), timeout=240)
        job.kill()
    before = list(trials.iterdir())
    with Job(command, environment=environment) as job:
        code, output = job.wait(400)
    assert code == 0, output
    assert number_in(output, r"best val accuracy (\S+) with") > 0.8 and " of 3 trials" in output
    assert len(list(trials.iterdir())) == 3, output
    logs = {
        place: "".join(file.read_text() for file in sorted(place.glob("logs/*.log")))
        for place in before
    }
    assert any("Resumed from latest" in log for log in logs.values()), logs

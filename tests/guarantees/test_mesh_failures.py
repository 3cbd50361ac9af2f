"""G10 on a mesh: a rank that is killed ends the job in seconds, and one that hangs is an error on the others."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.processes import ProcessFailure, run_outcomes
from support.programs import torchrun
from support.toys import settings

TESTS = Path(__file__).parents[1]

SCRIPT = """
import os, time
from support.layouts import LayoutRunner

class Trained(LayoutRunner):
    def train_step(self, data):
        time.sleep(0.02)
        return super().train_step(data)

config = {
    "stack": "parallel", "parallel": {"axes": {"pipeline": 2}}, "steps": 3000, "seed": 1, "log_interval": 5, "tensorboard": False,
    "optim": {"type": "sgd", "lr": 0.01}, "dataloader": {"batch_size": 2}, "checkpoint": {"interval": 5000},
    "evaluate_interval": 5000,
}
with Trained(config, model={}) as runner:
    print(f"rank {runner.rank} is process {os.getpid()}.", flush=True)
    runner.train()
"""


ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS), str(TESTS.parent / "examples")])
}


def test_a_killed_rank_ends_the_job() -> None:
    Path("job.py").write_text(SCRIPT)
    with torchrun("job.py", environment=ENVIRONMENT) as job:
        job.wait_for_output("step 5/3000", timeout=90)
        pids = dict(re.findall(r"rank (\d) is process (\d+)\.", job.output))
        os.kill(int(pids["1"]), signal.SIGKILL)
        exit_code, output = job.wait(timeout=10)
        assert exit_code == 1
        root_cause = output[output.rindex("Root Cause") :]
        assert "rank      : 1" in root_cause and "Signal 9 (SIGKILL)" in root_cause
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())


def hang(config: Mapping[str, Any]) -> None:
    import time

    from support.layouts import LayoutRunner

    class Hanging(LayoutRunner):
        def to_device(self, data: Any) -> Any:
            while self.rank == 1 and self.state.train.global_step == 2:
                time.sleep(60)
            return super().to_device(data)

    with Hanging(config, model={}) as runner:
        runner.train()


@pytest.mark.parametrize(
    "axes", [{"shard": 2}, pytest.param({"pipeline": 2}, marks=pytest.mark.slow)], ids=str
)
def test_the_timeout_of_training_reaches_the_groups_of_the_mesh(
    axes: dict[str, int], tmp_path: Path
) -> None:
    """The first update may take its time; then a rank that does not answer is an error on the others."""
    mesh = {"stack": "parallel", "parallel": {"axes": axes}, "comm": {"train_timeout_seconds": 2.0}}
    config = settings(tmp_path / "run", steps=5, dataloader={"batch_size": 2}, **mesh)
    waiting, sleeping = sorted(
        run_outcomes(hang, config, world_size=2, timeout=45, grace=1),
        key=lambda outcome: outcome.rank,
    )
    assert isinstance(waiting.error, RuntimeError) and "imed out" in str(waiting.error), waiting
    assert isinstance(sleeping.error, ProcessFailure)

"""The scripts that launch: a job that SLURM preempts, and two agents of torchrun that find each other."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from support.job import Finished, Job
from support.processes import free_port
from support.warm import variables

EXAMPLES = Path(__file__).parents[2] / "examples"

# SLURM itself does not run here. These do what its programs do for a job: start the tasks with their coordinates, pass a signal on to each
# of them, and answer with the highest exit code.
SRUN = """#!/bin/bash
for ((task = 0; task < SLURM_NTASKS; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=$task "$@" &
    tasks+=($!)
done
printf '%s\\n' "${tasks[@]}" > tasks
worst=0
for task in "${tasks[@]}"; do
    wait "$task"
    code=$?
    ((code > worst)) && worst=$code
done
exit "$worst"
"""
SCONTROL = """#!/bin/bash
case $1 in
show) echo 127.0.0.1 ;;
requeue) echo "$2" >> requeued ;;
esac
"""


@pytest.fixture
def slurm() -> dict[str, str]:
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        program = Path("bin") / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)
    # The script takes "python" from the environment that the job was submitted in.
    search = [str(Path("bin").resolve()), variables()["PATH"]]
    return {
        "PATH": os.pathsep.join(search),
        "SLURM_SUBMIT_DIR": str(EXAMPLES.parent),
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "node[1]",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }


def run_job(
    slurm: dict[str, str], *args: str, preempt_with: signal.Signals | None = None
) -> Finished:
    with Job(
        ["bash", str(EXAMPLES / "slurm" / "preemption.sbatch"), *args], environment=slurm
    ) as job:
        if preempt_with is not None:
            job.wait_for_output("epoch 2:")
            for task in Path("tasks").read_text().split():
                os.kill(int(task), preempt_with)
        return job.wait(100.0)


def test_a_preempted_job_saves_requeues_itself_and_goes_on(slurm: dict[str, str]) -> None:
    exit_code, output = run_job(slurm, "--epochs", "2000", preempt_with=signal.SIGUSR1)
    assert exit_code == 143, output
    assert Path("requeued").read_text() == "4711\n"
    stopped = re.search(r"Stopped by a signal at step (\d+); the full state is saved", output)
    assert stopped is not None, output

    step = int(stopped.group(1))
    epochs = step // 39 + 2
    exit_code, output = run_job({**slurm, "MASTER_PORT": str(free_port())}, "--epochs", str(epochs))
    assert exit_code == 0, output
    assert f"at step {step}" in output
    assert f"epoch {epochs}:" in output
    assert Path("requeued").read_text() == "4711\n"


def test_two_agents_make_one_run() -> None:
    head = f"127.0.0.1:{free_port()}"
    environment = {
        **variables(),
        "HEAD": head,
        "NNODES": "2",
        "LOCAL_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }
    command = [str(EXAMPLES / "multinode.sh"), str(EXAMPLES / "digits.py"), "--epochs", "2"]
    with (
        Job(command, environment=environment) as first,
        Job(command, environment=environment) as second,
    ):
        ends = [first.wait(100.0), second.wait(100.0)]
    assert [end.exit_code for end in ends] == [0, 0], ends
    said = [end.output for end in ends if "test accuracy" in end.output]
    assert len(said) == 1, ends
    assert "epoch 2:" in said[0]

"""The doctor's own training, kill and resume; and that it sees what is wrong."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest
from support import device
from support.job import Job
from support.recorded import danling

from danling.cli import doctor


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_doctor_kills_and_resumes_bitwise() -> None:
    done = danling("doctor", "--json", "--skip", "compile", timeout=380)
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 0, done.stdout
    for kind in ("file", "dcp"):
        for what in ("begins alike", "resumes after SIGTERM", "resumes after SIGKILL"):
            assert checks[f"{what} ({kind})"]["state"] == "ok"
            assert "bitwise the same" in checks[f"{what} ({kind})"]["detail"]


@pytest.mark.slow
@pytest.mark.timeout(400)
@device.needed
def test_doctor_uses_the_available_accelerator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in device.plugged_in(tmp_path / "plugin").items():
        monkeypatch.setenv(name, value)
    done = danling("doctor", "--json", "--skip", "compile", "torch", "dcp", timeout=380)
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 0, done.stdout
    assert checks["device"]["detail"] == f"1 process on {device.NAME} ({device.NAME}:0; 1 in all)"
    for what in ("begins alike", "resumes after SIGTERM", "resumes after SIGKILL"):
        assert "bitwise the same" in checks[f"{what} (file)"]["detail"]


def test_broken_and_missing_compilers_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "c++"
    script.write_text("#!/bin/sh\necho 'mine 1.2'\n")
    script.chmod(0o755)
    for command, state, detail in (
        (script, "failed", "with mine 1.2"),
        (tmp_path / "none", "absent", "install g++"),
    ):
        monkeypatch.setenv("CXX", str(command))
        # Anything that compiles would take longer than that.
        (found,) = doctor.examine({"torch", "file", "dcp"}, 0.001)
        assert (found.name, found.state) == ("compile", state) and detail in found.detail


@pytest.mark.slow
def test_sigterm_leaves_nothing_behind(tmp_path: Path) -> None:
    with Job(
        [sys.executable, "-m", "danling", "doctor"], environment={"TMPDIR": str(tmp_path)}
    ) as job:
        job.wait_until(lambda: any(tmp_path.glob("danling-doctor-*/whole/checkpoints/latest*")))
        job.signal(signal.SIGTERM)
        assert job.wait().exit_code == 143
    assert not list(tmp_path.glob("danling-doctor-*"))


@pytest.mark.slow
def test_training_without_a_start_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuchcard")
    found = {check.name: check for check in doctor.examine({"dcp", "compile"}, 60)}
    assert found["train (file)"].state == "failed" and "nosuchcard" in found["train (file)"].detail


@pytest.mark.parametrize(
    "line",
    [
        "danling.checkpoints.errors.CheckpointDamaged: Expected files as their checksums say.",
        "danling.checkpoints.errors.CheckpointNotFound: Expected a checkpoint.",
        "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:",
        "RuntimeError: Unable to find address for: lo",
    ],
)
def test_line_with_the_cause_is_shown(line: str) -> None:
    assert doctor.cause(f"[rank1]: {line}\nSet TORCH_LOGS for more.\nFix that first.") == line

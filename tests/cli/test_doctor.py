"""The doctor's own training, kill and resume; and that it sees what is wrong."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest
import torch
from support.job import Job
from support.recorded import danling

from danling.cli import doctor
from danling.cli.doctor_job import digest


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_doctor_kills_and_resumes_bitwise() -> None:
    done = danling("doctor", "--json", "--skip", "compile", "nccl", "extras", timeout=280)
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 0, done.stdout
    for kind in ("file", "dcp"):
        assert checks[f"kill and resume ({kind})"]["state"] == "ok"
        assert checks[f"kill and resume ({kind})"]["detail"] == "killed at step 11, resumed at step 9, bitwise equal"
    assert checks["torch"]["detail"] == torch.__version__


@pytest.mark.timeout(700)
def test_packages_are_imported_and_not_only_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "EXTRAS", ("safetensors", "no-such-package", "tensorboard"))
    (tmp_path / "tensorboard.py").write_text("raise OSError('a broken library')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    found = {check.name: check for check in doctor.examine({"train", "compile", "nccl"}, 300)}
    assert found["safetensors"].state == "ok" and found["no-such-package"].state == "absent"
    assert found["tensorboard"].state == "failed" and "a broken library" in found["tensorboard"].detail


def test_whether_a_compiler_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "c++"
    script.write_text("#!/bin/sh\necho 'mine 1.2'\n")
    script.chmod(0o755)
    for command, state, detail in ((script, "ok", "mine 1.2"), (tmp_path / "none", "absent", "install g++")):
        monkeypatch.setenv("CXX", str(command))
        # Anything that compiles would take longer than that.
        found = {check.name: check for check in doctor.examine({"train", "nccl", "extras"}, 0.001)}
        assert found["compiler"].state == state and detail in found["compiler"].detail
        assert ("compile" in found) == (state == "ok")


def test_sigterm_leaves_nothing_behind(tmp_path: Path) -> None:
    def places() -> list[Path]:
        return list(tmp_path.glob("danling-doctor-*"))

    with Job([sys.executable, "-m", "danling", "doctor"], environment={"TMPDIR": str(tmp_path)}, ranks=2) as job:
        job.wait_until(lambda: any(list(place.glob("whole/output-1.txt")) for place in places()))
        job.signal(signal.SIGTERM)
        assert job.wait().exit_code == 143
    assert not places()


@pytest.mark.slow
def test_training_that_cannot_start_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuchcard")
    found = {check.name: check for check in doctor.examine({"dcp", "compile", "nccl", "extras"}, 60)}
    assert found["torch"].state == "ok"
    assert found["train (gloo)"].state == "failed" and "nosuchcard" in found["train (gloo)"].detail
    assert found["kill and resume (file)"].state == "failed"


def test_what_is_compared_differs_by_every_bit(tmp_path: Path) -> None:
    state = {"a": {"w": torch.tensor([1.0, 2.0])}, "b": [1, None, "x"]}
    same = {"b": (1, None, "x"), "a": {"w": torch.tensor([1.0, 2.0])}}
    assert digest(state) == digest(same)
    others = [
        {"a": {"w": torch.tensor([1.0, 2.0 + 2**-22])}, "b": [1, None, "x"]},
        {"a": {"w": torch.tensor([1.0, 2.0]).double()}, "b": [1, None, "x"]},
        {"a": {"w": torch.tensor([[1.0, 2.0]])}, "b": [1, None, "x"]},
        {"a": {"v": torch.tensor([1.0, 2.0])}, "b": [1, None, "x"]},
        {"a": {"w": torch.tensor([1.0, 2.0])}, "b": [1, None, "y"]},
    ]
    assert len({digest(state), *map(digest, others)}) == 1 + len(others)

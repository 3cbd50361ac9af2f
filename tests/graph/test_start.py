"""Starts from kept code: the compiler is not called again, the gradient stays right, and damage is survived."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from danling.graph.compiler import cxx_command

JOB = Path(__file__).with_name("start_job.py")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which(cxx_command()) is None, reason="there is no compiler"),
]


class Starts:
    """Starts the program, each time in processes of its own, and counts what it has the compiler compile."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.said = ""
        self._log = root / "calls"
        self._wrapper = root / "c++"
        self._wrapper.write_text(
            f'#!/bin/sh\necho "$@" >> {self._log}\nexec {cxx_command()} "$@"\n'
        )
        self._wrapper.chmod(0o755)
        self._number = 0

    def start(self, processes: int = 1, **settings: Any) -> tuple[dict[str, Any], int]:
        """Return what came of it, and how often the compiler has compiled something."""
        self._number += 1
        self._log.unlink(missing_ok=True)
        environment = {
            name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"
        }
        # Torch's own cache is below it: that of an earlier start must not help.
        (self.root / f"tmp{self._number}").mkdir()
        environment |= {
            "CXX": str(self._wrapper),
            "TMPDIR": str(self.root / f"tmp{self._number}"),
            "XDG_CACHE_HOME": str(self.root / "user"),
        }
        launcher = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(processes),
        ]
        command = [
            sys.executable,
            *(launcher if processes > 1 else []),
            str(JOB),
            json.dumps(settings),
        ]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
        assert done.returncode == 0, done.stderr
        self.said = done.stderr
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        # It is asked for its version in any case.
        return json.loads(done.stdout.splitlines()[-1]), sum(
            line not in ("--version", "-v") for line in lines
        )


@pytest.mark.parametrize("policy", ["default", "budget:0.5", "budget:0.1", "recompute"])
def test_the_second_process_compiles_nothing_and_computes_the_same(
    policy: str, tmp_path: Path
) -> None:
    starts = Starts(tmp_path)
    compile = {"precompile_artifact_dir": str(tmp_path / "code"), "memory_policy": policy}
    first, compiled = starts.start(dir=f"{tmp_path}/one", stack="graph", compile=compile)
    assert compiled > 0 and first["graphs"] == 1 and first["error"] < 1e-6
    second, compiled = starts.start(dir=f"{tmp_path}/two", stack="graph", compile=compile)
    assert compiled == 0 and "is not used" not in starts.said
    assert second == first


@pytest.mark.parametrize("processes", [1, 2])
def test_a_resumed_run_and_one_with_the_directory_of_another_compile_nothing(
    processes: int, tmp_path: Path
) -> None:
    starts = Starts(tmp_path)
    run: dict[str, Any] = {
        "dir": f"{tmp_path}/run",
        "compile": {"enable": True},
        "auto_resume": True,
    }
    first, compiled = starts.start(processes, **run)
    assert compiled > 0 and first["graphs"] > 0
    resumed, compiled = starts.start(processes, **run, steps=6)
    assert compiled == 0 and resumed["graphs"] == first["graphs"], starts.said

    shared: dict[str, Any] = {"enable": True, "precompile_artifact_dir": f"{tmp_path}/code"}
    other, compiled = starts.start(processes, dir=f"{tmp_path}/other", compile=shared)
    assert compiled > 0 and other == first
    (tmp_path / "code").rename(tmp_path / "copied")
    shared["precompile_artifact_dir"] = f"{tmp_path}/copied"
    third, compiled = starts.start(processes, dir=f"{tmp_path}/third", compile=shared)
    assert compiled == 0 and third == first


def test_damaged_code_is_compiled_anew(tmp_path: Path) -> None:
    starts = Starts(tmp_path)
    run: dict[str, Any] = {
        "dir": f"{tmp_path}/run",
        "compile": {"enable": True},
        "auto_resume": True,
    }
    starts.start(**run)
    (file,) = (tmp_path / "run" / "compiled").iterdir()
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    _, compiled = starts.start(**run, steps=4)
    assert compiled > 0 and starts.said.count("it is not as this user's runs have written it") == 1
    _, compiled = starts.start(**run, steps=5)
    assert compiled == 0

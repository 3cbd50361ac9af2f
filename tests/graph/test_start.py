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
import torch
from support.processes import run_processes
from torch import nn

from danling.graph.artifacts import ArtifactDirectory
from danling.graph.compilation import GraphCompilation, MemoryPolicy, WholeLoss
from danling.graph.compiler import cxx_command

JOB = Path(__file__).with_name("start_job.py")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which(cxx_command()) is None, reason="there is no compiler"),
]


class Starts:
    """Starts the program, each time in a process of its own, and counts what it has the compiler compile."""

    def __init__(self, root: Path, policy: str) -> None:
        self.root, self.policy = root, policy
        self.folder = root / "code"
        self.said = ""
        self._log = root / "calls"
        self._wrapper = root / "c++"
        self._wrapper.write_text(f'#!/bin/sh\necho "$@" >> {self._log}\nexec {cxx_command()} "$@"\n')
        self._wrapper.chmod(0o755)
        self._number = 0

    def start(self) -> tuple[dict[str, Any], int]:
        self._number += 1
        self._log.unlink(missing_ok=True)
        environment = {
            **os.environ,
            "CXX": str(self._wrapper),
            "TORCHINDUCTOR_CACHE_DIR": str(self.root / f"cache{self._number}"),
            "TMPDIR": str(self.root),
        }
        command = [sys.executable, str(JOB), str(self.folder), self.policy, str(self.root / f"run{self._number}")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
        assert done.returncode == 0, done.stderr
        self.said = done.stderr
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        # It is asked for its version in any case.
        return json.loads(done.stdout.splitlines()[-1]), sum(line not in ("--version", "-v") for line in lines)

    def libraries(self) -> list[Path]:
        return sorted(self.folder.rglob("*.main.so"))


@pytest.mark.parametrize("policy", ["default", "budget:0.5", "budget:0.1", "recompute"])
def test_the_second_process_compiles_nothing_and_computes_the_same(policy: str, tmp_path: Path) -> None:
    starts = Starts(tmp_path, policy)
    first, compiled = starts.start()
    assert compiled > 0 and starts.libraries() and first["graphs"] == 1
    assert first["error"] < 1e-6
    second, compiled = starts.start()
    assert compiled == 0 and "not as it was written" not in starts.said
    assert second == first


def test_damaged_code_is_compiled_anew(tmp_path: Path) -> None:
    starts = Starts(tmp_path, "default")
    first, _ = starts.start()
    library = starts.libraries()[0]
    library.write_bytes(library.read_bytes()[:100])
    again, compiled = starts.start()
    assert compiled > 0 and starts.said.count("not as it was written") == 1
    assert again == first
    third, compiled = starts.start()
    assert compiled == 0 and third == first


def compile_once(root: str, *, fills: bool) -> tuple[bool, float, int]:
    """Return whether a portable file was loaded, the loss of a forward, and how many graphs came out of a cache."""
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    artifacts = ArtifactDirectory(Path(root), {"model": "a"}, title="default", portable=True)
    section = dict.fromkeys(("backend", "fullgraph", "dynamic", "mode", "options"))
    compilation = GraphCompilation(
        {**section, "optimize_ddp": False},
        distributed=False,
        policy=MemoryPolicy(),
        artifacts=artifacts,
        recomputation=None,
        barrier=lambda: None,
        leads=True,
    )
    artifacts.open()
    with compilation.settings():
        loaded = fills and artifacts.load_portable()
    function = WholeLoss(model, lambda: lambda pred, target: (pred - target).square().mean(), compilation)
    loss = function(torch.ones(2, 4), torch.zeros(2, 4))[1]
    loss.backward()
    compilation.close()
    return loaded, loss.item(), counters["aot_autograd"]["autograd_cache_hit"]


def test_a_portable_file_fills_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    ((loaded, first, hits),) = run_processes(compile_once, f"{tmp_path}/a", fills=True, world_size=1, timeout=400)
    assert not loaded and hits == 0
    (folder,) = (path for path in (tmp_path / "a").iterdir() if path.is_dir())
    (tmp_path / "b" / folder.name).mkdir(parents=True)
    for name in ("portable.bin", "portable.sha256"):
        shutil.copy(folder / name, tmp_path / "b" / folder.name / name)
    ((loaded, second, hits),) = run_processes(compile_once, f"{tmp_path}/b", fills=True, world_size=1, timeout=400)
    assert loaded and hits == 1 and second == first

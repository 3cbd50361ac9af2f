"""What the import of a runner loads: a second of modules was once added here by one line, which no other test saw."""

import json
import subprocess
import sys

PROGRAM = """
import json, sys
import torch
before = set(sys.modules)
from danling import Runner, RunnerConfig, TorchRunner
print(json.dumps(sorted(set(sys.modules) - before)))
"""

OURS = {"danling", "chanfig", "lazy_imports", "torchdata", "yaml", "_yaml", "tomli"}


def test_a_runner_imports_nothing_of_torch_that_torch_does_not():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    names = json.loads(done.stdout)
    assert "danling.runners.torch_runner" in names
    others = [name for name in names if name.partition(".")[0] not in OURS | sys.stdlib_module_names]
    assert not [name for name in others if "cython" not in name]

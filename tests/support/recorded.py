"""Runs that were really trained, for tests of what reads run directories; and the command that reads them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from danling.checkpoints import CheckpointDamaged
from danling.cli.main import main

from .toys import TracingRunner
from .warm import interpreter

_BOUNDED = """
import resource, sys
from danling.cli.main import main
taken = next(line for line in open("/proc/self/status") if line.startswith("VmData:"))
resource.setrlimit(resource.RLIMIT_DATA, ((int(taken.split()[1]) << 10) + (2 << 30),) * 2)
sys.exit(main(sys.argv[1:]))
"""


def record_run(
    root: Path, *, lineage: str = "toy", lr: float = 0.01, steps: int = 12, **settings: Any
) -> Path:
    """Train the small runner with averaged weights and return its run directory below `root`."""
    own = {"steps": steps, "lineage": lineage, "workspace_root": str(root)}
    with TracingRunner(
        {**recorded_settings(lr=lr, checkpoint=settings.pop("checkpoint", {})), **own, **settings}
    ) as runner:
        runner.train()
        return Path(runner.workspace.dir)


def recorded_settings(*, lr: float = 0.01, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of such a run, without its place and length."""
    return {
        "seed": 3,
        "log_interval": 1,
        "evaluate_interval": 4,
        "score_name": "acc",
        "ema": {"enabled": True},
        "dataloader": {"batch_size": 4},
        "optim": {"type": "adamw", "lr": lr},
        "checkpoint": {"interval": 4, **checkpoint},
    }


def command(*words: str) -> Callable[[Path, Path], None]:
    """Return what runs the command `danling` in this process with a path and an output below a root, and raises where it refuses."""

    def run(path: Path, root: Path) -> None:
        if main([word.format(path=path, out=root / "out.pth") for word in words]) != 0:
            raise CheckpointDamaged("as the command has said")

    return run


def bounded(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command `danling` in a process with half a minute and 2 GiB of memory on top of what torch takes."""
    command = [interpreter(), "-c", _BOUNDED, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL
    )


def danling(
    *arguments: str | Path, timeout: float = 100.0, warm: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run the command `danling` in a process of its own, to its end."""
    command = [interpreter() if warm else sys.executable, "-m", "danling", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
    )

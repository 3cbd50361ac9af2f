"""What is said at the end of a training beside its speed: the best score, and the commands to go on, to draw and to export."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .progress import format_number

_CHOSEN = ("dir", "auto_resume", "resume", "pretrained")
"""Settings that the command to go on has of its own."""


@dataclass(frozen=True)
class Launch:
    """How this program was started.

    Attributes:
        script: The script, or the module after `-m`; `None` where there is none, as in a notebook.
        arguments: Words of the command line; `None` where the configuration does not read them.
        processes: Number of processes.
        runner: Name of the class of the runner.
    """

    script: str | None
    arguments: Sequence[str] | None
    processes: int
    runner: str

    @classmethod
    def of_this_program(cls, arguments: Sequence[str] | None, processes: int, runner: str) -> Launch:
        """Return how this program was started.

        Args:
            arguments: Words of the command line that the configuration has read; `None` where it read none.
            processes: Number of processes.
            runner: Name of the class of the runner.
        """
        main = sys.modules.get("__main__")
        spec = getattr(main, "__spec__", None)
        script = f"-m {spec.name}" if spec is not None else getattr(main, "__file__", None)
        if script is not None and spec is None:
            script = shlex.quote(shown(Path(script)))
        return cls(script, arguments, processes, runner)


def describe_end(
    launch: Launch,
    *,
    directory: Path,
    checkpoints: Path,
    best: tuple[str, float, str] | None,
    more: Mapping[str, int],
    trust: bool = False,
) -> list[str]:
    """Return the lines below the last one of a training, each a name and what it stands for. Only the file system is asked.

    Args:
        launch: How this program was started.
        directory: The run directory.
        checkpoints: Its directory of checkpoints.
        best: Name of the score, its best value, and where that was, such as `epoch 3`; `None` without one.
        more: Larger values of the settings that have ended the run, by key; empty for one that was stopped before.
        trust: Whether weights are exported only with `--trust`.
    """
    kept = {name: path for name in ("best", "latest") if (path := _checkpoint(checkpoints, name)) is not None}
    lines = []
    if best is not None:
        name, value, where = best
        place = f": {shown(kept['best'])}" if "best" in kept else ""
        lines.append(f"best     {name} {format_number(value)} at {where}{place}")
    if "latest" in kept:
        lines.append(f"go on    {_go_on(launch, directory, kept['latest'], more)}")
    if (directory / "metrics.jsonl").is_file():
        lines.append(f"curves   danling plot {_quoted(directory)} -o curves.png")
    if kept:
        weights = next(iter(kept.values()))
        lines.append(f"weights  danling export {_quoted(weights)} model.safetensors{' --trust' * trust}")
    return lines


def _go_on(launch: Launch, directory: Path, latest: Path, more: Mapping[str, int]) -> str:
    if launch.script is None or launch.arguments is None:
        changed = f", {dict(more)}" if more else ""
        return f"{launch.runner}.from_checkpoint({shown(latest)!r}{changed}).train()"
    # The options of torchrun itself, such as the address of the first machine, are not known to the processes that it starts.
    program = "python" if launch.processes == 1 else "torchrun ..."
    words = [*_without(launch.arguments, (*_CHOSEN, *more)), "--dir", shown(directory), "--auto_resume", "true"]
    words += [word for key, value in more.items() for word in (f"--{key}", str(value))]
    return f"{program} {launch.script} {shlex.join(words)}"


def _without(arguments: Sequence[str], keys: Sequence[str]) -> list[str]:
    """Return the words of a command line without some keys and their values."""
    kept: list[str] = []
    skips = False
    for word in arguments:
        if word.startswith("--"):
            skips = word[2:].partition("=")[0].replace("-", "_") in keys
        if not skips:
            kept.append(word)
    return kept


def _checkpoint(directory: Path, name: str) -> Path | None:
    """Return where a checkpoint lies: a file, or the pointer to a directory."""
    return next((path for path in (directory / f"{name}.pth", directory / name) if path.is_file()), None)


def shown(path: Path) -> str:
    """Return a path as it is shortest: from the working directory where it lies below it."""
    below = os.path.relpath(path)
    return str(path) if below.startswith("..") else below


def _quoted(path: Path) -> str:
    return shlex.quote(shown(path))

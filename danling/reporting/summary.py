"""The messages at the beginning and at the end of a training: the best score, and the commands to resume, to draw and to export."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from danling.utils.secrets import hide_secret_words, secret_values

from .progress import format_number

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner

_WIDTH = 98
"""A line of the log has a time before it, and a terminal 120 columns."""

_CHOSEN = ("dir", "auto_resume", "resume", "pretrained")
"""Settings that the command to resume sets itself."""


def describe_training(runner: TorchRunner) -> list[str]:
    """Describe the training, in lines of at most 100 columns; a path alone may be longer."""
    train, size = runner.state.train, runner.world_size
    budget = f"step {runner.steps}" if runner.is_step_mode else f"epoch {runner.epochs}"
    processes = f"{size} {runner.device.type} process{'es' if size > 1 else ''}"
    stack = f"{runner.stack}, {runner.config.precision or 'fp32'}"
    head = f"Training from step {train.global_step} (epoch {train.epoch}) to {budget} on {processes} ({stack})"
    parts = (describe_parameters((p.numel(), p.requires_grad) for _, p in runner.named_parameters()), _batches(runner))
    sizes = ", ".join(part for part in parts if part)
    first = [f"{head}: {sizes}"] if len(head) + len(sizes) <= _WIDTH else [head, sizes]
    return [*first, f"Run directory: {runner.workspace.dir}"]


def describe_parameters(sizes: Iterable[tuple[int, bool]]) -> str:
    """Return the number of parameters of a model, and of those that are trained where it is another one.

    Args:
        sizes: Elements of each parameter, and whether it is trained.

    Examples:
        >>> describe_parameters([(1000, True), (24, False)])
        '1,024 parameters, 1,000 trained'
    """
    listed = list(sizes)
    whole, trained = sum(size for size, _ in listed), sum(size for size, is_trained in listed if is_trained)
    return f"{whole:,} parameters" + (f", {trained:,} trained" if trained != whole else "")


def _batches(runner: TorchRunner) -> str:
    """Return what an update is made of; nothing where no size is known."""
    accumulated = f" x {runner.accum_steps} micro-batches" if runner.accum_steps > 1 else ""
    each = " on each" if runner.distributed else ""
    division, batch = runner._data.division(), runner.batch_size
    if division is not None:
        most = "" if division.is_even else "at most "
        return f"{division.samples} samples an update, {most}{batch}{accumulated}{each}"
    return f"batch {batch}{accumulated}{each}" if batch else ""


def describe_end(runner: TorchRunner) -> list[str]:
    """Return the lines below the last one of a training, each a name and what it means. No communication."""
    directory, checkpoints = runner.workspace.dir, runner.workspace.checkpoints
    unit = "step" if runner.is_step_mode else "epoch"
    kept = {name: path for name in ("best", "latest") if (path := _checkpoint(checkpoints, name)) is not None}
    lines = []
    if runner.best_index is not None and runner.best_score is not None:
        board = runner.standing.board
        name = runner.config.score_name if board is None else f"{board.split}.{board.name}"
        place = f": {shown(kept['best'])}" if "best" in kept else ""
        lines.append(f"best     {name} {format_number(runner.best_score)} at {unit} {runner.best_index}{place}")
    if "latest" in kept:
        lines.append(f"go on    {_command_to_resume(runner, kept['latest'])}")
    if (directory / "metrics.jsonl").is_file():
        lines.append(f"curves   danling plot {_quoted(directory)} -o curves.png")
    if kept:
        trust = " --trust" if runner.stack == "deepspeed" else ""
        lines.append(f"weights  danling export {_quoted(next(iter(kept.values())))} model.safetensors{trust}")
    return lines


def _command_to_resume(runner: TorchRunner, latest: Path) -> str:
    more, script = _larger_budget(runner), program()
    words, listed = runner.config.__dict__.get("_command_line"), runner.config.secret_keys or ()
    if script is None or words is None:
        changed = f", {more}" if more else ""
        return f"{type(runner).__name__}.from_checkpoint({shown(latest)!r}{changed}).train()"
    words = tuple(hide_secret_words(words, secret_values(runner.config.plain(), listed), listed))
    # The options of torchrun itself, such as the address of the first machine, are not known to the processes that it starts.
    python = "python" if runner.world_size == 1 else "torchrun ..."
    options = [*_without(words, (*_CHOSEN, *more)), "--dir", shown(runner.workspace.dir), "--auto_resume", "true"]
    options += [word for key, value in more.items() for word in (f"--{key}", str(value))]
    return f"{python} {script} {shlex.join(options)}"


def _larger_budget(runner: TorchRunner) -> dict[str, int]:
    """Return larger values of the settings that have ended the run: of its budget, and of the patience that is used up."""
    reason, done = runner._session.stop_reason, runner.steps if runner.is_step_mode else runner.epochs
    more = {}
    if runner.progress >= 1 and done and reason in (None, "patience"):
        more["steps" if runner.is_step_mode else "epochs"] = 2 * done
    if reason == "patience":
        more["patience"] = runner.standing.evaluations_since_best + max(1, int(runner.config.patience))
    return more


def program() -> str | None:
    """Return the script that this program was started from, or the module after `-m`; `None` where there is none, as in a notebook."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return f"-m {spec.name}"
    file = getattr(main, "__file__", None)
    return None if file is None else shlex.quote(shown(Path(file)))


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
    """Return the path of a checkpoint: a file, or the pointer to a directory."""
    return next((path for path in (directory / f"{name}.pth", directory / name) if path.is_file()), None)


def shown(path: Path) -> str:
    """Return a path as it is shortest: relative to the working directory where it is below it."""
    below = os.path.relpath(path)
    return str(path) if below.startswith("..") else below


def _quoted(path: Path) -> str:
    return shlex.quote(shown(path))

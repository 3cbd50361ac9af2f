"""Say on one screen what a run trained: its settings, what it recorded of itself, its results, and what it keeps on disk.

Only files of the run are read; the program that made it and torch are not needed.

Example: danling explain experiments/lin/run
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping
from pathlib import Path

from danling.checkpoints.directory import newest_record
from danling.utils.messages import as_text
from danling.workspace.runs import Run

from .output import add_json, as_bytes, name_problems, print_json
from .source import one_run

_WIDTH = 110
_NAMES = 13
_MOST_LINES = 5
_LEFT_TO_JSON = frozenset({"environment.versions", "environment.variables"})
"""Mappings that would fill the screen."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    parser.add_argument("path", help="directory or URL of a run")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Print the sections."""
    with one_run(options.path) as found:
        sections = explain(found)
        location = found.location or str(found.path)
        if options.json:
            print_json(
                {
                    "run": location,
                    "sections": sections,
                    "record": found.record,
                    "config": found.config,
                }
            )
            return name_problems([found])
        print(location)
        for name, lines in sections.items():
            head = name
            for line in lines:
                for part in textwrap.wrap(line, _WIDTH - _NAMES) or [""]:
                    print(f"{head:{_NAMES}}{part}".rstrip())
                    head = ""
        return name_problems([found])


def explain(run: Run) -> dict[str, list[str]]:
    """Return what a run trained: by section, the lines of it. Without `metadata/run.json`, only what its other files say."""
    config = run.config
    usual = run.path / str(config.get("checkpoint.dir_name", "checkpoints"))
    directory = Path(str(config.get("checkpoint_dir") or usual))
    saved = newest_record(directory)
    # The last line of metrics may be some updates older.
    step = run.step if saved is None else saved.step
    budget = f" of {as_text(config['steps'])}" if config.get("steps") else ""
    progress = ["no step was logged" if step is None else f"trained to step {step}{budget}"]
    if saved is None and step is not None:
        progress.append("no checkpoint was saved")
    if config.get("epochs"):
        progress.append(f"{max(run.results, default=0)} of {as_text(config['epochs'])} epochs")
    if run.attempts:
        progress.append(f"attempts {run.attempts}")
    if run.changed:
        progress.append(f"last written {run.changed:%Y-%m-%d %H:%M} UTC")
    sections = {"run": [", ".join(progress)], "settings": [_line(run.chosen)]}
    for name, about in run.record.items():
        sections[name] = _lines(name, about) if isinstance(about, Mapping) else [as_text(about)]
    steps, rates = run.curve("train/learning_rate")
    if rates:
        first, last = (f"{rates[at]:.3g} at step {steps[at]:.0f}" for at in (0, -1))
        sections["rate"] = [f"learning rate {first}, {max(rates):.3g} at most, {last}"]
    results = []
    unit = "epoch" if config.get("epochs") else "step"
    if run.best:
        best = f"{as_text(run.best.get('score'))} at {unit} {as_text(run.best.get('index'))}"
        results.append(f"best {as_text(run.score_name)} {best}")
    if run.results:
        last_index, of_splits = max(run.results.items())
        figures = [
            _line({f"{split}/{name}": value for name, value in of.items()})
            for split, of in of_splits.items()
        ]
        results.append(f"last, at {unit} {last_index}: {', '.join(figures)}")
    sections["results"] = results
    sizes = checkpoint_sizes(directory)
    sections["disk"] = ["no checkpoint here"]
    if sizes:
        sections["disk"] = [
            f"checkpoints take {as_bytes(sum(sizes))}; the last one {as_bytes(sizes[-1])}"
        ]
    if not run.record:
        sections["missing"] = [
            "metadata/run.json, which a run writes when it begins to train: model, data, optimizer, software and devices are unknown"
        ]
    return {name: lines for name, lines in sections.items() if any(lines)}


def _lines(name: str, about: Mapping[str, object]) -> list[str]:
    """Return the plain values of a section in a line, and each mapping in it in one more."""
    lines = [_line({key: value for key, value in about.items() if not _mappings(value)})]
    for key, value in about.items():
        if f"{name}.{key}" in _LEFT_TO_JSON:
            continue
        found = _mappings(value)
        lines += [f"{key}: {_line(each)}" for each in found[:_MOST_LINES]]
        if len(found) > _MOST_LINES:
            lines.append(f"and {len(found) - _MOST_LINES} more, which --json has")
    return list(filter(None, lines))


def _mappings(value: object) -> list[Mapping[str, object]]:
    entries = value if isinstance(value, list) else [value]
    return [each for each in entries if isinstance(each, Mapping)]


def _line(values: Mapping[str, object]) -> str:
    return ", ".join(
        f"{name} {as_text(value)}" for name, value in values.items() if value is not None
    )


def checkpoint_sizes(directory: Path) -> list[int]:
    """Return the bytes of each checkpoint in a directory of checkpoints, hard links once, in the order they were written."""
    found: dict[tuple[int, int], tuple[float, int]] = {}
    for path in (*directory.glob("*.pth"), *directory.glob("targets/*")):
        inside = (
            {path: path.stat()}
            if path.is_file()
            else {file: file.lstat() for file in path.rglob("*")}
        )
        sizes = {
            (status.st_dev, status.st_ino): status.st_size
            for file, status in inside.items()
            if file.is_file()
        }
        own = path.stat()
        found[own.st_dev, own.st_ino] = own.st_mtime, sum(sizes.values())
    return [size for _, size in sorted(found.values())]

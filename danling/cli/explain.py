"""Say on one screen what a run trained: model, data, update, schedule, layout, environment, results, and what it keeps on disk.

Only files of the run are read; the program that made it and torch are not needed. `danling plot RUN -o report.html` has the same section.

Example: danling explain experiments/lin/run
"""

from __future__ import annotations

import argparse
import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from danling.utils.messages import format_count
from danling.workspace.runs import Run

from .output import add_json, name_problems, print_json
from .source import one_run

_WIDTH = 110
_NAMES = 13
_BARS = "▁▂▃▄▅▆▇█"
_CURVE_COLUMNS = 48
_MOST_PARTS = 5
_MANAGERS = {
    "FileCheckpointManager": "single files",
    "TorchDistributedCheckpointManager": "sharded directories (DCP)",
    "DeepSpeedCheckpointManager": "directories of the DeepSpeed engine",
}
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    parser.add_argument("path", help="directory or URL of a run")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Print the sections."""
    with one_run(options.path) as found:
        sections = explain(found)
        place = found.place or str(found.path)
        if options.json:
            print_json({"run": place, "sections": sections, "record": found.record, "config": found.config})
            return name_problems([found])
        print(place)
        for name, lines in sections.items():
            head = name
            for line in lines:
                for part in textwrap.wrap(line, _WIDTH - _NAMES) or [""]:
                    print(f"{head:{_NAMES}}{part}".rstrip())
                    head = ""
        return name_problems([found])


def explain(run: Run) -> dict[str, list[str]]:
    """Return what a run trained: by section, the lines of it.

    A run that has not trained with this version lacks `metadata/run.json`; its section `missing` names the unknown parts.
    """
    tell = {
        "run": _run,
        "model": _model,
        "data": _data,
        "update": _update,
        "optimizer": _optimizer,
        "schedule": _schedule,
        "layout": _layout,
        "environment": _environment,
        "results": _results,
        "saved": _saved,
        "disk": _disk,
    }
    sections: dict[str, list[str]] = {}
    for name, section in tell.items():
        try:
            sections[name] = section(run)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # The files may be another program's.
            run.problems.append(
                f"{run.path}: the section {name!r} has values that no run writes ({type(error).__name__}: {error})"
            )
    if not run.record:
        sections["missing"] = [
            "metadata/run.json, which a run writes when it begins to train: model, sizes of the data, software and devices are unknown"
        ]
    return {name: lines for name, lines in sections.items() if lines}


def _run(run: Run) -> list[str]:
    step, budget = run.step, ""
    if run.config.get("steps"):
        budget = f" of {run.config['steps']:,}"
    elif run.config.get("epochs"):
        done = max(run.results, default=0)
        budget = f", {done} of {run.config['epochs']} epochs"
    progress = f"trained to step {step:,}{budget}" if step is not None else "no step was logged"
    attempts = f"{run.attempts} attempt{'s' if run.attempts != 1 else ''}" if run.attempts else ""
    changed = f"last written {run.changed:%Y-%m-%d %H:%M} UTC" if run.changed else ""
    started = run.config.get("pretrained")
    source = f"started from the weights of {started}" if started else ""
    return [", ".join(part for part in (progress, attempts, changed, source) if part)]


def _model(run: Run) -> list[str]:
    model = run.record.get("model") or {}
    if not model:
        return []
    whole, trained = model["parameters"], model["trained"]
    frozen = f", {trained:,} trained" if trained != whole else ""
    averaged = ", averaged weights kept (EMA)" if model["averaged"] else ""
    head = f"{model['kind']}: {whole:,} parameters{frozen}, {', '.join(model['dtypes'])}, {_size(model['bytes'])}{averaged}"
    parts = [
        f"{part['name']} ({part['kind']}) {format_count(part['parameters'])}" for part in model["parts"] if part["kind"]
    ]
    more = ", ..." if len(parts) > _MOST_PARTS else ""
    loss = run.record.get("criterion")
    return [head, *([", ".join(parts[:_MOST_PARTS]) + more] if parts else []), *([f"loss: {loss}"] if loss else [])]


def _data(run: Run) -> list[str]:
    lines = []
    for split, about in (run.record.get("data") or {}).items():
        use = " and ".join(word for word, key in (("trained on", "trained"), ("evaluated", "evaluated")) if about[key])
        size = f"{about['samples']:,} samples" if about["samples"] is not None else "a stream without a length"
        seed = run.record.get("seed")
        order = {
            True: f"shuffled with seed {seed}",
            False: "in the order of the dataset",
            None: f"in the order of {about['loader']}",
        }
        workers = f", {about['workers']} workers" if about["workers"] else ""
        lines.append(f"{split} ({use or 'not used'}): {about['kind']}, {size}, {order[about['shuffled']]}{workers}")
    if not lines and run.config.get("dataloader.batch_size"):
        lines.append(f"seed {run.config.get('seed')}")
    return lines


def _update(run: Run) -> list[str]:
    config, made = run.config, run.record.get("update") or {}
    replicas = (run.record.get("layout") or {}).get("data_replicas", 1)
    batch = made.get("batch_size") or config.get("dataloader.batch_size")
    micro_batches = made.get("micro_batches") or config.get("accum_steps") or 1
    samples = made.get("samples") or config.get("dataloader.global_batch_size")
    if not samples and batch and run.record:
        samples = batch * micro_batches * replicas
    parts = [f"{samples:,} samples" if samples else ""]
    if batch:
        divided = f"{micro_batches} micro-batch{'es' if micro_batches != 1 else ''} of {batch}"
        parts.append(divided + (f" on each of {replicas} ranks" if replicas > 1 else ""))
    pace: dict[str, Any] = next(
        (record for record in reversed(run.records) if record.get("train/tokens_per_second")), {}
    )
    if pace.get("train/step_seconds"):
        parts.append(f"about {format_count(pace['train/tokens_per_second'] * pace['train/step_seconds'])} tokens")
    parts.append(str(config.get("precision") or "fp32"))
    norm, value = config.get("max_grad_norm"), config.get("max_grad_value")
    clipping = [f"clipped at norm {norm}" if norm else "", f"clipped at value {value}" if value else ""]
    parts += [text for text in clipping if text] or ["not clipped"]
    if config.get("skip_nonfinite_grad"):
        parts.append("skipped if not finite")
    return [", ".join(part for part in parts if part)]


def _optimizer(run: Run) -> list[str]:
    made = run.record.get("optimizer") or {}
    if not made:
        settings = _section(run.config, "optim")
        return [_settings(settings.pop("type", "optimizer"), settings)] if settings else []
    shown = ("lr", "initial_lr", "weight_decay", "betas", "momentum", "eps")
    lines = []
    for group in made["groups"]:
        options = {name: group[name] for name in shown if name in group}
        options["lr"] = options.pop("initial_lr", options.get("lr"))
        tensors = f"{group['tensors']} tensors: " if len(made["groups"]) > 1 else ""
        lines.append(tensors + _settings(made["kind"], options))
    return lines[:4] + ([f"and {len(lines) - 4} more groups"] if len(lines) > 4 else [])


def _schedule(run: Run) -> list[str]:
    settings = _section(run.config, "scheduler")
    kind = settings.pop("type", None) or run.record.get("scheduler")
    if kind is None and not run.records:
        return []
    lines = [_settings(str(kind), settings) if kind else "constant"]
    steps, rates = run.curve("train/learning_rate")
    if len(rates) > 1:
        lines.append(f"{sparkline(rates)}  steps {steps[0]:,.0f} to {steps[-1]:,.0f}")
        lines.append(f"learning rate {rates[0]:.3g} at first, {max(rates):.3g} at most, {rates[-1]:.3g} at last")
    return lines


def _layout(run: Run) -> list[str]:
    layout = run.record.get("layout") or {}
    axes = {key.rpartition(".")[2]: value for key, value in run.config.items() if key.startswith("parallel.axes.")}
    shown = ", ".join(f"{name} {degree}" for name, degree in axes.items() if degree != 1)
    stack = layout.get("stack") or run.config.get("stack", "auto")
    if not layout:
        return [f"stack {stack}" + (f" ({shown})" if shown else "")]
    count = layout["processes"]
    return [
        f"{stack} on {count} {layout['device']} process{'es' if count != 1 else ''}" + (f" ({shown})" if shown else "")
    ]


def _environment(run: Run) -> list[str]:
    made, git = run.record.get("environment") or {}, run.git
    lines = []
    if made:
        versions = f"danling {made['danling']}, Python {made['python']}, torch {made['torch']}"
        lines += [
            versions,
            f"{made['processor']}, {made['threads']} thread{'s' if made['threads'] != '1' else ''}, {made['system']}",
        ]
    if git.get("sha"):
        changed = ", with changes (metadata/git.diff)" if git.get("dirty") else ""
        branch = f" on {git['branch']}" if git.get("branch") else ""
        lines.append(f"code {git['code_id']}{branch}{changed}")
    return lines


def _results(run: Run) -> list[str]:
    lines = []
    if run.best:
        unit = "step" if run.config.get("steps") else "epoch"
        lines.append(f"best {run.score_name} {_number(run.best.get('score'))} at {unit} {run.best.get('index')}")
    if run.results:
        last = max(run.results)
        figures = (
            f"{split}/{name} {_number(value)}" for split, of in run.results[last].items() for name, value in of.items()
        )
        lines.append(f"last, at {last}: {', '.join(list(figures)[:6])}")
    elif run.records:
        record = run.records[-1]
        shown = [name for name in ("train/loss", "train/grad_norm") if record.get(name) is not None]
        lines.append(
            f"last, at step {record['step']}: {', '.join(f'{name} {_number(record[name])}' for name in shown)}"
        )
    return lines


def _saved(run: Run) -> list[str]:
    config, made = run.config, run.record.get("checkpoints") or {}
    if not config:
        return []
    if config.get("checkpoint.load_only"):
        return ["nothing (checkpoint.load_only=true)"]
    unit = "update" if config.get("steps") else "epoch"
    every = made.get("interval") or config.get("checkpoint.interval")
    when = (
        f"every {every:,} {unit}s" if every and every != 1 else f"every {unit}" if every else "at the default interval"
    )
    kept = config.get("checkpoint.keep_latest_k") or 0
    history = f"the latest {kept} are kept" if kept else "all are kept"
    remote = config.get("checkpoint.remote.url")
    score = run.score_name or config.get("score_name")
    manager = str(made.get("manager"))
    parts = [f"the full state {when} in {_MANAGERS.get(manager, manager) if made else 'checkpoints'}", history]
    parts += [f"the best by {score}"] if score else []
    parts += [f"a copy in {remote}"] if remote else []
    return ["; ".join(parts)]


def _disk(run: Run) -> list[str]:
    directory = Path(
        run.config.get("checkpoint_dir") or run.path / str(run.config.get("checkpoint.dir_name", "checkpoints"))
    )
    sizes = checkpoint_sizes(directory)
    if not sizes:
        model = run.record.get("model") or {}
        return [f"no checkpoint here; the weights alone take {_size(model['bytes'])}"] if model else []
    one = sizes[-1]
    lines = [f"checkpoints take {_size(sum(sizes))} now; the last one {_size(one)}"]
    interval = (run.record.get("checkpoints") or {}).get("interval") or run.config.get("checkpoint.interval")
    budget = run.config.get("steps") or run.config.get("epochs")
    if interval and budget:
        planned = math.ceil(budget / interval)
        kept = run.config.get("checkpoint.keep_latest_k") or 0
        # The best one may be older than those that are kept.
        count = min(planned, kept + 1) if kept else planned
        lines[0] += f"; at the end of the budget about {_size(count * one)} for {count}"
    return lines


def checkpoint_sizes(directory: Path) -> list[int]:
    """Return the bytes of each checkpoint in a directory of checkpoints, hard links once, in the order they were written."""
    found: dict[tuple[int, int], tuple[float, int]] = {}
    for file in directory.glob("*.pth"):
        status = file.stat()
        found[status.st_dev, status.st_ino] = status.st_mtime, status.st_size
    for target in (path for path in directory.glob("targets/*") if path.is_dir()):
        status = target.stat()
        found[status.st_dev, status.st_ino] = status.st_mtime, disk_use(target)
    return [size for _, size in sorted(found.values())]


def disk_use(directory: Path) -> int:
    """Return the bytes of all files below a directory; of hard links one counts."""
    found: dict[tuple[int, int], int] = {}
    for place, _, names in os.walk(directory):
        for name in names:
            status = os.lstat(os.path.join(place, name))
            found[status.st_dev, status.st_ino] = status.st_size
    return sum(found.values())


def sparkline(values: Sequence[float], columns: int = _CURVE_COLUMNS) -> str:
    """Return a curve as one line of bars from 0, each the mean of its part of the values."""
    columns = min(columns, len(values))
    bounds = [round(index * len(values) / columns) for index in range(columns + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in pairwise(bounds)]
    top = max(means)
    return "".join(_BARS[round(max(mean, 0.0) / top * (len(_BARS) - 1))] if top > 0 else _BARS[0] for mean in means)


def _section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {
        key.partition(".")[2]: value
        for key, value in config.items()
        if key.startswith(f"{name}.") and value is not None
    }


def _settings(kind: str, settings: Mapping[str, object]) -> str:
    shown = ", ".join(f"{name} {value}" for name, value in settings.items())
    return f"{kind}: {shown}" if shown else kind


def _number(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _size(size: float) -> str:
    unit = 0
    while size >= 1000 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.0f} {_UNITS[unit]}" if unit == 0 else f"{size:.3g} {_UNITS[unit]}"

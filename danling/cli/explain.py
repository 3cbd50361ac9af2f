"""Say on one screen what a run trained: model, data, update, schedule, layout, environment, results, and what it keeps on disk.

Only files of the run are read; the program that made it and torch are not needed. `danling plot RUN -o report.html` has the same section.

Example: danling explain experiments/lin/run
"""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from danling.utils.messages import as_text, format_count
from danling.workspace.runs import Run

from .output import add_json, as_bytes, name_problems, print_json
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
    """Return what a run trained: by section, the lines of it. Without `metadata/run.json`, only what its other files say."""
    tell = {"run": _progress, "results": _results, "disk": _disk}
    if run.record:
        recorded = {"model": _model, "data": _data, "update": _update, "optimizer": _optimizer, "schedule": _schedule}
        software = {"layout": _layout, "environment": _environment}
        tell = {"run": _progress, **recorded, **software, "results": _results, "saved": _saved, "disk": _disk}
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
            "metadata/run.json, which a run writes when it begins to train: model, data, optimizer, software and devices are unknown"
        ]
    return {name: lines for name, lines in sections.items() if lines}


def _progress(run: Run) -> list[str]:
    config, step = run.config, run.step
    budget = f" of {config['steps']:,}" if config.get("steps") else ""
    parts = [
        f"trained to step {step:,}{budget}" if step is not None else "no step was logged",
        f"{max(run.results, default=0)} of {config['epochs']} epochs" if config.get("epochs") else "",
        _counted(run.attempts, "attempt") if run.attempts else "",
        f"last written {run.changed:%Y-%m-%d %H:%M} UTC" if run.changed else "",
        f"started from the weights of {config['pretrained']}" if config.get("pretrained") else "",
    ]
    return [_joined(parts)]


def _model(run: Run) -> list[str]:
    model, loss = run.record["model"], run.record.get("criterion")
    whole, trained = model["parameters"], model["trained"]
    head = [
        f"{model['kind']}: {whole:,} parameters",
        f"{trained:,} trained" if trained != whole else "",
        *(*model["dtypes"], as_bytes(model["bytes"])),
        "averaged weights kept (EMA)" if model["averaged"] else "",
    ]
    parts = [f"{p['name']} ({p['kind']}) {format_count(p['parameters'])}" for p in model["parts"] if p["kind"]]
    parts[_MOST_PARTS:] = ["..."] if len(parts) > _MOST_PARTS else []
    return [line for line in (_joined(head), _joined(parts), f"loss: {loss}" if loss else "") if line]


def _data(run: Run) -> list[str]:
    lines = []
    for split, about in run.record["data"].items():
        uses = {"trained on": about["trained"], "evaluated": about["evaluated"]}
        use = " and ".join(word for word, is_used in uses.items() if is_used) or "not used"
        source = "the dataset" if about["shuffled"] is False else about["loader"]
        parts = [
            f"{split} ({use}): {about['kind']}",
            f"{about['samples']:,} samples" if about["samples"] is not None else "a stream without a length",
            f"shuffled with seed {run.record['seed']}" if about["shuffled"] else f"in the order of {source}",
            _counted(about["workers"], "worker") if about["workers"] else "",
        ]
        lines.append(_joined(parts))
    return lines


def _update(run: Run) -> list[str]:
    config, update, replicas = run.config, run.record["update"], run.record["layout"]["data_replicas"]
    batch, micro_batches = update["batch_size"], update["micro_batches"]
    samples = update["samples"] or (batch * micro_batches * replicas if batch else None)
    pace: dict[str, Any] = next((r for r in reversed(run.records) if r.get("train/tokens_per_second")), {})
    tokens = pace.get("train/step_seconds", 0.0) * pace.get("train/tokens_per_second", 0.0)
    divided = f"{micro_batches} micro-batch{'es' if micro_batches != 1 else ''} of {batch}"
    limits = {kind: config.get(f"max_grad_{kind}") for kind in ("norm", "value")}
    parts = [
        f"{samples:,} samples" if samples else "",
        divided + (f" on each of {replicas} ranks" if replicas > 1 else "") if batch else "",
        f"about {format_count(tokens)} tokens" if tokens else "",
        str(config.get("precision") or "fp32"),
        _joined(f"clipped at {kind} {limit}" for kind, limit in limits.items() if limit) or "not clipped",
        "skipped if not finite" if config.get("skip_nonfinite_grad") else "",
    ]
    return [_joined(parts)]


def _optimizer(run: Run) -> list[str]:
    optimizer = run.record["optimizer"] or {"groups": []}
    lines = []
    for group in optimizer["groups"]:
        options = {name: group[name] for name in ("weight_decay", "betas", "momentum", "eps") if name in group}
        options = {"lr": group.get("initial_lr", group.get("lr")), **options}
        tensors = f"{group['tensors']} tensors: " if len(optimizer["groups"]) > 1 else ""
        lines.append(tensors + _settings(optimizer["kind"], options))
    return lines[:4] + ([f"and {len(lines) - 4} more groups"] if len(lines) > 4 else [])


def _schedule(run: Run) -> list[str]:
    named = {key.partition(".")[2]: value for key, value in run.config.items() if key.startswith("scheduler.")}
    settings = {name: value for name, value in named.items() if value is not None}
    kind = settings.pop("type", None) or run.record.get("scheduler")
    lines = [_settings(str(kind), settings) if kind else "constant"]
    steps, rates = run.curve("train/learning_rate")
    if len(rates) > 1:
        lines.append(f"{sparkline(rates)}  steps {steps[0]:,.0f} to {steps[-1]:,.0f}")
        lines.append(f"learning rate {rates[0]:.3g} at first, {max(rates):.3g} at most, {rates[-1]:.3g} at last")
    return lines


def _layout(run: Run) -> list[str]:
    layout = run.record["layout"]
    axes = {key.rpartition(".")[2]: value for key, value in run.config.items() if key.startswith("parallel.axes.")}
    shown = _joined(f"{name} {degree}" for name, degree in axes.items() if degree != 1)
    where = f"{layout['stack']} on {layout['processes']} {layout['device']} process{'es' * (layout['processes'] != 1)}"
    return [f"{where} ({shown})" if shown else where]


def _environment(run: Run) -> list[str]:
    made, git = run.record["environment"], run.git
    branch = f" on {git['branch']}" if git.get("branch") else ""
    changes = ", with changes (metadata/git.diff)" if git.get("dirty") else ""
    return [
        f"danling {made['danling']}, Python {made['python']}, torch {made['torch']}",
        f"{made['processor']}, {_counted(int(made['threads']), 'thread')}, {made['system']}",
        *([f"code {git['code_id']}{branch}{changes}"] if git.get("sha") else []),
    ]


def _results(run: Run) -> list[str]:
    lines = []
    if run.best:
        unit = "step" if run.config.get("steps") else "epoch"
        lines.append(f"best {run.score_name} {as_text(run.best.get('score'))} at {unit} {run.best.get('index')}")
    if run.results:
        last = max(run.results)
        figures = {f"{split}/{name}": value for split, of in run.results[last].items() for name, value in of.items()}
        shown = _joined(f"{name} {as_text(value)}" for name, value in list(figures.items())[:6])
        lines.append(f"last, at {last}: {shown}")
    return lines


def _saved(run: Run) -> list[str]:
    config, made, kept = run.config, run.record["checkpoints"], run.config.get("checkpoint.keep_latest_k")
    if config.get("checkpoint.load_only"):
        return ["nothing (checkpoint.load_only=true)"]
    unit, every, remote = "update" if config.get("steps") else "epoch", made["interval"], "checkpoint.remote.url"
    when = f"every {every:,} {unit}s" if every and every != 1 else f"every {unit}"
    parts = [
        f"the full state {when} in {_MANAGERS.get(made['manager'], made['manager'])}",
        f"the latest {kept} are kept" if kept else "all are kept",
        f"the best by {run.score_name}" if run.score_name else "",
        f"a copy in {config[remote]}" if config.get(remote) else "",
    ]
    return ["; ".join(part for part in parts if part)]


def _disk(run: Run) -> list[str]:
    config, directory = run.config, run.path / str(run.config.get("checkpoint.dir_name", "checkpoints"))
    sizes = checkpoint_sizes(Path(config.get("checkpoint_dir") or directory))
    if not sizes:
        weights = as_bytes(run.record["model"]["bytes"]) if run.record else None
        return [f"no checkpoint here; the weights alone take {weights}"] if weights else []
    line = f"checkpoints take {as_bytes(sum(sizes))} now; the last one {as_bytes(sizes[-1])}"
    interval = run.record["checkpoints"]["interval"] if run.record else None
    budget, kept = config.get("steps") or config.get("epochs"), config.get("checkpoint.keep_latest_k")
    if interval and budget:
        # The best one may be older than those that are kept.
        count = min(math.ceil(budget / interval), kept + 1 if kept else budget)
        line += f"; at the end of the budget about {as_bytes(count * sizes[-1])} for {count}"
    return [line]


def checkpoint_sizes(directory: Path) -> list[int]:
    """Return the bytes of each checkpoint in a directory of checkpoints, hard links once, in the order they were written."""
    found: dict[tuple[int, int], tuple[float, int]] = {}
    for path in (*directory.glob("*.pth"), *directory.glob("targets/*")):
        inside = {path: path.stat()} if path.is_file() else {file: file.lstat() for file in path.rglob("*")}
        sizes = {(status.st_dev, status.st_ino): status.st_size for file, status in inside.items() if file.is_file()}
        own = path.stat()
        found[own.st_dev, own.st_ino] = own.st_mtime, sum(sizes.values())
    return [size for _, size in sorted(found.values())]


def sparkline(values: Sequence[float], columns: int = _CURVE_COLUMNS) -> str:
    """Return a curve as one line of bars from 0, each the mean of its part of the values."""
    columns = min(columns, len(values))
    bounds = [round(index * len(values) / columns) for index in range(columns + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in pairwise(bounds)]
    top = max(means)
    return "".join(_BARS[round(max(mean, 0.0) / top * (len(_BARS) - 1))] if top > 0 else _BARS[0] for mean in means)


def _joined(parts: Iterable[str]) -> str:
    return ", ".join(part for part in parts if part)


def _counted(number: int, word: str) -> str:
    return f"{number} {word}{'s' if number != 1 else ''}"


def _settings(kind: str, settings: Mapping[str, object]) -> str:
    return ": ".join(part for part in (kind, _joined(f"{n} {value}" for n, value in settings.items())) if part)

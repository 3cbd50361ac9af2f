"""Say on one screen what a run trained: model, data, update, schedule, layout, environment, results, and what it keeps on disk.

Only files of the run are read; the program that made it and torch are not needed.

Example: danling explain experiments/lin/run
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from danling.utils.messages import as_text, format_count
from danling.workspace.runs import Run

from .output import add_json, as_bytes, name_problems, print_json
from .source import one_run

_WIDTH = 110
_NAMES = 13
_MOST_PARTS = 5


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
    sections: dict[str, list[str]] = {}
    for part in (_progress, _recorded, _results):
        try:
            sections |= part(run)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # The files may be another program's.
            run.problems.append(f"{run.path}: values that no run writes ({type(error).__name__}: {error})")
    if not run.record:
        sections["missing"] = [
            "metadata/run.json, which a run writes when it begins to train: model, data, optimizer, software and devices are unknown"
        ]
    return {name: lines for name, lines in sections.items() if any(lines)}


def _progress(run: Run) -> dict[str, list[str]]:
    config, step = run.config, run.step
    budget = f" of {config['steps']:,}" if config.get("steps") else ""
    line = _joined(
        f"trained to step {step:,}{budget}" if step is not None else "no step was logged",
        f"{max(run.results, default=0)} of {config['epochs']} epochs" if config.get("epochs") else "",
        _counted(run.attempts, "attempt") if run.attempts else "",
        f"last written {run.changed:%Y-%m-%d %H:%M} UTC" if run.changed else "",
        f"started from the weights of {config['pretrained']}" if config.get("pretrained") else "",
    )
    return {"run": [line]}


def _recorded(run: Run) -> dict[str, list[str]]:
    """Return the sections that `metadata/run.json` and the configuration tell of."""
    if not run.record:
        return {}
    record, config, git = run.record, run.config, run.git
    model, update, layout, made = (record[name] for name in ("model", "update", "layout", "environment"))
    whole, trained = model["parameters"], model["trained"]
    parts = [f"{p['name']} ({p['kind']}) {format_count(p['parameters'])}" for p in model["parts"] if p["kind"]]
    about_model = [
        _joined(
            f"{model['kind']}: {whole:,} parameters",
            f"{trained:,} trained" if trained != whole else "",
            *(*model["dtypes"], as_bytes(model["bytes"])),
            "averaged weights kept (EMA)" if model["averaged"] else "",
        ),
        _joined(*parts[:_MOST_PARTS], "..." if len(parts) > _MOST_PARTS else ""),
        *([f"loss: {record['criterion']}"] if record.get("criterion") else []),
    ]
    replicas, batch, micro_batches = layout["data_replicas"], update["batch_size"], update["micro_batches"]
    samples = update["samples"] or (batch * micro_batches * replicas if batch else None)
    divided = f"{micro_batches} micro-batch{'es' if micro_batches != 1 else ''} of {batch}"
    limits = {kind: config.get(f"max_grad_{kind}") for kind in ("norm", "value")}
    about_update = _joined(
        f"{samples:,} samples" if samples else "",
        divided + (f" on each of {replicas} ranks" if replicas > 1 else "") if batch else "",
        str(config.get("precision") or "fp32"),
        *(f"clipped at {kind} {limit}" for kind, limit in limits.items() if limit),
        "skipped if not finite" if config.get("skip_nonfinite_grad") else "",
    )
    optimizer = record["optimizer"] or {"kind": None, "groups": []}
    groups = []
    for group in optimizer["groups"]:
        options = {name: group[name] for name in ("weight_decay", "betas", "momentum", "eps") if name in group}
        options = {"lr": group.get("initial_lr", group.get("lr")), **options}
        tensors = f"{group['tensors']} tensors: " if len(optimizer["groups"]) > 1 else ""
        groups.append(tensors + _settings(optimizer["kind"], options))
    named = {key.partition(".")[2]: value for key, value in config.items() if key.startswith("scheduler.")}
    schedule = {name: value for name, value in named.items() if value is not None}
    kind = schedule.pop("type", None) or record.get("scheduler")
    steps, rates = run.curve("train/learning_rate")
    pace = ""
    if len(rates) > 1:
        pace = f"learning rate {rates[0]:.3g} at step {steps[0]:,.0f}, {max(rates):.3g} at most, {rates[-1]:.3g} at step {steps[-1]:,.0f}"
    axes = {key.rpartition(".")[2]: value for key, value in config.items() if key.startswith("parallel.axes.")}
    degrees = _joined(*(f"{name} {degree}" for name, degree in axes.items() if degree != 1))
    processes = f"{layout['processes']} {layout['device']} process{'es' * (layout['processes'] != 1)}"
    changes = ", with changes (metadata/git.diff)" if git.get("dirty") else ""
    interval, kept = record["checkpoints"]["interval"], config.get("checkpoint.keep_latest_k")
    unit = "update" if config.get("steps") else "epoch"
    saved = _joined(
        f"the full state every {f'{interval:,} {unit}s' if interval and interval != 1 else unit}",
        f"by {record['checkpoints']['manager']}",
        f"the latest {kept} are kept" if kept else "all are kept",
        f"the best by {run.score_name}" if run.score_name else "",
        f"a copy in {config['checkpoint.remote.url']}" if config.get("checkpoint.remote.url") else "",
    )
    return {
        "model": [line for line in about_model if line],
        "data": [_split(split, about, record["seed"]) for split, about in record["data"].items()],
        "update": [about_update],
        "optimizer": groups,
        "schedule": [_settings(str(kind), schedule) if kind else "constant", *([pace] if pace else [])],
        "layout": [f"{layout['stack']} on {processes}{f' ({degrees})' if degrees else ''}"],
        "environment": [
            f"danling {made['danling']}, Python {made['python']}, torch {made['torch']}",
            f"{made['processor']}, {_counted(int(made['threads']), 'thread')}, {made['system']}",
            *([f"code {git['code_id']} on {git.get('branch')}{changes}"] if git.get("sha") else []),
        ],
        "saved": ["nothing (checkpoint.load_only=true)" if config.get("checkpoint.load_only") else saved],
    }


def _split(split: str, about: Mapping[str, Any], seed: int) -> str:
    uses = {"trained on": about["trained"], "evaluated": about["evaluated"]}
    source = "the dataset" if about["shuffled"] is False else about["loader"]
    return _joined(
        f"{split} ({' and '.join(word for word, is_used in uses.items() if is_used) or 'not used'}): {about['kind']}",
        f"{about['samples']:,} samples" if about["samples"] is not None else "a stream without a length",
        f"shuffled with seed {seed}" if about["shuffled"] else f"in the order of {source}",
        _counted(about["workers"], "worker") if about["workers"] else "",
    )


def _results(run: Run) -> dict[str, list[str]]:
    """Return the scores, and the sizes of the checkpoints."""
    lines = []
    if run.best:
        unit = "step" if run.config.get("steps") else "epoch"
        lines.append(f"best {run.score_name} {as_text(run.best.get('score'))} at {unit} {run.best.get('index')}")
    if run.results:
        last = max(run.results)
        figures = {f"{split}/{name}": value for split, of in run.results[last].items() for name, value in of.items()}
        shown = _joined(*(f"{name} {as_text(value)}" for name, value in list(figures.items())[:6]))
        lines.append(f"last, at {last}: {shown}")
    directory = run.path / str(run.config.get("checkpoint.dir_name", "checkpoints"))
    sizes = checkpoint_sizes(Path(run.config.get("checkpoint_dir") or directory))
    disk = (
        f"checkpoints take {as_bytes(sum(sizes))}; the last one {as_bytes(sizes[-1])}"
        if sizes
        else "no checkpoint here"
    )
    return {"results": lines, "disk": [disk]}


def checkpoint_sizes(directory: Path) -> list[int]:
    """Return the bytes of each checkpoint in a directory of checkpoints, hard links once, in the order they were written."""
    found: dict[tuple[int, int], tuple[float, int]] = {}
    for path in (*directory.glob("*.pth"), *directory.glob("targets/*")):
        inside = {path: path.stat()} if path.is_file() else {file: file.lstat() for file in path.rglob("*")}
        sizes = {(status.st_dev, status.st_ino): status.st_size for file, status in inside.items() if file.is_file()}
        own = path.stat()
        found[own.st_dev, own.st_ino] = own.st_mtime, sum(sizes.values())
    return [size for _, size in sorted(found.values())]


def _joined(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def _counted(number: int, word: str) -> str:
    return f"{number} {word}{'s' if number != 1 else ''}"


def _settings(kind: str, settings: Mapping[str, object]) -> str:
    return f"{kind}: {_joined(*(f'{name} {value}' for name, value in settings.items()))}".removesuffix(": ")

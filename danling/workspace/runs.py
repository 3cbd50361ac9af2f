"""Finished and running runs, read from their directories: no process of theirs, no service and no torch is needed."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeGuard

import yaml

from danling.reporting.jsonl import read_jsonl
from danling.utils.files import read_text
from danling.utils.plain import flatten, parse_json, parse_yaml

from .run_directory import has_line, natural_key

PathLike = str | os.PathLike[str]

Curve = tuple[list[float], list[float]]
"""Positions (steps or seconds) and values of one metric, in the order they were written; equally long."""

# A directory with one of these is that of a run, also of one that was killed early.
_SIGNS = ("metrics.jsonl", "results.json", "metadata/config.full.yaml")
_PATHS = frozenset({"workspace_root", "dir", "checkpoint_dir", "log_file", "resume", "auto_resume"})


Side = Literal["producer", "trainer"]


@dataclass(frozen=True)
class StreamSide:
    """What one run has written of a stream."""

    run: str
    stream: str
    side: Side
    published: int
    trained: int
    waited_seconds: float
    end: str | None
    written: float

    @classmethod
    def of(cls, run: str, record: Mapping[str, Any], written: float) -> StreamSide:
        """Parse a record of `streams.json`."""
        try:
            side, end = record["side"], record["end"]
            if side not in ("producer", "trainer"):
                raise ValueError(f"side {side!r}")
            return cls(
                run=run,
                stream=str(record["stream"]),
                side=side,
                published=int(record["published"]),
                trained=int(record["trained"]),
                waited_seconds=float(record["waited_seconds"]),
                end=None if end is None else str(end),
                written=written,
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(
                f"Expected the progress of a stream. Received: {record!r} ({error})."
            ) from None


@dataclass(frozen=True)
class Run:
    """One run directory. Missing parts are empty here: a run that was killed early has no results yet."""

    path: Path
    name: str
    location: str = ""
    """Its URL, where it is in an object store."""
    problems: list[str] = field(default_factory=list, compare=False, repr=False)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The whole configuration, by dotted key."""
        return flatten(self._read("metadata/config.full.yaml", _parse_yaml), keeps_empty=True)

    @cached_property
    def canonical(self) -> dict[str, Any]:
        """What of the configuration changes the result, by dotted key."""
        return flatten(self._read("metadata/config.canonical.yaml", _parse_yaml), keeps_empty=True)

    @cached_property
    def chosen(self) -> dict[str, Any]:
        """What of the configuration is not the default, by dotted key."""
        return flatten(self._read("metadata/config.diff.yaml", _parse_yaml), keeps_empty=True)

    @cached_property
    def git(self) -> dict[str, Any]:
        """State of the code, empty without git."""
        return self._read("metadata/git.yaml", _parse_yaml)

    @cached_property
    def record(self) -> dict[str, Any]:
        """What the run recorded of itself when it began to train; empty for a run that has not, see `danling.reporting.record`."""
        return self._read("metadata/run.json", _parse_record)

    @cached_property
    def results(self) -> dict[int, dict[str, dict[str, float | None]]]:
        """Figures by completed epoch or global step, then by split."""
        return self._read("results.json", _parse_results)

    @cached_property
    def best(self) -> dict[str, Any]:
        """`index`, `score` and `result` of the best evaluation; empty before the first."""
        return self._read("best.json", _parse_chosen)

    @cached_property
    def latest(self) -> dict[str, Any]:
        """`index` and `result` of the last evaluation; empty before the first."""
        return self._read("latest.json", _parse_chosen)

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`."""
        file = self.path / "metrics.jsonl"
        try:
            records = read_jsonl(file)
            # A kill may leave the only line unfinished; a whole one that cannot be read is something else.
            if not records and has_line(file):
                self.problems.append(f"{file}: none of its lines is a record of figures")
            return records
        except FileNotFoundError:
            return []
        except (ValueError, OSError) as error:
            self.problems.append(f"{file}: {error}")
            return []

    @cached_property
    def streams(self) -> list[StreamSide]:
        """Progress of the streams that the run fills or trains on, as it wrote last; empty for a run without one."""
        file = self.path / "streams.json"
        records = self._read(file.name, lambda text: _mapping(parse_json(text)))
        try:
            written = file.stat().st_mtime if records else 0.0
            return [
                StreamSide.of(self.name, _mapping(record), written) for record in records.values()
            ]
        except (ValueError, OSError) as error:
            self.problems.append(f"{file}: {error}")
            return []

    def _read(self, name: str, parse: Callable[[str], dict[Any, Any]]) -> dict[Any, Any]:
        # Reading many runs must not end at one broken file, and a reader must be told that it was left out.
        file = self.path / name
        try:
            return parse(read_text(file))
        except FileNotFoundError:
            return {}
        except (ValueError, yaml.YAMLError, OSError) as error:
            self.problems.append(f"{file}: {' '.join(str(error).split())}")
            return {}

    @property
    def step(self) -> int | None:
        """Global step of the last metric; `None` when there is none."""
        return self.records[-1]["step"] if self.records else None

    @property
    def score_name(self) -> str | None:
        """Figure that the best evaluation was chosen by, such as `val/acc`; `None` before the first evaluation.

        Where the configuration leaves the split open, it is the one whose metric the score is.
        """
        name = str(self.config.get("score_name", "loss"))
        splits = self.best.get("result", {})
        chosen = self.config.get("score_split")
        score = self.best.get("score")
        found = [
            split
            for split, figures in splits.items()
            if figures.get(name.removeprefix(f"{split}.")) == score and split != "train"
        ]
        split = str(chosen) if chosen else next(iter(found), None)
        if not split:
            return name if self.best else None
        return f"{split}/{name.removeprefix(f'{split}.')}"

    @property
    def latest_score(self) -> float | None:
        """The metric of `score_name` in the last evaluation."""
        # The last evaluation may have had other splits than the best one.
        split, _, name = (self.score_name or "").partition("/")
        value = self.latest.get("result", {}).get(split, {}).get(name)
        return None if value is None else float(value)

    @property
    def attempts(self) -> int:
        """Number of logs: of the times it was started with logging on."""
        return len(list((self.path / "logs").glob("*.log")))

    @property
    def changed(self) -> datetime | None:
        """When metrics or metadata were last written, in UTC."""
        files = [self.path / name for name in _SIGNS]
        times = [file.stat().st_mtime for file in files if file.is_file()]
        try:
            return datetime.fromtimestamp(max(times), UTC) if times else None
        except (ValueError, OverflowError, OSError):
            return None  # a year that a calendar does not have

    @property
    def figures(self) -> list[str]:
        """Names of all metrics in `metrics.jsonl`, sorted."""
        return sorted(
            {name for record in self.records for name in record} - {"step", "time", "ranks"}
        )

    def curve(self, figure: str, *, by: str = "step") -> Curve:
        """Return a metric over steps or time; values that were not finite, or are no numbers, are left out."""
        if by not in ("step", "time"):
            raise ValueError(f"Expected by to be 'step' or 'time'. Received: by={by!r}.")
        places = [(r[by], r.get(figure)) for r in self.records if _is_number(r.get(by))]
        # Time is counted from the first line of the run, steps as they are.
        start = places[0][0] if by == "time" and places else 0
        points = [(float(x - start), float(y)) for x, y in places if _is_number(y)]
        return [x for x, _ in points], [y for _, y in points]

    def summary(self) -> dict[str, Any]:
        """Return the run as one row of plain values."""
        return {
            "run": self.name,
            "path": self.location or str(self.path),
            "step": self.step,
            "attempts": self.attempts,
            "score_name": self.score_name,
            "best": self.best.get("score"),
            "best_index": self.best.get("index"),
            "latest": self.latest_score,
            "changed": self.changed.isoformat(timespec="seconds") if self.changed else None,
            "code_id": self.git.get("code_id"),
        }


def is_run(path: PathLike) -> bool:
    return any(Path(path, sign).is_file() for sign in _SIGNS)


def find_runs(root: PathLike) -> list[Run]:
    """Return the runs at or below a directory, sorted by name; links to directories are not followed."""
    top = Path(root)
    if not top.is_dir():
        raise FileNotFoundError(
            f"Expected a directory with runs. Received: {str(root)!r}, which is none."
        )
    if is_run(top):
        return [Run(top, top.resolve().name)]
    # `id-2` comes between `id` and `id-10`.
    paths = sorted(_walk(top), key=lambda path: [natural_key(part) for part in path.parts])
    return [Run(path, str(path.relative_to(top))) for path in paths]


def _walk(top: Path) -> Iterator[Path]:
    for directory, names, _ in os.walk(top):
        path = Path(directory)
        if is_run(path):
            # Checkpoints and events of a run are many, and no run is among them.
            names.clear()
            yield path


def streams_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the streams that runs fill or train on as rows of plain values, sorted by name.

    Of several trainers the slowest counts; without one, what the producer knows of it. `end` is `complete`, `failed` or `stopped`, and
    `open` while the log has not ended; what was written last decides, but a log that is complete stays so.
    """
    rows = []
    sides = sorted((side for run in runs for side in run.streams), key=lambda side: side.written)
    for name in sorted({side.stream for side in sides}):
        of_stream = [side for side in sides if side.stream == name]
        by_name = sorted(of_stream, key=lambda side: natural_key(side.run))
        producers = [side for side in by_name if side.side == "producer"]
        trainers = [side for side in by_name if side.side == "trainer"]
        published = max(side.published for side in of_stream)
        trained = min(side.trained for side in trainers or producers)
        is_complete = any(side.end == "complete" for side in of_stream)
        rows.append(
            {
                "stream": name,
                "published": published,
                "trained": trained,
                "waiting": max(published - trained, 0),
                "end": "complete" if is_complete else of_stream[-1].end or "open",
                "producers": [
                    {"run": side.run, "waited_seconds": side.waited_seconds} for side in producers
                ],
                "trainers": [
                    {
                        "run": side.run,
                        "trained": side.trained,
                        "waited_seconds": side.waited_seconds,
                    }
                    for side in trainers
                ],
            }
        )
    return rows


def config_differences(runs: Sequence[Run], *, everything: bool = False) -> dict[str, list[Any]]:
    """Return the settings in which runs differ: by dotted key, the value of each run, `None` where it has none."""
    configs = [run.config if everything else {**run.canonical, **_seeds(run)} for run in runs]
    keys = sorted(
        {key for config in configs for key in config if key.partition(".")[0] not in _PATHS}
    )
    table = {key: [config.get(key) for config in configs] for key in keys}
    return {
        key: values for key, values in table.items() if any(value != values[0] for value in values)
    }


def labels(runs: Sequence[Run]) -> list[str]:
    """Return what tells runs apart in a legend: one or two settings, where these do; else their names."""
    differences = config_differences(runs)
    names = [
        ", ".join(f"{key}={value}" for key, value in zip(differences, row))
        for row in zip(*differences.values())
    ]
    # Three settings fill a legend, and some combinations are in several runs.
    if len(differences) > 2 or len(set(names)) < len(runs):
        return [run.name for run in runs]
    return names


def _seeds(run: Run) -> dict[str, object]:
    # Budgets and seeds may change in a resumed run, so they are not canonical everywhere; they do tell runs apart.
    return {key: run.config[key] for key in ("seed", "steps", "epochs") if key in run.config}


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _mapping(value: object) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"Expected a mapping. Received: {type(value).__name__}.")
    return value


def _parse_yaml(text: str) -> dict[str, Any]:
    return _mapping(parse_yaml(text) or {})


def _parse_record(text: str) -> dict[str, Any]:
    record = _mapping(parse_json(text))
    for name in ("model", "data", "update", "layout", "environment", "checkpoints"):
        if not isinstance(record.get(name), dict):
            raise ValueError(f"Expected a record with a section {name!r}.")
    return record


def _parse_result(result: object) -> dict[str, dict[str, float | None]]:
    figures = {split: _mapping(values) for split, values in _mapping(result).items()}
    odd = [
        f"{split}/{name}"
        for split, of in figures.items()
        for name, v in of.items()
        if not (v is None or _is_number(v))
    ]
    if odd:
        raise ValueError(f"Expected numbers. Received something else in {', '.join(odd)}.")
    return figures


def _parse_results(text: str) -> dict[int, dict[str, dict[str, float | None]]]:
    return {
        int(index): _parse_result(result) for index, result in _mapping(parse_json(text)).items()
    }


def _parse_chosen(text: str) -> dict[str, Any]:
    chosen = _mapping(parse_json(text))
    # Before its first evaluation a run writes the file with nothing in it.
    if chosen.get("result") is None:
        return {}
    for name in ("index", "score"):
        if chosen.get(name) is not None and not _is_number(chosen[name]):
            raise ValueError(f"Expected a number as {name}. Received: {chosen[name]!r}.")
    return {**chosen, "result": _parse_result(chosen["result"])}

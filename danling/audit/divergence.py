"""How two runs differ: settings, environment, code, and the first step at which their figures diverge."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from danling.utils.plain import flatten
from danling.workspace.runs import Curve, Run, config_differences

from .digests import DigestLine, read_digests

_CODE = ("code_id", "sha", "branch", "dirty", "diff_sha")
_ORDER = ("samples", "loss", "grad_norm", "optimizer", "weights", "buffers", "ema")
_REPEATABLE = frozenset({"loss", "grad_norm", "learning_rate"})
"""Metrics of single updates that are the same when a run is made again; others tell of its pace."""

Pair = tuple[object, object]
Figures = Mapping[str, Mapping[int, object]]
"""By name and step."""


@dataclass(frozen=True)
class Divergence:
    """The first step at which a figure of two runs differs.

    Attributes:
        figure: Its name: a column of the digests, or a metric.
        step: The step.
        last_equal: The last step before it at which both have it, and have the same; `None` where there is none.
        values: The figure of each run; digests as hexadecimal texts.
        difference: The second less the first; `None` for digests.
    """

    figure: str
    step: int
    last_equal: int | None
    values: Pair
    difference: float | None

    @property
    def what(self) -> str:
        """What diverged: `data`, `loss`, `gradients`, `optimizer`, `weights`, or the name of the figure."""
        names = {
            "samples": "data",
            "loss": "loss",
            "train/loss": "loss",
            "grad_norm": "gradients",
            "train/grad_norm": "gradients",
        }
        return names.get(self.figure, self.figure.partition(".")[0])


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side.

    Attributes:
        settings: By dotted key, the value of each run, where they differ; those that do not change the result too.
        environment: The same of what they were made with; empty where one has not noted it.
        has_environment: Whether both have noted it.
        code: The same of the state of their code.
        compared: Steps at which both have digests.
        figures: Figures that both have at one step at least.
        divergences: The first step of each figure that differs, the first one first; of one step, what comes first within an update.
        shares: By how much losses and metrics differ, as a share of those of the first run: the largest of each that does.
    """

    settings: Mapping[str, Pair]
    environment: Mapping[str, Pair]
    has_environment: bool
    code: Mapping[str, Pair]
    compared: Sequence[int]
    figures: Sequence[str]
    divergences: Sequence[Divergence]
    shares: Mapping[str, float]


def compare_runs(first: Run, second: Run) -> Comparison:
    """Return how two runs differ."""
    settings = {
        key: (values[0], values[1]) for key, values in config_differences([first, second], everything=True).items()
    }
    environments = [flatten(run.record.get("environment", {}), keeps_empty=True) for run in (first, second)]
    # Of packages, those that both have imported.
    apart = {key for key in set(environments[0]) ^ set(environments[1]) if key.startswith("versions.")}
    environments = [{key: value for key, value in each.items() if key not in apart} for each in environments]
    digests = read_digests(first.path, first.problems), read_digests(second.path, second.problems)
    shared = [
        *_shared(*_of_digests(*digests)),
        *_shared(*(_of_metrics(run) for run in (first, second))),
    ]
    both = all(environments)
    return Comparison(
        settings,
        _differences(*environments) if both else {},
        both,
        _differences(*({key: run.git.get(key) for key in _CODE} for run in (first, second))),
        sorted(digests[0].keys() & digests[1].keys()),
        sorted(name for name, _, _ in shared),
        _divergences(shared),
        {name: share for name, *values in shared if (share := largest_share(*values))},
    )


def compare_digests(first: Mapping[int, DigestLine], second: Mapping[int, DigestLine]) -> list[Divergence]:
    """Return where the digests of two runs diverge, the first one first."""
    return _divergences(_shared(*_of_digests(first, second)))


def _shared(first: Figures, second: Figures) -> list[tuple[str, Mapping[int, object], Mapping[int, object]]]:
    """Return the figures that both runs have at one step at least."""
    names = sorted(first.keys() & second.keys())
    return [(name, first[name], second[name]) for name in names if first[name].keys() & second[name].keys()]


def _divergences(shared: Sequence[tuple[str, Mapping[int, object], Mapping[int, object]]]) -> list[Divergence]:
    found = [divergence for each in shared if (divergence := first_difference(*each)) is not None]
    return sorted(found, key=lambda each: (each.step, _rank(each.figure), each.figure))


def first_difference(name: str, first: Mapping[int, object], second: Mapping[int, object]) -> Divergence | None:
    """Return where a figure of two runs diverges, `None` where it is the same at all steps that both have."""
    last = None
    for step in sorted(first.keys() & second.keys()):
        values = first[step], second[step]
        if not _same(*values):
            numbers = [value for value in values if isinstance(value, (int, float))]
            return Divergence(name, step, last, values, numbers[1] - numbers[0] if len(numbers) == 2 else None)
        last = step
    return None


def loss_differences(first: Run, second: Run) -> dict[str, Curve]:
    """Return by how much the figures of two runs differ over steps, those without any difference left out."""
    digests = _of_digests(*(read_digests(run.path) for run in (first, second)))
    metrics = [_of_metrics(run) for run in (first, second)]
    curves = {}
    for ours, theirs in (digests, metrics):
        for name in sorted(ours.keys() & theirs.keys()):
            pairs = [(step, ours[name][step], theirs[name].get(step)) for step in sorted(ours[name])]
            points = [
                (s, abs(a - b)) for s, a, b in pairs if isinstance(a, (int, float)) and isinstance(b, (int, float))
            ]
            if any(y for _, y in points):
                curves[name] = [float(x) for x, _ in points], [float(y) for _, y in points]
    return curves


def largest_share(first: Mapping[int, object], second: Mapping[int, object]) -> float:
    """Return by how much a figure of two runs differs at most, as a share of that of the first; 0 of digests, which have none."""
    return max((_share(first[step], second[step]) for step in first.keys() & second.keys()), default=0.0)


def _share(first: object, second: object) -> float:
    if not (isinstance(first, (int, float)) and isinstance(second, (int, float))) or _same(first, second):
        return 0.0
    share = abs(second - first) / abs(first) if first else math.inf
    return share if math.isfinite(share) else math.inf


def _of_digests(*runs: Mapping[int, DigestLine]) -> list[dict[str, dict[int, object]]]:
    """Return the figures of each run by name and step; a column that one of them leaves out has no tensors there, and is 0."""
    columns = sorted({name for lines in runs for line in lines.values() for name in line.digests})
    found: list[dict[str, dict[int, object]]] = []
    for lines in runs:
        of_run: dict[str, dict[int, object]] = {}
        for step, line in lines.items():
            digests = {name: f"{line.digests.get(name, 0):016x}" for name in columns}
            for name, value in {"loss": line.loss, "grad_norm": line.grad_norm, **digests}.items():
                of_run.setdefault(name, {})[step] = value
        found.append(of_run)
    return found


def _of_metrics(run: Run) -> dict[str, dict[int, object]]:
    found: dict[str, dict[int, object]] = {}
    for record in run.records:
        for name, value in record.items():
            split, slash, quantity = name.partition("/")
            if slash and (split != "train" or quantity.split("/")[0] in _REPEATABLE):
                found.setdefault(name, {})[int(record["step"])] = value
    return found


def _rank(figure: str) -> int:
    name = figure.removeprefix("train/").partition(".")[0]
    return _ORDER.index(name) if name in _ORDER else len(_ORDER)


def _same(first: object, second: object) -> bool:
    both_nan = all(isinstance(value, float) and math.isnan(value) for value in (first, second))
    return both_nan or first == second


def _differences(first: Mapping[str, object], second: Mapping[str, object]) -> dict[str, Pair]:
    keys = sorted(first.keys() | second.keys())
    return {key: (first.get(key), second.get(key)) for key in keys if first.get(key) != second.get(key)}

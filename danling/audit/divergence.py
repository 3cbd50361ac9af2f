"""How two runs differ: settings, environment, code, and the first step at which their figures diverge."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from danling.utils.plain import flatten
from danling.workspace.runs import Run, config_differences

from .digests import DigestLine, read_digests

_CODE = ("code_id", "sha", "branch", "dirty", "diff_sha")
# In the order in which an update computes them, but for buffers, which its forward changes: what
# differs first is nearest to the cause.
_ORDER = ("samples", "loss", "grad_norm", "optimizer", "weights", "buffers", "ema")
_REPEATABLE = frozenset({"loss", "grad_norm", "learning_rate"})
"""Metrics of single updates that are the same when a run is made again; others tell of its pace."""

Pair = tuple[object, object]
Pairs = Mapping[str, Mapping[int, Pair]]
"""By figure and step, the values of two runs, at the steps that both have, in their order."""


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
        name = self.figure.removeprefix("train/")
        return {"samples": "data", "loss": "loss", "grad_norm": "gradients"}.get(
            name, self.figure.partition(".")[0]
        )


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
    settings = config_differences([first, second], everything=True)
    environments = [
        flatten(run.record.get("environment", {}), keeps_empty=True) for run in (first, second)
    ]
    # Of packages, those that both have imported.
    apart = {
        key for key in set(environments[0]) ^ set(environments[1]) if key.startswith("versions.")
    }
    environments = [
        {key: value for key, value in each.items() if key not in apart} for each in environments
    ]
    has_environment = all(environments)
    digests = read_digests(first.path, first.problems), read_digests(second.path, second.problems)
    pairs = {**_paired_digests(*digests), **_paired_metrics(first, second)}
    shares = {name: max(map(_share, of_steps.values())) for name, of_steps in pairs.items()}
    return Comparison(
        settings={key: (values[0], values[1]) for key, values in settings.items()},
        environment=_differences(*environments) if has_environment else {},
        has_environment=has_environment,
        code=_differences(*({key: run.git.get(key) for key in _CODE} for run in (first, second))),
        compared=sorted(digests[0].keys() & digests[1].keys()),
        figures=sorted(pairs),
        divergences=_divergences(pairs),
        shares={name: share for name, share in shares.items() if share},
    )


def compare_digests(
    first: Mapping[int, DigestLine], second: Mapping[int, DigestLine]
) -> list[Divergence]:
    """Return where the digests of two runs diverge, the first one first."""
    return _divergences(_paired_digests(first, second))


def _paired_digests(first: Mapping[int, DigestLine], second: Mapping[int, DigestLine]) -> Pairs:
    """Return the figures of digests; a column that one run leaves out has no tensors there, and is 0."""
    # Of both runs: a state that only one of them has is a difference.
    columns = sorted(
        {name for lines in (first, second) for line in lines.values() for name in line.digests}
    )
    pairs: dict[str, dict[int, Pair]] = {}
    for step in sorted(first.keys() & second.keys()):
        one, other = first[step], second[step]
        pairs.setdefault("loss", {})[step] = one.loss, other.loss
        pairs.setdefault("grad_norm", {})[step] = one.grad_norm, other.grad_norm
        for name in columns:
            digests = one.digests.get(name, 0), other.digests.get(name, 0)
            pairs.setdefault(name, {})[step] = f"{digests[0]:016x}", f"{digests[1]:016x}"
    return pairs


def _paired_metrics(first: Run, second: Run) -> Pairs:
    sides: list[dict[tuple[int, str], object]] = [{}, {}]
    for run, side in zip((first, second), sides):
        for record in run.records:
            for name, value in record.items():
                split, slash, quantity = name.partition("/")
                if slash and (split != "train" or quantity.split("/")[0] in _REPEATABLE):
                    side[int(record["step"]), name] = value
    pairs: dict[str, dict[int, Pair]] = {}
    for step, name in sorted(sides[0].keys() & sides[1].keys()):
        pairs.setdefault(name, {})[step] = sides[0][step, name], sides[1][step, name]
    return pairs


def _divergences(pairs: Pairs) -> list[Divergence]:
    """Return the first step at which each figure differs, the first one first; of one step, what comes first within an update."""
    found = []
    for figure, of_steps in pairs.items():
        last = None
        for step, values in of_steps.items():
            if not _same(*values):
                # What follows differs because of it.
                a, b = values
                difference = b - a if _is_number(a) and _is_number(b) else None
                found.append(Divergence(figure, step, last, values, difference))
                break
            last = step

    def place(found: Divergence) -> tuple[int, int, str]:
        name = found.figure.removeprefix("train/").partition(".")[0]
        return found.step, _ORDER.index(name) if name in _ORDER else len(_ORDER), found.figure

    return sorted(found, key=place)


def _share(pair: Pair) -> float:
    """Return by how much two numbers differ, as a share of the first; 0 of digests, which have none."""
    first, second = pair
    if not (_is_number(first) and _is_number(second)) or _same(first, second):
        return 0.0
    # Any tolerance is smaller than infinity: a number that is not finite in one run alone differs.
    share = abs(second - first) / abs(first) if first else math.inf
    return share if math.isfinite(share) else math.inf


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float))


def _same(first: object, second: object) -> bool:
    return first == second or (first != first and second != second)  # NaN


def _differences(first: Mapping[str, object], second: Mapping[str, object]) -> dict[str, Pair]:
    keys = sorted(first.keys() | second.keys())
    return {
        key: (first.get(key), second.get(key)) for key in keys if first.get(key) != second.get(key)
    }

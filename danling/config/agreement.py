"""One run has one configuration: settings are compared over all ranks, but for those that may differ by machine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from danling.utils.plain import flatten

from .identity import LOADING, SOURCES, digest

if TYPE_CHECKING:
    from .runner_config import RunnerConfig

# What may differ by machine. By last name in any case, or by dotted name. A path is a text: `drop_path=0.1` is a rate.
PATHS = frozenset(
    {"dir", "path", "root", "file", "init_method", "mlflow.uri", "audit.gradients.weights"}
)
PATH_ENDINGS = ("_dir", "_path", "_root", "_file")
DEVICES = frozenset(
    {
        "device",
        "gpu",
        "gpu_ids",
        "local_rank",
        "node_rank",
        "machine_rank",
        "hostname",
        "mesh_device_type",
    }
)
# Keys at the top level and their sections. Names count on the main process only, and often contain the time; a `rank` in a section may
# be that of a matrix.
PROCESS = frozenset({"rank", "name", "experiment"})
OUTPUT = frozenset(
    {"log", "log_seconds", "tensorboard", "wandb", "mlflow", "trackio", "heartbeat", "profiling"}
)
RECORDS = frozenset({"git_diff", "secret_keys"})

_SHOWN = 8
_LONGEST = 60


def may_differ(key: str, value: object, listed: Collection[str] = ()) -> bool:
    """Whether a value may be another one on another machine: paths, loader workers, devices, names, output, and `local_keys`."""
    head, _, _ = key.partition(".")
    last = key.rpartition(".")[2]
    if head in OUTPUT or head in RECORDS or key in PROCESS:
        return True
    if head == "dataloader" and last in LOADING:
        return True
    names = {key, last}
    if any(name in names or key.startswith(f"{name}.") for name in listed):
        return True
    known = {key, last.lower()}
    is_path = last.lower().endswith(PATH_ENDINGS) or not known.isdisjoint(PATHS)
    return not known.isdisjoint(DEVICES) or (is_path and _is_text(value))


def _is_text(value: object) -> bool:
    return all(
        item is None or isinstance(item, str)
        for item in (value if isinstance(value, list) else [value])
    )


def check_alike(config: RunnerConfig, gather: Callable[[Any], Sequence[Any]]) -> None:
    """Refuse a configuration that is not the same on all ranks. Called on all ranks, which get the same error.

    The sources `resume` and `pretrained` are compared by whether they are set: what they contain is compared where they are read.

    Args:
        config: The configuration of this rank.
        gather: Returns a value of every rank in their order, such as `Domain.gather_objects`.

    Raises:
        ValueError: If a setting differs that may not differ by machine; the text names each key with its values by rank.
    """
    settings = flatten(_numbered(config.public()), keeps_empty=True)
    listed = config.local_keys or ()
    compared = {
        key: _compared(key, value)
        for key, value in settings.items()
        if not may_differ(key, value, listed)
    }
    # Digests first: thousands of ranks need not send each other all their settings.
    if len(set(gather(digest(compared)))) == 1:
        return
    ranks = gather((compared, {key: settings[key] for key in compared}))
    keys = sorted({key for values, _ in ranks for key in values})
    # By digest, for which 1 and 1.0 are the same, as in the id of a run.
    differing = [
        key
        for key in keys
        if len({digest({key: values[key]} if key in values else {}) for values, _ in ranks}) > 1
    ]
    lines = [
        f"{key}: {values_by_rank([shown.get(key, _ABSENT) for _, shown in ranks])}"
        for key in differing[:_SHOWN]
    ]
    if len(differing) > _SHOWN:
        lines.append(f"and {len(differing) - _SHOWN} more")
    listing = "\n  ".join(lines)
    raise ValueError(
        f"Expected one configuration on all ranks. Received:\n  {listing}\n"
        "Set each key to one value on all ranks. `local_keys` lists more keys that may differ by machine; paths, loader workers, "
        "devices and output may differ."
    )


def _numbered(value: Any) -> Any:
    """Return plain values with lists of sections as sections, so that a path in one of them has a name: `sources.0.path`."""
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        value = dict(enumerate(value))
    return (
        {name: _numbered(item) for name, item in value.items()}
        if isinstance(value, Mapping)
        else value
    )


class _Absent:
    def __repr__(self) -> str:
        return "absent"


_ABSENT = _Absent()


def _compared(key: str, value: object) -> object:
    """Return what counts of a value: a place by whether it is set, since copies of one checkpoint may have several paths."""
    if key not in (*SOURCES, "pretrained") or not isinstance(value, str) or "://" in value:
        return value
    return bool(value)


def values_by_rank(values: Sequence[object]) -> str:
    """Return values by rank as text, such as `0.1 (ranks 0, 2), 0.2 (rank 1)`."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(repr(value), []).append(rank)
    return ", ".join(f"{_cut(text)} ({_named(which)})" for text, which in ranks.items())


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _named(ranks: Sequence[int]) -> str:
    first = ", ".join(map(str, ranks[:_SHOWN]))
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {first}{more}"


def content_differs(sources: Mapping[str, Sequence[str]]) -> ValueError:
    """Return the error for sources that have another content on some ranks: by key, a text for each rank."""
    lines = [
        f"{key} of rank {rank}: {text}"
        for key, texts in sources.items()
        for rank, text in enumerate(texts)
    ]
    listing = "\n  ".join(lines[:_SHOWN])
    return ValueError(
        f"Expected one checkpoint on all ranks; copies of it may have other paths. Received:\n  {listing}\n"
        "Give all ranks the same checkpoint."
    )

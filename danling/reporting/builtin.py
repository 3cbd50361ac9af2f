"""The trackers that come with the library: one table, a row for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from danling.utils.secrets import secret_values

from .mlflow_tracker import MlflowTracker
from .trackers import JsonlTracker, TensorBoardTracker, Tracker, WandbTracker
from .trackio_tracker import TrackioTracker

if TYPE_CHECKING:
    from danling.config import RunnerConfig


class RunFiles(Protocol):
    """Where the trackers of a run write; `danling.workspace.Workspace` is such a one."""

    dir: Path
    jsonl_file: Path
    tensorboard_dir: Path

    def latest_tensorboard_dir(self) -> Path | None:
        """Return the directory of the events of the last attempt that wrote some."""


@dataclass(frozen=True)
class TrackerPlace:
    """What the trackers of a run are opened with.

    Attributes:
        config: Configuration of the run.
        files: Paths of the run.
        name: Name of the run among others.
        step: Updates committed before; what an earlier attempt logged after them is replaced.
    """

    config: RunnerConfig
    files: RunFiles
    name: str
    step: int


@dataclass(frozen=True)
class BuiltInTracker:
    """One row of the table.

    Attributes:
        wanted: Tells from the configuration whether the tracker is asked for.
        open: Opens it; called on the main process only, when training first begins.
    """

    wanted: Callable[[RunnerConfig], bool]
    open: Callable[[TrackerPlace], Tracker]


def _open_jsonl(place: TrackerPlace) -> Tracker:
    return JsonlTracker(place.files.jsonl_file, resume_step=place.step)


def _open_tensorboard(place: TrackerPlace) -> Tracker:
    # A resumed run goes on in the directory of its last attempt, so that there is one curve.
    earlier = place.files.latest_tensorboard_dir() if place.step else None
    return TensorBoardTracker(earlier or place.files.tensorboard_dir, purge_step=place.step + 1 if place.step else None)


def _open_wandb(place: TrackerPlace) -> Tracker:
    config, settings = place.config, place.config.wandb
    return WandbTracker(
        project=settings.project or config.lineage,
        entity=settings.entity,
        group=settings.group or config.experiment,
        name=settings.name or place.name,
        job_type=settings.job_type,
        tags=settings.tags,
        dir=settings.dir or place.files.dir,
        mode=settings.mode,
        run_id=place.name,
        config=config.public(),
        secrets=secret_values(config.plain(), config.secret_keys or ()),
    )


def _open_mlflow(place: TrackerPlace) -> Tracker:
    config, settings = place.config, place.config.mlflow
    return MlflowTracker(
        uri=settings.uri,
        default_uri=_sqlite_uri(place.files.dir / "mlflow.db"),
        experiment=settings.experiment or config.lineage,
        run_id=place.name,
        name=settings.name,
        resumed=place.step > 0,
        config=config.public(),
    )


def _sqlite_uri(file: Path) -> str:
    # The two characters of a path that mean something else in a URI.
    return f"sqlite:///{file}".replace("%", "%25").replace("?", "%3F")


def _open_trackio(place: TrackerPlace) -> Tracker:
    config, settings = place.config, place.config.trackio
    return TrackioTracker(
        project=settings.project or config.lineage,
        run_id=place.name,
        group=settings.group or config.experiment,
        space_id=settings.space_id,
        server_url=settings.server_url,
        resumed=place.step > 0,
        config=config.public(),
    )


BUILT_IN_TRACKERS: Mapping[str, BuiltInTracker] = {
    "jsonl": BuiltInTracker(lambda config: True, _open_jsonl),
    "tensorboard": BuiltInTracker(lambda config: bool(config.tensorboard), _open_tensorboard),
    "wandb": BuiltInTracker(lambda config: bool(config.wandb.enabled), _open_wandb),
    "mlflow": BuiltInTracker(lambda config: bool(config.mlflow.enabled), _open_mlflow),
    "trackio": BuiltInTracker(lambda config: bool(config.trackio.enabled), _open_trackio),
}
"""The trackers by name, in the order in which they are opened. A runner opens `name` by its hook `init_<name>`, where it has one."""

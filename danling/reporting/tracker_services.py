"""Trackers of other packages (TensorBoard, Weights & Biases, MLflow, trackio), and the table of those that a configuration asks for."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from danling.utils.plain import flatten
from danling.utils.secrets import secret_values

from .trackers import JsonlTracker, PathLike, RunStatus, Tracker

if TYPE_CHECKING:
    from danling.runners.base_runner import BaseRunner

logger = logging.getLogger("danling")

RUN_TAG = "danling.run"
"""Tag by which a resumed run finds its own run in the store, whose ids are MLflow's."""

_MOST_METRICS, _MOST_PARAMETERS, _LONGEST, _LONGEST_NAME = 1000, 100, 500, 250
"""What one request takes, and how long the text of a parameter and a name may be: one that is longer has all of them refused."""
_STATUS: Mapping[RunStatus, str] = {
    "running": "RUNNING",
    "finished": "FINISHED",
    "failed": "FAILED",
    "preempted": "KILLED",
    "interrupted": "KILLED",
}
_OTHERS = re.compile(r"[^\w\-. :/]")
"""What no name may hold."""


class TensorBoardTracker:
    """Writes TensorBoard events.

    Args:
        directory: Directory of the events of this attempt; it is created.
        purge_step: When a run is resumed, the first step that is going to be written again: TensorBoard then hides what
            an earlier attempt wrote from there on *into the same directory*.
        flush_seconds: After how many seconds, at the latest, events are on the disk.

    Raises:
        ImportError: If `tensorboard` is not installed.
    """

    def __init__(self, directory: PathLike, *, purge_step: int | None = None, flush_seconds: int = 30) -> None:
        require_package("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        writer: Any = SummaryWriter
        self._writer: Any = writer(os.fspath(directory), purge_step=purge_step, flush_secs=flush_seconds)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write one scalar a name, all in one event: most of what `add_scalar` costs is the event around each value."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=name, simple_value=float(value)) for name, value in values.items()]
        self._writer._get_file_writer().add_summary(Summary(value=scalars), step, time.time())

    def flush(self) -> None:
        """Write pending events, so that a run resumed from this step has no gap before it."""
        self._writer.flush()

    def close(self) -> None:
        """Write pending events and close the file."""
        self._writer.close()


class WandbTracker:
    """Writes to a Weights & Biases run whose id is the run's own, so that a resumed run continues its own curves.

    A run that the program opened before with `wandb.init` is used as it is, and is left open.

    Args:
        project: Project of the run.
        run_id: Id of the run, the same for all its attempts; at most 128 characters, none of `/\\#?%:`.
        dir: Directory in which the directory `wandb` with local files is created: the run directory.
        mode: `online`, `offline`, `disabled` or `shared`; `None` leaves it to wandb, and so to `WANDB_MODE`.
        tags: One tag, or several.
        secrets: Texts that W&B must not be given: where the command line of the program has one of them, W&B is told nothing of the
            system, of which the command line is a part.
        **more: Further arguments of `wandb.init`: `entity`, `group`, `name`, `job_type`, and `config` as plain values.

    Raises:
        ImportError: If `wandb` is not installed.
    """

    def __init__(
        self,
        *,
        project: str | None,
        run_id: str,
        dir: PathLike | None = None,
        mode: str | None = None,
        tags: Sequence[str] | str | None = None,
        secrets: Collection[str] = (),
        **more: Any,
    ) -> None:
        require_package("wandb")
        import wandb

        self._owned = wandb.run is None
        self._exit_code: int | None = None
        self.run: Any = wandb.run
        if not self._owned:
            return
        if dir is not None:
            Path(dir).mkdir(parents=True, exist_ok=True)
            more["dir"] = os.fspath(dir)
        if any(secret in word for word in sys.argv for secret in secrets):
            more["settings"] = wandb.Settings(x_disable_meta=True)
        # Offline, wandb cannot look for the run and only warns; when they are synchronised, the id joins the attempts.
        offline = (mode or os.environ.get("WANDB_MODE", "")) in ("offline", "dryrun", "disabled")
        named: Any = {"mode": mode, "tags": [tags] if isinstance(tags, str) else tags}
        self.run = wandb.init(id=run_id, project=project, resume=None if offline else "allow", **named, **more)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Send metrics; wandb drops those of steps before its newest, so that curves of a resumed run never double."""
        self.run.log({name: float(value) for name, value in values.items()}, step=step)

    def flush(self) -> None:
        """The process of wandb keeps the values that were sent, and outlives this one."""

    def set_status(self, status: RunStatus) -> None:
        """Keep with which exit code the run is to be finished; a sweep is told at once of one that is preempted, and starts it again."""
        self._exit_code = _WANDB_EXIT_CODES.get(status)
        if status == "preempted" and self._owned and self.run is not None:
            self.run.mark_preempting()

    def close(self) -> None:
        """Upload pending values and finish the run, unless the program opened it."""
        if self._owned and self.run is not None:
            self.run.finish(exit_code=self._exit_code)
        self.run = None


_WANDB_EXIT_CODES: Mapping[RunStatus, int] = {"finished": 0, "failed": 1, "preempted": 143, "interrupted": 255}
"""255 is what W&B itself gives a program that is ended by Ctrl-C."""


class MlflowTracker:
    """Writes to a run of MLflow, in a local database or on a server. A resumed run continues its own curves.

    MLflow keeps whatever it is given, and a resumed run logs some steps again: those that the store has of a metric are left out.

    Args:
        uri: Where the store is: `sqlite:////data/mlflow.db`, `http://host:5000`; `None` leaves it to MLflow, and so to
            `MLFLOW_TRACKING_URI` and to `mlflow.set_tracking_uri`.
        default_uri: Where it is if they do not say it either; `None` is MLflow's own default.
        experiment: Name of the experiment; it is created.
        run_id: Id of the run, the same for all its attempts.
        name: Display name; `None` takes the id.
        tags: Further tags of the run.
        resumed: Whether this attempt goes on from a checkpoint. One that starts from scratch gets its own run.
        config: The configuration, as plain values; it becomes parameters of the run.

    Raises:
        ImportError: If `mlflow` is not installed; `mlflow-skinny` with `sqlalchemy`, `alembic` and `sqlparse` is enough.
    """

    def __init__(
        self,
        *,
        uri: str | None = None,
        default_uri: str | None = None,
        experiment: str,
        run_id: str,
        name: str | None = None,
        tags: Mapping[str, str] | None = None,
        resumed: bool = False,
        config: Mapping[str, object] | None = None,
    ) -> None:
        require_package("mlflow")
        mlflow: Any = import_module("mlflow")
        if uri is None and not mlflow.is_tracking_uri_set():
            uri = default_uri
        self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
        self._last: dict[str, int] = {}
        """The newest step that an earlier attempt has logged of a metric."""
        self._open = True
        self._status: RunStatus = "running"
        place = self._place_of(experiment)
        mark = _named(run_id)
        order, query = ["attributes.start_time DESC"], f"tags.`{RUN_TAG}` = '{mark}'"
        find = self._client.search_runs
        earlier = find([place], filter_string=query, order_by=order, max_results=1) if resumed else []
        if earlier:
            self.run_id: str = earlier[0].info.run_id
            self._client.update_run(self.run_id, status="RUNNING")
            self._last = {
                key: max(point.step for point in self._client.get_metric_history(self.run_id, key))
                for key in earlier[0].data.metrics
            }
        else:
            made = self._client.create_run(place, run_name=name or run_id, tags={**(tags or {}), RUN_TAG: mark})
            self.run_id = made.info.run_id
        self._log_config(config or {})

    def _place_of(self, experiment: str) -> str:
        """Return the id of an experiment, which is made if need be."""
        found = self._client.get_experiment_by_name(experiment)
        if found is None:
            try:
                return str(self._client.create_experiment(experiment))
            except Exception:
                # Of the jobs of a sweep that start at once, one makes it.
                found = self._client.get_experiment_by_name(experiment)
                if found is None:
                    raise
        return str(found.experiment_id)

    def _log_config(self, config: Mapping[str, object]) -> None:
        from mlflow.entities import Param

        # What a parameter is once, it stays: MLflow refuses another value, which a resumed run may have, such as of `steps`.
        there = self._client.get_run(self.run_id).data.params
        values = {_named(key): str(value)[:_LONGEST] for key, value in flatten(config).items()}
        new = [Param(key, value) for key, value in values.items() if key not in there]
        for start in range(0, len(new), _MOST_PARAMETERS):
            self._client.log_batch(self.run_id, params=new[start : start + _MOST_PARAMETERS])

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Send metrics in one request, NaN and infinities as they are. A store that does not answer ends no training: it is logged."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(_named(name), float(value), now, int(step)) for name, value in values.items()]
        new = [metric for metric in metrics if metric.step > self._last.get(metric.key, -1)]
        for start in range(0, len(new), _MOST_METRICS):
            try:
                self._client.log_batch(self.run_id, metrics=new[start : start + _MOST_METRICS])
            except Exception as error:
                logger.warning("MLflow has not taken the metrics of step %d: %s", step, error)

    def flush(self) -> None:
        """What was logged is in the store."""

    def set_status(self, status: RunStatus) -> None:
        """Set the run's status in MLflow at once, so that nothing is left to close."""
        if status == self._status:
            return
        self._status = status
        change = self._client.update_run if status == "running" else self._client.set_terminated
        change(self.run_id, status=_STATUS[status])

    def close(self) -> None:
        """Mark the run as finished, unless it was told how it ended. A second call does nothing."""
        if self._open:
            self._open = False
            if self._status == "running":
                self.set_status("finished")


def _named(name: str) -> str:
    return _OTHERS.sub("_", name)[:_LONGEST_NAME]


class TrackioTracker:
    """Writes to a run of trackio, which has the name of the run, so that a resumed run continues its own curves.

    trackio keeps whatever it is given, and a resumed run logs some steps again: those that the local database has of a metric are left
    out. trackio's `TRACKIO_DIR` names the directory of the database. A run that
    the program opened before with `trackio.init` is used as it is, and is left open.

    Args:
        project: Project of the run.
        run_id: Id of the run, the same for all its attempts, and its name in trackio.
        group: Group of runs.
        space_id: Space of Hugging Face to log to; `None` logs locally, or where `TRACKIO_SPACE_ID` and `TRACKIO_SERVER_URL` say.
        server_url: Server of trackio to log to.
        resumed: Whether this attempt goes on from a checkpoint. One that starts from scratch gets its own run.
        config: The configuration, as plain values.

    Raises:
        ImportError: If `trackio` is not installed.
    """

    def __init__(
        self,
        *,
        project: str,
        run_id: str,
        group: str | None = None,
        space_id: str | None = None,
        server_url: str | None = None,
        resumed: bool = False,
        config: Mapping[str, object] | None = None,
    ) -> None:
        require_package("trackio")
        import trackio
        from trackio import context_vars

        self._last: dict[str, int] = {}
        """The newest step that an earlier attempt has logged of a metric."""
        self.run: Any = context_vars.current_run.get()
        self._owned = self.run is None
        if not self._owned:
            return
        self.run = trackio.init(
            project=project,
            name=run_id,
            group=group,
            space_id=space_id,
            server_url=server_url,
            resume="allow" if resumed else "never",
            # Names that begin with an underscore are trackio's own.
            config={key.lstrip("_"): value for key, value in flatten(config or {}).items()},
            embed=False,
        )
        if resumed:
            from trackio.sqlite_storage import SQLiteStorage

            for record in SQLiteStorage.get_logs(project, run_id=self.run.id):
                for metric in record.keys() - {"step", "timestamp"}:
                    self._last[metric] = max(self._last.get(metric, -1), int(record["step"]))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Hand metrics to trackio's thread, which writes them twice a second."""
        new = {name: float(value) for name, value in values.items() if step > self._last.get(name, -1)}
        if new:
            self.run.log(new, step=int(step))

    def flush(self) -> None:
        """Have written now what that thread has not come to."""
        if self._owned and self.run is not None:
            with self.run._client_lock:
                self.run._flush_queues_inline()

    def close(self) -> None:
        """Write pending values and finish the run, unless the program opened it."""
        if self._owned and self.run is not None:
            from trackio import context_vars

            self.run.finish()
            if context_vars.current_run.get() is self.run:
                context_vars.current_run.set(None)  # it does not count as one that the program has opened
        self.run = None


def _jsonl(runner: BaseRunner) -> Tracker | None:
    return JsonlTracker(runner.workspace.jsonl_file, resume_step=runner.state.train.global_step)


def _tensorboard(runner: BaseRunner) -> Tracker | None:
    if not runner.config.tensorboard:
        return None
    # A resumed run continues in the directory of its last attempt, so that there is one curve.
    files, step = runner.workspace, runner.state.train.global_step
    earlier = files.latest_tensorboard_dir() if step else None
    return TensorBoardTracker(earlier or files.tensorboard_dir, purge_step=step + 1 if step else None)


def _wandb(runner: BaseRunner) -> Tracker | None:
    config, settings, name = runner.config, runner.config.wandb, runner._run_place.instance
    if not settings.enabled:
        return None
    return WandbTracker(
        project=settings.project or config.lineage,
        entity=settings.entity,
        group=settings.group or config.experiment,
        name=settings.name or name,
        job_type=settings.job_type,
        tags=settings.tags,
        dir=settings.dir or runner.workspace.dir,
        mode=settings.mode,
        run_id=name,
        config=config.public(),
        secrets=secret_values(config.plain(), config.secret_keys or ()),
    )


def _mlflow(runner: BaseRunner) -> Tracker | None:
    config, settings = runner.config, runner.config.mlflow
    if not settings.enabled:
        return None
    # The two characters of a path that mean something else in a URI.
    file = str(runner.workspace.dir / "mlflow.db").replace("%", "%25").replace("?", "%3F")
    return MlflowTracker(
        uri=settings.uri,
        default_uri=f"sqlite:///{file}",
        experiment=settings.experiment or config.lineage,
        run_id=runner._run_place.instance,
        name=settings.name,
        resumed=runner.state.train.global_step > 0,
        config=config.public(),
    )


def _trackio(runner: BaseRunner) -> Tracker | None:
    config, settings = runner.config, runner.config.trackio
    if not settings.enabled:
        return None
    return TrackioTracker(
        project=settings.project or config.lineage,
        run_id=runner._run_place.instance,
        group=settings.group or config.experiment,
        space_id=settings.space_id,
        server_url=settings.server_url,
        resumed=runner.state.train.global_step > 0,
        config=config.public(),
    )


BUILT_IN_TRACKERS: Mapping[str, Callable[[BaseRunner], Tracker | None]] = {
    "jsonl": _jsonl,
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
    "trackio": _trackio,
}
"""By name, in the order in which they are opened: the function that opens a tracker, or returns `None` where the configuration does not ask
for it. Called on the main process when training first begins. A runner with a hook `init_<name>` calls that instead."""


def require_package(package: str) -> None:
    """Refuse to go on without a package that a tracker needs."""
    if find_spec(package) is None:
        raise ImportError(
            f"Expected the package {package!r} to be installed. Received: no such package. Run `pip install {package}`."
        )

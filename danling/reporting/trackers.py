"""Where metrics go: metrics.jsonl (`jsonl.py`), TensorBoard, Weights & Biases, MLflow, trackio, and trackers of the user's."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from danling.utils.plain import flatten
from danling.utils.secrets import secret_values

from .jsonl import FileMark, JsonLines, JsonlTracker
from .media import MlflowMedia, TensorBoardMedia, TrackioMedia, WandbMedia

if TYPE_CHECKING:
    from danling.runners.base_runner import BaseRunner

logger = logging.getLogger("danling")

RunStatus = Literal["running", "finished", "failed", "preempted", "interrupted"]
"""What a run is: it trains, has ended by itself, has failed, or was stopped by SIGTERM or SIGUSR1, or by SIGINT."""

_STATUS_OF_EXIT_CODES: Mapping[object, RunStatus] = {
    0: "finished",
    143: "preempted",
    130: "interrupted",
}
_WANDB_EXIT_CODES: Mapping[RunStatus, int] = {
    "finished": 0,
    "failed": 1,
    "preempted": 143,
    "interrupted": 255,
}
"""255 is what W&B itself gives a program that is ended by Ctrl-C."""
_MLFLOW_STATUS: Mapping[RunStatus, str] = {
    "running": "RUNNING",
    "finished": "FINISHED",
    "failed": "FAILED",
    "preempted": "KILLED",
    "interrupted": "KILLED",
}
_MLFLOW_TAG = "danling.run"
"""Tag by which a resumed run finds its own run in the store, whose ids are MLflow's."""
_MOST_METRICS, _MOST_PARAMETERS, _LONGEST, _LONGEST_NAME = 1000, 100, 500, 250
"""What one request of MLflow takes, and how long the text of a parameter and a name may be."""
_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")


class Tracker(Protocol):
    """A place for curves, opened on the main process only.

    One that has a method `set_status(status)` too is told what the run is, a `RunStatus`: when a training begins, and how it ends.
    """

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Record figures.

        Args:
            values: Metrics by name, usually `split/name`.
            step: Global step: optimizer updates committed.
        """
        ...

    def flush(self) -> None:
        """Put what was recorded where a killed process cannot lose it; called when a checkpoint is saved."""
        ...

    def close(self) -> None:
        """Write pending values and close files and processes. A second call does nothing."""
        ...


class TrackerSet:
    """The trackers of a run: each is opened once, gets every metric, and is flushed and closed with the others.

    Args:
        runner: The runner, on whose main process trackers are opened.
    """

    def __init__(self, runner: BaseRunner) -> None:
        self._runner = runner
        self.is_open = False
        self.opened: list[Tracker] = []
        """What metrics are sent to."""
        self._added: list[Any] = []
        self._status: RunStatus | None = None
        self._untaken: set[str] = set()
        """Kinds of media that were logged and that some tracker does not take."""
        self._resumed: FileMark | None = FileMark(0, 0)
        self._is_continued = self._is_training = False
        self._held: FileMark | None = None
        self._is_held = False
        self.recent: deque[tuple[dict[str, float], int]] | None = None
        """The last metrics that were logged, where another rank may become the main process and lack them; else `None`."""

    # What of metrics.jsonl belongs to a save

    @property
    def mark(self) -> FileMark | None:
        """The last line of `metrics.jsonl` that belongs to a save made now, on the main process; `None` where only the step is known."""
        return self._held if self._is_held else self._written()

    def resume_from(self, mark: FileMark | None) -> None:
        """Note the mark of the save that the run resumes from; `None` for a checkpoint that has none."""
        self._resumed = mark
        self._is_held = False
        # A run that continues in a new directory begins its file there, and each replica group has a file of its own lines.
        checkpoints = self._runner.workspace.checkpoints
        is_own = checkpoints.is_dir() and any(checkpoints.iterdir())
        self._is_continued = is_own and not self._runner.config.ft.enabled
        if self._is_continued:
            step = self._runner.state.train.global_step
            for tracker in self.opened:
                if isinstance(tracker, JsonlTracker):
                    # The mark is of the run's own file; another one of the user's goes by the step.
                    has_mark = tracker.file == self._runner.workspace.jsonl_file
                    tracker.resume_from(step, mark if has_mark else None)
                elif isinstance(tracker, TensorBoardTracker):
                    tracker.resume_from(step)
            if self._is_training:
                self.begin_training()

    def begin_training(self) -> None:
        """Drop what trackers have of updates that are made again. Called on all ranks before a training, and before a save."""
        for tracker in self.opened:
            if isinstance(tracker, (JsonLines, TensorBoardTracker)):
                tracker.begin_training()

    def resume_as_main(self) -> None:
        """Open the trackers on a process that has become the main one, and keep what an earlier one has written."""
        # What this process noted as another rank is not what the file has.
        self.is_open = False
        self._resumed = None
        self.open()
        for tracker in self.opened:
            if isinstance(tracker, JsonLines):
                tracker.keep_all()
        self.begin_training()

    def hold_mark(self) -> None:
        """An evaluation begins. A run that resumes from a save within it makes it again: what it logs belongs to the save that follows."""
        self._held, self._is_held = self._written(), True

    def release_mark(self) -> None:
        """The evaluation has ended, and its result is logged."""
        self._is_held = False

    def _written(self) -> FileMark | None:
        file = self._runner.workspace.jsonl_file
        own = (each for each in self.opened if isinstance(each, JsonlTracker) and each.file == file)
        return next((each.mark for each in own if each.mark is not None), self._resumed)

    def add(self, tracker: Tracker | Callable[[], Tracker]) -> None:
        """Take in a tracker, or something to call for one when the set is opened; at once, when it is open.

        Raises:
            TypeError: If it is neither a tracker nor callable.
            ValueError: If it was added before.
        """
        if _lacks(tracker) and not callable(tracker):
            raise TypeError(
                f"Expected a tracker, which has the methods log(values, step), flush() and close(). Received: {tracker!r} without "
                f"{_lacks(tracker)}. Add them, or pass a function that returns such an object."
            )
        if any(tracker is other for other in self._added):
            raise ValueError(
                f"Expected a tracker that is not there yet. Received: {tracker!r} twice. Add it once."
            )
        self._added.append(tracker)
        if self.is_open:
            self._open(tracker)

    def add_built_in(self, name: str) -> None:
        """Add one of the library's own trackers if the configuration asks for it."""
        if self._runner.is_main_process and is_asked(name, self._runner):
            self.add(BUILT_IN_TRACKERS[name](self._runner))

    def open(self) -> None:
        """Open what was added, and the library's own trackers, each by the runner's hook `init_<name>` if there is one; once."""
        if self.is_open:
            return
        self.is_open = True
        for tracker in self._added:
            self._open(tracker)
        if self._runner.is_main_process:
            step = self._runner.state.train.global_step
            file, mark = self._runner.workspace.jsonl_file, self.mark
            tracker = JsonlTracker(
                file,
                resume_step=step,
                resume_mark=mark,
                is_continued=self._is_continued,
                has_begun=False,
            )
            self.add(tracker)
        # On all ranks: a hook of the user's may communicate.
        for name in BUILT_IN_TRACKERS:
            hook = getattr(self._runner, f"init_{name}", None)
            if hook is None:
                self.add_built_in(name)
            else:
                hook()

    def _open(self, tracker: Any) -> None:
        if not self._runner.is_main_process:
            return
        made = tracker() if _lacks(tracker) else tracker
        if _lacks(made):
            raise TypeError(
                "Expected a function that returns a tracker, with the methods log(values, step), flush() and close(). Received: "
                f"{tracker!r}, which returned {made!r}. Return the tracker."
            )
        self.opened.append(made)

    def log(
        self, values: Mapping[str, float], step: int, *, beside: Mapping[str, object] | None = None
    ) -> None:
        """Send metrics to every tracker, and plain values `beside` them that are no numbers to the file of metrics alone."""
        if self.recent is not None:
            self.recent.append((dict(values), step))
        for tracker in self.opened:
            # A class of the user's that takes the numbers in another way gets these alone.
            if isinstance(tracker, JsonlTracker) and type(tracker).log is JsonlTracker.log:
                tracker.log(values, step, beside=beside)
            else:
                tracker.log(values, step)

    def log_media(self, kind: str, name: str, value: object, step: int) -> None:
        """Send an image, a histogram, a text or a table to the trackers that take its kind; name once those that do not.

        Args:
            kind: The method of a tracker, such as `log_image`.
            name: Its name.
            value: What that method takes.
            step: Global step.
        """
        others = [tracker for tracker in self.opened if not isinstance(tracker, JsonlTracker)]
        takers = [tracker for tracker in others if callable(getattr(tracker, kind, None))]
        for tracker in takers:
            getattr(tracker, kind)(name, value, step)
        # Once for each kind: an image a step would fill the log.
        if kind in self._untaken or (others and len(takers) == len(others)):
            return
        self._untaken.add(kind)
        if others:
            names = ", ".join(
                sorted({type(tracker).__name__ for tracker in others if tracker not in takers})
            )
            logger.warning(
                "%s has no method %s(name, value, step), and is not sent %r.", names, kind, name
            )
        else:
            logger.warning(
                "%s(%r) goes to no tracker, and metrics.jsonl has numbers only. Set tensorboard, or wandb, mlflow or trackio.enabled.",
                kind,
                name,
            )

    def flush(self) -> None:
        """Flush every tracker; one that fails does not keep the others from it, and is logged: it must not hide how a training ended."""
        for tracker in self.opened:
            try:
                tracker.flush()
            except Exception:
                logger.exception("A tracker could not be flushed.")

    def set_status(self, status: RunStatus) -> None:
        """Tell a new status of the run to every tracker that takes it; one that fails at it is logged."""
        if status == self._status:
            return
        self._status = status
        tellers = [getattr(tracker, "set_status", None) for tracker in self.opened]
        for tell in filter(callable, tellers):
            try:
                tell(status)
            except Exception:
                logger.exception("A tracker failed to set the status of the run to %s.", status)

    def set_status_after(self, error: BaseException) -> None:
        """Tell the status of a run that an exception has ended; `SystemExit` gives its code."""
        if isinstance(error, SystemExit):
            # Of anything else than a number Python prints it and ends with 1.
            code = (error.code or 0) if error.code is None or isinstance(error.code, int) else 1
            self.set_status(_STATUS_OF_EXIT_CODES.get(code, "failed"))
        else:
            self.set_status("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")

    @contextmanager
    def telling_status(self, *, whole: bool = True) -> Iterator[None]:
        """Train inside: the trackers are told that the run is running, and then how it ended.

        Args:
            whole: Whether the run has ended where nothing is raised.
        """
        self.set_status("running")
        self._is_training = True
        try:
            yield
        # Also SystemExit and KeyboardInterrupt, by which signals end a run.
        except BaseException as error:
            self.set_status_after(error)
            raise
        finally:
            self._is_training = False
        if whole:
            self.set_status("finished")

    def close(self) -> None:
        """Close every tracker; one that fails does not keep the others from it. A second call does nothing."""
        # A tracker that was added and never opened, since nothing was trained, was made by the user.
        given = [
            tracker for tracker in self._added if not _lacks(tracker) and tracker not in self.opened
        ]
        closing, self.opened, self._added = [*self.opened, *given], [], []
        # A stack closes all of them, and raises the error of one at its end.
        with ExitStack() as stack:
            for tracker in reversed(closing):
                stack.callback(tracker.close)


def _lacks(tracker: object) -> str:
    """Return the methods of a tracker that something lacks. A class has them too, but is called for an object of it."""
    names = ("log", "flush", "close")
    return ", ".join(
        n for n in names if isinstance(tracker, type) or not callable(getattr(tracker, n, None))
    )


class TensorBoardTracker(TensorBoardMedia):
    """Writes TensorBoard events.

    A resumed run continues in the directory of its last attempt, so that there is one curve; TensorBoard then hides what that attempt
    wrote after the step that is resumed from.

    Raises:
        ImportError: If `tensorboard` is not installed.
    """

    def __init__(self, runner: BaseRunner) -> None:
        require_package("tensorboard")
        step, directory = runner.state.train.global_step, runner.workspace.tensorboard_dir
        if step:
            directory = runner.workspace.latest_tensorboard_dir() or directory
        writer = import_module("torch.utils.tensorboard").SummaryWriter
        self._writer: Any = writer(os.fspath(directory), flush_secs=30)
        self._resume_step = step or None

    def resume_from(self, step: int) -> None:
        """Continue from a save, in the process that has written the points: the next training hides those after it."""
        self._resume_step = step

    def begin_training(self) -> None:
        """Hide points of later steps than that of the save, as `purge_step` of torch does: they are made again."""
        if self._resume_step is not None:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog

            start = SessionLog(status=SessionLog.START)
            self._writer._get_file_writer().add_event(
                Event(step=self._resume_step + 1, session_log=start)
            )
            self._resume_step = None

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write one scalar a name, all in one event: most of what `add_scalar` costs is the event around each value."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [
            Summary.Value(tag=name, simple_value=float(value)) for name, value in values.items()
        ]
        self._writer._get_file_writer().add_summary(Summary(value=scalars), step, time.time())

    def flush(self) -> None:
        """Write pending events, so that a run resumed from this step has no gap before it."""
        self._writer.flush()

    def close(self) -> None:
        """Write pending events and close the file."""
        self._writer.close()


class WandbTracker(WandbMedia):
    """Writes to a Weights & Biases run whose id is the run's own, so that a resumed run continues its own curves.

    A run that the program opened before with `wandb.init` is used as it is, and is left open. Where the command line of the program has a
    secret of the configuration, W&B is told nothing of the system, of which the command line is a part.

    Raises:
        ImportError: If `wandb` is not installed.
    """

    def __init__(self, runner: BaseRunner) -> None:
        require_package("wandb")
        import wandb

        self._owned = wandb.run is None
        self._exit_code: int | None = None
        self.run: Any = wandb.run
        if not self._owned:
            return
        config, settings, name = runner.config, runner.config.wandb, runner.workspace.instance
        # W&B takes a directory for temporary files where this one is missing.
        directory = Path(settings.dir or runner.workspace.dir)
        directory.mkdir(parents=True, exist_ok=True)
        secrets = secret_values(config.plain(), config.secret_keys or ())
        hides = any(secret in word for word in sys.argv for secret in secrets)
        # Offline, wandb cannot look for the run and only warns; when they are synchronised, the id joins the attempts.
        offline = (settings.mode or os.environ.get("WANDB_MODE", "")) in (
            "offline",
            "dryrun",
            "disabled",
        )
        self.run = wandb.init(
            id=name,
            project=settings.project or config.lineage,
            entity=settings.entity,
            group=settings.group or config.experiment,
            name=settings.name or name,
            job_type=settings.job_type,
            tags=[settings.tags] if isinstance(settings.tags, str) else settings.tags,
            dir=os.fspath(directory),
            mode=settings.mode,
            config=config.public(),
            resume=None if offline else "allow",
            settings=wandb.Settings(x_disable_meta=True) if hides else None,
        )

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


class MlflowTracker(MlflowMedia):
    """Writes to a run of MLflow, in a local database or on a server. A resumed run continues its own curves.

    MLflow keeps whatever it is given, and a resumed run logs some steps again: those that the store has of a metric are left out. A run
    that starts from scratch gets its own run there.

    Raises:
        ImportError: If `mlflow` is not installed; `mlflow-skinny` with `sqlalchemy`, `alembic` and `sqlparse` is enough.
    """

    def __init__(self, runner: BaseRunner) -> None:
        require_package("mlflow")
        mlflow: Any = import_module("mlflow")
        settings, name = runner.config.mlflow, runner.workspace.instance
        uri = settings.uri
        if uri is None and not mlflow.is_tracking_uri_set():
            # The two characters of a path that mean something else in a URI.
            file = str(runner.workspace.dir / "mlflow.db").replace("%", "%25").replace("?", "%3F")
            uri = f"sqlite:///{file}"
        self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
        self._last: dict[str, int] = {}
        """The newest step that an earlier attempt has logged of a metric."""
        self._open = True
        self._status: RunStatus = "running"
        place = self._place_of(settings.experiment or runner.config.lineage)
        mark = _mlflow_name(name)
        earlier = []
        if runner.state.train.global_step > 0:
            # Ids of runs are MLflow's own. Of several that began from scratch, the last one goes on.
            earlier = self._client.search_runs(
                [place],
                filter_string=f"tags.`{_MLFLOW_TAG}` = '{mark}'",
                order_by=["attributes.start_time DESC"],
                max_results=1,
            )
        if earlier:
            self.run_id: str = earlier[0].info.run_id
            self._client.update_run(self.run_id, status="RUNNING")
            for key in earlier[0].data.metrics:
                self._last[key] = max(
                    point.step for point in self._client.get_metric_history(self.run_id, key)
                )
        else:
            made = self._client.create_run(
                place, run_name=settings.name or name, tags={_MLFLOW_TAG: mark}
            )
            self.run_id = made.info.run_id
        # What a parameter is once, it stays: MLflow refuses another value, which a resumed run may have, such as of `steps`.
        there = self._client.get_run(self.run_id).data.params
        values = {
            _mlflow_name(key): str(value)[:_LONGEST]
            for key, value in flatten(runner.config.public()).items()
        }
        entities = import_module("mlflow.entities")
        new = [entities.Param(key, value) for key, value in values.items() if key not in there]
        for start in range(0, len(new), _MOST_PARAMETERS):
            self._client.log_batch(self.run_id, params=new[start : start + _MOST_PARAMETERS])

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

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Send metrics in one request, NaN and infinities as they are. A store that does not answer ends no training: it is logged."""
        from mlflow.entities import Metric

        # MLflow counts milliseconds.
        now = int(time.time() * 1000)
        metrics = [
            Metric(_mlflow_name(name), float(value), now, int(step))
            for name, value in values.items()
        ]
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
        if status != self._status:
            self._status = status
            change = self._client.update_run if status == "running" else self._client.set_terminated
            change(self.run_id, status=_MLFLOW_STATUS[status])

    def close(self) -> None:
        """Mark the run as finished, unless it was told how it ended. A second call does nothing."""
        if self._open:
            self._open = False
            if self._status == "running":
                self.set_status("finished")


def _mlflow_name(name: str) -> str:
    return _NOT_IN_NAMES.sub("_", name)[:_LONGEST_NAME]


class TrackioTracker(TrackioMedia):
    """Writes to a run of trackio, which has the name of the run, so that a resumed run continues its own curves.

    trackio keeps whatever it is given, and a resumed run logs some steps again: those that the local database has of a metric are left
    out. trackio's `TRACKIO_DIR` names the directory of the database. A run that the program opened before with `trackio.init` is used as
    it is, and is left open.

    Raises:
        ImportError: If `trackio` is not installed.
    """

    def __init__(self, runner: BaseRunner) -> None:
        require_package("trackio")
        import trackio
        from trackio import context_vars

        self._last: dict[str, int] = {}
        """The newest step that an earlier attempt has logged of a metric."""
        self.run: Any = context_vars.current_run.get()
        self._owned = self.run is None
        if not self._owned:
            return
        config, settings, resumed = (
            runner.config,
            runner.config.trackio,
            runner.state.train.global_step > 0,
        )
        project = settings.project or config.lineage
        self.run = trackio.init(
            project=project,
            name=runner.workspace.instance,
            group=settings.group or config.experiment,
            space_id=settings.space_id,
            server_url=settings.server_url,
            resume="allow" if resumed else "never",
            # Names that begin with an underscore are trackio's own.
            config={key.lstrip("_"): value for key, value in flatten(config.public()).items()},
            embed=False,
        )
        if resumed:
            from trackio.sqlite_storage import SQLiteStorage

            for record in SQLiteStorage.get_logs(project, run_id=self.run.id):
                for metric in record.keys() - {"step", "timestamp"}:
                    self._last[metric] = max(self._last.get(metric, -1), int(record["step"]))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Hand metrics to trackio's thread, which writes them twice a second."""
        new = {
            name: float(value) for name, value in values.items() if step > self._last.get(name, -1)
        }
        if new:
            self.run.log(new, step=int(step))

    def flush(self) -> None:
        """Have written now what that thread has not come to."""
        # trackio has no public call that waits for its thread.
        if self._owned and self.run is not None:
            with self.run._client_lock:
                self.run._flush_queues_inline()

    def close(self) -> None:
        """Write pending values and finish the run, unless the program opened it."""
        if self._owned and self.run is not None:
            from trackio import context_vars

            self.run.finish()
            # Else the next runner of this process takes it for one that the program has opened.
            if context_vars.current_run.get() is self.run:
                context_vars.current_run.set(None)
        self.run = None


BUILT_IN_TRACKERS: Mapping[str, Callable[[BaseRunner], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
}
"""What opens a tracker, by name, in the order in which they are opened after the file of metrics: on the main process, when training
first begins."""


def is_asked(name: str, runner: BaseRunner) -> bool:
    """Return whether the configuration asks for one of the library's own trackers."""
    setting: Any = runner.config[name]
    return bool(setting if isinstance(setting, bool) else setting.enabled)


def require_package(package: str) -> None:
    """Refuse to go on without a package that a tracker needs."""
    if find_spec(package) is None:
        raise ImportError(
            f"Expected the package {package!r} to be installed. Received: no such package. Run `pip install {package}`."
        )

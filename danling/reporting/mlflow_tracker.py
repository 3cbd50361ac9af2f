"""Curves in MLflow: one run of its store for all attempts of a run."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from danling.utils.plain import flatten

from .trackers import RunStatus, require_package

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
        resumed: Whether this attempt goes on from a checkpoint. One that starts from scratch gets a run of its own.
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
        earlier = self._find(place, mark) if resumed else None
        if earlier is not None:
            self.run_id: str = earlier
            self._client.update_run(earlier, status="RUNNING")
            self._last = {
                key: max(point.step for point in self._client.get_metric_history(earlier, key))
                for key in self._client.get_run(earlier).data.metrics
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

    def _find(self, experiment_id: str, mark: str) -> str | None:
        order, query = ["attributes.start_time DESC"], f"tags.`{RUN_TAG}` = '{mark}'"
        runs = self._client.search_runs([experiment_id], filter_string=query, order_by=order, max_results=1)
        return runs[0].info.run_id if runs else None

    def _log_config(self, config: Mapping[str, object]) -> None:
        from mlflow.entities import Param

        # What a parameter is once, it stays: MLflow refuses another value, which a resumed run may have, such as of `steps`.
        there = self._client.get_run(self.run_id).data.params
        values = {_named(key): str(value)[:_LONGEST] for key, value in flatten(config).items()}
        new = [Param(key, value) for key, value in values.items() if key not in there]
        for part in _parts(new, _MOST_PARAMETERS):
            self._client.log_batch(self.run_id, params=part)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Send metrics in one request, NaN and infinities as they are. A store that does not answer ends no training: it is logged."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(_named(name), float(value), now, int(step)) for name, value in values.items()]
        new = [metric for metric in metrics if metric.step > self._last.get(metric.key, -1)]
        for part in _parts(new, _MOST_METRICS):
            try:
                self._client.log_batch(self.run_id, metrics=part)
            except Exception as error:
                logger.warning("MLflow has not taken the metrics of step %d: %s", step, error)

    def flush(self) -> None:
        """What was logged is in the store."""

    def set_status(self, status: RunStatus) -> None:
        """Give the run the status that MLflow has for this one, at once: nobody needs to close what was told how it ended."""
        if status == self._status:
            return
        self._status = status
        if status == "running":
            self._client.update_run(self.run_id, status=_STATUS[status])
        else:
            self._client.set_terminated(self.run_id, status=_STATUS[status])

    def close(self) -> None:
        """Mark the run as finished, unless it was told how it ended. A second call does nothing."""
        if self._open:
            self._open = False
            if self._status == "running":
                self.set_status("finished")


def _named(name: str) -> str:
    return _OTHERS.sub("_", name)[:_LONGEST_NAME]


def _parts(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]

"""Curves in trackio: a local database, a server of one's own, or a Space of Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from danling.utils.plain import flatten

from .trackers import require_package


class TrackioTracker:
    """Writes to a run of trackio, which has the name of the run, so that a resumed run continues its own curves.

    trackio keeps whatever it is given, and a resumed run logs some steps again: those that the local database has of a metric are left
    out. The database lies where trackio's `TRACKIO_DIR` says. A run that the program opened before with `trackio.init` is used as it is,
    and is left open.

    Args:
        project: Project of the run.
        run_id: Id of the run, the same for all its attempts, and its name in trackio.
        group: Group of runs.
        space_id: Space of Hugging Face to log to; `None` logs locally, or where `TRACKIO_SPACE_ID` and `TRACKIO_SERVER_URL` say.
        server_url: Server of trackio to log to.
        resumed: Whether this attempt goes on from a checkpoint. One that starts from scratch gets a run of its own.
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
            self._last = _last_steps(project, self.run.id)

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
        """Write what is pending and finish the run, unless the program opened it."""
        if self._owned and self.run is not None:
            self.run.finish()
            _forget(self.run)
        self.run = None


def _last_steps(project: str, run_id: str) -> dict[str, int]:
    from trackio.sqlite_storage import SQLiteStorage

    last: dict[str, int] = {}
    for record in SQLiteStorage.get_logs(project, run_id=run_id):
        for name in record.keys() - {"step", "timestamp"}:
            last[name] = max(last.get(name, -1), int(record["step"]))
    return last


def _forget(run: Any) -> None:
    """Let nobody take a finished run for one that the program has opened."""
    from trackio import context_vars

    if context_vars.current_run.get() is run:
        context_vars.current_run.set(None)

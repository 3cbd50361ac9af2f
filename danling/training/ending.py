"""How a training ends: what is saved, said and closed, whether it came to its end, was stopped, or failed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from danling.distributed import Domain

from .saving import RunSaver
from .session import IntactStateError, SessionEnd, TrainingSession

if TYPE_CHECKING:
    from danling.runners.state import TrainState

logger = logging.getLogger("danling")


class TrainingEnd:
    """Ends one training after the other."""

    def __init__(
        self,
        *,
        session: TrainingSession,
        saver: RunSaver,
        domain: Domain,
        counters: Callable[[], TrainState],
        manager: Callable[[], Any],
        pending: Callable[[], frozenset[str]],
        save: Callable[[], None],
        export: Callable[[], None],
        write_results: Callable[[], None],
        say: Callable[[str], None],
        note: Callable[[Exception], None],
        close: Callable[[], None],
    ) -> None:
        self._session = session
        self._saver = saver
        self._domain = domain
        self._counters = counters
        self._manager = manager
        self._pending = pending
        self._save = save
        self._export = export
        self._write_results = write_results
        self._say = say
        self._note = note
        self._close = close

    @staticmethod
    def parts() -> dict[Callable[..., object], str]:
        """Return what a rank does within functions of this class, for who looks at its stack."""
        return {TrainingEnd._finish: "checkpointing"}

    def of_session(self) -> SessionEnd:
        """Return what a session calls at its end."""
        return SessionEnd(
            pending=self._last_requests,
            finish=self._finish,
            failed=self._fail,
            close=self._close,
        )

    def _last_requests(self) -> frozenset[str]:
        requests = self._pending()
        # The epoch has been counted since the last update.
        self._session.beat(self._counters().global_step, self._counters().epoch)
        return requests

    def _finish(self) -> None:
        if not self._saver.is_saved:
            self._save()
        if self._session.stop_reason is None:
            self._export()
        self._write_results()
        # On all ranks, so that an error of the background writer is raised on all of them.
        self._manager().wait()
        self._manager().wait_for_mirror()
        self._say(self._session.hear_late_signals(self._domain))
        self._session.exit_if_signalled(self._counters().global_step)

    def _fail(self, error: Exception) -> None:
        if isinstance(error, IntactStateError) and not self._saver.is_saved:
            self._save_intact_state()
        self._note(error)
        self._say(f"Failed with {type(error).__name__}")

    def _save_intact_state(self) -> None:
        logger.error(
            "Training failed between two updates; saving the state after step %d.", self._counters().global_step
        )
        try:
            self._save()
            self._manager().wait()
        except Exception:
            logger.exception("That save failed; the error of the training follows.")

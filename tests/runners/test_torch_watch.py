"""What a run is asked and told while it trains: signals after the last update, heartbeats, figures of one's own."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.toys import TracingRunner

CONFIG = {"epochs": 2, "seed": 3, "dataloader": {"batch_size": 4}, "optim": {"type": "sgd", "lr": 0.1}, "dir": "run"}


class SignalledInLastSave(TracingRunner):
    """Is sent a signal while it saves for the last time."""

    number = signal.SIGTERM

    def save_checkpoint(self, **options: Any) -> None:
        if self.state.train.epoch == 2:
            os.kill(os.getpid(), self.number)
        super().save_checkpoint(**options)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 143)])
def test_a_signal_in_the_last_save_ends_the_run_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    monkeypatch.setattr(SignalledInLastSave, "number", number)
    with SignalledInLastSave(CONFIG) as runner, pytest.raises(SystemExit) as end:
        runner.train()
    assert end.value.code == code
    with TracingRunner({**CONFIG, "auto_resume": True}) as again:
        assert again.state.train.epoch == 2 and again.results.keys() == {1, 2}


class _SendAtTheEnd(logging.Handler):
    """Sends this process a signal when the run says that it has finished: nothing is agreed after that."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("Finished"):
            signal.raise_signal(signal.SIGUSR1)


def test_a_signal_that_comes_too_late_reaches_the_program(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    handler = _SendAtTheEnd()
    try:
        with TracingRunner(CONFIG) as runner:
            logging.getLogger("danling").addHandler(handler)
            runner.train()
            assert heard == [signal.SIGUSR1]
    finally:
        logging.getLogger("danling").removeHandler(handler)
        signal.signal(signal.SIGUSR1, before)

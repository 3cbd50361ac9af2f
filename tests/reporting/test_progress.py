"""The bar on a real pseudo-terminal, plain lines elsewhere."""

from __future__ import annotations

import fcntl
import io
import logging
import math
import os
import pty
import struct
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import TextIO

import pytest

from danling.reporting import Progress, RunLog, format_scores
from danling.reporting.logging import beside_bar


@contextmanager
def terminal(rows: int = 24, columns: int = 100) -> Iterator[tuple[TextIO, list[str]]]:
    """A pseudo-terminal to write to, and what was drawn on it once the block is left."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    drawn: list[str] = []
    with os.fdopen(writer, "w") as stream:
        yield stream, drawn
        stream.flush()
        drawn.append(_all_of(reader))
    os.close(reader)


def _all_of(reader: int) -> str:
    """Read what has been written; one call may return a part of it."""
    os.set_blocking(reader, False)
    pieces = []
    with suppress(BlockingIOError):
        while True:
            pieces.append(os.read(reader, 1 << 16))
    return b"".join(pieces).decode()


def test_print_and_log_step_around_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal() as (stream, drawn):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(sys, "stdout", stream)
        log = RunLog(None)
        progress = Progress(10, desc="digits")
        progress.show(5, {"loss": 0.25})
        with beside_bar(stream):
            print("printed", "line", file=stream)
        logging.getLogger("danling").info("logged line")
        progress.close()
        logging.getLogger("danling").info("afterwards")
        log.close()
    lines = [line.rsplit("\r", 1)[-1] for line in drawn[0].split("\r\n")]
    assert "printed line" in lines
    assert any(line.endswith(" logged line") for line in lines)
    assert not any(" digits 5/10 (50%)" in line for line in lines), (
        "the bar shows the figures already"
    )


def test_plain_lines_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    stream = io.StringIO()
    with caplog.at_level(logging.INFO, logger="danling"):
        progress = Progress(200, initial=100, desc="gpt", stream=stream)
        progress.update(140)
        time.sleep(0.01)
        progress.show(150, {"train/loss": 1.5})
        progress.close()
    assert not progress.draws_bar
    assert stream.getvalue() == ""
    [line] = caplog.messages
    assert line.startswith("gpt 150/200 (75%)  train/loss 1.5000  ")
    assert line.endswith("0:00:00 left")


def test_lines_are_limited_by_time_and_the_last_one_is_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seconds = iter(range(1000))
    with (
        caplog.at_level(logging.INFO, logger="danling"),
        closing(
            Progress(
                100,
                desc="gpt",
                stream=io.StringIO(),
                seconds_between_lines=60,
                clock=lambda: float(next(seconds)),
            )
        ) as progress,
    ):
        for step in range(1, 100):
            progress.show(step, {"loss": 1.0 / step}, speed="5.1k samples/s")
    shown = [int(message.split()[1].partition("/")[0]) for message in caplog.messages]
    assert shown[0] == 1 and shown[-1] == 99 and len(shown) == 5
    assert "  5.1k samples/s, " in caplog.messages[0]


@pytest.mark.parametrize("columns", [60, 80, 100, 150])
def test_ten_columns_are_left_for_the_bar(columns: int) -> None:
    """The name gives way first, then the last metrics; where all has room, all is shown."""
    with (
        terminal(columns=columns) as (stream, drawn),
        closing(Progress(780, desc="digits", stream=stream)) as progress,
    ):
        progress.epoch = "epoch 7/10"
        progress.show(546, {"loss": 0.1328, "grad_norm": 0.9123, "lr": 2.519e-03})
        progress.doing("val 12")
        progress.set_epoch("epoch 7/10")
        progress.doing("")
        progress.update(780)
        progress.close()
    last = drawn[0].rstrip().rsplit("\r", 1)[-1]
    bar = last[last.index("|") + 1 : last.rindex("|")]
    assert len(last) <= columns and len(bar) >= 10 and last.endswith("|")
    text = {
        60: "epoch 7/10  loss 0.1328  7",
        80: "epoch 7/10  loss 0.1328  grad_norm 0.9123  lr 2.519e-03  7",
    }
    whole = "digits epoch 7/10  loss 0.1328  grad_norm 0.9123  lr 2.519e-03  7"
    assert last.startswith(text.get(columns, whole))


@pytest.mark.parametrize(("columns", "kind"), [(0, "xterm"), (100, "dumb")])
def test_a_terminal_without_a_width_and_a_dumb_one_get_lines(
    columns: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", kind)
    with terminal(columns=columns) as (stream, _):
        assert not Progress(3, stream=stream).draws_bar
        stream.write("x")


def test_format_scores() -> None:
    values = {"lr": 3e-4, "n": 12, "big": 1.5e9, "zero": 0.0, "loss": math.nan}
    assert (
        format_scores(values) == "lr 3.000e-04  n 12  big 1.500e+09  zero 0.0000  loss nan"
        and format_scores({}) == ""
    )


@pytest.mark.parametrize(("columns", "desc"), [(12, "digits"), (60, "手写数字识别")])
def test_a_drawing_is_never_wider_than_the_terminal(columns: int, desc: str) -> None:
    with terminal(columns=columns) as (stream, drawn):
        progress = Progress(1000, desc=desc, stream=stream)
        progress.show(500, {"loss": 0.25})
        progress.close()
    for line in drawn[0].replace("\x1b[2K", "").split("\r"):
        assert sum(2 if ord(letter) > 0x2E80 else 1 for letter in line.strip("\n")) <= columns
    assert columns < 60 or drawn[0].rstrip().endswith("|")

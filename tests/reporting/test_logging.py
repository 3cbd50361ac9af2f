"""The library's logger, its file and its console, and printing; the root logger and `print` stay the user's."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.toys import Line, settings
from support.warm import interpreter

from danling.reporting import RunLog

logger = logging.getLogger("danling")


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    root, own = logging.getLogger(), logger.level
    before = (root.level, list(root.handlers))
    yield
    assert (root.level, list(root.handlers)) == before
    assert (logger.level, logger.handlers) == (own, [])


def test_lines_go_to_the_file_and_the_console(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "logs" / "t0.log"
    log = RunLog(file)
    logger.info("step %d", 3)
    logger.debug("not shown")
    logging.getLogger("danling.somewhere").warning("careful")
    log.close()
    log.close()
    logger.warning("after")
    lines = file.read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == [
        "INFO danling: step 3",
        "WARNING danling.somewhere: careful",
    ]
    shown = capfd.readouterr().err
    assert "step 3\n" in shown
    assert "WARNING: " in shown
    assert "not shown" not in shown


def test_other_ranks_show_warnings_and_errors_only_and_write_no_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = RunLog(tmp_path / "run.log", is_main=False, rank=3)
    logger.info("quiet")
    logger.warning("odd")
    logger.error("broken")
    log.close()
    assert not (tmp_path / "run.log").exists()
    assert log.file_handler is None
    shown = capfd.readouterr().err
    assert "quiet" not in shown
    assert [line.split(": ")[0] for line in shown.splitlines()] == ["WARNING", "ERROR"]
    assert shown.count("[rank 3] ") == 2


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_runs_share_the_console_and_close_in_any_order(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], order: tuple[int, int]
) -> None:
    logs: list[RunLog] = [RunLog(tmp_path / "a.log"), RunLog(tmp_path / "b.log")]
    logger.info("both")
    logs[order[0]].close()
    logger.info("one")
    logs[order[1]].close()
    assert [line.split()[-1] for line in capfd.readouterr().err.splitlines()] == ["both", "one"]


def test_failed_open_leaves_nothing_open(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        RunLog(tmp_path / "file" / "run.log")


@pytest.mark.parametrize("is_main", [True, False])
def test_program_with_its_own_terminal_log_shows_each_line_once(
    is_main: bool, tmp_path: Path
) -> None:
    script = (
        "import logging, sys; logging.basicConfig(level=logging.INFO, format='mine %(message)s')\n"
        "from danling.reporting import RunLog\n"
        f"log = RunLog(sys.argv[1], is_main={is_main}, rank=1); logger = logging.getLogger('danling')\n"
        "logger.info('hello'); logger.warning('odd'); log.close()\n"
    )
    file = tmp_path / "run.log"
    done = subprocess.run(
        [interpreter(), "-c", script, str(file)], capture_output=True, text=True, check=True
    )
    assert done.stderr == ("mine hello\n" if is_main else "") + "mine odd\n"
    assert file.exists() == is_main and (not is_main or "INFO danling: hello\n" in file.read_text())


class Warned(Line):
    """Warns while it is constructed, before its log is open."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        logger.warning("early")
        if self.config.get("broken", False):
            self.model = None


def test_warnings_of_a_construction_are_shown_once_and_begin_the_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with Warned(settings(tmp_path, log=True)) as runner:
        logger.warning("late")
        with Warned(settings(tmp_path / "other", log=True)) as second:
            others = second.workspace.log_file
    lines = [line.split(" ", 2)[2] for line in runner.workspace.log_file.read_text().splitlines()]
    assert [line for line in lines if "early" in line or "late" in line][:2] == [
        "WARNING danling: early",
        "WARNING danling: late",
    ]
    assert others.read_text().count("WARNING danling: early") == 1
    shown = [
        line.split(" ", 1)[0] for line in capfd.readouterr().err.splitlines() if "early" in line
    ]
    assert shown == ["WARNING:", "WARNING:"]


def test_a_construction_that_fails_leaves_the_logger_as_it_was(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="`self.model`"):
        Warned(settings(tmp_path, log=True, broken=True))
    assert capfd.readouterr().err.count("early") == 1

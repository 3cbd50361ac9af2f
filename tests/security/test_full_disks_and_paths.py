"""Disks that take nothing more, what killed exports leave, and paths that are no text or have more than one line."""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.job import Job
from support.recorded import danling
from support.toys import Small, settings

from danling.checkpoints import export_weights
from danling.utils.locks import FileLock


@contextmanager
def no_room() -> Iterator[None]:
    """Let the kernel refuse every write to a file of this process, as a full disk does."""
    before, action = (
        resource.getrlimit(resource.RLIMIT_FSIZE),
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, action)


WRITES: dict[str, Callable[[Any, Path], object]] = {
    ".lock": lambda runner, place: FileLock(place / ".lock").acquire(),
    "config.full.yaml": lambda runner, place: runner.workspace.write_metadata(
        runner.config, runner._parts.run_location.code, replicas=1
    ),
    "run.json": lambda runner, place: runner.workspace.write_record({"model": 1}),
    "results.json": lambda runner, place: runner.workspace.write_results({1: {}}, None, None),
    "latest.json": lambda runner, place: runner.workspace.write_results({}, {"index": 1}, None),
    "best.json": lambda runner, place: runner.workspace.write_results({}, None, {"index": 1}),
}


@pytest.mark.parametrize("name", WRITES)
def test_full_disk_is_told_with_path_and_advice(name: str, tmp_path: Path) -> None:
    with Small(settings(tmp_path / "run")) as runner:
        if name in ("latest.json", "best.json"):
            runner.workspace.write_results({}, None, None)
        with (
            pytest.raises(
                OSError, match=f"Expected to write .*{name}.* Received: .*Free space there"
            ) as refused,
            no_room(),
        ):
            WRITES[name](runner, tmp_path / "run" / "checkpoints")
        assert refused.value.errno == errno.EFBIG
        left = [path.name for path in (tmp_path / "run").rglob("*.tmp")]
        assert left == []


_EXPORTS = """
import sys, time, torch
from danling.checkpoints import export_weights, storage

def write(self, data):
    print("writing", flush=True)
    time.sleep(600)

storage.HashingWriter.write = write  # an export that takes its time
export_weights(sys.argv[1], {"a": torch.ones(3)})
"""


@pytest.mark.parametrize("name", ["weights.pth", "weights.safetensors"])
def test_next_export_removes_the_remains_of_a_killed_one(name: str, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    path = tmp_path / name
    with Job([sys.executable, "-c", _EXPORTS, str(path)]) as job:
        job.wait_for_output("writing")
        (left,) = tmp_path.glob(".*")
        long_ago = time.time() - 3600
        os.utime(left, (long_ago, long_ago))
        export_weights(path, {"a": torch.ones(3)})
        assert left.exists(), "an export that is in progress keeps its file"
        path.unlink()
        job.kill()
    (tmp_path / f".exporting-other-{name}-00000000").write_text("of another path")
    export_weights(path, {"a": torch.ones(3)})
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        f".exporting-other-{name}-00000000",
        name,
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems take paths in UTF-8 only")
def test_path_with_undecodable_bytes_is_read_and_printed(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/bad\xff.pth"
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pth")
    os.rename(tmp_path / "a.pth", path)
    for command in ("inspect", "verify"):
        done = danling(command, os.fsdecode(path), warm=True)
        assert done.returncode == 0 and "bad\\udcff.pth" in done.stdout and not done.stderr, done


def test_newline_in_a_path_does_not_make_a_line(tmp_path: Path) -> None:
    path = tmp_path / "new\nok      line.pth"
    torch.save({"a": torch.ones(2)}, path)
    for command in ("inspect", "verify"):
        done = danling(command, path, warm=True)
        assert done.returncode == 0 and not any(
            line.startswith("ok      line") for line in done.stdout.splitlines()
        )

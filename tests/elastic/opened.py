"""Which files a rank opens, and when: by an audit hook of Python, or by strace, which also sees what other languages open."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from .plain_loop import note

_ANY_PROCESS = ctypes.c_ulong(-1)
_PR_SET_PTRACER = 0x59616D61
_CALL = re.compile(r"^\d+ +([\d.]+) (?:\S*open\S*|creat)\((?:[^\"]*, )?\"([^\"]*)\"")


class AuditedFiles:
    """Collects what Python opens in this process."""

    def __init__(self) -> None:
        self._opened: list[tuple[float, str]] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, values: tuple[object, ...]) -> None:
        if event == "open":
            self._opened.append((time.time(), str(values[0])))

    def tell(self) -> None:
        """Write down what was opened."""
        note(opened=self._opened)


class TracedFiles:
    """Has strace write down what this process opens, in all threads."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANY_PROCESS, 0, 0, 0)
        log = f"{os.environ['ROOT']}/strace.{os.getpid()}"
        names = "?open,?openat,?openat2,?creat"
        command = [
            "strace",
            "-f",
            "-ttt",
            "-s",
            "4096",
            "-e",
            f"trace={names}",
            "-o",
            log,
            "-p",
            str(os.getpid()),
        ]
        self._tracer = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        while "TracerPid:\t0" in Path("/proc/self/status").read_text():
            assert self._tracer.poll() is None
            time.sleep(0.01)

    def tell(self) -> None:
        """Nothing: strace writes by itself."""


def traced_files(log: Path) -> list[tuple[float, str]]:
    """Return what strace has seen: when, and which path."""
    found = [_CALL.match(line) for line in log.read_text(errors="replace").splitlines()]
    return [(float(each[1]), each[2]) for each in found if each is not None]

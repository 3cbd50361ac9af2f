"""Ends the processes of a script: those whose environment has a token, from whichever process they were started.

Run as a program, it waits until its standard input ends, and so until `danling prove` has ended, even by SIGKILL:

    python guard.py TOKEN
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

_ROUNDS = 200
_SECONDS = 0.05


def marked(token: str) -> list[int]:
    """Return the ids of the processes whose environment has the token."""
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            if name.isdigit() and int(name) != os.getpid() and token.encode() in file.read():
                found.append(int(name))
    return found


def end_marked(token: str) -> None:
    """Kill the processes with the token until there is none: one may start another one meanwhile."""
    for _ in range(_ROUNDS):
        found = marked(token)
        if not found:
            return
        for pid in found:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_SECONDS)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    end_marked(sys.argv[1])

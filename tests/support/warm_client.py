"""What stands in for `python`, `torchrun` and `danling`: it has the server of `support.warm` run the program in a fork.

It has the streams, the directory, the variables and the ignored signals of whoever starts it, passes signals on, and ends as the program
ends. It starts in a hundredth of a second, since it imports next to nothing.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from types import FrameType

PASSED_ON = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


def main(address: str, python: str) -> None:
    """Run the program that the command line names."""
    name, args = os.path.basename(sys.argv[0]), sys.argv[1:]
    if name.startswith("python"):
        name = "python"
        while args[:1] == ["-u"]:
            args = args[1:]
            os.environ["PYTHONUNBUFFERED"] = "1"
        if not args or (args[0].startswith("-") and args[0] not in ("-", "-m", "-c")):
            os.execv(python, [python, *sys.argv[1:]])
    request = {
        "name": name,
        "args": args,
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "ignored": [
            int(number) for number in PASSED_ON if signal.getsignal(number) == signal.SIG_IGN
        ],
    }
    line = socket.socket(socket.AF_UNIX)
    line.connect(address)

    def pass_on(number: int, frame: FrameType | None) -> None:
        line.send(bytes([number]))

    for number in PASSED_ON:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, pass_on)
    message = json.dumps(request).encode()
    socket.send_fds(line, [len(message).to_bytes(8, "big")], [0, 1, 2])
    line.sendall(message)
    answer = line.recv(4, socket.MSG_WAITALL)
    code = int.from_bytes(answer, "big", signed=True) if answer else 1
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)

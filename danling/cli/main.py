"""The command line: which subcommands there are, and what their ends mean.

Exit codes:
    0  done, and what was looked at is in order.
    1  done, and something is wrong: a checkpoint is damaged, a file of a run cannot be read, a check of `doctor` failed,
       the runs of `diff` differ, `audit` found another end, or `check-layout` or `prove` other gradients.
    2  the command line is wrong: an unknown option, a value that cannot be.
    3  there is nothing to work on: no such path, no run, no checkpoint.
    4  an optional package is missing; the message says what to install.
    130  interrupted; 143 of those that start programs, by SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from importlib import import_module
from io import TextIOWrapper
from typing import Any, TextIO

from danling import __version__
from danling.checkpoints.errors import CheckpointError
from danling.utils.messages import did_you_mean, without_controls
from danling.utils.secrets import hide_in_text

from .output import DAMAGED, INTERRUPTED, MISSING_PACKAGE, NOTHING_THERE, WRONG_USAGE

SUBCOMMANDS = (
    "run",
    "env",
    "doctor",
    "runs",
    "explain",
    "audit",
    "check-layout",
    "prove",
    "diff",
    "ranks",
    "plot",
    "inspect",
    "verify",
    "export",
    "estimate",
    "schema",
    "completion",
)
"""Each has a module of its name, whose docstring says what it does."""
_TRAINS = frozenset({"train", "fit", "launch", "resume", "evaluate"})
"""What other tools call their command that trains."""
WITH_PROGRAM = frozenset({"audit", "check-layout", "doctor", "prove", "run"})
"""Commands that start the program after `--`, which is in `options.program`."""


def parser(chosen: str = "", *, whole: bool = False) -> argparse.ArgumentParser:
    """Return the parser of the command line, with the options of one subcommand, or of all of them."""
    root = argparse.ArgumentParser(
        prog="danling",
        description="Look at runs and checkpoints, and start a training whose ranks may end. Any other training starts with torchrun.",
        epilog="Exit codes: 0 in order, 1 something is wrong, 2 wrong command line, 3 nothing there, 4 an extra is missing.",
    )
    root.add_argument("--version", action="version", version=f"danling {__version__}")
    commands = root.add_subparsers(dest="command", metavar="COMMAND", required=True)
    # Another command is left out, since its module, and maybe torch, would be imported for its line of help.
    names = (chosen,) if chosen in SUBCOMMANDS else SUBCOMMANDS
    for name in names:
        module = import_module(f"danling.cli.{name.replace('-', '_')}")
        text = str(module.__doc__)
        command = commands.add_parser(
            name,
            help=text.partition("\n")[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if whole or name == chosen:
            module.add_arguments(command)
            command.set_defaults(run=module.run, command_parser=command)
    return root


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    if isinstance(sys.stdout, TextIOWrapper):
        # A file may have a name that is no text.
        sys.stdout.reconfigure(errors="backslashreplace")
    with redirect_stdout(_Escaping(sys.stdout)), redirect_stderr(_Escaping(sys.stderr)):
        return _main(arguments)


class _Escaping:
    """A stream of text in which control characters are escaped, and what looks like a secret is hidden."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(without_controls(hide_in_text(text)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _main(arguments: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    # The arguments after `--` belong to the program.
    end = words.index("--") if "--" in words else len(words)
    # The root has no option with a value, so the first word without a dash is the subcommand.
    chosen = next((word for word in words[:end] if not word.startswith("-")), "")
    root = parser(chosen)
    if not chosen and not words[:end]:
        root.error(
            f"a command is missing. The commands are {', '.join(SUBCOMMANDS)}; danling --help describes them."
        )
    if chosen in _TRAINS:
        root.error(
            f"unknown command {chosen!r}. Your program trains: run `python train.py`, or `torchrun --nproc-per-node 2 train.py` on "
            "several processes. These commands look at what it leaves."
        )
    if chosen and chosen not in SUBCOMMANDS:
        root.error(
            f"unknown command {chosen!r}.{did_you_mean(chosen, SUBCOMMANDS)} The commands are {', '.join(SUBCOMMANDS)}."
        )
    # For the other commands `--` is a mark of argparse: what follows are paths, even with a dash.
    options, unknown = root.parse_known_args(words[:end] if chosen in WITH_PROGRAM else words)
    if unknown:
        options.command_parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    options.program = words[end + 1 :]
    try:
        ends = _ended_by_sigterm() if chosen in WITH_PROGRAM else nullcontext()
        with ends:
            code: int = options.run(options)
        # Here and not at exit, so that a reader that is gone is noticed while it can be handled.
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough; Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        return _explained(error)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the block as an exception does: with its processes, and its scratch directory. A second one is ignored."""
    # Only the main thread may set what a signal does; a program may call `main` in another one.
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


def _explained(error: Exception) -> int:
    """Say what went wrong in one line and return its exit code; what no user can fix keeps its traceback."""
    if isinstance(error, ImportError) and str(error).startswith("Expected"):
        code = MISSING_PACKAGE
    elif isinstance(error, FileNotFoundError) or type(error).__name__ == "RemoteMissing":
        code = NOTHING_THERE  # the second by name: its class is of an extension, which may not be loaded
    elif isinstance(error, (ValueError, OSError)):
        code = WRONG_USAGE
    elif isinstance(error, CheckpointError):
        code = DAMAGED
    else:
        raise error
    print(f"danling: {error}", file=sys.stderr)
    return code

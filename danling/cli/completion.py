"""Print a script with which a shell completes the commands and options of danling.

The shell reads it from its own file: in bash ~/.local/share/bash-completion/completions/danling, in zsh the file `_danling` in a
directory of $fpath. It needs shtab: `pip install shtab`.

Example: danling completion bash
"""

from __future__ import annotations

import argparse

from .output import OK


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="the shell that reads it")


def run(options: argparse.Namespace) -> int:
    """Print the script."""
    try:
        import shtab
    except ImportError as error:
        raise ImportError(
            f"Expected shtab to be installed, which writes the script. Received: {error}. Run `pip install shtab`, or "
            "`pip install -e '.[completion]'` in a clone of this library."
        ) from error
    from .main import parser  # only here: it imports this module

    print(shtab.complete(parser(whole=True), shell=options.shell))
    return OK

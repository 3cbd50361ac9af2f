"""Start a training on several processes of which any may end: the others continue in place, and a replacement joins them.

The script does not change. It needs `elastic.enabled=true` and what that requires; without it the ranks run as under torchrun.

Example: danling run --ranks 3 -- python train.py
"""

from __future__ import annotations

import argparse

from .output import at_least


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    parser.add_argument(
        "--ranks", type=at_least(1), default=1, help="processes on this machine (default: 1)"
    )
    parser.add_argument(
        "--nnodes",
        type=at_least(1),
        default=1,
        help="machines, on each of which this command runs (default: 1)",
    )
    parser.add_argument(
        "--rdzv-endpoint", metavar="HOST:PORT", default="", help="where several machines meet"
    )
    parser.add_argument(
        "--rdzv-id",
        metavar="NAME",
        default="danling",
        help="name of the job there (default: danling)",
    )
    parser.add_argument(
        "--spares",
        type=at_least(0),
        default=1,
        help="replacements that are kept ready on this machine (default: 1)",
    )
    parser.epilog = "After `--` comes the program, as you start it."


def run(options: argparse.Namespace) -> int:
    """Start the ranks, and return the exit code of the job."""
    from danling.elastic.agent import Launch, program_of, run_agent  # torch
    from danling.elastic.reconfigure import check_supported

    check_supported()
    if not options.program:
        raise ValueError(
            "Expected a program after `--`, such as `danling run --ranks 2 -- python train.py`. Received: none."
        )
    if options.nnodes > 1 and not options.rdzv_endpoint:
        raise ValueError(
            "Expected --rdzv-endpoint HOST:PORT with several machines. Received: none. Name the first machine."
        )
    return run_agent(
        Launch(
            program=program_of(options.program),
            ranks=options.ranks,
            machines=options.nnodes,
            endpoint=options.rdzv_endpoint,
            run_id=options.rdzv_id if options.rdzv_endpoint else "",
            spares=options.spares,
        )
    )

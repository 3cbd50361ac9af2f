"""How many Python calls of the library an update makes, and the end of a pass: a number without noise, the same on every machine.

    python benchmarks/library_calls.py                  # a few seconds
    python benchmarks/library_calls.py --functions      # which functions, in an update

The program is that of `peers.py`: a small MLP with a criterion and a schedule of the user's, clipping, batches of 32 from a `Dataset`, and
128 of them a pass. Counted are frames of functions and generators in `danling/`; comprehensions are not, which have no frame from
Python 3.12 on, so that the number is the same on each release of Python.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from step_cost import by_runner
from workload import SMALL, Samples, make_batches

import danling

ROOT = str(Path(danling.__file__).parent)
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>")
UPDATES = 64
"""Updates that are counted within a pass, after as many."""


def count(train: Callable[[int], None], updates: int) -> Counter[str]:
    """Return the calls of each function of the library in so many updates."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if (
            event == "call"
            and code.co_filename.startswith(ROOT)
            and code.co_name not in COMPREHENSIONS
        ):
            calls[
                f"{code.co_filename.removeprefix(ROOT)[1:]}:{code.co_firstlineno} {code.co_name}"
            ] += 1

    sys.setprofile(note)
    try:
        train(updates)
    finally:
        sys.setprofile(None)
    return calls


def library_calls(root: str) -> tuple[Counter[str], float, float]:
    """Return the calls of each function in so many updates, those of one update, and those that the end of a pass adds.

    Args:
        root: A directory for the runs.
    """
    train = by_runner(SMALL, Samples(make_batches(SMALL)), root)
    train(SMALL.batches)  # the first updates look at more
    # A training has a beginning and an end, so that two of other lengths are compared. Here each is in one pass.
    shorter, longer = count(train, UPDATES // 2), count(train, UPDATES + UPDATES // 2)
    longer.subtract(shorter)
    update = longer.total() / UPDATES
    one, two = count(train, SMALL.batches).total(), count(train, 2 * SMALL.batches).total()
    return longer, update, two - one - SMALL.batches * update


def main() -> None:
    """Count, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--functions", action="store_true", help="print the calls of each function")
    parser.add_argument("--json", type=Path, help="write the figures there")
    asked = parser.parse_args()
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as root:
        functions, update, end = library_calls(root)
    print(
        f"Python calls of the library: {update:.1f} an update, {end:.0f} more at the end of a pass"
    )
    for name, number in functions.most_common() if asked.functions else ():
        if number > 0:
            print(f"{number / UPDATES:8.2f}  {name}")
    if asked.json:
        asked.json.write_text(json.dumps({"update": update, "end_of_pass": end}) + "\n")


if __name__ == "__main__":
    main()

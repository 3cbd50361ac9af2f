"""From what a user types, a path or a URL, to a checkpoint or runs on disk."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from danling.workspace.runs import Run, find_runs


def is_url(text: str) -> bool:
    """Whether what was typed is a URL, and no path."""
    return "://" in text


@contextmanager
def runs_at(*roots: str) -> Iterator[list[list[Run]]]:
    """Yield the runs at or below each of some directories and URLs, for as long as they are looked at."""
    with ExitStack() as stack:
        found = []
        for root in roots:
            if is_url(root):
                # Only a user with a store needs this.
                from danling.remote.sources import runs_below

                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="danling-runs-"))
                found.append(runs_below(root, Path(folder)))
            else:
                found.append(find_runs(root))
        yield found


@contextmanager
def one_run(path: str) -> Iterator[Run]:
    """Yield the one run at a directory or URL, for as long as it is read."""
    with runs_at(path) as (found,):
        if not found:
            raise FileNotFoundError(
                f"Expected a run at {path!r}. Received: none. Name one of `danling runs`."
            )
        if len(found) > 1:
            raise ValueError(
                f"Expected one run. Received: {path!r}, below which there are {len(found)}: {found[0].name}, {found[1].name}, ... Name one."
            )
        yield found[0]


@contextmanager
def checkpoint_at(source: str, *, files: Sequence[str] = ()) -> Iterator[Path]:
    """Yield the path of a checkpoint: of a verified copy, where a URL names it, for as long as it is looked at."""
    if not is_url(source):
        yield Path(source)
        return
    from danling.remote.sources import local_copy

    with local_copy(source, files=files) as path:
        yield path

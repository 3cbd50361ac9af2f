"""From what a user types, a path or a URL, to a checkpoint or runs on disk."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from danling.checkpoints.reading import locate
from danling.workspace.runs import Run, find_runs

__all__ = ["checkpoint_at", "is_url", "locate", "runs_at"]


def is_url(text: str) -> bool:
    """Whether what was typed is a URL, and no path."""
    return "://" in text


@contextmanager
def runs_at(*roots: str) -> Iterator[list[list[Run]]]:
    """Yield the runs at or below each of some directories and URLs, for as long as they are looked at."""
    with ExitStack() as stack:
        yield [find_runs(root) if not is_url(root) else _brought(root, stack) for root in roots]


@contextmanager
def one_run(path: str) -> Iterator[Run]:
    """Yield the one run at a directory or URL, for as long as it is read."""
    with runs_at(path) as (found,):
        if not found:
            raise FileNotFoundError(f"Expected a run at {path!r}. Received: none. Name one of `danling runs`.")
        if len(found) > 1:
            raise ValueError(
                f"Expected one run. Received: {path!r}, below which there are {len(found)}: {found[0].name}, {found[1].name}, ... Name one."
            )
        yield found[0]


def _brought(url: str, stack: ExitStack) -> list[Run]:
    # Who looks at directories needs nothing of this.
    from danling.remote import open_store
    from danling.remote.reading import runs_below

    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="danling-runs-"))
    return runs_below(open_store(url), Path(folder))


@contextmanager
def checkpoint_at(source: str, *, files: Sequence[str] = ()) -> Iterator[Path]:
    """Yield the path of a checkpoint: of a verified copy, where a URL names it, for as long as it is looked at."""
    if not is_url(source):
        yield Path(source)
        return
    from danling.remote.sources import local_copy

    with local_copy(source, files=files) as path:
        yield path


def shown(path: object, source: str) -> str:
    """Return what a checkpoint is called in the output: the URL, where what was read is a copy."""
    return source if is_url(source) else str(path)

"""Git state, run id and timestamp of a run."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any

logger = logging.getLogger("danling")

_SHORT = 7
_NAMED_UNTRACKED = 100
_GIT_TIMEOUT_SECONDS = 60.0
_LISTING_TIMEOUT_SECONDS = 5.0
# Every option that a user's git configuration could change is fixed: the same tree must give the same bytes everywhere.
_DIFF = (
    *("-c", "core.quotePath=true", "diff", "--no-ext-diff", "--no-textconv", "--no-color", "--no-renames"),
    *("--no-relative", "--binary", "--full-index", "--unified=3", "--inter-hunk-context=0", "--diff-algorithm=myers"),
    *("--indent-heuristic", "--submodule=short", "--src-prefix=a/", "--dst-prefix=b/", "HEAD"),
)


@dataclass(frozen=True)
class CodeIdentity:
    """The state of the code that a run was started from.

    Untracked files do not count: a run that writes below its own repository would otherwise change its identity from
    one attempt to the next, and `auto_resume` would never find it. Their names are in `git.yaml`.
    """

    sha: str | None = None
    branch: str | None = None
    """`None` when the head is detached."""
    diff: bytes = b""
    """`git diff HEAD` of the whole repository. Bytes, since tracked files may be in any encoding."""
    untracked: tuple[str, ...] = ()

    @classmethod
    def of_directory(cls, directory: str | os.PathLike[str] | None = None) -> CodeIdentity:
        """Read the identity of the repository around `directory`.

        Without git, repository or commit the identity is empty. `None` is the working directory.
        """
        where = Path(directory or ".")
        head = _git(where, "rev-parse", "HEAD", "--abbrev-ref", "HEAD")
        if head is None:
            return cls()
        sha, branch = head.decode().split()
        diff = _git(where, *_DIFF)
        if diff is None:
            return cls()
        return cls(sha, None if branch == "HEAD" else branch, diff, _untracked(where))

    @property
    def dirty(self) -> bool:
        """Whether a tracked file differs from the commit."""
        return bool(self.diff)

    @cached_property
    def diff_sha(self) -> str | None:
        """First 10 hexadecimal digits of the SHA-256 of the diff; `None` when clean."""
        return hashlib.sha256(self.diff).hexdigest()[:10] if self.diff else None

    @property
    def short_sha(self) -> str | None:
        """First 7 digits of the commit: not git's own abbreviation, whose length differs from clone to clone."""
        return self.sha[:_SHORT] if self.sha else None

    @property
    def code_id(self) -> str | None:
        """`<short_sha>`, or `<short_sha>-d<diff_sha>` when dirty; `None` without git."""
        return self.short_sha if self.diff_sha is None else f"{self.short_sha}-d{self.diff_sha}"

    def describe(self) -> dict[str, Any]:
        """Return the content of `git.yaml`: plain values, without the diff itself; `None` for what only git knows, where there is none."""
        return {
            "code_id": self.code_id,
            "sha": self.sha,
            "branch": self.branch,
            "dirty": self.dirty if self.sha else None,
            "diff_sha": self.diff_sha,
            "untracked": list(self.untracked),
        }


def run_id(code_id: str | None, config_id: str) -> str:
    """Return the id of a run, the same for all its attempts: `code_id-config_id`, or `config_id` without git."""
    return f"{code_id}-{config_id}" if code_id else config_id


def make_timestamp() -> str:
    """Return the name of an attempt: the time in UTC to the microsecond, which sorts by name and suits file systems.

    Ranks must share the one of the main process.
    """
    return datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S-%f")


def _untracked(directory: Path) -> tuple[str, ...]:
    listing = ("ls-files", "--others", "--exclude-standard", "--directory", "--full-name", "-z", "--", ":/")
    names = _git(directory, *listing, timeout=_LISTING_TIMEOUT_SECONDS) or b""
    return tuple(os.fsdecode(name) for name in names.split(b"\0") if name)[:_NAMED_UNTRACKED]


def _git(directory: Path, *arguments: str, timeout: float = _GIT_TIMEOUT_SECONDS) -> bytes | None:
    # Without optional locks, reading never disturbs a git command that the user runs meanwhile.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    command = ["git", "-C", str(directory), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, check=True, stdin=subprocess.DEVNULL, timeout=timeout, env=environment
        )
    except (OSError, subprocess.SubprocessError) as error:
        logger.debug("git %s gave nothing: %s", arguments[0], error)
        return None
    return done.stdout

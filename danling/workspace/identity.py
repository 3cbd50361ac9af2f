"""What code a run was made with, and what the run is called."""

from __future__ import annotations

import hashlib
import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path


@dataclass(frozen=True)
class CodeIdentity:
    """The state of a git repository.

    Attributes:
        code_id: `<short sha>`, or `<short sha>-d<ten digits of the diff's sha256>` when tracked files were changed; `None` without git.
        sha: Full commit hash.
        branch: Branch name; `None` on a detached head.
        diff: Changes of tracked files against the commit; untracked files are not part of it.
    """

    code_id: str | None = None
    sha: str | None = None
    branch: str | None = None
    diff: str = ""

    @classmethod
    def of_directory(cls, directory: Path | None = None) -> CodeIdentity:
        """Read the repository that `directory`, by default the working directory, lies in; empty when there is none."""
        where = directory or Path.cwd()
        sha = _git(where, "rev-parse", "HEAD")
        if sha is None:
            return cls()
        sha = sha.strip()
        diff = _git(where, "diff", "HEAD", "--binary") or ""
        branch = (_git(where, "symbolic-ref", "--short", "-q", "HEAD") or "").strip() or None
        code_id = sha[:7]
        if diff:
            code_id += f"-d{hashlib.sha256(diff.encode('utf-8', 'surrogateescape')).hexdigest()[:10]}"
        return cls(code_id, sha, branch, diff)


def _git(directory: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], cwd=directory, capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "surrogateescape") if done.returncode == 0 else None


def run_id(code_id: str | None, config_id: str) -> str:
    """Return `code_id-config_id`, or `config_id` without git: the same for every attempt at a run."""
    return f"{code_id}-{config_id}" if code_id else config_id


def make_timestamp() -> str:
    """Return the present time in UTC to the microsecond, fit for a file name: one attempt of a run."""
    return datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S-%f")

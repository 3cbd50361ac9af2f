"""The directory of a run: where everything lies, and the small files that describe it."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from danling.utils.files import clear_places, json_text, refuse_link, write_atomically
from danling.utils.nesting import yaml_text
from danling.utils.plain import to_plain
from danling.utils.secrets import redact_patch

from .claim import make_directory
from .identity import CodeIdentity

logger = logging.getLogger("danling")

PathLike = str | os.PathLike[str]

_CONFIGS = ("full", "canonical", "diff")
_DESCRIPTION = (*(f"config.{name}.yaml" for name in _CONFIGS), "git.yaml", "git.diff")


class Workspace:
    """Paths of one attempt of a run, and the writing of its metadata and results.

        workspace_root/lineage[-code_id]/id/
          checkpoints/  logs/{timestamp}.log  tensorboard/{timestamp}/  wandb/
          metrics.jsonl  results.json  latest.json  best.json  [streams.json]
          metadata/ config.full.yaml config.canonical.yaml config.diff.yaml git.yaml git.diff

    Constructing touches no file. Paths are absolute, so that a later change of the working directory moves nothing.
    Every rank may read the paths; only the main process creates and writes, and on the others these calls do nothing.

    Attributes:
        dir: The run directory.
        checkpoints: Directory of the checkpoints.
        log_file: Log of this attempt.
        tensorboard_dir: TensorBoard events of this attempt.
        wandb_dir: Where Weights & Biases keeps its files; it makes this directory itself, below the `dir` it is given.
        metadata_dir: What the run was made of.
        jsonl_file: Curves of the run over all attempts, one JSON object a line.
        results_file: All metrics by completed epoch or global step, then by split.
        latest_file: Metrics of the last evaluation.
        best_file: Metrics of the best evaluation.
        digests_file: Digests of updates; only of a run with `audit.digest_interval`.
        streams_file: How far the streams are that the run fills or trains on; only of a run that has some.

    Args:
        lineage: Name under which the runs of one line of work are kept.
        id: Id of the run, the same for all its attempts.
        timestamp: Name of this attempt, the same on all ranks.
        workspace_root: Directory of all runs.
        code_id: Identity of the code, or `None` without git.
        is_main: Whether this process is the main one.
        dir: Replaces `workspace_root/lineage[-code_id]/id`.
        checkpoint_dir: Replaces the directory of checkpoints.
        checkpoint_dir_name: Name of the directory of checkpoints below the run directory.
        log_file: Replaces `logs/{timestamp}.log`.
        part: Directory below the run directory for everything but the checkpoints, where several groups of processes work on one
            run.
    """

    def __init__(
        self,
        *,
        lineage: str,
        id: str,
        timestamp: str,
        workspace_root: PathLike = "experiments",
        code_id: str | None = None,
        is_main: bool = True,
        dir: PathLike | None = None,
        checkpoint_dir: PathLike | None = None,
        checkpoint_dir_name: str = "checkpoints",
        log_file: PathLike | None = None,
        part: str | None = None,
    ) -> None:
        family = f"{lineage}-{code_id}" if code_id else lineage
        self.is_main = is_main
        run_dir = _absolute(dir or Path(workspace_root, family, id))
        self.dir = run_dir / part if part else run_dir
        self.checkpoints = _absolute(checkpoint_dir or run_dir / checkpoint_dir_name)
        self.log_file = _absolute(log_file or self.dir / "logs" / f"{timestamp}.log")
        self.tensorboard_dir = self.dir / "tensorboard" / timestamp
        self.wandb_dir = self.dir / "wandb"
        self.metadata_dir = self.dir / "metadata"
        self.jsonl_file = self.dir / "metrics.jsonl"
        self.results_file = self.dir / "results.json"
        self.latest_file = self.dir / "latest.json"
        self.best_file = self.dir / "best.json"
        self.digests_file = self.dir / "digests.jsonl"
        self.streams_file = self.dir / "streams.json"

    def latest_tensorboard_dir(self) -> Path | None:
        """Return the directory of the events of the last attempt that wrote some, `None` without one."""
        attempts = sorted(path for path in self.tensorboard_dir.parent.glob("*") if path.is_dir())
        return attempts[-1] if attempts else None

    def create(self) -> None:
        """Create the run directory on the main process; what lies below it is created by those who write it.

        What lies there under the name of a file or directory of the run and is none, such as a named pipe, is moved aside: it would
        block a restart.

        Raises:
            ValueError: If there is a file where the directory should be, or a link where the metadata should be.
            PermissionError: If the directory cannot be created or written.
        """
        if not self.is_main:
            return
        make_directory(self.dir)
        refuse_link(self.metadata_dir)
        described = [self.metadata_dir / name for name in _DESCRIPTION]
        clear_places(directories=[self.metadata_dir, self.dir / "logs"])
        written = [
            self.jsonl_file,
            self.results_file,
            self.latest_file,
            self.best_file,
            self.streams_file,
            self.digests_file,
        ]
        clear_places(files=[*written, *described])

    def has_metadata(self) -> bool:
        """Whether an attempt has written what the run was made of."""
        return (self.metadata_dir / "config.full.yaml").is_file()

    def write_metadata(
        self,
        full: Mapping[str, object],
        canonical: Mapping[str, object],
        diff: Mapping[str, object],
        identity: CodeIdentity | None = None,
        *,
        keep_diff: bool = True,
        secrets: Collection[str] = (),
    ) -> None:
        """Write what the run was made of as YAML, on the main process; an earlier attempt's files are replaced.

        Args:
            full: The whole configuration.
            canonical: What of it changes the result.
            diff: What of it differs from the defaults.
            identity: State of the code; without git `git.yaml` says `null`.
            keep_diff: Whether to write `git.diff`. Lines in it that look like secrets are replaced, and counted in `git.yaml`.
            secrets: Texts that must not stand in the diff.
        """
        if not self.is_main:
            return
        self.metadata_dir.mkdir(parents=True, exist_ok=True)
        for name, values in zip(_CONFIGS, (full, canonical, diff)):
            write_atomically(self.metadata_dir / f"config.{name}.yaml", yaml_text(to_plain(values)))
        described, patch = self.metadata_dir / "git.yaml", self.metadata_dir / "git.diff"
        identity = identity or CodeIdentity()
        text, left_out = redact_patch(identity.diff, secrets)
        write_atomically(described, yaml_text(to_plain({**identity.describe(), "lines_left_out": left_out})))
        if keep_diff and identity.sha is not None:
            write_atomically(patch, text)
        else:
            patch.unlink(missing_ok=True)

    def write_results(
        self, results: Mapping[Any, Any], latest: Mapping[str, object] | None, best: Mapping[str, object] | None
    ) -> None:
        """Write `results.json`, `latest.json` and `best.json` on the main process, each replaced as a whole.

        They are JSON for every reader: keys are strings, and NaN and infinities, which JSON lacks, are `null`. A file
        whose content stays the same is left alone.

        Args:
            results: All metrics by completed epoch or global step, then by split.
            latest: The last evaluation; `None` removes the file of an earlier attempt.
            best: The best evaluation; `None` removes the file of an earlier attempt.
        """
        if not self.is_main:
            return
        for path, content in ((self.results_file, results), (self.latest_file, latest), (self.best_file, best)):
            if content is None:
                path.unlink(missing_ok=True)
            else:
                _write_changed(path, json_text(to_plain(content)))

    def write_streams(self, streams: Mapping[str, Mapping[str, object]]) -> None:
        """Write `streams.json` on the main process. It is for people who look: a file that cannot be written is no error.

        Args:
            streams: By split, how far a stream is that the run fills or trains on, see `danling.data.WindowLoader.standing`.
        """
        if not self.is_main:
            return
        try:
            write_atomically(self.streams_file, json_text({name: dict(found) for name, found in streams.items()}))
        except OSError as error:
            logger.warning("How far the streams of this run are could not be written: %s.", error)


def _write_changed(path: Path, text: str) -> None:
    if not path.exists() or path.read_bytes() != text.encode():
        write_atomically(path, text)


def _absolute(path: PathLike) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))

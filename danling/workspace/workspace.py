"""The directory of a run and the small files in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from danling.utils.files import json_text, write_atomically

from .identity import CodeIdentity


class Workspace:
    """`workspace_root/lineage[-code_id]/id/` and what lies in it.

    Args:
        workspace_root: Root of all runs.
        lineage: Namespace of related runs.
        code_id: Identity of the code, or `None`.
        id: Identity of the run.
        timestamp: Identity of the attempt.
        is_main: Whether this process writes; the others know the paths only.
        dir: The run directory, instead of the one above.
        checkpoint_dir: Directory of checkpoints, instead of `checkpoint_dir_name` in the run directory.
        checkpoint_dir_name: Its name there.
        log_file: The log, instead of `logs/{timestamp}.log`.
    """

    def __init__(
        self,
        *,
        workspace_root: str | Path,
        lineage: str,
        code_id: str | None,
        id: str,
        timestamp: str,
        is_main: bool = True,
        dir: str | Path | None = None,
        checkpoint_dir: str | Path | None = None,
        checkpoint_dir_name: str = "checkpoints",
        log_file: str | Path | None = None,
    ) -> None:
        namespace = f"{lineage}-{code_id}" if code_id else lineage
        self.dir = Path(dir) if dir else Path(workspace_root) / namespace / id
        self.checkpoints = Path(checkpoint_dir) if checkpoint_dir else self.dir / checkpoint_dir_name
        self.log_file = Path(log_file) if log_file else self.dir / "logs" / f"{timestamp}.log"
        self.tensorboard_dir = self.dir / "tensorboard" / timestamp
        self.wandb_dir = self.dir / "wandb"
        self.metadata_dir = self.dir / "metadata"
        self.jsonl_file = self.dir / "metrics.jsonl"
        self.is_main = is_main

    def create(self) -> None:
        """Make the run directory; nothing on other processes than the main one."""
        if self.is_main:
            self.dir.mkdir(parents=True, exist_ok=True)

    def write_metadata(
        self, full: Mapping[str, Any], canonical: Mapping[str, Any], changed: Mapping[str, Any], identity: CodeIdentity | None
    ) -> None:
        """Write the configuration in its three forms and the state of the code. Main process only.

        Args:
            full: The whole configuration.
            canonical: What changes the result.
            changed: What differs from the defaults.
            identity: The state of the code.
        """
        self.metadata_dir.mkdir(parents=True, exist_ok=True)
        code = identity or CodeIdentity()
        files = {"config.full.yaml": full, "config.canonical.yaml": canonical, "config.diff.yaml": changed}
        files["git.yaml"] = {"code_id": code.code_id, "sha": code.sha, "branch": code.branch, "dirty": bool(code.diff)}
        for name, values in files.items():
            write_atomically(self.metadata_dir / name, yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True))
        write_atomically(self.metadata_dir / "git.diff", code.diff.encode("utf-8", "surrogateescape"))

    def write_results(self, results: Mapping[int, Any], latest: Mapping[str, Any], best: Mapping[str, Any]) -> None:
        """Write `results.json`, `latest.json` and `best.json`, each of them whole at any instant. Main process only."""
        for name, values in (("results.json", results), ("latest.json", latest), ("best.json", best)):
            text = json_text(values)
            path = self.dir / name
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                write_atomically(path, text)

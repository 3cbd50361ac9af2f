"""What a tracker reads of a runner."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import danling as dl


def tracked(
    directory: Path = Path(),
    step: int = 0,
    *,
    run: str = "abc-00ff",
    main: bool = True,
    **config: Any,
) -> Any:
    """Return a runner in a directory that has made so many steps."""
    workspace = SimpleNamespace(
        dir=directory,
        instance=run,
        tensorboard_dir=directory / "tb",
        jsonl_file=directory / "metrics.jsonl",
        latest_tensorboard_dir=lambda: directory / "tb",
    )
    return SimpleNamespace(
        config=dl.RunnerConfig({"lineage": "lin", "experiment": "exp", **config}),
        workspace=workspace,
        state=SimpleNamespace(train=SimpleNamespace(global_step=step)),
        is_main_process=main,
    )

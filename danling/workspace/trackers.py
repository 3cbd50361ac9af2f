"""Where figures are kept: a JSON Lines file that is always there, TensorBoard, Weights & Biases."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from danling.utils.files import write_atomically


class Tracker(Protocol):
    """Takes figures by name and step."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Keep figures of an update."""

    def close(self) -> None:
        """Write what is left and end."""


class JsonlTracker:
    """One JSON object a line. On a resume it is cut back to the step that is resumed, so that no step stands there twice.

    Args:
        file: The file.
        resume_step: Step the run goes on from; 0 begins the file anew.
    """

    def __init__(self, file: Path, *, resume_step: int = 0) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            _cut_back(file, resume_step)
        self._file = file.open("a", encoding="utf-8", buffering=1)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Append a line with `step`, `time` (seconds since the epoch) and the figures; one that is not finite is null."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, "time": round(time.time(), 3), **finite}) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _cut_back(file: Path, step: int) -> None:
    kept = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue  # the half line of a process that was killed while writing it
        if isinstance(entry, dict) and entry.get("step", 0) <= step:
            kept.append(line)
    if not step:
        kept = []
    write_atomically(file, "".join(f"{line}\n" for line in kept))


class TensorBoardTracker:
    """Event files for TensorBoard.

    Args:
        directory: Where they go.
        purge_step: Step from which an earlier attempt's curves are hidden.

    Raises:
        ImportError: If TensorBoard is not installed.
    """

    def __init__(self, directory: Path, *, purge_step: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("Expected TensorBoard for tensorboard=true. Install it: pip install 'danling[tensorboard]'.") from error
        self.writer: Any = SummaryWriter(str(directory), purge_step=purge_step)  # type: ignore[no-untyped-call]

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add a point to every curve."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close."""
        self.writer.close()


class WandbTracker:
    """A Weights & Biases run; a resumed run continues its own.

    Args:
        run_id: Identity of the run, the same for every attempt.
        config: Settings to show.
        **settings: Arguments of `wandb.init`.

    Raises:
        ImportError: If wandb is not installed.
    """

    def __init__(self, *, run_id: str, config: Mapping[str, Any], **settings: Any) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ImportError("Expected wandb for wandb.enabled=true. Install it: pip install 'danling[wandb]'.") from error
        directory = Path(settings.pop("dir"))
        directory.mkdir(parents=True, exist_ok=True)
        tags = settings.pop("tags", None)
        options = {name: value for name, value in settings.items() if value is not None}
        self.run: Any = wandb.init(
            id=run_id, resume="allow", dir=str(directory), config=dict(config), tags=[tags] if isinstance(tags, str) else tags, **options
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add a point to every curve."""
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self.run.finish()

"""The checkpoint managers of `danling.checkpoints`, under the name that the contract gives them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import danling.checkpoints as _home
from danling.checkpoints.reading import READERS

if TYPE_CHECKING:
    from danling.checkpoints import *  # noqa: F403
else:
    # Name by name: some of them import torch.distributed.checkpoint, which most runs never use.
    def __getattr__(name: str) -> Any:
        home = (
            import_module(READERS["deepspeed"]) if name == "DeepSpeedCheckpointManager" else _home
        )
        return getattr(home, name)


__all__ = _home.__all__

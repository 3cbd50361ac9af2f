"""Training through Hugging Face Accelerate: its devices, launcher settings and fp8 beneath the library's update."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from danling.accelerate.accelerator import (
    AcceleratePreparation,
    AccelerateReduction,
    AccelerateSettings,
    check_launch,
    import_accelerate,
    open_accelerator,
    read_settings,
    release_accelerator,
)
from danling.config import RunnerConfig
from danling.distributed import world_of
from danling.training import GradientReduction

from .torch_runner import TorchRunner


class AccelerateRunner(TorchRunner):
    """Trains through Accelerate, which picks the device, wraps the model, runs the backward and steps the optimizer.

    Weighing, finiteness, clipping, skipping, schedules, data, random streams and checkpoints are those of `TorchRunner`: on one process or
    several a run ends bitwise as on the stack `ddp`. `self.accelerator` is the accelerator of this process; do not make another one.

    Settings come from `config.accelerate`, from a file of `accelerate config` and from `ACCELERATE_*` variables; what the library
    decides is refused there with the key that says it here.

    Raises:
        ImportError: If Accelerate is not installed: `pip install accelerate`.
    """

    stack = "accelerate"

    preparation: AcceleratePreparation
    accelerate_settings: AccelerateSettings

    accelerator: Any = None
    """The accelerator of this process; forgotten by Accelerate in `close`."""

    def adopt_config(self, config: RunnerConfig | Mapping[str, object] | None) -> RunnerConfig:
        own = super().adopt_config(config)
        import_accelerate()
        section = own.plain()["accelerate"] or {}
        settings = read_settings(section, os.environ, precision=own.precision)
        own.precision = settings.precision
        if settings.fp8:
            own.accelerate.mixed_precision = "fp8"
        self.accelerate_settings = settings
        return own

    def init_distributed(self) -> None:
        """Join the process group, as every stack; then open the accelerator, which finds it there and picks the device."""
        settings, launch = self.accelerate_settings, self.launch
        check_launch(settings, os.environ, world_size=launch.world_size)
        super().init_distributed()
        self.accelerator = open_accelerator(settings, launch, self.accelerate_kwargs())
        self._parts.closers.callback(release_accelerator)
        # Settings of Accelerate, such as `cpu`, may name another device, which then counts.
        if self.accelerator.device.type != self.device.type:
            self.device = self.accelerator.device
            self.world = world_of(launch.world_size, self.device)

    def accelerate_kwargs(self) -> dict[str, Any]:
        """Return further arguments of `Accelerator`, such as `kwargs_handlers` with a recipe for fp8.

        Called by the library's `__init__`, before anything else is on the runner than its configuration.
        """
        return {}

    def build_preparation(self) -> AcceleratePreparation:
        if self.accelerator is None:
            raise ValueError(
                "Expected `init_distributed` to open the accelerator. Received: none. Call super().init_distributed() in it."
            )
        return AcceleratePreparation(self.world, accelerator=self.accelerator)

    def bind_optimizer(self) -> None:
        self.preparation.bind(self.optimizer)
        self._wrap()

    def build_reduction(self) -> GradientReduction:
        return AccelerateReduction(
            self, averages="all" if self._parts.data.finds_micro_batch_size else "criterion"
        )

"""The stages of a pipeline: the schedule that runs them, and which of them each rank holds. Nothing is communicated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    ScheduleDualPipeV,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)
from torch.torch_version import TorchVersion

from .axes import Axes

V_SCHEDULES = (ScheduleZBVZeroBubble, ScheduleDualPipeV)
"""Schedules whose ranks hold a stage from the front and one from the back."""

_SINGLE_STAGE = ("1f1b", "gpipe")


def resolve_schedule(name: str) -> object:
    """Return the schedule class of `torch.distributed.pipelining` with this name; case does not matter."""
    names = ["1F1B", "DualPipeV", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS", "ZBVZeroBubble"]
    short = name.lower().removeprefix("schedule")
    if short not in map(str.lower, names):
        raise ValueError(f"Expected a pipeline schedule out of {names}. Received: parallel.pipeline_schedule={name!r}.")
    return get_schedule_class(short)


def check_schedule(schedule: type, device: torch.device, version: str = torch.__version__) -> None:
    """Refuse a schedule that this torch cannot start on this device. May be called on one rank; the same answer on all."""
    if schedule in V_SCHEDULES and device.type == "cpu" and TorchVersion(version) < "2.12":
        raise ValueError(
            f"Expected torch 2.12 or newer to run {schedule.__name__} over gloo. Received: torch {version}. Upgrade torch, or "
            "choose another parallel.pipeline_schedule, such as 1F1B."
        )


def stages_of_rank(schedule: Any, *, rank: int, size: int, num_stages: int) -> list[int]:
    """Return the stages that a rank of the pipeline holds, in order."""
    each = num_stages // size
    single = issubclass(schedule, PipelineScheduleSingle)
    wrong = (
        num_stages % size
        or (single and each != 1)
        or (schedule in V_SCHEDULES and each != 2)
        or (not single and each < 2)
    )
    if wrong:
        needed = "1 stage" if single else "2 stages" if schedule in V_SCHEDULES else "2 or more stages"
        raise ValueError(
            f"Expected {needed} on each rank for the schedule {schedule.__name__}. Received: {num_stages} stages on {size} ranks of the "
            "pipeline. Change parallel.module_fqns_per_model_part, whose length is the number of stages, or parallel.pipeline_schedule."
        )
    return [rank, 2 * size - 1 - rank] if schedule in V_SCHEDULES else list(range(rank, num_stages, size))


def check_resharding(axes: Axes, reshard_after_forward: bool | int | None) -> None:
    """Refuse to gather sharded parameters again for each micro-batch of a pipeline.

    Replicas with other numbers of micro-batches would wait for ever, and zero-bubble schedules give wrong gradients.
    """
    if reshard_after_forward and axes.degree("pipeline") > 1 and axes.degree("shard") > 1:
        raise ValueError(
            f"Expected fsdp.reshard_after_forward to be false or unset in a pipeline, where each micro-batch would gather all "
            f"parameters again. Received: fsdp.reshard_after_forward={reshard_after_forward!r}, {axes.describe()}. Unset it."
        )


@dataclass(frozen=True)
class StagePlan:
    """Which stages of the model a rank holds; without a pipeline there is one, and every rank holds it.

    Attributes:
        schedule: Schedule class of `torch.distributed.pipelining`.
        number: Stages of the whole model.
        indices: Stages of this rank, in order.
    """

    schedule: Any
    number: int = 1
    indices: tuple[int, ...] = (0,)

    @classmethod
    def of(cls, axes: Axes, *, rank: int, schedule: str, listed: int | None = None) -> StagePlan:
        """Return the plan of a rank, from the degrees and the configuration alone."""
        kind, size = resolve_schedule(schedule), axes.degree("pipeline")
        if size == 1:
            if listed:
                raise ValueError(
                    f"Expected parallel.axes.pipeline > 1 with parallel.module_fqns_per_model_part. Received: {axes.describe()}. Set the "
                    "axis, or leave the list out."
                )
            return cls(kind)
        each = 1 if schedule.lower().removeprefix("schedule") in _SINGLE_STAGE else 2
        number = listed or each * size
        place = axes.index("pipeline", rank=rank)
        return cls(kind, number, tuple(stages_of_rank(kind, rank=place, size=size, num_stages=number)))

    @property
    def has_first(self) -> bool:
        """Whether the model's input comes in on this rank."""
        return 0 in self.indices

    @property
    def has_last(self) -> bool:
        """Whether the model's output comes out on this rank."""
        return self.number - 1 in self.indices

    @property
    def reads_data(self) -> bool:
        """Whether this rank reads batches: the input is needed on the first stage, the target on the last."""
        return self.has_first or self.has_last

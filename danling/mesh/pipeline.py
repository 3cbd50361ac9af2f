"""A pipeline: which stages a rank holds, and the schedules that run them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)
from torch.utils import _pytree as pytree

from danling.data import mix_seed, seed_streams

from .axes import Axes
from .model_parts import copied_buffers

if TYPE_CHECKING:
    from danling.runners.parallel_runner import ParallelRunner
    from danling.training.keys import RandomKeys

V_SCHEDULES = (ScheduleZBVZeroBubble, ScheduleDualPipeV)
"""Schedules whose ranks hold a stage from the front and one from the back."""

_NAMES = (
    "1F1B",
    "DualPipeV",
    "GPipe",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "LoopedBFS",
    "ZBVZeroBubble",
)


def stages_of_rank(schedule: Any, *, rank: int, size: int, num_stages: int) -> list[int]:
    """Return the stages that a rank of the pipeline holds, in order."""
    each, left = divmod(num_stages, size)
    is_v = schedule in V_SCHEDULES
    least, most, needed = 2, num_stages, "2 or more stages"
    if issubclass(schedule, PipelineScheduleSingle):
        least, most, needed = 1, 1, "1 stage"
    elif is_v:
        most, needed = 2, "2 stages"
    if left or not least <= each <= most:
        raise ValueError(
            f"Expected {needed} on each rank for the schedule {schedule.__name__}. Received: {num_stages} stages on {size} ranks of the "
            "pipeline. Change parallel.module_fqns_per_model_part, whose length is the number of stages, or parallel.pipeline_schedule."
        )
    return [rank, 2 * size - 1 - rank] if is_v else list(range(rank, num_stages, size))


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
    def of(cls, axes: Axes, *, rank: int, schedule: str, listed: int = 0) -> StagePlan:
        """Return the plan of a rank, from the degrees and the configuration alone."""
        short = schedule.lower().removeprefix("schedule")
        if short not in map(str.lower, _NAMES):
            raise ValueError(
                f"Expected a pipeline schedule out of {list(_NAMES)}. Received: parallel.pipeline_schedule={schedule!r}."
            )
        kind = get_schedule_class(short)
        size = axes.degree("pipeline")
        if size == 1:
            if listed:
                raise ValueError(
                    f"Expected parallel.axes.pipeline > 1 with parallel.module_fqns_per_model_part. Received: {axes.describe()}. Set the "
                    "axis, or leave the list out."
                )
            return cls(kind)
        number = listed or (1 if issubclass(kind, PipelineScheduleSingle) else 2) * size
        place = axes.index("pipeline", rank=rank)
        return cls(
            kind, number, tuple(stages_of_rank(kind, rank=place, size=size, num_stages=number))
        )

    @property
    def has_first(self) -> bool:
        """Whether the model's input comes in on this rank."""
        return 0 in self.indices

    @property
    def has_last(self) -> bool:
        """Whether the model's output comes out on this rank."""
        return self.number - 1 in self.indices


_KEPT_SCHEDULES = 16
"""A schedule holds receive buffers, so batches of ever new lengths must not add up."""

_ANY_NUMBER = (ScheduleGPipe, ScheduleLoopedBFS)

_REFUSED = -1
"""The number of samples that the rank with the first stage sends if it cannot take the input."""

LossFunction = Callable[[Tensor, int], Tensor]
"""Takes the output of a micro-batch and its place in the batch; returns the tensor to back-propagate."""


@dataclass(frozen=True)
class Cut:
    """How a batch is cut into micro-batches.

    Attributes:
        size: Samples of a micro-batch.
        real: Micro-batches with samples of the batch.
        number: Micro-batches that run; those beyond `real` repeat the first, weigh nothing and leave buffers alone.
    """

    size: int
    real: int
    number: int


class _Stage(PipelineStage):
    pipeline: Pipeline

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        # The order of the chunks is that of the schedule, which must not change what they draw.
        seed_streams(
            mix_seed(mix_seed(self.pipeline.key, self.stage_index), fwd_chunk_id), self.device
        )
        is_real = fwd_chunk_id < self.pipeline.cut.real
        with nullcontext() if is_real else copied_buffers(self.submod):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    # Stages of one rank hand on gradients to each other even in a forward without any, where there is nothing to hand on.
    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


class Pipeline:
    """The stages of this rank, and the schedule that runs them.

    The shapes between stages are found by one forward for each new shape of input, which leaves buffers and gradients alone. A schedule
    and its stages are made for each shape and cut, and apart for training and evaluation, since a schedule keeps what belongs to one
    shape and one mode.
    """

    def __init__(
        self, runner: ParallelRunner, keys: RandomKeys, parts: Sequence[nn.Module], schedule: Any
    ) -> None:
        settings = runner.config.parallel
        self.plan = plan = runner.stage_plan
        self.parts = list(parts)
        self.schedule = schedule
        self.domain = runner.pipeline_domain
        self.device = runner.device
        self.microbatch_size = int(settings.pipeline_microbatch_size)
        self.n_microbatches = settings.pipeline_n_microbatches
        self._keys = keys
        size = self.domain.size
        self.rank_of_stage = {
            stage: rank
            for rank in range(size)
            for stage in stages_of_rank(schedule, rank=rank, size=size, num_stages=plan.number)
        }
        self.last_rank = self.rank_of_stage[plan.number - 1]
        """Place in the pipeline of the rank with the last stage."""
        self.has_blind_ranks = size > len({self.rank_of_stage[0], self.last_rank})
        """Whether some rank of the pipeline has neither the first nor the last stage, and so reads no data."""
        self._signatures: list[Any] = []
        self._shapes: dict[int, list[tuple[Any, Any]]] = {}
        self._schedules: dict[tuple[int, Cut, bool], Any] = {}
        self._loss: LossFunction | None = None

    # One batch

    def cut_of(self, samples: int) -> Cut:
        """Return how a batch is cut; one that does not divide gets smaller micro-batches, or some that weigh nothing."""
        size = self.microbatch_size
        if self.n_microbatches is not None:
            size = max(samples // self.n_microbatches, 1)
        # Micro-batches have one size, also those of a shorter last batch.
        size = math.gcd(samples, size)
        real = samples // size
        if self.schedule in _ANY_NUMBER:
            return Cut(size, real, real)
        # The other schedules need a micro-batch for each stage.
        least = max(real, self.plan.number)
        # Interleaved schedules run in rounds of as many micro-batches as there are ranks.
        if issubclass(self.schedule, PipelineScheduleMulti) and self.schedule not in V_SCHEDULES:
            least = -(-least // self.domain.size) * self.domain.size
        return Cut(size, real, least)

    def open(self, inputs: object) -> Cut:
        """Agree on the shape of the next batch and how it is cut. Call on all ranks of the pipeline."""
        wrong = _wrong_inputs(inputs) if self.plan.has_first else None
        args = _as_args(inputs) if self.plan.has_first and wrong is None else ()
        signature = None
        samples = _REFUSED
        if args:
            signature, samples = (
                tuple((tuple(arg.shape[1:]), arg.dtype) for arg in args),
                args[0].shape[0],
            )
        known = self._signatures.index(signature) if signature in self._signatures else -1
        # Three numbers a batch. The shapes follow only where they are new.
        header = self.domain.broadcast(
            torch.tensor([samples, known, self._keys.key]), source=self.rank_of_stage[0]
        ).tolist()
        samples, self._known, self.key = (int(value) for value in header)
        if samples == _REFUSED:
            text = self.domain.broadcast_object(wrong, source=self.rank_of_stage[0])
            # The rank with the first stage has the error and its traceback, the others its text.
            raise inputs if isinstance(inputs, Exception) else ValueError(text)
        cut = self.cut_of(samples)
        if self._known < 0:
            self._signatures.append(
                self.domain.broadcast_object(signature, source=self.rank_of_stage[0])
            )
            self._known = len(self._signatures) - 1
        self._args, self.cut = args, cut
        return cut

    def chunks(self, values: object, cut: Cut) -> list[object]:
        """Return a nested value of tensors for each micro-batch with samples."""
        # Trees know no other mapping than a plain one, such as the batch of a tokenizer.
        leaves, spec = pytree.tree_flatten(dict(values) if isinstance(values, Mapping) else values)
        size = cut.size
        parts = [
            [
                leaf[i * size : (i + 1) * size] if isinstance(leaf, Tensor) and leaf.ndim else leaf
                for leaf in leaves
            ]
            for i in range(cut.real)
        ]
        return [pytree.tree_unflatten(part, spec) for part in parts]

    def seed_step(self, place: int, *, opened: bool) -> None:
        """Seed for a step of the runner, alike on the first stage, which runs it before the batch is open, and on the last one."""
        key = self.key if opened else self._keys.key
        seed_streams(mix_seed(mix_seed(key, self.plan.number + 1), place), self.device)

    def train(self, loss: LossFunction) -> Any:
        """Run forward and backward of the open batch. Call on all ranks of the pipeline."""
        schedule = self._prepared(train=True)
        self._loss = loss
        try:
            return self._run(schedule.step)
        finally:
            self._loss = None

    def evaluate(self) -> Any:
        """Run the forward of the open batch. Call on all ranks of the pipeline, without gradients."""
        return self._run(self._prepared(train=False).eval)

    def _run(self, step: Callable[..., Any]) -> Any:
        cut, args = self.cut, self._args
        missing = (cut.number - cut.real) * cut.size
        if missing and args:
            args = tuple(
                torch.cat([arg, *([arg[: cut.size]] * (cut.number - cut.real))]) for arg in args
            )
        options: dict[str, Any] = {}
        if self.plan.has_last:
            # The place of each micro-batch goes in as its target, so that targets and weights of any shape can be looked up.
            options = {"target": torch.arange(cut.number), "losses": []}
        output = step(*args, **options)
        # What follows draws the same in whichever order the chunks ran.
        seed_streams(mix_seed(self.key, self.plan.number), self.device)
        if output is None or not missing:
            return output
        return pytree.tree_map(
            lambda value: value[:-missing] if isinstance(value, Tensor) else value, output
        )

    def _call_loss(self, output: Tensor, place: Tensor) -> Tensor:
        # An evaluation asks for a loss that nothing reads.
        return torch.zeros(()) if self._loss is None else self._loss(output, int(place))

    # Schedules

    def _prepared(self, *, train: bool) -> Any:
        key = (self._known, self.cut, train)
        # In the order of use, which is the same on all ranks, so that all forget the same one.
        schedule = self._schedules.pop(key, None) or self._build(train)
        self._schedules[key] = schedule
        if len(self._schedules) > _KEPT_SCHEDULES:
            del self._schedules[next(iter(self._schedules))]
        return schedule

    def _build(self, train: bool) -> Any:
        if self._known not in self._shapes:
            self._shapes[self._known] = self._find_shapes()
        stages = [
            self._build_stage(part, index, inputs, outputs, train)
            for part, index, (inputs, outputs) in zip(
                self.parts, self.plan.indices, self._shapes[self._known]
            )
        ]
        single = issubclass(self.schedule, PipelineScheduleSingle)
        # Gradients are scaled by the window, once an update.
        return self.schedule(
            stages[0] if single else stages,
            self.cut.number,
            loss_fn=self._call_loss,
            scale_grads=False,
        )

    def _build_stage(
        self, part: nn.Module, index: int, inputs: object, outputs: object, train: bool
    ) -> PipelineStage:
        def example(shapes: Any) -> tuple[Tensor, ...]:
            return tuple(
                # A gradient goes back only in a training, and only through floating values.
                torch.empty(
                    (self.cut.size, *shape),
                    dtype=dtype,
                    device="meta",
                    requires_grad=train and grad,
                )
                for shape, dtype, grad in shapes
            )

        stage = _Stage(
            part,
            index,
            self.plan.number,
            self.device,
            # With these, torch does not run the part to find the shapes.
            input_args=example(inputs),
            output_args=example(outputs),
            group=self.domain.group,
        )
        stage.pipeline = self
        return stage

    def _find_shapes(self) -> list[tuple[Any, Any]]:
        """Return the shapes of input and output of each stage of this rank, less the samples. Call on all ranks of the pipeline."""
        found: dict[int, tuple[Any, Any]] = {}
        shapes: Any = tuple((*entry, False) for entry in self._signatures[self._known])
        for stage in range(self.plan.number):
            failure: Exception | None = None
            answer: Any = None
            if stage in self.plan.indices:
                try:
                    answer = self._shapes_after(
                        self.parts[self.plan.indices.index(stage)], stage, shapes
                    )
                    found[stage] = (shapes, answer)
                except Exception as error:
                    # The other ranks wait for this stage's answer, and learn why there is none.
                    failure, answer = error, f"{type(error).__name__}: {error}"
            shapes = self.domain.broadcast_object(answer, source=self.rank_of_stage[stage])
            if failure is not None:
                raise failure
            if isinstance(shapes, str):
                raise ValueError(
                    f"Expected stage {stage} of {self.plan.number}, on rank {self.rank_of_stage[stage]} of the pipeline, to run "
                    f"forward. Received: {shapes}"
                )
        return [found[index] for index in self.plan.indices]

    def _shapes_after(self, part: nn.Module, stage: int, shapes: Any) -> Any:
        if stage == 0:
            args = tuple(arg[: self.cut.size] for arg in self._args)
        else:
            args = tuple(
                # Any values will do: only the shapes and dtypes of the outputs are kept.
                torch.zeros((self.cut.size, *shape), dtype=dtype, device=self.device)
                for shape, dtype, _ in shapes
            )
        with torch.no_grad(), copied_buffers(part):
            outputs = part(*args)
        found = outputs if isinstance(outputs, tuple) else (outputs,)
        for output in found:
            if (
                not isinstance(output, Tensor)
                or not output.ndim
                or output.shape[0] != self.cut.size
            ):
                received = (
                    f"shape {tuple(output.shape)}"
                    if isinstance(output, Tensor)
                    else type(output).__name__
                )
                raise ValueError(
                    f"Expected stage {stage} of {self.plan.number} to return tensors with samples in dimension "
                    f"0, {self.cut.size} here. Received: {received}. Cut the model where tensors pass."
                )
        return tuple((tuple(o.shape[1:]), o.dtype, o.is_floating_point()) for o in found)


def _wrong_inputs(inputs: object) -> str | None:
    """Return the defect of a pipeline's input, or `None`."""
    if isinstance(inputs, Exception):
        return f"Expected the first stage to find the input of the batch. Received: {type(inputs).__name__}: {inputs}"
    args = _as_args(inputs)
    if args and all(isinstance(arg, Tensor) and arg.ndim for arg in args):
        return None
    return (
        "Expected the input of a pipeline to be a tensor, or a tuple of tensors, with samples in dimension 0, for stage 0. Received: "
        f"{type(inputs).__name__}. Keyword arguments would be needed on every stage, and stages in the middle read no data: pass "
        "tensors by position, and on from stage to stage what a later one needs."
    )


def _as_args(inputs: object) -> tuple[Any, ...]:
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)

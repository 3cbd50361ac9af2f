"""Bytes that training keeps on one rank for parameters, gradients, optimizer and EMA, from shapes or from counts.

Sources. What is divided by stage: ZeRO, arXiv:1910.02054, section 5 (stage 1 optimizer states, 2 gradients too, 3 parameters too);
mixed precision with a float32 master copy: the same, section 3.1. How a tensor is divided: `fully_shard` splits the first
dimension as `torch.chunk` does and pads it, so that each rank holds ceil(n / degree) rows
(https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html). Tensors that an optimizer keeps for a parameter: its page
in https://docs.pytorch.org/docs/stable/optim.html.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from danling.mesh.axes import Axes, axes_with
from danling.utils.suggest import did_you_mean

DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}

OPTIMIZER_STATES: Mapping[str, tuple[int, int]] = {
    "adamw": (2, 1),
    "adam": (2, 1),
    "adamw-amsgrad": (3, 1),
    "adamax": (2, 1),
    "nadam": (2, 2),
    "radam": (2, 1),
    "adagrad": (1, 1),
    "adadelta": (2, 1),
    "rmsprop": (1, 1),
    "rmsprop-momentum": (2, 1),
    "sgd-momentum": (1, 0),
    "sgd": (0, 0),
    "none": (0, 0),
}
"""By optimizer: tensors of the parameter's size, and float32 scalars (`step`), that it keeps for each parameter."""

SCALAR_BYTES = 4


class Layout:
    """How state is divided over ranks.

    Attributes:
        axes: The degree of each parallel axis; what an axis divides, `danling.mesh.axes.TRAITS` says.
        stage: What is divided over `shard`: 0 nothing (DDP), 1 optimizer and master weights, 2 gradients too, 3 parameters and
            EMA too (FSDP2).

    Args:
        stage: See above.
        **degrees: Degree by axis, integers >= 1; an axis that is left out has degree 1.

    Raises:
        ValueError: If a degree is below 1, an axis is unknown, or there is no such stage.
    """

    def __init__(self, *, stage: int = 3, **degrees: int) -> None:
        if stage not in range(4):
            raise ValueError(f"Expected stage to be 0, 1, 2 or 3. Received: stage={stage!r}.")
        for name, degree in degrees.items():
            if degree < 1:
                raise ValueError(f"Expected {name} to be an integer >= 1. Received: {name}={degree!r}.")
        self.axes = Axes.resolve(degrees, world_size=math.prod(degrees.values()))
        self.stage = stage

    def degrees(self) -> dict[str, int]:
        """Return the degree of each axis, in the order of the configuration."""
        return dict(self.axes.degrees)


@dataclass(frozen=True)
class Precision:
    """Which dtypes state is kept in.

    Attributes:
        parameters: Of the weights that the model computes with. Autocast leaves them in float32.
        gradients: Of the gradients; `None` takes that of the weights, as autograd does.
        master: Whether the optimizer keeps a float32 copy of 16-bit weights, as DeepSpeed does.
        states: Of the optimizer's tensors; `None` takes float32 with a master copy, else that of the weights.
    """

    parameters: str = "fp32"
    gradients: str | None = None
    master: bool = False
    states: str | None = None

    def bytes_of(self, part: str) -> int:
        """Return the bytes of an element of `parameters`, `gradients`, `states` or `master`."""
        if part == "master":
            return DTYPE_BYTES["fp32"] if self.master and self.parameters != "fp32" else 0
        if part == "states":
            return DTYPE_BYTES[self.states or ("fp32" if self.master else self.parameters)]
        return DTYPE_BYTES[(self.gradients if part == "gradients" else None) or self.parameters]


@dataclass(frozen=True)
class Model:
    """What is known of a model.

    Attributes:
        dense: Parameters outside the experts.
        experts: Parameters of the experts.
        shapes: Shape of every parameter by name; with them a division into uneven parts is exact for `shard`. `dense` and
            `experts` are then their sums.
    """

    dense: float
    experts: float = 0
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, Sequence[int]]) -> Model:
        """Return a model without experts of the given shapes."""
        return cls(dense=sum(math.prod(shape) for shape in shapes.values()), shapes=dict(shapes))


def bytes_per_rank(
    model: Model, layout: Layout, *, optimizer: str = "adamw", precision: Precision | None = None, ema: bool = False
) -> dict[str, int]:
    """Return the bytes on the fullest rank by part: `parameters`, `gradients`, `optimizer`, `master`, `ema`, `total`.

    What a forward pass needs (activations, buffers, parameters gathered for a moment, caches of the allocator, the
    communicators) is not counted: it depends on batch and code, not on the layout alone.

    Args:
        model: Counts or shapes of parameters.
        layout: Degrees and stage.
        optimizer: A key of `OPTIMIZER_STATES`.
        precision: Dtypes; float32 by default.
        ema: Whether averaged weights are kept.

    Raises:
        ValueError: If the optimizer is unknown.
    """
    if optimizer not in OPTIMIZER_STATES:
        known = ", ".join(OPTIMIZER_STATES)
        raise ValueError(
            f"Expected an optimizer out of: {known}. Received: {optimizer!r}.{did_you_mean(optimizer, OPTIMIZER_STATES)}"
        )
    precision = precision or Precision()
    whole, divided = elements(model, layout, sharded=False), elements(model, layout, sharded=True)
    tensors, scalars = OPTIMIZER_STATES[optimizer]
    kept = divided if layout.stage >= 1 else whole
    weights = divided if layout.stage == 3 else whole
    parts = {
        "parameters": weights * precision.bytes_of("parameters"),
        "gradients": (divided if layout.stage >= 2 else whole) * precision.bytes_of("gradients"),
        "optimizer": kept * tensors * precision.bytes_of("states") + scalars * SCALAR_BYTES * len(model.shapes),
        "master": kept * precision.bytes_of("master"),
        "ema": weights * precision.bytes_of("parameters") if ema else 0,
    }
    rounded = {name: math.ceil(value) for name, value in parts.items()}
    return {**rounded, "total": sum(rounded.values())}


def elements(model: Model, layout: Layout, *, sharded: bool) -> float:
    """Return the parameters on the fullest rank, with or without the division over `shard`.

    Args:
        model: Counts or shapes.
        layout: Degrees. All axes but `shard` divide evenly here, which parts that are replicated over them (norms, embeddings on
            one stage) exceed.
        sharded: Whether `shard` divides too.
    """
    axes = layout.axes
    degree = axes.degree("shard") if sharded else 1
    dense: float = model.dense / degree
    if model.shapes:
        dense = sum(_rows(shape, degree) for shape in model.shapes.values())
    # What is divided over `shard` depends on the stage, and was counted above.
    over_dense = [name for name in axes_with(divides_dense=True) if name != "shard"]
    over_experts = [name for name in axes_with(divides_experts=True) if name != "shard"]
    return dense / axes.degree(*over_dense) + model.experts / degree / axes.degree(*over_experts)


def _rows(shape: Sequence[int], degree: int) -> int:
    if not shape:
        return 1
    return math.ceil(shape[0] / degree) * math.prod(shape[1:])

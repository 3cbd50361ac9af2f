"""Estimate the memory that each rank needs for weights, gradients, optimizer and EMA in a layout.

The model is given by its number of parameters, or by a checkpoint, whose shapes make uneven shards exact. Activations and what a
forward pass gathers for a moment come on top: they depend on the batch.

Example: danling estimate --params 7e9 --shard 8 --precision bf16 --master --ema
"""

# Sources. Tensors that a stage divides: ZeRO, arXiv:1910.02054, section 5; mixed precision with a float32 master copy: section 3.1. How a
# tensor is divided: `fully_shard` splits the first dimension as `torch.chunk` does and pads it, so that each rank has ceil(n / degree)
# rows. Tensors that an optimizer keeps for a parameter: its page in https://docs.pytorch.org/docs/stable/optim.html.

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from danling.mesh.axes import AXES, axes_with

from .output import OK, add_json, as_bytes, at_least, print_json, print_table, with_unit

_SCALES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    parser.add_argument("checkpoint", nargs="?", help="take the shapes of its model")
    parser.add_argument("--params", type=count, help="parameters outside experts: 7e9, 7B, 350M")
    parser.add_argument(
        "--expert-params", type=count, default=0.0, help="parameters of all experts together"
    )
    for axis in AXES:
        name = axis.replace("_", "-")
        parser.add_argument(
            f"--{name}", type=at_least(1), default=1, metavar="N", help=f"degree of the {axis} axis"
        )
    parser.add_argument(
        "--stage",
        type=int,
        choices=range(4),
        default=3,
        help="ZeRO stage, which decides what shard divides: 0 nothing (DDP), 1 optimizer, 2 gradients too, 3 parameters too (FSDP)",
    )
    parser.add_argument(
        "--optimizer", choices=OPTIMIZER_STATES, default="adamw", help="what keeps state"
    )
    parser.add_argument(
        "--precision",
        choices=tuple(DTYPE_BYTES),
        default="fp32",
        help="dtype of the weights; autocast keeps fp32",
    )
    parser.add_argument(
        "--grad-precision",
        choices=tuple(DTYPE_BYTES),
        help="dtype of the gradients (default: of the weights)",
    )
    parser.add_argument(
        "--master",
        action="store_true",
        help="the optimizer keeps fp32 weights and states, as DeepSpeed does",
    )
    parser.add_argument("--ema", action="store_true", help="an EMA of the weights is kept")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Print the bytes of each part."""
    if (options.checkpoint is None) == (options.params is None):
        received = f"checkpoint={options.checkpoint!r}, params={options.params!r}"
        raise ValueError(
            f"Expected a checkpoint or --params, one of the two. Received: {received}."
        )
    if options.checkpoint is not None and options.expert_params:
        raise ValueError(
            "Expected --expert-params with --params. Received: a checkpoint, whose shapes do not say what an expert is."
        )
    if options.checkpoint is None:
        model = Model(options.params, options.expert_params)
    else:
        model = Model.from_shapes(model_shapes(options.checkpoint))
    degrees = {axis: getattr(options, axis) for axis in AXES}
    names = ("stage", "optimizer", "precision", "grad_precision", "master", "ema")
    parts = bytes_per_rank(model, degrees, **{name: getattr(options, name) for name in names})
    ranks = math.prod(degrees.values())
    parameters = model.dense + model.experts
    if options.json:
        facts = {"layout": {**degrees, "stage": options.stage}, "world_size": ranks}
        print_json({**facts, "parameters": parameters, "bytes_per_rank": parts})
        return OK
    active = ", ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
    axes = active or "no axis above 1"
    print(f"{parameters:.4g} parameters on {ranks} ranks ({axes}), ZeRO stage {options.stage}\n")
    rows = [(name, as_bytes(size)) for name, size in parts.items() if size or name == "total"]
    print_table(("on each rank", "memory"), rows)
    print("\nActivations, buffers, parameters gathered for a moment and communicators come on top.")
    return OK


def count(text: str) -> float:
    """Return the number that `7e9`, `7B` or `350M` mean."""
    return with_unit(text, _SCALES, "a number of parameters such as 7e9 or 350M")


def model_shapes(source: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights in a checkpoint or file of weights; nothing is loaded.

    Of a checkpoint with an optimizer, only what it updates counts as a parameter, so that buffers do not.
    """
    from .inspect import read_contents

    contents = read_contents(source)
    own = contents.kind in ("file", "sharded")
    shapes = {
        e.name.removeprefix("model.") if own else e.name: e.shape
        for e in contents.entries
        if not own or e.name.startswith("model.")
    }
    trained = {
        name
        for name in shapes
        if any(e.name.startswith(f"optimizer.state.{name}.") for e in contents.entries)
    }
    if not shapes:
        raise ValueError(
            f"Expected a checkpoint with a model. Received: {source!r} with {sorted(contents.sections())}."
        )
    return {name: shape for name, shape in shapes.items() if not trained or name in trained}


@dataclass(frozen=True)
class Model:
    """The sizes of a model: parameters outside the experts, those of the experts, and the shape of every parameter by name.

    With shapes a division into uneven parts is exact for `shard`.
    """

    dense: float
    experts: float = 0
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, Sequence[int]]) -> Model:
        """Return a model without experts of the given shapes."""
        return cls(dense=sum(math.prod(shape) for shape in shapes.values()), shapes=dict(shapes))


def bytes_per_rank(
    model: Model,
    degrees: Mapping[str, int],
    *,
    stage: int = 3,
    optimizer: str = "adamw",
    precision: str = "fp32",
    grad_precision: str | None = None,
    master: bool = False,
    ema: bool = False,
) -> dict[str, int]:
    """Return the bytes on the fullest rank by part: `parameters`, `gradients`, `optimizer`, `master`, `ema`, `total`.

    What a forward pass needs (activations, buffers, parameters gathered for a moment, caches of the allocator, the
    communicators) is not counted: it depends on batch and code, not on the layout alone.
    """
    # What a stage of ZeRO leaves whole is still divided by all axes but `shard`.
    whole, divided = elements(model, {**degrees, "shard": 1}), elements(model, degrees)
    tensors, scalars = OPTIMIZER_STATES[optimizer]
    kept = divided if stage >= 1 else whole
    gradients = divided if stage >= 2 else whole
    weights = divided if stage == 3 else whole
    kept_bytes = DTYPE_BYTES["fp32" if master else precision]
    has_master = master and precision != "fp32"
    averages = weights * max(DTYPE_BYTES[precision], DTYPE_BYTES["fp32"])  # in float32 at least
    parts = {
        "parameters": weights * DTYPE_BYTES[precision],
        "gradients": gradients * DTYPE_BYTES[grad_precision or precision],
        "optimizer": kept * tensors * kept_bytes + scalars * SCALAR_BYTES * len(model.shapes),
        "master": kept * DTYPE_BYTES["fp32"] if has_master else 0,
        "ema": averages if ema else 0,
    }
    rounded = {name: math.ceil(value) for name, value in parts.items()}
    return {**rounded, "total": sum(rounded.values())}


def elements(model: Model, degrees: Mapping[str, int]) -> float:
    """Return the parameters on the fullest rank."""
    shard = degrees.get("shard", 1)
    # Of shapes, `shard` divides the rows.
    dense = model.dense / shard
    if model.shapes:
        dense = sum(
            # A scalar has no rows to divide: each rank has it.
            math.ceil(shape[0] / shard) * math.prod(shape[1:]) if shape else 1
            for shape in model.shapes.values()
        )
    others = [axis for axis in axes_with(divides_dense=True) if axis != "shard"]
    dense /= math.prod(degrees.get(axis, 1) for axis in others)
    return dense + model.experts / math.prod(
        degrees.get(axis, 1) for axis in axes_with(divides_experts=True)
    )

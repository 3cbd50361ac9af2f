"""Estimate the memory that each rank needs for weights, gradients, optimizer and EMA in a layout.

The model is given by its number of parameters, or by a checkpoint, whose shapes make uneven shards exact. Activations and what a
forward pass gathers for a moment come on top: they depend on the batch.

Example: danling estimate --params 7e9 --shard 8 --precision bf16 --master --ema
"""

from __future__ import annotations

import argparse
import math
import re
from typing import Any

from danling.mesh import AXES

from .memory import DTYPE_BYTES, OPTIMIZER_STATES, Layout, Model, Precision, bytes_per_rank
from .output import OK, add_json, as_bytes, print_json, print_table

_SCALES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    parser.add_argument("checkpoint", nargs="?", help="take the shapes of its model")
    parser.add_argument("--params", type=count, help="parameters outside experts: 7e9, 7B, 350M")
    parser.add_argument("--expert-params", type=count, default=0.0, help="parameters of all experts together")
    for axis in AXES:
        parser.add_argument(
            f"--{axis.replace('_', '-')}", type=int, default=1, metavar="N", help=f"degree of the {axis} axis"
        )
    parser.add_argument(
        "--stage",
        type=int,
        default=3,
        help="ZeRO stage, what is divided over shard: 0 nothing (DDP), 1 optimizer, 2 gradients too, 3 parameters too (FSDP)",
    )
    parser.add_argument("--optimizer", default="adamw", help=", ".join(OPTIMIZER_STATES))
    parser.add_argument(
        "--precision", choices=tuple(DTYPE_BYTES), default="fp32", help="dtype of the weights; autocast keeps fp32"
    )
    parser.add_argument(
        "--grad-precision", choices=tuple(DTYPE_BYTES), help="dtype of the gradients (default: of the weights)"
    )
    parser.add_argument(
        "--master", action="store_true", help="the optimizer keeps fp32 weights and states, as DeepSpeed does"
    )
    parser.add_argument("--ema", action="store_true", help="an EMA of the weights is kept")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Print the bytes of each part."""
    layout = Layout(stage=options.stage, **{axis: getattr(options, axis) for axis in AXES})
    model = _model(options)
    precision = Precision(options.precision, options.grad_precision, options.master)
    parts = bytes_per_rank(model, layout, optimizer=options.optimizer, precision=precision, ema=options.ema)
    if options.json:
        facts: dict[str, Any] = {
            "layout": {**layout.degrees(), "stage": layout.stage},
            "world_size": layout.axes.world_size,
        }
        print_json({**facts, "parameters": model.dense + model.experts, "bytes_per_rank": parts})
        return OK
    active = ", ".join(f"{name} {degree}" for name, degree in layout.degrees().items() if degree > 1)
    print(
        f"{model.dense + model.experts:.4g} parameters on {layout.axes.world_size} ranks ({active or 'no axis above 1'}), "
        f"ZeRO stage {layout.stage}\n"
    )
    print_table(
        ("on each rank", "memory"), [(name, as_bytes(size)) for name, size in parts.items() if size or name == "total"]
    )
    print("\nActivations, buffers, parameters gathered for a moment and communicators come on top.")
    return OK


def count(text: str) -> float:
    """Return the number that `7e9`, `7B` or `350M` mean.

    Raises:
        argparse.ArgumentTypeError: If it is no number above 0.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:E[+]?\d+)?)([KMBT]?)", text.strip().upper())
    value = float(match.group(1)) * _SCALES[match.group(2)] if match else 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"Expected a number of parameters such as 7e9 or 350M. Received: {text!r}.")
    return value


def _model(options: argparse.Namespace) -> Model:
    if (options.checkpoint is None) == (options.params is None):
        received = f"checkpoint={options.checkpoint!r}, params={options.params!r}"
        raise ValueError(f"Expected a checkpoint or --params, one of the two. Received: {received}.")
    if options.checkpoint is None:
        return Model(options.params, options.expert_params)
    if options.expert_params:
        raise ValueError(
            "Expected --expert-params with --params. Received: a checkpoint, whose shapes do not say what an expert is."
        )
    return Model.from_shapes(model_shapes(options.checkpoint))


def model_shapes(source: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights in a checkpoint or file of weights; nothing is loaded.

    Of a checkpoint with an optimizer, only what it updates counts as a parameter, so that buffers do not.

    Args:
        source: See `read_contents`.

    Raises:
        ValueError: If there are no weights in it.
    """
    from .contents import read_contents

    contents = read_contents(source)
    own = contents.kind in ("file", "sharded")
    shapes = {
        e.name.removeprefix("model.") if own else e.name: e.shape
        for e in contents.entries
        if not own or e.name.startswith("model.")
    }
    trained = {name for name in shapes if any(e.name.startswith(f"optimizer.state.{name}.") for e in contents.entries)}
    if not shapes:
        raise ValueError(
            f"Expected a checkpoint with a model. Received: {source!r} with {sorted(contents.sections())}."
        )
    return {name: shape for name, shape in shapes.items() if not trained or name in trained}

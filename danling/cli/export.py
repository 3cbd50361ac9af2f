"""Write the weights of a checkpoint for other programs: a plain torch file, or safetensors.

The ending of the output decides: .safetensors, a directory (no ending) with safetensors files and an index as the Hugging Face
libraries read them; .pth, .pt, .bin and .ckpt a state_dict for torch.load. Other endings are refused. The checkpoint is verified first.

Example: danling export experiments/digits/e3551df201ca5a2c model.safetensors --dtype bf16
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from danling.checkpoints.errors import CheckpointMismatch
from danling.checkpoints.file_store import FILE_SUMS, FileStore, has_sums
from danling.checkpoints.reading import locate
from danling.checkpoints.target_store import TARGETS, is_engine_target

from .inspect import read_contents
from .output import OK, add_json, as_bytes, print_json, with_unit
from .source import checkpoint_at

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}
_SUFFIXES = ("", ".safetensors", ".pth", ".pt", ".bin", ".ckpt")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
_UNITS |= {f"{unit}B": size for unit, size in _UNITS.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    parser.add_argument(
        "checkpoint", help="a checkpoint, or a directory with a latest one; or its URL"
    )
    parser.add_argument("output", type=Path, help="file or directory to write")
    parser.add_argument(
        "--format",
        choices=("hf",),
        help="hf: a directory that from_pretrained of transformers reads, with the configuration of the model",
    )
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="cast floating tensors")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--ema",
        nargs="?",
        const="instead",
        choices=("instead", "beside"),
        help='write the averaged weights, or with "beside" both; without it the averaged ones if there are any, which the run evaluated',
    )
    which.add_argument(
        "--trained",
        action="store_true",
        help="write the trained weights, also where there are averages",
    )
    parser.add_argument(
        "--max-shard-size",
        type=size_in_bytes,
        metavar="SIZE",
        help="of files in a directory, such as 5GB or 2GiB",
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="let DeepSpeed put the shares of its engine together: it unpickles them, which runs code in them",
    )
    parser.add_argument("--force", action="store_true", help="replace existing files")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Verify, read and write."""
    _check_output(options)
    is_described = options.format == "hf"
    files = ["metadata"] if is_described else []
    with checkpoint_at(options.checkpoint, files=files) as path:
        _check_place(options.output, path)
        found = read_weights(
            path,
            "trained" if options.trained else options.ema,
            own_dtype=options.dtype is None,
            trust=options.trust,
            complete=is_described,
        )
        written = _write(options, path, found)
    sizes = {str(file): file.stat().st_size for file in written}
    if options.json:
        print_json(
            {"files": sizes, "tensors": len(found.model), "step": found.step, "weights": found.kind}
        )
    else:
        for name, size in sizes.items():
            print(f"{name}: {as_bytes(size)}")
        if found.kind == "averaged":
            print(
                "danling: averaged weights, which the run evaluated; --trained writes the others",
                file=sys.stderr,
            )
    return OK


def _check_output(options: argparse.Namespace) -> None:
    """Refuse an output that is there already, or is not of the kind that the options write."""
    output = options.output
    if output.exists() and not options.force:
        raise ValueError(
            f"Expected an output that is not there yet. Received: {str(output)!r}. Use --force to replace it."
        )
    if output.suffix not in _SUFFIXES:
        raise ValueError(
            f"Expected an output that ends in {', '.join(_SUFFIXES[1:])}, or a directory without an ending. Received: "
            f"{str(output)!r}. Other formats are not written here; for ONNX there is torch.onnx.export."
        )
    if output.suffix and (options.max_shard_size is not None or options.format == "hf"):
        raise ValueError(
            f"Expected a directory as the output with --max-shard-size or --format hf. Received: {str(output)!r}, which is one file. "
            "Leave its ending out, or the option."
        )


def _check_place(output: Path, checkpoint: Path) -> None:
    """Refuse to write among a run's checkpoints: bare weights in place of one could not be resumed from, and verify as damaged."""
    # Without links: a pointer such as `latest`, or the run directory, may be one.
    source = Path(os.path.realpath(locate(checkpoint)[1])).parent
    directory = source.parent if source.name == TARGETS else source
    is_of_run = directory.name == "checkpoints" or (directory / TARGETS).is_dir()
    own = Path(os.path.realpath(output))
    if (
        own == directory
        or (is_of_run and directory in own.parents)
        # A file with checksums next to it is a checkpoint, wherever it is.
        or own.with_name(own.name + FILE_SUMS).exists()
    ):
        raise ValueError(
            f"Expected an output outside of the run's checkpoints. Received: {str(output)!r}. Choose another directory."
        )


def _write(options: argparse.Namespace, checkpoint: Path, found: FoundWeights) -> list[Path]:
    """Write the weights, and what describes the model where that is asked for; return the files."""
    # Only now, so that a wrong option is named at once.
    import torch

    from danling.checkpoints.exchange import (
        DESCRIPTION,
        export_weights,
        read_description,
        write_description,
    )

    dtype = getattr(torch, DTYPES[options.dtype]) if options.dtype else None
    described = {}
    if options.format == "hf":
        # The directory of the run that the checkpoint is in.
        path = Path(os.path.realpath(locate(checkpoint)[1]))
        run = next(
            (parent for parent in path.parents if (parent / "metadata").is_dir()), path.parent
        )
        described = read_description(run / "metadata" / DESCRIPTION, found.model, dtype)
    written = export_weights(
        options.output,
        found.model,
        ema=found.ema,
        dtype=dtype,
        max_shard_bytes=options.max_shard_size,
        metadata={} if found.step is None else {"step": str(found.step)},
    )
    if described:
        write_description(described, options.output)
    return [*written, *(options.output / name for name in described)]


class FoundWeights(NamedTuple):
    """The weights to write as the model, the averages to write as well, the step, and whether the model is `averaged` or `trained`."""

    model: dict[str, Any]
    ema: dict[str, Any] | None
    step: int | None
    kind: str


def read_weights(
    source: Path,
    which: str | None,
    *,
    own_dtype: bool = True,
    trust: bool = False,
    complete: bool = False,
) -> FoundWeights:
    """Return the weights of a verified checkpoint.

    Args:
        source: The checkpoint.
        which: `"instead"`, the averages; `"beside"`, the trained weights and the averages; `"trained"`; `None`, the averages if there
            are any.
        own_dtype: Return averages, which are kept in float32 at least, in the dtype of the trained weights.
        trust: As `--trust`.
        complete: Refuse a checkpoint without the frozen weights.
    """
    from danling.checkpoints.exchange import evaluated_weights
    from danling.checkpoints.reading import moment, read_payload

    store, found = locate(source)
    store.verify(found, "full")
    target = store.target(found)
    # A file that was copied without its manifest, which says the step otherwise.
    alone = isinstance(store, FileStore) and not has_sums(found)
    wanted = {"model": True, "ema": which != "trained", "state": alone, "frozen": complete}
    sections = [name for name, is_wanted in wanted.items() if is_wanted]
    payload = read_payload(target, sections=sections, trust=trust)
    model: Any = payload.get("model")
    averaged = evaluated_weights(model, payload.get("ema")) if isinstance(model, Mapping) else None
    if model is None or (which in ("instead", "beside") and averaged is None):
        lacks = "a model" if model is None else "averaged weights; leave --ema out"
        # The payload has only what was asked for.
        sections = sorted(payload if is_engine_target(target) else read_contents(found).sections())
        raise CheckpointMismatch(
            f"Expected a checkpoint with {lacks}. Received: {found} with {sections}."
        )
    odd = [
        (str(name)[:80], type(value).__name__)
        for name, value in model.items()
        if not isinstance(name, str) or not hasattr(value, "untyped_storage")
    ]
    if odd:
        raise CheckpointMismatch(
            f"Expected tensors by name as weights. Received: {found} with {odd[0][0]!r} of {odd[0][1]}."
        )
    if "frozen" in payload:
        raise CheckpointMismatch(
            f"Expected all weights of the model for --format hf, since from_pretrained initialises missing ones. Received: {found}, which "
            "checkpoint.trainable_only=true has left the frozen ones out of. Resume the run and call `runner.save_pretrained(directory)`."
        )
    if alone:
        print(
            f"danling: {found} has no checksums next to it: verified by those inside of it, {moment(payload)}",
            file=sys.stderr,
        )
    train = payload.get("state", {}).get("train", {})
    step = train.get("global_step") if alone else store.record(found).step
    if averaged is None:
        return FoundWeights(dict(model), None, step, "trained")
    if own_dtype:
        # Once for each tensor, so that tied ones stay tied.
        narrow = {
            (id(value), model[name].dtype): value.to(model[name].dtype)
            for name, value in averaged.items()
        }
        averaged = {name: narrow[id(value), model[name].dtype] for name, value in averaged.items()}
    if which == "beside":
        return FoundWeights(dict(model), averaged, step, "trained")
    return FoundWeights(averaged, None, step, "averaged")


def size_in_bytes(text: str) -> int:
    """Return the bytes that `5GB`, `2GiB` or `1000` mean."""
    return int(with_unit(text, _UNITS, "a size such as 5GB or 2GiB"))

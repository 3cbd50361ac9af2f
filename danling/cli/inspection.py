"""Show what is in a checkpoint without loading its tensors.

Checkpoints of this library (files and sharded ones), files of torch.save and safetensors are read. Use --tensors for a line
a tensor, --config for the settings it was made with.

Example: danling inspect experiments/digits/e3551df201ca5a2c --config
"""

from __future__ import annotations

import argparse
from typing import Any

from danling.checkpoints.outline import Outline
from danling.utils.messages import as_text
from danling.utils.plain import flatten

from .contents import read_contents
from .output import OK, add_json, as_bytes, print_json, print_table
from .source import checkpoint_at, shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    parser.add_argument(
        "checkpoint", help="a checkpoint, a directory with a latest one, or a file of weights; or its URL"
    )
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--config", action="store_true", help="print the settings it was made with")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Print the contents."""
    with checkpoint_at(options.checkpoint) as path:
        contents = read_contents(path)
    place = shown(contents.path, options.checkpoint)
    if options.json:
        print_json({**_as_json(contents, tensors=options.tensors, config=options.config), "path": place})
        return OK
    print(f"{as_text(place)} ({contents.kind})")
    for name, value in describe(contents).items():
        print(f"{name}: {as_text(value)}")
    print()
    rows = [
        (name, row["tensors"], row["elements"], as_bytes(row["bytes"]), _dtypes(row))
        for name, row in contents.sections().items()
    ]
    print_table(("section", "tensors", "elements", "size", "dtypes"), rows)
    if options.tensors:
        print()
        lines = [(e.name, e.dtype, list(e.shape), as_bytes(e.size), e.chunks) for e in contents.entries]
        print_table(("tensor", "dtype", "shape", "size", "pieces"), lines)
    if options.config:
        print()
        settings = contents.plain.get("runner", {}) if contents.is_own else {}
        for name, value in flatten(settings, keeps_empty=True).items():
            print(f"{as_text(name)}: {as_text(value)}")
    return OK


def describe(contents: Outline) -> dict[str, Any]:
    """Return what is known of a checkpoint in a few plain values; what is not known is left out."""
    state = contents.plain.get("state", {}) if contents.is_own else {}
    scores = state.get("scores") or {}
    facts = {
        "format_version": contents.plain.get("format_version") if contents.is_own else None,
        **(contents.record or {}),
        "world_size": state.get("elastic", {}).get("world_size"),
        "samples": state.get("train", {}).get("samples"),
        "best_score": scores.get("best_score"),
        "results": _last_result(state.get("results") or {}),
    }
    return {name: value for name, value in facts.items() if value is not None}


def _last_result(results: dict[str, Any]) -> str | None:
    if not results:
        return None
    try:
        index = max(results, key=int)
        figures = flatten(results[index], keeps_empty=True)
    except (ValueError, TypeError, AttributeError):
        return None
    return f"at {index}: " + ", ".join(
        f"{name.replace('.', '/', 1)} {as_text(value)}" for name, value in figures.items()
    )


def _dtypes(row: dict[str, Any]) -> str:
    return ", ".join(sorted(row["dtypes"]))


def _as_json(contents: Outline, *, tensors: bool, config: bool) -> dict[str, object]:
    facts: dict[str, Any] = {"path": str(contents.path), "kind": contents.kind, **describe(contents)}
    facts["sections"] = contents.sections()
    if tensors:
        facts["tensors"] = [vars(entry) for entry in contents.entries]
    if config:
        facts["config"] = contents.plain.get("runner", {})
    return facts

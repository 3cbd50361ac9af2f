"""What each layout communicates in one update: collectives and bytes of rank 0, counted and as predicted by theory.

python benchmarks/communication.py            # 2 to 8 processes on this machine, about a minute
python benchmarks/communication.py --json communication.json

A GPT of `DEPTH` blocks in float32, two micro-batches an update (in the pipeline each of them cut into four), gradients clipped. Small
collectives that decide the update are counted too: the vote and the norm are one all-reduce each. A small model, so that the counts
are what matters: they depend on its depth only.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import danling as dl

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

DEPTH, WIDTH, LENGTH, VOCABULARY, BATCH, ACCUMULATED, CHUNKS = 4, 64, 32, 64, 4, 2, 4

NAMES = {
    "_allgather_base_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "receive",
}

Counts = dict[str, int]


class CountCollectives(TorchDispatchMode):
    """Counts what is communicated, and the bytes that this rank hands in (receives, for receives and gathers)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            name = NAMES.get(func._schema.name.partition("::")[2])
            if name is not None:
                self.calls[name] += 1
                leaves = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
                self.bytes[name] += sum(leaf.numel() * leaf.element_size() for leaf in leaves[:1])
        return result


class CountedRunner(dl.Runner):
    """Counts the third update."""

    def __init__(self, config: Mapping[str, Any], model: Mapping[str, Any]) -> None:
        super().__init__(config)
        from models.gpt import GPT

        self.model = GPT(
            VOCABULARY, context=LENGTH, width=WIDTH, depth=DEPTH, heads=4, tied=False, **model
        )
        self.criterion = nn.CrossEntropyLoss()
        tokens = torch.randint(VOCABULARY, (256, LENGTH + 1))
        self.datasets = {"train": torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:])}
        self.counter = CountCollectives()
        self.counting = False

    def compute_loss(self, pred: Tensor, target: Tensor) -> Tensor:
        """Return the loss of all positions."""
        return super().compute_loss(pred.flatten(0, 1), target.flatten())

    def train_step(self, data: Any) -> Any:
        """Count from the beginning of the third update."""
        if self.state.train.global_step == 2 and not self.counting:
            self.counting = True
            self.counter.__enter__()
        return super().train_step(data)

    def step(self) -> Any:
        """Count to its end."""
        outcome = super().step()
        if self.counting:
            self.counting = False
            self.counter.__exit__(None, None, None)
        return outcome


def decide() -> Counts:
    """Return the vote and the norm."""
    return {"all-reduce": 2}


def plus(*parts: Counts, times: int = 1) -> Counts:
    """Return the sum of counts."""
    total: Counter[str] = Counter()
    for part in parts:
        total.update({name: count * times for name, count in part.items()})
    return dict(total)


def fsdp(replicated: bool = False) -> Counts:
    """Each block is gathered for the forward and again for the backward, the rest once; each of them is scattered once."""
    once = {"all-gather": 2 * DEPTH + 1, "reduce-scatter": DEPTH + 1}
    last = {"all-reduce": DEPTH + 1} if replicated else {}
    return plus(plus(once, times=ACCUMULATED), last, decide())


def tensor() -> Counts:
    """A block joins the sequence before attention and before the network, and divides it after each; backward the other way round.

    The embedding is summed over the vocabulary. The loss makes three all-reduces of one number a position, below the dispatcher,
    where they are not counted: the largest logit, the sum of exponentials and the logit of the target.
    """
    block = {"all-gather": 4, "reduce-scatter": 4}
    embedding, head = {"all-reduce": 1, "all-gather": 1}, {"all-gather": 1, "reduce-scatter": 1}
    # The norms and the positions see a stretch each, so their gradients are summed, together.
    return plus(
        plus(plus(block, times=DEPTH), embedding, head, times=ACCUMULATED),
        {"all-reduce": 1},
        decide(),
    )


def context() -> Counts:
    """Keys and values are gathered in each block, and their gradients scattered; the gradient is summed in one bucket."""
    block = {"all-gather": 2, "reduce-scatter": 2}
    return plus(plus(block, times=DEPTH * ACCUMULATED), {"all-reduce": 1}, decide())


def expert() -> Counts:
    """The answers of the experts are summed, and so are the gradients of tokens and of their weights."""
    return plus({"all-reduce": 3 * DEPTH * ACCUMULATED}, decide())


def pipeline() -> Counts:
    """Each micro-batch goes on once and its gradient comes back once; the first stage says how each batch is cut."""
    return plus({"send": CHUNKS, "receive": CHUNKS, "broadcast": 1}, times=ACCUMULATED) | decide()


LAYOUTS: dict[str, tuple[dict[str, int], dict[str, int], Callable[[], Counts]]] = {
    "replicate 2": ({"replicate": 2}, {}, lambda: plus({"all-reduce": 1}, decide())),
    "FSDP 2": ({"shard": 2}, {}, fsdp),
    "HSDP 2x2": ({"replicate": 2, "shard": 2}, {}, lambda: fsdp(replicated=True)),
    "TP 2": ({"tensor": 2}, {}, tensor),
    "CP 2": ({"context": 2}, {}, context),
    "EP 2": ({"expert": 2}, {"experts": 4}, expert),
    "PP 2": ({"pipeline": 2}, {}, pipeline),
}


def measure(rank: int, name: str, root: str) -> None:
    """Train three updates on one layout, and write what rank 0 counted in the last one."""
    axes, model, _ = LAYOUTS[name]
    config = {
        "stack": "parallel",
        "parallel": {"axes": axes, "pipeline_n_microbatches": CHUNKS},
        "steps": 3,
        "seed": 1,
        "accum_steps": ACCUMULATED,
        "max_grad_norm": 1.0,
        "optim": {"type": "adamw", "lr": 1e-3},
        "dataloader": {"batch_size": BATCH},
        "checkpoint": {"load_only": True},
        "log": False,
        "log_interval": 1000,
        "workspace_root": root,
    }
    with CountedRunner(config, model) as runner:
        runner.train()
        if rank == 0:
            found = {"calls": dict(runner.counter.calls), "bytes": dict(runner.counter.bytes)}
            Path(root, "counts.json").write_text(json.dumps(found))


def count(name: str) -> dict[str, Any]:
    """Return what rank 0 of a layout communicates in one update, and what it should."""
    axes, _, theory = LAYOUTS[name]
    world_size = 1
    for degree in axes.values():
        world_size *= degree
    with TemporaryDirectory() as root:
        run_on_ranks(measure, name, root, world_size=world_size)
        return {**json.loads(Path(root, "counts.json").read_text()), "theory": theory()}


def main() -> None:
    """Print a table, and write it as JSON when asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file to write the counts to")
    parser.add_argument("layouts", nargs="*", choices=[[], *LAYOUTS], default=[])
    asked = parser.parse_args()
    found = {}
    print(f"{'layout':12} {'collective':16} {'calls':>6} {'theory':>7} {'KiB':>9}")
    for name in asked.layouts or LAYOUTS:
        found[name] = count(name)
        for kind in sorted({*found[name]["calls"], *found[name]["theory"]}):
            calls, size = (
                found[name]["calls"].get(kind, 0),
                found[name]["bytes"].get(kind, 0) / 1024,
            )
            print(
                f"{name:12} {kind:16} {calls:6} {found[name]['theory'].get(kind, 0):7} {size:9.1f}",
                flush=True,
            )
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

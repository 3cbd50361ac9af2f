"""What compiling costs and gives: starts, time of an update, and what is kept for the backward.

    OMP_NUM_THREADS=1 python benchmarks/compile.py                      # about ten minutes on two idle cores
    OMP_NUM_THREADS=1 python benchmarks/compile.py --json compile.json --only memory
    python benchmarks/compile.py --small --backend aot_eager_decomp_partition   # shows that it runs, its figures mean nothing

An MLP of ten thousand parameters and a GPT of 4 layers with dropout. *Starts* are seconds from the beginning of the first forward to the
end of the first update, each in its own process with imports done: `cold` with an empty folder of compiled code, `warm` with the
folder that the cold one has left, `portable` with an empty folder and what `torch.compiler.save_cache_artifacts` had saved. *Steps* are
updates without compilation, with `compile.enable`, and on the graph stack, in interleaved blocks of one process; each round is divided by
the adjacent round without compilation. *Memory* is what a forward of one batch keeps for the backward, parameters left out, by policy.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pairs
import torch
from torch import Tensor, nn
from workload import OVERHEAD, make_model

import danling as dl
from danling.graph.compilation import GraphPreparation

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from models.gpt import GPT

POLICIES = ("default", "budget:0.5", "budget:0.1", "recompute")
STARTS = ("cold", "warm", "portable")
MODELS = ("mlp", "gpt")
BLOCKS = {"mlp": 300, "gpt": 10}
PARTS = ("starts", "steps", "memory")


def build(kind: str, *, small: bool) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """Return a model, with the same weights each time, and its batches."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    if kind == "mlp":
        inputs = torch.randn(8, OVERHEAD.batch_size, OVERHEAD.widths[0], generator=generator)
        targets = torch.randint(10, (8, OVERHEAD.batch_size), generator=generator)
        return make_model(OVERHEAD), list(zip(inputs, targets))
    context, width, depth = (8, 16, 2) if small else (64, 64, 4)
    tokens = torch.randint(97, (8, 8, context + 1), generator=generator)
    model = GPT(97, context=context, width=width, depth=depth, heads=2, dropout=0.1)
    return model, [(each[:, :-1], each[:, 1:]) for each in tokens]


def loss_of(pred: Tensor, target: Tensor) -> Tensor:
    """Return the cross entropy over the last dimension."""
    return nn.functional.cross_entropy(pred.flatten(0, -2), target.flatten())


class Benchmarked(dl.Runner):
    """Trains one of the models, and knows when its first forward began."""

    def __init__(self, config: dict[str, Any], kind: str, *, small: bool) -> None:
        super().__init__(config)
        self.model, batches = build(kind, small=small)
        self.criterion = loss_of
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.dataloaders = {"train": batches}
        self.began: float | None = None

    def train_step(self, data: Any) -> Any:
        """Train as usual."""
        if self.began is None:
            self.began = time.perf_counter()
        return super().train_step(data)


def settings(root: str, **changes: Any) -> dict[str, Any]:
    """Return a configuration that only trains."""
    return {
        "workspace_root": root,
        "seed": 0,
        "steps": 1,
        "max_grad_norm": 1.0,
        "log": False,
        "log_interval": 10**9,
        "checkpoint": {"load_only": True},
        **changes,
    }


# Starts


def start(
    kind: str, folder: str, portable: str, *, loads: bool, small: bool, backend: str
) -> float:
    """Return the seconds of the first update; what the compiler has made goes into the file `portable`, or comes out of it.

    Args:
        kind: Which model.
        folder: Directory of compiled code.
        portable: A file.
        loads: Whether it is loaded into the folder first, instead of written.
        small: Whether sizes are those of a test.
        backend: Backend of the compiler.
    """
    import torch._inductor.compile_fx  # what every start imports is no part of it

    with tempfile.TemporaryDirectory() as root:
        compile = {"enable": True, "backend": backend, "precompile_artifact_dir": folder}
        with Benchmarked(settings(root, compile=compile), kind, small=small) as runner:
            begin = 0.0
            if loads and Path(portable).exists():
                begin = time.perf_counter()
                assert runner.compilation is not None
                runner.compilation.open()
                with runner.compilation.settings():
                    torch.compiler.load_cache_artifacts(Path(portable).read_bytes())
                begin = time.perf_counter() - begin
            runner.train()
            seconds = time.perf_counter() - (runner.began or 0.0) + begin
            saved = None if loads else torch.compiler.save_cache_artifacts()
            if saved is not None:
                Path(portable).write_bytes(saved[0])
    return seconds


def measure_starts(kinds: list[str], *, small: bool, backend: str) -> dict[str, dict[str, float]]:
    """Return seconds of the first update, by model and start."""
    figures: dict[str, dict[str, float]] = {}
    for kind in kinds:
        figures[kind] = {}
        with tempfile.TemporaryDirectory() as place:
            for which in STARTS:
                folder = "elsewhere" if which == "portable" else "code"
                words = [
                    kind,
                    f"{place}/{folder}",
                    f"{place}/portable.bin",
                    str(int(which == "portable")),
                ]
                command = [
                    sys.executable,
                    __file__,
                    "--backend",
                    backend,
                    *(["--small"] if small else []),
                    "--start",
                    *words,
                ]
                # What the compiler keeps for all programs must not help.
                environment = {
                    **os.environ,
                    "TORCHINDUCTOR_CACHE_DIR": f"{place}/{which}",
                    "TMPDIR": place,
                }
                done = subprocess.run(
                    command, env=environment, capture_output=True, text=True, check=False
                )
                if done.returncode:
                    raise RuntimeError(f"{' '.join(command)} failed: {done.stderr}")
                figures[kind][which] = float(done.stdout.split()[-1])
    return figures


# Steps


def measure_steps(
    kinds: list[str], rounds: int, clock: pairs.Clock, *, small: bool, backend: str
) -> dict[str, pairs.Figures]:
    """Return microseconds of an update and its ratio to one without compilation, by model and way."""
    figures = {}
    for kind in kinds:
        with tempfile.TemporaryDirectory() as root:
            ways = {
                "eager": settings(f"{root}/eager"),
                "compiled": settings(
                    f"{root}/compiled", compile={"enable": True, "backend": backend}
                ),
                "graph": settings(f"{root}/graph", stack="graph", compile={"backend": backend}),
            }
            runners = {
                name: Benchmarked(config, kind, small=small) for name, config in ways.items()
            }
            for runner in runners.values():
                runner.train()  # compiles
            number = 2 if small else BLOCKS[kind]
            blocks = {name: _updates(runner, number) for name, runner in runners.items()}
            figures[kind] = pairs.summarize(
                pairs.interleaved(blocks, number, rounds, clock), "eager"
            )
            for runner in runners.values():
                runner.close()
    return figures


def _updates(runner: Benchmarked, number: int) -> Callable[[], None]:
    def block() -> None:
        runner.config.steps = (runner.config.steps or 0) + number
        runner.train_steps()

    return block


# Memory


def measure_memory(kinds: list[str], *, small: bool, backend: str) -> dict[str, dict[str, float]]:
    """Return KiB that the forward of a batch keeps for the backward, by model and policy."""
    figures: dict[str, dict[str, float]] = {}
    for kind in kinds:
        figures[kind] = {}
        for policy in POLICIES:
            with tempfile.TemporaryDirectory() as root:
                compile = {"backend": backend, "memory_policy": policy}
                with Benchmarked(
                    settings(root, stack="graph", compile=compile), kind, small=small
                ) as runner:
                    figures[kind][policy] = _kept(runner) / 1024
    return figures


def _kept(runner: Benchmarked) -> int:
    inputs, target = runner.dataloaders["train"][0]
    own = {parameter.untyped_storage().data_ptr() for parameter in runner.model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    assert isinstance(runner.preparation, GraphPreparation)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        runner.preparation.function(runner.model)(inputs, target)
    return sum(kept.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="which models")
    pairs.add_options(parser, rounds=10)
    parser.add_argument("--backend", default="inductor", help="backend of the compiler")
    parser.add_argument("--small", action="store_true", help="sizes of a test")
    parser.add_argument("--start", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    clock = pairs.prepared(arguments)
    options = {"small": arguments.small, "backend": arguments.backend}
    if arguments.start:
        kind, folder, portable, loads = arguments.start
        print(start(kind, folder, portable, loads=loads == "1", **options))
        return
    kinds = list(arguments.models)
    figures: dict[str, Any] = {}
    if "starts" in arguments.only:
        starts = figures["starts"] = measure_starts(kinds, **options)
        for kind, found in starts.items():
            print(
                f"{kind}: first update {', '.join(f'{name} {value:.1f} s' for name, value in found.items())}",
                flush=True,
            )
    if "steps" in arguments.only:
        steps = figures["steps"] = measure_steps(kinds, arguments.rounds, clock, **options)
        for kind, rows in steps.items():
            shown = (
                f"{name} {row['median_us'] / 1e3:.3f} ms (x {row['ratio']:.2f})"
                for name, row in rows.items()
            )
            print(f"{kind}: update {', '.join(shown)}", flush=True)
    if "memory" in arguments.only:
        memory = figures["memory"] = measure_memory(kinds, **options)
        for kind, kept in memory.items():
            print(
                f"{kind}: kept {', '.join(f'{name} {size:.0f} KiB' for name, size in kept.items())}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()

"""A language model on one GPU: the runner and the same loop written by hand.

    python benchmarks/gpu.py                          # GPT-2 with 124 million parameters in bf16, some minutes on one GPU
    python benchmarks/gpu.py --json gpu.json --batch-size 32
    python benchmarks/gpu.py --small                  # a tiny model, also on a CPU: shows that it runs, its figures mean nothing

Tokens a second, eager and compiled, in interleaved blocks, each divided by the adjacent block of the loop by hand; model FLOPs
utilisation, from 6 N + 12 L T W operations a token (Chowdhery et al., PaLM, 2022, appendix B) and the dense peak of the data sheet; the
most memory; the share of time in which the device waits for the host, between kernels as `torch.profiler` saw them; and for how long a
save stops the loop, synchronous and in the background. The batches are a user's `Dataset` of tokens through a `DataLoader`.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, Dataset

import danling as dl
from danling.reporting import device_peak_flops

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from models.gpt import GPT

LEARNING_RATE, MAX_NORM, DECAY_STEPS = 6e-4, 1.0, 100_000


@dataclass(frozen=True)
class Size:
    """How large the training is.

    Attributes:
        model: Arguments of the model: GPT-2's smallest one has 124 million parameters (Radford et al., 2019).
        batch_size: Sequences of an update.
        block: Updates that are timed together.
        rounds: Interleaved rounds.
    """

    model: dict[str, int] = field(
        default_factory=lambda: {"vocab_size": 50257, "context": 1024, "width": 768, "depth": 12, "heads": 12}
    )
    batch_size: int = 16
    block: int = 100
    rounds: int = 5


SMALL = Size({"vocab_size": 97, "context": 16, "width": 32, "depth": 2, "heads": 2}, batch_size=4, block=3, rounds=2)


class Tokens(Dataset[tuple[Tensor, Tensor]]):
    """Random sequences, each made when it is read."""

    def __init__(self, vocabulary: int, length: int) -> None:
        self.vocabulary, self.length = vocabulary, length

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        # Arithmetic instead of a random stream: both loops read the same, and neither pays for drawing it.
        tokens = (torch.arange(self.length + 1) * (2 * index + 1) + index) % self.vocabulary
        return tokens[:-1], tokens[1:]


def build_model(size: Size) -> nn.Module:
    """Return the model, with the same weights each time."""
    torch.manual_seed(0)
    sizes = size.model
    return GPT(
        sizes["vocab_size"],
        context=sizes["context"],
        width=sizes["width"],
        depth=sizes["depth"],
        heads=sizes["heads"],
    )


def build_optimizer(model: nn.Module) -> tuple[torch.optim.Optimizer, LinearLR]:
    """Return optimizer and schedule, the same in both loops."""
    fused = next(model.parameters()).device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=fused)
    return optimizer, LinearLR(optimizer, 1.0, 0.1, DECAY_STEPS)


class Benchmarked(dl.TorchRunner):
    """The runner over the data set, with the optimizer of the loop by hand."""

    def __init__(self, config: dict[str, Any], size: Size) -> None:
        super().__init__(config)
        self.model = build_model(size).to(self.device)
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer, self.scheduler = build_optimizer(self.model)
        self.datasets = {"train": Tokens(size.model["vocab_size"], size.model["context"])}

    def compute_loss(self, pred: Tensor, target: Tensor) -> Tensor:
        """Return the loss of all positions."""
        return super().compute_loss(pred.flatten(0, 1), target.flatten())


def by_runner(size: Size, root: str, *, compiled: bool, workers: int) -> tuple[dl.TorchRunner, Callable[[], None]]:
    """Return a runner, and a function that makes one block of updates with it."""
    config = {
        "seed": 0,
        "steps": 0,
        "precision": "bf16",
        "compile": {"enable": compiled},
        "max_grad_norm": MAX_NORM,
        "dataloader": {
            "batch_size": size.batch_size,
            "num_workers": workers,
            # Each block is a call of `train_steps`; the loop by hand keeps its workers too.
            "persistent_workers": workers > 0,
            "shuffle": False,
        },
        "log": False,
        "log_interval": size.block,
        "evaluate_interval": 10**9,
        "workspace_root": root,
        "checkpoint": {"load_only": True},
    }
    runner = Benchmarked(config, size)

    def block() -> None:
        runner.config.steps = (runner.config.steps or 0) + size.block
        runner.train_steps()

    return runner, block


def by_hand(size: Size, device: torch.device, *, compiled: bool, workers: int) -> Callable[[], None]:
    """Return a function that makes one block of updates."""
    model, criterion = build_model(size).to(device), nn.CrossEntropyLoss()
    optimizer, scheduler = build_optimizer(model)
    forward = torch.compile(model) if compiled else model
    model.train()
    data = Tokens(size.model["vocab_size"], size.model["context"])
    loader = DataLoader(data, size.batch_size, num_workers=workers, pin_memory=device.type == "cuda")

    def endless() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from loader

    batches = endless()

    def block() -> None:
        for _ in range(size.block):
            input, target = (part.to(device, non_blocking=True) for part in next(batches))
            with torch.autocast(device.type, torch.bfloat16):
                loss = criterion(forward(input).flatten(0, 1), target.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    return block


def timed(block: Callable[[], None], device: torch.device) -> float:
    """Return the seconds of a block, until the device has done it."""
    begin = time.perf_counter()
    block()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def gap_share(block: Callable[[], None], device: torch.device) -> float | None:
    """Return the share of a block in which no kernel runs, from the first kernel to the end of the last; `None` on a CPU."""
    if device.type != "cuda":
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        timed(block, device)
    events = profile.events() or []
    spans = sorted((e.time_range.start, e.time_range.end) for e in events if e.device_type.name == "CUDA")
    busy, reached = 0.0, float(spans[0][0])
    for begin, end in spans:
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return 1 - busy / (reached - float(spans[0][0]))


def utilisation(size: Size, tokens_per_second: float, device: torch.device) -> float | None:
    """Return the share of the device's peak that the model's own arithmetic takes; `None` where the peak is not known."""
    peak = device_peak_flops(device, "bf16")
    if peak is None:
        return None
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in build_model(size).parameters())
    attention = 12 * size.model["depth"] * size.model["context"] * size.model["width"]
    return (6 * parameters + attention) * tokens_per_second / peak


def measure(size: Size, root: str, device: torch.device, *, compiled: bool, workers: int) -> dict[str, Any]:
    """Return the figures of both loops, eager or compiled."""
    hand = by_hand(size, device, compiled=compiled, workers=workers)
    runner, ours = by_runner(size, root, compiled=compiled, workers=workers)
    blocks = {"by hand": hand, "runner": ours}
    seconds: dict[str, list[float]] = {name: [] for name in blocks}
    memory: dict[str, int] = {}
    for round_ in range(size.rounds + 1):
        for name, block in blocks.items():
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            taken = timed(block, device)
            if round_:  # the first one compiles and warms up
                seconds[name].append(taken)
            if device.type == "cuda":
                memory[name] = max(memory.get(name, 0), torch.cuda.max_memory_allocated(device))
    tokens = size.block * size.batch_size * size.model["context"]
    found: dict[str, Any] = {}
    for name, block in blocks.items():
        speed = tokens / statistics.median(seconds[name])
        found[name] = {
            "tokens_per_second": speed,
            "ratio": statistics.median(ours / base for ours, base in zip(seconds[name], seconds["by hand"])),
            "mfu": utilisation(size, speed, device),
            # Both loops hold their model meanwhile, so that it is the memory of the two.
            "peak_memory_bytes_of_both": memory.get(name),
            "gap_share": gap_share(block, device),
        }
    runner.close()
    return found


def measure_saves(size: Size, root: str, workers: int) -> dict[str, float]:
    """Return for how many seconds a save stops the loop, by mode."""
    found = {}
    for mode in ("disabled", "async"):
        config = {
            "seed": 0,
            "steps": 1,
            "precision": "bf16",
            "dataloader": {"batch_size": size.batch_size, "num_workers": workers},
            "log": False,
            "workspace_root": f"{root}/{mode}",
            "checkpoint": {"async_mode": mode},
        }
        with Benchmarked(config, size) as runner:
            runner.train()
            stops = []
            for _ in range(4):
                if runner.device.type == "cuda":
                    torch.cuda.synchronize(runner.device)
                begin = time.perf_counter()
                runner.save_checkpoint()
                stops.append(time.perf_counter() - begin)
                assert runner.checkpoint_manager is not None
                runner.checkpoint_manager.wait()
            # The first one makes the memory for copies.
            found[mode] = statistics.median(stops[1:])
    return found


def show(title: str, row: dict[str, Any]) -> None:
    """Print one line."""
    mfu = f"  MFU {row['mfu']:.1%}" if row["mfu"] is not None else ""
    gaps = f"  device waits {row['gap_share']:.1%}" if row["gap_share"] is not None else ""
    peak = row["peak_memory_bytes_of_both"]
    memory = f"  {peak / 2**30:.1f} GiB" if peak is not None else ""
    print(
        f"  {title:8} {row['tokens_per_second']:12,.0f} tokens/s   x {row['ratio']:.3f}{mfu}{gaps}{memory}", flush=True
    )


def main() -> int:
    """Print the figures and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tiny model, which also runs on a CPU")
    parser.add_argument("--batch-size", type=int, help="sequences of an update")
    parser.add_argument("--workers", type=int, default=2, help="workers of the loader")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    asked = parser.parse_args()
    if not asked.small and not torch.cuda.is_available():
        print("Expected a GPU. Received: none that torch sees. --small runs anywhere.", file=sys.stderr)
        return 1
    logging.disable(logging.INFO)
    size = SMALL if asked.small else Size()
    if asked.batch_size:
        size = Size(size.model, asked.batch_size, size.block, size.rounds)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    figures: dict[str, Any] = {"device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU"}
    figures["torch"] = torch.__version__
    print(f"{figures['device']}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as root:
        for title, compiled in (("eager", False), ("compiled", True)):
            figures[title] = measure(size, f"{root}/{title}", device, compiled=compiled, workers=asked.workers)
            print(title)
            for name in ("by hand", "runner"):
                show(name, figures[title][name])
        figures["save stops the loop"] = measure_saves(size, root, asked.workers)
    for mode, seconds in figures["save stops the loop"].items():
        print(f"a save stops the loop ({mode}): {seconds * 1e3:.1f} ms")
    if asked.json:
        asked.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

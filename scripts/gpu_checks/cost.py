"""What updates, saves, checks and exact sums cost on the device."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from .language_model import BILLION, SMALLEST, Size, by_hand, by_runner, gap_share, utilisation
from .processes import failure, forked
from .trainings import (
    DEVICE,
    MLP,
    ON_CPU,
    SCRATCH,
    Found,
    build_mlp,
    interleaved,
    peak_gib,
    settings,
    synchronize,
    timed,
)


def mlp() -> Found:
    """An update and the loop by hand: where only the host's work counts, and where kernels take some time."""
    # A call of `train_steps` costs some milliseconds by itself: blocks are long.
    sizes = {
        "10k parameters": ((64, 96, 36, 10), 32, 1500),
        "17M parameters": ((1024, 4096, 2048, 2048, 10), 128, 600),
    }
    if ON_CPU:
        sizes = {"10k parameters": ((64, 96, 36, 10), 32, 100)}
    return {title: _mlp(*size) for title, size in sizes.items()}


def _mlp(widths: tuple[int, ...], batch: int, block: int) -> Found:
    MLP.widths, MLP.batch, MLP.repeat = widths, batch, 100
    runner = MLP(
        settings(f"mlp-{batch}", steps=0, max_grad_norm=1.0, dataloader={"batch_size": batch})
    )
    batches = [tuple(part.clone() for part in pair) for pair in runner.dataloaders["train"]]
    torch.manual_seed(0)
    model, criterion = build_mlp(widths).to(DEVICE), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def hand(reads_loss: bool = False) -> None:
        for index in range(block):
            inputs, targets = (
                part.to(DEVICE, non_blocking=True) for part in batches[index % len(batches)]
            )
            loss = criterion(model(inputs), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if reads_loss:
                loss.item()

    def ours() -> None:
        runner.config.steps = (runner.config.steps or 0) + block
        runner.train_steps()

    with runner:
        ways = {
            "by hand": hand,
            "by hand, loss.item()": lambda: hand(reads_loss=True),
            "runner": ours,
        }
        return interleaved(ways, 2 if ON_CPU else 5, block, "by hand")


# GPT-2


def _peak(way: str) -> Found:
    size = replace(SMALLEST, block=3)
    if way == "by hand":
        by_hand(size)()
    else:
        runner, block = by_runner(f"peak-{way}", size)
        with runner:
            block()
    return {"peak_gib": peak_gib()}


def gpt(compiled: bool) -> Found:
    """GPT-2 of 124M parameters in bf16: tokens a second, MFU, share of the time without a kernel, and the most memory of each way alone."""
    size, workers = SMALLEST, 0 if ON_CPU else 2
    found: Found = {}
    if not compiled:
        found["alone"] = {way: forked(_peak, way, timeout=60) for way in ("by hand", "runner")}
    hand = by_hand(size, compiled=compiled, workers=workers)
    runner, ours = by_runner(f"gpt-{compiled}", size, workers=workers, compile={"enable": compiled})
    with runner:
        ways = {"by hand": hand, "runner": ours}
        first = {name: round(timed(block), 1) for name, block in ways.items()}
        found |= interleaved(ways, size.rounds, size.block, "by hand")
        for name, block in ways.items():
            row = found[name]
            row["first_block_s"] = first[name]
            row["tokens_per_s"] = round(size.tokens / row["us_per_update"] * 1e6)
            row["mfu"] = utilisation(size, row["tokens_per_s"])
            row["gap_share"] = gap_share(block)
    return found


# Saves


def _stops(size: Size, mode: dict[str, Any], count: int) -> Found:
    name = f"saves-{time.time_ns()}"
    runner, block = by_runner(
        name, replace(size, block=1), checkpoint={**mode, "load_only": False, "keep_latest_k": 1}
    )
    stops, written = [], []
    with runner:
        block()
        values = 12 * sum(parameter.numel() for parameter in runner.unwrapped_model.parameters())
        before = _pinned_bytes()
        for _ in range(count):
            synchronize()
            begin = time.perf_counter()
            runner.save_checkpoint()
            stops.append(round((time.perf_counter() - begin) * 1e3, 1))
            runner.checkpoint_manager.wait()
            written.append(round(time.perf_counter() - begin, 2))
        after = _pinned_bytes()
    shutil.rmtree(SCRATCH / name, ignore_errors=True)
    return {
        "stop_ms": stops,
        "written_s": written,
        "state_gb": round(values / 1e9, 2),
        "gb_s_of_stop": round(values / 1e6 / max(stops[-1], 1e-3), 2),
        "pinned_gb": None if after is None or before is None else round((after - before) / 1e9, 2),
    }


def _pinned_bytes() -> int | None:
    """Return the pinned memory that torch's allocator has taken; the library's own figure is in the log."""
    if ON_CPU:
        return None
    counters = torch.cuda.host_memory_stats()
    taken = counters.get("allocated_bytes.current")
    return None if taken is None else int(taken)


def saves(large: bool) -> Found:
    """For how long a save stops the loop, by mode; the first one also makes the memory for the copy."""
    background, process = (
        {"async_mode": "async"},
        {"async_mode": "async_with_pinned_mem", "backend": "dcp"},
    )
    modes: dict[str, dict[str, Any]] = {
        "file, async": background,
        "dcp, async_with_pinned_mem": process,
    }
    if not large:
        modes |= {
            "file, disabled": {"async_mode": "disabled"},
            "dcp, async": {**background, "backend": "dcp"},
        }
    size, count, limit = (BILLION, 2, 75) if large else (SMALLEST, 4, 60)
    return {name: forked(_stops, size, mode, count, timeout=limit) for name, mode in modes.items()}


# Checks and exact sums


def _update(name: str, updates: int, more: dict[str, Any]) -> Found:
    runner, block = by_runner(f"cost-{name}", replace(SMALLEST, block=updates), **more)
    with runner:
        block()
        seconds = timed(block) / updates
    return {"ms_per_update": round(seconds * 1e3, 2), "peak_gib": peak_gib()}


def audits() -> Found:
    """What digests and replays cost an update of 124M parameters."""
    plans: dict[str, dict[str, Any]] = {
        "plain": {},
        "digest every update": {"audit": {"digest_interval": 1}},
        "plain, deterministic": {"deterministic": True},
        "replay every update, deterministic": {
            "deterministic": True,
            "audit": {"replay_interval": 1},
        },
    }
    return {
        name: forked(_update, name, 2 if ON_CPU else 12, more, timeout=50)
        for name, more in plans.items()
    }


def canonical() -> Found:
    """What one order of addition costs an update of 124M parameters in four micro-batches, on one process."""
    loader = {"batch_size": None, "global_batch_size": SMALLEST.batch_size}
    loader["micro_batch_size"] = max(SMALLEST.batch_size // 4, 1)
    sums = ("fast", "canonical")
    more = {kind: {"gradient_sum": kind, "dataloader": loader} for kind in sums}
    return {
        kind: forked(_update, kind, 2 if ON_CPU else 8, more[kind], timeout=60) for kind in sums
    }


# Attention


@contextmanager
def _deterministic(asked: bool) -> Iterator[None]:
    torch.use_deterministic_algorithms(asked)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _attention(backend: SDPBackend, asked: bool, shape: tuple[int, ...], number: int) -> Found:
    parts = [
        torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    query, key, value = parts
    upstream = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)

    def gradients() -> tuple[Tensor, ...]:
        output = scaled_dot_product_attention(query, key, value, is_causal=True)
        return torch.autograd.grad(output, parts, upstream)

    with _deterministic(asked), sdpa_kernel([backend]):
        first, again = gradients(), gradients()
        seconds = timed(lambda: [gradients() for _ in range(number)]) / number
    return {"ms": round(seconds * 1e3, 3), "same_bits_twice": all(map(torch.equal, first, again))}


def attention() -> Found:
    """Forward and backward of causal attention in bf16 by kernel, with and without deterministic algorithms; 16 x 12 heads x 1024 x 64."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    shape, number = ((2, 2, 64, 16), 2) if ON_CPU else ((16, 12, 1024, 64), 20)
    kinds = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")
    found: Found = {}
    for kind in kinds:
        for title, asked in (("", False), (", deterministic", True)):
            try:
                found[kind.lower() + title] = _attention(
                    getattr(SDPBackend, kind), asked, shape, number
                )
            except RuntimeError as error:
                # Not every card and shape has each kernel, and some have no deterministic backward.
                found[kind.lower() + title] = {"refused": failure(error)["error"][:200]}
    return found

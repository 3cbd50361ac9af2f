"""Checks of what is computed: resumes, losses that are not finite, memory that runs out, digests, growth, compiled code."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import danling as dl
from danling.training import NonFiniteError

from .processes import PATIENCE, forked, kill_tree
from .trainings import (
    MLP,
    ON_CPU,
    SCRATCH,
    Found,
    SmallGPT,
    fingerprint,
    peak_gib,
    settings,
    synchronize,
    timed,
)

ROOT = Path(__file__).parents[2]


def environment() -> Found:
    """Return versions, and what card and link can do by themselves."""
    found: Found = {
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "danling": dl.__version__,
        "cpus": os.cpu_count(),
    }
    if ON_CPU:
        return found
    found |= {
        "device": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "nccl": torch.cuda.nccl.version(),  # type: ignore[no-untyped-call]
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "memory_gib": round(torch.cuda.mem_get_info()[1] / 2**30, 1),
    }
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    timed(lambda: [square @ square for _ in range(3)])
    found["bf16_tflops"] = round(
        2 * 8192**3 * 10 / timed(lambda: [square @ square for _ in range(10)]) / 1e12
    )
    size = 1 << 28
    there = torch.empty(size, dtype=torch.uint8, device="cuda")
    hosts = {"pinned": torch.empty(size, dtype=torch.uint8, pin_memory=True)}
    hosts["pageable"] = torch.empty(size, dtype=torch.uint8).fill_(1)
    for name, host in hosts.items():
        host.copy_(there)
        seconds = timed(lambda to=host: [to.copy_(there) for _ in range(4)])  # type: ignore[misc]
        found[f"device_to_host_gb_s_{name}"] = round(4 * size / seconds / 1e9, 1)
    return found


# Resumes


def _train(name: str, more: dict[str, Any], kill_at: int = -1, stop_at: int = -1) -> Found:
    SmallGPT.kill_at, SmallGPT.stop_at = kill_at, stop_at
    with SmallGPT(settings(name, **more)) as runner:
        first = runner.state.train.global_step
        try:
            runner.train()
        except SystemExit as left:
            return {"exit": left.code, "first": first, "step": runner.state.train.global_step}
        synchronize()
        return {
            "first": first,
            "step": runner.state.train.global_step,
            "bits": fingerprint(runner),
            "loss": float(runner.losses[-1]),
        }


def resume(precision: str) -> Found:
    """Two fresh starts, a run that is killed and one that is terminated: all bits of weights, optimizer and averages at the end."""
    more: dict[str, Any] = {
        "steps": 80,
        "deterministic": True,
        "precision": precision,
        "max_grad_norm": 1.0,
        "ema": {"enabled": True},
        "scheduler": {"type": "cosine", "warmup_steps": 0.1},
        "checkpoint": {"load_only": False, "interval": 20},
        "log_interval": 10,
        "dataloader": {"batch_size": 16, "num_workers": 0 if ON_CPU else 2},
        "evaluate_splits": ["val"],
        "evaluate_interval": 40,
        "try_evaluation": True,
        "auto_resume": True,
    }
    tag = f"resume-{precision}"
    found = {
        "straight": forked(_train, f"{tag}-a", more),
        "again": forked(_train, f"{tag}-b", more),
    }
    found["killed"] = forked(_train, f"{tag}-c", more, 50)
    found["after SIGKILL"] = forked(_train, f"{tag}-c", more)
    found["terminated"] = forked(_train, f"{tag}-d", more, -1, 30)
    found["after SIGTERM"] = forked(_train, f"{tag}-d", more)
    bits = {
        name: found[name].get("bits")
        for name in ("straight", "again", "after SIGKILL", "after SIGTERM")
    }
    resumed = [found[name].get("first", 0) for name in ("after SIGKILL", "after SIGTERM")]
    passed = len(set(bits.values())) == 1 and None not in bits.values() and min(resumed) > 0
    return {"passed": passed, "bits": bits, "resumed_from": resumed, "runs": found}


# Losses that are not finite


class Poisoned(MLP):
    """Has a loss that is not finite in update 8, once."""

    def compute_loss(self, pred: Tensor, target: Tensor) -> Tensor:
        loss = super().compute_loss(pred, target)
        train = self.state.train
        return loss * float("inf") if train.global_step == 7 and not train.skipped_updates else loss


def _poisoned(skips: bool) -> Found:
    found: Found = {}
    saves = {"load_only": False, "interval": 5}
    with Poisoned(
        settings(f"poison-{skips}", steps=20, skip_nonfinite_grad=skips, checkpoint=saves)
    ) as runner:
        try:
            runner.train()
        except NonFiniteError as error:
            found["raised"] = str(error)[:300]
        found |= {
            "step": runner.state.train.global_step,
            "skipped": runner.state.train.skipped_updates,
        }
        directory = runner.workspace.dir / "checkpoints"
    # After `close`, which waits for the background.
    saved = sorted(path.name for path in directory.glob("ckpt*.pth"))
    found["saved"] = saved
    found["saved_with_nan"] = [name for name in saved if not _is_finite(directory / name)]
    return found


def _is_finite(file: Path) -> bool:
    weights = torch.load(file, weights_only=True, map_location="cpu")["model"].values()
    return all(bool(weight.isfinite().all()) for weight in weights)


def nonfinite() -> Found:
    """A loss that is not finite raises, at the latest one update later and before anything of it is saved, or the update is skipped."""
    found: Found = {"raises": forked(_poisoned, False), "skips": forked(_poisoned, True)}
    raises, skips = found["raises"], found["skips"]
    is_named = "at step 8" in raises.get("raised", "")
    nothing_saved = not raises.get("saved_with_nan", True) and not skips.get("saved_with_nan", True)
    found["passed"] = (
        is_named and nothing_saved and skips.get("skipped") == 1 and skips.get("step") == 20
    )
    return found


# Memory that runs out


class Hungry(MLP):
    """Takes more memory than there is for all samples at once."""

    widths = (64, *[128] * 4, 10) if ON_CPU else (64, *[1024] * 8, 10)
    samples = batch = 3200 if ON_CPU else 65536
    of_list = False
    limited = True

    def train_step(self, data: Any) -> Any:
        if ON_CPU and self.limited and len(data[0]) > 1000:
            torch.empty(1 << 52)
        return super().train_step(data)


def _hungry(more: dict[str, Any], limit_gib: float | None) -> Found:
    Hungry.limited = limit_gib is not None
    if limit_gib is not None and not ON_CPU:
        torch.cuda.set_per_process_memory_fraction(limit_gib * 2**30 / torch.cuda.mem_get_info()[1])
    found: Found = {}
    with Hungry(
        settings(f"memory-{time.time_ns()}", steps=3, deterministic=True, **more)
    ) as runner:
        try:
            runner.train()
        except (torch.OutOfMemoryError, RuntimeError) as error:
            found["raised"] = f"{type(error).__name__}: {error}"[:300]
        found |= {
            "step": runner.state.train.global_step,
            "micro_batch_size": runner.state.elastic.micro_batch_size,
            "bits": fingerprint(runner),
            "peak_gib": peak_gib(),
            "reports": sorted(path.name for path in runner.workspace.dir.rglob("oom-rank*")),
        }
    return found


def out_of_memory() -> Found:
    """Memory that runs out for real: the update is made again, with the bits of a run with that size from the start."""
    loader: dict[str, Any] = {
        "batch_size": None,
        "global_batch_size": Hungry.samples,
        "micro_batch_size": "auto",
    }
    found: Found = {"auto": forked(_hungry, {"dataloader": loader}, 2.5)}
    size = found["auto"].get("micro_batch_size")
    if size:
        found["that size"] = forked(
            _hungry, {"dataloader": {**loader, "micro_batch_size": size}}, None
        )
    found["no retry"] = forked(_hungry, {"dataloader": {"batch_size": Hungry.samples}}, 2.5)
    is_same = bool(size) and found["auto"].get("bits") == found["that size"].get("bits")
    found["passed"] = is_same and bool(found["no retry"].get("reports"))
    return found


# Digests, replays and growth


def _digests(name: str, more: dict[str, Any]) -> list[str]:
    with SmallGPT(settings(name, **more)) as runner:
        runner.train()
        directory = runner.workspace.dir
    return [
        json.loads(line)["total"] for line in (directory / "digests.jsonl").read_text().splitlines()
    ]


def audit() -> Found:
    """Digests of two runs, each of whose updates is computed twice now and then, are the same."""
    every = {"digest_interval": 5, "replay_interval": 5}
    more = {"steps": 40, "deterministic": True, "precision": "bf16", "audit": every}
    one, two = forked(_digests, "audit-1", more), forked(_digests, "audit-2", more)
    is_same = isinstance(one, list) and len(one) > 0 and one == two
    return {
        "passed": is_same,
        "digests": len(one) if isinstance(one, list) else one,
        "last": one[-1:] if is_same else two,
    }


class Measured(SmallGPT):
    """Notes its memory at some updates."""

    steps_of_notes: tuple[int, ...] = ()
    notes: list[Found]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.notes = []

    def train_step(self, data: Any) -> Any:
        step = self.state.train.global_step
        if step in self.steps_of_notes and self.window.count == 1:
            synchronize()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            allocated = None if ON_CPU else torch.cuda.memory_allocated()
            note = {
                "step": step,
                "allocated": allocated,
                "rss_mb": round(pages * resource.getpagesize() / 1e6, 1),
            }
            self.notes.append(note)
        returned = super().train_step(data)
        self.log_metric("own", returned[1].detach())
        return returned


def growth() -> Found:
    """The memory of the device does not grow over 500 updates with everything on that keeps something."""
    steps = 60 if ON_CPU else 500
    Measured.steps_of_notes = (steps // 5, steps // 2, steps - 1)
    more: dict[str, Any] = {
        "steps": steps,
        "ema": {"enabled": True},
        "train_metrics": True,
        "max_grad_norm": 1.0,
        "log_interval": 10,
        "precision": "bf16",
        "deterministic": True,
        "checkpoint": {"load_only": False, "interval": 50, "keep_latest_k": 2},
        "audit": {"digest_interval": 20, "replay_interval": 50},
        "evaluate_splits": ["val"],
        "evaluate_interval": 100,
        "dataloader": {"batch_size": 16, "num_workers": 0 if ON_CPU else 2},
    }
    with Measured(settings("growth", **more)) as runner:
        runner.train()
        notes = list(runner.notes)
    grown = None if ON_CPU else notes[-1]["allocated"] - notes[0]["allocated"]
    return {
        "passed": len(notes) == 3 and (grown is None or abs(grown) < 1 << 20),
        "bytes": grown,
        "notes": notes,
    }


# Compiled code


def _compiled(name: str, more: dict[str, Any]) -> Found:
    begin = time.perf_counter()
    with SmallGPT(settings(name, **more)) as runner:
        runner.train()
        synchronize()
        losses = [float(loss) for loss in runner.losses]
    return {"seconds": round(time.perf_counter() - begin, 1), "losses": losses}


def graph() -> Found:
    """The graph stack, and CUDA graphs, against the eager run; a second start takes the compiled code of the first."""
    base: dict[str, Any] = {
        "steps": 12 if ON_CPU else 40,
        "precision": "none" if ON_CPU else "bf16",
        "train_metrics": True,
    }
    kept = {
        "precompile_artifact_dir": str(SCRATCH / "compiled"),
        **({"backend": "aot_eager"} if ON_CPU else {}),
    }
    plans: dict[str, tuple[str, dict[str, Any]]] = {
        "eager": ("graph-eager", base),
        "graph": ("graph-1", base | {"stack": "graph", "compile": kept}),
        "graph again": ("graph-2", base | {"stack": "graph", "compile": kept}),
    }
    if not ON_CPU:
        accumulated = base | {"accum_steps": 2}
        reduces = {"mode": "reduce-overhead"}
        evaluates = accumulated | {"evaluate_splits": ["val"], "evaluate_interval": 20}
        plans["eager, accum_steps=2"] = ("graph-3", accumulated)
        plans["CUDA graphs"] = ("graph-4", evaluates | {"compile": {"enable": True, **reduces}})
        plans["graph, CUDA graphs"] = (
            "graph-5",
            evaluates | {"stack": "graph", "compile": reduces},
        )
    runs = {
        name: forked(_compiled, directory, more, timeout=100)
        for name, (directory, more) in plans.items()
    }
    pairs = [("eager", "graph"), ("graph", "graph again")]
    if not ON_CPU:
        pairs += [("eager, accum_steps=2", name) for name in ("CUDA graphs", "graph, CUDA graphs")]
    apart = {f"{one} - {other}": _apart(runs[one], runs[other]) for one, other in pairs}
    shown = {
        name: {**run, "losses": run["losses"][-3:]} if "losses" in run else run
        for name, run in runs.items()
    }
    return {
        "passed": all(share is not None and share < 5e-3 for share in apart.values()),
        "apart": apart,
        "runs": shown,
    }


def _apart(one: Found, other: Found) -> float | None:
    """Return the largest difference between the losses of two runs, relative to the largest loss; `None` where one of them failed."""
    if "losses" not in one or "losses" not in other or len(one["losses"]) != len(other["losses"]):
        return None
    largest: float = max(abs(a - b) for a, b in zip(one["losses"], other["losses"]))
    return largest / float(max(one["losses"]))


# The tests of the repository


def tests() -> Found:
    """The tests that can use a device: many compare with the CPU, and those are expected to differ; the counts are what matters."""
    missing = [
        name
        for name in ("pytest", "pytest_timeout", "xdist")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        return {"skipped": f"without {', '.join(missing)}"}
    folders = (
        ["tests/optim"]
        if ON_CPU
        else ["tests/training", "tests/optim", "tests/metrics", "tests/supervision"]
    )
    options = f"-v --no-header -p no:cacheprovider -n {2 if ON_CPU else 8} --timeout 60 --maxfail 400 --tb line".split()
    command = [sys.executable, "-m", "pytest", *options, *folders]
    environment = os.environ | {"DANLING_TEST_GPU": "1"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=85 * PATIENCE)
    except subprocess.TimeoutExpired:
        kill_tree(process.pid)
        output, _ = process.communicate()
    print(output)
    lines = output.splitlines()
    counts = {
        word: sum(f" {word} " in line for line in lines)
        for word in ("PASSED", "FAILED", "ERROR", "SKIPPED")
    }
    failed = [line[:200] for line in lines if " FAILED " in line or " ERROR " in line]
    return {"exit": process.returncode, "counts": counts, "failed": failed[:80]}

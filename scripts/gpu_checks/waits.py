"""How often an update waits for the device, and where; how many kernels it launches."""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .correct import ROOT
from .processes import failure, forked
from .trainings import DEVICE, MLP, ON_CPU, Found, build_mlp, settings, synchronize

_FIRST, _UPDATES = 10, 20
"""Updates before the first one that is watched, and how many are."""


class Synchronizations:
    """Counts what torch calls synchronizing CUDA operations, by the line of the library that makes them."""

    def __init__(self) -> None:
        self.lines: Counter[str] = Counter()
        self._shown: Any = None
        self._filters: Any = []

    def start(self) -> None:
        """Begin to count."""
        self._shown, self._filters = warnings.showwarning, warnings.filters[:]
        warnings.simplefilter("always")
        warnings.showwarning = self._note
        if not ON_CPU:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("warn")

    def _note(self, message: object, *_: object, **__: object) -> None:
        if "synchronizing CUDA" not in str(message):
            return
        frames = traceback.extract_stack()[:-1]
        own = [frame for frame in frames if frame.filename.startswith(f"{ROOT}/danling")]
        frame = own[-1] if own else frames[-1]
        place = f"{frame.filename.removeprefix(f'{ROOT}/')}:{frame.lineno} {frame.name}"
        self.lines[f"{place}: {(frame.line or '')[:90]}"] += 1

    def stop(self) -> None:
        """End counting."""
        if not ON_CPU:
            torch.cuda.set_sync_debug_mode("default")
        warnings.showwarning = self._shown
        warnings.filters[:] = self._filters  # type: ignore[index]


@dataclass(frozen=True)
class Case:
    """Settings of a training whose waits are counted; `most` is how many an update may have, `None` where nothing is promised."""

    more: dict[str, Any] = field(default_factory=dict)
    most: int | None = 0
    regression: bool = False
    logs_metric: bool = False


CANONICAL = {"batch_size": None, "global_batch_size": 32, "micro_batch_size": 8}
CASES = {
    "default": Case(),
    "regression": Case(regression=True),
    "clipping": Case({"max_grad_norm": 1.0}),
    "ema": Case({"ema": {"enabled": True}}),
    "train_metrics": Case({"train_metrics": True}),
    "log_metric": Case(logs_metric=True),
    "accum_steps=4": Case({"accum_steps": 4}),
    "bf16": Case({"precision": "bf16"}),
    "deterministic": Case({"deterministic": True}),
    "skip_nonfinite_grad": Case({"skip_nonfinite_grad": True}, most=1),
    "fp16": Case({"precision": "fp16"}, most=1),
    "canonical": Case({"gradient_sum": "canonical", "dataloader": CANONICAL}, most=None),
    "digest every update": Case({"audit": {"digest_interval": 1}}, most=None),
    "replay every update": Case(
        {"audit": {"replay_interval": 1}, "deterministic": True}, most=None
    ),
}


class Counted(MLP):
    """Counts the synchronizations of some updates; no log line, evaluation or save is among them."""

    counts: Synchronizations
    logs_metric = False

    def train_step(self, data: Any) -> Any:
        step, is_first = self.state.train.global_step, self.window.count == 1
        if is_first and step == _FIRST:
            self.counts.start()
        if is_first and step == _FIRST + _UPDATES:
            self.counts.stop()
        returned = super().train_step(data)
        if self.logs_metric:
            self.log_metric("own", returned[1].detach() * 2)
        return returned


def _count(name: str, case: Case) -> Found:
    counts = Counted.counts = Synchronizations()
    Counted.regression, Counted.logs_metric = case.regression, case.logs_metric
    Counted.of_list = "dataloader" not in case.more
    with Counted(settings(f"waits-{name}", steps=_FIRST + _UPDATES + 10, **case.more)) as runner:
        runner.train()
    per_update = sum(counts.lines.values()) / _UPDATES
    found: Found = {
        "per_update": per_update,
        "lines": {k: v / _UPDATES for k, v in counts.lines.most_common(8)},
    }
    if case.most is not None:
        found["passed"] = per_update <= case.most
    return found


def _all_cases() -> Found:
    found: Found = {}
    for name, case in CASES.items():
        try:
            found[name] = _count(name, case)
        except Exception as error:
            found[name] = failure(error)
    return found


def waits() -> Found:
    """Waits of the host in an update, by setting and line of the library."""
    found = forked(_all_cases, timeout=100)
    cases = {name: case for name, case in found.items() if isinstance(case, dict)}
    passed = bool(cases) and all(case.get("passed", "error" not in case) for case in cases.values())
    return {"passed": passed, "cases": found}


# Kernels and calls of the runtime, as the profiler sees them: to wait for an event is no synchronizing operation


_CALLS = ("Synchronize", "Memcpy", "LaunchKernel", "GraphLaunch", "EventQuery")


def _profiled(block: Callable[[], object], updates: int) -> Found:
    """Return how many kernels an update launches, and how often it calls the runtime."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if not ON_CPU:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        block()
        synchronize()
    averages = profile.key_averages()
    if ON_CPU:
        return {
            "operations": sum(e.count for e in averages if e.key.startswith("aten::")) / updates
        }
    calls = {
        e.key: e.count / updates
        for e in averages
        if e.key.startswith("cu") and any(c in e.key for c in _CALLS)
    }
    is_kernel = [
        e.device_type.name == "CUDA" and not e.key.startswith(("Memcpy", "Memset"))
        for e in averages
    ]
    launched = sum(e.count for e, kernel in zip(averages, is_kernel) if kernel)
    return {"kernels": launched / updates, "calls": calls}


def _kernels_by_hand(updates: int) -> Found:
    torch.manual_seed(0)
    model, criterion = build_mlp(MLP.widths).to(DEVICE), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    inputs, targets = torch.randn(32, 64), torch.arange(32) % 10

    def block() -> None:
        for _ in range(updates):
            loss = criterion(model(inputs.to(DEVICE)), targets.to(DEVICE))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    block()
    return _profiled(block, updates)


def _kernels_of_runner(name: str, more: dict[str, Any], updates: int) -> Found:
    MLP.of_list = "dataloader" not in more
    with MLP(settings(f"kernels-{name}", steps=updates, max_grad_norm=1.0, **more)) as runner:
        runner.train()
        runner.config.steps = 2 * updates
        return _profiled(runner.train_steps, updates)


def kernels() -> Found:
    """Kernels that an update launches, and those of the loop by hand, which clips as well."""
    updates = 20
    found: Found = {"by hand": forked(_kernels_by_hand, updates)}
    for name in ("default", "ema", "train_metrics", "skip_nonfinite_grad", "fp16", "canonical"):
        found[name] = forked(_kernels_of_runner, name, CASES[name].more, updates)
    return found

"""What is worth knowing of danling on one GPU, in one call of at most 480 seconds.

    python scripts/gpu_check.py --out found            # all checks, the most valuable first
    python scripts/gpu_check.py --only resume_bf16,waits
    python scripts/gpu_check.py --list
    python scripts/gpu_check.py --cpu                  # tiny sizes on the CPU: shows that the checks themselves work

Each check runs in its own process, with its own time limit. Its result is a line of JSON in OUT/results.jsonl, written when it
ends; what it prints is in OUT/log.txt. Checks of correctness come first, several at a time; what is timed runs alone.
A check that no longer fits the budget is left out. Needs torch with CUDA and what danling itself needs: chanfig, PyYAML, tqdm,
typing_extensions.

The exit code is 1 if a check fails or finds what is not expected.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from gpu_checks.processes import kill_tree

HERE = Path(__file__).resolve()
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Check:
    """A check.

    Attributes:
        function: Module and name of the function in `gpu_checks`.
        limit: Seconds after which it is killed.
        expected: Seconds that it is expected to take on an H100.
        arguments: Arguments of the function.
        alone: Whether no other check may run meanwhile.
    """

    function: str
    limit: float
    expected: float
    arguments: tuple[Any, ...] = ()
    alone: bool = False


# In this order, the most valuable first.
CHECKS = {
    "environment": Check("correct.environment", 60, 12),
    "resume_fp32": Check("correct.resume", 150, 50, ("fp32",)),
    "resume_bf16": Check("correct.resume", 150, 50, ("bf16",)),
    "resume_fp16": Check("correct.resume", 150, 50, ("fp16",)),
    "waits": Check("waits.waits", 120, 30),
    "ranks": Check("ranks.ranks", 380, 120),
    "nonfinite": Check("correct.nonfinite", 90, 20),
    "out_of_memory": Check("correct.out_of_memory", 120, 30),
    "audit": Check("correct.audit", 120, 30),
    "growth": Check("correct.growth", 120, 30),
    "graph": Check("correct.graph", 200, 80),
    "gpt_eager": Check("cost.gpt", 130, 45, (False,), alone=True),
    "saves_124m": Check("cost.saves", 120, 40, (False,), alone=True),
    "gpt_compiled": Check("cost.gpt", 190, 80, (True,), alone=True),
    "mlp": Check("cost.mlp", 90, 40, alone=True),
    "kernels": Check("waits.kernels", 120, 20, alone=True),
    "canonical": Check("cost.canonical", 90, 25, alone=True),
    "attention": Check("cost.attention", 60, 15, alone=True),
    "audits": Check("cost.audits", 90, 35, alone=True),
    "saves_1b": Check("cost.saves", 150, 60, (True,), alone=True),
    "tests": Check("correct.tests", 110, 90),
}


def has_error(found: object) -> bool:
    """Return whether a part of what was found is an error."""
    if isinstance(found, dict):
        return "error" in found or any(map(has_error, found.values()))
    return False


def run_check(name: str, result: Path) -> None:
    """Run one check in this process and write its result."""
    check, begin = CHECKS[name], time.perf_counter()
    record: dict[str, Any] = {"check": name}
    try:
        module, function = check.function.split(".")
        found = getattr(importlib.import_module(f"gpu_checks.{module}"), function)(*check.arguments)
        record |= {"passed": False} if has_error(found) else {}
        record |= found
    except BaseException as error:
        traceback.print_exc()
        record |= {
            "error": f"{type(error).__name__}: {error}"[:1500],
            "traceback": traceback.format_exc()[-2000:],
        }
    record["seconds"] = round(time.perf_counter() - begin, 1)
    result.write_text(json.dumps(record))


@dataclass
class Running:
    """A check that runs in its own process."""

    process: subprocess.Popen[bytes]
    end: float
    log: IO[bytes]


class Schedule:
    """Runs checks within a budget of seconds, and writes down what they find.

    Args:
        options: What `main` parsed.
        names: The checks, in order.
    """

    def __init__(self, options: argparse.Namespace, names: list[str]) -> None:
        self.options = options
        self.out = Path(options.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.scratch = Path(tempfile.mkdtemp(prefix="gpu-check-"))
        self.waiting = list(names)
        self.running: dict[str, Running] = {}
        self.records: list[dict[str, Any]] = []
        self.begin = time.monotonic()
        self.environment = self._environment()

    def _environment(self) -> dict[str, str]:
        on_cpu = self.options.cpu
        paths = [ROOT, HERE.parent, ROOT / "examples", os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "GPU_CHECK_CPU": "1" if on_cpu else "0",
            "GPU_CHECK_PATIENCE": str(self.options.patience),
            "GPU_CHECK_SCRATCH": str(self.scratch),
            "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path),
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "WANDB_MODE": "offline",
        }
        if on_cpu:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        environment.setdefault("OMP_NUM_THREADS", "1" if on_cpu else "4")
        return environment

    def left(self) -> float:
        """Return the seconds that are left."""
        return float(self.options.budget) - (time.monotonic() - self.begin)

    def run(self) -> list[dict[str, Any]]:
        """Run all checks; return their records."""
        try:
            while self.waiting or self.running:
                self._start_what_fits()
                for name in list(self.running):
                    self._look_at(name)
                time.sleep(0.05)
        finally:
            for each in self.running.values():
                kill_tree(each.process.pid)
            shutil.rmtree(self.scratch, ignore_errors=True)
        return self.records

    def _start_what_fits(self) -> None:
        for name in list(self.waiting):
            check = CHECKS[name]
            least = check.expected * (0.1 if self.options.cpu else 0.6)
            has_room = len(self.running) < (1 if check.alone else self.options.jobs)
            if self.left() < least:
                self.waiting.remove(name)
                self._note({"check": name, "left_out": "no time"})
            elif any(CHECKS[other].alone for other in self.running):
                return
            elif has_room:
                self.waiting.remove(name)
                self._start(name)
            elif check.alone:
                # Those after it may not run at the same time either.
                return

    def _start(self, name: str) -> None:
        log = (self.scratch / f"{name}.log").open("wb")
        command = [
            sys.executable,
            str(HERE),
            "--check",
            name,
            "--result",
            str(self.scratch / f"{name}.json"),
        ]
        process = subprocess.Popen(
            command, env=self.environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
        )
        limit = min(CHECKS[name].limit * self.options.patience, max(self.left() - 3, 1))
        self.running[name] = Running(process, time.monotonic() + limit, log)

    def _look_at(self, name: str) -> None:
        each = self.running[name]
        is_late = time.monotonic() > each.end
        if each.process.poll() is None and not is_late:
            return
        if each.process.poll() is None:
            kill_tree(each.process.pid)
            each.process.wait()
        del self.running[name]
        each.log.close()
        output = (self.scratch / f"{name}.log").read_bytes()
        with (self.out / "log.txt").open("ab") as log:
            log.write(f"\n===== {name}\n".encode() + output[-60_000:])
        result = self.scratch / f"{name}.json"
        if result.exists():
            record = json.loads(result.read_text())
        else:
            reason = (
                "killed at its time limit"
                if is_late
                else f"ended with exit code {each.process.returncode}"
            )
            record = {"check": name, "error": reason}
        if "error" in record:
            record["output"] = output[-1500:].decode(errors="replace")
        self._note(record)

    def _note(self, record: dict[str, Any]) -> None:
        with (self.out / "results.jsonl").open("a") as stream:
            stream.write(json.dumps(record) + "\n")
        self.records.append(record)
        print(
            f"{time.monotonic() - self.begin:6.1f} s  {record['check']:14} {verdict(record)}",
            flush=True,
        )


def verdict(record: dict[str, Any]) -> str:
    """Return how a check ended, in some words."""
    for key in ("error", "left_out", "skipped"):
        if key in record:
            return f"{key.replace('_', ' ')}: {str(record[key])[:150]}"
    passed = {True: "ok", False: "NOT AS EXPECTED", None: "measured"}[record.get("passed")]
    return f"{passed} ({record['seconds']} s)"


def failed(record: dict[str, Any]) -> bool:
    """Return whether a check has failed, or found what is not expected."""
    return "error" in record or record.get("passed") is False


def main() -> int:
    """Run the checks that are asked for, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default="gpu-check", help="folder for results.jsonl and log.txt")
    parser.add_argument("--cpu", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--only", help="names of checks, separated by commas")
    parser.add_argument("--skip", default="", help="names of checks, separated by commas")
    parser.add_argument("--jobs", type=int, default=5, help="checks of correctness at a time")
    parser.add_argument("--budget", type=float, default=470.0, help="seconds for all checks")
    parser.add_argument(
        "--patience",
        type=float,
        default=1.0,
        help="what the limits of the checks are multiplied by",
    )
    parser.add_argument("--list", action="store_true", help="list the checks")
    parser.add_argument("--check", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.check:
        run_check(options.check, options.result)
        return 0
    if options.list:
        for name, check in CHECKS.items():
            alone = ", alone" if check.alone else ""
            print(f"{name:14} {check.expected:4g} s expected, {check.limit:4g} s at most{alone}")
        return 0
    names = options.only.split(",") if options.only else list(CHECKS)
    unknown = [
        name for name in [*names, *filter(None, options.skip.split(","))] if name not in CHECKS
    ]
    if unknown:
        parser.error(f"Expected names that --list shows. Received: {', '.join(unknown)}.")
    records = Schedule(
        options, [name for name in names if name not in options.skip.split(",")]
    ).run()
    print(
        f"{sum(map(failed, records))} of {len(records)} failed; {sum('left_out' in record for record in records)} left out."
    )
    return 1 if any(map(failed, records)) else 0


if __name__ == "__main__":
    sys.exit(main())

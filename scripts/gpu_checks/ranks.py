"""Several processes on one device, over gloo: nccl takes one process a device.

torchrun runs this file: `python ranks.py CASES FILE`. Each rank writes what came of its trainings to FILE.RANK, a line each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

_LOADER = {"batch_size": None, "global_batch_size": 16, "micro_batch_size": 4}
_SHARDED = {
    "stack": "parallel",
    "parallel": {"axes": {"shard": 2}},
    "dataloader": {"batch_size": 8},
}
_CANONICAL = {"dataloader": _LOADER, "gradient_sum": "canonical"}
CASES: dict[str, dict[str, Any]] = {
    "one": {"dataloader": {"batch_size": 16}},
    "one, canonical": _CANONICAL,
    "one, fsdp": {"stack": "parallel", "fsdp": {"enabled": True}, "dataloader": {"batch_size": 16}},
    "ddp": {"dataloader": {"batch_size": 8}},
    "canonical": _CANONICAL,
    "canonical, 4": _CANONICAL,
    "digests": {
        "dataloader": {"batch_size": 8},
        "audit": {"digest_interval": 2, "replay_interval": 3},
    },
    "shard": _SHARDED,
    "shard, save": _SHARDED | {"checkpoint": {"load_only": False, "interval": 3}},
    "shard, fp16": _SHARDED | {"precision": "fp16"},
    "shard, canonical": _SHARDED | _CANONICAL,
    "shard, cpu offload": _SHARDED | {"fsdp": {"offload_policy": "cpu"}},
    "nccl": {"dataloader": {"batch_size": 8}, "backend": None},
}


def main(cases: str, file: str) -> None:
    """Run trainings one after the other; a rank stops at the first error, since the others may be elsewhere."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from gpu_checks.processes import failure
    from gpu_checks.trainings import SmallGPT, fingerprint, settings

    rank = os.environ.get("RANK", "0")
    base = {
        "steps": 6,
        "deterministic": True,
        "max_grad_norm": 0.5,
        "comm": {"init_timeout_seconds": 40.0},
    }
    for name in cases.split(";"):
        found: dict[str, Any] = {"case": name, "rank": int(rank)}
        begin = time.perf_counter()
        try:
            # `backend` is gloo unless a case says otherwise.
            with SmallGPT(
                settings(
                    f"ranks-{name.replace(', ', '-')}", **{"backend": "gloo", **base, **CASES[name]}
                )
            ) as runner:
                runner.train()
                found["losses"] = [float(loss) for loss in runner.losses][-4:]
                found |= {"bits": fingerprint(runner), "device": str(runner.device)}
        except Exception as error:
            traceback.print_exc()
            found |= failure(error)
        found["seconds"] = round(time.perf_counter() - begin, 1)
        with Path(f"{file}.{rank}").open("a") as stream:
            stream.write(json.dumps(found) + "\n")
        if "error" in found and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            return


def _launched(cases: str, number: int, timeout: float) -> dict[str, Any]:
    """Run trainings on some processes; return how these ended, and what each rank wrote."""
    from gpu_checks.processes import PATIENCE, kill_tree
    from gpu_checks.trainings import SCRATCH

    file = SCRATCH / f"ranks-{number}-{cases.split(';')[0].replace(', ', '-')}.jsonl"
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number)]
        if number > 1
        else []
    )
    command = [sys.executable, *launcher, __file__, cases, str(file)]
    process = subprocess.Popen(command, stdout=sys.stdout, stderr=sys.stderr)
    try:
        ended: int | str = process.wait(timeout * PATIENCE)
    except subprocess.TimeoutExpired:
        kill_tree(process.pid)
        process.wait()
        ended = f"no end within {timeout:g} s"
    lines = [
        line
        for path in sorted(file.parent.glob(f"{file.name}.*"))
        for line in path.read_text().splitlines()
    ]
    return {"exit": ended, "runs": [json.loads(line) for line in lines]}


def ranks() -> dict[str, Any]:
    """DDP, FSDP2, canonical sums on 1, 2 and 4 processes, digests and offloaded shards: what copies hold is the same on all ranks."""
    from gpu_checks.trainings import ON_CPU

    found: dict[str, Any] = {
        "one": _launched("one;one, canonical;one, fsdp", 1, 70),
        "two": _launched(
            "ddp;canonical;digests;shard;shard, save;shard, fp16;shard, canonical", 2, 150
        ),
        "four": _launched("canonical, 4", 4, 60),
        "two, offload": _launched("shard, cpu offload", 2, 70),
    }
    bits: dict[str, list[str]] = {}
    for part in found.values():
        for run in part["runs"]:
            bits.setdefault(run["case"], []).append(run.get("bits") or run.get("error", "nothing"))
    sums = {
        bit
        for name in ("one, canonical", "canonical", "canonical, 4", "shard, canonical")
        for bit in bits.get(name, ["missing"])
    }
    expected = set(CASES) - {"nccl"}
    passed = len(sums) == 1 and all(len(set(bits.get(name, []))) == 1 for name in expected)
    if not ON_CPU:
        # Refused at the start: both ranks have the one device.
        found["nccl on one device"] = _launched("nccl", 2, 70)
        refusals = [run.get("error", "") for run in found["nccl on one device"]["runs"]]
        passed = (
            passed
            and len(refusals) == 2
            and all("Expected a device for each process" in each for each in refusals)
        )
    return {
        "passed": passed,
        "hashes of canonical sums": sorted(sums),
        "bits": bits,
        "parts": found,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])

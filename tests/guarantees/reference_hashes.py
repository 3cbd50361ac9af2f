"""Whether a change of the code leaves every result bitwise as it was: train a fixed set of small runs and compare what they left.

    python tests/guarantees/reference_hashes.py --write reference.json           # with the code of before
    python tests/guarantees/reference_hashes.py --compare reference.json         # with the code of after; exits with 1 on a difference
    python tests/guarantees/reference_hashes.py --compare reference.json --only "ddp 2" "fsdp 2, dcp"
    python tests/guarantees/reference_hashes.py --list

For every rank it keeps the state of the run (weights, averaged weights, optimizer, scheduler, loaders, scores)
and the results; for the run the values of `metrics.jsonl`, the names of the files, and what the newest checkpoint holds when a
stock reader opens it. A plain value is kept as it is, a tensor as the first half of its SHA-256, so that a difference is named
with its path. Left out are identifiers, times, speeds and the configuration. A reference is good for one machine and one
version of torch.

The runs use nothing but what users may rely on, so that one script serves the code before and after a change.
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
for _folder in (_ROOT / "examples", _ROOT / "tests", _ROOT):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))

import torch
from models.gpt import GPT
from support.layouts import LENGTH, VOCABULARY, Sentences
from support.processes import run_processes
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

import danling as dl

Hashes = dict[str, Any]

CLASSES = 4

# Figures of `metrics.jsonl` that say how fast a run was, not what it computed.
_MEASURED = ("time", "seconds", "per_second", "data_share", "memory", "mfu", "flops", "ranks")


# The configurations, and parameters that ZeRO 3 pads with what memory happened to hold; they are compared in the state.
_OF_THE_ENGINE = ("/danling/runner/", "/ds_config/", "/ds_version", "/fp32_flat_groups/")


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Noise with a label each; one label in ten is ignored."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(size)
        self.images = torch.randn(size, 1, 6, 6, generator=generator)
        self.labels = torch.randint(CLASSES, (size,), generator=generator)
        self.labels[::10] = -100

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        # Drawn from the stream of the sample, so that keyed randomness is part of what is compared.
        return self.images[index] + 0.1 * torch.randn(1, 6, 6), self.labels[index]


class ReferenceRunner(dl.Runner):
    """Trains the model of a case, and stops where it is told."""

    def __init__(self, config: Mapping[str, Any], case: Case, stop_at: int | None) -> None:
        super().__init__(config)
        self.stop_at = stop_at
        sizes = {"train": case.samples, "val": 13}
        self.criterion: nn.Module
        if case.model == "gpt":
            self.model = GPT(
                VOCABULARY,
                **{"context": LENGTH, "width": 16, "depth": 2, "heads": 4, **case.options},
            )
            self.criterion = nn.CrossEntropyLoss()
            self.datasets = {split: Sentences(size) for split, size in sizes.items()}
        else:
            norm = nn.BatchNorm2d(3) if case.options.get("norm", True) else nn.GroupNorm(1, 3)
            layers = [
                nn.Conv2d(1, 3, 3, bias=False),
                norm,
                nn.ReLU(),
                nn.Flatten(),
                nn.Dropout(0.2),
            ]
            self.model = nn.Sequential(*layers, nn.Linear(48, CLASSES))
            weight = (
                torch.tensor([1.0, 2.0, 0.5, 1.0]) if case.options.get("class_weights") else None
            )
            self.criterion = nn.CrossEntropyLoss(weight=weight)
            self.datasets = {split: Images(size) for split, size in sizes.items()}
            self.metrics = {"acc": dl.metrics.accuracy}

    def compute_loss(self, pred: Any, target: Any) -> Tensor:
        return super().compute_loss(pred.flatten(0, -2), target.flatten())

    def step(self) -> Any:
        """Ask for a stop one update ahead, so that all ranks hear of it with the update that is the last one."""
        if self.stop_at is not None and self.state.train.global_step == self.stop_at - 1:
            self.stop()
        return super().step()


@dataclass(frozen=True)
class Case:
    """One run."""

    world_size: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)
    model: str = "conv"
    options: Mapping[str, Any] = field(default_factory=dict)
    samples: int = 38
    stop_at: int | None = None


_BASE: dict[str, Any] = {
    "seed": 5,
    "steps": 5,
    "evaluate_interval": 2,
    "log_interval": 1,
    "optim": {"type": "adamw", "lr": 1e-2},
    "dataloader": {"batch_size": 4},
    "checkpoint": {"interval": 2},
}
_EPOCHS = {"steps": None, "evaluate_interval": None, "epochs": 2, "checkpoint": {}}
_RAGGED = {**_EPOCHS, "accum_steps": 3, "dataloader": {"batch_size": 4, "drop_last": False}}
_SCHEDULE = {"scheduler": {"type": "cosine", "warmup_steps": 2}}
_EMA = {"ema": {"enabled": True, "decay": 0.9}}


def _mesh(
    world_size: int,
    *,
    stop_at: int | None = None,
    options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Case:
    axes = settings.pop("axes")
    parallel = {"axes": axes, **settings.pop("parallel", {})}
    base = {
        "stack": "parallel",
        "parallel": parallel,
        "accum_steps": 2,
        "max_grad_norm": 0.05,
        **_SCHEDULE,
    }
    return Case(
        world_size, {**base, **settings}, "gpt", {"tied": False, **(options or {})}, stop_at=stop_at
    )


def _engine(world_size: int, stage: int, *, stop_at: int | None = None, **settings: Any) -> Case:
    base = {
        "stack": "deepspeed",
        "deepspeed": {"zero_optimization": {"stage": stage}},
        "accum_steps": 2,
    }
    return Case(
        world_size, {**base, "max_grad_norm": 0.3, **_SCHEDULE, **settings}, stop_at=stop_at
    )


CASES: dict[str, Case] = {
    "ddp 1": Case(),
    "ddp 1, epochs": Case(settings={**_EPOCHS, **_SCHEDULE}),
    "ddp 1, ragged windows": Case(settings={**_RAGGED, **_EMA}, samples=23),
    "ddp 1, ragged windows, resumed": Case(
        settings={**_RAGGED, **_EMA, **_SCHEDULE}, samples=23, stop_at=3
    ),
    "ddp 1, norm, schedule, class weights": Case(
        settings={"max_grad_norm": 0.2, **_SCHEDULE, **_EMA}, options={"class_weights": True}
    ),
    "ddp 1, value": Case(
        settings={"max_grad_value": 0.01, "optim": {"type": "sgd", "lr": 0.1, "momentum": 0.9}}
    ),
    "ddp 1, bf16": Case(settings={"precision": "bf16", "max_grad_norm": 0.2}),
    "ddp 1, fp16": Case(
        settings={"precision": "fp16", "max_grad_norm": 0.2, "skip_nonfinite_grad": True}, stop_at=3
    ),
    "ddp 1, dcp, resumed": Case(
        settings={"checkpoint": {"interval": 2, "backend": "dcp"}, "max_grad_norm": 0.2, **_EMA},
        stop_at=3,
    ),
    "ddp 1, plateau": Case(
        settings={"scheduler": {"type": "reducelronplateau", "factor": 0.5, "patience": 0}}
    ),
    "ddp 1, workers": Case(settings={"dataloader": {"batch_size": 4, "num_workers": 1}}, stop_at=3),
    "ddp 1, export": Case(
        settings={"checkpoint": {"last_save_model_only": True, "export_dtype": "bf16"}, **_EMA}
    ),
    "ddp 1, global batch": Case(
        settings={"dataloader": {"global_batch_size": 10, "micro_batch_size": 4}},
        options={"norm": False},
    ),
    "ddp 2": Case(2),
    "ddp 2, ragged windows": Case(2, {**_RAGGED, **_EMA}, samples=37),
    "ddp 2, norm, bf16, resumed": Case(
        2, {"precision": "bf16", "max_grad_norm": 0.2, **_SCHEDULE}, stop_at=3
    ),
    "ddp 2, fp16, class weights": Case(
        2, {"precision": "fp16", "max_grad_value": 0.05}, options={"class_weights": True}
    ),
    "ddp 2, gpt, dcp": Case(
        2, {"checkpoint": {"interval": 2, "backend": "dcp"}, "accum_steps": 3}, "gpt"
    ),
    "ddp 2, global batch": Case(
        2, {"dataloader": {"global_batch_size": 7}}, options={"norm": False}
    ),
    "fsdp 2": _mesh(2, axes={"shard": 2}, **_EMA),
    "fsdp 2, value": _mesh(2, axes={"shard": 2}, max_grad_norm=None, max_grad_value=0.01),
    "fsdp 2, bf16, resumed": _mesh(
        2, axes={"shard": 2}, options={"dropout": 0.1}, precision="bf16", stop_at=3
    ),
    "fsdp 2, ragged windows": _mesh(2, axes={"shard": 2}, **_RAGGED),
    "tensor 2": _mesh(2, axes={"tensor": 2}),
    "context 2": _mesh(2, axes={"context": 2}),
    "pipeline 2": _mesh(2, axes={"pipeline": 2}, **_EMA),
    "pipeline 2, ZBV, resumed": _mesh(
        2,
        axes={"pipeline": 2},
        parallel={"pipeline_schedule": "ZBVZeroBubble"},
        options={"depth": 4},
        stop_at=3,
    ),
    "expert 2": _mesh(2, axes={"expert": 2}, options={"experts": 4}),
    "hsdp 2x2": _mesh(4, axes={"replicate": 2, "shard": 2}, dataloader={"batch_size": 2}),
    "pipeline 2 x tensor 2": _mesh(4, axes={"pipeline": 2, "tensor": 2}),
    "deepspeed 1, zero 0": _engine(1, 0),
    "deepspeed 1, zero 1, resumed": _engine(1, 1, stop_at=3, **_EMA),
    "deepspeed 2, zero 0": _engine(2, 0),
    "deepspeed 2, zero 1, ragged windows": _engine(2, 1, **_RAGGED),
    "deepspeed 2, zero 3, resumed": _engine(2, 3, stop_at=3),
}


def available() -> dict[str, Case]:
    has_engine = find_spec("deepspeed") is not None
    return {
        name: case
        for name, case in CASES.items()
        if has_engine or case.settings.get("stack") != "deepspeed"
    }


def hashes_of(names: Sequence[str]) -> dict[str, Hashes]:
    """Train some cases and return what they left, by name; by rank and path within."""
    found: dict[str, Hashes] = {}
    for group in _groups(names):
        with TemporaryDirectory() as root:
            try:
                found |= _hashes_of_group(group, Path(root))
            except Exception as error:
                # The other runs are still to be compared.
                found |= {
                    name: {"error": f"{type(error).__name__}: {error}\n{error.__cause__ or ''}"}
                    for name in group
                }
    return found


def _hashes_of_group(names: Sequence[str], root: Path) -> dict[str, Hashes]:
    world_size = CASES[names[0]].world_size
    ranks = run_processes(
        _train_each, names, str(root), world_size=world_size, timeout=60 + 30 * len(names)
    )
    found: dict[str, Hashes] = {}
    for name in names:
        found[name] = {f"rank {rank}": values[name] for rank, values in enumerate(ranks)}
        found[name] |= {"metrics": _metrics(root / name), "files": _files(root / name)}
        found[name]["checkpoint"] = _checkpoint(root / name / "checkpoints")
    return found


def differences(
    before: Mapping[str, Any], after: Mapping[str, Any], path: str = ""
) -> Iterator[str]:
    """Yield each path at which two sets of hashes are not the same, with both values."""
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key, "(absent)"), after.get(key, "(absent)")
        place = f"{path} | {key}" if path else key
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differences(old, new, place)
        elif old != new:
            yield f"{place}: {old} before, {new} now"


def _groups(names: Sequence[str]) -> list[list[str]]:
    """Importing DeepSpeed takes seconds, so its cases share processes; every other case has some of its own."""
    engines: dict[int, list[str]] = {}
    groups: list[list[str]] = []
    for name in names:
        if CASES[name].settings.get("stack") == "deepspeed":
            engines.setdefault(CASES[name].world_size, []).append(name)
        else:
            groups.append([name])
    return groups + list(engines.values())


# In the processes


def _train_each(names: Sequence[str], root: str) -> dict[str, Hashes]:
    # What a run says on the screen; the traceback of one that fails is carried to the process that asked.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    return {name: _train(CASES[name], str(Path(root, name))) for name in names}


def _train(case: Case, directory: str) -> Hashes:
    config = {**_BASE, **case.settings, "dir": directory}
    if case.stop_at is not None:
        with ReferenceRunner(config, case, case.stop_at) as runner:
            runner.train()
    with ReferenceRunner({**config, "auto_resume": True}, case, None) as runner:
        runner.train()
        return {
            "state": _hashed(_without_settings(runner.state_dict())),
            "results": _hashed(runner.results),
        }


def _without_settings(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the configuration, which names places and has defaults that no case is about, and the seed, which is one of them."""
    state = {key: value for key, value in payload.get("state", {}).items() if key != "rng"}
    return {
        key: state if key == "state" else value for key, value in payload.items() if key != "runner"
    }


def _hashed(value: Any) -> Hashes:
    return dict(_leaves(value, ""))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}/{index}")
    elif isinstance(value, Tensor):
        yield path, _digest(value)
    elif value is None or isinstance(value, (bool, int, float, str)):
        yield path, repr(value)
    else:
        yield path, f"a {type(value).__name__}"


def _digest(value: Tensor) -> str:
    """Return shape, dtype and digest of a tensor; of a divided one, of the part of this rank."""
    local = (value.to_local() if isinstance(value, DTensor) else value).detach().cpu().contiguous()
    data = local.reshape(-1).view(torch.uint8).numpy().tobytes() if local.numel() else b""
    return f"{str(local.dtype)[6:]}{list(local.shape)} {hashlib.sha256(data).hexdigest()[:32]}"


# Of what lies in the run directory


def _metrics(directory: Path) -> Hashes:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    kept = [
        {key: v for key, v in line.items() if not any(word in key for word in _MEASURED)}
        for line in lines
    ]
    return _hashed(kept)


def _files(directory: Path) -> list[str]:
    """Return the names of all files, with `*` for what differs from run to run."""
    names = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    return sorted(
        {
            re.sub(r"(?<=-)[0-9a-f]{8}(?=/)", "*", re.sub(r"\d{8}-\d{6}-\d+", "*", name))
            for name in names
        }
    )


def _checkpoint(directory: Path) -> dict[str, Hashes]:
    """Return what the newest checkpoint holds, and the export and the best one where there are such, through stock readers."""
    found = {}
    for name in ("latest", "best", "model"):
        file, pointer = directory / f"{name}.pth", directory / name
        if file.is_file():
            found[name] = _hashed(_without_settings(torch.load(file, weights_only=True)))
        elif pointer.is_file():
            target = next(directory.rglob(pointer.read_text().strip().rsplit("/", 1)[-1]))
            found[name] = _of_directory(target)
    return found


def _of_directory(target: Path) -> Hashes:
    if (target / ".metadata").is_file():
        with TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            dcp_to_torch_save(target, Path(folder, "whole.pth"))
            return _hashed(
                _without_settings(torch.load(Path(folder, "whole.pth"), weights_only=True))
            )
    # The engine's files hold pickles; these were written a moment ago by this script.
    payloads = {
        path.name: torch.load(path, weights_only=False) for path in sorted(target.glob("*.pt"))
    }
    found = _hashed(payloads)
    return {
        path: value
        for path, value in found.items()
        if not any(part in path for part in _OF_THE_ENGINE)
    }


def main() -> int:
    """Read the command line, run, write or compare; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    doing = parser.add_mutually_exclusive_group(required=True)
    doing.add_argument("--write", metavar="FILE", type=Path, help="keep the hashes of this code")
    doing.add_argument(
        "--compare", metavar="FILE", type=Path, help="compare this code with kept hashes"
    )
    doing.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument(
        "--only", metavar="NAME", nargs="+", choices=list(CASES), help="these cases alone"
    )
    options = parser.parse_args()
    names = options.only or list(available())
    if options.list:
        print("\n".join(names))
        return 0
    begun = time.monotonic()
    found = hashes_of(names)
    took = f"{len(found)} runs in {time.monotonic() - begun:.0f} s"
    if options.write:
        options.write.write_text(json.dumps(found, indent=0, sort_keys=True))
        print(f"{took}: written to {options.write}")
        return 0
    kept = json.loads(options.compare.read_text())
    return _report({name: kept.get(name, {}) for name in names}, found, took)


def _report(before: Mapping[str, Any], after: Mapping[str, Any], took: str) -> int:
    changed = {name: list(differences(before[name], after[name])) for name in after}
    changed = {name: lines for name, lines in changed.items() if lines}
    for name, lines in changed.items():
        print(f"{name}: {len(lines)} differences")
        print("".join(f"    {line}\n" for line in lines[:12]), end="")
    print(f"{took}: {len(after) - len(changed)} as before, {len(changed)} differ")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())

"""What a run records of itself when it begins to train, which its configuration does not say; `danling explain` reads it."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections import Counter
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch

import danling
from danling.metrics.scores import metric_of
from danling.utils.observers import Observer
from danling.utils.process import arithmetic

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner

_VARIABLES = re.compile(
    r"((OMP|MKL|OPENBLAS|CUDA|CUBLAS|CUDNN|NCCL|GLOO|TORCH|TORCHINDUCTOR|PYTORCH)_[A-Z0-9_]+|WORLD_SIZE|PYTHONHASHSEED)"
)
# Secrets, and variables that differ at each start and change nothing.
_LEFT_OUT = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|^TORCHELASTIC_|^TORCH_FR_|_(PORT|ADDR|ID|FILE|DIR)$")
_MOST_PARTS = 12
"""So many parts of a model are named, the largest first."""


def environment(device: torch.device) -> dict[str, object]:
    """Return what this process is made of, which `danling diff` compares: versions, processor, switches of torch, variables."""
    return {
        "danling": danling.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        **arithmetic(device),
        "cuda": torch.version.cuda,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "versions": {
            name: version
            for name, module in sorted(sys.modules.items())
            if "." not in name and isinstance(version := getattr(module, "__dict__", {}).get("__version__"), str)
        },
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if _VARIABLES.fullmatch(name) and not _LEFT_OUT.search(name)
        },
    }


class RunRecorder(Observer):
    """Writes `metadata/run.json` when a training begins: model, data, update, layout, environment, and the schedule of saves."""

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner

    def training_started(self) -> None:
        runner = self._runner
        model = self._model()  # on all ranks
        if runner.is_main_process and not runner.config.checkpoint.load_only:
            division, optimizer, scheduler = runner._data.division(), runner.optimizer, runner.scheduler
            record = {
                "model": model,
                "criterion": _kind(runner.criterion),
                "optimizer": {"kind": _kind(optimizer), "groups": [_options(group) for group in optimizer.param_groups]}
                if optimizer is not None
                else None,
                "scheduler": _kind(scheduler),
                "data": {split: self._split(split) for split in {**runner.datasets, **runner.dataloaders}},
                "update": {
                    "samples": division.samples if division is not None else None,
                    "batch_size": runner.batch_size,
                    "micro_batches": runner.accum_steps,
                },
                "layout": {
                    "stack": runner.stack,
                    "processes": runner.world_size,
                    "data_replicas": runner.placement.data_replicas,
                    "device": runner.device.type,
                },
                "environment": environment(runner.device),
                "checkpoints": {"manager": _kind(runner.checkpoint_manager), "interval": runner.checkpoint_interval},
                "score": {"split": runner.score_split, "name": metric_of(runner.config.score_name, runner.score_split)},
                "seed": runner.seed,
            }
            runner.workspace.write_record(record)

    def _model(self) -> dict[str, object]:
        """Describe the model. Ranks with other parameters, as the stages of a pipeline have, are added. One small collective."""
        runner = self._runner
        named = list(runner.named_parameters())
        sizes = [p.numel() for _, p in named]
        trained = [p.numel() for _, p in named if p.requires_grad]
        size_in_bytes = sum(p.numel() * p.element_size() for _, p in named)
        names = sha256("\n".join(name for name, _ in named).encode()).hexdigest()
        mine = (names, sum(sizes), sum(trained), size_in_bytes)
        of_ranks = dict.fromkeys(runner.placement.optimizer.gather_objects(mine))
        by_part: Counter[str] = Counter()
        for name, parameter in named:
            by_part[name.partition(".")[0]] += parameter.numel()
        children = dict(runner.unwrapped_model.named_children())
        return {
            "kind": _kind(runner.unwrapped_model),
            "parameters": sum(each[1] for each in of_ranks),
            "trained": sum(each[2] for each in of_ranks),
            "bytes": sum(each[3] for each in of_ranks),
            "dtypes": sorted({str(p.dtype).removeprefix("torch.") for _, p in named}),
            "averaged": runner.ema is not None,
            "parts": [
                {"name": name, "kind": _kind(children.get(name)), "parameters": count}
                for name, count in by_part.most_common(_MOST_PARTS)
            ],
        }

    def _split(self, split: str) -> dict[str, object]:
        """Describe the data of a split; its length is `None` where the dataset has none."""
        runner = self._runner
        dataset, loader = runner.datasets.get(split), runner.dataloaders.get(split)
        data: Any = dataset if dataset is not None else getattr(loader, "dataset", loader)
        try:
            samples: int | None = len(data)
        except TypeError:
            samples = None
        shuffle = runner._data.settings(split).get("shuffle", split in runner.train_splits)
        return {
            "kind": _kind(data),
            "samples": samples,
            "trained": split in runner.train_splits,
            "evaluated": split in runner.evaluate_splits,
            "loader": _kind(loader),
            "shuffled": bool(shuffle) if dataset is not None else None,
            "workers": getattr(loader, "num_workers", 0),
        }


def _kind(value: object) -> str | None:
    return None if value is None else type(value).__name__ if not hasattr(value, "__qualname__") else value.__qualname__


def _options(group: dict[str, Any]) -> dict[str, object]:
    """Return the options of a parameter group that are plain, and how many tensors it has."""
    plain = {name: value for name, value in group.items() if isinstance(value, (bool, int, float, str))}
    betas = {"betas": list(group["betas"])} if isinstance(group.get("betas"), (tuple, list)) else {}
    return {**plain, **betas, "tensors": len(group["params"])}

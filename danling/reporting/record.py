"""What a run records of itself when it begins to train, which its configuration does not say; `danling explain` reads it."""

from __future__ import annotations

import logging
import os
import platform
import re
import sys
from collections import Counter
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Subset

import danling
from danling.metrics.scores import metric_of
from danling.utils.files import read_text
from danling.utils.observers import Observer
from danling.utils.plain import parse_json
from danling.utils.process import arithmetic

if TYPE_CHECKING:
    from danling.data.run_data import RunData
    from danling.runners.torch_runner import TorchRunner

_VARIABLES = re.compile(
    r"((OMP|MKL|OPENBLAS|CUDA|CUBLAS|CUDNN|NCCL|GLOO|TORCH|TORCHINDUCTOR|PYTORCH)_[A-Z0-9_]+|WORLD_SIZE|PYTHONHASHSEED)"
)
# Secrets, and variables that differ at each start and change nothing.
_LEFT_OUT = re.compile(
    r"KEY|TOKEN|SECRET|PASSWORD|^TORCHELASTIC_|^TORCH_FR_|_(PORT|ADDR|ID|FILE|DIR)$"
)
logger = logging.getLogger("danling")

_LONGEST_TEXT = 300
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
            for name in sorted(name for name in list(sys.modules) if "." not in name)
            # By `__dict__`, since `getattr` would have lazy modules import more.
            if isinstance(
                version := getattr(sys.modules.get(name), "__dict__", {}).get("__version__"), str
            )
        },
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if _VARIABLES.fullmatch(name) and not _LEFT_OUT.search(name)
        },
    }


class RunRecorder(Observer):
    """Writes `metadata/run.json` when a training begins: model, data, update, layout, environment, and the schedule of saves."""

    def __init__(self, runner: TorchRunner, data: RunData) -> None:
        self._runner = runner
        self._data = data
        self._made: dict[str, Any] = {}
        self._is_compared = False

    def note(self) -> None:
        """Remember criterion and data as the program has made them, before anything was restored: training may change both."""
        runner = self._runner
        if runner.is_main_process and not runner.config.checkpoint.load_only:
            splits = {**runner.datasets, **runner.dataloaders}
            self._made = {
                "criterion": _kind(runner.criterion),
                "data": {split: self._split(split) for split in splits},
            }

    def training_started(self) -> None:
        runner = self._runner
        model = self._model()  # on all ranks
        if runner.is_main_process and not runner.config.checkpoint.load_only:
            if not self._made:  # of an elastic rank that has become the main process
                self.note()
            division = self._data.division()
            optimizer: dict[str, object] | None = None
            if runner.optimizer is not None:
                groups = [_options(group) for group in runner.optimizer.param_groups]
                optimizer = {"kind": _kind(runner.optimizer), "groups": groups}
            record = {
                "model": model,
                "criterion": self._made["criterion"],
                "optimizer": optimizer,
                "scheduler": _kind(runner.scheduler),
                "data": self._made["data"],
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
                "checkpoints": {
                    "manager": _kind(runner.checkpoint_manager),
                    "interval": runner.checkpoint_interval,
                },
                "score": {
                    "split": runner.score_split,
                    "name": metric_of(runner.config.score_name, runner.score_split),
                },
                "seed": runner.seed,
            }
            # A program that calls `train_epoch` itself begins a training with each pass.
            if runner.state.train.global_step and not self._is_compared:
                self._warn_of_changes(record)
            self._is_compared = True
            runner.workspace.write_record(record)

    def _warn_of_changes(self, record: Mapping[str, Any]) -> None:
        """Warn once of parts of a resumed run that its record names otherwise, and that no setting and no checkpoint tells."""
        runner, source = self._runner, self._runner.config.resume
        # The record of this directory, or else that of the run whose checkpoint is resumed.
        places = [runner.workspace.dir]
        if source and "://" not in source:
            # A checkpoint is two levels below its run: `checkpoints/latest.pth`.
            places.insert(0, Path(source).absolute().parent.parent)
        earlier = next((found for place in places if (found := recorded(place))), {})
        changes = changed_parts(earlier, record)
        if changes:
            logger.warning(
                "The run continues with other parts than it was trained with: %s. They are in no setting, so nothing compares them.",
                "; ".join(changes),
            )

    def _model(self) -> dict[str, object]:
        """Describe the model. Ranks with other parameters, as the stages of a pipeline have, are added. One small collective."""
        runner = self._runner
        named = list(runner.named_parameters())
        sizes = [p.numel() for _, p in named]
        trained = [p.numel() for _, p in named if p.requires_grad]
        size_in_bytes = sum(p.numel() * p.element_size() for _, p in named)
        names = sha256("\n".join(name for name, _ in named).encode()).hexdigest()
        mine = (names, sum(sizes), sum(trained), size_in_bytes)
        # Copies of the same parameters count once.
        of_ranks = dict.fromkeys(runner.placement.optimizer.gather_objects(mine))
        by_part: Counter[str] = Counter()
        for name, parameter in named:
            by_part[name.partition(".")[0]] += parameter.numel()
        children = dict(runner.unwrapped_model.named_children())
        return {
            "kind": _layer(runner.unwrapped_model),
            "parameters": sum(each[1] for each in of_ranks),
            "trained": sum(each[2] for each in of_ranks),
            "bytes": sum(each[3] for each in of_ranks),
            "dtypes": sorted({str(p.dtype).removeprefix("torch.") for _, p in named}),
            "averaged": runner.ema is not None,
            "layers": dict(
                Counter(
                    _layer(each)
                    for each in runner.unwrapped_model.modules()
                    if not [*each.children()]
                )
            ),
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
        # An iterable dataset, or a length that torch cannot tell.
        except TypeError:
            samples = None
        shuffle = self._data.settings(split).get("shuffle", split in runner.train_splits)
        return {
            "kind": _kind(data),
            "samples": samples,
            "trained": split in runner.train_splits,
            "evaluated": split in runner.evaluate_splits,
            "loader": _kind(loader),
            "transform": _described(getattr(data, "transform", None)),
            "chosen": _chosen(data),
            "shuffled": bool(shuffle) if dataset is not None else None,
            "workers": getattr(loader, "num_workers", 0),
        }


def changed_parts(earlier: Mapping[str, Any], record: Mapping[str, Any]) -> list[str]:
    """Return a text for each part that two records of a run name differently; what the earlier one lacks is not compared."""
    pairs = [("criterion", earlier.get("criterion"), record["criterion"])]
    before = earlier.get("model") or {}
    now = record["model"]
    pairs.append(("model", before.get("kind"), now["kind"]))
    layers = before.get("layers")
    layers_now = now["layers"]
    # Rank 0 has other layers in another layout.
    if isinstance(layers, dict) and earlier.get("layout") == record["layout"]:
        for kind in sorted({*layers, *layers_now}, key=str):
            pairs.append((f"number of {kind} layers", layers.get(kind, 0), layers_now.get(kind, 0)))
    splits = earlier.get("data") or {}
    chosen = []
    for split, data in record["data"].items():
        of_split = splits.get(split) or {}
        for name, shown in (("kind", "dataset"), ("transform", "transform")):
            if name in of_split:
                pairs.append((f"{shown} of {split}", of_split[name], data[name]))
        pairs.append((f"number of samples of {split}", of_split.get("samples"), data["samples"]))
        was = of_split.get("chosen")
        if was is not None and data["chosen"] is not None and was != data["chosen"]:
            chosen.append(f"{split} has other samples of its dataset")
    texts = [
        f"{name} was {was}, is {value}"
        for name, was, value in pairs
        if was is not None and was != value
    ]
    return texts + chosen


def recorded(directory: Path) -> dict[str, Any]:
    """Return the record of the run in a directory; an empty one where there is none that can be read."""
    try:
        found = parse_json(read_text(directory / "metadata" / "run.json"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _described(value: object) -> str | None:
    """Return a short text that is the same in every process; `None` where an object has none."""
    # An address differs at each start, and would read as another transform.
    text = " ".join(repr(value).split())
    is_stable = value is not None and " at 0x" not in text
    return text[:_LONGEST_TEXT] if is_stable else _kind(value)


def _chosen(data: object) -> str | None:
    """Return a digest of the samples that a subset of a dataset has; `None` for other data, and where they are not named by numbers."""
    if not isinstance(data, Subset):
        return None
    try:
        # The program may have set another device as the default one.
        indices = torch.as_tensor(data.indices, dtype=torch.int64, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        return None
    return sha256(indices.numpy().tobytes()).hexdigest()[:16]


def _layer(module: object) -> str:
    """Return the class of a module; FSDP2 makes one of its own of it."""
    kinds = [kind.__qualname__ for kind in type(module).__mro__]
    return next((kind for kind in kinds if not kind.startswith("FSDP")), kinds[0])


def _kind(value: object) -> str | None:
    # A function or a class has a name; of another object, its class has one.
    return None if value is None else getattr(value, "__qualname__", type(value).__name__)


def _options(group: dict[str, Any]) -> dict[str, object]:
    """Return the options of a parameter group that are plain, and how many tensors it has."""
    plain = {
        name: value for name, value in group.items() if isinstance(value, (bool, int, float, str))
    }
    betas = {"betas": list(group["betas"])} if isinstance(group.get("betas"), (tuple, list)) else {}
    return {**plain, **betas, "tensors": len(group["params"])}

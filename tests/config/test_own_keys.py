"""Top-level keys of a program's own: declared, read, or refused with their place in the library's configuration."""

from __future__ import annotations

import copy
import pickle
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from torch import nn
from torch.utils.data import TensorDataset

import danling as dl
from danling.config.foreign import place_of
from danling.config.own import OwnKeys, WatchedSection

# What was tried on a runner and passed without a word, and the key that each of them meant.
TRIED = {
    "lr": "optim.lr",
    "learning_rate": "optim.lr",
    "weight_decay": "optim.weight_decay",
    "momentum": "optim.momentum",
    "betas": "optim.betas",
    "optimizer": "optim.type",
    "batch_size": "dataloader.batch_size",
    "per_device_train_batch_size": "dataloader.batch_size",
    "num_workers": "dataloader.num_workers",
    "shuffle": "dataloader.shuffle",
    "pin_memory": "dataloader.pin_memory",
    "max_epochs": "epochs",
    "num_train_epochs": "epochs",
    "max_steps": "steps",
    "accumulate_grad_batches": "accum_steps",
    "gradient_accumulation_steps": "accum_steps",
    "bf16": "precision",
    "fp16": "precision",
    "mixed_precision": "precision",
    "gradient_clip_val": "max_grad_norm",
    "grad_clip": "max_grad_norm",
    "output_dir": "workspace_root or dir",
    "default_root_dir": "workspace_root or dir",
    "eval_steps": "evaluate_interval",
    "save_steps": "checkpoint.interval",
    "save_total_limit": "checkpoint.keep_latest_k",
    "logging_steps": "log_interval",
    "log_every_n_steps": "log_interval",
    "warmup_steps": "scheduler.warmup_steps",
    "warmup_ratio": "scheduler.warmup_steps",
    "lr_scheduler_type": "scheduler.type",
    "ema_decay": "ema.decay",
    "resume_from_checkpoint": "auto_resume",
    "metric_for_best_model": "score_name",
    "keep_latest_k": "checkpoint.keep_latest_k or checkpoint.remote.keep_latest_k",
    "shard": "parallel.axes.shard",
}


class Own(dl.Runner):
    """A linear model; `reads` is what it asks its configuration for."""

    def __init__(self, config: Any, reads: Callable[[Any], Any] | None = None) -> None:
        super().__init__(config)
        if reads is not None:
            reads(self.config)
        self.model = nn.Linear(4, 2)
        self.criterion = nn.CrossEntropyLoss()
        self.datasets = {"train": TensorDataset(torch.zeros(8, 4), torch.zeros(8, dtype=torch.long))}


def settings(root: Path, **more: Any) -> dict[str, Any]:
    optim = {"type": "sgd", "lr": 0.1}
    base = {"steps": 1, "seed": 1, "log": False, "workspace_root": str(root), "optim": optim}
    return {**base, "dataloader": {"batch_size": 4}, **more}


def trained(config: Any, reads: Callable[[Any], Any] | None = None) -> int:
    with Own(config, reads) as runner:
        runner.train()
        return runner.state.train.global_step


def in_code(root: Path, **keys: Any) -> dl.RunnerConfig:
    config = dl.RunnerConfig(settings(root))
    for name, value in keys.items():
        setattr(config, name, value)
    return config


# The command line and files


@pytest.mark.parametrize(("name", "place"), TRIED.items())
def test_a_name_that_nobody_declares_is_refused_with_its_place(name: str, place: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(f"{name}: 3\n")
    with pytest.raises(ValueError, match=f"Received: --{name} 3. Its place is {place}"):
        dl.RunnerConfig().parse([f"--{name}", "3"])
    for read in (
        dl.RunnerConfig,
        dl.RunnerConfig.from_file,
        lambda path: dl.RunnerConfig().parse(["--config", str(path)]),
    ):
        with pytest.raises(ValueError, match=f"Received: {name}=3 in {file}. Its place is {place}"):
            read(file)
    assert place_of(name, dl.RunnerConfig) == place


def test_other_names_are_refused_with_the_nearest_and_the_mend() -> None:
    with pytest.raises(ValueError, match=r"--width 3, which neither.*A key of your own is declared in a class"):
        dl.RunnerConfig().parse(["--width", "3"])
    with pytest.raises(ValueError, match="That is said by torchrun --nproc-per-node N"):
        dl.RunnerConfig().parse(["--gpus", "2"])
    with pytest.raises(ValueError, match=r"--modle.width 3. Did you mean 'model'"):
        dl.RunnerConfig({"model.width": 4}).parse(["--modle.width", "3"])


def test_what_a_program_declares_is_its_own(tmp_path: Path) -> None:
    class Declared(dl.RunnerConfig):
        width: int = 3

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.depth = 2

    file = tmp_path / "settings.yaml"
    file.write_text("depth: 7\nwidth: 5\nmodel:\n  layers: 2\n")
    assert (Declared(file).depth, Declared(file).width) == (7, 5)
    parsed = Declared().parse(["--width", "4", "--depth", "5", "--net.kind", "b", "--net.size", "3"])
    assert (parsed.width, parsed.depth, parsed.net.kind) == (4, 5, "b")
    before = dl.RunnerConfig()
    before.lr = 0.1
    assert before.parse(["--lr", "0.2"]).lr == 0.2
    assert trained(Declared({**settings(tmp_path), "depth": 9})) == 1
    # The program's own parser has declared it.
    assert trained(dl.RunnerConfig(Namespace(lr=0.1, **settings(tmp_path)))) == 1


# Code


def test_a_value_that_nothing_has_read_is_refused_when_training_begins(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Received: lr=0.5. Its place is optim.lr"):
        trained(in_code(tmp_path, lr=0.5))
    with pytest.raises(ValueError, match=r"Received: width=3, which neither.*Read config.width in __init__"):
        trained(in_code(tmp_path, width=3))
    with pytest.raises(ValueError, match=r"Received: network="):
        trained(in_code(tmp_path, network={"width": 3}))
    with Own(in_code(tmp_path, lr=0.5)) as runner:  # not before
        assert runner.config.lr == 0.5


READS: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda config: config.lr,
    "item": lambda config: config["lr"],
    "get": lambda config: config.get("lr", 0.1),
    "getattr": lambda config: getattr(config, "lr", 0.1),
    "items": lambda config: list(config.items()),
    "values": lambda config: list(config.values()),
    "iteration": list,
    "keyword arguments": lambda config: (lambda **keys: keys)(**config),
    "a copy as a dictionary": dict,
    "plain values": lambda config: config.dict(),
}


@pytest.mark.parametrize("reads", READS.values(), ids=READS)
def test_any_reading_keeps_it(reads: Callable[[Any], Any], tmp_path: Path) -> None:
    assert trained(in_code(tmp_path, lr=0.5), reads) == 1
    outside = in_code(tmp_path, lr=0.5)
    reads(outside)  # by the program, on its own object
    assert trained(outside) == 1
    assert trained(pickle.loads(pickle.dumps(outside))) == 1
    original = in_code(tmp_path, lr=0.5)
    handed_on = copy.deepcopy(original)
    reads(original)
    assert trained(handed_on) == 1


def test_a_mapping_may_be_read_itself(tmp_path: Path) -> None:
    class Reads(Own):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.rate = config["lr"]

    with Reads(settings(tmp_path, lr=0.5)) as runner:
        assert runner.train() is runner.results
    with pytest.raises(ValueError, match=r"Received: lr=0.5. Its place is optim.lr"):
        trained(settings(tmp_path, lr=0.5))
    with pytest.warns(UserWarning, match=r"Received: width=3, which neither"):
        trained(settings(tmp_path, width=3))


def test_a_run_that_goes_on_keeps_its_keys(tmp_path: Path) -> None:
    config = in_code(tmp_path, width=3)
    with Own(config, lambda config: config.width) as runner:
        runner.train()
        latest = runner.workspace.checkpoints / "latest.pth"
    with Own.from_checkpoint(latest, {"steps": 2}) as runner:
        runner.train()
        assert runner.state.train.global_step == 2


def on_one_rank(root: Path) -> int:
    return trained(in_code(root, note="x"), lambda config: config.note if torch.distributed.get_rank() == 0 else None)


def test_what_one_rank_reads_is_read(tmp_path: Path) -> None:
    assert run_processes(on_one_rank, tmp_path, world_size=2) == [1, 1]


def test_a_section_notes_what_is_read_of_it_and_copies_share_the_notes() -> None:
    class Watched(WatchedSection):
        width: int = 3

        def _assign(self, name: Any, value: object) -> None:
            self._store(name, value)  # what is closed otherwise takes any key here

    section = Watched()
    section.__dict__["_own_keys"] = OwnKeys(declared={"named"})
    for name in ("width", "depth", "named", "off", "twin"):
        section.set(name, False if name == "off" else 1)
    assert section.unread() == {"depth", "twin"}
    assert "depth" not in vars(section) and section.depth == 1 and vars(section)["depth"] == 1
    assert section.unread() == {"twin"}
    assert section.copy().twin == 1 and section.unread() == set()
    section.set("later", 1)
    assert section.get("later.part") is None and section.unread() == set()
    section.set("last", 2)
    assert section.dict()["last"] == 2, "a program that takes all keys reads them"
    assert section.unread() == set()
    section.set("given", 2)
    section.claim(["given"])
    assert section.unread() == set()

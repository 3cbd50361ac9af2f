"""Top-level keys of a program's own: declared, set in code, or refused with their place in the library's configuration."""

from __future__ import annotations

import copy
import pickle
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import danling as dl
from danling.config.names import place_of
from danling.config.runner_config import continued

# What was tried on a runner and passed without a word, and the key that each of them meant.
PLACES = """
optim.lr: lr learning_rate
optim.weight_decay: weight_decay
optim.momentum: momentum
optim.betas: betas
optim.type: optimizer
dataloader.batch_size: batch_size per_device_train_batch_size
dataloader.num_workers: num_workers
dataloader.shuffle: shuffle
dataloader.pin_memory: pin_memory
epochs: max_epochs num_train_epochs
steps: max_steps
accum_steps: accumulate_grad_batches gradient_accumulation_steps
precision: bf16 fp16 mixed_precision
max_grad_norm: gradient_clip_val grad_clip
workspace_root or dir: output_dir default_root_dir
evaluate_interval: eval_steps
checkpoint.interval: save_steps
checkpoint.keep_latest_k: save_total_limit
log_interval: logging_steps log_every_n_steps
scheduler.warmup_steps: warmup_steps warmup_ratio
scheduler.type: lr_scheduler_type
ema.decay: ema_decay
auto_resume: resume_from_checkpoint
score_name: metric_for_best_model
checkpoint.keep_latest_k or checkpoint.remote.keep_latest_k: keep_latest_k
parallel.axes.shard: shard
"""
TRIED = {name: place for place, names in yaml.safe_load(PLACES).items() for name in names.split()}


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
    with pytest.raises(ValueError, match=r"--width 3, which neither.*For your own key, declare it in a class"):
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
            self.depth, self.lr = 2, 0.1
            self.optimizer = {"kind": "x"}

    file = tmp_path / "settings.yaml"
    file.write_text("depth: 7\nwidth: 5\nlr: 0.2\nmodel:\n  layers: 2\noptimizer:\n  kind: y\n")
    read = Declared(file)
    assert (read.depth, read.width, read.lr, read.model.layers, read.optimizer.kind) == (7, 5, 0.2, 2, "y")
    parsed = Declared().parse(["--width", "4", "--depth", "5", "--lr", "0.4", "--net.kind", "b", "--net.size", "3"])
    assert (parsed.width, parsed.depth, parsed.lr, parsed.net.kind) == (4, 5, 0.4, "b")
    before = dl.RunnerConfig()
    before.rate = 0.1
    assert before.parse(["--rate", "0.2"]).rate == 0.2
    assert (Declared({"depth": 9, "lr": 0.5}).depth, Declared(lr=0.3).lr, Declared().lr) == (9, 0.3, 0.1)


class Rate(dl.RunnerConfig):
    lr: float = 0.1


SET: dict[str, Callable[[], Any]] = {
    "attribute": lambda: setattr(dl.RunnerConfig(), "lr", 0.5),
    "item": lambda: dl.RunnerConfig().set("lr", 0.5),
    "nested": lambda: dl.RunnerConfig().set("lr.first", 0.5),
    "read as a section": lambda: dl.RunnerConfig().lr,
    "mapping": lambda: dl.RunnerConfig({"lr": 0.5}),
    "nested mapping": lambda: dl.RunnerConfig({"lr.first": 0.5}),
    "argument": lambda: dl.RunnerConfig(lr=0.5),
    "merge": lambda: dl.RunnerConfig().merge({"lr": 0.5}),
    "another class": lambda: Rate(momentum=0.5, lr=0.1),
    "runner": lambda: dl.Runner({"lr": 0.5}),
}


@pytest.mark.parametrize("way", SET.values(), ids=SET)
def test_a_name_of_other_trainers_is_refused_in_code_too(way: Callable[[], Any]) -> None:
    with pytest.raises((ValueError, AttributeError), match=r"Its place is optim\.(lr|momentum)"):
        way()


def test_a_dotted_option_of_a_parser_reaches_into_its_section() -> None:
    config = dl.RunnerConfig(Namespace(**{"optim.lr": 0.5, "model.width": 3, "data.path": "x"}))
    assert config.changed() == {"optim": {"lr": 0.5}, "model": {"width": 3}, "data": {"path": "x"}}


def test_a_name_that_a_class_or_a_parser_declares_is_the_programs() -> None:
    assert Rate().parse(["--lr", "0.2"]).lr == 0.2
    parsed = dl.RunnerConfig(Namespace(lr=0.5))
    for config in (parsed, copy.deepcopy(parsed), pickle.loads(pickle.dumps(parsed)), dl.RunnerConfig(parsed)):
        assert config.lr == 0.5
        config.lr = 0.25
        assert config.lr == 0.25
    assert continued({"lr": 0.5}, None, dl.RunnerConfig).lr == 0.5, "a run that goes on keeps its keys"
    assert continued({"lr": 0.5}, dl.RunnerConfig(seed=1), dl.RunnerConfig).lr == 0.5


def test_other_names_in_code_are_the_users() -> None:
    config = dl.RunnerConfig({"width": 3, "net.depth": 2})
    config.note = "x"
    config.model.layers = 4
    assert (config.width, config.net.depth, config.note, config.model.layers) == (3, 2, "x", 4)


def test_a_decimal_with_leading_zeros_is_a_number_and_a_word_is_none() -> None:
    config = dl.RunnerConfig().parse(["--model.rate", "00.5", "--model.code", "05", "--model.name", "infinity"])
    assert config.model == {"rate": 0.5, "code": "05", "name": "infinity"}

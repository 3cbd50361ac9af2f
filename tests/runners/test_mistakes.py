"""Mistakes of users, each made for real, and the one line that each is answered with."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.torchrun import run_torchrun
from torch import nn
from torch.utils.data import TensorDataset

import danling as dl
from danling.checkpoints import CheckpointNotFound
from danling.cli.main import main

INPUTS, TARGETS = torch.randn(16, 4), torch.randint(2, (16,))
DATA = TensorDataset(INPUTS, TARGETS)


OPENED: list[dl.Runner] = []


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    """Close the runners that a mistake has left open, as the end of a program would."""
    yield
    while OPENED:
        OPENED.pop().close()


class Toy(dl.Runner):
    """A linear classifier; `parts` replace what it is made of."""

    def __init__(self, config: Any, **parts: Any) -> None:
        super().__init__(config)
        OPENED.append(self)
        self.model = nn.Linear(4, 2)
        self.criterion = nn.CrossEntropyLoss()
        self.datasets = {"train": DATA, "val": DATA}
        for name, part in parts.items():
            setattr(self, name, part)


def settings(**more: Any) -> dict[str, Any]:
    base = {"epochs": 2, "seed": 1, "log": False, "dataloader": {"batch_size": 4}, "optim": {"type": "sgd", "lr": 0.1}}
    return {**base, **more}


def train(config: Any = None, runner_class: Any = Toy, **parts: Any) -> None:
    with runner_class(settings() if config is None else config, **parts) as runner:
        runner.train()


def toy(**methods: Any) -> Any:
    """A toy with other methods."""
    return type("Toy", (Toy,), methods)


Mistake = tuple[Callable[[], Any], str]

# The command line of a program: the words, and what stands in the last line of stderr before exit code 2.
COMMAND_LINE = {
    "--epoch 3": "Did you mean 'epochs'?",
    "--epochs abc": "Expected --epochs to be an integer or none. Received: abc.",
    "--epochs": "Expected --epochs to be an integer or none. Received: no value.",
    "--epochs 1 2": "Expected --epochs to be an integer or none. Received: 1 2.",
    "--epochs -1": "Expected --epochs to be a number >= 0. Received: -1.",
    "--config gone.yaml": "Expected a file with settings. Received: 'gone.yaml', which does not exist.",
    "--config": "Expected --config FILE. Received: no file.",
    "--config train.py": "Expected a file that ends in .yaml, .yml, .json, .toml. Received: 'train.py'.",
    "settings.yaml": "Did you mean '--config settings.yaml'?",
    "epochs=3": "Expected --KEY VALUE. Received: 'epochs=3' with no key before it.",
    "-epochs 3": "Did you mean '--epochs'?",
    "--lr 1e-3": "Its place is optim.lr.",
    "--learning-rate 1e-3": "Its place is optim.lr.",
    "--batch_size 8": "Its place is dataloader.batch_size.",
    "--num_workers 2": "Its place is dataloader.num_workers.",
    "--max_epochs 3": "Its place is epochs.",
    "--bf16 true": "Its place is precision.",
    "--output_dir out": "Its place is workspace_root or dir.",
    "--gradient_accumulation_steps 2": "Its place is accum_steps.",
    "--nproc_per_node 2": "That is said by torchrun --nproc-per-node N.",
    "--foo 3": "which neither the library nor the program knows.",
    "--optim.lr fast": "Expected --optim.lr to be a number. Received: fast.",
    "--checkpoint.keep_last_k 2": "Did you mean 'keep_latest_k'?",
    "--checkpoint 5": "Expected keys of the section 'checkpoint'.",
    "--ema true": "Write --ema.enabled true.",
    "--precision fp8": "Expected --precision to be one of 'fp16', 'bf16'.",
    "--stack horovod": "Expected stack to be one of",
    "--max_time soon": "Expected max_time to be seconds or 'HH:MM:SS'.",
    "--steps 3 --epochs 4": "Expected steps or epochs, not both.",
    "--log maybe": "Expected --log to be true or false. Received: maybe.",
    "--wandb.mode of": "Expected --wandb.mode to be one of 'online', 'offline'",
    "--seed 1.5": "Expected --seed to be an integer or none. Received: 1.5.",
    "--parallel.axes.shards 2": "Did you mean 'shard'?",
    "--ema.decay 2": "Expected --ema.decay to be a number >= 0 and < 1.",
    "--gc.generation 7": "Expected --gc.generation to be a number >= 0 and <= 2.",
    "--accum_steps 0": "Expected --accum_steps to be a number >= 1.",
    "--max_grad_norm 0": "Expected --max_grad_norm to be a number > 0.",
    "--checkpoint.export_dtype int8": "checkpoint.export_dtype",
    "--scheduler.interval day": "Expected --scheduler.interval to be one of 'step'",
    "--dataloader.train.batch_size big": "Expected --dataloader.train.batch_size to be an integer or none.",
}

# The command `danling`: the words, the exit code, and what it says on stderr.
DANLING = {
    "plott": (2, "unknown command 'plott'. Did you mean 'plot'? The commands are env, doctor,"),
    "": (2, "the following arguments are required: COMMAND"),
    "runs --sortt best": (2, "danling runs: error: unrecognized arguments: --sortt"),
    "inspect gone.pth": (3, "Expected a checkpoint file or directory. Received: 'gone.pth', where there is none."),
    "verify gone": (3, "Received: 'gone'"),
    "export gone.pth out.pth": (3, "Received: 'gone.pth'"),
    "export gone.pth out.onnx": (2, "Expected an output that ends in .safetensors, .pth"),
    "export gone.pth out.gguf": (2, "Other formats are not written here"),
    "export gone.pth out --max-shard-size big": (2, "Expected a size such as 5GB or 2GiB. Received: 'big'."),
    "estimate": (2, "danling: Expected"),
    "doctor --timeout -1": (2, "Expected a number of seconds above 0. Received: '-1'."),
    "doctor --skip cuda": (2, "invalid choice: 'cuda'"),
    "plot nowhere": (3, "nowhere"),
}

CONFIGURATION: dict[str, Mistake] = {
    "a key one slip away": (lambda: train(settings(epoch=3)), "Did you mean 'epochs'"),
    "an unknown key of a section": (lambda: train(settings(checkpoint={"keep": 3})), "Expected a key of 'checkpoint'"),
    "a section that is a value": (lambda: train(settings(ema="yes")), "Expected 'ema' to be a section"),
    "a float for an integer": (
        lambda: train(settings(epochs=1.5)),
        "Expected epochs to be an integer or none. Received: epochs=1.5",
    ),
    "a word for a number": (
        lambda: train(settings(epochs="ten")),
        "Expected epochs to be an integer or none. Received: epochs='ten'",
    ),
    "a truth value for a number": (lambda: train(settings(epochs=True)), "Expected epochs to be an integer or none."),
    "no budget": (lambda: train(settings(epochs=None)), "Expected a budget: `steps` (optimizer updates) or `epochs`."),
    "both budgets": (lambda: train(settings(steps=3)), "Expected steps or epochs, not both."),
    "a file that is not there": (lambda: train("nowhere.yaml"), "Received: 'nowhere.yaml', which does not exist."),
    "a word for a number in a file": (
        lambda: train(_file("epochs: ten\n")),
        "Expected epochs to be an integer or none. Received: epochs='ten' (str). It is in 'config.yaml'.",
    ),
    "a choice that is none in a file": (
        lambda: train(_file("wandb: {mode: of}\n")),
        "'shared'. Received: wandb.mode='of' (str). It is in 'config.yaml'.",
    ),
    "a bound in a file of the command line": (
        lambda: dl.RunnerConfig().parse(["--config", _file("checkpoint.interval: 0\n")]),
        "Expected checkpoint.interval to be a number >= 1. Received: checkpoint.interval=0 (int). It is in 'config.yaml'.",
    ),
    "a number for the configuration": (
        lambda: train(3),
        "Expected a mapping or the path of a file. Received: 3 (int).",
    ),
    "a list for the configuration": (
        lambda: train([1]),
        "Expected a mapping or the path of a file. Received: [1] (list).",
    ),
    "lr at the top": (lambda: train(settings(lr=0.1)), "Received: lr=0.1. Its place is optim.lr."),
    "batch_size at the top": (lambda: train(settings(batch_size=4)), "Its place is dataloader.batch_size."),
    "max_epochs": (lambda: train(settings(max_epochs=4)), "Its place is epochs."),
    "num_train_epochs": (lambda: train(settings(num_train_epochs=4)), "Its place is epochs."),
    "a precision that is none": (
        lambda: train(settings(precision="bf17")),
        "Expected precision to be one of 'fp16', 'bf16'.",
    ),
    "a stack that is none": (lambda: train(settings(stack="horovod")), "Expected stack to be one of"),
    "a platform that is none": (lambda: train(settings(platform="xyz")), "Expected stack to be one of"),
    "a section for fp8": (lambda: train(settings(fp8={"enabled": True})), "Expected no section fp8"),
    "axes for one process": (
        lambda: train(settings(stack="parallel", parallel={"axes": {"shard": 2}})),
        "Expected the product of the parallel axes to be the world size 1.",
    ),
    "a score that is not computed": (
        lambda: train(settings(score_name="acc")),
        "Expected the score val.acc among the metrics",
    ),
    "a score of no split": (
        lambda: train(settings(score_split="test")),
        "Expected a split out of ['train', 'val']. Received: split='test'.",
    ),
    "a split that is not there": (
        lambda: train(settings(train_splits=["trian"])),
        "Received: split='trian'. Did you mean 'train'?",
    ),
    "a decay of one and a half": (
        lambda: train(settings(ema={"enabled": True, "decay": 1.5})),
        "Expected ema.decay to be a number >= 0 and < 1.",
    ),
    "a frozen configuration": (lambda: setattr(dl.RunnerConfig().freeze(), "epochs", 3), "Call defrost()."),
    "a reference to nothing": (
        lambda: dl.RunnerConfig({"name": "${nothing}"}).boot(),
        "Expected a key that exists in ${nothing}",
    ),
    "a directory that cannot be made": (
        lambda: train(settings(dir="/proc/no/where")),
        "Expected a run directory that can be",
    ),
    "a directory that is a file": (lambda: train(settings(dir=__file__)), "Expected a directory, or nothing yet"),
    "a root that is a file": (lambda: train(settings(workspace_root=__file__)), "Expected a directory, or nothing yet"),
}

MODEL: dict[str, Mistake] = {
    "no model": (lambda: train(model=None), "Expected `self.model` to be a torch.nn.Module"),
    "a class for a model": (lambda: train(model=nn.Linear), "Make an instance of it."),
    "a function for a model": (lambda: train(model=torch.relu), "Expected `self.model` to be a torch.nn.Module"),
    "a lazy layer": (
        lambda: train(model=nn.LazyLinear(2)),
        "Received: 'weight' of a lazy layer, which is made by the first batch.",
    ),
    "another width": (lambda: train(model=nn.Linear(5, 2)), "mat1 and mat2 shapes cannot be multiplied (4x4 and 5x2)"),
    "nothing to train": (
        lambda: train(model=nn.Linear(4, 2).requires_grad_(False)),
        "Expected at least one parameter that requires a gradient",
    ),
    "no super().__init__": (
        lambda: train(runner_class=toy(__init__=lambda self, config: None)),
        "to call super().__init__(config) first.",
    ),
    "super().__init__() without the configuration": (
        lambda: train(runner_class=toy(__init__=lambda self, config: dl.Runner.__init__(self))),
        "Toy.__init__ received a configuration and called super().__init__() without it.",
    ),
    "a name of the library's": (lambda: train(window=3), "where 'window' is a name of the library's"),
    "a private method": (
        lambda: train(runner_class=toy(_closers=lambda self: None)),
        "where '_closers' is a name of the library's",
    ),
    "training after close": (
        lambda: _closed().train(),
        "Expected a runner that is open. Received: train() after close()",
    ),
}

LOSS: dict[str, Mistake] = {
    "a name": (lambda: train(criterion="mse"), "Expected `self.criterion` to be a callable"),
    "a class": (lambda: train(criterion=nn.MSELoss), "Received: the class MSELoss. Write MSELoss()."),
    "none": (
        lambda: train(criterion=None, datasets={"train": DATA}),
        "Expected a criterion, or a model that returns a loss.",
    ),
    "one for each sample": (
        lambda: train(criterion=nn.CrossEntropyLoss(reduction="none"), datasets={"train": DATA}),
        "Received: shape (4,). Give the criterion reduction='mean' instead of 'none'",
    ),
    "a float": (lambda: train(criterion=lambda pred, target: 1.0), "Expected a loss of one value. Received: loss=1.0."),
    "nothing": (
        lambda: train(criterion=lambda pred, target: None, datasets={"train": DATA}),
        "Expected a loss of one value. Received: loss=None.",
    ),
    "none to evaluate with": (
        lambda: train(criterion=None),
        "it needs `self.criterion`, or a model that returns its loss.",
    ),
    "one for each sample, evaluated": (
        lambda: train(criterion=nn.CrossEntropyLoss(reduction="none")),
        "Received: shape (4,). Give the criterion reduction='mean' instead of 'none'",
    ),
    "without a gradient": (
        lambda: train(criterion=lambda pred, target: pred.sum().detach()),
        "Expected a loss that depends on parameters",
    ),
    "not finite": (
        lambda: train(criterion=lambda pred, target: pred.sum() * float("nan")),
        "Expected a finite loss and gradient at step 1",
    ),
    "a target of floats": (
        lambda: train(datasets={"train": TensorDataset(INPUTS, TARGETS.float())}),
        "expected target dtype to be Long or Byte, but got Float",
    ),
    "a class too many": (lambda: train(datasets={"train": TensorDataset(INPUTS, TARGETS + 5)}), "is out of bounds"),
    "no backward": (
        lambda: train(runner_class=toy(train_step=lambda self, data: self.criterion(self.model(data[0]), data[1]))),
        "Call self.backward(loss) before you return; a loss that is only returned",
    ),
    "evaluate_step with one value": (
        lambda: train(runner_class=toy(evaluate_step=lambda self, data: self.model(data[0]))),
        "Expected `evaluate_step` to return the prediction and the loss, each of which may be None. Received: Tensor.",
    ),
    "evaluate_step with none": (
        lambda: train(runner_class=toy(evaluate_step=lambda self, data: None)),
        "each of which may be None. Received: NoneType.",
    ),
    "evaluate_step with three": (
        lambda: train(runner_class=toy(evaluate_step=lambda self, data: (1, 2, 3))),
        "each of which may be None. Received: 3 values.",
    ),
}

DATASETS: dict[str, Mistake] = {
    "no data": (lambda: train(datasets={}), "Expected at least one split to train on."),
    "one dataset": (lambda: train(datasets=DATA), "Expected `self.datasets` to be a mapping by split."),
    "one loader": (lambda: train(dataloaders=[DATA]), "Expected `self.dataloaders` to be a mapping by split."),
    "none": (
        lambda: train(datasets={"train": None}),
        "Expected `self.datasets['train']` to hold samples. Received: None.",
    ),
    "a path": (
        lambda: train(datasets={"train": "data/train"}),
        "Expected `self.datasets['train']` to hold samples. Received: 'data/train'.",
    ),
    "a class": (lambda: train(datasets={"train": TensorDataset}), "Expected `self.datasets['train']` to hold samples."),
    "no length": (
        lambda: train(datasets={"train": object()}),
        "Expected the dataset of split 'train' to have a length.",
    ),
    "empty": (
        lambda: train(datasets={"train": TensorDataset(INPUTS[:0], TARGETS[:0])}),
        "Expected split 'train' to have samples. Received: an empty dataset",
    ),
    "a misspelled split": (
        lambda: train(datasets={"trian": DATA, "val": DATA}),
        "Did you mean 'train' instead of 'trian'?",
    ),
    "a section of a misspelled split": (
        lambda: train(settings(dataloader={"batch_size": 4, "trian": {"batch_size": 2}})),
        "Received: 'trian' for split 'train'. Did you mean 'train'?",
    ),
    "only val": (
        lambda: train(datasets={"val": DATA}),
        "Expected at least one split to train on. Received: datasets=['val']",
    ),
    "three columns": (
        lambda: train(datasets={"train": TensorDataset(INPUTS, INPUTS, TARGETS)}),
        "Expected a batch of the form (input, target). Received: a sequence of length 3.",
    ),
    "no target": (lambda: train(datasets={"train": list(INPUTS)}), "Expected a batch with a target for the criterion"),
    "a mapping without a target": (
        lambda: train(datasets={"train": [{"input": row} for row in INPUTS]}),
        "Expected a batch with a target for the criterion",
    ),
    "a generator as a loader": (
        lambda: train(datasets={}, dataloaders={"train": ((INPUTS, TARGETS) for _ in range(3))}),
        "can be iterated again in each of 2 epochs. Received: a generator",
    ),
    "a generator as a dataset": (
        lambda: train(datasets={"train": (row for row in DATA)}),
        "can be iterated again in each of 2 epochs. Received: a generator",
    ),
    "batches larger than the data": (
        lambda: train(settings(dataloader={"batch_size": 64})),
        "Expected split 'train' to hold at least one global batch of 64 samples",
    ),
    "a batch of none": (
        lambda: train(settings(dataloader={"batch_size": 0})),
        "to be a number >= 1. Received: dataloader.batch_size=0",
    ),
    "a batch in a string": (
        lambda: train(settings(dataloader={"batch_size": "4"})),
        "Expected dataloader.batch_size to be an integer or none. Received: dataloader.batch_size='4' (str).",
    ),
    "half a sample": (lambda: train(settings(dataloader={"batch_size": 2.5})), "to be an integer or none. Received"),
    "fewer than no workers": (
        lambda: train(settings(dataloader={"batch_size": 4, "num_workers": -1})),
        "num_workers option should be non-negative",
    ),
    "an unknown loader setting": (
        lambda: train(settings(dataloader={"batch_size": 4, "colate_fn": list})),
        "Did you mean 'collate_fn'",
    ),
    "both batch sizes": (
        lambda: train(settings(dataloader={"batch_size": 4, "global_batch_size": 8})),
        "not both. Received: batch_size=4",
    ),
    "evaluating what is not there": (
        lambda: Toy(settings()).evaluate("vall"),
        "Expected a split out of ['train', 'val']. Received: split='vall'.",
    ),
    "fewer than no batches": (lambda: Toy(settings()).evaluate_steps("val", -1), "steps=-1"),
    "inferring what is not there": (
        lambda: Toy(settings()).infer("tset"),
        "Expected a split out of ['train', 'val']. Received: split='tset'.",
    ),
}

METRICS: dict[str, Mistake] = {
    "a name": (
        lambda: train(metrics="acc"),
        "to be a callable (pred, target) or an object with update, compute and reset. Received: 'acc'",
    ),
    "a list": (
        lambda: train(metrics=[dl.metrics.accuracy]),
        "to be a callable (pred, target) or an object with update",
    ),
    "called loss": (
        lambda: train(metrics={"loss": dl.metrics.accuracy}),
        "Expected metrics with names that are not taken.",
    ),
    "a word": (lambda: train(metrics={"a": lambda pred, target: "x"}), "Expected metric 'a' to return a mean"),
    "a matrix": (lambda: train(metrics={"a": lambda pred, target: pred}), "Expected metric 'a' to return a mean"),
    "one argument": (lambda: train(metrics={"a": lambda pred: 1.0}), "takes 1 positional argument but 2 were given"),
}

OPTIMIZER: dict[str, Mistake] = {
    "none": (lambda: train(settings(optim={})), "Expected an optimizer. Received: optimizer=None."),
    "a name": (
        lambda: train(optimizer="adam"),
        "Expected `self.optimizer` to be a torch.optim.Optimizer. Received: optimizer='adam'.",
    ),
    "a class": (lambda: train(optimizer=torch.optim.Adam), "Expected `self.optimizer` to be a torch.optim.Optimizer."),
    "a list": (
        lambda: train(optimizer=[torch.optim.SGD(nn.Linear(1, 1).parameters())]),
        "Expected `self.optimizer` to be one optimizer.",
    ),
    "of another model": (
        lambda: train(optimizer=torch.optim.SGD(nn.Linear(4, 2).parameters())),
        "Expected an optimizer over parameters of the model.",
    ),
    "a slip": (lambda: train(settings(optim={"type": "adamm"})), "Did you mean 'adam'?"),
    "no type": (lambda: train(settings(optim={"lr": 0.1})), "Expected optimizer type to be one of"),
    "an unknown option": (lambda: train(settings(optim={"type": "sgd", "lr": 0.1, "beta": 1})), "Received: 'beta'."),
    "another name of the rate": (
        lambda: train(settings(optim={"type": "sgd", "learning_rate": 0.1})),
        "Received: 'learning_rate'. Did you mean 'lr'?",
    ),
    "a rate in words": (
        lambda: train(settings(optim={"type": "sgd", "lr": "fast"})),
        "Expected optim.lr to be a number. Received: optim.lr='fast' (str).",
    ),
    "a negative rate": (lambda: train(settings(optim={"type": "sgd", "lr": -1})), "Invalid learning rate: -1"),
    "a pattern that matches nothing": (
        lambda: train(settings(optim={"type": "sgd", "lr": 0.1, "param_groups": [{"pattern": "backbone"}]})),
        "Expected the pattern of an optim.param_groups entry to match a parameter",
    ),
    "a closure": (
        lambda: train(runner_class=toy(build_optimizer=_lbfgs)),
        "Expected an optimizer whose step takes the gradient as it is.",
    ),
    "a schedule without a type": (
        lambda: train(settings(scheduler={"warmup": 10})),
        "Expected scheduler.type next to other keys of the section. Received: scheduler.warmup=10.",
    ),
    "a schedule with a slip": (lambda: train(settings(scheduler={"type": "cosin"})), "Did you mean 'cosine'?"),
    "an unknown option of a schedule": (
        lambda: train(settings(scheduler={"type": "cosine", "warmup": 10})),
        "Did you mean 'warmup_steps'?",
    ),
    "a class of a schedule": (
        lambda: train(scheduler=torch.optim.lr_scheduler.StepLR),
        "Expected `self.scheduler` to be a scheduler with a method step().",
    ),
    "the name of a schedule": (
        lambda: train(scheduler="cosine"),
        "Expected `self.scheduler` to be a scheduler with a method step().",
    ),
    "a step in train_step": (lambda: train(runner_class=toy(train_step=_steps)), "Remove optimizer.step()"),
    "a plateau on steps": (
        lambda: train(settings(scheduler={"type": "reducelronplateau", "interval": "step"})),
        "Expected scheduler.interval to be 'epoch' or 'validation'",
    ),
}

CHECKPOINTS: dict[str, Mistake] = {
    "to go on from nothing": (lambda: train(settings(resume="nowhere.pth")), "Received: 'nowhere.pth'."),
    "weights that are not there": (lambda: train(settings(pretrained="nowhere.pth")), "Received: 'nowhere.pth'."),
    "weights of Lightning": (
        lambda: train(settings(pretrained=_lightning())),
        "The checkpoint has these names behind the prefix 'net.'. Save its weights without it: torch.save({name[4:]: weight",
    ),
    "weights that are junk": (lambda: train(settings(pretrained=__file__)), "Expected a file of torch.save. Received:"),
    "junk to go on from": (
        lambda: train(settings(resume=__file__)),
        "as it was written. Received: it is no whole archive",
    ),
    "a directory without one": (lambda: train(settings(resume="/usr")), "Expected a checkpoint"),
    "a name with a slip": (lambda: Toy(settings()).load_checkpoint("latst"), "Received: 'latst'."),
    "an unknown backend": (
        lambda: train(settings(checkpoint={"backend": "zip"})),
        "Expected checkpoint.backend to be one of 'auto', 'file'",
    ),
    "an unknown mode": (
        lambda: train(settings(checkpoint={"async_mode": "fast"})),
        "Expected checkpoint.async_mode to be one of",
    ),
    "an interval of nothing": (
        lambda: train(settings(checkpoint={"interval": 0})),
        "Expected checkpoint.interval to be a number >= 1.",
    ),
    "a dtype that is none": (
        lambda: train(settings(checkpoint={"export_dtype": "float99"})),
        "checkpoint.export_dtype",
    ),
    "a word for trust": (
        lambda: train(settings(checkpoint={"trust": "me"})),
        "Expected checkpoint.trust to be true or false.",
    ),
    "a number of secrets": (lambda: train(settings(secret_keys=3)), "Expected secret_keys to be a list of a string"),
    "a directory twice at once": (
        lambda: (Toy(settings(dir="run")), Toy(settings(dir="run"))),
        "to be free. Received: a directory that is in use by process",
    ),
    "bare weights to go on from": (
        lambda: train(settings(resume=_bare())),
        "bare.pth, which has no format_version. Load bare weights with `pretrained`",
    ),
    "from_checkpoint of nothing": (lambda: Toy.from_checkpoint("nowhere.pth"), "nowhere.pth"),
}

ENVIRONMENT = {
    "a word for the world size": (
        {"RANK": "0", "WORLD_SIZE": "two"},
        "Expected the environment variable WORLD_SIZE to be an integer.",
    ),
    "a rank beyond the world": (
        {"RANK": "2", "WORLD_SIZE": "2"},
        "Expected 0 <= RANK < WORLD_SIZE. Received: RANK=2, WORLD_SIZE=2.",
    ),
}

IN_PROCESS = {
    f"{area}: {name}": mistake
    for area, table in {
        "configuration": CONFIGURATION,
        "model": MODEL,
        "loss": LOSS,
        "data": DATASETS,
        "metrics": METRICS,
        "optimizer": OPTIMIZER,
        "checkpoints": CHECKPOINTS,
    }.items()
    for name, mistake in table.items()
}


def _closed() -> Toy:
    runner = Toy(settings())
    runner.close()
    return runner


def _file(text: str) -> str:
    Path("config.yaml").write_text(text)
    return "config.yaml"


def _lightning() -> str:
    """Write a checkpoint of which the model is an attribute of a module that has a further part."""
    module = nn.ModuleDict({"net": nn.Linear(4, 2), "teacher": nn.Linear(4, 2)})
    torch.save({"state_dict": module.state_dict(), "pytorch-lightning_version": "2.6.6"}, "last.ckpt")
    return "last.ckpt"


def _bare() -> str:
    torch.save(nn.Linear(4, 2).state_dict(), "bare.pth")
    return "bare.pth"


def _lbfgs(self: Any) -> Any:
    return torch.optim.LBFGS(self.model.parameters())


def _steps(self: Any, data: Any) -> Any:
    returned = dl.TorchRunner.train_step(self, data)
    self.optimizer.step()
    return returned


def test_there_are_as_many_as_promised() -> None:
    assert len(COMMAND_LINE) + len(DANLING) + len(IN_PROCESS) + len(ENVIRONMENT) + len(LAUNCHES) >= 120


@pytest.mark.parametrize(("words", "said"), COMMAND_LINE.items(), ids=COMMAND_LINE)
def test_a_command_line_ends_with_usage_one_line_and_code_2(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", *words.split()])
    with pytest.raises(SystemExit) as left:
        dl.RunnerConfig().parse()
    usage, error = capsys.readouterr().err.splitlines()
    assert left.value.code == 2
    assert usage.startswith("usage: train.py ")
    assert error.startswith("train.py: error: ") and said in error
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("words", "ending"), DANLING.items(), ids=DANLING)
def test_the_command_says_it_in_one_line(
    words: str,
    ending: tuple[int, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code = main(words.split())
    except SystemExit as left:
        code = int(str(left.code))
    said = capsys.readouterr().err
    assert (code, ending[1] in said.splitlines()[-1]) == (ending[0], True), said
    assert "Traceback" not in said
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("mistake", "said"), IN_PROCESS.values(), ids=IN_PROCESS)
def test_a_mistake_is_an_exception_that_says_it_in_one_line(
    mistake: Callable[[], Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    with pytest.raises(Exception) as caught:
        mistake()
    assert said in str(caught.value)
    assert len(str(caught.value).strip().splitlines()) == 1
    # What was trained before the mistake shows is kept; a run that never began leaves no checkpoint.
    assert not list(tmp_path.rglob("ckpt-*"))


STEPS: dict[str, tuple[Callable[[], Any], str]] = {
    "train_step": (
        lambda: train(datasets={"train": TensorDataset(INPUTS.double(), TARGETS)}),
        "train_step on split 'train' received (float64 (4, 4) on cpu, int64 (4,) on cpu)",
    ),
    "evaluate_step": (
        lambda: train(datasets={"train": DATA, "val": [{"input": row[:3], "y": 1} for row in INPUTS]}),
        "evaluate_step on split 'val' received {'input': float32 (4, 3) on cpu, 'y': int64 (4,) on cpu}",
    ),
}


@pytest.mark.parametrize(("mistake", "said"), STEPS.values(), ids=STEPS)
def test_an_error_of_a_step_names_what_the_step_received(
    mistake: Callable[[], Any],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        mistake()
    above, ending = capfd.readouterr().err.splitlines()[-2:]
    assert above.endswith(said) and "Failed with RuntimeError: no update in" in ending
    assert caught.value.__notes__ == [said]  # type: ignore[attr-defined]


def test_training_at_the_end_of_the_budget_says_what_makes_it_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with Toy(settings()) as runner:
        runner.train()
        assert "Nothing is left" not in capfd.readouterr().err
        runner.train()
    assert "the run has completed 2 of 2 epochs. Raise epochs to go on." in capfd.readouterr().err


def test_a_missing_checkpoint_to_resume_from_makes_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointNotFound, match="Expected resume to be a checkpoint: .* Received: 'gone.pth'"):
        Toy(settings(resume="gone.pth"))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("variables", "said"), ENVIRONMENT.values(), ids=ENVIRONMENT)
def test_a_wrong_environment_is_named(
    variables: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="Expected") as caught:
        train()
    assert said in str(caught.value)
    assert os.listdir(tmp_path) == []


# Launches: the program makes the mistake that its first argument names.

PROGRAM = """
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
import danling as dl


class Toy(dl.Runner):
    def __init__(self, config):
        super().__init__(config)
        self.model = nn.Linear(5 if sys.argv[1] == "shape" else 4, 2)
        self.criterion = nn.CrossEntropyLoss()
        self.datasets = {"train": TensorDataset(torch.randn(16, 4), torch.randint(2, (16,)))}


def main():
    config = dl.RunnerConfig(epochs=1, seed=1, log=False, dataloader={"batch_size": 4}, optim={"type": "sgd", "lr": 0.1})
    config.parse(None if sys.argv[1] != "shape" else [])
    with Toy(config) as runner:
        runner.train()


if __name__ == "__main__":
    if sys.argv[1] == "words":
        sys.argv[1:] = ["--lr", "1e-3"]
    main()
"""

LAUNCHES = {
    # Python 3.13 shows whole statements, which takes more lines.
    "shape": ("RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x4 and 5x2)", 2, 75),
    "words": ("train.py: error: Expected keys that are read. Received: --lr 1e-3. Its place is optim.lr.", 0, 60),
}


@pytest.mark.parametrize("mistake", LAUNCHES)
def test_under_torchrun_the_first_rank_says_it_once(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(PROGRAM)
    said, frames, most = LAUNCHES[mistake]
    code, output = run_torchrun("train.py", mistake, environment={"DANLING_FULL_TRACEBACK": ""})
    assert code != 0
    assert output.count(said) == 1, output
    assert output.count('train.py", line') == frames, output
    assert ("train_step on split 'train' received (float32 (4, 4) on cpu" in output) == (mistake == "shape")
    assert "danling/runners" not in output
    assert len(output.splitlines()) < most

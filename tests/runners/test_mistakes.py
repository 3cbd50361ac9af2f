"""Mistakes of users, each made for real, and the one line that each is answered with."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.programs import run_program
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
    def __init__(self, config: Any, **parts: Any) -> None:
        super().__init__(config)
        OPENED.append(self)
        self.model = nn.Linear(4, 2)
        self.criterion = nn.CrossEntropyLoss()
        self.datasets = {"train": DATA, "val": DATA}
        for name, part in parts.items():
            setattr(self, name, part)


def settings(**more: Any) -> dict[str, Any]:
    base = {
        "epochs": 2,
        "seed": 1,
        "log": False,
        "dataloader": {"batch_size": 4},
        "optim": {"type": "sgd", "lr": 0.1},
    }
    return {**base, **more}


def train(config: Any = None, runner_class: Any = Toy, **parts: Any) -> None:
    with runner_class(settings() if config is None else config, **parts) as runner:
        runner.train()


def overriding(**methods: Any) -> None:
    train(runner_class=type("Toy", (Toy,), methods))


# The command line of a program: the words, and what stands in the last line of stderr before exit code 2.
COMMAND_LINE = {
    "--epoch 3": "Did you mean 'epochs'?",
    "--epochs abc": "Expected --epochs to be an integer or none. Received: abc.",
    "--epochs": "Expected --epochs to be an integer or none. Received: no value.",
    "--epochs 1 2": "Expected --epochs to be an integer or none. Received: 1 2.",
    "--config gone.yaml": "Expected a file with settings. Received: 'gone.yaml', which does not exist.",
    "--config": "Expected --config FILE. Received: no file.",
    "--config train.py": "Expected a file that ends in .yaml, .yml, .json, .toml. Received: 'train.py'.",
    "settings.yaml": "Did you mean '--config settings.yaml'?",
    "epochs=3": "Expected --KEY VALUE. Received: 'epochs=3' with no key before it.",
    "-epochs 3": "Did you mean '--epochs'?",
    "--lr 1e-3": "Its place is optim.lr.",
    "--batch_size 8": "Its place is dataloader.batch_size.",
    "--max_epochs 3": "Its place is epochs.",
    "--nproc_per_node 2": "Use torchrun --nproc-per-node N.",
    "--foo 3": "which neither the library nor the program knows.",
    "--checkpoint.keep_last_k 2": "Did you mean 'keep_latest_k'?",
    "--checkpoint 5": "Expected keys of the section 'checkpoint'.",
    "--ema true": "Write --ema.enabled true.",
    "--stack horovod": "Expected stack to be one of",
    "--max_time soon": "Expected max_time to be seconds or 'HH:MM:SS'.",
    "--steps 3 --epochs 4": "Expected steps or epochs, not both.",
    "--wandb.mode of": "Expected --wandb.mode to be one of 'online', 'offline'",
    "--seed 1.5": "Expected --seed to be an integer or none. Received: 1.5.",
    "--ema.decay 2": "Expected --ema.decay to be a number >= 0 and < 1.",
    "--accum_steps 0": "Expected --accum_steps to be a number >= 1.",
    "--scheduler.interval day": "Expected --scheduler.interval to be one of 'step'",
}

# The command `danling`: the words, the exit code, and what it says on stderr.
DANLING = {
    "plott": (
        2,
        "unknown command 'plott'. Did you mean 'plot'? The commands are run, env, doctor,",
    ),
    "": (2, "a command is missing. The commands are run, env, doctor,"),
    "runs --sortt best": (2, "danling runs: error: unrecognized arguments: --sortt"),
    "inspect gone.pth": (
        3,
        "Expected a checkpoint file or directory. Received: 'gone.pth', where there is none.",
    ),
    "export gone.pth out.onnx": (2, "Expected an output that ends in .safetensors, .pth"),
    "export gone.pth out.gguf": (2, "Other formats are not written here"),
    "export gone.pth out --max-shard-size big": (
        2,
        "Expected a size such as 5GB or 2GiB. Received: 'big'.",
    ),
    "estimate": (2, "danling: Expected"),
    "doctor --timeout -1": (2, "Expected a number of at least 1. Received: '-1'."),
    "doctor --skip cuda": (2, "invalid choice: 'cuda'"),
}


ENVIRONMENT = [
    (
        {"RANK": "0", "WORLD_SIZE": "two"},
        "Expected the environment variable WORLD_SIZE to be an integer.",
    ),
    (
        {"RANK": "2", "WORLD_SIZE": "2"},
        "Expected 0 <= RANK < WORLD_SIZE. Received: RANK=2, WORLD_SIZE=2.",
    ),
]


def _file(text: str) -> str:
    Path("config.yaml").write_text(text)
    return "config.yaml"


def _lightning() -> str:
    """Write a checkpoint of which the model is an attribute of a module that has a further part."""
    module = nn.ModuleDict({"net": nn.Linear(4, 2), "teacher": nn.Linear(4, 2)})
    torch.save(
        {"state_dict": module.state_dict(), "pytorch-lightning_version": "2.6.6"}, "last.ckpt"
    )
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


# Settings of a toy, and what training it says.
SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"epoch": 3}, "Did you mean 'epochs'"),
    ({"checkpoint": {"keep": 3}}, "Expected a key of 'checkpoint'"),
    ({"ema": "yes"}, "Expected 'ema' to be a section"),
    ({"epochs": 1.5}, "Expected epochs to be an integer or none. Received: epochs=1.5"),
    ({"epochs": None}, "Expected a budget: `steps` (optimizer updates) or `epochs`."),
    ({"steps": 3}, "Expected steps or epochs, not both."),
    ({"lr": 0.1}, "Received: lr=0.1. Its place is optim.lr."),
    ({"batch_size": 4}, "Its place is dataloader.batch_size."),
    ({"max_epochs": 4}, "Its place is epochs."),
    ({"precision": "bf17"}, "Expected precision to be one of 'fp16', 'bf16'."),
    ({"stack": "horovod"}, "Expected stack to be one of"),
    ({"stack": "fsdp2"}, "For FSDP, set stack='parallel' and parallel.axes.shard."),
    ({"fp8": {"enabled": True}}, "Its place is precision."),
    (
        {"stack": "parallel", "parallel": {"axes": {"shard": 2}}},
        "product of the parallel axes to be the world size 1.",
    ),
    ({"score_name": "acc"}, "Expected the score val.acc among the metrics"),
    ({"score_split": "test"}, "Expected a split out of ['train', 'val']. Received: split='test'."),
    ({"train_splits": ["trian"]}, "Received: split='trian'. Did you mean 'train'?"),
    ({"dir": "/proc/no/where"}, "Expected a run directory that can be"),
    ({"dir": __file__}, "Expected a directory, or nothing yet"),
    (
        {"dataloader": {"batch_size": 4, "trian": {"batch_size": 2}}},
        "'trian' for split 'train'. Did you mean 'train'?",
    ),
    (
        {"dataloader": {"batch_size": 64}},
        "Expected split 'train' to have at least one global batch of 64 samples",
    ),
    ({"dataloader": {"batch_size": 0}}, "to be a number >= 1. Received: dataloader.batch_size=0"),
    (
        {"dataloader": {"batch_size": 4, "num_workers": -1}},
        "num_workers option should be non-negative",
    ),
    ({"dataloader": {"batch_size": 4, "colate_fn": list}}, "Did you mean 'collate_fn'"),
    ({"dataloader": {"batch_size": 4, "global_batch_size": 8}}, "not both. Received: batch_size=4"),
    (
        {"dataloader": {"sampler": torch.utils.data.SequentialSampler(DATA)}},
        "an override of `build_datasampler`.",
    ),
    ({"optim": {}}, "Expected an optimizer. Received: optimizer=None."),
    ({"optim": {"type": "adamm"}}, "Did you mean 'adam'?"),
    ({"optim": {"lr": 0.1}}, "Received: type=None. Name one under the key 'type'."),
    (
        {"optim": {"name": "adamw", "lr": 0.1}},
        "Received: type=None. Name one under the key 'type'.",
    ),
    ({"optim": {"type": "torch.optim.AdamW"}}, "Did you mean 'adamw'?"),
    ({"optim": {"type": "sgd", "lr": 0.1, "beta": 1}}, "Received: 'beta'."),
    (
        {"optim": {"type": "sgd", "learning_rate": 0.1}},
        "Received: 'learning_rate'. Did you mean 'lr'?",
    ),
    (
        {"optim": {"type": "sgd", "lr": "fast"}},
        "Expected optim.lr to be a number. Received: optim.lr='fast' (str).",
    ),
    (
        {"optim": {"type": "sgd", "lr": 0.1, "param_groups": [{"pattern": "backbone"}]}},
        "entry to match a parameter",
    ),
    (
        {"scheduler": {"warmup": 10}},
        "scheduler.type next to other keys of the section. Received: scheduler.warmup=10.",
    ),
    ({"scheduler": {"type": "cosin"}}, "Did you mean 'cosine'?"),
    (
        {"scheduler": {"type": "reducelronplateau", "interval": "step"}},
        "to be 'epoch' or 'validation'",
    ),
    ({"resume": "nowhere.pth"}, "Received: 'nowhere.pth'."),
    ({"pretrained": "nowhere.pth"}, "Received: 'nowhere.pth'."),
    ({"pretrained": __file__}, "Expected a file of torch.save. Received:"),
    ({"resume": __file__}, "as it was written. Received: it is no whole archive"),
    ({"resume": "/usr"}, "Expected a checkpoint"),
    ({"checkpoint": {"async_mode": "fast"}}, "Expected checkpoint.async_mode to be one of"),
    ({"secret_keys": 3}, "Expected secret_keys to be a list of a string"),
]

# What a toy is made of.
PARTS: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "Expected `self.model` to be a torch.nn.Module"),
    (
        {"model": nn.LazyLinear(2)},
        "Received: 'weight' of a lazy layer, which is made by the first batch.",
    ),
    ({"model": nn.Linear(5, 2)}, "mat1 and mat2 shapes cannot be multiplied (4x4 and 5x2)"),
    (
        {"model": nn.Linear(4, 2).requires_grad_(False)},
        "Expected at least one parameter that requires a gradient",
    ),
    ({"window": 3}, "where 'window' is a name of the library's"),
    ({"criterion": "mse"}, "Expected `self.criterion` to be a callable"),
    ({"criterion": nn.MSELoss}, "MSELoss'>. Write MSELoss()."),
    (
        {"criterion": None, "datasets": {"train": DATA}},
        "Expected a criterion, or a model that returns a loss.",
    ),
    (
        {"criterion": nn.CrossEntropyLoss(reduction="none"), "datasets": {"train": DATA}},
        "Received: shape (4,). Give the criterion reduction='mean' instead of 'none'",
    ),
    ({"criterion": lambda pred, target: 1.0}, "Expected a loss of one value. Received: loss=1.0."),
    (
        {"criterion": lambda pred, target: None, "datasets": {"train": DATA}},
        "loss of one value. Received: loss=None.",
    ),
    ({"criterion": None}, "it needs `self.criterion`, or a model that returns its loss."),
    (
        {"criterion": lambda pred, target: pred.sum().detach()},
        "Expected a loss that depends on parameters",
    ),
    (
        {"criterion": lambda pred, target: pred.sum() * float("nan")},
        "Expected a finite loss and gradient at step 1",
    ),
    ({"datasets": {"train": TensorDataset(INPUTS, TARGETS + 5)}}, "is out of bounds"),
    ({"datasets": {}}, "Expected at least one split to train on."),
    ({"datasets": DATA}, "Expected `self.datasets` to be a mapping by split."),
    (
        {"datasets": {"train": None}},
        "Expected `self.datasets['train']` to have samples. Received: None.",
    ),
    (
        {"datasets": {"train": "data/train"}},
        "`self.datasets['train']` to have samples. Received: 'data/train'.",
    ),
    ({"datasets": {"train": object()}}, "Expected split 'train' to be a map-style dataset"),
    (
        {"datasets": {"train": TensorDataset(INPUTS[:0], TARGETS[:0])}},
        "to have samples. Received: an empty dataset",
    ),
    ({"datasets": {"trian": DATA, "val": DATA}}, "Did you mean 'train' instead of 'trian'?"),
    (
        {"datasets": {"val": DATA}},
        "Expected at least one split to train on. Received: datasets=['val']",
    ),
    (
        {"datasets": {"train": TensorDataset(INPUTS, INPUTS, TARGETS)}},
        "target). Received: a sequence of length 3.",
    ),
    ({"datasets": {"train": list(INPUTS)}}, "Expected a batch with a target for the criterion"),
    (
        {"datasets": {}, "dataloaders": {"train": ((INPUTS, TARGETS) for _ in range(3))}},
        "Received: a generator",
    ),
    (
        {"datasets": {"train": (row for row in DATA)}},
        "be iterated again in each of 2 epochs. Received: a generator",
    ),
    (
        {"metrics": "acc"},
        "be a callable (pred, target) or an object with update, compute and reset. Received: 'acc'",
    ),
    ({"metrics": {"loss": dl.metrics.accuracy}}, "Expected metrics with names that are not taken."),
    ({"metrics": {"a": lambda pred, target: "x"}}, "Expected metric 'a' to return a mean"),
    ({"metrics": {"a": lambda pred: 1.0}}, "takes 1 positional argument but 2 were given"),
    (
        {"optimizer": "adam"},
        "Expected `self.optimizer` to be a torch.optim.Optimizer. Received: optimizer='adam'.",
    ),
    (
        {"optimizer": [torch.optim.SGD(nn.Linear(1, 1).parameters())]},
        "Expected `self.optimizer` to be one optimizer.",
    ),
    (
        {"optimizer": torch.optim.SGD(nn.Linear(4, 2).parameters())},
        "an optimizer over parameters of the model.",
    ),
    (
        {"scheduler": torch.optim.lr_scheduler.StepLR},
        "`self.scheduler` to be a scheduler with a method step().",
    ),
]

# What a toy overrides.
METHODS: list[tuple[dict[str, Any], str]] = [
    ({"__init__": lambda self, config: None}, "to call super().__init__(config) first."),
    (
        {"__init__": lambda self, config: dl.Runner.__init__(self)},
        "and called super().__init__() without it.",
    ),
    ({"_parts": lambda self: None}, "where '_parts' is a name of the library's"),
    (
        {"train_step": lambda self, data: self.criterion(self.model(data[0]), data[1])},
        "Call self.backward(loss) before",
    ),
    (
        {"evaluate_step": lambda self, data: self.model(data[0])},
        "loss, each of which may be None. Received: Tensor.",
    ),
    ({"evaluate_step": lambda self, data: None}, "each of which may be None. Received: NoneType."),
    ({"build_optimizer": _lbfgs}, "Expected an optimizer whose step takes the gradient as it is."),
    ({"train_step": _steps}, "Remove optimizer.step()"),
]

# What a program calls.
CALLS: list[tuple[Callable[[], Any], str]] = [
    (lambda: train("nowhere.yaml"), "Received: 'nowhere.yaml', which does not exist."),
    (
        lambda: train(_file("epochs: ten\n")),
        "integer or none. Received: epochs='ten' (str). It is in 'config.yaml'.",
    ),
    (
        lambda: dl.RunnerConfig().parse(["--config", _file("checkpoint.interval: 0\n")]),
        "to be a number >= 1. Received: checkpoint.interval=0 (int). It is in 'config.yaml'.",
    ),
    (lambda: train(3), "Expected a mapping or the path of a file. Received: 3 (int)."),
    (lambda: setattr(dl.RunnerConfig().freeze(), "epochs", 3), "Call defrost()."),
    (
        lambda: Toy(settings()).evaluate("vall"),
        "Expected a split out of ['train', 'val']. Received: split='vall'.",
    ),
    (lambda: Toy(settings()).evaluate_steps("val", -1), "steps=-1"),
    (lambda: train(settings(pretrained=_lightning())), "or rename the entries."),
    (lambda: Toy(settings()).load_checkpoint("latst"), "Received: 'latst'."),
    (
        lambda: (Toy(settings(dir="run")), Toy(settings(dir="run"))),
        "Received: a directory that is in use by process",
    ),
    (
        lambda: train(settings(resume=_bare())),
        "which has no format_version. Load bare weights with `pretrained`",
    ),
    (lambda: Toy.from_checkpoint("nowhere.pth"), "nowhere.pth"),
]

IN_PROCESS: list[tuple[Callable[[], Any], str]] = [
    *((partial(train, settings(**more)), said) for more, said in SETTINGS),
    *((partial(train, **parts), said) for parts, said in PARTS),
    *((partial(overriding, **methods), said) for methods, said in METHODS),
    *CALLS,
]


def test_there_are_as_many_as_promised() -> None:
    assert (
        len(COMMAND_LINE) + len(DANLING) + len(IN_PROCESS) + len(ENVIRONMENT) + len(LAUNCHES) >= 120
    )


@pytest.mark.parametrize(("words", "said"), COMMAND_LINE.items(), ids=COMMAND_LINE)
def test_a_command_line_ends_with_usage_one_line_and_code_2(
    words: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
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
    words: str, ending: tuple[int, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(words.split())
    except SystemExit as left:
        code = int(str(left.code))
    said = capsys.readouterr().err
    assert (code, ending[1] in said.splitlines()[-1]) == (ending[0], True), said
    assert "Traceback" not in said
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("mistake", "said"), IN_PROCESS, ids=[said for _, said in IN_PROCESS])
def test_mistake_is_an_exception_with_one_line(
    mistake: Callable[[], Any], said: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    with pytest.raises(Exception) as caught:
        mistake()
    assert said in str(caught.value)
    assert len(str(caught.value).strip().splitlines()) == 1
    # What was trained before the mistake shows is kept; a run that never began leaves no checkpoint.
    assert not list(tmp_path.rglob("ckpt-*"))


STEPS: list[tuple[dict[str, Any], str]] = [
    (
        {"datasets": {"train": TensorDataset(INPUTS.double(), TARGETS)}},
        "train_step on split 'train' received (float64 (4, 4) on cpu, int64 (4,) on cpu)",
    ),
    (
        {"datasets": {"train": DATA, "val": [{"input": row[:3], "y": 1} for row in INPUTS]}},
        "evaluate_step on split 'val' received {'input': float32 (4, 3) on cpu, 'y': int64 (4,) on cpu}",
    ),
]


@pytest.mark.parametrize(("parts", "said"), STEPS, ids=["train_step", "evaluate_step"])
def test_error_of_a_step_names_its_input(
    parts: dict[str, Any], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        train(**parts)
    above, ending = capfd.readouterr().err.splitlines()[-2:]
    assert above.endswith(said) and "Failed with RuntimeError: no update in" in ending
    assert caught.value.__notes__ == [said]  # type: ignore[attr-defined]


class Recurrent(Toy):
    """Keeps the hidden state with its graph."""

    def train_step(self, data: Any) -> Any:
        kept = getattr(self, "hidden", 0.0)
        self.hidden = self.model(data[0]).sum() + kept
        self.backward(self.hidden)
        return None, self.hidden


class TwoInputs(nn.Linear):
    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(first + second)


def test_error_of_a_model_of_two_inputs_says_how_they_are_passed() -> None:
    pairs = [((row, row), target) for row, target in zip(INPUTS, TARGETS)]
    with pytest.raises(
        TypeError, match="missing 1 required positional argument: 'second'"
    ) as caught:
        train(model=TwoInputs(4, 2), datasets={"train": pairs})
    assert "passed as keyword arguments" in caught.value.__notes__[0]  # type: ignore[attr-defined]


class Numbered(Toy):
    def train_step(self, data: Any, number: int) -> Any:  # type: ignore[override]
        return super().train_step(data)


def test_error_of_a_step_with_the_number_of_the_batch_says_where_that_is() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument") as caught:
        train(runner_class=Numbered)
    assert "self.train_state.global_step" in caught.value.__notes__[-1]  # type: ignore[attr-defined]


def test_error_of_a_hidden_state_that_is_not_detached_says_so() -> None:
    with pytest.raises(RuntimeError, match="a second time") as caught:
        train(runner_class=Recurrent)
    assert "self.hidden = hidden.detach()" in caught.value.__notes__[-1]  # type: ignore[attr-defined]


def test_a_split_that_nothing_scores_is_told_how_to_leave_evaluation_out() -> None:
    with pytest.raises(ValueError, match="among the metrics of an evaluation") as caught:
        train(datasets={"train": DATA, "unlabelled": TensorDataset(INPUTS)})
    assert "Received: []. If no split is to be evaluated, set evaluate_splits=[]." in str(
        caught.value
    )


class Endless(torch.utils.data.IterableDataset[Any]):
    """A stream that ends for the test's sake."""

    def __iter__(self) -> Any:
        for number in range(4 * 1001):
            yield INPUTS[number % 4], TARGETS[number % 4]


def test_an_evaluation_of_many_batches_of_a_stream_is_named_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with Toy(
        settings(evaluate_splits=["val"]),
        datasets={"train": DATA, "val": Endless(), "new": Endless()},
    ) as runner:
        runner.train()
        runner.infer("new")
    said = "is a stream of unknown length, of which 1000 batches were read by now"
    assert capfd.readouterr().err.count(said) == 1


def test_training_at_the_end_of_the_budget_names_the_way_to_continue(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with Toy(settings()) as runner:
        runner.train()
        assert "Nothing is left" not in capfd.readouterr().err
        runner.train()
    assert (
        "the run has completed 2 of 2 epochs. Raise epochs to continue." in capfd.readouterr().err
    )


def test_training_after_close_is_refused() -> None:
    with Toy(settings()) as runner:
        pass
    with pytest.raises(
        ValueError, match=r"Expected a runner that is open\. Received: train\(\) after close\(\)"
    ):
        runner.train()


def test_a_missing_checkpoint_to_resume_from_makes_no_directory(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointNotFound, match="Expected resume to be a checkpoint: .* Received: 'gone.pth'"
    ):
        Toy(settings(resume="gone.pth"))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("variables", "said"), ENVIRONMENT)
def test_a_wrong_environment_is_named(
    variables: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    "words": (
        "train.py: error: Expected keys that are read. Received: --lr 1e-3. Its place is optim.lr.",
        0,
        60,
    ),
}


@pytest.mark.parametrize("mistake", LAUNCHES)
def test_under_torchrun_the_first_rank_says_it_once(mistake: str) -> None:
    Path("train.py").write_text(PROGRAM)
    said, frames, most = LAUNCHES[mistake]
    code, output = run_program(
        "train.py", mistake, environment={"DANLING_FULL_TRACEBACK": ""}, nproc_per_node=2
    )
    assert code != 0
    assert output.count(said) == 1, output
    assert output.count('train.py", line') == frames, output
    assert ("train_step on split 'train' received (float32 (4, 4) on cpu" in output) == (
        mistake == "shape"
    )
    assert "danling/runners" not in output
    assert len(output.splitlines()) < most

"""What a runner does when a user overrides a part of it, or leaves one out."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.kill import run_python
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import danling as dl


def points(count: int = 16) -> TensorDataset:
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(count, 3, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh())


def settings(root: Path, **more: Any) -> dict[str, Any]:
    return {
        "dir": str(root / "run"),
        "seed": 3,
        "epochs": 2,
        "log": False,
        "dataloader": {"batch_size": 4},
        "optim": {"type": "sgd", "lr": 0.1},
        **more,
    }


class Line(dl.Runner):
    """A linear model on points."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = nn.Linear(3, 1)
        self.criterion = nn.MSELoss()
        self.datasets = {"train": points(), "val": points(6)}


# A loss of one's own


class OwnLoss(Line):
    """Has no criterion, and says in `compute_loss` what the loss is."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.criterion = None

    def compute_loss(self, pred: Any, target: Any) -> Tensor:
        return 2 * F.mse_loss(pred, target if target is not None else torch.zeros_like(pred))


def mean_loss(runner: Any, split: str = "val") -> float:
    inputs, targets = runner.datasets[split].tensors
    with torch.no_grad():
        return float(2 * F.mse_loss(runner.unwrapped_model(inputs), targets))


def test_a_loss_that_is_overridden_is_that_of_evaluation_too(tmp_path: Path) -> None:
    with OwnLoss(settings(tmp_path)) as runner:
        runner.train()
        assert runner.latest_score == pytest.approx(mean_loss(runner), rel=1e-5)


class Bare(Line):
    """Trains on inputs alone, with a criterion that looks at nothing else."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.datasets = {split: data.tensors[0] for split, data in self.datasets.items()}
        self.criterion = lambda pred, _: 2 * pred.square().mean()


class BareOwnLoss(OwnLoss):
    """Trains on inputs alone, with a loss of its own."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.datasets = {split: data.tensors[0] for split, data in self.datasets.items()}


@pytest.mark.parametrize("kind", [Bare, BareOwnLoss])
@pytest.mark.parametrize("trained", [False, True])
def test_bare_inputs_have_the_loss_in_evaluation_that_they_have_in_training(
    kind: Any, trained: bool, tmp_path: Path
) -> None:
    with kind(settings(tmp_path)) as runner:
        if trained:
            runner.train()
        with torch.no_grad():
            expected = float(2 * runner.unwrapped_model(runner.datasets["val"]).square().mean())
        assert runner.evaluate("val")["val"]["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_split_without_targets_has_no_loss_where_training_has_targets(tmp_path: Path) -> None:
    with OwnLoss(settings(tmp_path)) as runner:
        runner.datasets["test"] = points(5).tensors[0]
        assert runner.evaluate("test") == {"test": {}}
        runner.train(evaluate_splits=["val", "test"])
        assert runner.results[2]["test"] == {}


# What lies in the run's directory


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_run_that_only_loads_changes_nothing_in_the_directory_of_another(tmp_path: Path) -> None:
    with Line(settings(tmp_path)) as runner:
        runner.train()
    before = contents(tmp_path)
    other = settings(tmp_path, optim={"type": "sgd", "lr": 0.2}, checkpoint={"load_only": True})
    with Line(other) as runner:
        assert runner.evaluate("val")["val"]["loss"] > 0
        with pytest.raises(ValueError, match=r"its own directory"):
            runner.train()
    assert contents(tmp_path) == before


class Project(dl.RunnerConfig):
    """Takes an argument of its own, and sets a default."""

    def __init__(self, width: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model.width = width
        self.ema.enabled = True


def test_the_difference_from_the_defaults_names_single_settings(tmp_path: Path) -> None:
    with Line(Project(8, settings(tmp_path, checkpoint={"interval": 3}))):
        pass
    metadata = tmp_path / "run" / "metadata"
    assert yaml.safe_load((metadata / "config.diff.yaml").read_text()) == {
        **settings(tmp_path, checkpoint={"interval": 3}),
        "model": {"width": 8},
        "ema": {"enabled": True},
    }


@pytest.mark.parametrize("enabled", [False, True])
def test_results_say_which_weights_were_evaluated(enabled: bool, tmp_path: Path) -> None:
    with Line(settings(tmp_path, ema={"enabled": enabled})) as runner:
        runner.train()
    for name in ("latest", "best"):
        written = json.loads((tmp_path / "run" / f"{name}.json").read_text())
        assert written["weights"] == ("averaged" if enabled else "trained")


# Where the configuration is found


class Made(dl.Runner):
    """Makes its configuration itself."""

    def __init__(self, root: Path) -> None:
        super().__init__(dl.RunnerConfig(settings(root, stack="parallel")))
        self.model = nn.Linear(3, 1)
        self.criterion = nn.MSELoss()
        self.datasets = {"train": points(), "val": points(6)}


class WithModel(Line):
    """Is told of its model before its configuration."""

    def __init__(self, model: Mapping[str, Any], config: Any) -> None:
        super().__init__(config)
        self.model = nn.Linear(**model)


def file_of(config: Mapping[str, Any], root: Path) -> str:
    path = root / "config.yaml"
    path.write_text(yaml.safe_dump(dict(config)))
    return str(path)


@pytest.mark.parametrize(
    "build",
    [
        lambda config, root: Made(root),
        lambda config, root: WithModel({"in_features": 3, "out_features": 1}, config),
        lambda config, root: WithModel({"in_features": 3, "out_features": 1}, dl.RunnerConfig(config)),
        lambda config, root: Line(file_of(config, root)),
        lambda config, root: Line(Namespace(**config)),
        lambda config, root: Line(config=config),
    ],
    ids=["made", "mapping", "RunnerConfig", "file", "namespace", "keyword"],
)
def test_the_stack_is_found_wherever_the_configuration_comes_from(build: Any, tmp_path: Path) -> None:
    with build(settings(tmp_path, stack="parallel"), tmp_path) as runner:
        assert isinstance(runner, dl.ParallelRunner)
        assert runner.topology.axes.world_size == 1
        runner.train()
        assert runner.state.train.epoch == 2


# A score of one's own


class ThirdIsBest(Line):
    """Scores an epoch by how near it is to the third, and has no figure of the name that the configuration gives."""

    @property
    def scores(self) -> dict[int, float]:
        return {index: float(abs(index - 3)) for index in self.results}


def test_scores_that_are_overridden_decide_everything(tmp_path: Path) -> None:
    schedule = {"type": "reducelronplateau", "patience": 0, "factor": 0.5}
    config = settings(tmp_path, epochs=9, patience=2, score_name="own", score_mode="min", scheduler=schedule)
    with ThirdIsBest(config) as runner:
        runner.train()
        assert list(runner.results) == [1, 2, 3, 4, 5]
        assert (runner.best_index, runner.best_score, runner.latest_score) == (3, 0.0, 2.0)
        assert runner.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**2)
    best = torch.load(tmp_path / "run" / "checkpoints" / "best.pth", weights_only=True)
    assert best["state"]["train"]["epoch"] == 3
    written = json.loads((tmp_path / "run" / "best.json").read_text())
    assert (written["index"], written["score"]) == (3, 0.0)


def test_a_best_index_that_is_overridden_has_its_own_score(tmp_path: Path) -> None:
    class First(Line):
        @property
        def best_index(self) -> int | None:
            return next(iter(self.scores), None)

    with First(settings(tmp_path, epochs=5, patience=2)) as runner:
        results = runner.train()
        assert list(results) == [1, 2, 3]
        assert runner.best_score == results[1]["val"]["loss"] and runner.latest_score == results[3]["val"]["loss"]
    best = torch.load(tmp_path / "run" / "checkpoints" / "best.pth", weights_only=True)
    assert best["state"]["train"]["epoch"] == 1


# What an override may ask the library for


class Owned(dl.RunnerConfig):
    """A configuration with a method and a default of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.net.width = 5

    def area(self) -> int:
        return int(self.net.width**2)


class OwnConfig(Line):
    """Reads its configuration in `__init__`, and notes where its run will lie."""

    config_class = Owned

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.area = self.config.area()
        self.vocabulary = self.workspace.dir / "vocabulary"
        assert not self.dir.exists()


def test_a_configuration_is_of_its_class_from_a_mapping_and_from_a_checkpoint(tmp_path: Path) -> None:
    with OwnConfig(settings(tmp_path, net={"width": 3})) as runner:
        assert runner.area == 9 and runner.vocabulary == tmp_path / "run" / "vocabulary"
        runner.train()
    checkpoint = tmp_path / "run" / "checkpoints" / "latest.pth"
    with OwnConfig.from_checkpoint(checkpoint, {"dir": str(tmp_path / "second"), "epochs": 3}) as runner:
        assert runner.area == 9 and runner.epochs == 3
    given = Owned(settings(tmp_path, net={"width": 3}, dir=str(tmp_path / "third"), epochs=4))
    with Line.from_checkpoint(checkpoint, given) as runner:
        assert isinstance(runner.config, Owned) and runner.epochs == 4


# What is left out of a load


def resumed(root: Path, excluded: str, **more: Any) -> Line:
    shared: dict[str, Any] = {"optim": {"type": "adam", "lr": 0.1}, "ema": {"enabled": True, "decay": 0.9}, **more}
    if not (root / "run").exists():
        with Line(settings(root, **shared)) as runner:
            runner.train()
    source = str(root / "run" / "checkpoints" / "latest.pth")
    config = settings(root, dir=str(root / "second"), epochs=3, resume=source, **shared)
    return Line(config | {"checkpoint": {"exclude_from_loading": ["model.bias", excluded]}})


def test_averaged_weights_that_are_left_out_begin_at_the_models(tmp_path: Path) -> None:
    with resumed(tmp_path, "ema.weights.bias") as runner:
        assert torch.equal(runner.ema.weights["bias"], runner.model.bias)
        assert not torch.equal(runner.ema.weights["weight"], runner.model.weight)
        assert runner.ema.num_updates == 8
        runner.train()


@pytest.mark.parametrize("name", ["dataloaders.train", "dataloader.train"])
def test_a_loader_that_is_left_out_begins_anew(name: str, tmp_path: Path) -> None:
    with resumed(tmp_path, name) as runner:
        assert runner.sources["train"].epoch == 0 and runner.state.train.epoch == 2
        runner.train()
        assert runner.state.train.global_step == 12


# Settings that do nothing


def test_settings_of_checkpoints_and_loaders_that_nothing_reads_are_named(tmp_path: Path, caplog: Any) -> None:
    idle = {"enable_ft_dataloader_checkpoints": True, "ft_replica_id": "a", "async_mode": "async_with_pinned_mem"}
    with Line(settings(tmp_path, checkpoint=idle, dataloader={"batch_size": 4, "snapshot_every_n_steps": 7})):
        pass
    said = "\n".join(caplog.messages)
    for name in ("enable_ft_dataloader_checkpoints", "ft_replica_id"):
        assert f"checkpoint.{name} has no effect: ft.enabled is not set" in said
    assert "dataloader.snapshot_every_n_steps has no effect" in said
    assert "async_with_pinned_mem of checkpoint.async_mode has no effect" in said
    assert said.count("has no effect") == 4


def test_a_split_that_is_only_trained_on_is_no_score(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="score_split='train', which is trained on"):
        Line(settings(tmp_path, score_split="train"))
    with Line(settings(tmp_path, score_split="train", evaluate_splits=["train", "val"])) as runner:
        results = runner.train()
        assert runner.latest_score == results[2]["train"]["loss"]
        inputs, targets = points().tensors
        with torch.no_grad():
            evaluated = float(runner.criterion(runner.unwrapped_model(inputs), targets))
        assert runner.latest_score == pytest.approx(evaluated, rel=1e-5)


# Around a run


def test_a_loader_of_ones_own_is_left_as_it_was_and_lets_the_program_end(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, danling as dl\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "loader = DataLoader(TensorDataset(torch.randn(8, 2), torch.randn(8, 1)), batch_size=4, num_workers=1)\n"
        "class Own(dl.TorchRunner):\n"
        "    def __init__(self, config):\n"
        "        super().__init__(config)\n"
        "        self.model, self.criterion = torch.nn.Linear(2, 1), torch.nn.MSELoss()\n"
        "        self.dataloaders = {'train': loader}\n"
        "with Own({'steps': 2, 'optim': {'type': 'sgd', 'lr': 0.1}, 'dir': 'own', 'log': False}) as runner:\n"
        "    runner.train()\n"
        "assert loader.worker_init_fn is None\n"
        "kept = iter(loader)\n"
        "next(kept)\n"
        "print('end')\n"
    )
    done = run_python(program)
    assert done.exit_code == 0 and "end" in done.output

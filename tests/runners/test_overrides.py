"""What a runner does when a user overrides or replaces a part of it, or changes a setting while it trains."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.processes import run_processes
from support.toys import Chain, Line, differences, in_parts, line_of, settings, whole_state
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import danling as dl
from danling.runners import RunnerState


class OwnLoss(Line):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.criterion = None

    def compute_loss(self, pred: Any, target: Any) -> Tensor:
        return 2 * F.mse_loss(pred, target)


def test_overridden_loss_is_used_in_evaluation_too(tmp_path: Path) -> None:
    with OwnLoss(settings(tmp_path, epochs=2)) as runner:
        runner.train()
        inputs, targets = runner.datasets["val"].tensors
        with torch.no_grad():
            expected = float(2 * F.mse_loss(runner.unwrapped_model(inputs), targets))
        assert runner.latest_score == pytest.approx(expected, rel=1e-5)


def test_bare_inputs_have_a_loss_in_evaluation_too_and_missing_targets_have_none(tmp_path: Path) -> None:
    class Bare(Line):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.datasets = {split: data.tensors[0] for split, data in self.datasets.items()}
            self.criterion = lambda pred, _: 2 * pred.square().mean()

    with Bare(settings(tmp_path / "bare", epochs=1)) as runner:
        runner.train()
        with torch.no_grad():
            expected = float(2 * runner.unwrapped_model(runner.datasets["val"]).square().mean())
        assert runner.evaluate("val")["val"]["loss"] == pytest.approx(expected, rel=1e-5)
    with Line(settings(tmp_path / "line", epochs=1)) as runner:
        runner.datasets["test"] = line_of(5).tensors[0]
        assert runner.evaluate("test") == {"test": {}}


def test_a_loss_may_be_a_method(tmp_path: Path) -> None:
    class Method(dl.Runner):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model, self.datasets = nn.Linear(3, 1), {"train": line_of(8), "val": line_of(8)}

        def criterion(self, pred: Tensor, target: Tensor) -> Tensor:
            return (pred - target).abs().mean()

    with Method(settings(tmp_path, steps=2)) as runner:
        runner.train()
        inputs, targets = runner.datasets["val"].tensors
        expected = (runner.model(inputs) - targets).abs().mean().item()
        assert runner.evaluate("val")["val"]["loss"] == pytest.approx(expected, rel=1e-6)


class Closing(Line):
    """Trains with LBFGS, whose step takes a closure, with the hooks overridden that its error names."""

    not_saved = ("batch",)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.optimizer = torch.optim.LBFGS(self.model.parameters(), lr=0.1)

    def train_step(self, data: Any) -> Any:
        self.batch = data
        return super().train_step(data)

    def step(self) -> Any:
        return super().step()

    def optimizer_step(self) -> None:
        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss: Tensor = self.criterion(self.model(self.batch[0]), self.batch[1])
            loss.backward()
            return loss

        self.optimizer.step(closure)


def test_lbfgs_with_a_closure_trains_and_resumes(tmp_path: Path) -> None:
    whole, parts = in_parts(Closing, tmp_path, (3, 6))
    assert torch.equal(whole.unwrapped_model.weight, parts.unwrapped_model.weight)
    (group,) = parts.optimizer.state.values()
    assert group["n_iter"] > 6


class TwoOptimizers(Chain):
    """Steps a second optimizer, an attribute of the user's, which needs the state of both."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.optimizer = torch.optim.SGD(self.model[0].parameters(), lr=0.1, momentum=0.9)
        self.second = torch.optim.Adam(self.model[2].parameters(), lr=0.01)

    def optimizer_step(self) -> None:
        super().optimizer_step()
        self.second.step()
        self.second.zero_grad()


def test_optimizer_step_with_two_optimizers_resumes_bitwise(tmp_path: Path) -> None:
    whole, parts = in_parts(TwoOptimizers, tmp_path, (2, 3, 7))
    assert not differences(whole_state(parts)["model"], whole_state(whole)["model"])
    assert not differences(parts.second.state_dict(), whole.second.state_dict())
    assert parts.second.state[parts.unwrapped_model[2].weight]["step"] == 7


class Made(Line):
    def __init__(self, root: Path) -> None:
        super().__init__(dl.RunnerConfig(settings(root, epochs=2, stack="parallel")))


class WithModel(Line):
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
    with build(settings(tmp_path / "run", epochs=2, stack="parallel"), tmp_path) as runner:
        assert isinstance(runner, dl.ParallelRunner)
        assert runner.topology.axes.world_size == 1
        runner.train()
        assert runner.state.train.epoch == 2


class Owned(dl.RunnerConfig):
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
    run = tmp_path / "run"
    with OwnConfig(settings(run, epochs=2, net={"width": 3})) as runner:
        assert runner.area == 9 and runner.vocabulary == run / "vocabulary"
        runner.train()
    # The difference from the defaults names single settings, those of the class among them.
    assert yaml.safe_load((run / "metadata" / "config.diff.yaml").read_text())["net"] == {"width": 3}
    checkpoint = run / "checkpoints" / "latest.pth"
    with OwnConfig.from_checkpoint(checkpoint, {"dir": str(tmp_path / "second"), "epochs": 3}) as runner:
        assert runner.area == 9 and runner.epochs == 3
    given = Owned(settings(tmp_path / "third", net={"width": 3}, epochs=4))
    with Line.from_checkpoint(checkpoint, given) as runner:
        assert isinstance(runner.config, Owned) and runner.epochs == 4


class ThirdIsBest(Line):
    """Scores an epoch by how near it is to the third, and has no figure of the name that the configuration gives."""

    @property
    def scores(self) -> dict[int, float]:
        return {index: float(abs(index - 3)) for index in self.results}


def test_overridden_scores_decide_everything(tmp_path: Path) -> None:
    schedule = {"type": "reducelronplateau", "patience": 0, "factor": 0.5}
    config = settings(tmp_path, epochs=9, patience=2, score_name="own", score_mode="min", scheduler=schedule)
    with ThirdIsBest(config) as runner:
        runner.train()
        assert list(runner.results) == [1, 2, 3, 4, 5]
        assert (runner.best_index, runner.best_score, runner.latest_score) == (3, 0.0, 2.0)
        assert runner.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**2)
        assert runner.read_checkpoint("best")["state"]["train"]["epoch"] == 3
    written = json.loads((tmp_path / "best.json").read_text())
    assert (written["index"], written["score"], written["weights"]) == (3, 0.0, "trained")


def test_overridden_best_index_has_its_own_score(tmp_path: Path) -> None:
    class First(Line):
        @property
        def best_index(self) -> int | None:
            return next(iter(self.scores), None)

    with First(settings(tmp_path, epochs=5, patience=2, ema={"enabled": True})) as runner:
        results = runner.train()
        assert list(results) == [1, 2, 3]
        assert runner.best_score == results[1]["val"]["loss"] and runner.latest_score == results[3]["val"]["loss"]
        assert runner.read_checkpoint("best")["state"]["train"]["epoch"] == 1
    assert json.loads((tmp_path / "best.json").read_text())["weights"] == "averaged"


def test_split_without_an_evaluation_gives_no_score(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="score_split='train', which is trained on"):
        Line(settings(tmp_path, epochs=2, score_split="train"))
    with Line(settings(tmp_path, epochs=2, score_split="train", evaluate_splits=["train", "val"])) as runner:
        results = runner.train()
        assert runner.latest_score == results[2]["train"]["loss"]
        inputs, targets = runner.datasets["train"].tensors
        with torch.no_grad():
            evaluated = float(runner.criterion(runner.unwrapped_model(inputs), targets))
        assert runner.latest_score == pytest.approx(evaluated, rel=1e-5)


@pytest.mark.parametrize(("before", "after"), [(50, 5), (3, 5), (8, 5)])
def test_budget_of_steps_may_change_during_training(before: int, after: int, tmp_path: Path) -> None:
    class Changing(Line):
        def step(self) -> Any:
            if self.state.train.global_step == 2:
                self.config.steps = after
            return super().step()

    with Changing(settings(tmp_path, steps=before)) as runner:
        runner.train()
        assert runner.state.train.global_step == after
        assert list(runner.results)[-1] == after
        assert runner.read_checkpoint("latest")["state"]["train"]["global_step"] == after


@pytest.mark.parametrize("stack", ["ddp", "parallel"])
def test_weights_added_by_an_override_come_back(stack: str, tmp_path: Path) -> None:
    class Adding(Line):
        not_saved = ("table",)

        table = torch.zeros(3)

        def model_state_dict(self) -> dict[str, Any]:
            return {**super().model_state_dict(), "table": self.table}

        def load_model(self, state: Mapping[str, Any], *, partial: bool = False) -> None:
            own = dict(state)
            self.table = own.pop("table")
            super().load_model(own, partial=partial)

    with Adding(settings(tmp_path, steps=1, stack=stack)) as runner:
        runner.table = torch.full((3,), 7.0)
        runner.train()
    with Adding(settings(tmp_path, steps=2, stack=stack, auto_resume=True)) as runner:
        assert runner.table.tolist() == [7.0, 7.0, 7.0]


def test_accumulation_may_change_in_a_pass(tmp_path: Path) -> None:
    windows: list[float] = []

    class Changing(Line):
        @property
        def accum_steps(self) -> int:
            return 1 if self.state.train.global_step < 2 else 2

        def step(self) -> Any:
            outcome = super().step()
            windows.append(outcome.weight)
            return outcome

    with Changing(settings(tmp_path, epochs=1)) as runner:
        runner.train()
    assert windows == [4, 4, 8]


class Noting(RunnerState):
    noted = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "noted": self.noted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.noted = state["noted"]


class Partly(Line):
    """Has a state of another class, and names some components only."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.state = Noting(self.state.train, self.state.elastic, self.state.rng)

    def component_states(self) -> dict[str, Any]:
        return {"model": self.model_state_dict(), "optimizer": self.optimizer_state_dict()}


def test_another_state_comes_back_and_components_left_out_by_an_override_are_saved(tmp_path: Path) -> None:
    config = settings(tmp_path, ema={"enabled": True}, scheduler={"type": "cosine"})
    with Partly({**config, "steps": 1}) as runner:
        runner.state.noted = 7
        runner.train()
        assert {"model", "optimizer", "ema", "scheduler"} <= runner.read_checkpoint("latest").keys()
    with Partly({**config, "steps": 2, "auto_resume": True}) as runner:
        assert (runner.state.noted, runner.state.train.global_step) == (7, 1)


def test_requested_checkpoint_survives_a_boundary_by_hand(tmp_path: Path) -> None:
    saved: list[int] = []

    class Saving(Line):
        def save_checkpoint(self, **how: Any) -> None:
            saved.append(self.state.train.global_step)
            super().save_checkpoint(**how)

    with Saving(settings(tmp_path, epochs=3)) as runner:
        runner.request_checkpoint()
        assert not runner.boundary()
        runner.train_epoch()
        assert saved and saved[0] == 1


def own_loader(root: str) -> None:
    loader = DataLoader(line_of(8), batch_size=4, num_workers=1)

    class Own(Line):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.datasets, self.dataloaders = {}, {"train": loader}

    with Own(settings(root, steps=2)) as runner:
        runner.train()
    assert loader.worker_init_fn is None
    next(iter(loader))


def test_a_loader_of_ones_own_is_left_as_it_was_and_lets_the_program_end(tmp_path: Path) -> None:
    run_processes(own_loader, str(tmp_path), world_size=1)

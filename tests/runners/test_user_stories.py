"""What users do with a runner that is not in its first example, each against a loop by hand or an uninterrupted run."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.processes import run_processes
from support.toys import Line, line_of
from support.toys import settings as toy_settings
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

import danling as dl


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, pred: Tensor, target: Tensor) -> Tensor:
        self.seen += 1
        return F.mse_loss(pred * self.scale, target)


def points(count: int = 16) -> TensorDataset:
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh())


def settings(root: Path, **more: Any) -> dict[str, Any]:
    base = {"seed": 3, "steps": 6, "evaluate_interval": 6, "checkpoint": {"interval": 100}}
    return toy_settings(root, **{**base, **more})


class Story(dl.TorchRunner):
    def __init__(
        self, config: Mapping[str, Any], *, stop_at: int | None = None, **options: Any
    ) -> None:
        super().__init__(config)
        self.stop_at = stop_at
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        self.criterion = options.get("criterion", nn.MSELoss())
        self.datasets = {"train": points(), "val": points(5)}

    def step(self) -> Any:
        if self.stop_at is not None and self.state.train.global_step == self.stop_at - 1:
            self.stop()
        return super().step()


def weights(runner: Any) -> dict[str, Tensor]:
    states = {"": runner.model_state_dict(), "criterion.": runner.criterion.state_dict()}
    return {
        f"{part}{name}": value.clone()
        for part, state in states.items()
        for name, value in state.items()
    }


def train(kind: type[Story], config: Mapping[str, Any], **options: Any) -> dict[str, Tensor]:
    with kind(config, **options) as runner:
        runner.train()
        return weights(runner)


def equal(
    first: Mapping[str, Tensor], second: Mapping[str, Tensor], tolerance: float = 0.0
) -> bool:
    return first.keys() == second.keys() and all(
        torch.allclose(value, second[name], rtol=0, atol=tolerance) for name, value in first.items()
    )


@pytest.mark.parametrize("backend", ["file", "dcp"])
def test_the_state_of_a_criterion_comes_back(backend: str, tmp_path: Path) -> None:
    checkpoint = {"backend": backend, "interval": 100}
    whole = train(Story, settings(tmp_path / "whole", checkpoint=checkpoint), criterion=Scaled())
    config = settings(tmp_path / "parts", checkpoint=checkpoint, auto_resume=True)
    train(Story, config, criterion=Scaled(), stop_at=2)
    assert equal(train(Story, config, criterion=Scaled()), whole)
    assert whole["criterion.scale"] != 1.0


def test_the_parameters_of_a_criterion_are_reduced_like_the_models(tmp_path: Path) -> None:
    one = train(Story, settings(tmp_path / "one"), criterion=Scaled())
    two = settings(tmp_path / "two", dataloader={"batch_size": 2})
    for rank in run_processes(train, Story, two, criterion=Scaled(), world_size=2):
        assert torch.allclose(rank["criterion.scale"], one["criterion.scale"], rtol=0, atol=1e-12)
        assert torch.allclose(rank["0.weight"], one["0.weight"], rtol=0, atol=1e-12)


class Split(Story):
    def __init__(self, config: Mapping[str, Any], **options: Any) -> None:
        super().__init__(config, **options)
        train, val = random_split(points(), [12, 4])
        self.datasets = {"train": train, "val": val}


def test_draws_of_init_are_repeated_at_a_resume(tmp_path: Path) -> None:
    config = settings(tmp_path, seed=None, auto_resume=True)
    with Split(config, stop_at=2) as runner:
        runner.train()
        first = (runner.seed, list(runner.datasets["val"].indices))
    with Split(config) as runner:
        assert runner.state.train.global_step == 2
        assert (runner.seed, list(runner.datasets["val"].indices)) == first
    with Split(settings(tmp_path / "other", seed=None)) as runner:
        assert runner.seed != first[0]


def test_stored_seed_of_zero_is_used_if_none_is_given(tmp_path: Path) -> None:
    with Story(settings(tmp_path, dir=str(tmp_path), seed=0), stop_at=2) as runner:
        runner.train()
    with Story(settings(tmp_path, dir=str(tmp_path), seed=None, auto_resume=True)) as runner:
        assert (runner.seed, runner.state.train.global_step) == (0, 2)


class Ignoring(dl.TorchRunner):
    """The second batch has no target that counts."""

    not_saved = ("reasons",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.model, self.criterion = nn.Linear(3, 4), nn.CrossEntropyLoss()
        targets = torch.tensor([1, 2, -100, -100, 3, 0, 1, 1])
        self.datasets = {"train": TensorDataset(torch.randn(8, 3), targets)}
        self.reasons: list[str | None] = []

    def step(self) -> Any:
        outcome = super().step()
        self.reasons.append(outcome.reason)
        return outcome


def test_a_window_without_targets_is_left_out_under_fp16_too(tmp_path: Path) -> None:
    loader = {"batch_size": 2, "shuffle": False}
    with Ignoring(settings(tmp_path, steps=3, precision="fp16", dataloader=loader)) as runner:
        runner.train()
        assert runner.reasons == [None, "weightless", None, None]
        assert (
            runner.precision.scaler is not None and runner.precision.scaler.get_scale() == 2.0**16
        )


def test_a_schedule_by_epoch_advances_in_step_mode(tmp_path: Path) -> None:
    scheduler = {"type": "steplr", "step_size": 1, "gamma": 0.5, "interval": "epoch"}
    with Story(settings(tmp_path, steps=9, scheduler=scheduler)) as runner:
        runner.train()
        assert runner.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**2)


class Unfreezing(Story):
    def __init__(self, config: Mapping[str, Any], **options: Any) -> None:
        super().__init__(config, **options)
        self.model[0].requires_grad_(False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train_epoch(self, split: str = "train") -> dict[str, float]:
        if self.state.train.epoch == 1:
            self.unwrapped_model[0].requires_grad_(True)
        return super().train_epoch(split)


def test_later_unfrozen_weights_are_reduced_over_the_ranks(tmp_path: Path) -> None:
    more = {"steps": None, "epochs": 3, "evaluate_interval": None}
    one = train(Unfreezing, settings(tmp_path / "one", **more))
    two = settings(tmp_path / "two", **{**more, "dataloader": {"batch_size": 2}})
    for rank in run_processes(train, Unfreezing, two, world_size=2):
        assert equal(rank, one, 1e-12)


def accumulated(root: Path, criterion: Any, batch_size: int, accum_steps: int) -> Tensor:
    class Tokens(dl.TorchRunner):
        def __init__(self, config: Mapping[str, Any]) -> None:
            super().__init__(config)
            torch.manual_seed(0)
            self.model, self.criterion = nn.Linear(3, 4).double(), criterion
            targets = torch.tensor([1, 2, -100, -100, 3, 0, -100, 1])
            self.datasets = {"train": TensorDataset(points(8).tensors[0], targets)}

    loader = {"batch_size": batch_size, "shuffle": False}
    with Tokens(settings(root, steps=1, accum_steps=accum_steps, dataloader=loader)) as runner:
        runner.train()
        return runner.model.weight.detach().clone()


WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
CRITERIA: dict[str, Any] = {
    "plain": F.cross_entropy,
    "sum": partial(F.cross_entropy, reduction="sum"),
    "weights": partial(F.cross_entropy, weight=WEIGHTS),
    "smoothing": partial(F.cross_entropy, label_smoothing=0.1),
    "own": lambda pred, target: F.cross_entropy(pred, target),
}


@pytest.mark.parametrize("name", CRITERIA)
def test_a_function_weighs_as_its_module_does(name: str, tmp_path: Path) -> None:
    criterion = CRITERIA[name]
    whole = accumulated(tmp_path / "whole", criterion, 8, 1)
    parts = accumulated(tmp_path / "parts", criterion, 2, 4)
    torch.testing.assert_close(whole, parts, rtol=0, atol=1e-12)


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        value = torch.randn(3, dtype=torch.float64) + index
        return value, value.sum().reshape(1)


class NoisyRunner(dl.Runner):
    """A user's own loader over drawn samples, which both ends of a pipeline read."""

    not_saved = ("read",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.model = nn.Sequential(nn.Linear(3, 1), nn.Flatten()).double()
        self.criterion = nn.MSELoss()
        self.dataloaders = {"train": DataLoader(Noisy(), batch_size=4)}
        self.read: list[Tensor] = []

    def to_device(self, data: Any) -> Any:
        self.read.append(data[0].clone())
        return super().to_device(data)


def read_noisy(config: Mapping[str, Any]) -> list[Tensor]:
    with NoisyRunner(config) as runner:
        runner.train()
        return runner.read


def test_ranks_of_one_replica_read_the_same_from_a_users_loader(tmp_path: Path) -> None:
    parallel = {"stack": "parallel", "parallel": {"axes": {"pipeline": 2}}}
    config = settings(tmp_path, steps=4, **parallel)
    first, last = run_processes(read_noisy, config, world_size=2)
    assert len(first) == 4
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, last))
    assert not torch.equal(first[0], first[2])


def build_with_sampler(config: Mapping[str, Any]) -> None:
    class Sampled(NoisyRunner):
        def __init__(self, config: Mapping[str, Any]) -> None:
            super().__init__(config)
            sampler = torch.utils.data.DistributedSampler(Noisy(), num_replicas=2, rank=self.rank)
            self.dataloaders = {"train": DataLoader(Noisy(), batch_size=2, sampler=sampler)}

    with Sampled(config) as runner:
        runner.train()


def test_sampler_over_other_ranks_than_the_reading_ones_is_refused(tmp_path: Path) -> None:
    run_processes(build_with_sampler, settings(tmp_path / "ddp", steps=2), world_size=2)
    parallel = {"stack": "parallel", "parallel": {"axes": {"pipeline": 2}}}
    with pytest.raises(ValueError, match="to take share 0 of 1"):
        run_processes(build_with_sampler, settings(tmp_path / "mesh", **parallel), world_size=2)


def two_runners(root: Path) -> int:
    first, second = Story(settings(root / "a")), Story(settings(root / "b"))
    first.close()
    second.train()
    second.close()
    assert not torch.distributed.is_initialized()
    return second.state.train.global_step


def test_the_last_runner_of_a_process_leaves_the_group(tmp_path: Path) -> None:
    assert run_processes(two_runners, tmp_path, world_size=2) == [6, 6]


IDLE: list[tuple[dict[str, Any], list[str]]] = [
    (
        {
            "ema": {"decay": 0.9},
            "profiling": {"wait": 5, "active": 2},
            "max_skipped_updates": 3,
            "patience": 2,
        },
        ["patience", "ema.decay", "profiling.wait, profiling.active", "max_skipped_updates"],
    ),
    (
        {"patience": 2, "score_name": "acc", "score_mode": "max"},
        ["patience, score_name, score_mode"],
    ),
    (
        {
            "checkpoint.enable_ft_dataloader_checkpoints": True,
            "checkpoint.async_mode": "async_with_pinned_mem",
        },
        ["checkpoint.enable_ft_dataloader_checkpoints", "checkpoint.async_mode"],
    ),
    (
        {"dataloader": {"batch_size": 4, "snapshot_every_n_steps": 7}},
        ["dataloader.snapshot_every_n_steps"],
    ),
    (
        {
            "stack": "parallel",
            "parallel.pipeline_n_microbatches": 4,
            "fsdp.mp_policy.param_dtype": "bfloat16",
        },
        ["parallel.pipeline_n_microbatches", "fsdp.mp_policy.param_dtype"],
    ),
]


@pytest.mark.parametrize(("idle", "named"), IDLE)
def test_settings_without_effect_are_named(
    idle: dict[str, Any], named: list[str], tmp_path: Path, caplog: Any
) -> None:
    class Unscored(Line):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            if self.config.get("patience") == 2:
                del self.datasets["val"]

    with Unscored(toy_settings(tmp_path, epochs=1, **idle)):
        pass
    said = "\n".join(caplog.messages)
    assert [f"{name} has no effect" in said for name in named] == [True] * len(named)
    assert said.count("has no effect") == len(named)


@pytest.mark.parametrize(
    "schedule", [{}, {"type": "cosine"}, {"type": "steplr", "step_size": 2, "gamma": 0.5}]
)
def test_a_rate_changed_on_purpose_is_the_one_the_run_goes_on_with(
    schedule: dict[str, Any], tmp_path: Path
) -> None:
    first = settings(tmp_path / "first", scheduler=schedule)
    with Story(first, stop_at=3) as runner:
        runner.train()
        before = runner.optimizer.param_groups[0]["lr"]
    optim = {"type": "sgd", "lr": 0.2, "weight_decay": 0.5}
    changed = {"optim": optim, "resume": f"{first['dir']}/checkpoints/latest.pth"}
    with pytest.raises(ValueError, match=r"optim.lr: stored 0.1, now 0.2\n  optim.weight_decay"):
        Story(first | changed | {"dir": str(tmp_path / "refused")})
    named = {
        "checkpoint": {
            "interval": 100,
            "exclude_from_loading": ["runner.optim.lr", "runner.optim.weight_decay"],
        }
    }
    with Story(first | changed | named | {"dir": str(tmp_path / "second")}) as runner:
        (group,) = runner.optimizer.param_groups
        assert group["lr"] == pytest.approx(2 * before)
        assert group["weight_decay"] == 0.5
        runner.train()
        whole = runner.optimizer.param_groups[0]["lr"]
    with Story(first | {"dir": str(tmp_path / "third"), "optim": optim}) as runner:
        runner.train()
        assert runner.optimizer.param_groups[0]["lr"] == pytest.approx(whole), (
            "the schedule goes on from the new rate"
        )


def test_names_of_other_trainers_are_pointed_out(tmp_path: Path, caplog: Any) -> None:
    class Moved(Story):
        def __init__(self, config: Mapping[str, Any]) -> None:
            super().__init__(config)
            self.dataset, self.datasets = self.datasets, {}
            self.dataloaders = {}

        def training_step(self, batch: Any) -> None:
            pass

        def evalute_step(self, data: Any) -> None:
            pass

    with Moved(settings(tmp_path)):
        pass
    said = "\n".join(caplog.messages)
    assert (
        "The library does not call the method 'training_step': did you mean `train_step`?" in said
    )
    assert (
        "The library does not call the method 'evalute_step': did you mean `evaluate_step`?" in said
    )
    assert "You have set `self.dataset`: did you mean `self.datasets`?" in said


# Configurations, budgets and loaders


class Made(Line):
    def __init__(self, root: Path) -> None:
        super().__init__(dl.RunnerConfig(toy_settings(root, epochs=2, stack="parallel")))


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
        lambda config, root: WithModel(
            {"in_features": 3, "out_features": 1}, dl.RunnerConfig(config)
        ),
        lambda config, root: Line(file_of(config, root)),
        lambda config, root: Line(Namespace(**config)),
        lambda config, root: Line(config=config),
    ],
    ids=["made", "mapping", "RunnerConfig", "file", "namespace", "keyword"],
)
def test_the_stack_is_found_wherever_the_configuration_comes_from(
    build: Any, tmp_path: Path
) -> None:
    with build(toy_settings(tmp_path / "run", epochs=2, stack="parallel"), tmp_path) as runner:
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


def test_a_configuration_is_of_its_class_from_a_mapping_and_from_a_checkpoint(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    with OwnConfig(toy_settings(run, epochs=2, net={"width": 3})) as runner:
        assert runner.area == 9 and runner.vocabulary == run / "vocabulary"
        runner.train()
    # The difference from the defaults names single settings, those of the class among them.
    assert yaml.safe_load((run / "metadata" / "config.diff.yaml").read_text())["net"] == {
        "width": 3
    }
    checkpoint = run / "checkpoints" / "latest.pth"
    with OwnConfig.from_checkpoint(
        checkpoint, {"dir": str(tmp_path / "second"), "epochs": 3}
    ) as runner:
        assert runner.area == 9 and runner.epochs == 3
    given = Owned(toy_settings(tmp_path / "third", net={"width": 3}, epochs=4))
    with Line.from_checkpoint(checkpoint, given) as runner:
        assert isinstance(runner.config, Owned) and runner.epochs == 4


def test_split_without_an_evaluation_gives_no_score(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="score_split='train', which is trained on"):
        Line(toy_settings(tmp_path, epochs=2, score_split="train"))
    with Line(
        toy_settings(tmp_path, epochs=2, score_split="train", evaluate_splits=["train", "val"])
    ) as runner:
        results = runner.train()
        assert runner.latest_score == results[2]["train"]["loss"]
        inputs, targets = runner.datasets["train"].tensors
        with torch.no_grad():
            evaluated = float(runner.criterion(runner.unwrapped_model(inputs), targets))
        assert runner.latest_score == pytest.approx(evaluated, rel=1e-5)


@pytest.mark.parametrize(("before", "after"), [(50, 5), (3, 5), (8, 5)])
def test_budget_of_steps_may_change_during_training(
    before: int, after: int, tmp_path: Path
) -> None:
    class Changing(Line):
        def step(self) -> Any:
            if self.state.train.global_step == 2:
                self.config.steps = after
            return super().step()

    with Changing(toy_settings(tmp_path, steps=before)) as runner:
        runner.train()
        assert runner.state.train.global_step == after
        assert list(runner.results)[-1] == after
        assert runner.read_checkpoint("latest")["state"]["train"]["global_step"] == after


def own_loader(root: str) -> None:
    loader = DataLoader(line_of(8), batch_size=4, num_workers=1)

    class Own(Line):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.datasets, self.dataloaders = {}, {"train": loader}

    with Own(toy_settings(root, steps=2)) as runner:
        runner.train()
    assert loader.worker_init_fn is None
    next(iter(loader))


def test_a_loader_of_ones_own_is_left_as_it_was_and_lets_the_program_end(tmp_path: Path) -> None:
    run_processes(own_loader, str(tmp_path), world_size=1)

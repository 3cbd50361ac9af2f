"""Random numbers are a function of place: which ones are drawn follows from the sample, the update and the phase, and from nothing else."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.processes import run_processes
from support.toys import differences, whole_state
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import danling as dl


class Numbered(Dataset[dict[str, Any]]):
    def __init__(self, size: int) -> None:
        self.points = torch.randn(size, 4, generator=torch.Generator().manual_seed(size))

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input": self.points[index], "target": index % 3, "index": index}


def draw() -> tuple[list[float], float, float]:
    """Draw from all streams of the host: a dropout mask, NumPy's and Python's."""
    return F.dropout(torch.ones(40), 0.5).tolist(), float(np.random.rand()), random.random()


def settings(root: Path, **changes: Any) -> dict[str, Any]:
    return {
        "seed": 4,
        "log": False,
        "dir": str(root),
        "optim": {"type": "adamw", "lr": 1e-2},
        "epochs": 2,
        **changes,
    }


class Drawing(dl.Runner):
    """Writes down what each micro-batch draws, by the update and the numbers of its samples."""

    not_saved = ("drawn",)

    def __init__(self, config: Mapping[str, Any], size: int = 36) -> None:
        super().__init__(config)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3))
        self.criterion = nn.CrossEntropyLoss()
        self.datasets = {"train": Numbered(size)}
        self.drawn: dict[tuple[int, ...], Any] = {}

    def train_step(self, data: Any) -> Any:
        key = (self.state.train.attempted, *data["index"].tolist())
        assert key not in self.drawn
        self.drawn[key] = draw()
        return super().train_step((data["input"], data["target"]))


# However samples are divided


def drawn_by(config: dict[str, Any]) -> Any:
    with Drawing(config) as runner:
        runner.train()
        return runner.drawn


@pytest.mark.timeout(300)
def test_noise_belongs_to_the_samples_however_they_are_divided(tmp_path: Path) -> None:
    found = []
    for number, (world_size, accum_steps) in enumerate([(1, 6), (2, 3), (3, 2)]):
        loader = {"global_batch_size": 12, "micro_batch_size": 2}
        config = settings(tmp_path / str(number), dataloader=loader)
        ranks = run_processes(drawn_by, config, world_size=world_size)
        assert all(len(drawn) == 2 * 3 * accum_steps for drawn in ranks)
        found.append({key: value for drawn in ranks for key, value in drawn.items()})
    assert len(found[0]) == 2 * 36 // 2
    assert found[0] == found[1] == found[2]
    # Never the same twice.
    masks = [tuple(mask) for mask, _, _ in found[0].values()]
    assert len(set(masks)) == len(masks)


def test_a_skipped_update_repeats_no_number(tmp_path: Path) -> None:
    # The scale of float16 begins far too high, so that the first updates overflow.
    config = settings(
        tmp_path, precision="fp16", skip_nonfinite_grad=True, dataloader={"batch_size": 6}
    )
    with Drawing(config) as runner:
        runner.criterion = lambda pred, target: 20 * F.cross_entropy(pred, target)
        runner.train()
        assert runner.train_state.skipped_updates > 1 and runner.train_state.global_step > 1
        assert len({tuple(mask) for mask, _, _ in runner.drawn.values()}) == len(runner.drawn) == 12


# Between the streams


def first_draws() -> Tensor:
    """Draw one integer below 256 from each stream of the host."""
    return torch.tensor(
        [int(torch.randint(256, ())), int(np.random.randint(256)), random.randrange(256)]
    )


class FirstDraws(Dataset[Tensor]):
    def __len__(self) -> int:
        return 600

    def __getitem__(self, index: int) -> Tensor:
        return first_draws()


class StreamOfDraws(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        for _ in range(600 // (1 if info is None else info.num_workers)):
            yield first_draws()


def draw_in_collate(items: list[Tensor]) -> Tensor:
    return first_draws()[None]


class FirstDraw(dl.Runner):
    """Keeps what was drawn first where samples are read, in `collate_fn` or in `train_step`."""

    not_saved = ("drawn",)

    def __init__(self, config: Mapping[str, Any], dataset: Dataset[Tensor], in_step: bool) -> None:
        super().__init__(config)
        self.model, self.criterion = nn.Linear(1, 1), nn.MSELoss()
        self.datasets = {"train": dataset}
        self.in_step = in_step
        self.drawn: list[Tensor] = []

    def train_step(self, data: Any) -> Any:
        self.drawn.extend([first_draws()] if self.in_step else data)
        return super().train_step((torch.ones(1, 1), torch.ones(1, 1)))


@pytest.mark.parametrize(
    "where", ["sample", "worker", "collate", "stream", "stream worker", "step"]
)
def test_streams_draw_independently_wherever_they_are_seeded(tmp_path: Path, where: str) -> None:
    loader: dict[str, Any] = {"batch_size": 1, "num_workers": 2 * where.endswith("worker")}
    if where == "collate":
        loader["collate_fn"] = draw_in_collate
    dataset = StreamOfDraws() if where.startswith("stream") else FirstDraws()
    with FirstDraw(
        settings(tmp_path, epochs=1, dataloader=loader), dataset, where == "step"
    ) as runner:
        runner.train()
    drawn = torch.stack(runner.drawn).T
    assert drawn.shape == (3, 600)
    for n in (2, 4, 16, 256):
        sigma = ((1 / n) * (1 - 1 / n) / 600) ** 0.5
        for one, other in itertools.combinations(drawn % n, 2):
            assert abs((one == other).double().mean().item() - 1 / n) < 4 * sigma, n


# Wherever a user draws


class DrawingEverywhere(Drawing):
    """Draws in overrides, what it trains with depends on it."""

    not_saved = ("scale",)

    def __init__(self, config: Mapping[str, Any], stop_at: int | None = None) -> None:
        super().__init__(config)
        self.stop_at = stop_at
        self.critic = nn.Linear(3, 1)
        self.optimizer = dl.optim.JointOptimizer(
            torch.optim.SGD(self.model[0].parameters(), lr=0.1),
            torch.optim.SGD(self.model[2].parameters(), lr=0.1),
        )
        self.datasets["val"] = Numbered(7)
        self.scale = 1.0

    def train_epoch(self, split: str = "train") -> Any:
        self.scale = 1 + sum(draw()[1:]) + float(torch.rand(()))
        return super().train_epoch(split)

    def train_step(self, data: Any) -> Any:
        return super().train_step({**data, "input": data["input"] * self.scale})

    def step(self) -> Any:
        if self.state.train.global_step + 1 == self.stop_at:
            self.stop()
        # Ranks draw by their samples here, and must add the same.
        seed = self.world.broadcast_object(
            int(torch.randint(2**31, ())) + int(sum(draw()[1:]) * 2**20)
        )
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.unwrapped_model.parameters():
            parameter.grad += 1e-2 * torch.randn(parameter.shape, generator=generator)
        return super().step()

    def optimizer_step(self) -> None:
        first, second = self.optimizer.optimizers
        first.step()
        with torch.no_grad():
            for parameter in self.unwrapped_model.parameters():
                parameter += 1e-3 * torch.randn_like(parameter)
        second.step()

    def evaluate_step(self, data: Any) -> Any:
        draw()
        return super().evaluate_step((data["input"], data["target"]))


def train_everywhere(config: dict[str, Any], stop_at: int | None) -> Any:
    with DrawingEverywhere(config, stop_at) as runner:
        runner.train()
        return runner.train_state.global_step, whole_state(runner)


def train_all(
    config: dict[str, Any], root: str, stops: list[int | None], resume: bool
) -> list[Any]:
    return [
        train_everywhere(
            {**config, "dir": f"{root}/{k}", "auto_resume": resume}, None if resume else k
        )
        for k in stops
    ]


@pytest.mark.timeout(400)
def test_draws_in_overrides_are_those_of_an_uninterrupted_run(tmp_path: Path) -> None:
    config = settings(tmp_path, dataloader={"batch_size": 6, "drop_last": False})
    del config["optim"]
    whole = run_processes(
        train_everywhere, {**config, "dir": f"{tmp_path}/whole"}, None, world_size=2
    )
    last = whole[0][0]
    assert last == 6
    stops = list(range(1, last))
    stopped = run_processes(train_all, config, str(tmp_path), stops, False, world_size=2)
    resumed = run_processes(train_all, config, str(tmp_path), stops, True, world_size=2)
    for rank in range(2):
        assert [step for step, _ in stopped[rank]] == stops
        for k, (_, state) in zip(stops, resumed[rank]):
            assert differences(state, whole[rank][1]) == [], f"stopped at {k}"


# In optimizers


class Langevin(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                noise = torch.randn(local.shape)
                self.state[parameter]["noise"] = noise
                grad = (
                    parameter.grad.to_local()
                    if hasattr(parameter.grad, "to_local")
                    else parameter.grad
                )
                local.add_(grad, alpha=-group["lr"]).add_(noise, alpha=1e-2)


class Sampling(Drawing):
    """Trains with noise in the optimizer, and with a second one that steps within `train_step`."""

    not_saved = ("phases", "second")

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.optimizer = Langevin(self.model.parameters())
        self.own = torch.zeros(3, requires_grad=True)
        self.second = Langevin([self.own])
        self.phases: list[list[float]] = []
        self.noises: list[list[float]] = []

    def train_step(self, data: Any) -> Any:
        self.own.grad = torch.ones(3)
        self.phases.append(torch.rand(2).tolist())
        self.second.step()
        self.noises.append(self.second.state[self.own]["noise"].tolist())
        self.phases.append(torch.rand(2).tolist())
        return super().train_step(data)


def sampled_by(config: dict[str, Any]) -> Any:
    with Sampling(config) as runner:
        runner.train()
        held = [
            p.to_local() if hasattr(p, "to_local") else p
            for p in runner.unwrapped_model.parameters()
        ]
        noise = [
            runner.optimizer.state[parameter]["noise"]
            for parameter in runner.unwrapped_model.parameters()
        ]
        values = [[value.detach().tolist() for value in each] for each in (held, noise)]
        return [*values, runner.own.tolist(), runner.noises, runner.phases]


@pytest.mark.timeout(200)
def test_noise_in_an_optimizer_is_equal_on_copies_and_differs_on_shards(tmp_path: Path) -> None:
    config = settings(tmp_path / "copies", dataloader={"batch_size": 3}, accum_steps=2, epochs=1)
    del config["optim"]
    copies = run_processes(sampled_by, config, world_size=2)
    assert copies[0][:4] == copies[1][:4]
    noises = [tuple(noise) for noise in copies[0][3]]
    assert len(set(noises)) == len(noises) == 2 * 3
    # What the samples are trained with is not: each phase of each micro-batch draws others.
    drawn = [tuple(phase) for found in copies for phase in found[4]]
    assert len(set(drawn)) == len(drawn) == 2 * 2 * 2 * 3
    sharded = {
        **config,
        "dir": str(tmp_path / "shards"),
        "stack": "parallel",
        "parallel": {"axes": {"shard": 2}},
    }
    shards = run_processes(sampled_by, sharded, world_size=2)
    assert shards[0][1][0] != shards[1][1][0] and shards[0][2:4] == shards[1][2:4]


class Searching(Drawing):
    """Evaluates its loss several times in a step, as a line search does."""

    not_saved = ("batches", "noises")

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.noises: list[Any] = []
        self.batches: list[Any] = []

    def train_step(self, data: Any) -> Any:
        if not self._parts.keys.in_update:
            self.batches.append(data)
        self.noises.append(torch.rand(3).tolist())
        return dl.TorchRunner.train_step(self, (data["input"], data["target"]))

    def optimizer_step(self) -> None:
        for batch in self.batches:
            self.train_step(batch)
        self.batches.clear()
        super().optimizer_step()


def test_closure_repeating_a_micro_batch_draws_the_same(tmp_path: Path) -> None:
    config = settings(tmp_path, dataloader={"batch_size": 6}, accum_steps=2, steps=2, epochs=None)
    with Searching(config) as runner:
        runner.train()
        first, second = runner.noises[:4], runner.noises[4:]
        assert first[:2] == first[2:] and second[:2] == second[2:]
        assert len({tuple(noise) for noise in runner.noises}) == 4


# Schedules and recomputed activations


class Staged(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.linear = name, nn.Linear(6, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + F.dropout(
            self.linear(F.dropout(inputs, 0.5, self.training)), 0.5, self.training
        )


class Layered(dl.Runner):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.model = nn.Sequential(
            nn.Linear(4, 6),
            nn.ModuleList([Staged("a"), Staged("b")])[0],
            Staged("c"),
            nn.Linear(6, 3),
        )
        self.criterion = nn.CrossEntropyLoss()
        self.datasets = {"train": list(zip(Numbered(16).points, torch.arange(16) % 3))}


def layered(config: dict[str, Any]) -> Any:
    with Layered(config) as runner:
        runner.train()
        return {name: parameter.detach().clone() for name, parameter in runner.named_parameters()}


@pytest.mark.timeout(300)
def test_neither_the_schedule_nor_recomputed_activations_change_a_number(tmp_path: Path) -> None:
    found = []
    for number, (schedule, again) in enumerate([("1F1B", False), ("GPipe", True)]):
        parallel = {
            "axes": {"pipeline": 2},
            "pipeline_schedule": schedule,
            "pipeline_microbatch_size": 2,
            "activation_checkpointing": again,
        }
        fsdp = {"blocks": ["Staged"]} if again else {}
        config = settings(
            tmp_path / str(number),
            stack="parallel",
            parallel=parallel,
            fsdp=fsdp,
            dataloader={"batch_size": 8},
        )
        config["optim"] = {"type": "sgd", "lr": 0.1}
        config["checkpoint"] = {"load_only": True}
        found.append(run_processes(layered, config, world_size=2))
    for rank in range(2):
        assert found[0][rank] and differences(found[1][rank], found[0][rank]) == []


# Statistics


@pytest.mark.parametrize("number", [20_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_masks_of_many_keys_are_as_independent_as_those_of_one_stream(
    number: int, tmp_path: Path
) -> None:
    width = 16
    keyed, plain = torch.empty(number, width), torch.empty(number, width)
    with Drawing(settings(tmp_path, dataloader={"batch_size": 6})) as runner:
        for place in range(number):
            runner._parts.keys.begin_micro_batch(None, (place,), 0)
            keyed[place] = F.dropout(torch.ones(width), 0.5) / 2
    torch.manual_seed(1)
    for place in range(number):
        plain[place] = F.dropout(torch.ones(width), 0.5) / 2
    powers = 2 ** torch.arange(8.0)
    for masks in (keyed, plain):
        assert (masks.mean(0) - 0.5).abs().max() < 4.5 * 0.5 / number**0.5
        centred = masks - 0.5
        for lag in (1, 2, 7):
            neighbours = (centred[lag:] * centred[:-lag]).mean(0) * 4
            assert neighbours.abs().max() < 4.5 / number**0.5
        # Of 256 patterns in the first eight elements: 255 degrees of freedom, whose deviation is 22.6.
        counts = torch.bincount((masks[:, :8] @ powers).long(), minlength=256).double()
        assert abs(float(((counts - number / 256) ** 2 / (number / 256)).sum()) - 255) < 4.5 * 22.6
    # As many of the 2^16 patterns as independent masks have.
    patterns = 2**width * (1 - math.exp(-number / 2**width))
    assert len({tuple(row) for row in keyed.tolist()}) > 0.975 * patterns


# Around an evaluation


class EvaluatingWithin(Drawing):
    """Evaluates or predicts in a hook of the training, in different ones and ways."""

    not_saved = ("drawn", "calls")

    def __init__(
        self, config: Mapping[str, Any], where: str | None, stop_at: int | None = None
    ) -> None:
        super().__init__(config)
        self.where, self.stop_at = where, stop_at
        self.model.noise = torch.Generator()  # which a forward of the model would draw from
        self.datasets["val"] = Numbered(7)
        self.calls = 0

    def draw(self) -> Any:
        return (*draw(), float(torch.rand((), generator=self.unwrapped_model.noise)))

    def evaluate_here(self, hook: str) -> None:
        if hook == self.where and self.mode == "train":
            ways = (self.evaluate, self.infer, lambda split: list(self.infer(split, stream=True)))
            ways[self.calls % len(ways)]("val")
            self.calls += 1

    def on_pass_start(self, split: str) -> None:
        self.evaluate_here("on_pass_start")

    def train_step(self, data: Any) -> Any:
        self.evaluate_here("train_step")
        returned = super().train_step(data)
        self.evaluate_here("after the backward")
        self.drawn[(*next(reversed(self.drawn)), -1)] = self.draw()
        return returned

    def optimizer_step(self) -> None:
        self.evaluate_here("optimizer_step")
        super().optimizer_step()
        with torch.no_grad():
            self.unwrapped_model[0].bias += 1e-3 * torch.randn(8)

    def step(self) -> Any:
        if self.state.train.global_step + 1 == self.stop_at:
            self.stop()
        outcome = super().step()
        self.evaluate_here("step")
        return outcome

    def evaluate_step(self, data: Any) -> Any:
        self.draw()
        return super().evaluate_step(
            (data["input"], data["target"]) if isinstance(data, dict) else data
        )

    def infer_step(self, data: Any) -> Any:
        self.draw()
        return super().infer_step(data["input"])


def train_evaluating(root: str, where: str | None, stop_at: int | None) -> Any:
    config = settings(
        Path(root),
        accum_steps=2,
        dataloader={"batch_size": 6},
        evaluate_splits=[],
        auto_resume=True,
    )
    drawn: dict[Any, Any] = {}
    for stop in (stop_at, None) if stop_at else (None,):
        with EvaluatingWithin(config, where, stop) as runner:
            runner.train()
            assert where is None or runner.calls
            drawn.update(runner.drawn)
    return drawn, {
        name: value.clone() for name, value in runner.unwrapped_model.state_dict().items()
    }


HOOKS = ["train_step", "after the backward", "step", "optimizer_step", "on_pass_start"]


def train_evaluating_everywhere(root: str) -> list[Any]:
    runs = [(None, None), *((where, None) for where in HOOKS), ("train_step", 2)]
    return [train_evaluating(f"{root}/{number}", *run) for number, run in enumerate(runs)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_evaluation_within_training_changes_no_draw_of_it(
    tmp_path: Path, world_size: int
) -> None:
    for (expected, weights), *others in run_processes(
        train_evaluating_everywhere, str(tmp_path), world_size=world_size
    ):
        masks = [tuple(drawn[0]) for drawn in expected.values()]
        assert len(set(masks)) == len(masks)
        for drawn, found in others:
            assert drawn == expected
            assert all(torch.equal(value, found[name]) for name, value in weights.items())

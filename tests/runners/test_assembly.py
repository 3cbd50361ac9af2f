"""The parts of a torch runner without a runner: made when they are asked for, of hooks that are looked up at each call."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from danling.config import RunnerConfig
from danling.data import Batch
from danling.data.run_data import RunData
from danling.distributed import LocalDomain, Placement
from danling.reporting import Reporter
from danling.runners.assembly import TorchParts
from danling.runners.state import RunnerState
from danling.training import LocalReduction, PassAgreement, Precision, TrainingSession, Window
from danling.training.preparation import ModelPreparation
from danling.training.saving import RunSaver

CPU = torch.device("cpu")


class Held:
    """What the parts ask of a runner, and nothing that a runner does by itself."""

    stack = "ddp"
    compilation = fault_tolerance = ema = scheduler = None
    is_main_process, distributed, world_size, rank, mode, seed = True, False, 1, 0, "train", 1
    is_step_mode, epochs, steps, batch_size, accum_steps = True, None, 4, 2, 1
    checkpoint_interval, log_interval = 2, 3
    train_splits: tuple[str, ...] = ("train",)
    evaluate_splits: tuple[str, ...] = ()

    def __init__(self, directory: Path, *own: str, **settings: Any) -> None:
        self.own = own
        self.config = RunnerConfig({"dataloader": {"batch_size": 2}, "steps": 4, **settings})
        self.device, self.world, self.state = CPU, LocalDomain(), RunnerState()
        self.placement = Placement.alike(self.world)
        self.model: Any = nn.Linear(1, 1, bias=False)
        self.criterion: Any = nn.MSELoss()
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.datasets: dict[str, Any] = {}
        self.dataloaders: dict[str, Any] = {}
        self.meters: Any = None
        self.preparation = ModelPreparation(self.world)
        self.precision, self.window = Precision(None, CPU), Window(self.world, CPU)
        self.workspace = SimpleNamespace(dir=directory)
        self.reduction = LocalReduction(self.optimizer, self.named_parameters)
        self._session = TrainingSession()
        self._reporter = Reporter(is_main=True, world_size=1, seconds_between_lines=0)
        self._data = RunData(self)  # type: ignore[arg-type]
        self.sources = self._data.sources
        self.saved: list[dict[str, Any]] = []
        self.saver = RunSaver(manager=lambda: None, position=lambda: self.state.train, state=dict)  # type: ignore[arg-type, return-value]
        self._parts = self.parts = TorchParts(self)  # type: ignore[arg-type]
        self.results: dict[int, Any] = {}
        self.standing = SimpleNamespace(board=None, own=False)
        self.index = 0
        self.wrapped = 0

    def _overrides(self, hook: str) -> bool:
        return hook in self.own

    def _bind_reduction(self) -> None:
        self.wrapped += 1

    @property
    def unwrapped_model(self) -> nn.Module:
        return self.preparation.unwrap(self.model)

    def named_parameters(self) -> Any:
        return self.model.named_parameters()

    def unwrap(self, model: Any) -> Any:
        return model

    def wrap_model(self, model: Any) -> Any:
        return model

    def build_agreement(self) -> PassAgreement:
        return PassAgreement(self.world, self.world)

    def to_device(self, data: Any) -> Any:
        return data

    def batch_weight(self, data: Any, target: Any) -> float:
        return float(len(data))

    def count_tokens(self, data: Any) -> float:
        return 0.0

    def train_step(self, data: Any) -> Any:
        loss = self.window.scale(self.model(data).mean())
        loss.backward()
        return None, loss

    def save_checkpoint(self, **options: Any) -> None:
        self.saved.append(options)


def batch(size: int = 2) -> Batch:
    return Batch(torch.ones(size, 1), size, size)


def test_parts_are_made_once_and_share_what_they_share(tmp_path: Path) -> None:
    parts = Held(tmp_path).parts
    assert parts.update is parts.update and parts.update.window is parts.runner.window
    assert parts.forwards is parts.forwards and parts.loss.undecided is False


def test_a_hook_that_is_replaced_is_called_from_then_on_and_a_setting_is_read_each_time(tmp_path: Path) -> None:
    held = Held(tmp_path)
    run: Any = held
    forwards = held.parts.forwards
    source: Any = SimpleNamespace(loader=None)
    held.config.accum_steps = 2
    consumed: list[Batch] = []
    assert forwards.run(source, iter([batch()._replace(closes=None)] * 3), consumed) and len(consumed) == 2
    assert held.window.weight == 4.0
    run.batch_weight = lambda data, target: 10.0
    held.config.accum_steps = 1
    held.window.reset()
    forwards.run(source, iter([batch()]), [])
    assert held.window.weight == 10.0


def test_a_loss_of_a_step_of_the_users_own_is_looked_at_and_that_of_the_library_is_not(tmp_path: Path) -> None:
    class Looked:
        def __init__(self) -> None:
            self.returned: list[Any] = []

        def observe_returned(self, returned: Any, target: Any) -> None:
            self.returned.append(returned)

    for own, expected in (((), 0), (("train_step",), 1)):
        held, looked = Held(tmp_path, *own), Looked()
        vars(held.parts)["loss"] = looked
        held.parts.micro_batches.run(batch())
        assert len(looked.returned) == expected


def test_updates_begin_with_what_is_there_now(tmp_path: Path) -> None:
    held = Held(tmp_path)
    held.model.eval()
    held.criterion = nn.MSELoss(reduction="sum")
    held.window.reduces = False
    held.parts.driver.begin_updates()
    assert held.wrapped == 1 and held.model.training and held.window.reduces and held.window.sum_reduced
    assert held.parts.update.log_every == 3 and not held.parts.update.steps_scheduler


def test_boundaries_are_those_of_the_settings_and_save_by_the_hook(tmp_path: Path) -> None:
    held = Held(tmp_path, evaluate_interval=3)
    found = held.parts.driver.boundaries()
    assert (found.log_every, found.evaluate_every, found.checkpoint_every) == (3, 3, 2)
    found.save_if_due(4)
    assert held.saved == [{"history": True}]


def test_memory_that_runs_out_is_not_retried_where_a_forward_communicates(tmp_path: Path) -> None:
    held = Held(tmp_path)
    held.parts.choose_memory_retry()
    assert held.parts.memory_retry is None
    found: Any = held._data.plan
    held._data.plan = SimpleNamespace(finds_micro_batch_size=True, undivided=found.undivided)  # type: ignore[assignment]
    held.preparation.communication = "ft.enabled=True"
    with pytest.raises(ValueError, match="micro_batch_size='auto' with ft.enabled=True"):
        held.parts.choose_memory_retry()
    held.preparation.communication = None
    held.parts.choose_memory_retry()
    assert held.parts.memory_retry is not None
    assert [parameter is held.model.weight for parameter in held.parts.unreduced()] == [True]


def test_the_criterion_is_what_distributed_data_parallel_does_not_reduce(tmp_path: Path) -> None:
    held = Held(tmp_path)
    held.criterion = nn.Linear(1, 1)
    assert [id(p) for p in held.parts.unreduced()] == [id(p) for p in held.criterion.parameters()]
    held.criterion = nn.functional.mse_loss
    assert held.parts.unreduced() == [] and held.parts.criterion_tensors("buffers") == []


@pytest.mark.parametrize(
    ("verb", "running", "in_step", "mode", "alone"),
    [
        ("train_epoch", False, False, "train", True),
        ("train_epoch", True, False, "train", False),
        ("train_step", True, False, "train", True),
        ("train_step", True, True, "train", False),
        ("evaluate_step", True, False, "evaluate", False),
        ("infer_step", False, False, "train", True),
    ],
)
def test_a_verb_is_alone_where_no_loop_has_called_it(
    verb: str, running: bool, in_step: bool, mode: str, alone: bool, tmp_path: Path
) -> None:
    held = Held(tmp_path)
    held._session.running, held._session.in_step, held.mode = running, in_step, mode  # type: ignore[misc]
    assert held.parts.alone.is_due(verb) is alone


def test_a_train_step_alone_is_a_micro_batch_of_the_window(tmp_path: Path) -> None:
    held = Held(tmp_path)
    assert held.parts.alone.run("train_step", lambda data: data.sum(), torch.ones(3, 1)) == 3
    assert held.wrapped == 1 and held.window.count == 1 and held.window.weight == 3.0
    held.parts.alone.run("train_step", held.train_step, torch.ones(1, 1))
    assert held.wrapped == 1 and held.window.count == 2  # the window is open
    held.optimizer = None
    with pytest.raises(ValueError, match="optimizer=None"):
        held.parts.alone.run("train_step", held.train_step, torch.ones(1, 1))


def test_a_save_within_a_training_is_no_part_of_its_speed(tmp_path: Path) -> None:
    held, told = Held(tmp_path), []

    @contextmanager
    def aside(doing: str = "") -> Any:
        told.append(doing)
        yield

    held._reporter.aside = aside  # type: ignore[method-assign]
    with held.parts.saving():
        told.append("alone")
    held._session.running = True
    with held.parts.saving(), nullcontext():
        told.append("in a training")
    assert told == ["alone", "checkpoint", "in a training"]

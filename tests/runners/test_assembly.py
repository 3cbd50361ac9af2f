"""The parts of a torch runner without a runner: made when they are asked for, of hooks that are looked up at each call."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.held import Held
from torch import nn

from danling.data import Batch


def batch(size: int = 2) -> Batch:
    return Batch(torch.ones(size, 1), size, size)


def test_parts_are_made_once_and_share_what_they_share(tmp_path: Path) -> None:
    parts = Held(tmp_path).parts
    assert parts.update is parts.update and parts.run_window == parts.update.run_window


def test_a_hook_that_is_replaced_is_called_from_then_on_and_a_setting_is_read_each_time(tmp_path: Path) -> None:
    held = Held(tmp_path)
    run: Any = held
    run_window = held.parts.run_window
    source: Any = SimpleNamespace(loader=None)
    held.config.accum_steps = 2
    consumed: list[Batch] = []
    assert run_window(source, iter([batch()._replace(closes=None)] * 3), consumed) and len(consumed) == 2
    assert held.window.weight == 4.0
    run.batch_weight = lambda data, target: 10.0
    held.config.accum_steps = 1
    held.window.reset()
    run_window(source, iter([batch()]), [])
    assert held.window.weight == 10.0


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
    held.parts.wrapping.check_memory_retry()
    found: Any = held._data.plan
    held._data.plan = SimpleNamespace(finds_micro_batch_size=True, undivided=found.undivided)  # type: ignore[assignment]
    held.preparation.communication = "ft.enabled=True"
    with pytest.raises(ValueError, match="micro_batch_size='auto' with ft.enabled=True"):
        held.parts.wrapping.check_memory_retry()
    held.preparation.communication = None
    held.parts.wrapping.check_memory_retry()
    assert [parameter is held.model.weight for parameter in held.parts.wrapping.unreduced()] == [True]


def test_the_criterion_is_what_distributed_data_parallel_does_not_reduce(tmp_path: Path) -> None:
    held = Held(tmp_path)
    held.criterion = nn.Linear(1, 1)
    assert [id(p) for p in held.parts.wrapping.unreduced()] == [id(p) for p in held.criterion.parameters()]
    held.criterion = nn.functional.mse_loss
    assert held.parts.wrapping.unreduced() == [] and held.parts.wrapping.criterion_tensors("buffers") == []


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
    with held.parts.saved.saving():
        told.append("alone")
    held._session.running = True
    with held.parts.saved.saving(), nullcontext():
        told.append("in a training")
    assert told == ["alone", "checkpoint", "in a training"]


def test_frozen_weights_are_left_out_only_where_every_rank_knows_all_weights(tmp_path: Path) -> None:
    settings = {"checkpoint": {"trainable_only": True}}
    held = Held(tmp_path, **settings)
    held.parts.saved.check_saving()
    held.stack = "deepspeed"
    with pytest.raises(ValueError, match="Received: stack='deepspeed'"):
        held.parts.saved.check_saving()
    held = Held(tmp_path, parallel={"axes": {"pipeline": 2}}, **settings)
    held.stack = "parallel"
    with pytest.raises(ValueError, match="Received: parallel.axes.pipeline above 1"):
        held.parts.saved.check_saving()
    held.config.checkpoint.trainable_only = False
    held.parts.saved.check_saving()


def test_counters_and_the_reference_of_weights_come_back_as_they_were_saved(tmp_path: Path) -> None:
    held, other = Held(tmp_path), Held(tmp_path)
    held.state.train.global_step, held.window.agreed_reference = 3, 8.0
    held.parts.loss.targetless = True
    saved = {part.name: part.get() for part in held.parts.saved.progress_parts() if part.name in ("train", "bare")}
    assert saved["train"]["global_step"] == 3 and saved["train"]["weight_reference"] == 8.0
    for part in other.parts.saved.progress_parts():
        if part.name in saved:
            part.set(saved[part.name], frozenset())
    assert other.state.train.global_step == 3 and other.window.agreed_reference == 8.0
    assert other.parts.loss.targetless is True


def test_without_checks_of_updates_nothing_is_put_around_them(tmp_path: Path) -> None:
    parts = Held(tmp_path).parts
    assert parts.audits is None
    assert parts.update.sync.riders == [parts.update.norms] and not parts.runner.observers
    assert parts.run_window == parts.update.run_window


def test_digests_are_told_of_updates_samples_and_the_collective(tmp_path: Path) -> None:
    parts = Held(tmp_path, audit={"digest_interval": 2}).parts
    assert parts.audits is not None
    found = parts.audits.updates
    assert found is not None and parts.update.sync.riders == [parts.update.norms, found]
    assert parts.runner.observers == [found]

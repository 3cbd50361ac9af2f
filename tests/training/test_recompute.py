"""The micro-batches of an update, run again from the same beginning."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support.toys import differences, whole_state
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import danling as dl
from danling.utils.observers import Observer


class Lengths(Observer):
    """Sums the norms of what micro-batches have read."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def micro_batch_started(self, data: object, *, read: Any, samples: float) -> None:
        self.norms.append(float(read[0].norm()))

    def state_dict(self) -> dict[str, Any]:
        return {"norms": self.norms}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.norms = state["norms"]


class Noisy(dl.TorchRunner):
    def __init__(self, root: Path) -> None:
        super().__init__(
            {
                "dir": str(root),
                "log": False,
                "seed": 3,
                "epochs": 1,
                "optim": {"type": "sgd", "lr": 0.1},
            }
        )
        self.model = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)
        )
        self.criterion = nn.CrossEntropyLoss()
        self.datasets = {"train": TensorDataset(torch.randn(8, 4), torch.arange(8) % 3)}
        self.count, self.norms, self.largest = 0, [0.5], torch.zeros(4)
        self.teacher = nn.Linear(4, 2)
        self.names = {"first": self.norms}

    def train_step(self, data: Any) -> Any:
        self.count += 1
        self.norms.append(float(data[0].norm()))
        torch.maximum(self.largest, data[0].amax(0), out=self.largest)
        with torch.no_grad():
            self.teacher.weight += self.largest.sum()
        if self.count > 2:
            self.names = {"second": self.norms, "later": torch.ones(2)}
        self.meters.update({"norm": float(data[0].norm() + torch.rand(()))}, len(data[0]))
        self.carry = data[0].sum() if self.carry is None else self.carry + data[0].sum()
        return super().train_step(data)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(4, 4, generator=generator), torch.arange(4) % 3) for _ in range(3)]


def gradients(runner: Any) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in runner.model.parameters()]


def test_repeated_micro_batches_give_the_same(tmp_path: Path) -> None:
    with Noisy(tmp_path) as runner:
        lengths = Lengths()
        runner.observers.append(lengths)
        runner.train_step(batches()[0])
        runner.step()
        heard = list(lengths.norms)
        before, carried = whole_state(runner), runner.carry
        held = runner.norms, runner.names, runner.largest, runner.teacher
        take_back = runner._parts.recompute.remember()
        found = []
        for _ in range(2):
            for batch in batches():
                runner.train_step(batch)
            found.append((gradients(runner), whole_state(runner), runner.window.loss))
            assert len(lengths.norms) == len(heard) + 3
            take_back()
            assert differences(whole_state(runner), before) == [] and torch.equal(
                runner.carry, carried
            )
            assert (runner.count, len(runner.norms)) == (1, 2) and list(runner.names) == ["first"]
            assert all(
                a is b
                for a, b in zip(held, (runner.norms, runner.names, runner.largest, runner.teacher))
            )
            assert runner.names["first"] is runner.norms
            assert lengths.norms == heard
            assert runner.window.count == 0 and all(
                p.grad is None for p in runner.model.parameters()
            )
        assert differences(*(list(each) for each in found)) == []
        assert differences(found[0][1], before) != []


def test_batch_changed_by_a_step_is_refused_at_its_repetition(tmp_path: Path) -> None:
    with Noisy(tmp_path) as runner:
        recompute = runner._parts.recompute
        recompute.remember()
        first, second = {"input": [torch.ones(2, 3)], "mask": None}, (torch.ones(1), "text")
        for batch in (first, second, first, second):
            recompute.check(batch)
        first["input"][0].add_(1)  # type: ignore[index]
        recompute.check(second)
        with pytest.raises(
            ValueError,
            match=r"one of shape \(2, 3\) that was changed in place\. Change a clone of it",
        ):
            recompute.check(first)
        # Before another update it is what the loader gave.
        recompute.remember()
        recompute.check(first)


class Levelled(TensorDataset):
    """Rows with a state that the program changes."""

    level = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"level": self.level}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.level = state["level"]


class Changing(Noisy):
    """Changes its dataset and the settings of its optimizer in each micro-batch."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.levelled = Levelled(torch.randn(8, 4), torch.arange(8) % 3)
        self.datasets = {"train": self.levelled}

    def train_step(self, data: Any) -> Any:
        self.levelled.level += 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = 0.5 * group["lr"]
        return super().train_step(data)


@pytest.mark.parametrize("reads_again", [False, True])
def test_settings_of_the_optimizer_are_put_back_and_states_of_datasets_that_are_read_again(
    reads_again: bool, tmp_path: Path
) -> None:
    with Changing(tmp_path) as runner:
        take_back = runner._parts.recompute.remember(reads_again=reads_again)
        for times in (1, 2):
            for batch in batches():
                runner.train_step(batch)
            assert (runner.levelled.level, runner.optimizer.param_groups[0]["lr"]) != (0.0, 0.1)
            take_back()
            level = 0.0 if reads_again else float(times * len(batches()))
            assert (runner.levelled.level, runner.optimizer.param_groups[0]["lr"]) == (level, 0.1)


class Unrestorable(Lengths):
    """Cannot load its own state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("norms")


@pytest.mark.parametrize("critical", [False, True])
def test_observer_that_cannot_be_put_back_is_dropped(
    critical: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Noisy(tmp_path) as runner:
        kind = type("Unrestorable", (Unrestorable,), {"critical": critical})
        failing, other = kind(), Lengths()
        runner.observers.extend([failing, other])
        take_back = runner._parts.recompute.remember()
        runner.train_step(batches()[0])
        if critical:
            with pytest.raises(KeyError, match="norms"):
                take_back()
            return
        take_back()
        # As an observer that fails in an event: it is named, and the training continues without it.
        assert "Unrestorable failed and is dropped" in caplog.text
        assert failing not in runner.observers and other.norms == []


def test_large_attribute_that_was_replaced_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class WithBank(Noisy):
        bank: ClassVar = {"rows": torch.zeros(2**10)}

    monkeypatch.setattr("danling.training.attributes.REMEMBERED_BYTES", 2**10)
    with WithBank(tmp_path) as runner:
        queue, gone = torch.zeros(2**10), torch.ones(2**10)
        runner.queue, runner.gone = queue, gone
        take_back = runner._parts.recompute.remember()
        runner.queue = torch.cat([runner.queue[8:], torch.ones(8)])
        del runner.gone
        take_back()
        assert runner.queue is queue and not queue.any() and runner.gone is gone
        assert "bank" not in vars(runner)  # it is the class's, and was not replaced

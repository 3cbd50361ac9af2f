"""A verb that some ranks do not call: the ranks and their calls are named, before and after the collectives fail."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from support.processes import Outcome, run_outcomes, run_processes
from torch import nn
from torch.utils.data import TensorDataset

import danling as dl
from danling.distributed import CollectiveCallError, calls


class Habit(dl.Runner):
    """Calls a verb on the main process only."""

    def __init__(self, config: dl.RunnerConfig, verb: str) -> None:
        super().__init__(config)
        inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
        self.datasets = {
            name: TensorDataset(inputs, inputs.sum(1, keepdim=True)) for name in ("train", "val")
        }
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.criterion = nn.MSELoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.verb = verb

    def call_on_main(self) -> None:
        if self.is_main_process:
            if self.verb == "evaluate":
                self.evaluate("val")
            else:
                self.save_checkpoint()


class HabitAfterPass(Habit):
    def train_epoch(self, split: str = "train") -> object:
        metrics = super().train_epoch(split)
        self.call_on_main()
        return metrics


def _train(path: Path, stack: str, verb: str, moment: str) -> None:
    calls._SECONDS_BEFORE_REPORT = 0.5
    # A process that gloo aborts has no other way to say what it has logged.
    logging.getLogger("danling").addHandler(
        logging.FileHandler(path / f"rank-{os.environ['RANK']}.log")
    )
    axes = {"shard": 2} if stack == "parallel" else {}
    limits = {"init_timeout_seconds": 4, "train_timeout_seconds": 4}
    config = dl.RunnerConfig(
        epochs=3,
        seed=1,
        dir=str(path / "run"),
        stack=stack,
        dataloader={"batch_size": 4},
        comm=limits,
    )
    config.merge({"parallel": {"axes": axes}})
    kind = HabitAfterPass if moment == "pass" else Habit
    with kind(config, verb) as runner:
        if moment == "loop":
            for number, batch in enumerate(runner.dataloaders["train"]):
                runner.train_step(batch)
                runner.step()
                if number == 1:
                    runner.call_on_main()
        else:
            runner.train()
        if moment == "end":
            runner.call_on_main()


@pytest.mark.parametrize(
    ("stack", "verb", "moment", "other"),
    [
        ("ddp", "evaluate", "pass", "train()"),
        ("ddp", "save_checkpoint", "pass", ""),
        ("ddp", "evaluate", "loop", "train_step()"),
        ("parallel", "evaluate", "loop", "train_step()"),
        ("parallel", "save_checkpoint", "pass", ""),
    ],
)
def test_verb_on_main_process_only_is_named_with_the_calls_of_the_ranks(
    tmp_path: Path, stack: str, verb: str, moment: str, other: str
) -> None:
    first, second = _by_rank(
        run_outcomes(_train, tmp_path, stack, verb, moment, world_size=2, timeout=60)
    )
    both = f"rank 0 in {verb}(); rank 1 in {other}"
    # Each rank has called something before the first of the two gives up.
    assert any("has begun on 1 of 2 ranks" in text and both in text for text in _logged(tmp_path))
    assert isinstance(first.error, CollectiveCallError) and isinstance(
        second.error, CollectiveCallError
    )
    assert both in str(first.error) or "rank 1 has failed" in str(first.error)
    assert both in str(second.error) or "rank 0 has failed" in str(second.error)


@pytest.mark.parametrize("verb", ["evaluate", "save_checkpoint"])
def test_verb_on_main_process_only_fails_at_once_after_the_others_have_closed(
    tmp_path: Path, verb: str
) -> None:
    first, second = _by_rank(
        run_outcomes(_train, tmp_path, "ddp", verb, "end", world_size=2, timeout=60)
    )
    assert second.error is None
    assert str(first.error).startswith(
        f"Expected {verb}() on all 2 ranks. Received: 1; rank 1 closed the runner"
    )


def _die_before_evaluation(path: Path) -> None:
    with Habit(
        dl.RunnerConfig(epochs=1, seed=1, dir=str(path / "run"), dataloader={"batch_size": 4}), ""
    ) as runner:
        if runner.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        runner.evaluate("val")


def test_rank_waiting_for_a_killed_one_fails_at_once(tmp_path: Path) -> None:
    first, second = _by_rank(
        run_outcomes(_die_before_evaluation, tmp_path, world_size=2, timeout=60)
    )
    assert second.exit_code == -signal.SIGKILL
    assert str(first.error).startswith(
        "Expected evaluate() on all 2 ranks. Received: 1; rank 1 has died"
    )


def _train_after_caught_error(path: Path) -> int:
    calls._SECONDS_BEFORE_REPORT = 0.5
    logging.getLogger("danling").addHandler(
        logging.FileHandler(path / f"rank-{os.environ['RANK']}.log")
    )
    with Habit(
        dl.RunnerConfig(epochs=1, seed=1, dir=str(path / "run"), dataloader={"batch_size": 4}), ""
    ) as runner:
        with pytest.raises(FileNotFoundError):
            runner.load_checkpoint(str(path / "absent"))
        while runner.rank == 1 and not any(
            "after one that failed" in line for line in _logged(path)
        ):
            time.sleep(0.05)
        runner.train()
        return runner.state.train.global_step


def test_rank_waiting_for_one_with_a_caught_error_trains_with_it(tmp_path: Path) -> None:
    assert run_processes(_train_after_caught_error, tmp_path, world_size=2) == [4, 4]


def _by_rank(outcomes: list[Outcome]) -> list[Outcome]:
    return sorted(outcomes, key=lambda outcome: outcome.rank)


def _logged(path: Path) -> list[str]:
    return [
        line for file in sorted(path.glob("rank-*.log")) for line in file.read_text().splitlines()
    ]


def _calls_alike(path: Path) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("danling").addHandler(handler)
    config = dl.RunnerConfig(
        epochs=2,
        seed=1,
        dir=str(path / "run"),
        dataloader={"batch_size": 4},
        checkpoint={"interval": 1},
    )
    with Habit(config, "evaluate") as runner:
        runner.train()
        runner.evaluate("val")
        runner.evaluate_steps("val", 2)
        runner.save_checkpoint()
    return [line for line in lines if "has begun" in line]


def test_verbs_on_all_ranks_are_not_named(tmp_path: Path) -> None:
    assert run_processes(_calls_alike, tmp_path, world_size=3) == [[], [], []]

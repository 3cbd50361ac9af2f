"""A runner in replica groups: what it refuses, what a failed commit changes, and how it ends without a lighthouse."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from support.replicas import Lighthouse, ReplicaGroup, note_heals
from support.toys import TracingRunner, differences, whole_state
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import danling as dl
from danling.torchft.groups import QuorumError
from danling.utils.tensors import whole

needs_torchft = pytest.mark.usefixtures("_torchft")


@pytest.fixture
def _torchft() -> None:
    pytest.importorskip("torchft", reason="torchft is not installed")


def settings(root: Path, **changes: Any) -> dict[str, Any]:
    ft = {
        "enabled": True,
        "group_size": 2,
        "process_group_timeout_ms": 5000,
        **changes.pop("ft", {}),
    }
    return {
        "steps": 8,
        "seed": 3,
        "accum_steps": 2,
        "ema": {"enabled": True, "decay": 0.9},
        "dataloader": {"batch_size": 2},
        "optim": {"type": "adamw", "lr": 1e-2},
        "scheduler": {"type": "cosine"},
        "workspace_root": str(root),
        "log_interval": 1000,
        "ft": ft,
        **changes,
    }


class Toy(dl.Runner):
    """A small classifier."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.model = nn.Linear(4, 2)
        self.criterion = nn.CrossEntropyLoss()
        self.datasets = {"train": TensorDataset(torch.randn(16, 4), torch.randint(2, (16,)))}


# Refusals


@needs_torchft
def test_a_wrong_place_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    for ft, message in (
        ({"replica_id": 2}, r"ft\.replica_id=2, ft\.group_size=2"),
        ({}, "TORCHFT_LIGHTHOUSE"),
    ):
        with pytest.raises(ValueError, match=message):
            Toy(settings(tmp_path, ft=ft))
    assert not list(tmp_path.rglob("*.yaml"))


@pytest.mark.parametrize(
    ("changes", "received"),
    [
        (
            {"stack": "parallel", "parallel.axes.tensor": 2},
            "stack='parallel', parallel.axes.tensor=2",
        ),
        (
            {"stack": "parallel", "parallel.axes.pipeline": 2},
            "stack='parallel', parallel.axes.pipeline=2",
        ),
        ({"stack": "deepspeed"}, "stack='deepspeed'"),
    ],
)
def test_other_layouts_are_refused(
    changes: dict[str, Any], received: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match=f"no axes but replicate and shard. Received: {received}"):
        Toy(settings(tmp_path, **changes))
    assert not caplog.records


def test_missing_package_is_named_with_its_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchft", None)
    with pytest.raises(ImportError, match="pip install torchft-nightly"):
        Toy(settings(tmp_path))


@needs_torchft
def test_missing_lighthouse_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://127.0.0.1:1")
    with pytest.raises(QuorumError, match=r"127\.0\.0\.1:1"):
        Toy(settings(tmp_path, ft={"process_group_timeout_ms": 500}))


# Failed commits


def train_alone(root: Path) -> list[str]:
    """Train where two groups are needed and one is there; return what has changed when it gives up."""
    with TracingRunner(settings(root, ft={"min_replica_size": 2}, max_skipped_updates=2)) as runner:
        runner.datasets.pop("val")
        before = whole_state(runner)
        kept = {name: value.clone() for name, value in before["model"].items()}
        rates = [group["lr"] for group in runner.optimizer.param_groups]
        averages = {name: value.clone() for name, value in before["ema"]["weights"].items()}
        with pytest.raises(QuorumError, match="3 failures in a row"):
            runner.train()
        assert [weight for _, weight, _ in runner.trace] == [0.0, 0.0]
        after = whole_state(runner)
        assert [group["lr"] for group in runner.optimizer.param_groups] == rates
        # The ids of the three attempts are the same ones.
        assert runner.ids == runner.ids[:4] * 3
        before["model"], before["ema"]["weights"] = kept, averages
        return differences(after, before)


@needs_torchft
def test_failed_commit_changes_nothing(tmp_path: Path) -> None:
    with Lighthouse() as lighthouse:
        environment = {"TORCHFT_LIGHTHOUSE": lighthouse.address}
        changed = run_processes(train_alone, tmp_path, environment=environment)
    # The scale of micro-batch weights is agreed on in the first window, whatever becomes of it.
    assert all(
        line == "/state/train/weight_reference: 2.0 is not None"
        for lines in changed
        for line in lines
    )


# One gradient over all groups


class Branched(nn.Module):
    """Has a layer that nothing uses, and one that the second half of all ranks uses."""

    uses_extra = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)
        self.extra, self.idle = nn.Linear(8, 8), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        output: Tensor = self.last(hidden + self.extra(hidden) if self.uses_extra else hidden)
        return output


class Uneven(dl.Runner):
    """Batches whose targets are in part ignored, so that ranks and groups weigh differently."""

    not_saved = ("losses_seen",)

    def __init__(self, config: dict[str, Any], reduction: str) -> None:
        super().__init__(config)
        torch.manual_seed(0)
        self.model = Branched().double()
        place = self.config.ft.replica_id * self.world_size + self.rank
        self.model.uses_extra = (
            place >= 2 and self.config.dataloader.get("global_batch_size") is None
        )
        self.criterion = nn.CrossEntropyLoss(reduction=reduction)
        inputs, targets = torch.randn(48, 5, dtype=torch.float64), torch.randint(3, (48,))
        targets[torch.rand(48) < 0.4] = -100
        self.datasets = {"train": TensorDataset(inputs, targets)}
        self.losses_seen: list[float] = []

    def ddp_kwargs(self) -> dict[str, Any]:
        return {**super().ddp_kwargs(), "find_unused_parameters": True}

    def train_step(self, data: Any) -> tuple[Any, Tensor]:
        self.meters.update({"counted": float((data[1] >= 0).double().mean())}, len(data[1]))
        return super().train_step(data)

    def step(self) -> Any:
        outcome = super().step()
        if outcome.committed:
            self.losses_seen.append(float(outcome.loss))
        return outcome


def train_uneven(
    root: Path, group: int | None, batches: dict[str, Any], reduction: str, stack: str
) -> tuple[dict[str, Tensor], list[float], Any]:
    ft = {"enabled": group is not None, "replica_id": group or 0, "min_replica_size": 2}
    config = settings(
        root, steps=6, optim={"type": "sgd", "lr": 0.1}, scheduler={}, ft=ft, dataloader=batches
    )
    config |= {"stack": stack, "fsdp": {"enabled": stack == "parallel"}}
    with Uneven(config, reduction) as runner:
        runner.train()
        weights = {name: whole(value).clone() for name, value in runner.model_state_dict().items()}
        return weights, runner.losses_seen, runner.results


@needs_torchft
@pytest.mark.parametrize(
    ("batches", "reduction", "stack", "world_size"),
    [
        ({"batch_size": 2}, "mean", "ddp", 4),
        ({"batch_size": 2}, "sum", "parallel", 4),
        ({"global_batch_size": 13}, "mean", "ddp", 1),
    ],
    ids=["batch", "sum of shards", "global batch"],
)
def test_groups_make_one_gradient(
    batches: dict[str, Any], reduction: str, stack: str, world_size: int, tmp_path: Path
) -> None:
    """Two groups train as one run of all their ranks: sums over the global weight, and never a mean of means.

    With `global_batch_size` as one process, of whose 13 samples four ranks get 4, 3, 3 and 3.
    """
    one = run_processes(
        train_uneven, tmp_path / "one", None, batches, reduction, "ddp", world_size=world_size
    )
    (expected, losses, figures), asked = one[0], (batches, reduction, stack)
    with (
        Lighthouse() as lighthouse,
        ReplicaGroup(
            train_uneven, tmp_path / "two", 0, *asked, world_size=2, lighthouse=lighthouse
        ) as first,
        ReplicaGroup(
            train_uneven, tmp_path / "two", 1, *asked, world_size=2, lighthouse=lighthouse
        ) as second,
    ):
        ended = [*first.values(), *second.values()]
    for weights, seen, results in ended:
        assert differences(weights, ended[0][0]) == []
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-9, atol=1e-12)
        assert seen == pytest.approx(losses, rel=1e-9)
        assert list(results) == list(figures) == [1, 2, 3, 4, 5, 6]
        for index, result in figures.items():
            assert results[index]["train"] == pytest.approx(result["train"], rel=1e-9)


# The lighthouse


def train_until_it_goes_dark(root: Path) -> int:
    config = settings(
        root,
        steps=10**6,
        scheduler={},
        checkpoint={"interval": 10**6},
        comm={"train_timeout_seconds": 3},
    )
    config["ft"]["process_group_timeout_ms"] = 3000
    with TracingRunner(config) as runner:
        board = root / f"step-{runner.rank}"
        step = runner.step

        def noted() -> Any:
            outcome = step()
            board.write_text(str(runner.state.train.global_step))
            return outcome

        runner.step = noted  # type: ignore[method-assign]
        runner.train()
    return 0


@needs_torchft
def test_losing_the_lighthouse_ends_in_a_checkpoint_and_an_error(tmp_path: Path) -> None:
    with (
        Lighthouse() as lighthouse,
        ReplicaGroup(
            train_until_it_goes_dark, tmp_path, world_size=2, lighthouse=lighthouse
        ) as group,
    ):
        board = tmp_path / "step-0"
        group.wait_until(lambda: board.exists() and int(board.read_text() or 0) >= 3)
        lighthouse.job.kill()
        group.join()
    assert len(group.outcomes) == 2
    for outcome in group.outcomes:
        assert isinstance(outcome.error, QuorumError), outcome
        assert "lighthouse" in str(outcome.error)
        assert outcome.exit_code != 0
    (latest,) = tmp_path.rglob("checkpoints/latest.pth")
    saved = torch.load(latest, weights_only=True)["state"]["train"]["global_step"]
    assert saved == int(board.read_text())


def train_while_waiting(root: Path) -> Any:
    """Train where the other group never comes; the last rank alone is sent a signal while both wait for it."""
    patient = {"comm": {"train_timeout_seconds": 600.0}}
    with TracingRunner(settings(root, **patient)) as runner:
        if runner.rank == 1:
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(SystemExit) as end:
            runner.train()
        ended = end.value.code, runner.state.train.global_step
    with TracingRunner(settings(root, **patient, auto_resume=True)):
        return ended


@needs_torchft
def test_a_signal_is_heard_while_a_group_waits_for_the_others(tmp_path: Path) -> None:
    with Lighthouse(min_replicas=2) as lighthouse:
        environment = {"TORCHFT_LIGHTHOUSE": lighthouse.address}
        ended = run_processes(train_while_waiting, tmp_path, world_size=2, environment=environment)
    assert ended == [(143, 0), (143, 0)]
    (latest,) = tmp_path.rglob("checkpoints/latest.pth")
    assert torch.load(latest, weights_only=True)["state"]["train"]["global_step"] == 0
    logs = "".join(path.read_text() for path in tmp_path.rglob("*.log"))
    assert "Resumed" in logs and "random streams of" not in logs, logs


# Coming late


class Patient(TracingRunner):
    """Waits before it trains."""

    def __init__(self, config: dict[str, Any], wait_for: Path | None, tell: Path | None) -> None:
        super().__init__(config, train_size=24)
        self.wait_for, self.tell = wait_for, tell

    def train(self, *args: Any, **kwargs: Any) -> Any:
        if self.tell is not None:
            self.tell.touch()
        while self.wait_for is not None and not self.wait_for.exists():
            time.sleep(0.02)
        return super().train(*args, **kwargs)


def train_patiently(
    root: Path, group: int, wait_for: Path | None, tell: Path | None, **changes: Any
) -> dict[str, Any]:
    config = settings(root, ft={"replica_id": group}, auto_resume=True, accum_steps=1, **changes)
    with Patient(config, wait_for, tell) as runner:
        runner.train()
        state = whole_state(runner)
        state["results"], state["trained"] = runner.results, len(runner.trace)
        return state


@needs_torchft
def test_group_arriving_after_the_end_does_not_train_again(tmp_path: Path) -> None:
    """It was made before they saved, so it must look for a checkpoint again when no other group is there."""
    ready, done = tmp_path / "ready", tmp_path / "done"
    with (
        Lighthouse() as lighthouse,
        ReplicaGroup(
            train_patiently, tmp_path, 1, done, ready, world_size=1, lighthouse=lighthouse
        ) as late,
    ):
        late.wait_until(ready.exists)
        with ReplicaGroup(
            train_patiently, tmp_path, 0, None, None, world_size=1, lighthouse=lighthouse
        ) as first:
            (ended,) = first.values()
        done.touch()
        (came,) = late.values()
    assert ended["trained"] == 8
    assert came["trained"] == 0
    assert came["state"]["train"]["global_step"] == 8
    assert differences(came["model"], ended["model"]) == []


class Joining(Patient):
    """Tells when it is in the middle of an epoch, and takes its time from then on."""

    not_saved = ("healed_at",)
    counter: Any = 0

    def step(self) -> Any:
        outcome = super().step()
        self.counter = {
            "updates": self.state.train.global_step,
            "seen": torch.ones(1) * self.state.train.global_step,
        }
        # DistributedDataParallel takes no weight that is frozen after it was wrapped.
        if self.state.train.global_step == 4 and self.world.size == 1:
            self.unwrapped_model[0].weight.requires_grad_(False)
            self.frozen_at = 4
        if self.config.ft.replica_id == 0 and self.state.train.global_step == 8:
            self.board("middle").touch()
            while not self.board("joining").exists():
                time.sleep(0.02)
        if self.config.ft.replica_id == 0 and self.state.train.global_step >= 8:
            time.sleep(0.05)
        return outcome

    def board(self, name: str) -> Path:
        return Path(self.config.workspace_root) / name

    def init_fault_tolerance(self) -> None:
        super().init_fault_tolerance()
        assert self.fault_tolerance is not None
        note_heals(self.fault_tolerance, self.note)

    def note(self) -> None:
        self.healed_at = (self.state.train.global_step, self.state.train.epoch)


def train_epochs(root: Path, group: int) -> dict[str, Any]:
    wait_for, tell = (root / "middle", root / "joining") if group else (None, None)
    config = settings(root, ft={"replica_id": group}, accum_steps=1, steps=None, epochs=6)
    with Joining(config, wait_for, None) as runner:
        if tell is not None:
            while wait_for is not None and not wait_for.exists():
                time.sleep(0.02)
            tell.touch()
        runner.train()
        state = whole_state(runner)
        healed = getattr(runner, "healed_at", None)
        frozen = [
            name for name, parameter in runner.named_parameters() if not parameter.requires_grad
        ]
        kept = {
            "frozen": frozen,
            "at": getattr(runner, "frozen_at", None),
            "counter": runner.counter,
        }
        found = {
            "state": state,
            "results": runner.results,
            "healed": healed,
            "step": runner.state.train.global_step,
        }
        return {**found, "kept": kept}


@needs_torchft
def test_a_group_joins_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """It takes the place in the epoch, the results and the scores, and both end alike."""
    with (
        Lighthouse() as lighthouse,
        ReplicaGroup(train_epochs, tmp_path, 0, world_size=1, lighthouse=lighthouse) as first,
        ReplicaGroup(train_epochs, tmp_path, 1, world_size=1, lighthouse=lighthouse) as second,
    ):
        (steady,), (joined,) = first.values(), second.values()
    # 24 samples in batches of two for two groups: six updates an epoch, even if one is away.
    assert steady["step"] == joined["step"] == 36
    step, epoch = joined["healed"]
    assert 8 <= step < 36
    assert epoch == step // 6
    assert list(joined["results"]) == [1, 2, 3, 4, 5, 6]
    # A weight that was frozen before it came, and what the others have set.
    assert joined["kept"]["frozen"] == ["0.weight"] and joined["kept"]["at"] == 4
    assert differences(joined["kept"], steady["kept"]) == []
    for name in ("model", "optimizer", "scheduler", "dataloaders"):
        assert differences(joined["state"][name], steady["state"][name]) == []
    for index, result in steady["results"].items():
        assert joined["results"][index]["val"] == pytest.approx(result["val"], rel=1e-6)


class OwnLoader(Joining):
    """Has a loader of its own, of which each rank keeps its own position."""

    def __init__(self, config: dict[str, Any], wait_for: Path | None, tell: Path | None) -> None:
        super().__init__(config, wait_for, tell)
        dataset = self.datasets.pop("train")
        self.dataloaders = {"train": DataLoader(dataset, batch_size=2)}


def train_steps(root: Path, group: int) -> dict[str, Any]:
    wait_for, tell = (root / "middle", root / "joining") if group else (None, None)
    config = settings(root, ft={"replica_id": group}, accum_steps=1, steps=24)
    config.pop("dataloader")
    with OwnLoader(config, wait_for, None) as runner:
        if tell is not None:
            while wait_for is not None and not wait_for.exists():
                time.sleep(0.02)
            tell.touch()
        runner.train()
        model = {name: value.clone() for name, value in runner.model_state_dict().items()}
        return {"ids": runner.ids, "model": model, "healed": getattr(runner, "healed_at", None)}


@needs_torchft
def test_a_rank_with_its_own_loader_keeps_the_batch_in_hand_when_it_heals(tmp_path: Path) -> None:
    with (
        Lighthouse() as lighthouse,
        ReplicaGroup(train_steps, tmp_path, 0, world_size=1, lighthouse=lighthouse) as first,
        ReplicaGroup(train_steps, tmp_path, 1, world_size=1, lighthouse=lighthouse) as second,
    ):
        (steady,), (joined,) = first.values(), second.values()
    assert joined["healed"][0] >= 8 and differences(joined["model"], steady["model"]) == []
    # It begins with its first batch, and leaves none out.
    assert joined["ids"] == [number % 24 for number in range(len(joined["ids"]))] and joined["ids"]


def size_refused(root: Path, group: int) -> str:
    with pytest.raises(ValueError) as caught:
        train_epochs(root, group)
    return str(caught.value)


@needs_torchft
def test_a_group_of_another_size_is_refused_and_the_others_train_on(tmp_path: Path) -> None:
    with (
        Lighthouse() as lighthouse,
        ReplicaGroup(train_epochs, tmp_path, 0, world_size=2, lighthouse=lighthouse) as first,
        ReplicaGroup(size_refused, tmp_path, 1, world_size=1, lighthouse=lighthouse) as second,
    ):
        (message,) = second.values()
        steady = first.values()
    assert "replica-000001 with 1 ranks, and replica-000000 with 2" in message
    assert "continue without it" in message
    # 24 samples in batches of two for two groups of two ranks: three updates an epoch, even if one is away.
    assert [rank["step"] for rank in steady] == [18, 18]
    assert differences(steady[0]["state"]["model"], steady[1]["state"]["model"]) == []

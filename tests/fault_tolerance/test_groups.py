"""Which replica groups fit together, and what a runner does around them without other groups."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.toys import TracingRunner

import danling as dl
from danling.runners.state import RunnerState
from danling.torchft import member
from danling.torchft.groups import (
    OtherSizeMet,
    ReplicaSizeError,
    address_towards,
    check_sizes,
)
from danling.torchft.member import laid_out_like
from danling.utils.observers import Observer


def test_the_way_to_the_lighthouse_gives_the_address_of_this_machine() -> None:
    assert (
        address_towards("http://127.0.0.1:29510")
        == address_towards("localhost:29510")
        == "127.0.0.1"
    )
    with pytest.raises(ValueError, match="29510"):
        address_towards("nowhere")


@pytest.mark.parametrize(
    ("sizes", "own", "behind", "ahead", "ending"),
    [
        ([2, 2, 2], 0, False, 3, None),
        ([2, 1], 0, False, 1, OtherSizeMet),  # trains, and one comes that does not fit
        ([2, 1], 1, True, 1, ReplicaSizeError),
        ([1, 2, 2], 1, False, 2, OtherSizeMet),  # the one that comes has the lowest name
        ([1, 2, 2], 0, True, 2, ReplicaSizeError),
        ([2, 1], 0, False, 2, OtherSizeMet),  # both begin: the lowest name decides
        ([2, 1], 1, False, 2, ReplicaSizeError),
        ([2, 2, 1], 1, True, 1, OtherSizeMet),  # comes back while one comes that does not fit
        ([2, 2, 1], 2, True, 1, ReplicaSizeError),
    ],
)
def test_group_of_another_size_than_the_majority_leaves(
    sizes: list[int], own: int, behind: bool, ahead: int, ending: type[Exception] | None
) -> None:
    names = [f"replica-{index:06d}-ranks-{size}" for index, size in enumerate(sizes)]
    ids = [f"{name}:an-id-of-torchft" for name in names]
    if ending is None:
        check_sizes(names[own], ids, is_behind=behind, groups_ahead=ahead)
        return
    with pytest.raises(ending):
        check_sizes(names[own], ids, is_behind=behind, groups_ahead=ahead)


# In a runner


@pytest.fixture
def lighthouse(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An address at which something listens: nothing more is asked of a lighthouse before the first update."""
    pytest.importorskip("torchft", reason="torchft is not installed")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("TORCHFT_LIGHTHOUSE", f"http://127.0.0.1:{listener.getsockname()[1]}")
        yield


class UsersState(RunnerState):
    """A state of the user's class."""

    level = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "level": self.level}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.level = state["level"]


class Counting(Observer):
    """Counts something that is saved."""

    count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": torch.tensor(self.count)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = int(state["count"])


def runner_of(
    root: Path, group: int = 0, kind: type[dl.TorchRunner] = TracingRunner, **more: Any
) -> dl.TorchRunner:
    return kind(
        {
            "seed": 3 + group,
            "steps": 4,
            "dataloader": {"batch_size": 2},
            "ema": {"enabled": True},
            "ft": {"enabled": True, "group_size": 2, "replica_id": group},
            "workspace_root": str(root),
            **more,
        }
    )


def test_healing_group_continues_as_the_other_one(
    lighthouse: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with runner_of(tmp_path / "a") as ahead, runner_of(tmp_path / "b", 1) as behind:
        source = ahead.sources["train"]
        source.commit([batch for batch, _ in zip(source.batches(), range(3))])
        ahead.model[0].weight.requires_grad_(False)
        behind.model[0].bias.requires_grad_(False)
        for runner, seen in ((ahead, 3.0), (behind, 1.0)):
            runner.model.register_buffer("calls", torch.full((2,), seen), persistent=False)
            runner.counts, runner.note = {"a": [seen]}, "same"  # type: ignore[attr-defined]
            runner.observers.append(observer := Counting())
            observer.count = int(seen)
        held = behind.counts  # type: ignore[attr-defined]
        ahead.state, behind.state = UsersState(), UsersState()
        ahead.state.train.global_step, ahead.state.level = 7, 3
        behind.window.agreed_reference = 2.0
        behind.meters.update({"seen": 1.0})
        attempts = behind.state.elastic.attempts
        sender, healed = ahead.fault_tolerance, behind.fault_tolerance
        assert sender is not None and healed is not None
        assert not torch.equal(ahead.model[0].weight, behind.model[0].weight)
        sent = sender.sent_state()
        assert "rng" not in sent["state"]
        healed.take_over(sent)
        for name, value in ahead.model_state_dict().items():
            assert torch.equal(behind.model_state_dict()[name], value)
            assert torch.equal(behind.ema.weights[name], ahead.ema.weights[name])
        assert (
            behind.sources["train"].consumed == source.consumed == 12
            and behind.state.train.global_step == 7
        )
        assert behind.state.level == 3
        assert behind.observers.with_state["Counting"].count == 3  # type: ignore[attr-defined]
        assert [p.requires_grad for p in behind.model.parameters()] == [
            p.requires_grad for p in ahead.model.parameters()
        ]
        assert (
            behind.model.calls.tolist() == [3.0, 3.0]
            and behind.model.calls.data_ptr() != ahead.model.calls.data_ptr()
        )
        assert behind.counts is held and held == {"a": [3.0]}  # type: ignore[attr-defined]
        # Its attempts and the scale of its losses are its own, and what the other group has counted is added there.
        assert behind.state.elastic.attempts == attempts and behind.window.agreed_reference == 2.0
        assert not behind.meters.averages()


class Freezing(TracingRunner):
    """Begins with a frozen layer."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        torch.manual_seed(0)
        self.model[0] = torch.nn.Linear(6, 12).requires_grad_(False)


def test_healing_group_divides_layers_that_the_other_one_has_unfrozen(
    lighthouse: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    divided: list[tuple[set[str], set[str]]] = []

    def noted(state: Mapping[str, object], own: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        divided.append((set(state), set(own)))
        return laid_out_like(state, own)

    monkeypatch.setattr(member, "laid_out_like", noted)
    more: dict[str, Any] = {"kind": Freezing, "checkpoint": {"trainable_only": True}}
    with runner_of(tmp_path / "a", **more) as ahead, runner_of(tmp_path / "b", 1, **more) as behind:
        ahead.model[0].requires_grad_(True)
        with torch.no_grad():
            ahead.model[0].weight.fill_(3.0)
        assert ahead.fault_tolerance is not None and behind.fault_tolerance is not None
        behind.fault_tolerance.take_over(ahead.fault_tolerance.sent_state())
        assert torch.equal(behind.model[0].weight, ahead.model[0].weight)
    weights, own = divided[0]
    assert "0.weight" in weights and weights <= own, "each sent weight has one to be divided like"


def test_one_of_two_groups_writes_until_it_closes(lighthouse: None, tmp_path: Path) -> None:
    with runner_of(tmp_path) as second:
        with runner_of(tmp_path, 1) as first:
            assert first.fault_tolerance is not None and second.fault_tolerance is not None
            shared = first.workspace.checkpoints
            second.workspace = first.workspace
            shared.mkdir(parents=True, exist_ok=True)
            assert first.fault_tolerance.saves() and first.fault_tolerance.saves()
            assert not second.fault_tolerance.saves()
        assert second.fault_tolerance.saves()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is NCCL")
def test_nccl_without_a_device_is_refused_at_construction(lighthouse: None, tmp_path: Path) -> None:
    settings = {"ft": {"enabled": True, "process_group": "nccl"}, "workspace_root": str(tmp_path)}
    with pytest.raises(
        ValueError, match=r"Expected NCCL and a CUDA device for ft.process_group='nccl'"
    ):
        TracingRunner(settings)

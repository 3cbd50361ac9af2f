"""How the processes of a torch runner join other replica groups, without a runner: what is healed, taken back and kept."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.held import Held
from torch import Tensor

from danling.data import BatchSource, build_dataloader, open_source
from danling.distributed import LocalDomain
from danling.metrics import Meters
from danling.torchft import QuorumError, ReplicaMember
from danling.torchft.attach import join_replica_groups, keep_own_positions
from danling.training import EMA
from danling.training.loader_states import LoaderPositions
from danling.training.preparation import ModelPreparation
from danling.training.run_state import RunState, StatePart
from danling.training.saving import RunSaver

OWN = {"enable_ft_dataloader_checkpoints": True, "ft_replica_id": "1"}


@pytest.fixture
def lighthouse(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An address at which something listens: nothing more is asked of a lighthouse before the first update."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("TORCHFT_LIGHTHOUSE", f"http://127.0.0.1:{listener.getsockname()[1]}")
        yield


class Member(Held):
    """A run in a replica group, with data of its own and averaged weights."""

    not_saved = ("loaded",)

    def __init__(self, directory: Path, **settings: Any) -> None:
        super().__init__(directory, **settings)
        self.id, self.closers = "run", ExitStack()
        self._closers, self.checkpoint_manager = self.closers, None
        self.workspace = SimpleNamespace(dir=directory, checkpoints=directory / "checkpoints")
        self.data_domain, self.meters = self.world, Meters()
        self.ema = EMA(self.model)
        self.given: dict[str, BatchSource] = {"train": self.open("train"), "val": self.open("val")}
        self.sources: Any = _Sources(self.given)
        part = StatePart("model", self.model.state_dict, lambda state, _: self.model.load_state_dict(state) and None)
        self.excluded: tuple[str, ...] = ()
        self.run_state = RunState([part], [], excluded=lambda: self.excluded)
        self.saver = RunSaver(manager=_Manager, position=lambda: self.state.train, state=dict)  # type: ignore[arg-type, return-value]
        self.loaded: list[Path] = []

    def open(self, split: str) -> BatchSource:
        loader = build_dataloader(
            list(range(20)), {"batch_size": 2}, split=split, train=True, seed=1, device=self.device
        )
        return open_source(loader, split=split, share=(0, 1), seed=1)

    def load_checkpoint(self, source: Path) -> None:
        self.loaded.append(source)

    def _positions(self) -> LoaderPositions:
        return LoaderPositions(
            lambda split: self.given[split], lambda: ["train"], domain=lambda: self.world, inexact=lambda: False
        )

    def read(self, split: str, batches: int) -> None:
        source = self.given[split]
        source.commit([batch for batch, _ in zip(source.batches(), range(batches))])

    def join(self) -> ReplicaMember:
        return join_replica_groups(self, remember=lambda: lambda: None)  # type: ignore[arg-type]


class _Sources(dict[str, BatchSource]):
    def among(self, splits: tuple[str, ...]) -> dict[str, BatchSource]:
        return {split: self[split] for split in splits}


class _Manager:
    def save_checkpoint(self, *_: object, **__: object) -> None:
        """Write nothing: only what is saved beside it is looked at."""


def set_weight(run: Held, value: float) -> None:
    with torch.no_grad():
        run.model.weight.fill_(value)


def test_a_group_that_heals_has_what_the_other_one_trains_with(lighthouse: None, tmp_path: Path) -> None:
    ahead, behind = Member(tmp_path / "a"), Member(tmp_path / "b")
    sender, healed = ahead.join(), behind.join()
    set_weight(ahead, 2.0)
    set_weight(behind, 1.0)
    ahead.read("train", 3)
    ahead.read("val", 2)
    ahead.state.train.global_step = 7
    behind.window.agreed_reference = 2.0
    behind.meters.update({"seen": 1.0})
    healed.healing.take(sender.healing.state())
    assert behind.model.weight.item() == 2.0 and behind.state.train.global_step == 7
    assert behind.given["train"].consumed == 6
    # A split that is only evaluated, the scale of its losses and what it has counted are its own.
    assert behind.given["val"].consumed == 0 and behind.window.agreed_reference == 2.0
    assert not behind.meters.averages()


class WholeOnEveryRank(ModelPreparation):
    """Of a stack in which every rank has all weights."""

    def copies(self, model: Any, averaged: Iterable[Tensor] = ()) -> list[Tensor]:
        return [*model.parameters(), *averaged]


class Broadcasting(LocalDomain):
    """Keeps what would be sent to the other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Tensor] = []

    def broadcast(self, tensor: Tensor, *_: object, **__: object) -> None:
        self.sent.append(tensor)


def test_ranks_of_a_group_begin_alike_with_weights_and_their_averages(lighthouse: None, tmp_path: Path) -> None:
    run = Member(tmp_path)
    run.world = world = Broadcasting()
    member = run.join()
    run.preparation = WholeOnEveryRank(world)
    assert not member.update.begin_alike(False) and not world.sent
    assert member.update.begin_alike(True)
    expected = [run.model.weight, run.ema.weights["weight"]]
    assert [id(tensor) for tensor in world.sent] == [id(tensor) for tensor in expected]


@pytest.mark.parametrize("resumes", [True, False])
def test_a_process_that_joins_alone_goes_on_from_what_others_have_written(
    resumes: bool, lighthouse: None, tmp_path: Path
) -> None:
    written = SimpleNamespace(find_latest=lambda: tmp_path / "ckpt", step_of=lambda source: 5)
    run = Member(tmp_path, auto_resume=resumes)
    member = run.join()
    run.checkpoint_manager = written
    assert member.update.catch_up() is resumes and run.loaded == [tmp_path / "ckpt"] * resumes
    run.state.train.global_step = 5
    assert not member.update.catch_up()


def test_without_a_lighthouse_nothing_is_joined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    with pytest.raises(ValueError, match="Received: nothing"):
        Member(tmp_path).join()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("TORCHFT_LIGHTHOUSE", f"http://127.0.0.1:{closed.getsockname()[1]}")
        with pytest.raises(QuorumError, match="Expected a lighthouse of TorchFT"):
            Member(tmp_path).join()


def saved_at(run: Member, step: int, batches: int) -> None:
    run.read("train", batches)
    run.state.train.global_step = step
    run.saver.save()


def test_a_group_goes_on_in_its_own_place_in_the_data(tmp_path: Path) -> None:
    run = Member(tmp_path, checkpoint=OWN)
    keep_own_positions(run)  # type: ignore[arg-type]
    saved_at(run, 3, 4)
    run.closers.close()
    assert (tmp_path / "checkpoints" / "ft-replica-1").is_dir() and not (
        tmp_path / "checkpoints" / "ft-replica-0"
    ).exists()
    again, other = Member(tmp_path, checkpoint=OWN), Member(tmp_path, checkpoint={**OWN, "ft_replica_id": "0"})
    for member in (again, other):
        keep_own_positions(member)  # type: ignore[arg-type]
        member.state.train.global_step = 3
        for restored in member.saver.loaded:
            restored()
        member.closers.close()
    assert again.given["train"].consumed == 8 and other.given["train"].consumed == 0


def test_a_place_that_is_left_out_or_of_another_update_is_not_taken(tmp_path: Path) -> None:
    run = Member(tmp_path, checkpoint=OWN)
    keep_own_positions(run)  # type: ignore[arg-type]
    saved_at(run, 3, 4)
    run.closers.close()
    for step, excluded, expected in ((3, (), 8), (3, ("dataloaders.train",), 0), (4, (), 0), (2, (), 0)):
        again = Member(tmp_path, checkpoint=OWN)
        keep_own_positions(again)  # type: ignore[arg-type]
        again.state.train.global_step, again.excluded = step, excluded
        drawn = torch.random.get_rng_state()
        for restored in again.saver.loaded:
            restored()
        again.closers.close()
        assert again.given["train"].consumed == expected, (step, excluded)
        assert torch.equal(torch.random.get_rng_state(), drawn)

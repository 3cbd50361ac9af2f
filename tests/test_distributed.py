"""Ranks by themselves: their places and domain, a port that is kept, a place to which all come, a wait that all leave."""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.processes import run_processes
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import TCPStore

import danling as dl
from danling.distributed import LocalDomain, Placement, all_arrive, domain, environment, world_of
from danling.stream.waits import CollectiveExit
from danling.utils.process import held_port


class Ranks(LocalDomain):
    """A domain of several ranks that reduces nothing."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size


def test_training_data_is_divided_over_replica_groups_and_evaluation_is_not() -> None:
    places = [
        Placement.alike(Ranks(rank, 2), replica_group=(group, 3))
        for group in range(3)
        for rank in range(2)
    ]
    assert [place.share(trained=True) for place in places] == [(index, 6) for index in range(6)]
    assert [place.share(trained=False) for place in places] == [(0, 2), (1, 2)] * 3
    assert {place.data_replicas for place in places} == {6}


def test_several_processes_must_be_joined_by_somebody() -> None:
    assert isinstance(world_of(1, torch.device("cpu")), LocalDomain)
    with pytest.raises(
        ValueError,
        match=r"Expected `init_distributed` to join a process group of 2 processes. Received: none",
    ):
        world_of(2, torch.device("cpu"))


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_nccl_without_a_device_is_refused_before_the_other_processes_are_awaited(
    backend: str,
) -> None:
    launch = environment.LaunchEnvironment(rank=0, world_size=2, local_rank=0)
    with pytest.raises(ValueError, match=r"Expected a backend for the CPU.*Leave backend out"):
        environment.init_process_group(launch, torch.device("cpu"), backend=backend)


def test_nobody_else_gets_the_port_and_a_store_of_torch_may_listen_there() -> None:
    with held_port() as port:
        with socket.socket() as other, pytest.raises(OSError):
            other.bind(("127.0.0.1", port))
        store = TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)
        )
        TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False).set("key", "value")
        assert store.get("key") == b"value"
    # The store goes on when the port is held no more.
    TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False).set("key", "later")
    assert store.get("key") == b"later"


def _starts_if_not(absent: int, tcp: bool) -> tuple[str, list[str]]:
    """Construct a runner on all ranks but one; return the error, and what was logged while it waited."""
    environment._SECONDS_BEFORE_REPORT = 0.5
    if int(os.environ["RANK"]) == absent:
        return "absent", []
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("danling").addHandler(handler)
    url = f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}" if tcp else None
    try:
        dl.Runner(dl.RunnerConfig(init_method=url, comm={"init_timeout_seconds": 2}))
    except (TimeoutError, ConnectionError) as error:
        return str(error), lines
    return "started", lines


@pytest.mark.parametrize("tcp", [False, True])
def test_missing_rank_is_named_within_the_time_limit(tcp: bool) -> None:
    first, absent, third = run_processes(_starts_if_not, 1, tcp, world_size=3, timeout=40)
    assert absent == ("absent", [])
    assert third[0] == first[0] or third[0].startswith(
        "The process that joins the ranks, which is rank 0"
    )
    assert first[0].startswith(
        "Expected 3 processes to start within 2 s (comm.init_timeout_seconds). Received: 2. Missing: rank 1."
    )
    assert [*first[1], *third[1]] == ["2 of 3 processes have started. Missing: rank 1."]


def test_missing_rank_zero_is_named_within_the_time_limit() -> None:
    _, second = run_processes(_starts_if_not, 0, False, world_size=2, timeout=40)
    assert second[0].startswith("Expected rank 0 to answer at 127.0.0.1:")
    assert len(second[1]) == 1 and second[1][0].startswith(
        "Rank 0, the first of 2 processes, does not answer"
    )


class Hesitant:
    """A store whose rank stands still behind the look that finds another one missing, until that one has gone on."""

    def __init__(self, store: HashStore, other: Any) -> None:
        self._store = store
        self._other = other

    def add(self, key: str, number: int) -> int:
        found = self._store.add(key, number)
        if number == 0:
            self._other()
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """Two ranks in threads of this process, each with its own view of one store."""
    own = threading.local()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(domain, "_get_default_store", lambda: own.store)
    return own


def test_rank_arriving_as_it_is_given_up_gets_the_same_verdict(stores: threading.local) -> None:
    shared, told = HashStore(), []

    def last() -> None:
        stores.store = shared
        told.append(all_arrive("here", seconds=60))

    def comes() -> None:
        if not told:
            thread = threading.Thread(target=last)
            thread.start()
            thread.join()

    stores.store = Hesitant(shared, comes)
    assert all_arrive("here", seconds=-1) == told[0]


def test_late_rank_learns_of_being_given_up(stores: threading.local) -> None:
    stores.store = HashStore()
    assert [all_arrive("here", seconds=-1), all_arrive("here", seconds=60)] == [False, False]
    assert [all_arrive("there", seconds=-1) for _ in range(2)] == [False, False]


def rounds(size: int) -> list[CollectiveExit]:
    """Return what each rank holds of one wait."""
    store = HashStore()
    return [CollectiveExit(store, "here", rank=rank, size=size) for rank in range(size)]


def test_all_leave_when_the_last_one_has_joined() -> None:
    ranks = rounds(3)
    assert not any(rank.is_asked_for() for rank in ranks)
    assert [ranks[2].join(), ranks[0].join()] == [False, False]
    assert ranks[1].is_asked_for()
    assert ranks[1].join()
    assert all(rank.join() for rank in ranks)
    assert not any(rank.go_on() for rank in ranks)


def test_no_rank_leaves_if_one_continued_before() -> None:
    ranks = rounds(2)
    ranks[0].join()
    assert ranks[0].go_on()
    assert [ranks[1].join(), ranks[1].go_on()] == [False, True]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_order_all_come_to_one_end(seed: int) -> None:
    ranks, ends = rounds(4), [""] * 4
    chance = random.Random(seed)
    plans = [[chance.random() < 0.7 for _ in range(6)] for _ in ranks]
    barrier = threading.Barrier(len(ranks))

    def run(number: int) -> None:
        rank = ranks[number]
        barrier.wait()
        for waits in plans[number]:
            if rank.join():
                ends[number] = "left"
                return
            if not waits:
                break
        ends[number] = "went on" if rank.go_on() else "left"

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert set(ends) in ({"left"}, {"went on"})


# An action of one rank, or of all


class Curious(Exception):
    """Cannot be made again from its text alone."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def _local_error() -> Exception:
    class Local(Exception):
        """A class that no other process finds."""

    return Local("only here")


def _fail_in(kind: str) -> None:
    if kind == "plain":
        raise LookupError("no such key")
    if kind == "of several arguments":
        raise Curious("this", "that")
    if kind == "of a local class":
        raise _local_error()
    raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")


KINDS = {
    "plain": "LookupError: no such key",
    "of several arguments": "Curious: this and that",
    "of a local class": "Local: only here",
    "of the library of Python": "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff",
}


def _errors_of(action: Any) -> list[str]:
    """Return what a domain raises for each kind of error, and that its ranks are together afterwards."""
    found = []
    for kind in KINDS:
        try:
            action(kind)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def _run_actions() -> dict[str, Any]:
    ranks = domain.Domain()
    last = ranks.size - 1

    def fail_on_last(kind: str) -> None:
        if ranks.rank == last:
            _fail_in(kind)

    def fail_in_context(kind: str) -> None:
        with ranks.failing_together():
            fail_on_last(kind)

    try:
        ranks.on_first(lambda: lambda: None)
        unsendable = "nothing"
    except Exception as error:
        unsendable = type(error).__name__
    found = {
        "value": ranks.on_first(lambda: ["of", ranks.rank]),
        "own": ranks.on_all(lambda: ranks.rank),
        "first": _errors_of(lambda kind: ranks.on_first(lambda: _fail_in(kind))),
        "all": _errors_of(lambda kind: ranks.on_all(lambda: fail_on_last(kind))),
        "in a context": _errors_of(fail_in_context),
        "raised as": _errors_of(
            lambda kind: ranks.on_first(lambda: _fail_in(kind), raised_as=lambda e: OSError(str(e)))
        ),
        "unsendable": unsendable,
    }
    ranks.barrier()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_error_of_one_rank_reaches_all_with_its_text(world_size: int) -> None:
    found = run_processes(_run_actions, world_size=world_size, init_process_group=True)
    for rank, each in enumerate(found):
        assert each["value"] == ["of", 0] and each["own"] == rank
        for way in ("first", "all", "in a context"):
            for told, text in zip(each[way], KINDS.values(), strict=True):
                assert text in told
        assert [told.partition(":")[0] for told in each["raised as"]] == ["OSError"] * len(KINDS)
    if world_size > 1:
        assert {each["unsendable"] for each in found} <= {"PicklingError", "AttributeError"}


def _viewed(kind: str, rank: int) -> torch.Tensor:
    values = torch.arange(6.0).reshape(2, 3) + 10 * rank
    made = {
        "conjugate": lambda: torch.complex(values, values + 1).conj(),
        "negative": lambda: torch.complex(values, values + 1).conj().imag,
        "transposed": lambda: values.t(),
        "part": lambda: values[:, 1:],
    }
    return made[kind]()


def _move(kind: str) -> list[torch.Tensor]:
    world = world_of(2, torch.device("cpu"))
    found = [_viewed(kind, world.rank), _viewed(kind, world.rank)]
    world.broadcast(found[0], source=1)
    world.all_reduce(found[1])
    return [each.clone() for each in found]


@pytest.mark.parametrize("kind", ["conjugate", "negative", "transposed", "part"])
def test_views_of_tensors_are_sent_with_their_values(kind: str) -> None:
    for sent, summed in run_processes(_move, kind, init_process_group=True):
        assert torch.equal(sent, _viewed(kind, 1))
        assert torch.equal(summed, _viewed(kind, 0) + _viewed(kind, 1))

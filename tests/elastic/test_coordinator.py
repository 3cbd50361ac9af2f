"""The coordinator over real sockets: who is let in, which rank is ended, and when the run ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from danling.elastic.agent import AgentLink
from danling.elastic.coordinator import Coordinator
from danling.elastic.wire import TOKEN, Channel, Closed, connect

_SETTINGS: dict[str, Any] = {
    "least": 1,
    "wait_seconds": 0.3,
    "fence_seconds": 0.3,
    "replacements": None,
}


class _Peer:
    """A rank or an agent that says what a test has it say."""

    def __init__(self, coordinator: Coordinator, **hello: Any) -> None:
        self.heard: list[dict[str, Any]] = []
        address = f"127.0.0.1:{coordinator.port}"
        self.channel, self.welcome = connect(
            address, {"pid": 0, "host": "here", **hello}, seconds=10
        )

    def say(self, kind: str, **values: Any) -> None:
        self.channel.send({"kind": kind, **values})

    def ready(self, generation: int, progress: int = 0) -> None:
        self.say(
            "ready", generation=generation, handle=f"h{generation}", progress=progress, digest=""
        )

    def hears(self, kind: str) -> dict[str, Any] | None:
        """Return the newest message of a kind that has come."""
        self.heard += self.channel.receive()
        return next((message for message in reversed(self.heard) if message["kind"] == kind), None)


def _until(found: Callable[[], Any]) -> Any:
    end = time.monotonic() + 20
    while not (value := found()):
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)
    return value


@contextmanager
def _run(ranks: int) -> Iterator[tuple[Coordinator, list[_Peer], _Peer]]:
    """Yield a coordinator whose ranks train in the first generation, and their agent."""
    coordinator = Coordinator(ranks, "127.0.0.1")
    os.environ[TOKEN] = coordinator.token
    peers: list[_Peer] = []
    try:
        agent = _Peer(coordinator, agent=0)
        peers += [_Peer(coordinator, member=number, pid=100 + number) for number in range(ranks)]
        for peer in peers:
            peer.ready(0)
        for peer in peers:
            _until(partial(peer.hears, "form"))
            peer.say("formed", generation=1)
            peer.say("trains", settings=_SETTINGS)
        _until(
            lambda: (
                coordinator.side.phase == "run"
                and all(each.trains for each in coordinator._peers if each.pid)
            )
        )
        yield coordinator, peers, agent
    finally:
        os.environ.pop(TOKEN, None)
        for peer in peers:
            peer.channel.close()
        coordinator.close()


@pytest.mark.parametrize("token", ["é", "\ud800", 5, None, ["a"]])
def test_process_without_the_token_is_not_let_in(token: object) -> None:
    coordinator = Coordinator(1, "127.0.0.1")
    try:
        stranger = Channel(socket.create_connection(("127.0.0.1", coordinator.port)))
        stranger.send({"kind": "hello", "token": token, "pid": 1, "host": "here", "member": 0})

        def is_closed() -> bool:
            try:
                return stranger.receive() == [{}]
            except Closed:
                return True

        _until(is_closed)
        assert not coordinator.side.living and not coordinator.verdict
    finally:
        coordinator.close()


def test_connections_without_the_token_are_few_and_keep_no_rank_out() -> None:
    with _run(2) as (coordinator, _, _):
        strangers = [socket.create_connection(("127.0.0.1", coordinator.port)) for _ in range(200)]
        late = _Peer(coordinator, pid=105)
        _until(lambda: late.welcome["member"] in coordinator.side.living)
        assert len(coordinator._peers) < 100
        chatty = socket.create_connection(("127.0.0.1", coordinator.port))
        chatty.setblocking(True)
        with pytest.raises(OSError):  # closed, before it has sent a line of a gigabyte
            for _ in range(1000):
                chatty.sendall(b"a" * (1 << 20))
        assert not coordinator.verdict
        for each in [*strangers, chatty]:
            each.close()
        late.channel.close()


def test_others_form_without_a_rank_that_has_died() -> None:
    with _run(3) as (coordinator, peers, _):
        peers.pop(1).channel.close()
        for peer in peers:
            assert _until(partial(peer.hears, "lost"))["generation"] == 1
            peer.ready(1, progress=7)
        order = _until(
            lambda: next(
                (m for m in peers[0].heard if m.get("generation") == 2), peers[0].hears("x")
            )
        )
        assert order["members"] == [0, 2] and order["lost"][0]["member"] == 1
        assert not coordinator.verdict


def test_machine_that_is_lost_at_once_ends_no_run() -> None:
    with _run(3) as (coordinator, peers, agent):
        there = _Peer(coordinator, agent=1, host="there", pid=0)
        late = [_Peer(coordinator, host="there", pid=200 + number) for number in range(4)]
        _until(lambda: len(coordinator.side.living) == 7)
        # All of them are read in one round, that of the agent first: it takes the others along.
        select, closed = coordinator._selector.select, threading.Event()

        def round_of_all(timeout: float | None = None) -> Any:
            found = select(timeout)
            if closed.is_set():
                found.sort(
                    key=lambda each: (
                        each[0].data is None,
                        getattr(each[0].data, "agent", None) != 1,
                    )
                )
                return found
            return [each for each in found if getattr(each[0].data, "host", "") != "there"]

        coordinator._selector.select = round_of_all  # type: ignore[method-assign]
        for peer in (there, *late):
            peer.channel.close()
        time.sleep(0.2)
        closed.set()
        _until(lambda: len(coordinator.side.living) == 3)
        time.sleep(0.1)
        assert (
            not coordinator.verdict and agent.hears("end") is None and peers[0].hears("end") is None
        )


def test_silent_rank_is_ended_and_busy_one_is_not() -> None:
    with _run(3) as (_, peers, agent):
        peers.pop(2).channel.close()
        peers[0].ready(1)
        # The second rank is in the program for long: its listener answers.
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            if peers[1].hears("lost"):
                peers[1].say("busy", generation=1)
            time.sleep(0.02)
        assert agent.hears("kill") is None
        assert _until(lambda: agent.hears("kill"))["pid"] == 101


def _killed(agent: _Peer) -> set[int]:
    return {message["pid"] for message in agent.heard if message["kind"] == "kill"}


def test_silent_rank_under_a_debugger_is_not_ended() -> None:
    with _run(3) as (coordinator, peers, agent):
        agent.say("stopped", pids=[], traced=[100], seconds=0.1)
        _until(lambda: any(peer.is_traced for peer in coordinator._peers))
        # The other two do not answer, and one of them is under a debugger.
        peers.pop(2).channel.close()
        _until(lambda: agent.hears("kill"))
        assert _killed(agent) == {101}
        agent.say("stopped", pids=[], traced=[], seconds=0.1)
        _until(lambda: agent.hears("kill") and _killed(agent) == {100, 101})


def test_end_of_a_run_says_what_the_last_ranks_died_of() -> None:
    with _run(2) as (coordinator, peers, agent):
        late = _Peer(coordinator, pid=105)
        late.say("ready", generation=0, handle="h", progress=-1, digest="")
        peers.pop(1).channel.close()
        agent.say("exit", pid=101, code=-9)
        # The other one does not answer, and is ended for that.
        _until(lambda: agent.hears("kill"))
        peers.pop(0).channel.close()
        why = _until(lambda: late.hears("end"))["why"]
        assert "Rank 1 (process 101 on here) was killed by signal 9; Rank 0" in why
        assert "did not answer for 0.3 s (elastic.wait_seconds), and was killed." in why
        late.channel.close()


def test_stopped_rank_is_ended_unless_all_are_stopped() -> None:
    with _run(2) as (_, _peers, agent):
        for _ in range(10):
            agent.say("stopped", pids=[100, 101], traced=[], seconds=0.1)
            time.sleep(0.02)
        assert agent.hears("kill") is None
        for _ in range(10):
            agent.say("stopped", pids=[101], traced=[], seconds=0.1)
            time.sleep(0.02)
        assert _until(lambda: agent.hears("kill"))["pid"] == 101


def test_death_before_training_ends_the_run() -> None:
    coordinator = Coordinator(2, "127.0.0.1")
    os.environ[TOKEN] = coordinator.token
    try:
        first, second = (_Peer(coordinator, member=number) for number in range(2))
        second.channel.close()
        assert "before all ranks trained" in _until(lambda: first.hears("end"))["why"]
    finally:
        os.environ.pop(TOKEN, None)
        coordinator.close()


def test_rank_that_has_finished_is_no_death() -> None:
    with _run(2) as (coordinator, peers, agent):
        peers[0].say("finished")
        _until(lambda: coordinator.side.roster and 0 not in coordinator.side.living)
        peers[0].channel.close()
        agent.say("exit", pid=100, code=0)
        answer = _until(lambda: agent.hears("replace"))
        assert not (answer["may"] or answer["others_continue"])
        assert _until(lambda: peers[1].hears("complete")) and _until(
            lambda: agent.hears("complete")
        )
        assert not coordinator.verdict


@pytest.mark.parametrize("limit", [0, 1])
def test_ranks_are_replaced_as_often_as_the_setting_says(limit: int) -> None:
    with _run(3) as (_, peers, agent):
        peers[0].say("trains", settings={**_SETTINGS, "replacements": limit})
        peers.pop(1).channel.close()
        agent.say("exit", pid=101, code=-9)
        answer = _until(lambda: agent.hears("replace"))
        assert answer["may"] is (limit == 1) and answer["others_continue"]


def test_replacement_that_ends_at_birth_is_replaced_where_another_machine_has_a_rank_of_its_number() -> (
    None
):
    with _run(2) as (coordinator, _, _):
        there = _Peer(coordinator, agent=1, host="there")
        there.say("exit", pid=101, code=1)
        answer = _until(lambda: there.hears("replace"))
        assert answer["may"] and answer["others_continue"]
        assert coordinator.side.living == {0, 1}
        there.channel.close()


def test_replacement_that_is_stopped_does_not_keep_a_complete_run_waiting() -> None:
    with _run(2) as (coordinator, peers, agent):
        late = _Peer(coordinator, pid=105)
        for peer in peers:
            peer.say("finished")
        _until(
            lambda: (
                not coordinator.side.roster or coordinator.side.living <= {late.welcome["member"]}
            )
        )
        for _ in range(10):
            agent.say("stopped", pids=[105], traced=[], seconds=0.1)
        assert _until(lambda: agent.hears("kill"))["pid"] == 105


def test_many_messages_are_read_in_turn_and_a_long_line_is_refused() -> None:
    ours, theirs = socket.socketpair()
    reader, message = Channel(ours), {"kind": "x", "text": "a" * 1000}
    line, count, read = json.dumps(message).encode() + b"\n", 6000, 0

    def write() -> None:
        with suppress(OSError):  # the reader has closed
            theirs.sendall(line * count + b"a" * (5 << 20))

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    with pytest.raises(Closed):
        while True:
            read += len(reader.receive())
    assert read == count
    reader.close()
    writer.join(5)


def test_rank_that_has_ended_by_itself_does_not_end_its_agent() -> None:
    # No process has this number, so that none is killed for it.
    ended = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1
    rank = subprocess.Popen(["sleep", "1000"])
    with _run(1) as (coordinator, _, _):
        link = AgentLink(f"127.0.0.1:{coordinator.port}", 1)
        link.pids = {ended, rank.pid}
        try:
            machine = _until(lambda: [each for each in coordinator._peers if each.agent == 1])[0]
            machine.channel.send({"kind": "kill", "pid": ended})
            machine.channel.send({"kind": "kill", "pid": rank.pid})
            assert _until(lambda: rank.poll() or not link.is_alive) == -signal.SIGKILL
            assert link.is_alive
        finally:
            rank.kill()
            rank.wait()
            link.close()


def _rounds_end(coordinator: Coordinator, first: int) -> Callable[[], None]:
    """Have the coordinator look at nothing until the returned function is called, and then at one process before all others."""
    select, may_look, is_here = coordinator._selector.select, threading.Event(), threading.Event()

    def in_order(timeout: float | None = None) -> Any:
        is_here.set()
        if not may_look.wait(timeout):
            return []
        return sorted(select(timeout), key=lambda each: getattr(each[0].data, "pid", None) != first)

    coordinator._selector.select = in_order  # type: ignore[method-assign]
    assert is_here.wait(20)
    return may_look.set


def test_end_that_is_read_before_another_rank_says_that_it_trains_is_a_change() -> None:
    with _run(3) as (coordinator, peers, _):
        for peer in coordinator._peers:
            peer.trains = peer.pid != 100
        look = _rounds_end(coordinator, first=102)
        peers[0].say("trains", settings=_SETTINGS)
        peers.pop(2).channel.close()
        look()
        _until(lambda: 2 not in coordinator.side.living)
        assert not coordinator.verdict
        assert _until(partial(peers[0].hears, "lost"))["generation"] == 1


def test_replacements_that_end_at_birth_do_not_end_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with _run(2) as (coordinator, _peers, agent):

        def has(count: int) -> bool:
            return len(coordinator.side.living) == count

        def told(pid: int) -> dict[str, Any] | None:
            found = agent.hears("replace")
            return found if found is not None and found["pid"] == pid else None

        answers = []
        for pid in range(200, 207):
            # Every other one has come here before it ended.
            if pid % 2:
                newcomer = _Peer(coordinator, pid=pid)
                _until(partial(has, 3))
                newcomer.channel.close()
                _until(partial(has, 2))
            agent.say("exit", pid=pid, code=1)
            answers.append(_until(partial(told, pid))["may"])
        assert not coordinator.verdict
        assert answers == [True] * 4 + [False] * 3
        assert "no more is started" in caplog.text


def test_replacements_that_end_before_an_update_are_not_replaced_for_ever(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with _run(2) as (coordinator, peers, agent):

        def told(pid: int) -> dict[str, Any] | None:
            found = agent.hears("replace")
            return found if found is not None and found["pid"] == pid else None

        def form(everyone: list[_Peer]) -> None:
            generation = coordinator.side.generation
            for peer in peers:
                peer.ready(generation)
            _until(lambda: coordinator.side.generation == generation + 1)
            for peer in everyone:
                peer.say("formed", generation=generation + 1)
            _until(lambda: coordinator.side.phase == "run")

        def end(newcomer: _Peer, pid: int) -> bool:
            newcomer.channel.close()
            _until(lambda: coordinator.side.phase == "collect")
            form(peers)
            for peer in peers:
                peer.say("committed")
            agent.say("exit", pid=pid, code=1)
            return bool(_until(partial(told, pid))["may"])

        answers = []
        for pid in range(200, 209):
            newcomer = _Peer(coordinator, pid=pid)
            newcomer.ready(0, progress=-1)
            _until(lambda: coordinator.side.newcomers)
            form([*peers, newcomer])
            if pid < 202:
                # These two have trained.
                newcomer.say("committed")
                _until(lambda: coordinator._peers[-1].has_committed)
            if pid == 201:
                # This one stays, and says so after each change, as the others do.
                peers.append(newcomer)
            else:
                answers.append(end(newcomer, pid))
        assert not coordinator.verdict
        assert answers == [True] * 5 + [False] * 3
        assert "before they made an update" in caplog.text

"""The coordinator: a thread in the agent of the first machine, which has the membership and decides on it."""

from __future__ import annotations

import hmac
import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from .protocol import CoordinatorSide, StateLost, StatesDiffer
from .wire import LONGEST_HELLO, LONGEST_LINE, Channel, Closed, line_of

logger = logging.getLogger("danling")

_REPEAT_SECONDS, _LONGEST_REPEAT_SECONDS = 0.03, 1.0
"""When what is not answered is repeated first, and how the pause grows."""
_READ_SECONDS = 0.001
"""For each rank that is asked: the answers of a thousand take longer to read than of two."""
_TICK_SECONDS = 0.05
_ENDED = "ended"
"""How a rank ended of which nothing is known but that."""
_MOST_STRANGERS = 64
"""Connections that have not said the token yet. With one more the oldest is closed; a rank says it at once, and tries again."""
_LONGEST_TICK_SECONDS = 1.0
"""If the coordinator itself was stopped, as in a suspended job, that time does not count."""


@dataclass(frozen=True)
class Settings:
    """What the coordinator waits for.

    Attributes:
        least: Fewer ranks than this wait for more.
        wait_seconds: How long they do, and how long a machine may be silent.
        fence_seconds: How long a rank may be stopped while others wait for it.
        replacements: How many dead ranks are replaced; `None` for all.
    """

    least: int = 1
    wait_seconds: float = 60.0
    fence_seconds: float = 15.0
    replacements: int | None = None


@dataclass(eq=False)
class Peer:
    """A process that is connected: a rank, or the agent of a machine."""

    channel: Channel
    member: int | None = None
    agent: int | None = None
    pid: int = 0
    host: str = ""
    stopped_for: float = 0.0
    silent_for: float = 0.0
    is_traced: bool = False
    """Whether a debugger has stopped it."""
    ended_for: str = ""
    """Why the coordinator has it killed."""
    trains: bool = False
    has_committed: bool = False
    """Whether it has made an update."""
    has_finished: bool = False


@dataclass
class Change:
    """What is reported of one change: who has gone and come, and how long the others waited."""

    began: float
    lost: list[dict[str, Any]] = field(default_factory=list)


class Coordinator:
    """Serves ranks and agents until `close`.

    Args:
        expected: Ranks at the beginning.
        host: Address on which it listens; empty for all of this machine.

    Attributes:
        port: Where it listens.
        token: What a process must know to be let in.
        verdict: Why the run must end; empty while it goes on.
    """

    def __init__(self, expected: int, host: str = "") -> None:
        self.side = CoordinatorSide(expected)
        self.settings = Settings()
        self.token = secrets.token_hex(16)
        self.verdict = ""
        self.deaths: dict[int, dict[str, Any]] = {}
        """Of dead members: pid, host, the time, and `how` it ended."""
        self._listener = socket.create_server((host, 0), backlog=512)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._peers: list[Peer] = []
        self._strangers: list[Peer] = []
        self._processes: set[tuple[str, int]] = set()
        self._next = expected
        self._repeats_at, self._repeat_seconds = 0.0, _REPEAT_SECONDS
        self._told_phase = ""
        self._since = time.monotonic()
        self._deaths_in_update = 0
        self._failed_births = 0
        """Replacements that have ended before they made an update, one after the other."""
        self._replaced = 0
        self._is_complete = self._has_closed = False
        self._change: Change | None = None
        self._thread = threading.Thread(target=self._serve, name="danling-coordinator", daemon=True)
        self._thread.start()

    @property
    def has_other_machines(self) -> bool:
        """Whether agents of other machines than the first are connected."""
        return any(peer.agent for peer in list(self._peers))

    def close(self) -> None:
        """Stop to serve."""
        self._has_closed = True
        self._thread.join()
        for peer in self._peers:
            peer.channel.close()
        self._listener.close()
        self._selector.close()

    # The thread

    def _serve(self) -> None:
        before = time.monotonic()
        while not self._has_closed:
            try:
                for key, _ in self._selector.select(
                    _TICK_SECONDS if self._is_calm else _REPEAT_SECONDS / 3
                ):
                    if key.data is None:
                        self._accept()
                    else:
                        self._read(key.data)
                now = time.monotonic()
                self._tick(now, min(now - before, _LONGEST_TICK_SECONDS))
                before = now
            except StateLost as error:
                self._end(f"{error} {self._last_deaths()}")
            except StatesDiffer as error:
                self._end(str(error))
            except Exception:
                logger.exception("The coordinator of the elastic ranks failed.")
                self._end("The coordinator of the elastic ranks failed.")

    @property
    def _is_calm(self) -> bool:
        return self.side.phase == "run"

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # it has gone again, or this process has no file descriptor left
        if len(self._strangers) >= _MOST_STRANGERS:
            self._drop(self._strangers[0])
        peer = Peer(Channel(connection, longest_line=LONGEST_HELLO))
        self._peers.append(peer)
        self._strangers.append(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _read(self, peer: Peer) -> None:
        if peer not in self._peers:
            return  # dropped for what was read before, such as the end of its machine
        try:
            messages = peer.channel.receive()
        except (Closed, ValueError):
            self._drop(peer)
            return
        peer.silent_for = 0.0
        for message in messages:
            if peer.member is None and peer.agent is None:
                if not self._welcome(peer, message):
                    return
            else:
                self._hear(peer, message)

    def _welcome(self, peer: Peer, message: dict[str, Any]) -> bool:
        """Take in a process that knows the token."""
        # JSON may have halves of surrogate pairs, which have no bytes.
        given = str(message.get("token", "")).encode(errors="replace")
        knows = hmac.compare_digest(given, self.token.encode())
        if message.get("kind") != "hello" or not knows:
            self._drop(peer)
            return False
        self._strangers.remove(peer)
        peer.channel.longest_line = LONGEST_LINE
        peer.pid, peer.host = int(message["pid"]), str(message["host"])
        if "agent" in message:
            peer.agent = int(message["agent"])
            peer.channel.send({"kind": "welcome"})
            return True
        number = message.get("member")
        if number is None:
            number, self._next = self._next, self._next + 1
        peer.member = int(number)
        self._processes.add((peer.host, peer.pid))
        self.side.join(peer.member)
        peer.channel.send({"kind": "welcome", "member": peer.member})
        if self.verdict:
            peer.channel.send(self._end_message())
        return True

    def _drop(self, peer: Peer) -> None:
        """Note that a process is gone: its connection ends with it."""
        if peer not in self._peers:
            return
        self._selector.unregister(peer.channel.socket)
        peer.channel.close()
        self._peers.remove(peer)
        if peer in self._strangers:
            self._strangers.remove(peer)
        if peer.member is None:
            if peer.agent is not None:
                self._lose_machine(peer.host)
            return
        if not peer.has_finished:
            self._note_death(peer)
        self.side.remove([peer.member])

    def _note_death(self, peer: Peer) -> None:
        assert peer.member is not None
        death = {"member": peer.member, "pid": peer.pid, "host": peer.host, "time": time.time()}
        death["how"] = peer.ended_for or _ENDED
        self.deaths[peer.member] = death
        if self._is_complete:
            return
        is_first = peer.member < self.side.expected
        if is_first and not (peer.trains and self._all_train()):
            self._end(
                f"Rank {peer.member} (process {peer.pid} on {peer.host}) ended before all ranks trained. A rank can be replaced from the "
                "first update to the last one."
            )
            return
        is_taken_in = peer.member in self.side.roster
        if not (is_taken_in and (is_first or peer.has_committed)):
            self._failed_births += 1
        if not is_taken_in:
            return
        if self._change is None:
            self._change = Change(time.monotonic())
        self._change.lost.append(death)
        self._count_death()

    def _last_deaths(self) -> str:
        """Return what the ranks that had the state died of, for the end of a run."""
        return f"{'; '.join(map(describe_death, self._lost))}."

    @property
    def _lost(self) -> list[dict[str, Any]]:
        return [] if self._change is None else self._change.lost

    def _count_death(self) -> None:
        self._deaths_in_update += 1
        if self._deaths_in_update > self._most_failures:
            self._end(
                f"{self._deaths_in_update} ranks ended without one update between their ends: the program is at fault. Its own error "
                "is above."
            )

    @property
    def _most_failures(self) -> int:
        """How many ranks may end without one update, and how many replacements one after the other before their first update."""
        return max(2 * self.side.expected, 4)

    def _all_train(self) -> bool:
        roster = set(self.side.roster)
        members = [each for each in self._peers if each.member in roster]
        for each in members:
            if not each.trains:
                # It may have said so before another one ended, and not be read yet.
                self._hear_waiting(each)
        return all(each.trains for each in members)

    def _lose_machine(self, host: str) -> None:
        for peer in [each for each in self._peers if each.member is not None and each.host == host]:
            self._drop(peer)

    def _hear(self, peer: Peer, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if peer.agent is not None:
            if kind == "stopped":
                self._note_traced(peer.host, set(message["traced"]))
                self._note_stopped(peer.host, set(message["pids"]), float(message["seconds"]))
            elif kind == "exit":
                self._note_exit(peer.host, int(message["pid"]), int(message["code"]))
                peer.channel.send(
                    {
                        "kind": "replace",
                        "pid": message["pid"],
                        **self._after_end(peer.host, message["pid"]),
                    }
                )
            return
        assert peer.member is not None
        if kind == "trains":
            peer.trains = True
            # The agents do not know the settings of the run: its ranks bring them.
            self.settings = Settings(**message["settings"])
            self.side.least = self.settings.least
        elif kind == "finished":
            peer.has_finished = True
            self._is_complete = True
            self.side.remove([peer.member])
        elif kind == "committed":
            self._deaths_in_update = 0
            if peer.member >= self.side.expected and not peer.has_committed:
                self._failed_births = 0
            peer.has_committed = True
        elif kind == "end_run":
            self._end(str(message["why"]))
        elif kind == "ready" and self.verdict:
            # It has come since, or has not heard of it.
            peer.channel.send(self._end_message())
        elif kind in ("ready", "formed"):
            self.side.hear(peer.member, message)

    def _note_exit(self, host: str, pid: int, code: int) -> None:
        """Note with what code a process has ended; its connection may not have been looked at yet."""
        for peer in [
            each
            for each in self._peers
            if each.member is not None and (each.pid, each.host) == (pid, host)
        ]:
            self._hear_waiting(peer)
            self._drop(peer)
        for death in self.deaths.values():
            is_of_it = (death["pid"], death["host"]) == (pid, host)
            if is_of_it and code and death["how"] == _ENDED:
                death["how"] = describe_exit(code)

    def _hear_waiting(self, peer: Peer) -> None:
        with suppress(Closed, ValueError):
            for message in peer.channel.receive():
                self._hear(peer, message)

    def _after_end(self, host: str, pid: int) -> dict[str, bool]:
        """Return whether a rank that has ended is replaced, which is counted, and whether the others continue without it else."""
        is_death = any(
            (death["host"], death["pid"]) == (host, pid) for death in self.deaths.values()
        )
        if (
            not is_death
            and (host, pid) not in self._processes
            and self.side.generation
            and self._all_train()
        ):
            # A replacement that never came here.
            is_death = True
            self._failed_births += 1
        others_continue = is_death and not self.verdict and not self._is_complete
        limit = self.settings.replacements
        may = others_continue and (limit is None or self._replaced < limit)
        if may and self._failed_births > self._most_failures:
            logger.error(
                "%d replacements ended one after the other before they made an update: no more is started. The run continues without "
                "them; their own errors are above.",
                self._failed_births,
            )
            may = False
        self._replaced += may
        return {"may": may, "others_continue": others_continue}

    # What follows

    def _tick(self, now: float, passed: float) -> None:
        side = self.side
        if self.verdict:
            return
        if self._is_complete:
            # A member that lacks the last answer of the others has all that they have.
            if now >= self._repeats_at:
                self._repeats_at = now + _REPEAT_SECONDS
                complete = {"kind": "complete", "generation": side.generation}
                self._tell(side.living, complete)
                for agent in [each for each in self._peers if each.agent is not None]:
                    agent.channel.send(complete)
            return
        if not side.lacks_members:
            self._since = now
        elif now - self._since > self.settings.wait_seconds:
            side.accepts_fewer = True
        self._end_silent(passed)
        while side.advance():
            self._told_phase = ""
            if side.phase == "form":
                side.accepts_fewer = False
            if side.phase == "run":
                self._change = None
        if side.phase != self._told_phase:
            self._told_phase, self._repeats_at, self._repeat_seconds = (
                side.phase,
                0.0,
                _REPEAT_SECONDS,
            )
        if now >= self._repeats_at:
            members, message = side.repeated()
            self._repeats_at = now + max(self._repeat_seconds, _READ_SECONDS * len(members))
            # Several times before one that does not answer is ended.
            longest = min(_LONGEST_REPEAT_SECONDS, self.settings.wait_seconds / 8)
            self._repeat_seconds = (
                min(2 * self._repeat_seconds, longest) if members else _REPEAT_SECONDS
            )
            if message["kind"] == "form":
                message = {**message, "lost": self._lost}
            self._tell(members, message)

    def _end_silent(self, passed: float) -> None:
        """End ranks whose listener does not answer while others wait for them; one that is busy answers."""
        awaited = set(self.side.awaited if self.side.generation else ())
        limit = self.settings.wait_seconds
        for peer in self._peers:
            is_silent = peer.member in awaited and not peer.is_traced
            peer.silent_for = peer.silent_for + passed if is_silent else 0.0
            if peer.silent_for > limit:
                peer.silent_for = 0.0
                self._kill(
                    peer, f"did not answer for {limit:g} s (elastic.wait_seconds), and was killed"
                )

    def _note_traced(self, host: str, pids: set[int]) -> None:
        for peer in self._peers:
            if peer.member is not None and peer.host == host:
                peer.is_traced = peer.pid in pids

    def _note_stopped(self, host: str, pids: set[int], seconds: float) -> None:
        """End ranks that have been stopped for long while another one waits for them."""
        members = [
            each for each in self._peers if each.member is not None and not each.has_finished
        ]
        of_host = [each for each in members if each.host == host]
        for peer in of_host:
            peer.stopped_for = (
                # The machine itself may have been suspended meanwhile.
                peer.stopped_for + min(seconds, _LONGEST_TICK_SECONDS) if peer.pid in pids else 0.0
            )
        if all(each.stopped_for for each in members) and not self._is_complete:
            # No rank waits: the whole job is suspended. When the training is complete, the agent waits.
            for peer in members:
                peer.stopped_for = 0.0
        for peer in of_host:
            limit = self.settings.fence_seconds
            if peer.stopped_for > limit:
                peer.stopped_for = 0.0
                self._kill(
                    peer, f"was stopped for {limit:g} s (elastic.fence_seconds), and was killed"
                )

    def _kill(self, peer: Peer, why: str) -> None:
        peer.ended_for = why
        logger.warning("Rank %s %s.", peer.member, why)
        for agent in [
            each for each in self._peers if each.agent is not None and each.host == peer.host
        ]:
            agent.channel.send({"kind": "kill", "pid": peer.pid})

    def _tell(self, members: Collection[int], message: dict[str, Any]) -> None:
        if not members:
            return
        line, told = line_of(message), set(members)
        for peer in self._peers:
            if peer.member in told:
                peer.channel.send_line(line)

    def _end(self, why: str) -> None:
        if not self.verdict:
            self.verdict = why
            for peer in self._peers:
                peer.channel.send(self._end_message())

    def _end_message(self) -> dict[str, Any]:
        return {"kind": "end", "generation": self.side.generation, "why": self.verdict}


def describe_exit(code: int) -> str:
    """Return how a process has ended, of which `subprocess` has this exit code: below 0 it is the number of a signal."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def describe_death(death: Mapping[str, Any]) -> str:
    """Return who has gone, and how."""
    return f"Rank {death['member']} (process {death['pid']} on {death['host']}) {death['how']}"

"""A training loop by hand on elastic ranks: an update is a function of weights and number alone. Started by `danling run`.

Environment: UPDATES, SLOW_UNTIL, FAULTS (`member:point:count:how`, separated by `;`), REPORT (a file to which each rank appends its end).
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import TCPStore

from danling.distributed import MembershipChanged
from danling.elastic.member import Member, Membership, TrainingComplete, is_lost_collective

torch.set_num_threads(1)
MICRO, UPDATES = 8, int(os.environ.get("UPDATES", "60"))
SLOW_UNTIL = int(os.environ.get("SLOW_UNTIL", "0"))
"""Changes of the ranks before which an update takes longer, so that a replacement finds the others training."""

HELD_SECONDS = 1.5
LATE_SECONDS = 1.0


class Faults:
    """Ends or stops this process at a point, the n-th time it comes there."""

    def __init__(self, number: int) -> None:
        listed = [fault.split(":") for fault in os.environ.get("FAULTS", "").split(";") if fault]
        self.mine = {
            point: (int(count), how)
            for member, point, count, how in listed
            if int(member) == number
        }
        self.number = number
        self.counts: dict[str, int] = {}

    def at(self, point: str) -> None:
        self.counts[point] = self.counts.get(point, 0) + 1
        count, how = self.mine.get(point, (0, ""))
        if self.counts[point] != count:
            return
        if point.startswith("in_"):
            threading.Timer(0.002, lambda: strike(how, self.number)).start()
        else:
            strike(how, self.number)


def strike(how: str, number: int) -> None:
    note(struck=time.time(), how=how, number=number)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "late":
        # The others wait for this rank in a collective by then.
        time.sleep(LATE_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "exit":
        os._exit(0)
    elif how == "leave":
        sys.exit(3)
    elif how == "hold":
        # A call of C that keeps the lock of the interpreter: the listener cannot answer meanwhile.
        ctypes.PyDLL(None).usleep(int(1e6 * HELD_SECONDS))
    elif how == "abandon":
        raise MembershipChanged
    elif how == "raise":
        raise ZeroDivisionError("a fault of the test")


def end_at_second_interrupt() -> None:
    """Be as a rank that saves at the first signal, and that ends at once at a second SIGINT."""
    interrupts = []

    def interrupt(number: int, frame: object) -> None:
        interrupts.append(number)
        note(interrupts=len(interrupts))
        if len(interrupts) == 2:
            os._exit(130)

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def note(**values: object) -> None:
    with open(os.environ["REPORT"], "a") as file:
        file.write(json.dumps({"pid": os.getpid(), **values}) + "\n")


def pause(number: int) -> None:
    """Say that the update was made, and let the second rank wait for a file of the test, and the others for that rank."""
    note(paused=number)
    while number == 1 and not os.path.exists(os.environ["REPORT"] + ".continue"):
        time.sleep(0.01)


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def gradient(model: torch.nn.Module, update: int, micro: int) -> torch.Tensor:
    noise = torch.Generator().manual_seed(update * 1000 + micro)
    data = torch.randn(4, 16, generator=noise)
    target = data[:, :4].argmax(1)
    model.zero_grad()
    torch.nn.functional.cross_entropy(
        model(data + 0.1 * torch.randn(4, 16, generator=noise)), target
    ).backward()  # type: ignore[no-untyped-call]
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def added(parts: list[torch.Tensor]) -> torch.Tensor:
    while len(parts) > 1:
        parts = [
            parts[i] + parts[i + 1] if i + 1 < len(parts) else parts[i]
            for i in range(0, len(parts), 2)
        ]
    return parts[0]


def flat(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    values = [p.detach().flatten() for p in model.parameters()]
    for p in model.parameters():
        state = optimizer.state.get(p)
        values += (
            [state[n].flatten() for n in ("exp_avg", "exp_avg_sq")]
            if state
            else [torch.zeros(2 * p.numel())]
        )
    return torch.cat(values)


def put(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, values: torch.Tensor, update: int
) -> None:
    at = 0
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(values[at : at + p.numel()].view_as(p))
            at += p.numel()
    for p in model.parameters():
        n = p.numel()
        moments = [
            values[at : at + n].view_as(p).clone(),
            values[at + n : at + 2 * n].view_as(p).clone(),
        ]
        optimizer.state[p] = {
            "step": torch.tensor(float(update)),
            "exp_avg": moments[0],
            "exp_avg_sq": moments[1],
        }
        at += 2 * n


class Loop:
    def __init__(self) -> None:
        self.model, self.optimizer = make()
        self.size = sum(p.numel() for p in self.model.parameters())
        self.update = 0
        self.repeated = 0
        self.changes = 0

    def take(self, now: Membership, at: Callable[[str], object]) -> None:
        """Take the state of the rank that leads, or send it."""
        head = torch.tensor([self.update])
        values = flat(self.model, self.optimizer)
        at("send_state")
        at("in_send")
        dist.broadcast(head, now.leader)
        at("sending")
        dist.broadcast(values, now.leader)
        at("took_state")
        if now.rank in now.behind:
            self.put_in(int(head), values)

    def put_in(self, update: int, values: torch.Tensor) -> None:
        self.update = update
        if update:
            put(self.model, self.optimizer, values, update)

    def digest(self) -> str:
        return hashlib.sha256(flat(self.model, self.optimizer).numpy().tobytes()).hexdigest()[:16]

    def one_update(
        self,
        first: int,
        last: int,
        all_reduce: Callable[[torch.Tensor], object],
        at: Callable[[str], object],
        regroup: bool,
    ) -> bool:
        """Make one update; return whether a rank asked to regroup."""
        parts = torch.zeros(MICRO * self.size + 1)
        rows = parts[:-1].view(MICRO, self.size)
        parts[-1] = float(regroup)
        for micro in range(first, last):
            at("leaf")
            rows[micro] = gradient(self.model, self.update, micro) + 0.0
        at("reduce")
        at("in_reduce")
        all_reduce(parts)
        at("reduced")
        total = added(list(rows)) / MICRO
        where = 0
        for p in self.model.parameters():
            p.grad = total[where : where + p.numel()].view_as(p).clone()
            where += p.numel()
        self.optimizer.step()
        self.update += 1
        at("stepped")
        return bool(parts[-1])


def undisturbed(updates: int) -> str:
    loop = Loop()
    for _ in range(updates):
        loop.one_update(0, MICRO, lambda _: None, lambda _: None, False)
    return loop.digest()


def main() -> None:
    def store() -> TCPStore:
        return TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
        )

    member = Member(store, timeout=timedelta(seconds=60))
    faults, loop = Faults(member.number), Loop()
    settings: dict[str, Any] = {"fence_seconds": float(os.environ.get("FENCE", "15"))}
    if "REPLACEMENTS" in os.environ:
        settings["replacements"] = int(os.environ["REPLACEMENTS"])
    if "STUBBORN" in os.environ:
        end_at_second_interrupt()
    pause_at = int(os.environ.get("PAUSE_AT", "-1"))
    note(number=member.number, began=time.time())
    has_state = not member.joins
    faults.at("born")

    def take(now: Membership) -> None:
        faults.at("formed")
        if now.behind:
            loop.take(now, faults.at)

    try:
        if member.joins:
            member.say_trains(**settings)
        now = member.form(loop.update if has_state else None, loop.digest, take)
        member.say_trains(**settings)
        first_commit = False
        while loop.update < UPDATES:
            if loop.changes < SLOW_UNTIL:
                time.sleep(0.1)
            changed = False
            try:
                first, last = (MICRO * (now.rank + k) // now.size for k in (0, 1))

                def at(point: str) -> None:
                    member.check()
                    faults.at(point)

                changed = loop.one_update(first, last, dist.all_reduce, at, member.should_regroup)
            except (MembershipChanged, RuntimeError) as error:
                if not (isinstance(error, MembershipChanged) or is_lost_collective(error)):
                    raise
                changed = True
                loop.repeated += 1
            if not changed and first_commit:
                first_commit = False
                member.say_committed()
                note(update=loop.update, again=time.time(), size=now.size, members=now.members)
            if loop.update == pause_at and not changed:
                pause(member.number)
            if changed:
                now = member.form(loop.update, loop.digest, take)
                loop.changes += 1
                first_commit = True
        # The last of what all do together.
        while True:
            try:
                dist.all_reduce(torch.zeros(1))
                break
            except RuntimeError as error:
                if not is_lost_collective(error):
                    raise
            now = member.form(loop.update, loop.digest, take)
    except TrainingComplete:
        pass
    member.say_finished()
    # A replacement that comes when all is done has nothing.
    if loop.update:
        note(end=loop.digest(), repeated=loop.repeated, changes=loop.changes, update=loop.update)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)

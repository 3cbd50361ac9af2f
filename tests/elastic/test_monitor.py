"""The agent decides on each rank that ends, also where two end at once."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.patience import until
from support.process_tree import is_alive
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

from danling.elastic.agent import ElasticAgent, Launch


class _Link:
    """Lets every rank be replaced; the first rank ends while it is asked about the second one."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self.asked: list[int] = []
        self.pids: set[int] = set()
        self.others_continue = self.is_complete = False
        self.is_alive = True

    def should_replace(self, pid: int, code: int) -> bool:
        first = self._context.subprocess_handlers[0].proc.pid
        if not self.asked:
            os.kill(first, signal.SIGKILL)
            until(lambda: not is_alive(first))
        self.asked.append(pid)
        return True


def test_rank_that_ends_while_another_one_is_replaced_does_not_end_all(tmp_path: Path) -> None:
    words = ("-c", "import time; time.sleep(1000)")
    context: Any = start_processes(
        name="default",
        entrypoint=sys.executable,
        args=dict.fromkeys(range(3), words),
        envs={rank: {} for rank in range(3)},
        logs_specs=DefaultLogsSpecs(log_dir=str(tmp_path)),
    )
    try:
        link = _Link(context)
        agent = ElasticAgent.__new__(ElasticAgent)
        agent._pcontext, agent._link, agent._coordinator = context, link, None  # type: ignore[assignment]
        agent._spares, agent._variables, agent._launch = (
            [],
            {},
            Launch((sys.executable, *words), 3, spares=0),
        )
        agent._uninterruptible_state_timeout = 0.0
        workers = [
            SimpleNamespace(id=pid, global_rank=rank) for rank, pid in context.pids().items()
        ]
        group: Any = SimpleNamespace(spec=SimpleNamespace(role="default"), workers=workers)
        begun = context.pids()
        os.kill(begun[1], signal.SIGKILL)
        until(lambda: not is_alive(begun[1]))
        for _ in range(2):
            assert agent._monitor_workers(group).state == WorkerState.HEALTHY
        assert link.asked == [begun[1], begun[0]]
        now = context.pids()
        assert now[2] == begun[2] and now[0] != begun[0] and all(map(is_alive, now.values()))
    finally:
        context.close(signal.SIGKILL)

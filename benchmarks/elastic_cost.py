"""What `elastic.enabled` costs while no rank ends: an update of `gradient_sum: canonical` with it and without it.

    OMP_NUM_THREADS=1 python benchmarks/elastic_cost.py                        # torch 2.14 or newer; about three minutes on two idle cores
    OMP_NUM_THREADS=1 python benchmarks/elastic_cost.py --cpu-time --ranks 2   # on a busy machine

Two jobs of so many ranks take turns, block by block of updates; the other one waits meanwhile. Times are those of rank 0, with
`--cpu-time` the time of the processor of all ranks and threads. The coordinator has its process, as in the agent.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import pairs
import torch.distributed as dist
from step_cost import Benchmarked, settings_of
from torch._C._distributed_c10d import TCPStore
from workload import WORKLOADS, Samples, Workload, make_batches

from danling.elastic.coordinator import Coordinator
from danling.elastic.wire import ADDRESS, JOINS, TOKEN
from danling.utils.observers import Observer

AGAINST = "without"
WAYS = (AGAINST, "elastic.enabled")
_FORK = multiprocessing.get_context("fork")


class Turns(Observer):
    """Waits for the turn of this job before each block of updates, and says how long the block took."""

    critical = True

    def __init__(self, connection: Connection, block: int, clock: pairs.Clock) -> None:
        self._connection, self._block, self._clock = connection, block, clock
        self._left, self._began = 0, 0.0

    def update_started(self) -> None:
        if self._left == 0:
            self._connection.recv()
            self._left, self._began = self._block, self._clock()

    def update_ended(self, outcome: object) -> None:
        self._left -= 1
        if self._left == 0:
            self._connection.send(self._clock() - self._began)


def _serve(ranks: int, told: Connection) -> None:
    """Be the process of the agent: the stores of both jobs, and the coordinator of the elastic one."""
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in WAYS]
    coordinator = Coordinator(ranks, "127.0.0.1")
    told.send(([store.port for store in stores], coordinator.port, coordinator.token))
    told.recv()
    coordinator.close()


def _be_rank(
    connection: Connection, root: str, asked: argparse.Namespace, workload: Workload
) -> None:
    clock = pairs.prepared(asked)
    is_elastic = ADDRESS in os.environ
    config = settings_of(
        workload,
        root,
        steps=(asked.rounds + 1) * workload.block,
        dataloader={
            "global_batch_size": 4 * workload.batch_size,
            "micro_batch_size": workload.batch_size,
        },
        gradient_sum="canonical",
        optim={"type": "adamw", "lr": 1e-3},
        elastic={"enabled": is_elastic},
    )
    runner = Benchmarked(config, workload, Samples(make_batches(workload)))
    runner.observers.append(Turns(connection, workload.block, clock))
    runner.train()
    connection.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _start(
    way: str, root: str, ports: tuple[int, int, str], asked: argparse.Namespace, workload: Workload
) -> list[tuple[Any, Connection]]:
    port, coordinator, token = ports
    members = []
    for rank in range(asked.ranks):
        ours, theirs = _FORK.Pipe()
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        variables |= {
            "WORLD_SIZE": str(asked.ranks),
            "LOCAL_WORLD_SIZE": str(asked.ranks),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        variables["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        if way != AGAINST:
            variables |= {ADDRESS: f"127.0.0.1:{coordinator}", TOKEN: token, JOINS: "0"}
        process = _FORK.Process(
            target=_enter, args=(variables, theirs, f"{root}/{way}", asked, workload)
        )
        process.start()
        theirs.close()
        members.append((process, ours))
    return members


def _enter(variables: dict[str, str], *arguments: Any) -> None:
    os.environ.update(variables)
    _be_rank(*arguments)


def measure(asked: argparse.Namespace, workload: Workload, root: str) -> pairs.Times:
    """Return microseconds an update by way and round."""
    ours, theirs = _FORK.Pipe()
    agent = _FORK.Process(target=_serve, args=(asked.ranks, theirs), daemon=True)
    agent.start()
    stores, coordinator, token = ours.recv()
    jobs = {
        way: _start(way, root, (port, coordinator, token), asked, workload)
        for way, port in zip(WAYS, stores)
    }
    times: pairs.Times = {way: [] for way in WAYS}
    for round_ in range(asked.rounds + 1):
        for way, members in jobs.items():
            for _, connection in members:
                connection.send("go")
            seconds = [connection.recv() for _, connection in members]
            if round_:
                times[way].append(
                    (sum(seconds) if asked.cpu_time else seconds[0]) / workload.block * 1e6
                )
    for members in jobs.values():
        for process, _ in members:
            process.join()
    ours.send("end")
    agent.join()
    return times


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    pairs.add_options(parser)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--only", default="", help="measure where the title has this in it, such as 10k"
    )
    asked = parser.parse_args()
    found = {}
    for name, workload in WORKLOADS.items():
        if asked.only not in name:
            continue
        workload = replace(workload, block=max(workload.block // 20, 4))
        with tempfile.TemporaryDirectory() as root:
            figures = pairs.summarize(measure(asked, workload, root), AGAINST)
        pairs.show(f"{asked.ranks} ranks, {name}", figures, AGAINST, "an update")
        found[name] = figures
    if asked.json:
        asked.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()

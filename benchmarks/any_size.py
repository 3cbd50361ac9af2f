"""What `gradient_sum: canonical` costs compared with `fast`: time of an update, and bytes that a rank sends, on 1, 2 and 4 processes.

    OMP_NUM_THREADS=1 python benchmarks/any_size.py                          # about six minutes on two idle cores
    OMP_NUM_THREADS=1 python benchmarks/any_size.py --processes 1 2 --micro-batches 16 --rounds 5

An MLP of 1.3 million parameters, 256 samples a micro-batch, 4, 16 or 64 micro-batches an update, clipping and AdamW. Blocks of updates
are interleaved; each round of `canonical` is divided by the round of `fast` next to it. `canonical` takes
AdamW's loop over tensors instead of its fused form. Bytes are counted in the calls of torch.distributed on rank 0, for one
update, and compared with a ring's all-reduce of the gradient.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pairs
import torch.distributed as dist
from ranks import run_on_ranks
from step_cost import by_runner
from workload import Samples, Workload, make_batches

AGAINST = "fast"
SIZE = 256
PARAMETERS = 256 * 1024 + 1024 + 1024 * 1024 + 1024 + 1024 * 10 + 10


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """Count inside what this rank sends to others in the calls that `canonical` makes; the list has one number."""
    sent, exchange, gather = [0], dist.all_to_all_single, dist.all_gather

    def all_to_all_single(output: Any, input: Any, *rest: Any, **more: Any) -> Any:
        sent[0] += input.nbytes * (dist.get_world_size() - 1) // dist.get_world_size()
        return exchange(output, input, *rest, **more)

    def all_gather(parts: Any, part: Any, *rest: Any, **more: Any) -> Any:
        sent[0] += part.nbytes * (dist.get_world_size() - 1)
        return gather(parts, part, *rest, **more)

    names: Any = dist
    names.all_to_all_single, names.all_gather = all_to_all_single, all_gather
    try:
        yield sent
    finally:
        names.all_to_all_single, names.all_gather = exchange, gather


def _on_rank(rank: int, root: str, asked: argparse.Namespace, world_size: int) -> None:
    clock = pairs.prepared(asked)
    for micro_batches in asked.micro_batches:
        workload = Workload((256, 1024, 1024, 10), SIZE, max(32 // micro_batches, 1))
        samples = Samples(make_batches(workload))
        loading = {"global_batch_size": SIZE * micro_batches, "micro_batch_size": SIZE}
        ways: dict[str, Callable[[], None]] = {}
        for name in (AGAINST, "canonical"):
            ways[name] = by_runner(
                workload,
                samples,
                f"{root}/{micro_batches}-{name}",
                gradient_sum=name,
                dataloader=loading,
                optim={"type": "adamw", "lr": 1e-3},
            )
        times = pairs.interleaved(ways, workload.block, asked.rounds, clock)
        figures = pairs.summarize(times, AGAINST)
        with counted_bytes() as sent:
            ways["canonical"]()
        if rank == 0:
            title = f"{world_size} processes, {micro_batches} micro-batches"
            pairs.show(title, figures, AGAINST, "an update")
            if world_size > 1:
                ring = 2 * 4 * PARAMETERS * (world_size - 1) / world_size
                print(
                    f"  sent by rank 0: {sent[0] / workload.block / ring:.2f} times an all-reduce"
                )
            if asked.json:
                asked.json.with_stem(f"{asked.json.stem}-{world_size}-{micro_batches}").write_text(
                    json.dumps(figures)
                )
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    """Measure on each number of processes, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    pairs.add_options(parser, rounds=10)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 16, 64])
    asked = parser.parse_args()
    for world_size in asked.processes:
        with tempfile.TemporaryDirectory() as root:
            run_on_ranks(_on_rank, root, asked, world_size, world_size=world_size)


if __name__ == "__main__":
    main()

"""What an update costs on the stack `accelerate`, compared with a loop by hand with Accelerate, and with the stack `ddp`.

    OMP_NUM_THREADS=1 python benchmarks/accelerate_cost.py                     # about two minutes
    OMP_NUM_THREADS=1 python benchmarks/accelerate_cost.py --rounds 5 --json accelerate_cost.json

The workloads of `step_cost.py`: MLPs of ten thousand and of 1.3 million parameters, clipping at 1.0 and a schedule, over batches in
a list and over a `Dataset`. The loop by hand is that of Accelerate's documentation (`prepare`, `accumulate`, `backward`,
`clip_grad_norm_`), with model, optimizer, schedule and loader prepared. Blocks of updates are interleaved and each one is divided by the
loop's of the same round; medians, with the quartiles.
"""

from __future__ import annotations

import pairs
from step_cost import Benchmarked, blocks, by_runner
from torch.utils.data import DataLoader
from workload import Samples, Workload, make_batches, make_model, updates_with_accelerate

import danling as dl

BY_HAND = "Accelerate by hand"


class OnAccelerate(Benchmarked, dl.AccelerateRunner):
    """The same runner through Accelerate."""


def measure(
    workload: Workload, rounds: int, root: str, clock: pairs.Clock, *, from_dataset: bool
) -> pairs.Times:
    """Return microseconds an update, by way and round."""
    batches = make_batches(workload)
    samples = Samples(batches)
    data = samples if from_dataset else batches
    loader = (
        DataLoader(samples, workload.batch_size, shuffle=True, drop_last=True)
        if from_dataset
        else batches
    )
    ways = {
        # The runner first: it makes the accelerator whose state the loop by hand shares.
        "stack accelerate": by_runner(workload, data, f"{root}/accelerate", OnAccelerate),
        "stack ddp": by_runner(workload, data, f"{root}/ddp"),
        BY_HAND: blocks(updates_with_accelerate(make_model(workload), loader), workload),
    }
    return pairs.interleaved(ways, workload.block, rounds, clock)


if __name__ == "__main__":
    pairs.main(__doc__ or "", measure, against=BY_HAND)

"""A step of Muon on shards: torch's own, that of `optim.type: muon`, and AdamW; their collectives, and how they differ from one process.

OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/muon.py 128        # matrices of 128 x 512 and 512 x 128
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from danling.optim.muon import ShardedMuon

UPDATES = 6


def make_model(width: int) -> nn.Sequential:
    """Return two layers of two matrices each, the same on all ranks."""
    torch.manual_seed(0)
    layers = [
        nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        )
        for _ in range(2)
    ]
    return nn.Sequential(*layers)


def gradients_of(model: nn.Module, update: int) -> list[Tensor]:
    """Return gradients that are drawn for one update."""
    draw = torch.Generator().manual_seed(update)
    return [torch.randn(parameter.shape, generator=draw) for parameter in model.parameters()]


def main() -> None:
    """Measure, and print a line for each optimizer on rank 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("width", type=int, nargs="?", default=128)
    width = parser.parse_args().width
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = make_model(width)
    reference = torch.optim.Muon(whole.parameters(), lr=0.02)
    for update in range(UPDATES):
        for parameter, gradient in zip(
            whole.parameters(), gradients_of(whole, update), strict=True
        ):
            parameter.grad = gradient
        reference.step()
    for kind in (torch.optim.Muon, ShardedMuon, torch.optim.AdamW):
        model = make_model(width)
        for layer in model:
            fully_shard(layer, mesh=mesh)
        optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=0.02)
        times = list[float]()
        collectives = 0
        for update in range(UPDATES):
            for parameter, gradient in zip(
                model.parameters(), gradients_of(model, update), strict=True
            ):
                assert isinstance(parameter, DTensor)
                parameter.grad = distribute_tensor(gradient, mesh, parameter.placements)
            dist.barrier()
            begun = time.perf_counter()
            if update:
                optimizer.step()
                times.append(time.perf_counter() - begun)
            else:
                with CommDebugMode() as counted:
                    optimizer.step()
                collectives = counted.get_total_counts()
        differs = 0.0
        for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
            assert isinstance(mine, DTensor)
            differs = max(differs, float((mine.full_tensor() - theirs).abs().max()))
        if dist.get_rank() == 0:
            name = f"{kind.__module__.partition('.')[0]} {kind.__name__}"
            compared = (
                f"weights differ from torch's Muon on one process by {differs:.1e}"
                if "Muon" in name
                else ""
            )
            print(
                f"{name:20} {1e3 * min(times):8.1f} ms  {collectives:3d} collectives  {compared}",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Paths that differ on an accelerator, on the simulated one: offloaded gradients, tensors of the host in collectives, shared devices."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support import device
from support.device import run_processes
from support.toys import settings
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

import danling as dl
from danling.checkpoints.snapshot import SnapshotBuffers
from danling.data.build import build_dataloader
from danling.distributed import Domain
from danling.training.canonical_sum import order_free_norm
from danling.training.reduction import scale_gradients, total_norm
from danling.utils.devices import pinned_block
from danling.utils.tensors import local_part


class Lines(logging.Handler):
    """Keeps what the library logs from here on, in a process that ends with the test."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("danling").addHandler(self)
        logging.getLogger("danling").setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


# Gradients on two devices, as with offloaded shards


def _gradients() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((7, 5), (3,), (40_000,), (0,))
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    return [values[0], values[1].to(device.NAME), values[2].to(device.NAME), values[3]]


def _scaled_and_measured() -> None:
    device.use()
    gradients, factor = [*_gradients(), torch.ones(2, dtype=torch.bfloat16)], 0.37
    expected = [gradient.cpu().double() * factor for gradient in gradients]
    scale_gradients(gradients, torch.tensor(factor, dtype=torch.float64, device=device.NAME))
    for gradient, value in zip(gradients, expected):
        assert torch.allclose(
            gradient.cpu().double(), value, rtol=1e-2 if gradient.dtype is torch.bfloat16 else 1e-6
        )
    gradients = _gradients()
    exact = torch.cat([gradient.cpu().double().flatten() for gradient in gradients]).norm()
    sizes = [gradient.numel() for gradient in gradients]
    norm, on_host = (
        order_free_norm(gradients, sizes),
        order_free_norm([g.cpu() for g in gradients], sizes),
    )
    assert torch.equal(norm.cpu(), on_host) and torch.allclose(on_host, exact, rtol=1e-6)
    assert torch.allclose(total_norm(gradients).cpu().double(), exact, rtol=1e-5)


@device.needed
def test_gradients_of_host_and_device_are_scaled_and_measured_together() -> None:
    run_processes(_scaled_and_measured, world_size=1)


class Counting(TorchDispatchMode):
    """Counts operations, each of which launches a kernel or two."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_exact_norm_of_gpt2_takes_few_operations_on_a_device() -> None:
    block = [
        (768,),
        (768,),
        (768, 2304),
        (2304,),
        (768, 768),
        (768,),
        (768,),
        (768,),
        (768, 3072),
        (3072,),
        (3072, 768),
        (768,),
    ]
    shapes = [(50257, 768), (1024, 768), *block * 12, (768,), (768,)]
    gradients = [torch.empty(shape, device="meta") for shape in shapes]
    assert sum(gradient.numel() for gradient in gradients) == 124_439_808
    with Counting() as operations:
        order_free_norm(gradients, [gradient.numel() for gradient in gradients])
    # Pieces of 32,768 elements take 45,000.
    assert operations.count < 4_000


# Collectives and devices


def _broadcast_and_reduce() -> list[float]:
    device.use()
    # As with backend="nccl": nothing moves tensors of the host.
    dist.init_process_group(f"{device.NAME}:simulated")
    domain = Domain(device=torch.device(device.NAME, 0))
    sent = torch.full((3,), float(domain.rank + 1))
    domain.broadcast(sent, source=1)
    assert sent.device.type == "cpu"
    return [*sent.tolist(), float(domain.all_reduce(torch.ones(())))]


@device.needed
def test_tensors_of_the_host_are_broadcast_over_a_backend_for_devices_alone() -> None:
    assert run_processes(_broadcast_and_reduce) == [[2.0, 2.0, 2.0, 2.0]] * 2


def _pinned() -> list[bool]:
    device.use()
    dataset = TensorDataset(torch.zeros(4, 1))
    loaders = [
        build_dataloader(
            dataset, settings, split="train", train=True, seed=0, device=torch.device(where)
        )
        for where, settings in (
            (device.NAME, {}),
            (device.NAME, {"pin_memory": False}),
            ("cpu", {}),
            ("cuda", {}),
        )
    ]
    return [loader.pin_memory for loader in loaders]


@device.needed
def test_loader_pins_memory_for_the_available_accelerator() -> None:
    assert run_processes(_pinned, world_size=1) == [[True, False, False, False]]


class Sharded(dl.Runner):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        torch.manual_seed(5)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        self.criterion = nn.CrossEntropyLoss()
        inputs = torch.randn(32, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
        self.datasets = {"train": TensorDataset(inputs, inputs[:, :2].argmax(1))}


def _trained(
    directory: Path, on_device: bool, more: dict[str, Any]
) -> tuple[list[Tensor], str, bool]:
    if on_device:
        device.use()
    from torch.distributed.tensor import _random

    axes = {"stack": "parallel", "parallel": {"axes": {"shard": 2}}}
    config = settings(
        directory, steps=4, max_grad_norm=0.05, optim={"type": "adamw", "lr": 0.01}, **axes, **more
    )
    with Sharded(config) as runner:
        has_tracker = _random._rng_tracker is not None
        runner.train()
        weights = [
            local_part(weight.detach()).cpu() for weight in runner.unwrapped_model.parameters()
        ]
        return weights, str(runner.device), has_tracker


@device.needed
@pytest.mark.parametrize("offload", [pytest.param(None, marks=pytest.mark.slow), "cpu"])
def test_shards_on_an_accelerator_train_as_on_the_cpu_also_offloaded(
    offload: str | None, tmp_path: Path
) -> None:
    on_host = run_processes(_trained, tmp_path / "host", False, {})
    on_device = run_processes(
        _trained, tmp_path / "device", True, {"fsdp": {"offload_policy": offload}}
    )
    assert [name for _, name, _ in on_device] == ["sim:0"] * 2
    # Before the first forward, without a message between the ranks.
    assert [has_tracker for _, _, has_tracker in on_device] == [True] * 2
    for (expected, _, _), (found, _, _) in zip(on_host, on_device):
        assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(expected, found))


def _shares(directory: Path, backend: str | None) -> list[str]:
    device.use()
    lines = Lines()
    with Sharded(settings(directory, steps=1, backend=backend)) as runner:
        runner.train()
    return [line for line in lines.lines if "share a device" in line]


@device.needed
def test_processes_on_one_device_are_logged_once(tmp_path: Path) -> None:
    first, second = run_processes(_shares, tmp_path, None)
    assert second == [] and len(first) == 1
    assert re.search("ranks (0 and 1|1 and 0) have sim:0 of ", first[0])


@device.needed
@pytest.mark.parametrize("backend", ["nccl", f"cpu:gloo,{device.NAME}:nccl"])
def test_processes_on_one_device_are_refused_with_nccl(backend: str, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match="Expected a device for each process with nccl.* have sim:0 of .*backend='gloo'",
    ):
        run_processes(_shares, tmp_path, backend)


# Copies for saves


def _copied(shared: bool) -> tuple[bool, list[str]]:
    device.use()
    lines, buffers = Lines(), SnapshotBuffers(shared=shared)
    state = {"weight": torch.arange(250_000.0, device=device.NAME), "count": torch.zeros(())}
    for _ in range(2):
        copied, _ = buffers.copy(state)
        assert torch.equal(copied["weight"], torch.arange(250_000.0))
    return copied["weight"].is_pinned(), lines.lines


@device.needed
def test_memory_of_pinned_copies_is_logged_once() -> None:
    ((is_pinned, lines),) = run_processes(_copied, False, world_size=1)
    assert is_pinned and len(lines) == 1
    assert "take 3.0 MB of pinned memory of the host on each rank: up to 3 of 1.0 MB" in lines[0]


@device.needed
def test_unpinnable_shared_copies_are_named_once() -> None:
    ((is_pinned, lines),) = run_processes(_copied, True, world_size=1)
    assert not is_pinned and len(lines) == 1
    assert (
        "1.0 MB of 1.0 MB of a background save are copied from sim:0 to memory of the host that is not pinned"
        in lines[0]
    )
    assert "checkpoint.async_mode='async' pins them" in lines[0]


@pytest.mark.parametrize(
    ("size", "taken"), [(0, 0), (1, 1), (512, 512), (513, 1024), (12_100_000_000, 1 << 34)]
)
def test_pinned_blocks_of_cuda_are_powers_of_two(size: int, taken: int) -> None:
    assert (pinned_block(size, "cuda"), pinned_block(size, device.NAME)) == (taken, size)

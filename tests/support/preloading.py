"""What the server of forks has done once, so that none of the thousands of processes that it forks has to."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

MODULES = [
    "pytest",
    "numpy",
    "torch",
    "torch._dynamo",
    # What `torch.compile` imports: DeepSpeed decorates with it.
    "torch._inductor.compile_fx",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.run",
    "torch.distributed.tensor.parallel",
    "torchdata.stateful_dataloader",
    "torchft",
    "danling.runners.torch_runner",
    "danling.runners.parallel_runner",
    # What the metrics are compared with: seconds in every process otherwise.
    "sklearn.datasets",
    "sklearn.metrics",
    "torchmetrics.classification",
    # A second and a half in every process of an engine.
    "deepspeed",
]

_HUGE_PAGE = 2 * 2**20
_COLLAPSE = 25
"""Advice to `madvise`, of Linux 6.1 and later: take huge pages at once."""


def preload() -> None:
    """Load what tests use, train once, and lay all of it into huge pages."""
    for name in MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        _rehearse()
    take_huge_pages()


def _rehearse() -> None:
    """Train, evaluate and save once: what a process computes once, such as tables of classes, is half the time of a short run.

    Random numbers go on as if nothing had been trained.
    """
    import numpy
    import torch

    from .toys import TracingRunner

    numpy_state = numpy.random.get_state()
    with TemporaryDirectory() as place, torch.random.fork_rng(devices=[]):
        config = {
            "steps": 2,
            "seed": 1,
            "dir": f"{place}/run",
            "optim": {"type": "adamw", "lr": 0.1},
        }
        with TracingRunner(
            {**config, "dataloader": {"batch_size": 2}, "checkpoint": {"interval": 1}}
        ) as runner:
            runner.train()
    numpy.random.set_state(numpy_state)


def take_huge_pages() -> int:
    """Have what this process has allocated lie in huge pages, and return how many those are: 0 where the kernel has none to give.

    A fork copies the table of pages. With the half gigabyte of torch and what comes with it, a fork and its end took 35 ms of the
    kernel's time, and 11 ms do then.
    """
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return sum(advise(place, _HUGE_PAGE, _COLLAPSE) == 0 for place in _places())


def _places() -> Iterator[int]:
    """Return where a huge page fits within memory that is this process's own, and no file's; nowhere but on Linux."""
    table = Path("/proc/self/maps")
    for line in table.read_text().splitlines() if table.exists() else ():
        span, permissions, _, _, file, *name = line.split(maxsplit=5)
        if permissions == "rw-p" and file == "0" and name in ([], ["[heap]"]):
            begin, end = (int(address, 16) for address in span.split("-"))
            yield from range(
                -(-begin // _HUGE_PAGE) * _HUGE_PAGE, end // _HUGE_PAGE * _HUGE_PAGE, _HUGE_PAGE
            )

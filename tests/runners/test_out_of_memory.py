"""`dataloader.micro_batch_size="auto"`: an update that ran out of memory is made again in smaller micro-batches, as if nothing had been."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_outcomes, run_processes
from support.toys import differences, whole_state
from support.toys import settings as toy_settings
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import danling as dl

WORDS = {
    "device": "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    "cublas": "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasSgemm( handle, opa, opb, m, n, k)`",
    "cublas handle": "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cudnn": "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cudnn 8": "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cufft": "cuFFT error: CUFFT_ALLOC_FAILED",
    "hipblas": "HIP error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
    "nccl": "NCCL error in: ProcessGroupNCCL.cpp:2094, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
}
"""What libraries say in a plain `RuntimeError` when memory runs out."""
OTHERS = (
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`",
    "NCCL error: unhandled system error",
)


class OutOfMemoryInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise torch.OutOfMemoryError("out of memory")


class Hungry(nn.Module):
    """Draws, changes buffers, and then runs out of memory with more samples than fit."""

    def __init__(self, fits: int, where: str) -> None:
        super().__init__()
        self.fits, self.where = fits, where
        self.first = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.BatchNorm1d(8))
        self.last = nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.fits:
            torch.empty(1 << 52)
        hidden = self.first(inputs)
        self.seen += len(inputs)
        if len(inputs) > self.fits and self.training:
            if self.where == "forward":
                torch.empty(1 << 52)
            elif self.where == "allocator":
                raise torch.OutOfMemoryError("out of memory")
            elif self.where in WORDS:
                raise RuntimeError(WORDS[self.where])
            hidden = OutOfMemoryInBackward.apply(hidden)
        return self.last(hidden)


class Runner(dl.Runner):
    """Trains a model that is hungry on the ranks that are named, on all of them by default."""

    def __init__(
        self, config: dict[str, Any], fits: int = 100, where: str = "forward", ranks: Any = None
    ) -> None:
        super().__init__(config)
        hungry = ranks is None or self.rank in ranks
        self.model = Hungry(fits if hungry else 100, where).double()
        self.criterion = nn.CrossEntropyLoss()
        generator = torch.Generator().manual_seed(3)
        points = torch.randn(45, 4, generator=generator, dtype=torch.float64)
        self.datasets = {"train": TensorDataset(points, torch.arange(45) % 3)}

    def train_step(self, data: Any) -> tuple[Any, Tensor]:
        self.meters.update({"norm": float(data[0].norm())}, len(data[0]))
        return super().train_step(data)


def settings(root: Path, held: Any, **more: Any) -> dict[str, Any]:
    loader = {
        "global_batch_size": 16,
        "micro_batch_size": held,
        "drop_last": False,
        **more.pop("dataloader", {}),
    }
    return toy_settings(
        root, **{"epochs": 2, "optim": {"type": "adamw", "lr": 0.01}, "dataloader": loader, **more}
    )


@pytest.mark.parametrize("where", ["forward", "allocator", "backward", *WORDS])
def test_the_update_is_made_as_if_memory_had_not_run_out(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Runner(settings(tmp_path / "known", 4)) as runner:
        runner.train()
        known = whole_state(runner)
    with (
        caplog.at_level(logging.WARNING, "danling"),
        Runner(settings(tmp_path / "auto", "auto"), 7, where) as runner,
    ):
        assert (runner.batch_size, runner.accum_steps) == (16, 1)
        runner.train()
        assert (runner.batch_size, runner.accum_steps) == (4, 4)
        assert differences(whole_state(runner), known) == []
        assert runner.results[2]["train"]["norm"] > 0
    told = [
        record.getMessage() for record in caplog.records if "Memory ran out" in record.getMessage()
    ]
    assert [re.findall(r"\d+", line)[:3] for line in told] == [["1", "16", "8"], ["1", "8", "4"]]


def test_fitting_size_is_remembered(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Runner(settings(tmp_path, "auto", epochs=1), 4) as runner:
        runner.train()
    caplog.clear()
    with Runner(settings(tmp_path, "auto", auto_resume=True), 4) as runner:
        assert runner.batch_size == 4
        runner.train()
        resumed = whole_state(runner)
    assert not any("Memory ran out" in record.getMessage() for record in caplog.records)
    with Runner(settings(tmp_path / "known", 4)) as runner:
        runner.train()
        assert differences(resumed, whole_state(runner)) == []


def test_update_too_large_in_any_piece_raises_the_error_of_the_model(tmp_path: Path) -> None:
    with (
        Runner(settings(tmp_path, "auto"), 0) as runner,
        pytest.raises(RuntimeError, match="can't allocate memory"),
    ):
        runner.train()


@pytest.mark.parametrize("words", ["not for want of memory", *OTHERS])
def test_another_error_is_an_error(words: str, tmp_path: Path) -> None:
    class Wrong(Runner):
        def train_step(self, data: Any) -> tuple[Any, Tensor]:
            raise RuntimeError(words)

    with (
        Wrong(settings(tmp_path, "auto")) as runner,
        pytest.raises(RuntimeError, match=re.escape(words)),
    ):
        runner.train()


def train(
    config: dict[str, Any], fits: int = 100, where: str = "forward", ranks: Any = None
) -> dict[str, Any]:
    with Runner(config, fits, where, ranks) as runner:
        runner.train()
        state = whole_state(runner)
        return {
            "weights": state["model"],
            "rng": state["state"]["rng"],
            "held": runner.batch_size,
            "results": runner.results,
        }


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_all_ranks_repeat_the_update_if_one_ran_out_of_memory(where: str, tmp_path: Path) -> None:
    whole = {"dataloader": {"drop_last": True}}  # batch statistics need two samples
    known = run_processes(train, settings(tmp_path / "known", 2, **whole), world_size=2)
    auto = run_processes(
        train, settings(tmp_path / "auto", "auto", **whole), 2, where, [1], world_size=2
    )
    for rank in auto:
        assert rank["held"] == 2
        assert differences(rank["rng"], known[0]["rng"]) == []
        for name, value in rank["weights"].items():
            torch.testing.assert_close(value, known[0]["weights"][name], rtol=0, atol=1e-12)
        assert rank["results"][2]["train"]["loss"] == pytest.approx(
            known[0]["results"][2]["train"]["loss"], abs=1e-12
        )


def test_rank_too_small_for_one_sample_ends_all(tmp_path: Path) -> None:
    outcomes = run_outcomes(
        train, settings(tmp_path, "auto"), 0, "forward", [1], world_size=2, grace=3.0
    )
    errors = {outcome.rank: outcome.error for outcome in outcomes}
    assert "can't allocate memory" in str(errors[1])
    assert errors[0] is not None


class Synced(Runner):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.model = nn.SyncBatchNorm.convert_sync_batchnorm(self.model)


def construct(config: dict[str, Any]) -> None:
    (Runner if config.get("stack") == "parallel" else Synced)(config).close()


@pytest.mark.parametrize(
    ("more", "received"),
    [
        ({}, "SyncBatchNorm"),
        ({"stack": "parallel", "parallel": {"axes": {"shard": 2}}}, "parallel.axes.shard=2"),
    ],
)
def test_communicating_forward_is_refused(
    more: dict[str, Any], received: str, tmp_path: Path
) -> None:
    for outcome in run_outcomes(
        construct, settings(tmp_path / "run", "auto", **more), world_size=2, grace=2.0
    ):
        assert isinstance(outcome.error, ValueError)
        assert f"micro_batch_size='auto' with {received}" in str(outcome.error)
    assert not (tmp_path / "run").exists()

"""What a failing run leaves behind, and how its arithmetic is counted."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from support.programs import run_python
from torch import Tensor, nn

import danling as dl
from danling.reporting import peak_flops, read_jsonl
from danling.supervision import is_out_of_memory
from danling.supervision.failures import lost_a_peer

FAILING = """
import sys
from danling.supervision import record_failures
assert record_failures() and record_failures()
if sys.argv[1] == "exit":
    sys.exit(3)
raise ArithmeticError("broken")
"""


AT_ONCE = """
import json, os, sys
from pathlib import Path
from danling.utils.process import first_failure

base, ranks = Path(sys.argv[1]), 4
for attempt in range(40):
    directory = base / str(attempt)
    directory.mkdir()
    go, children = directory / "go", []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            os.environ.update(TORCHELASTIC_RUN_ID="none", TORCHELASTIC_ERROR_FILE=str(directory / str(rank) / "e"), RANK=str(rank))
            while not go.exists():
                pass
            first, own = first_failure(ValueError(f"of rank {rank}"))
            (directory / f"told-{rank}").write_text(json.dumps([first, own]))
            os._exit(0)
        children.append(child)
    go.touch()
    for child in children:
        os.waitpid(child, 0)
"""


def test_ranks_failing_at_once_agree_on_the_first(tmp_path: Path) -> None:
    script, attempts = tmp_path / "script.py", tmp_path / "attempts"
    script.write_text(AT_ONCE)
    attempts.mkdir()
    code, output = run_python(script, str(attempts))
    assert code == 0, output
    for attempt in range(40):
        told = [
            json.loads((attempts / str(attempt) / f"told-{rank}").read_text()) for rank in range(4)
        ]
        [winner] = [rank for rank, (_, own) in enumerate(told) if own]
        first = told[winner][0]
        assert first[0] == str(winner) and first[2] == f"ValueError: of rank {winner}"
        assert all(other == first for other, _ in told)
        assert not list((attempts / str(attempt)).glob("first-failure.*"))


@pytest.mark.parametrize(("how", "code"), [("raise", 1), ("exit", 3)])
def test_an_exception_writes_torchs_error_file_and_is_printed_last(
    how: str, code: int, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(FAILING)
    file = tmp_path / "error.json"
    ended = run_python(
        tmp_path / "script.py", how, environment={"TORCHELASTIC_ERROR_FILE": str(file)}, warm=True
    )
    assert ended.exit_code == code
    assert file.exists() == (how == "raise")
    if how == "raise":
        message = json.loads(file.read_text())["message"]
        assert message["message"] == "ArithmeticError: broken"
        assert 'raise ArithmeticError("broken")' in message["extraInfo"]["py_callstack"]
        assert int(message["extraInfo"]["timestamp"]) > 0
        assert ended.output.rstrip().endswith("ArithmeticError: broken")


def test_a_lost_connection_is_not_taken_for_a_cause() -> None:
    assert lost_a_peer(
        RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234")
    )
    assert not lost_a_peer(ValueError("Connection closed by peer"))
    assert not lost_a_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


class Small(dl.TorchRunner):
    """Eight features to two classes; runs out of memory where it is told."""

    out_of_memory_at: int | None = None
    peak: float | None = None

    def __init__(self, **config: Any) -> None:
        super().__init__(
            {"optim": {"type": "sgd", "lr": 0.1}, "seed": 0, "log_interval": 2, **config}
        )
        self.model = nn.Linear(8, 2)
        self.criterion = nn.CrossEntropyLoss()
        self.dataloaders = {"train": [(torch.randn(4, 8), torch.zeros(4, dtype=torch.int64))] * 4}

    def train_step(self, data: Any) -> tuple[Any, Tensor]:
        if self.state.train.global_step == self.out_of_memory_at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().train_step(data)

    def peak_flops(self) -> float | None:
        return self.peak


def test_out_of_memory_writes_the_state_of_the_memory(caplog: pytest.LogCaptureFixture) -> None:
    runner = Small(steps=4)
    runner.out_of_memory_at = 3
    with caplog.at_level(logging.INFO, logger="danling"), runner:
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            runner.train()
        file = runner.dir / "profiles" / "oom-rank-00000-step-000000000003.json"
    record = json.loads(file.read_text())
    assert record["error"].startswith("OutOfMemoryError: CUDA out of memory")
    assert record["figures"]["memory_host_gib"] > 0
    assert "Failed with OutOfMemoryError: 3 updates to step 3" in caplog.text
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shape mismatch"))


def logged(runner: Small) -> dict[str, float]:
    with runner:
        runner.train()
        lines = read_jsonl(runner.workspace.jsonl_file)
        return dict([line for line in lines if "train/samples_per_second" in line][-1])


def test_flops_are_reported_if_known_and_counting_changes_no_bit() -> None:
    plain, counted = Small(steps=4, lineage="plain"), Small(steps=4, lineage="counted")
    counted.peak = 1e9
    counted.dataloaders["train"][:] = plain.dataloaders["train"]
    assert not {"train/mfu", "train/model_flops_per_second"} & logged(plain).keys()
    figures = logged(counted)
    # Forward 2 * 8 * 2 a sample, and as much again for the gradient of the weight; the input needs none.
    assert figures["train/model_flops_per_second"] == pytest.approx(
        64 * figures["train/samples_per_second"]
    )
    assert figures["train/mfu"] == pytest.approx(figures["train/model_flops_per_second"] / 1e9)
    for left, right in zip(
        plain.unwrapped_model.parameters(), counted.unwrapped_model.parameters()
    ):
        assert torch.equal(left, right)


class OwnFlops(Small):
    def flops_per_token(self) -> float:
        return 100.0

    def count_tokens(self, data: Any) -> float:
        return float(data[0].numel())


def test_given_cost_of_a_token_is_used() -> None:
    figures = logged(OwnFlops(steps=4))
    assert figures["train/tokens_per_second"] == pytest.approx(
        8 * figures["train/samples_per_second"]
    )
    assert figures["train/model_flops_per_second"] == pytest.approx(
        100 * figures["train/tokens_per_second"]
    )
    assert "train/mfu" not in figures


def test_peaks_are_never_guessed() -> None:
    assert peak_flops("NVIDIA A100-SXM4-80GB", "bf16") == 312e12
    assert peak_flops("NVIDIA H100 80GB HBM3", None, tf32=True) == 494.7e12
    assert peak_flops("NVIDIA A10", "fp16") == 125e12
    assert peak_flops("Tesla T4") == 8.1e12
    for name in (
        "NVIDIA A10G",
        "NVIDIA H200 MIG 1g.18gb",
        "NVIDIA GeForce RTX 4090",
        "NVIDIA H200 NVL",
    ):
        assert peak_flops(name, "bf16") is None
    assert peak_flops("Tesla V100-SXM2-32GB", "bf16") is None

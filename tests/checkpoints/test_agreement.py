"""What one rank raises, all ranks raise: asked of the agreement alone, in real processes and in one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.processes import run_processes

from danling.checkpoints import CheckpointDamaged, CheckpointDiskError, CheckpointError
from danling.checkpoints.agreement import RankAgreement
from danling.distributed import Domain, LocalDomain

GOOD = "Still good: best (step 3)."


def _ranks(domain: Any) -> RankAgreement:
    return RankAgreement(domain, Path("checkpoints"), still_good=lambda: GOOD)


class _Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("odd")
        self.held = lambda: None


def _raise(error: BaseException) -> Any:
    raise error


def _met_by_both() -> list[str]:
    domain = Domain()
    ranks = _ranks(domain)
    found = [str(ranks.on_main(lambda: f"of {domain.rank}")), str(ranks.on_all(lambda: f"of {domain.rank}"))]
    for action in (
        lambda: ranks.on_main(lambda: _raise(CheckpointDamaged("latest is cut"))),
        lambda: ranks.on_all(lambda: _raise(OSError(5, "Input/output error", "best.pth")) if domain.rank else "mine"),
        lambda: ranks.on_all(lambda: _raise(_Unpicklable()) if domain.rank else "mine"),
        lambda: ranks.agree(ValueError("of rank 1") if domain.rank else None),
    ):
        with pytest.raises((CheckpointError, ValueError)) as raised:
            action()
        found.append(f"{type(raised.value).__name__}: {raised.value}")
    return found


def test_values_come_back_and_errors_of_one_rank_are_raised_on_both() -> None:
    first, second = run_processes(_met_by_both, world_size=2, init_process_group=True)
    assert (first[:2], second[:2]) == (["of 0", "of 0"], ["of 0", "of 1"])
    assert first[2:] == second[2:]
    damaged, disk, odd, value = first[2:]
    assert damaged == "CheckpointDamaged: latest is cut"
    assert disk.startswith("CheckpointDiskError: ") and "best.pth" in disk and disk.endswith(GOOD)
    assert odd.startswith("CheckpointError: ") and "_Unpicklable: odd" in odd and GOOD in odd
    assert value == "ValueError: of rank 1"


def test_alone_an_error_keeps_its_class_and_its_cause() -> None:
    ranks = _ranks(LocalDomain())
    ranks.raise_alone(None)
    damaged = CheckpointDamaged("cut")
    with pytest.raises(CheckpointDamaged) as raised:
        ranks.raise_alone(damaged)
    assert raised.value is damaged
    full = OSError(28, "No space left on device", "/nowhere/best.pth")
    with pytest.raises(CheckpointDiskError, match="best.pth") as told:
        ranks.raise_alone(full)
    assert told.value.__cause__ is full and str(told.value).endswith(GOOD)
    with pytest.raises(KeyboardInterrupt):
        ranks.on_main(lambda: _raise(KeyboardInterrupt()))

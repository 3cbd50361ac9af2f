"""Runners of the draft models on a target that can be learned: acceptance, weights, anchors, resuming, ranks, export."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from speculative.acceptance import acceptance_length
from speculative.runners import RUNNERS
from support.drafts import captured, draft_config, with_samples, write_target
from support.processes import run_processes
from torch import Tensor

KINDS = sorted(RUNNERS)


@pytest.fixture(autouse=True)
def _target() -> None:
    write_target("target")


def weights_of(runner: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in runner.unwrapped_model.state_dict().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.parametrize("kind", [pytest.param("dflash", marks=pytest.mark.slow), "domino", "eagle3"])
def test_acceptance_rises_on_a_target_that_can_be_learned(kind: str) -> None:
    with with_samples(RUNNERS[kind], captured(240, 1), captured(16, 2))(draft_config(60, 8)) as runner:
        before = runner.evaluate("val")["val"]
        runner.train()
        after = runner.evaluate("val")["val"]
    assert before["acceptance_length"] < 1.4 and before["expected_length"] < 1.4
    # Of 5 tokens at most: where the chain takes the less likely way, nobody who does not see it goes along.
    assert after["acceptance_length"] > (3.5 if kind == "eagle3" else 2.5), after
    assert after["expected_length"] > 1.5, after
    rates = [after[f"accepted_{position}"] for position in range(1, runner.positions + 1)]
    assert after["acceptance_length"] == pytest.approx(acceptance_length(rates))


def _noting(step: Any, note: Any) -> Any:
    def noted() -> Any:
        outcome = step()
        note()
        return outcome

    return noted


@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_run_goes_on_bitwise(kind: str) -> None:
    ends = []
    for name, stops in (("whole", [False]), ("parts", [True, False])):
        for number, stop in enumerate(stops):
            config = draft_config(6, dir=name, auto_resume=number > 0)
            with with_samples(RUNNERS[kind], captured(8, 1))(config) as runner:
                runner.step = _noting(runner.step, runner.stop if stop else lambda: None)
                runner.train()
                assert (runner.state.train.global_step < 6) == stop
        ends.append(weights_of(runner))
    assert same(*ends)


def _evaluate(kind: str, directory: str) -> dict[str, float]:
    with with_samples(RUNNERS[kind], captured(4, 1), captured(9, 2))(draft_config(2, dir=directory)) as runner:
        figures: dict[str, float] = runner.evaluate("val")["val"]
        return figures


@pytest.mark.parametrize("kind", ["eagle3", pytest.param("domino", marks=pytest.mark.slow)])
def test_ranks_count_acceptance_together(kind: str) -> None:
    ranks = run_processes(_evaluate, kind, "two", world_size=2)
    assert ranks[0] == ranks[1] == pytest.approx(_evaluate(kind, "one"), rel=1e-6)

"""Runners of the draft models on a target that can be learned: acceptance, weights, anchors, resuming, ranks, export."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from speculative.acceptance import acceptance_length
from speculative.language import Language
from speculative.runners import RUNNERS, DraftConfig, DraftRunner
from support.processes import run_processes
from support.toys import differences
from torch import Tensor

TOKENS, WIDTH, LENGTH = 12, 16, 24
LANGUAGE = Language(TOKENS, preferred=0.9)


def write_target(directory: str | Path) -> None:
    """Write embedding, head and counts of tokens as those of a target lie in its directory."""
    Path(directory).mkdir()
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(TOKENS, WIDTH, generator=generator)
    save_file(
        {"model.embed_tokens.weight": embedding, "lm_head.weight": torch.eye(TOKENS, WIDTH)},
        Path(directory) / "model.safetensors",
    )
    counts = torch.bincount(torch.cat([LANGUAGE.sample(i, LENGTH) for i in range(50)]), minlength=TOKENS)
    torch.save(counts, Path(directory) / "token_counts.pt")


def captured(count: int, seed: int, *, prompt: int = 4) -> list[dict[str, Tensor]]:
    """Return samples as they come out of a store."""
    probabilities = torch.full((TOKENS, TOKENS), 1e-4)
    for row, share in zip(LANGUAGE.successors, (LANGUAGE.preferred, 1 - LANGUAGE.preferred)):
        probabilities[torch.arange(TOKENS - 1), row] += share
    table = torch.zeros(TOKENS, WIDTH)
    table[:, :TOKENS] = probabilities.log()
    hidden = torch.randn(TOKENS, 3 * WIDTH, generator=torch.Generator().manual_seed(1))
    samples = []
    for index in range(count):
        tokens = LANGUAGE.sample(index, LENGTH, seed)
        samples.append(
            {
                "input_ids": tokens,
                "loss_mask": torch.arange(LENGTH) >= prompt,
                "features": hidden[tokens],
                "final": table[tokens],
                "index": torch.tensor(index),
            }
        )
    return samples


def draft_config(steps: int | None, batch_size: int = 2, **settings: object) -> DraftConfig:
    """Return settings of a small run on the target in `target`."""
    config = DraftConfig(steps=steps, log=False)
    config.target.path = "target"
    config.draft = {"heads": 2, "depth": 1, "steps": 4, "vocabulary": 10, "block": 5, "anchors": 8}
    config.optim.lr = 1e-2
    config.dataloader.batch_size = batch_size
    for name, value in settings.items():
        config[name] = value
    return config


def with_samples(kind: type[DraftRunner], train: Any, val: Any = None) -> Callable[[DraftConfig], DraftRunner]:
    """Return what makes a runner of a draft on datasets."""
    return partial(kind, train=train, val=val)


KINDS = sorted(RUNNERS)


@pytest.fixture(autouse=True)
def _target() -> None:
    write_target("target")


def weights_of(runner: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in runner.unwrapped_model.state_dict().items()}


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
    assert not differences(*ends)


def _evaluate(kind: str, directory: str) -> dict[str, float]:
    with with_samples(RUNNERS[kind], captured(4, 1), captured(9, 2))(draft_config(2, dir=directory)) as runner:
        figures: dict[str, float] = runner.evaluate("val")["val"]
        return figures


@pytest.mark.parametrize("kind", ["eagle3", pytest.param("domino", marks=pytest.mark.slow)])
def test_ranks_count_acceptance_together(kind: str) -> None:
    ranks = run_processes(_evaluate, kind, "two", world_size=2)
    assert ranks[0] == ranks[1] == pytest.approx(_evaluate(kind, "one"), rel=1e-6)

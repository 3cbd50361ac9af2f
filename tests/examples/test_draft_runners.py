"""Runners of the draft models on a target that can be learned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from speculative.acceptance import acceptance_length
from speculative.language import Language
from speculative.runners import RUNNERS, DraftConfig
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
    counts = torch.bincount(
        torch.cat([LANGUAGE.sample(i, LENGTH) for i in range(50)]), minlength=TOKENS
    )
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


@pytest.mark.parametrize(
    "kind", [pytest.param("dflash", marks=pytest.mark.slow), "domino", "eagle3"]
)
def test_acceptance_rises_on_a_learnable_target(kind: str) -> None:
    write_target("target")
    config = DraftConfig(steps=60, log=False)
    config.target.path = "target"
    config.draft = {"heads": 2, "depth": 1, "steps": 4, "vocabulary": 10, "block": 5, "anchors": 8}
    config.optim.lr = 1e-2
    config.dataloader.batch_size = 8
    with RUNNERS[kind](config, train=captured(240, 1), val=captured(16, 2)) as runner:
        before = runner.evaluate("val")["val"]
        runner.train()
        after = runner.evaluate("val")["val"]
    assert before["acceptance_length"] < 1.4 and before["expected_length"] < 1.4
    # Of 5 tokens at most: where the chain takes the less likely way, nobody who does not see it goes along.
    assert after["acceptance_length"] > (3.5 if kind == "eagle3" else 2.5), after
    assert after["expected_length"] > 1.5, after
    rates = [after[f"accepted_{position}"] for position in range(1, runner.positions + 1)]
    assert after["acceptance_length"] == pytest.approx(acceptance_length(rates))

"""The programs of the draft models on a real model of transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import draft
import pytest
import torch
from speculative.decoding import speculate
from speculative.dflash import DFlash
from speculative.domino import Domino
from speculative.eagle3 import Eagle3
from speculative.target import TargetEnds, build_target, capture, load_target, spread_layers
from speculative.vocabulary import DraftVocabulary
from support.toys import differences
from torch import nn

from danling.checkpoints import import_weights

TOKENS, WIDTH = 40, 32


@pytest.fixture
def target() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = build_target(TOKENS, width=WIDTH, depth=4, heads=2)
    model.save_pretrained("target")
    torch.save(torch.arange(TOKENS), "target/token_counts.pt")
    return load_target("target")  # type: ignore[no-any-return]


SMALL = {
    "target.path": "target",
    "language": {"tokens": TOKENS, "length": 16, "prompt": 4},
    "features": {"train": 24, "val": 4, "batch_size": 4},
    "dataloader.batch_size": 4,
    "draft": {"heads": 2, "depth": 1, "steps": 3, "vocabulary": 30, "block": 4, "anchors": 4},
    "steps": 6,
    "evaluate_interval": 3,
    "checkpoint.interval": 2,
}


def arguments(**more: object) -> list[str]:
    """Return small settings as words of a command line."""
    flat = {}
    for key, value in SMALL.items():
        flat.update(
            {f"{key}.{name}": inner for name, inner in value.items()}
            if isinstance(value, dict)
            else {key: value}
        )
    flat |= {key.replace("__", "."): value for key, value in more.items()}
    return [word for key, value in flat.items() for word in (f"--{key}", str(value))]


def end_of(directory: str) -> tuple[dict[str, torch.Tensor], object]:
    return import_weights(f"{directory}/draft.safetensors"), json.loads(
        Path(directory, "results.json").read_text()
    )


@pytest.mark.parametrize("kind", ["eagle3", pytest.param("domino", marks=pytest.mark.slow)])
def test_offline_and_together_are_the_same_run(
    kind: str, target: nn.Module, capsys: pytest.CaptureFixture[str]
) -> None:
    draft.COMMANDS["capture"](arguments(features__path="files"))
    held = len(list(Path("files/train").rglob("*.safetensors")))
    draft.COMMANDS["train"](arguments(features__path="files", draft__kind=kind, dir="offline"))
    draft.COMMANDS["together"](arguments(draft__kind=kind, dir="together"))
    assert not differences(end_of("offline"), end_of("together"))
    assert held == 24 and not list(Path("files/train").rglob("*.safetensors"))
    printed = capsys.readouterr().out
    assert (
        len(re.findall(r"^acceptance_length \S+ -> \S+ of at most 4$", printed, re.MULTILINE)) == 2
    ), printed


def test_captured_states_give_the_scores_of_the_target(target: nn.Module) -> None:
    tokens = torch.randint(TOKENS, (2, 9))
    whole = target(tokens, output_hidden_states=True)
    found = capture(target, tokens, [0, 2, 1])
    ends = TargetEnds.load("target")
    assert torch.equal(ends.scores(found["final"]), whole.logits)
    assert torch.equal(found["features"][..., :WIDTH], whole.hidden_states[1])
    assert torch.equal(found["features"][..., WIDTH : 2 * WIDTH], whole.hidden_states[3])
    assert torch.equal(ends.embed(tokens), whole.hidden_states[0])


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "domino"])
def test_text_written_with_a_draft_equals_the_targets_own(kind: str, target: nn.Module) -> None:
    drafts = {
        "eagle3": lambda: Eagle3(WIDTH, DraftVocabulary(torch.arange(0, TOKENS, 2), TOKENS)),
        "dflash": lambda: DFlash(WIDTH),
        "domino": lambda: Domino(WIDTH, TOKENS),
    }
    ends, layers = TargetEnds.load("target"), spread_layers(4, 3)
    prompt = torch.randint(TOKENS, (5,))
    alone = prompt
    with torch.no_grad():
        while len(alone) < 40:
            alone = torch.cat([alone, target(alone[None]).logits[0, -1:].argmax(-1)])
    text, rounds = speculate(
        target, drafts[kind](), ends, prompt, layers=layers, length=40, count=4
    )
    assert torch.equal(text, alone)
    assert sum(rounds) >= 35 and all(1 <= kept <= 5 for kept in rounds)

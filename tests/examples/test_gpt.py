"""The example of the character-level GPT: as a program, small and short; the model by itself."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from support.programs import run_program

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ("--model.width", "16", "--model.depth", "1", "--model.context", "16", "--optim.lr", "3e-2")
# Few updates would be evaluated and saved one by one: a twentieth of them is less than one.
AT_TIMES = ("--evaluate_interval", "20", "--checkpoint.interval", "20")


@pytest.fixture
def text() -> list[str]:
    Path("text.txt").write_text("the cat sat on the mat; " * 400)
    return ["--data.path", "text.txt", *SMALL]


def bits_in(output: str) -> tuple[float, float]:
    """Return bits per character in validation, and the entropy of single characters."""
    validation = re.search(r"(\S+) in validation", output)
    entropy = re.search(r"(\S+) bits is the entropy", output)
    assert validation is not None and entropy is not None, output
    return float(validation.group(1)), float(entropy.group(1))


def test_learns_more_than_frequencies_and_leaves_its_files(text: list[str]) -> None:
    exit_code, output = run_program(EXAMPLES / "gpt.py", "--steps", "60", *AT_TIMES, *text)
    assert exit_code == 0, output
    validation, entropy = bits_in(output)
    assert validation < entropy
    (run,) = Path("experiments/gpt").iterdir()
    left = {str(path.relative_to(run)) for path in run.rglob("*")}
    assert {
        "checkpoints/latest.pth",
        "checkpoints/best.pth",
        "results.json",
        "metadata/config.full.yaml",
    } <= left
    assert any(name.endswith(".log") for name in left)


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        (("tensor",), ()),
        pytest.param(("shard", "tensor"), (), marks=pytest.mark.slow),
        pytest.param(
            ("pipeline",), ("--model.tied", "false", "--model.depth", "2"), marks=pytest.mark.slow
        ),
        pytest.param(("expert",), ("--model.experts", "4"), marks=pytest.mark.slow),
    ],
    ids=["tensor", "mesh", "pipeline", "experts"],
)
def test_runs_unchanged_on_a_mesh(
    axes: tuple[str, ...], options: tuple[str, ...], text: list[str]
) -> None:
    degrees = [argument for axis in axes for argument in (f"--parallel.axes.{axis}", "2")]
    arguments = ("--steps", "20", *AT_TIMES, *text, "--stack", "parallel", *degrees, *options)
    exit_code, output = run_program(EXAMPLES / "gpt.py", *arguments, nproc_per_node=2 ** len(axes))
    assert exit_code == 0, output
    validation, entropy = bits_in(output)
    assert validation < entropy
    assert list(Path("experiments/gpt").glob("*/checkpoints/targets/*/.metadata"))


def test_the_model_looks_back_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    from models.gpt import GPT

    torch.manual_seed(0)
    model = GPT(11, context=8, width=16, depth=2, heads=2).eval()
    tokens = torch.randint(11, (2, 8))
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 8, 11)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])
    assert model.head.weight is model.embedding.tokens.weight
    assert model.generate(tokens, 4).shape == (2, 12)
    with pytest.raises(ValueError, match="multiple of `heads`"):
        GPT(11, width=10, heads=4)

"""`danling diff` on runs that were really trained: alike, with another rate, and with one thing disturbed in one update."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.recorded import danling
from support.toys import TracingRunner

from danling.audit.digests import DigestLine
from danling.audit.divergence import compare_digests, compare_runs
from danling.cli.main import main
from danling.workspace.runs import Run


class Disturbed(TracingRunner):
    """Disturbs one thing in its fifth update.

    Args:
        config: The configuration.
        what: `data`, `loss`, `gradients`, `optimizer`, `weights`; `None` for nothing.
    """

    def __init__(self, config: dict[str, Any], what: str | None) -> None:
        super().__init__(config)
        self.what = what

    def disturbs(self, what: str) -> bool:
        return self.what == what and self.state.train.global_step == 4

    def to_device(self, data: Any) -> Any:
        data = super().to_device(data)
        return (
            {**data, "input": data["input"] + 1e-3}
            if self.mode == "train" and self.disturbs("data")
            else data
        )

    def compute_loss(self, pred: Any, target: Any) -> Any:
        loss = super().compute_loss(pred, target)
        return loss * 1.0001 if self.mode == "train" and self.disturbs("loss") else loss

    def complete_gradients(self) -> None:
        super().complete_gradients()
        if self.disturbs("gradients"):
            next(self.model.parameters()).grad.mul_(1.01)

    def optimizer_step(self) -> None:
        super().optimizer_step()
        parameter = next(self.model.parameters())
        with torch.no_grad():
            if self.disturbs("optimizer"):
                self.optimizer.state[parameter]["exp_avg"].view(torch.int32)[0, 0] ^= 1
            if self.disturbs("weights"):
                parameter.view(torch.int32)[0, 0] ^= 1


def train(directory: Path, what: str | None = None, **more: Any) -> Path:
    config: dict[str, Any] = {
        "seed": 3,
        "steps": 8,
        "dir": str(directory),
        "log_interval": 1,
        "audit.digest_interval": 1,
    }
    config |= {
        "evaluate_interval": 8,
        "optim": {"type": "adamw", "lr": 0.01},
        "dataloader": {"batch_size": 4},
    }
    with Disturbed({**config, **more}, what) as runner:
        runner.train()
    return directory


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("usual") / "run")


def test_equal_runs_have_no_divergence(usual: Path, tmp_path: Path) -> None:
    done = danling("diff", usual, train(tmp_path / "again"), warm=True)
    assert (
        done.returncode == 0
        and "no figure that both runs have differs (8 digests compared)" in done.stdout
    )
    assert "environment" not in done.stdout


@pytest.mark.parametrize("what", ["data", "loss", "gradients", "optimizer", "weights"])
def test_first_divergence_is_named_with_its_update(what: str, usual: Path, tmp_path: Path) -> None:
    found = compare_runs(Run(usual, "usual"), Run(train(tmp_path / what, what), what))
    first = found.divergences[0]
    assert (first.what, first.step, first.last_equal) == (what, 5, 4)


def test_another_rate_is_a_setting_and_shows_in_the_optimizer(
    usual: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = train(
        tmp_path / "other", optim={"type": "adamw", "lr": 0.02}, **{"checkpoint.interval": 4}
    )
    assert main(["diff", str(usual), str(other)]) == 1
    text = capsys.readouterr().out
    assert "optim.lr" in text and "0.02" in text and "checkpoint.interval" in text
    # Moments know no rate: the weights of the first update differ, and its loss does not.
    assert "first difference at step 1: weights" in text
    assert main(["diff", str(usual), str(other), "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["settings"]["optim.lr"] == [0.01, 0.02]
    loss = next(p for p in facts["divergences"] if p["figure"] == "loss")
    assert loss["step"] == 2 and loss["difference"] == loss["values"][1] - loss["values"][0] != 0


def test_without_digests_metrics_are_compared(
    usual: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = train(tmp_path / "plain", "loss", **{"audit.digest_interval": None})
    assert main(["diff", str(usual), str(plain)]) == 1
    assert "first difference at step 5: loss" in capsys.readouterr().out


def test_the_environment_is_noted_and_compared(
    usual: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = train(tmp_path / "other")
    file = other / "metadata" / "run.json"
    record = json.loads(file.read_text())
    made = record["environment"]
    assert made["versions"]["torch"] == torch.__version__ and made["threads"] == str(
        torch.get_num_threads()
    )
    made["versions"]["numpy"] = "0.1"
    file.write_text(json.dumps(record))
    assert main(["diff", str(usual), str(other)]) == 0
    assert "versions.numpy" in capsys.readouterr().out
    file.unlink()
    assert main(["diff", str(usual), str(other)]) == 0
    assert "environments are not compared" in capsys.readouterr().out


def test_column_without_tensors_in_one_run_is_a_divergence() -> None:
    """A constant buffer that changes stands with those that forwards write to from then on; the column that it leaves counts."""
    whole = {step: DigestLine(step, 0.5, None, {"weights.0": 1, "buffers": 2}) for step in (1, 2)}
    changed = {1: whole[1], 2: DigestLine(2, 0.5, None, {"weights.0": 1, "ema.buffers": 3})}
    parted = [
        (found.figure, found.step, found.last_equal) for found in compare_digests(whole, changed)
    ]
    assert (
        parted == [("buffers", 2, 1), ("ema.buffers", 2, 1)] and compare_digests(whole, whole) == []
    )


def test_damaged_digests_are_named_and_do_not_pass_for_equal_ones(
    usual: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = shutil.copytree(usual, tmp_path / "other")
    assert (
        main(["diff", str(usual), str(other)]) == 0
        and "cannot be read" not in capsys.readouterr().err
    )
    file = other / "digests.jsonl"
    file.write_text(file.read_text().replace('"step": 3', '"step": x'))
    assert main(["diff", str(usual), str(other)]) == 1
    assert f"{file}: 1 of its 8 lines" in capsys.readouterr().err


def test_runs_without_a_common_step_are_not_called_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, step in (("first", 1), ("second", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(
            json.dumps({"step": step, "train/loss": 0.5}) + "\n"
        )
    assert main(["diff", str(tmp_path / "first"), str(tmp_path / "second")]) == 3
    assert (
        "nothing to compare: there is no step at which both runs have a figure"
        in capsys.readouterr().out
    )
    assert main(["diff", str(tmp_path / "first"), str(tmp_path / "none")]) == 3
    assert "Expected a directory with runs" in capsys.readouterr().err

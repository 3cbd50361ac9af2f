"""What run directories say about runs that were really trained."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.recorded import record_run
from support.toys import TracingRunner

from danling.cli.main import main
from danling.workspace.runs import config_differences, find_runs


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("recorded")
    record_run(place, lr=0.01)
    record_run(place, lr=0.03, log_interval=2)
    return place


def test_curves_are_the_logged_values(root: Path) -> None:
    for run in find_runs(root):
        lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
        logged = [(line["step"], line["train/loss"]) for line in lines if "train/loss" in line]
        assert list(zip(*run.curve("train/loss"))) == logged
        assert run.curve("val/acc")[0] == [4, 8, 12]
        seconds = run.curve("train/loss", by="time")[0]
        assert seconds[0] == 0 and seconds == sorted(seconds)
        assert run.curve("no/such") == ([], [])


def test_the_summary_agrees_with_the_results(root: Path) -> None:
    for run in find_runs(root):
        row = run.summary()
        scores = {index: result["val"]["acc"] for index, result in run.results.items()}
        assert row["step"] == 12 and row["attempts"] == 1 and row["score_name"] == "val/acc"
        assert row["best"] == max(scores.values()) == scores[row["best_index"]]
        assert row["latest"] == scores[12]


def test_differences_are_of_settings_of_the_result(root: Path) -> None:
    runs = find_runs(root)
    differing = config_differences(runs)
    assert list(differing) == ["optim.lr"] and sorted(differing["optim.lr"]) == [0.01, 0.03]
    assert set(config_differences(runs, everything=True)) == {"optim.lr", "log_interval"}


def test_unfinished_line_of_a_killed_run_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "time": 5.0, "a": 2.0}\n{"step": 2, "time": 6.0, "a": nul'
    )
    (run,) = find_runs(tmp_path)
    assert run.curve("a") == ([1.0], [2.0]) and run.step == 1


class Stopping(TracingRunner):
    """Is asked to stop in its first update."""

    def train_step(self, data: Any) -> Any:
        self.stop()
        return super().train_step(data)


class Scoreless(TracingRunner):
    """Its score is never finite."""

    def summarize(self, split: str, totals: Any) -> dict[str, float]:
        return {**super().summarize(split, totals), "loss": math.nan}


@pytest.mark.parametrize("kind", [Stopping, Scoreless])
def test_a_run_without_a_best_evaluation_is_a_row_like_others(
    kind: type[TracingRunner], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "epochs": 1,
        "dir": str(tmp_path / "runs" / "early"),
        "log_interval": 1,
        "dataloader": {"batch_size": 4},
    }
    with kind({**config, "optim": {"type": "sgd", "lr": 0.1}}) as runner:
        runner.train()
    (run,) = find_runs(tmp_path)
    assert (
        run.best == {}
        and run.summary()["best"] is run.latest_score is None
        and run.summary()["step"]
    )
    assert main(["runs", str(tmp_path)]) == 0 and "early" in capsys.readouterr().out
    assert main(["plot", str(tmp_path), "-o", str(tmp_path / "curves.png")]) == 0


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("results.json", '{"4": {"val": {"acc"'),
        ("results.json", '{"4": {"val": {"acc": "high"}}}'),
        ("best.json", ""),
        ("latest.json", "[1]"),
        ("metadata/config.full.yaml", "seed: [1,\n  b: {"),
        ("metadata/config.canonical.yaml", "\x00"),
    ],
)
def test_a_broken_file_is_named_and_hides_nothing_else(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str
) -> None:
    place = Path(shutil.copytree(root, tmp_path / "copy"))
    broken, whole = (run.path for run in find_runs(place))
    (broken / name).write_text(content)
    by_one_run = name == "results.json"  # a table has no results
    for words in (
        [["explain", str(broken)]]
        if by_one_run
        else [["runs", str(place)], ["runs", str(place), "--json"]]
    ):
        assert main(words) == 1
        told = capsys.readouterr()
        assert str(broken / name) in told.err and str(whole) not in told.err
        assert broken.name in told.out and (by_one_run or whole.name in told.out)


def test_lines_of_others_in_the_figures_do_no_harm(tmp_path: Path) -> None:
    lines = [
        '{"step": 1, "a": 1.0}',
        '{"step": 2, "time": 5.0, "a": "x"}',
        '{"step": 3, "time": 7.0, "a": 2.0}',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (run,) = find_runs(tmp_path)
    assert run.curve("a") == ([1.0, 3.0], [1.0, 2.0]) and run.curve("a", by="time") == (
        [2.0],
        [2.0],
    )


def test_run_with_its_best_checkpoint_elsewhere_has_a_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = record_run(tmp_path, log=False, dir=str(tmp_path / "first"))
    config = {
        "steps": 14,
        "seed": 3,
        "dir": str(tmp_path / "second"),
        "evaluate_interval": 40,
        "score_name": "acc",
    }
    config |= {
        "resume": str(first / "checkpoints" / "latest.pth"),
        "checkpoint": {"interval": 1},
        "log": False,
    }
    config |= {
        "ema": {"enabled": True},
        "dataloader": {"batch_size": 4},
        "optim": {"type": "adamw", "lr": 0.01},
    }
    with TracingRunner(config) as runner:
        assert f"{runner.id} (ddp): step 12, epoch" in repr(runner) and str(
            tmp_path / "second"
        ) in repr(runner)
        runner.train()
    assert not (tmp_path / "second" / "checkpoints" / "best.pth").exists()
    one, two = find_runs(tmp_path)
    assert two.best["checkpoint_is_here"] is False and one.best["checkpoint_is_here"] is True
    row = two.summary()
    assert (
        row["score_name"] == "val/acc"
        and row["best"] == one.summary()["best"]
        and row["best_index"] <= 12
    )
    assert row["latest"] == two.results[14]["val"]["acc"]
    assert main(["runs", str(tmp_path)]) == 0 and capsys.readouterr().out.count("val/acc") == 2

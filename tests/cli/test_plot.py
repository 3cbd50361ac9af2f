"""`danling runs` and `danling plot` on runs that were really trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from support.recorded import danling, record_run

from danling.cli.main import main


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("recorded")
    record_run(place, lineage="low", lr=0.001)
    record_run(place, lineage="high", lr=0.05, steps=8)
    return place


def test_the_table_has_scores_and_differences(root: Path) -> None:
    done = danling("runs", root)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["run", "step", "attempts", "score", "best", "at", "latest", "last", "change"]
    assert lines[1].startswith("high") and lines[2].startswith("low") and "val/acc" in lines[1]
    assert "settings that differ" in lines and "optim.lr" in done.stdout and "0.05" in done.stdout


def test_json_says_the_same(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(root), "--sort", "step", "--reverse", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [run["step"] for run in facts["runs"]] == [12, 8]
    names = [run["run"] for run in facts["runs"]]
    assert facts["differences"]["optim.lr"] == dict(zip(names, [0.001, 0.05]))


def test_several_runs_become_a_picture_and_a_report(root: Path) -> None:
    done = danling("plot", root, "--figure", "loss", "acc", "--smooth", "0.5", "-o", "out/curves.png")
    assert done.returncode == 0 and done.stdout == "out/curves.png: 2 runs\n"
    with Image.open("out/curves.png") as picture:
        assert picture.format == "PNG"
    assert main(["plot", *(str(run) for run in root.glob("*/*")), "-o", "report.html"]) == 0
    text = Path("report.html").read_text()
    assert text.count("<h2>Results of") == 2 and "optim.lr" in text
    assert main(["plot", str(root), "--figure", "los"]) == 2 and not Path("curves.png").exists()


def test_without_matplotlib_the_extra_is_named(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert main(["plot", str(root)]) == 4
    assert "danling[plots]" in capsys.readouterr().err

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
    done = danling("runs", root, warm=True)
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
    done = danling("plot", root, "--figure", "loss", "acc", "--smooth", "0.5", "-o", "out/curves.png", warm=True)
    assert done.returncode == 0 and done.stdout == "out/curves.png: 2 runs\n"
    with Image.open("out/curves.png") as picture:
        assert picture.format == "PNG"
    assert main(["plot", *(str(run) for run in root.glob("*/*")), "-o", "report.html"]) == 0
    text = Path("report.html").read_text()
    assert text.count("<h2>Results of") == 2 and "optim.lr" in text
    assert main(["plot", str(root), "--figure", "los"]) == 2 and not Path("curves.png").exists()


def test_without_matplotlib_it_is_named(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert main(["plot", str(root)]) == 4
    assert "pip install matplotlib" in capsys.readouterr().err


def test_runs_that_are_not_drawn_are_named_and_not_counted(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = next(root.glob("low*/*"))
    silent, broken = tmp_path / "silent", tmp_path / "broken"
    for run in (silent, broken):
        run.mkdir()
        (run / "results.json").write_text("{}")
    (broken / "metrics.jsonl").write_bytes(b"\xff\xfe\n\x80\n")
    assert main(["plot", str(silent), str(drawn), "-o", "one.png"]) == 0
    out, err = capsys.readouterr()
    assert out == "one.png: 1 run\n" and str(silent) in err and str(drawn) not in err
    assert main(["plot", str(silent), str(broken), str(drawn), "-o", "two.png"]) == 1
    out, err = capsys.readouterr()
    assert out == "two.png: 1 run\n" and str(silent) in err and err.count(str(broken)) == 1
    assert main(["plot", str(broken), "-o", "none.png"]) == 1
    assert str(broken) in capsys.readouterr().err
    assert main(["plot", str(silent), "-o", "none.png"]) == 3
    assert "Expected runs with metrics" in capsys.readouterr().err and not Path("none.png").exists()
    assert main(["runs", str(tmp_path)]) == 1
    assert str(broken) in capsys.readouterr().err

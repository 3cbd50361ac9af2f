"""`danling runs` and `danling plot` on runs that were really trained, and the pictures of written ones."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image
from support.recorded import danling, record_run

import danling as package
from danling.cli.main import main
from danling.cli.plot import draw_curves, group, png, smoothed
from danling.workspace.runs import Run, find_runs


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("recorded")
    record_run(place, lineage="low", lr=0.001)
    record_run(place, lineage="high", lr=0.05, steps=8)
    return place


def test_the_table_has_scores_and_differences(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = danling("runs", root, warm=True)
    lines = done.stdout.splitlines()
    assert lines[0].split() == [
        "run",
        "step",
        "attempts",
        "score",
        "best",
        "at",
        "latest",
        "last",
        "change",
    ]
    assert lines[1].startswith("high") and lines[2].startswith("low") and "val/acc" in lines[1]
    assert "settings that differ" in lines and "optim.lr" in done.stdout and "0.05" in done.stdout
    assert main(["runs", str(root), "--sort", "step", "--reverse", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [run["step"] for run in facts["runs"]] == [12, 8]
    assert facts["differences"]["optim.lr"] == dict(
        zip([run["run"] for run in facts["runs"]], [0.001, 0.05])
    )


def test_several_runs_become_a_picture(root: Path) -> None:
    done = danling(
        "plot",
        root,
        "--figure",
        "loss",
        "acc",
        "--smooth",
        "0.5",
        "-o",
        "out/curves.png",
        warm=True,
    )
    assert (
        done.stdout == "out/curves.png: 2 runs\n" and Image.open("out/curves.png").format == "PNG"
    )
    assert main(["plot", str(root), "--figure", "los"]) == 2 and not Path("curves.png").exists()


def test_without_matplotlib_it_is_named(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert main(["plot", str(root)]) == 4
    assert "pip install matplotlib" in capsys.readouterr().err


def test_runs_left_out_of_the_picture_are_named_and_not_counted(
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


def write_run(path: Path, scale: float) -> Run:
    """Write what a run leaves behind: losses of 20 steps, and two evaluations."""
    path.mkdir(parents=True)
    lines = [
        f'{{"step": {i}, "time": {100 + i}.5, "train/loss": {scale / i}, "train/learning_rate": 0.1}}'
        for i in range(1, 21)
    ]
    lines += [
        f'{{"step": {i}, "time": {100 + i}.7, "val/loss": {2 * scale / i}, "val/acc": {i / 20}}}'
        for i in (10, 20)
    ]
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (path / "results.json").write_text(
        '{"1": {"val": {"acc": 0.5, "loss": null}}, "2": {"val": {"acc": 1.0}}}'
    )
    (path / "best.json").write_text('{"index": 2, "score": 1.0, "result": {"val": {"acc": 1.0}}}')
    (path / "metadata").mkdir()
    (path / "metadata" / "config.canonical.yaml").write_text(f"optim:\n  lr: {scale}\n")
    (path / "metadata" / "config.full.yaml").write_text("score_name: acc\nscore_split: val\n")
    return Run(path, path.name)


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    return [write_run(tmp_path / "first", 1.0), write_run(tmp_path / "<b>second", 3.0)]


def test_each_quantity_has_a_panel_with_the_curves_of_all_runs(runs: list[Run]) -> None:
    figure = draw_curves(runs)
    panels = {axes.get_title(): axes for axes in figure.axes}
    assert list(panels) == ["loss", "acc", "learning_rate"]
    drawn = {line.get_label(): list(map(float, line.get_ydata())) for line in panels["loss"].lines}
    titles = zip(("optim.lr=1.0", "optim.lr=3.0"), runs)
    wanted = {
        f"{title} {split}": run.curve(f"{split}/loss")[1]
        for title, run in titles
        for split in ("train", "val")
    }
    assert drawn == wanted


def test_legends_cover_no_curve(runs: list[Run]) -> None:
    figure = draw_curves(runs)
    FigureCanvasAgg(figure).draw()
    for axes in figure.axes:
        legend = axes.get_legend()
        assert legend is not None
        assert not any(
            legend.get_window_extent().overlaps(other.get_window_extent()) for other in figure.axes
        )
        assert figure.bbox.containsx(legend.get_window_extent().x0) and figure.bbox.containsy(
            legend.get_window_extent().y0
        )


def test_notebook_shows_the_curves_of_a_directory(runs: list[Run]) -> None:
    formatters = pytest.importorskip("IPython.core.formatters")
    shown, _ = formatters.DisplayFormatter().format(
        package.draw_curves(runs[0].path.parent, figures=["loss"])
    )
    assert shown["image/png"] == png(draw_curves(find_runs(runs[0].path.parent), figures=["loss"]))


def test_smoothing_adds_a_mean_without_the_bias_of_its_start(runs: list[Run]) -> None:
    assert smoothed([4.0, 4.0, 4.0], 0.9) == pytest.approx([4.0, 4.0, 4.0])
    assert smoothed([1.0, 2.0], 0.5) == pytest.approx([1.0, (0.25 * 1 + 0.5 * 2) / 0.75])
    (axes,) = draw_curves(runs[:1], figures=["train/loss"], smooth=0.9).axes
    raw, mean = (list(line.get_ydata()) for line in axes.lines)
    assert raw == runs[0].curve("train/loss")[1] and mean == smoothed(raw, 0.9)
    (rates,) = draw_curves(runs[:1], figures=["learning_rate"], smooth=0.9).axes
    assert len(rates.lines) == 1


def test_figures_are_chosen_by_name_and_unknown_ones_are_named(runs: list[Run]) -> None:
    assert group(runs, ["acc", "train/loss"]) == {"loss": ["train/loss"], "acc": ["val/acc"]}
    with pytest.raises(ValueError, match="train/loss.*Received: 'los'"):
        group(runs, ["los"])
    with pytest.raises(ValueError, match="smooth=1"):
        draw_curves(runs, smooth=1.0)


def test_the_picture_is_a_png_and_the_same_each_time(runs: list[Run]) -> None:
    first, second = (png(draw_curves(runs, log_scale=True, by="time")) for _ in range(2))
    assert first == second and Image.open(io.BytesIO(first)).format == "PNG"

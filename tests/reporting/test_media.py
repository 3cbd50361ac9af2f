"""Images, histograms, texts and tables, read back from each tracker by its own reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.processes import run_processes
from support.toys import TracingRunner

from danling.reporting import media

IMAGE = torch.linspace(0, 1, 3 * 4 * 5).reshape(3, 4, 5)
PIXELS = (IMAGE.permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()


class Logging(TracingRunner):
    def log_all(self) -> None:
        self.log_image("val/image", IMAGE)
        self.log_histogram("val/histogram", torch.tensor([1.0, 2.0, 2.0, float("nan")]))
        self.log_text("val/text", "a <b> text")
        self.log_table("val/table", ["name", "count"], [["a|b", torch.tensor(3)], ["c", 4]])


def logged(root: Path, **settings: Any) -> Logging:
    config = {
        "steps": 2,
        "seed": 1,
        "optim": {"type": "sgd", "lr": 0.1},
        "dataloader": {"batch_size": 2},
        "dir": str(root / "run"),
        **settings,
    }
    with Logging(config) as runner:
        runner.train()
        runner.log_all()
        return runner


def test_tensorboard_shows_each_kind(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    logged(tmp_path, tensorboard=True)
    (directory,) = (tmp_path / "run" / "tensorboard").iterdir()
    events = EventAccumulator(str(directory)).Reload()
    (image,) = events.Images("val/image")
    assert (image.step, image.width, image.height) == (2, 5, 4)
    (histogram,) = events.Histograms("val/histogram")
    assert (histogram.histogram_value.num, histogram.histogram_value.sum) == (3, 5.0)
    texts = {
        tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode()
        for tag in events.Tags()["tensors"]
    }
    assert texts["val/text/text_summary"] == "a <b> text"
    assert texts["val/table/text_summary"].splitlines() == [
        "| name | count |",
        "| --- | --- |",
        "| a\\|b | 3 |",
        "| c | 4 |",
    ]


def test_mlflow_keeps_each_kind_as_an_artifact(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    image = pytest.importorskip("PIL.Image")
    place = tmp_path / "mlflow.db"
    logged(tmp_path, mlflow={"enabled": True, "uri": f"sqlite:///{place}"})
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{place}")
    experiment = client.search_experiments(filter_string="name = 'lin'")[0]
    (run,) = client.search_runs([experiment.experiment_id])
    root = Path(run.info.artifact_uri.removeprefix("file://"))
    counts = json.loads((root / "histograms/val_histogram/000000000002.json").read_text())["counts"]
    assert sum(counts) == 3
    assert (root / "texts/val_text/000000000002.txt").read_text() == "a <b> text"
    table = json.loads((root / "tables/val_table/000000000002.json").read_text())
    assert table == {"columns": ["name", "count"], "data": [["a|b", 3], ["c", 4]]}
    (picture,) = [each for each in root.glob("images/*.png") if "val_image" in each.name]
    assert (np.asarray(image.open(picture)) == PIXELS).all()


def test_trackio_has_each_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    (logs,) = run_processes(
        _trackio_logs,
        tmp_path,
        world_size=1,
        environment={"TRACKIO_DIR": str(tmp_path / "trackio")},
    )
    assert {name: value["_type"] for name, value in logs.items()} == {
        "val/image": "trackio.image",
        "val/histogram": "trackio.histogram",
        "val/text": "trackio.markdown",
        "val/table": "trackio.table",
    }


def _trackio_logs(root: Path) -> dict[str, Any]:
    # trackio reads its directory once in a process.
    from trackio.sqlite_storage import SQLiteStorage

    runner = logged(root, trackio={"enabled": True})
    (name,) = SQLiteStorage.get_runs("lin")
    lines = SQLiteStorage.get_logs("lin", name)
    assert runner.state.train.global_step == 2
    return {
        key: value
        for line in lines
        for key, value in line.items()
        if key.startswith("val/") and isinstance(value, dict)
    }


def test_tracker_without_the_method_is_named_once_and_another_of_the_users_is_sent_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Numbers:
        def log(self, values: Any, step: int) -> None: ...
        def flush(self) -> None: ...
        def close(self) -> None: ...

    class Pictures(Numbers):
        def __init__(self) -> None:
            self.taken: list[Any] = []

        def log_image(self, name: str, pixels: Any, step: int) -> None:
            self.taken.append((name, pixels, step))

    with Logging({"dir": str(tmp_path / "run"), "dataloader": {"batch_size": 2}}) as runner:
        with caplog.at_level("WARNING", "danling"):
            runner.log_image("a", IMAGE, step=4)
        assert [line for line in caplog.messages if "goes to no tracker" in line]
        caplog.clear()
        pictures = Pictures()
        runner.add_tracker(Numbers())
        runner.add_tracker(pictures)
        with caplog.at_level("WARNING", "danling"):
            runner.log_image("b", IMAGE, step=5)
            runner.log_text("c", "text")
            runner.log_text("c", "text")
        ((name, pixels, step),) = pictures.taken
        assert (name, step) == ("b", 5) and (pixels == PIXELS).all()
        assert len([line for line in caplog.messages if "has no method log_text" in line]) == 1


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (torch.tensor([[0.0, 1.0]]), [[[0] * 3, [255] * 3]]),
        (torch.tensor([[[0, 7]]], dtype=torch.uint8), [[[0] * 3, [7] * 3]]),
        (torch.tensor([[[0.5]]], dtype=torch.bfloat16), [[[128] * 3]]),
        (np.array([[True, False]]), [[[255] * 3, [0] * 3]]),
        (np.array([[[1, 2, 3, 4]]]), [[[1, 2, 3, 4]]]),
    ],
)
def test_pixels_of_every_kind_of_image(image: Any, expected: list[Any]) -> None:
    assert media.pixels_of(image).tolist() == expected


@pytest.mark.parametrize(
    ("image", "received"),
    [
        (torch.zeros(2, 3, 4, 4), r"shape \(2, 3, 4, 4\)"),
        (torch.full((3, 2, 2), -0.5), "-0.5 to -0.5"),
        (torch.full((3, 2, 2), float("nan")), "nan to nan"),
        (np.full((2, 2, 3), 300), "300 to 300"),
    ],
)
def test_value_without_pixels_is_refused(image: Any, received: str) -> None:
    with pytest.raises(ValueError, match=f"Received: {received}"):
        media.pixels_of(image)


def test_row_of_another_length_is_refused() -> None:
    with pytest.raises(
        ValueError, match="Expected rows of 2 values, one a column. Received: 1 values in row 1"
    ):
        media.rows_of(["a", "b"], [[1, 2], [3]])

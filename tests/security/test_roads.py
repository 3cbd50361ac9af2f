"""Checkpoints that were made to do harm, with sums that fit, on every road by which one is read: nothing runs."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support import hostile
from support.recorded import command, record_run
from support.toys import TracingRunner

from danling.checkpoints import CheckpointError, read_config
from danling.checkpoints.reading import read_payload, without_untrusted_settings
from danling.cli.main import main
from danling.workspace.workspace import without_places


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("recorded")
    return {kind: record_run(root / kind, checkpoint={"backend": kind}) for kind in ("file", "dcp")}


SETTINGS = {"steps": 12, "seed": 3, "log": False, "dataloader": {"batch_size": 4}}


def _auto_resume(path: Path, root: Path) -> None:
    stored = {
        name: value
        for name, value in _stored[path].items()
        if name not in ("dir", "workspace_root")
    }
    with TracingRunner({**stored, "dir": str(path.parent.parent), "auto_resume": True}):
        return


_stored: dict[Path, dict[str, Any]] = {}


def _new(root: Path, **settings: Any) -> None:
    with TracingRunner({**SETTINGS, "workspace_root": str(root), **settings}):
        return


def _from_checkpoint(path: Path, root: Path) -> None:
    with TracingRunner.from_checkpoint(path, {"workspace_root": str(root)}):
        return


def _from_pretrained(path: Path, root: Path) -> None:
    with TracingRunner.from_pretrained({**SETTINGS, "workspace_root": str(root)}, path):
        return


ROADS: dict[str, Callable[[Path, Path], Any]] = {
    "inspect": command("inspect", "{path}", "--config", "--tensors"),
    "export": command("export", "{path}", "{out}"),
    "estimate": command("estimate", "{path}"),
    "verify": command("verify", "{path}"),
    "auto_resume": _auto_resume,
    "resume": lambda path, root: _new(root, resume=str(path)),
    "pretrained": lambda path, root: _new(root, pretrained=str(path)),
    "from_checkpoint": _from_checkpoint,
    "from_pretrained": _from_pretrained,
    "read_config": lambda path, root: read_config(path),
}

EXPLOITS = (
    "metadata, dotted to Popen",
    "pathlib.io.FileIO",
    "os.system",
    "getattr chain",
    "nested in the state of a part",
)

UNTOUCHED = {
    ".metadata": {"verify"},
    "file": {"verify"},
    "plain values": {"verify", "export", "estimate", "pretrained", "from_pretrained"},
    "engine": {"verify", "inspect", "estimate", "read_config"},
}
"""Roads that have no need of what was planted."""


def _place(recorded: dict[str, Path], kind: str, tmp_path: Path) -> tuple[Path, Path]:
    run = Path(shutil.copytree(recorded[kind], tmp_path / "run"))
    latest = run / "checkpoints" / ("latest.pth" if kind == "file" else "latest")
    _stored[latest] = read_config(latest)
    return latest, latest.parent


def _targets(directory: Path) -> list[Path]:
    return sorted((directory / "targets").iterdir())


def _plant(recorded: dict[str, Path], where: str, tmp_path: Path, content: bytes) -> Path:
    kind = "file" if where == "file" else "dcp"
    latest, directory = _place(recorded, kind, tmp_path)
    if where == "file":
        for path in directory.glob("*.pth"):
            hostile.plant_in_file(path, content)
    elif where == "engine":
        payload = read_payload(directory / "targets" / latest.read_text().strip())
        for target in _targets(directory):
            if target.name != latest.read_text().strip():
                shutil.rmtree(target)
        for pointer in directory.iterdir():
            if pointer.is_file() and pointer != latest:
                pointer.unlink()
        hostile.plant_in_file(
            hostile.engine_target(directory, payload) / "mp_rank_00_model_states.pt", content
        )
    else:
        plant = hostile.plant_in_metadata if where == ".metadata" else hostile.plant_in_value
        for target in _targets(directory):
            plant(target, content)
    hostile.reseal(directory)
    return latest


@pytest.mark.parametrize("where", [".metadata", "plain values", "file", "engine"])
def test_no_road_runs_code_of_a_checkpoint(
    recorded: dict[str, Path], tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    for number, exploit in enumerate(EXPLOITS):
        root = tmp_path / str(number)
        root.mkdir()
        mark = root / "mark"
        content = hostile.harm(exploit, mark, protocol=4 if where == ".metadata" else 2)
        latest = _plant(recorded, where, root, content)
        for road, read in ROADS.items():
            if road in UNTOUCHED[where]:
                with suppress(CheckpointError, ValueError):
                    read(latest, root)
            else:
                with pytest.raises((CheckpointError, ValueError)):
                    read(latest, root)
            assert not mark.exists(), (exploit, road)


def test_checkpoint_cannot_declare_itself_trusted(
    recorded: dict[str, Path], tmp_path: Path
) -> None:
    latest, _ = _place(recorded, "file", tmp_path)
    payload = torch.load(latest, weights_only=True)
    payload["runner"]["checkpoint"]["trust"] = True
    # The compiler of generated code, as words of a command.
    payload["runner"]["compile"] = {
        "options": {"cpp.cxx": (None, "sh -c true"), "max_autotune": False}
    }
    latest.unlink()
    torch.save(payload, latest)
    hostile.reseal(latest.parent)
    assert read_config(latest)["checkpoint"]["trust"] is True
    with TracingRunner.from_checkpoint(latest, {"workspace_root": str(tmp_path / "new")}) as runner:
        assert runner.config.checkpoint.trust is False
        assert runner.config.compile.options == {"max_autotune": False}


@pytest.mark.parametrize(
    "planted",
    [
        {"checkpoint.trust": True},
        {"compile.precompile_artifact_dir": "graphs"},
        {"compile.options": {"cpp.cxx": (None, "sh -c true")}},
        {"compile.options.cpp.cxx": (None, "sh -c true")},
        {"compile": {"options": {"cpp": {"cxx": [None, "sh"]}}}},
        {"compile": {"options.cpp.cxx": "sh"}},
    ],
)
def test_names_with_dots_say_no_more_than_others(planted: dict[str, Any]) -> None:
    config = TracingRunner.config_class(without_untrusted_settings(without_places(planted)))
    assert config.checkpoint.trust is False and config.compile.precompile_artifact_dir is None
    assert config.compile.options in (None, {}, {"cpp": {}})


HARMFUL_YAML = "optim: !!python/object/apply:os.system ['touch {mark}']\n"


def test_settings_and_figures_in_files_run_nothing(
    recorded: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(recorded["file"], tmp_path / "runs" / "run"))
    mark = tmp_path / "mark"
    text = HARMFUL_YAML.format(mark=mark)
    for file in (run / "metadata").glob("*.yaml"):
        file.write_text(text)
    (run / "metrics.jsonl").write_text(text)
    (run / "results.json").write_text(text)
    (tmp_path / "settings.yaml").write_text(text)
    main(["runs", str(tmp_path / "runs")])
    main(["plot", str(tmp_path / "runs"), "--output", str(tmp_path / "curves.png")])
    with pytest.raises(ValueError, match="Expected YAML"):
        TracingRunner.config_class.from_file(tmp_path / "settings.yaml")
    (tmp_path / "weights.safetensors").write_bytes(hostile.harm("os.system", mark))
    with pytest.raises(CheckpointError):
        _new(tmp_path, pretrained=str(tmp_path / "weights.safetensors"))
    assert main(["inspect", str(tmp_path / "weights.safetensors")]) == 1
    assert not mark.exists()

"""A file that was copied without its sums: by itself it is verified by the sums inside of it, in a run's own directory it is damage."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.recorded import command, record_run
from support.toys import TracingRunner

from danling.checkpoints import CheckpointDamaged, CheckpointError, import_weights, read_config


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_run(tmp_path_factory.mktemp("recorded"), checkpoint={"backend": "file"})


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "run"))


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    (tmp_path / "colleague").mkdir()
    return Path(shutil.copy(run / "checkpoints" / "best.pth", tmp_path / "colleague" / "best.pth"))


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.unlink()
    path.write_bytes(content)


def position_of_weight(path: Path) -> int:
    """Return where a weight is in a file, found by its value."""
    weight = torch.load(path, weights_only=True)["model"]["0.weight"]
    return path.read_bytes().index(weight.numpy().tobytes()) + 5


def settings(root: Path, **changes: Any) -> dict[str, Any]:
    return {
        "steps": 12,
        "seed": 3,
        "workspace_root": str(root),
        "log": False,
        "dataloader.batch_size": 4,
        **changes,
    }


def _pretrained(path: Path, root: Path) -> Any:
    with TracingRunner(settings(root, pretrained=str(path))) as runner:
        return {name: value.clone() for name, value in runner.unwrapped_model.state_dict().items()}


def _from_checkpoint(path: Path, root: Path) -> None:
    with TracingRunner.from_checkpoint(path, {"workspace_root": str(root), "log": False}):
        return


ROADS: dict[str, Callable[[Path, Path], Any]] = {
    "pretrained": _pretrained,
    "from_checkpoint": _from_checkpoint,
    "import_weights": lambda path, root: import_weights(path),
    "verify": command("verify", "{path}"),
    "export": command("export", "{path}", "{out}"),
}
"""What reads the tensors."""
SETTINGS: dict[str, Callable[[Path, Path], Any]] = {
    "read_config": lambda path, root: read_config(path),
    "inspect": command("inspect", "{path}"),
    "estimate": command("estimate", "{path}"),
}
"""What leaves them unread."""


def test_a_copy_is_read_on_every_road_and_said_to_lack_its_sums_once(
    copied: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = torch.load(copied, weights_only=True)
    with caplog.at_level(logging.INFO, "danling"):
        loaded = _pretrained(copied, tmp_path)
    evaluated = {**whole["model"], **whole["ema"]["weights"]}
    assert all(torch.equal(loaded[name], evaluated[name]) for name in evaluated)
    lacking = [
        record.message for record in caplog.records if "no checksums next to it" in record.message
    ]
    assert len(lacking) == 1 and str(copied) in lacking[0]
    step = whole["state"]["train"]["global_step"]
    assert f"{copied} holds the weights of step {step}, epoch " in caplog.text
    for road in (*ROADS.values(), *SETTINGS.values()):
        road(copied, tmp_path)
    told = capsys.readouterr()
    assert "best.pth.sha256 is missing" in told.out and f"step {step}" in told.out
    assert "no checksums next to it" in told.err


@pytest.mark.parametrize("road", ROADS)
def test_a_damaged_copy_is_refused(copied: Path, tmp_path: Path, road: str) -> None:
    flip(copied, position_of_weight(copied))
    torch.load(copied, weights_only=True)  # torch itself sees nothing
    with pytest.raises(CheckpointDamaged):
        ROADS[road](copied, tmp_path)
    assert not (tmp_path / "out.pth").exists()


@pytest.mark.parametrize("road", [*ROADS, *SETTINGS])
def test_damaged_settings_of_a_copy_are_refused(copied: Path, tmp_path: Path, road: str) -> None:
    flip(copied, copied.read_bytes().index(b"global_step"))
    with pytest.raises(CheckpointDamaged):
        {**ROADS, **SETTINGS}[road](copied, tmp_path)


@pytest.mark.parametrize("road", [*ROADS, *SETTINGS])
def test_lost_sums_are_damage_in_the_directory_of_a_run(
    run: Path, tmp_path: Path, road: str
) -> None:
    path = run / "checkpoints" / "latest.pth"
    path.with_name("latest.pth.sha256").unlink()
    # Another save under this name: whole, and wrong.
    path.unlink()
    shutil.copy(next((run / "checkpoints").glob("ckpt-*4.pth")), path)
    with pytest.raises(CheckpointDamaged):
        {**ROADS, **SETTINGS}[road](path, tmp_path)


def test_weights_of_another_program_are_compared_with_sums_inside_if_present(
    tmp_path: Path,
) -> None:
    weights = {"a": torch.arange(100.0)}
    torch.save(weights, tmp_path / "weights.pt")
    assert torch.equal(import_weights(tmp_path / "weights.pt")["a"], weights["a"])
    flip(
        tmp_path / "weights.pt",
        (tmp_path / "weights.pt").read_bytes().index(weights["a"].numpy().tobytes()) + 40,
    )
    with pytest.raises(CheckpointDamaged, match="data/0 has another CRC-32"):
        import_weights(tmp_path / "weights.pt")
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(weights, tmp_path / "without.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    torch.save(weights, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name in ("without.pt", "old.pt"):
        assert torch.equal(import_weights(tmp_path / name)["a"], weights["a"])


def test_levels_of_a_copy(copied: Path, tmp_path: Path) -> None:
    flip(copied, position_of_weight(copied))
    for level, refused in (("full", True), ("size", False), ("none", False)):
        config = settings(tmp_path, pretrained=str(copied), checkpoint={"verify": level})
        if refused:
            with pytest.raises(CheckpointError, match="another CRC-32"):
                TracingRunner(config)
        else:
            TracingRunner(config).close()

"""Where a run writes: its directory, its litter, its metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

import danling as dl
from danling.workspace import Workspace
from danling.workspace.workspace import RunPlace


def place_of(root: Path, **settings: Any) -> RunPlace:
    runner = dl.BaseRunner({"dir": str(root / "run"), "git_diff": False, "log": False, **settings})
    runner.close()
    return RunPlace(runner)


def opened(place: RunPlace) -> Workspace:
    return place.open(code_id=place.code_id, config_id=place.config_id, timestamp=place.timestamp)


def test_a_run_directory_is_made_when_it_is_opened_and_litter_goes(tmp_path: Path) -> None:
    (tmp_path / "run" / "metadata").mkdir(parents=True)
    litter = tmp_path / "run" / "metadata" / ".config.full.yaml.1234.tmp"
    place = place_of(tmp_path)
    assert not (tmp_path / "run" / "logs").exists()
    workspace = opened(place)
    try:
        assert workspace.dir == tmp_path / "run" and workspace.dir.is_dir() and place.id
        assert not litter.exists()
    finally:
        place.release()


def test_a_program_may_name_code_and_configuration_otherwise(tmp_path: Path) -> None:
    place = place_of(tmp_path)
    try:
        place.open(code_id="mine", config_id="settings", timestamp="now")
        place.choose()
        assert place.id.startswith("mine-settings")
    finally:
        place.release()


def test_metadata_is_written_without_secrets_and_not_by_who_only_looks(tmp_path: Path) -> None:
    place = place_of(tmp_path, lineage="named", api_key="sesame")
    workspace = opened(place)
    place.write_metadata(workspace, foreign=lambda: False)
    place.release()
    full = yaml.safe_load((workspace.metadata_dir / "config.full.yaml").read_text())
    assert full["lineage"] == "named" and "sesame" not in str(full)
    looking = place_of(tmp_path, lineage="looks", checkpoint={"load_only": True})
    looked = opened(looking)
    looking.write_metadata(looked, foreign=lambda: True)
    looking.write_metadata(looked, foreign=lambda: False)
    looking.release()
    assert yaml.safe_load((looked.metadata_dir / "config.full.yaml").read_text()) == full

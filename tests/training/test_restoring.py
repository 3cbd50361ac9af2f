"""Which checkpoint a run begins from, without a runner."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from danling.checkpoints import CheckpointDamaged, CheckpointDiskError, CheckpointNotFound
from danling.config import RunnerConfig
from danling.training.restore import restore_run
from danling.training.saving import index_of_best_elsewhere


class Begun:
    def __init__(
        self,
        *,
        latest: str | None = None,
        failing: int = 0,
        error: type[Exception] = CheckpointDamaged,
        **settings: Any,
    ) -> None:
        self.config = RunnerConfig(**settings)
        self.asked: list[str] = []
        self.failing, self.error, self.latest = failing, error, latest.split() if latest else []
        checkpoints = SimpleNamespace(
            tidy=lambda: self.asked.append("tidy"),
            refuse_foreign=lambda: self.asked.append("check"),
            refuse_lost=lambda: self.asked.append("refuse lost"),
            skip=lambda source, error: self.latest.remove(source),
        )
        self.checkpoint_manager = SimpleNamespace(
            checkpoints=checkpoints,
            on_main=lambda action: action(),
            find_latest=lambda: next(iter(self.latest), None),
        )
        self.workspace = SimpleNamespace(checkpoints=Path("here"))
        self.best_index: int | None = None
        self.best_score = 0.5
        self.is_main_process = True
        self._parts = SimpleNamespace(is_copied=False)

    def load_checkpoint(self, checkpoint: str | Path) -> None:
        self.asked.append(f"load {checkpoint}")
        if self.failing:
            self.failing -= 1
            raise self.error("it cannot be read")

    def load_pretrained(self, checkpoint: str | Path) -> None:
        self.asked.append(f"pretrained {checkpoint}")

    def restore(self) -> list[str]:
        restore_run(self)  # type: ignore[arg-type]
        return self.asked


@pytest.mark.parametrize(
    ("settings", "latest", "expected"),
    [
        ({}, "latest", []),
        ({"resume": "a", "auto_resume": True, "pretrained": "b"}, "latest", ["load a"]),
        ({"auto_resume": True, "pretrained": "b"}, "latest", ["load latest"]),
        ({"auto_resume": True, "pretrained": "b"}, None, ["refuse lost", "pretrained b"]),
        ({"pretrained": "b"}, None, ["pretrained b"]),
    ],
)
def test_named_checkpoint_precedes_the_own_one_and_the_own_one_precedes_weights(
    settings: dict[str, Any], latest: str | None, expected: list[str]
) -> None:
    assert Begun(latest=latest, **settings).restore() == ["tidy", "check", *expected]


def test_checkpoint_replaced_by_another_group_is_looked_for_again() -> None:
    groups = {"ft": {"enabled": True, "group_size": 2}, "auto_resume": True}
    begun = Begun(latest="latest", failing=2, error=CheckpointNotFound, **groups)
    assert begun.restore() == [
        "check",
        *["load latest"] * 3,
    ]  # nothing is tidied: another one may be writing
    with pytest.raises(CheckpointNotFound):
        Begun(latest="latest", failing=3, error=CheckpointNotFound, **groups).restore()
    with pytest.raises(CheckpointNotFound):
        Begun(latest="latest", failing=1, error=CheckpointNotFound, auto_resume=True).restore()


@pytest.mark.parametrize("error", [CheckpointDamaged, CheckpointDiskError])
def test_unreadable_verified_checkpoint_is_skipped_for_an_older_one(error: type[Exception]) -> None:
    begun = Begun(latest="c b a", failing=2, error=error, auto_resume=True)
    assert begun.restore()[-3:] == ["load c", "load b", "load a"]
    assert (
        Begun(latest="b a", failing=2, error=error, auto_resume=True).restore()[-1] == "refuse lost"
    )
    with pytest.raises(error):
        Begun(
            failing=1, error=error, resume="a"
        ).restore()  # one that was named is loaded or refused


def test_best_in_another_directory_is_remembered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begun = Begun()
    begun.workspace.checkpoints = tmp_path

    def elsewhere() -> int | None:
        return index_of_best_elsewhere(begun, "there", None)  # type: ignore[arg-type]

    with caplog.at_level(logging.INFO, "danling"):
        assert elsewhere() is None
        begun.best_index, begun.is_main_process = 4, False
        assert elsewhere() == 4 and not caplog.messages
        begun.is_main_process = True
        assert elsewhere() == 4
    assert "0.5000 at 4, is next to there" in caplog.text
    (tmp_path / "best.pth").touch()
    assert elsewhere() is None


class Unreachable:
    def has(self, name: str) -> bool:
        raise ConnectionError(name)


def test_store_is_not_asked_for_a_best_that_is_on_the_disk(tmp_path: Path) -> None:
    begun = Begun()
    begun.best_index, begun.workspace.checkpoints = 4, tmp_path
    with pytest.raises(ConnectionError):
        index_of_best_elsewhere(begun, "there", Unreachable())  # type: ignore[arg-type]
    (tmp_path / "best").touch()
    assert index_of_best_elsewhere(begun, "there", Unreachable()) is None  # type: ignore[arg-type]

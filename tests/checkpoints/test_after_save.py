"""What waits for a save hears of it when it is on the disk, and not before."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.saves import KINDS, make_manager, payload

from danling.checkpoints import storage


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_save_is_told_when_it_can_be_loaded_and_not_when_it_fails(
    tmp_path: Path, kind: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make_manager(kind, tmp_path, mode=mode)
    heard: list[tuple[int, bool, bool]] = []

    def hear(state: Mapping[str, Any]) -> None:
        is_there = any(tmp_path.glob("latest*"))
        heard.append((state["state"]["step"], is_there, threading.current_thread() is threading.main_thread()))

    manager.after_save = hear
    for step in (4, 8):
        manager.save_checkpoint(payload(step), epoch=0, global_step=step, history=True)
    manager.wait()
    manager.export_model({"format_version": 1, "model": {}}, epoch=0, global_step=8)
    manager.wait()
    assert heard == [(4, True, mode == "disabled"), (8, True, mode == "disabled")]

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage, "open_new", full)
    with pytest.raises(Exception, match="No space left"):
        manager.save_checkpoint(payload(9), epoch=0, global_step=9)
        manager.wait()
    assert len(heard) == 2
    manager.close()

"""`runner.audit`: a stretch of a run is trained again in this process, and its end compared with the stored one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.checked import Checked, settings
from support.processes import run_processes

SETTINGS = {
    "audit.replay_interval": None,
    "steps": 9,
    "checkpoint.load_only": False,
    "checkpoint.interval": 3,
}


class Disturbed(Checked):
    """A run whose gradient is another one at update 5, where that is switched on."""

    disturbs = False

    def clip_gradients(self, grad_norm: torch.Tensor) -> None:
        super().clip_gradients(grad_norm)
        if type(self).disturbs and self.state.train.global_step == 4:
            next(self.model.parameters()).grad.mul_(1.01)


def files(directory: Path) -> dict[str, bytes]:
    """Return the files of a run but its log, by path."""
    return {
        str(path): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.suffix != ".log"
    }


def test_retrained_stretch_equals_the_stored_one_and_the_run_continues_unchanged(
    tmp_path: Path,
) -> None:
    with Checked(settings(tmp_path / "run", **SETTINGS)) as runner:
        runner.train()
        before, stream = files(tmp_path / "run"), torch.default_generator.get_state()
        for stretch, steps in (((), (6, 9)), ((3, 6), (3, 6)), ((0, 3), (0, 3))):
            found = runner.audit(*stretch)
            assert (
                found.is_same
                and ((found.start.step if found.start else 0), found.end.step) == steps
            )
        assert files(tmp_path / "run") == before
        assert torch.equal(torch.default_generator.get_state(), stream)


def test_diverging_stretch_names_the_difference_and_its_update(tmp_path: Path) -> None:
    with Disturbed(
        settings(tmp_path / "run", **SETTINGS, **{"audit.digest_interval": 1})
    ) as runner:
        runner.train()
        Disturbed.disturbs = True
        try:
            found = runner.audit(3, 6, scratch=tmp_path / "scratch")
        finally:
            Disturbed.disturbs = False
        assert not found.is_same and "model/0.weight" in found.differing
        assert min(each.step for each in found.comparison.divergences) == 5
        assert (tmp_path / "scratch" / "run" / "digests.jsonl").exists()
        with pytest.raises(ValueError, match=r"\[3, 6, 9\]. Received: 4"):
            runner.audit(4, 6)


def audited(root: str) -> tuple[bool, int]:
    """Train and audit on several ranks."""
    with Checked(settings(root, **SETTINGS)) as runner:
        runner.train()
        found: Any = runner.audit(3, 9)
        return found.is_same, found.end.step


def test_on_two_ranks_all_are_told(tmp_path: Path) -> None:
    assert run_processes(audited, str(tmp_path), world_size=2) == [(True, 9), (True, 9)]

"""What kills leave is removed at the next start, and `danling verify` does not take it for damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.toys import Small
from support.toys import settings as toy_settings

import danling as dl
from danling.checkpoints import storage
from danling.cli.main import main


def settings(epochs: int = 4, backend: str = "file", **more: Any) -> dict[str, Any]:
    policy = {"keep_latest_k": 2, "async_enabled": False, "backend": backend}
    return toy_settings("mine", epochs=epochs, checkpoint=policy, **more)


def trained(config: dict[str, Any]) -> Path:
    with Small(config) as runner:
        runner.train()
        return runner.dir


def verified(run: Path, capsys: pytest.CaptureFixture[str], exit_code: int) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["verify", str(run), "--json"]) == exit_code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def leave_litter(run: Path, backend: str) -> list[Path]:
    checkpoints = run / "checkpoints"
    left = [
        *(run / f".{name}.json.ab12cd34.tmp" for name in ("results", "latest", "best")),
        run / ".metrics.jsonl.ab12cd34.tmp",
        run / "metadata" / ".config.full.yaml.x_y1z2w3.tmp",
        run / "metadata" / ".git.diff.ab12cd34.tmp",
        # A save that was killed before its file had the name, and a deletion that was killed before its last step.
        checkpoints / "ckpt-e000008.pth.sha256.next",
        checkpoints / ".deleting-ckpt-e000009",
        checkpoints / f"{storage.STAGED}0123",
    ]
    for path in left:
        path.write_text("cut")
    if backend == "dcp":
        target = checkpoints / "targets" / "00000009-0badc0de"
        target.mkdir()
        (target / "__0_0.distcp").write_text("cut")
        left.append(target)
    return left


@pytest.mark.parametrize("backend", ["file", "dcp"])
def test_litter_is_named_and_the_next_start_removes_it(
    backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(settings(backend=backend))
    left = leave_litter(run, backend)
    foreign = run / ".mine.tmp"
    foreign.write_text("not the library's")
    found = verified(run, capsys, 0)
    assert sorted(found["litter"]) == sorted(str(path) for path in left)
    assert all(not verdict["problems"] for verdict in found["checkpoints"])
    assert main(["verify", str(run)]) == 0
    assert capsys.readouterr().out.count("litter  ") == len(left)
    # Constructed is enough: nothing is trained and nothing saved.
    with Small(settings(backend=backend, auto_resume=True)):
        pass
    assert [path for path in left if path.exists()] == []
    assert foreign.exists()
    assert verified(run, capsys, 0)["litter"] == []


def test_nothing_of_a_run_in_progress_is_litter(capsys: pytest.CaptureFixture[str]) -> None:
    with Small(settings()) as runner:
        runner.train()
        leave_litter(runner.dir, "file")
        assert verified(runner.dir, capsys, 0)["litter"] == []
        assert (runner.dir / ".lock").exists()


def test_the_directory_of_another_run_is_left_as_it_is() -> None:
    run = trained(settings())
    left = leave_litter(run, "file")[-1]
    with pytest.raises(dl.runners.checkpoints.CheckpointMismatch):
        Small(settings(auto_resume=True, max_grad_norm=1.0))
    assert left.exists()

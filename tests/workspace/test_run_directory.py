"""Which directory a run takes: replica groups share one, and what cannot be locked is never adopted."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from danling.config import RunnerConfig
from danling.utils import locks
from danling.workspace.run_directory import RunDirectory, RunInUseError


def chosen(
    root: Path, group_dir: str | None = None, *, reruns: bool = False, **settings: Any
) -> RunDirectory:
    config = RunnerConfig(
        {"workspace_root": str(root), "comm": {"init_timeout_seconds": 0.001}, **settings}
    )
    return RunDirectory(config, "id", group_dir=group_dir, reruns=reruns)


def entered(root: Path, group_dir: str | None = None, **settings: Any) -> RunDirectory:
    taken = chosen(root, group_dir, **settings)
    taken.enter()
    return taken


def log(taken: RunDirectory, part: str = "") -> None:
    (taken.dir / part).mkdir(exist_ok=True)
    (taken.dir / part / "metrics.jsonl").write_text('{"step": 1}\n')


def test_the_replica_groups_of_one_job_share_a_directory_and_the_next_job_has_another(
    tmp_path: Path,
) -> None:
    earlier = entered(tmp_path)
    log(earlier)
    earlier.release()
    first = entered(tmp_path, "ft-replica-0")
    log(first, "ft-replica-0")
    second = entered(tmp_path, "ft-replica-1")  # it starts when the first has logged already
    log(second, "ft-replica-1")
    assert first.dir == second.dir == tmp_path / "lin" / "id-2"
    second.release()  # killed, and back
    again = entered(tmp_path, "ft-replica-1")
    assert again.dir == first.dir
    first.release()
    again.release()
    assert entered(tmp_path, "ft-replica-0").dir == tmp_path / "lin" / "id-3"


def test_without_locks_each_start_makes_a_directory_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", without_locks)
    monkeypatch.setattr(locks, "_warned_of", set())
    # The first has written nothing yet, and nothing tells that it is about to.
    first, second = entered(tmp_path), entered(tmp_path)
    assert [first.dir.name, second.dir.name] == ["id", "id-2"]


def test_directory_trained_in_by_another_before_the_lock_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the making of a directory and its lock another start may take it over, train, and end."""
    make = RunDirectory.make

    def slow(self: RunDirectory, directory: Path) -> bool:
        made = make(self, directory)
        monkeypatch.setattr(RunDirectory, "make", make)
        other = entered(tmp_path)
        assert other.dir == directory
        log(other)
        other.release()
        return made

    monkeypatch.setattr(RunDirectory, "make", slow)
    assert entered(tmp_path).dir == tmp_path / "lin" / "id-2"


def test_repeated_cell_takes_the_next_free_name_after_a_named_directory(tmp_path: Path) -> None:
    named = str(tmp_path / "run")
    first = entered(tmp_path, reruns=True, dir=named)
    assert first.dir == tmp_path / "run" and first.notice is None
    log(first)
    second = entered(tmp_path, reruns=True, dir=named)
    assert second.dir == tmp_path / "run-2" and second.notice is not None and named in second.notice
    # An empty one that another runner has is in use too.
    assert chosen(tmp_path, reruns=True, dir=named).dir == tmp_path / "run-3"


def test_resuming_cell_takes_over_from_the_runner_of_the_cell_before(tmp_path: Path) -> None:
    asked = {"dir": str(tmp_path / "run"), "auto_resume": True}
    first, second = (chosen(tmp_path, reruns=True, **asked) for _ in range(2))
    first.enter()
    log(first)
    first.confirm()
    second.enter()
    second.confirm()
    with pytest.raises(RunInUseError, match="an earlier one of this notebook"):
        first.confirm()
    other = chosen(tmp_path, **asked)
    with pytest.raises(RunInUseError, match="close the runner that has it first"):
        other.enter()
    # The earlier one gives up nothing that is not its own any more.
    first.release()
    second.confirm()
    second.release()


def test_run_set_to_look_only_in_init_takes_no_lock(tmp_path: Path) -> None:
    writer = entered(tmp_path)
    log(writer)
    looks = chosen(tmp_path, auto_resume=True)
    looks._config.checkpoint.load_only = True  # as `__init__` of a runner may, after the choice
    looks.enter()
    assert looks.dir == writer.dir
    writer.confirm()

"""The folder of compiled code: what is used of it, what is removed, and what is said."""

from __future__ import annotations

import os
import pwd
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forked import child
from support.patience import until
from support.toys import Small
from torch import nn

from danling.distributed import LocalDomain
from danling.graph.artifacts import ArtifactDirectory, _has_own_cache


def folder(root: Path, *, signed: bool = False) -> ArtifactDirectory:
    artifacts = ArtifactDirectory(root / "code", signed=signed, world=LocalDomain(), leads=True)
    artifacts.open()
    return artifacts


def filled(root: Path, *, signed: bool = False) -> Path:
    """Leave a folder as a run does that has compiled two things."""
    artifacts = folder(root, signed=signed)
    assert not artifacts.is_warm
    (artifacts.path / "ab").mkdir()
    (artifacts.path / "ab" / "kernel.so").write_bytes(b"code")
    (artifacts.path / "entry").write_bytes(b"graph")
    artifacts.close()
    return artifacts.path


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def files(path: Path) -> set[str]:
    return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}


FILLED = {"ab/kernel.so", "entry", "manifest.json"}


def test_what_was_listed_is_used_again_and_what_a_killed_run_has_left_is_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = filled(tmp_path)
    (path / "ab" / "half.so").write_bytes(b"ha")
    artifacts = folder(tmp_path)
    assert artifacts.is_warm and files(path) == FILLED and said(caplog) == []
    artifacts.close()


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing", "manifest", "outside"])
def test_damage_is_said_once_and_everything_goes(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = filled(tmp_path)
    kernel = path / "ab" / "kernel.so"
    if damage in ("flipped", "truncated"):
        kernel.write_bytes(b"codf" if damage == "flipped" else b"co")
    elif damage == "manifest":
        (path / "manifest.json").write_text("{")
    else:
        kernel.unlink()
    if damage == "outside":
        (tmp_path / "elsewhere").write_bytes(b"code")
        kernel.symlink_to(tmp_path / "elsewhere")
    artifacts = folder(tmp_path)
    (message,) = said(caplog)
    assert "not as it was written" in message and not artifacts.is_warm and not files(path)
    artifacts.close()


@pytest.mark.parametrize("closed_first", [True, False])
def test_two_runs_share_a_folder_and_one_is_killed(
    closed_first: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The other one lists what both have compiled if it closes last, and nothing while the killed one has the folder."""
    path = filled(tmp_path)

    def compile_until_killed() -> None:
        artifacts = folder(tmp_path)
        (artifacts.path / "of_the_killed.so").write_bytes(b"code")
        (tmp_path / "compiled").touch()
        time.sleep(60)

    with child(compile_until_killed):
        until((tmp_path / "compiled").exists)
        other = folder(tmp_path)
        (path / "of_the_other.so").write_bytes(b"code")
        if closed_first:
            other.close()
    other.close()
    again = folder(tmp_path)
    assert again.is_warm and said(caplog) == []
    assert files(path) == (FILLED if closed_first else FILLED | {"of_the_killed.so", "of_the_other.so"})
    again.close()


def test_nothing_is_removed_beneath_another_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = filled(tmp_path)
    first = folder(tmp_path)
    (path / "ab" / "under_way.so").write_bytes(b"un")
    second = folder(tmp_path)
    assert second.is_warm and (path / "ab" / "under_way.so").exists()
    second.close()
    (path / "entry").write_bytes(b"grapf")
    third = folder(tmp_path)
    third.use()
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") != str(path)
    assert len(said(caplog)) == 1 and (path / "ab" / "under_way.so").exists()
    third.close()
    first.close()


def test_the_last_process_lists_what_all_have_compiled(tmp_path: Path) -> None:
    path = filled(tmp_path)
    first, last = folder(tmp_path), folder(tmp_path)
    (path / "further.so").write_bytes(b"more")
    first.close()
    assert "further.so" not in (path / "manifest.json").read_text()
    last.close()
    folder(tmp_path).close()
    assert files(path) == FILLED | {"further.so"}


def test_a_directory_that_cannot_be_made_is_said_and_nothing_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    artifacts = folder(tmp_path / "file")
    artifacts.use()
    artifacts.seal()
    artifacts.close()
    assert len(said(caplog)) == 1 and "can be written to" in said(caplog)[0]


def test_the_last_one_used_has_the_compiler_and_the_environment_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    first, second = folder(tmp_path), folder(tmp_path / "other")
    for artifacts in (first, second, first):
        artifacts.use()
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(artifacts.path)
        os.environ["TRITON_CACHE_DIR"] = "the compiler's"
    second.close()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(first.path)
    first.close()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ and os.environ["TRITON_CACHE_DIR"] == "mine"


def test_code_that_another_user_has_compiled_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "me"))
    path = filled(tmp_path, signed=True)
    assert (tmp_path / "me" / "danling" / "key").stat().st_mode & 0o077 == 0
    mine = folder(tmp_path, signed=True)
    assert mine.is_warm and said(caplog) == []
    mine.close()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "stranger"))
    foreign = folder(tmp_path, signed=True)
    assert not foreign.is_warm and not files(path) and len(said(caplog)) == 1
    foreign.close()


def test_a_user_without_a_name_and_a_home_keeps_nothing_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container with a user of another number; there TORCHINDUCTOR_CACHE_DIR is set, for which torch finds no default."""

    def unknown(*_: object) -> str:
        raise KeyError("getpwuid(): uid not found: 1234")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    assert _has_own_cache()
    artifacts = folder(tmp_path, signed=True)
    artifacts.use()
    artifacts.close()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "torch") and len(said(caplog)) == 1


def config(root: Path, **compile: Any) -> dict[str, Any]:
    section = {"enable": True, "backend": "eager", "precompile_artifact_dir": str(root / "shared"), **compile}
    return {"steps": 1, "dir": str(root / "run"), "compile": section, "optim": {"type": "sgd", "lr": 0.1}}


def test_a_loop_by_hand_keeps_its_code_too(tmp_path: Path) -> None:
    with Small(config(tmp_path)) as runner:
        runner.train_step((torch.ones(2, 4), torch.tensor([0, 1])))
        runner.step()
    assert len([*(tmp_path / "shared").glob("*/manifest.json")]) == 1


class Other(Small):
    """Another program, whose model and loss may differ."""

    def __init__(self, config: Any, **components: Any) -> None:
        super().__init__(config)
        self.__dict__.update(components)


def test_the_folder_is_named_after_everything_that_code_depends_on(tmp_path: Path) -> None:
    class Linear(nn.Linear):
        pass

    def name(settings: Any = None, **components: Any) -> str:
        with Other(config(tmp_path, **settings or {}), **components) as runner:
            assert runner.compilation is not None and runner.compilation.artifacts is not None
            return runner.compilation.artifacts.path.name

    others = [
        name(model=nn.Linear(4, 3)),
        name(model=nn.Linear(4, 2).double()),
        name(model=Linear(4, 2)),
        name(criterion=nn.MSELoss()),
        name({"dynamic": True}),
    ]
    assert name() == name() and len({name(), *others}) == len(others) + 1

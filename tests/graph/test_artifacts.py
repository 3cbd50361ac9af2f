"""The file of compiled code: what of it is used, what is packed into it, and what is logged."""

from __future__ import annotations

import os
import pwd
import tempfile
import time
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from support.patience import until
from support.processes import child
from support.toys import Small
from torch import nn

from danling.distributed import LocalDomain
from danling.graph.artifacts import Artifacts, _has_own_cache


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have the key and private folders in the directory of the test; return where the latter are."""
    private = tmp_path / "private"
    private.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(private))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "me"))
    return private


def opened(root: Path, *, signed: bool = True, name: str = "code") -> Artifacts:
    artifacts = Artifacts(root / "compiled" / name, signed=signed, world=LocalDomain(), leads=True)
    artifacts.open()
    return artifacts


def put(artifacts: Artifacts, name: str, content: bytes = b"code") -> None:
    assert artifacts.folder is not None
    (artifacts.folder / name).parent.mkdir(exist_ok=True)
    (artifacts.folder / name).write_bytes(content)


def filled(root: Path, *, signed: bool = True) -> Path:
    """Leave a file as a run does that has compiled two things."""
    artifacts = opened(root, signed=signed)
    assert not artifacts.is_warm
    put(artifacts, "ab/kernel.so")
    put(artifacts, "entry", b"graph")
    put(artifacts, "entry.lock")
    artifacts.close()
    return artifacts.path


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def unpacked(artifacts: Artifacts) -> set[str]:
    assert artifacts.folder is not None
    return {
        str(file.relative_to(artifacts.folder))
        for file in artifacts.folder.rglob("*")
        if file.is_file()
    }


def packed(path: Path) -> set[str]:
    with ZipFile(path) as archive:
        return set(archive.namelist())


FILLED = {"ab/kernel.so", "entry"}


@pytest.mark.parametrize("signed", [True, False])
def test_packed_code_is_used_again_and_nothing_is_left_of_the_private_folder(
    signed: bool, tmp_path: Path, places: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = filled(tmp_path, signed=signed)
    written = path.stat()
    artifacts = opened(tmp_path, signed=signed)
    assert artifacts.is_warm and unpacked(artifacts) == FILLED and warnings(caplog) == []
    assert artifacts.folder is not None and artifacts.folder.stat().st_mode & 0o777 == 0o700
    assert (artifacts.folder / "ab" / "kernel.so").read_bytes() == b"code"
    artifacts.seal()
    artifacts.close()
    artifacts.close()
    assert not list(places.iterdir()) and [file.name for file in path.parent.iterdir()] == ["code"]
    # Nothing new was compiled: nothing is written.
    assert path.stat().st_ino == written.st_ino and path.stat().st_mtime_ns == written.st_mtime_ns


def test_the_private_folder_of_a_killed_process_is_removed(tmp_path: Path, places: Path) -> None:
    def compile_until_killed() -> None:
        artifacts = opened(tmp_path)
        put(artifacts, "half.so")
        (tmp_path / "compiles").touch()
        time.sleep(60)

    with child(compile_until_killed):
        until((tmp_path / "compiles").exists)
        (theirs,) = places.iterdir()
        own = opened(tmp_path)
        assert theirs.is_dir() and not own.is_warm
        own.close()
    opened(tmp_path).close()
    assert not list(places.iterdir())


def test_two_runs_add_to_one_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = filled(tmp_path, signed=False)
    first, second = opened(tmp_path, signed=False), opened(tmp_path, signed=False)
    put(first, "first.so")
    put(second, "second.so")
    first.close()
    assert packed(path) == FILLED | {"first.so"}
    second.close()
    assert packed(path) == FILLED | {"first.so", "second.so"} and warnings(caplog) == []


class OneOfTwo(LocalDomain):
    """A rank that meets the leader of its machine, whose folder is known."""

    def __init__(self, leader: Artifacts) -> None:
        super().__init__()
        self.leader = leader

    def gather_objects(self, value: Any) -> list[Any]:
        about = os.lstat(str(self.leader.folder))
        return [(value[0], (str(self.leader.folder), about.st_dev, about.st_ino)), value]


def test_the_ranks_of_a_machine_share_a_folder_and_the_last_one_packs_it(
    tmp_path: Path, places: Path
) -> None:
    leader = opened(tmp_path)
    rank = Artifacts(leader.path, signed=True, world=OneOfTwo(leader), leads=False)
    rank.open()
    assert rank.folder == leader.folder
    put(leader, "of_leader.so")
    leader.close()
    put(rank, "of_rank.so")
    assert not leader.path.exists()
    rank.close()
    assert packed(leader.path) == {"of_leader.so", "of_rank.so"} and not list(places.iterdir())


def test_failed_creation_of_a_directory_is_logged_and_nothing_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "compiled").touch()
    artifacts = opened(tmp_path, signed=False)
    artifacts.use()
    artifacts.seal()
    artifacts.close()
    assert len(warnings(caplog)) == 1 and "can be written to" in warnings(caplog)[0]


def test_the_last_one_used_has_the_compiler_and_the_environment_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    first, second = opened(tmp_path), opened(tmp_path / "other")
    for artifacts in (first, second, first):
        artifacts.use()
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(artifacts.folder)
        os.environ["TRITON_CACHE_DIR"] = "the compiler's"
    second.close()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(first.folder)
    first.close()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ and os.environ["TRITON_CACHE_DIR"] == "mine"


def test_a_user_without_a_name_and_a_home_keeps_nothing_and_the_run_continues(
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
    artifacts = opened(tmp_path)
    artifacts.use()
    put(artifacts, "kernel.so")
    artifacts.close()
    assert (
        os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "torch")
        and len(warnings(caplog)) == 1
    )
    assert not (tmp_path / "compiled" / "code").exists()


def config(root: Path, **compile: Any) -> dict[str, Any]:
    section = {
        "enable": True,
        "backend": "eager",
        "precompile_artifact_dir": str(root / "shared"),
        **compile,
    }
    return {
        "steps": 1,
        "dir": str(root / "run"),
        "compile": section,
        "optim": {"type": "sgd", "lr": 0.1},
    }


def test_a_loop_by_hand_keeps_its_code_too(tmp_path: Path) -> None:
    with Small(config(tmp_path)) as runner:
        runner.train_step((torch.ones(2, 4), torch.tensor([0, 1])))
        assert runner.compilation is not None and runner.compilation.artifacts is not None
        put(runner.compilation.artifacts, "kernel.so")
        runner.step()
    (path,) = (tmp_path / "shared").iterdir()
    assert packed(path) == {"kernel.so"}


class Other(Small):
    """Another program, whose model and loss may differ."""

    def __init__(self, config: Any, **components: Any) -> None:
        super().__init__(config)
        self.__dict__.update(components)


def test_folder_is_named_after_all_dependencies_of_the_code(tmp_path: Path) -> None:
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

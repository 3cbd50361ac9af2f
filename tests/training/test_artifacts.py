"""The folder of compiled code: what is used of it, what is removed, and what is said."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest
import torch
from support.toys import Small

from danling.training.artifacts import ArtifactDirectory, _has_own_cache, digest_of, fingerprint

PARTS = {"torch": "2.13", "device": "x86_64", "model": "aa", "loss": "bb", "compile": "cc", "policy": "default-1"}


def folder(root: Path, **changes: str) -> ArtifactDirectory:
    return ArtifactDirectory(root, {**PARTS, **changes}, title="budget-0.5")


def filled(root: Path) -> Path:
    """Leave a folder as a run does that has compiled two things."""
    artifacts = folder(root)
    artifacts.open()
    (artifacts.path / "ab").mkdir()
    (artifacts.path / "ab" / "kernel.so").write_bytes(b"code")
    (artifacts.path / "entry").write_bytes(b"graph")
    artifacts.seal(everything=True)
    artifacts.close()
    return artifacts.path


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def files(path: Path) -> set[str]:
    return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}


def test_what_was_sealed_is_used_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = filled(tmp_path)
    before = files(path)
    artifacts = folder(tmp_path)
    artifacts.open()
    assert artifacts.is_warm and files(path) == before and said(caplog) == []
    artifacts.close()


def test_a_new_directory_is_no_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    artifacts = folder(tmp_path / "new")
    artifacts.open()
    assert not artifacts.is_warm and artifacts.path.is_dir() and said(caplog) == []
    artifacts.close()


def test_a_miss_says_what_has_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    filled(tmp_path)
    artifacts = folder(tmp_path, model="other", policy="recompute-1")
    artifacts.open()
    (message,) = said(caplog)
    assert "another model, policy" in message and not artifacts.is_warm
    artifacts.close()


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing", "manifest", "outside"])
def test_damage_is_said_once_and_everything_goes(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = filled(tmp_path)
    kernel = path / "ab" / "kernel.so"
    if damage == "flipped":
        kernel.write_bytes(b"codf")
    elif damage == "truncated":
        kernel.write_bytes(b"co")
    elif damage == "missing":
        kernel.unlink()
    elif damage == "manifest":
        (path / "manifest.json").write_text("{")
    else:
        (tmp_path / "elsewhere").write_bytes(b"code")
        kernel.unlink()
        kernel.symlink_to(tmp_path / "elsewhere")
    artifacts = folder(tmp_path)
    artifacts.open()
    (message,) = said(caplog)
    assert "not as it was written" in message and not artifacts.is_warm
    assert files(path) == {"fingerprint.json"}
    artifacts.close()


def test_what_a_killed_run_has_left_is_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = filled(tmp_path)
    before = files(path)
    (path / "ab" / "half.so").write_bytes(b"ha")
    artifacts = folder(tmp_path)
    artifacts.open()
    assert artifacts.is_warm and files(path) == before and said(caplog) == []
    artifacts.close()


def test_nothing_is_removed_beneath_another_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = filled(tmp_path)
    first, second = folder(tmp_path), folder(tmp_path)
    first.open()
    (path / "ab" / "under_way.so").write_bytes(b"un")
    second.open()
    assert second.is_warm and (path / "ab" / "under_way.so").exists()
    second.close()
    (path / "entry").write_bytes(b"grapf")
    third = folder(tmp_path)
    third.open()
    third.use()
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") != str(path)
    assert len(said(caplog)) == 1 and (path / "ab" / "under_way.so").exists()
    for artifacts in (first, third):
        artifacts.close()


def test_a_library_that_this_process_has_not_loaded_is_not_listed_while_others_compile(tmp_path: Path) -> None:
    path = filled(tmp_path)
    artifacts = folder(tmp_path)
    artifacts.open()
    (path / "half.so").write_bytes(b"ha")
    (path / "further").write_bytes(b"graph")
    artifacts.seal(everything=False)
    artifacts.close()
    again = folder(tmp_path)
    again.open()
    assert files(path) == {"ab/kernel.so", "entry", "further", "fingerprint.json", "manifest.json"}
    again.close()


def test_a_directory_that_cannot_be_made_is_said_and_nothing_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    artifacts = folder(tmp_path / "file" / "code")
    artifacts.open()
    artifacts.use()
    artifacts.seal(everything=True)
    artifacts.close()
    assert len(said(caplog)) == 1 and "can be written to" in said(caplog)[0]


def test_the_last_one_used_has_the_compiler_and_the_environment_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    first, second = folder(tmp_path), folder(tmp_path, model="other")
    for artifacts in (first, second):
        artifacts.open()
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
    def opened(user: str) -> ArtifactDirectory:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / user))
        artifacts = ArtifactDirectory(tmp_path / "run", PARTS, title="modules", signed=True)
        artifacts.open()
        return artifacts

    first = opened("me")
    (first.path / "kernel.so").write_bytes(b"code")
    first.seal(everything=True)
    first.close()
    assert (tmp_path / "me" / "danling" / "key").stat().st_mode & 0o077 == 0
    mine = opened("me")
    assert mine.is_warm and said(caplog) == []
    mine.close()
    foreign = opened("stranger")
    assert not foreign.is_warm and not (foreign.path / "kernel.so").exists()
    assert len(said(caplog)) == 1
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
    artifacts = ArtifactDirectory(tmp_path / "run", PARTS, title="modules", signed=True)
    artifacts.open()
    artifacts.use()
    artifacts.close()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "torch") and len(said(caplog)) == 1


def test_a_loop_by_hand_keeps_its_code_too(tmp_path: Path) -> None:
    compiling = {"enable": True, "backend": "eager", "precompile_artifact_dir": str(tmp_path / "shared")}
    config = {"steps": 1, "dir": str(tmp_path / "run"), "compile": compiling, "optim": {"type": "sgd", "lr": 0.1}}
    with Small(config) as runner:
        runner.train_step((torch.ones(2, 4), torch.tensor([0, 1])))
        runner.step()
    (listed,) = (tmp_path / "shared").glob("*/manifest.json")
    assert listed.parent.name.startswith("modules-")


def test_the_folder_is_named_after_everything_that_code_depends_on() -> None:
    def parts(**changes: object) -> dict[str, str]:
        given = {"loss": [torch.nn.CrossEntropyLoss], "settings": {"mode": None}, "policy": "default-1", **changes}
        model = given.pop("model", torch.nn.Linear(2, 2))
        return fingerprint(model, device=torch.device("cpu"), **given)  # type: ignore[arg-type]

    class Linear(torch.nn.Linear):
        pass

    same = [parts(), parts()]
    others = [
        parts(model=torch.nn.Linear(2, 3)),
        parts(model=torch.nn.Linear(2, 2).double()),
        parts(model=Linear(2, 2)),
        parts(loss=[torch.nn.MSELoss]),
        parts(settings={"mode": "max-autotune"}),
        parts(policy="default-2"),
    ]
    assert digest_of(same[0]) == digest_of(same[1])
    assert len({digest_of(each) for each in (same[0], *others)}) == len(others) + 1
    assert torch.__version__ in same[0]["torch"]

"""The identity of the code, read from real repositories."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from danling.workspace import CodeIdentity


def git(where: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(where), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True).stdout.decode()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    where = tmp_path / "repository"
    (where / "package").mkdir(parents=True)
    (where / "train.py").write_text("print('hello')\n")
    (where / "package" / "model.py").write_text("layers = 2\n")
    git(where, "init", "-q", "-b", "main")
    git(where, "add", ".")
    git(where, "commit", "-q", "-m", "first")
    return where


@pytest.mark.parametrize("staged", [False, True])
def test_dirty_tree_carries_the_hash_of_its_diff(repository: Path, staged: bool) -> None:
    clean = CodeIdentity.of_directory(repository).code_id
    (repository / "train.py").write_text("print('changed')\n")
    if staged:
        git(repository, "add", ".")
    identity = CodeIdentity.of_directory(repository)
    assert identity.dirty
    assert identity.code_id == f"{clean}-d{identity.diff_sha}"
    assert len(identity.diff_sha or "") == 10
    assert b"+print('changed')" in identity.diff


def test_the_same_change_has_the_same_identity_from_any_directory_and_under_any_configuration(
    repository: Path,
) -> None:
    (repository / "train.py").write_text("print('changed')\n")
    before = CodeIdentity.of_directory(repository)
    changes = "diff.noprefix=true diff.algorithm=patience diff.context=9 diff.relative=true color.ui=always core.abbrev=20"
    for change in changes.split():
        git(repository, "config", *change.split("="))
    assert CodeIdentity.of_directory(repository).code_id == before.code_id
    assert CodeIdentity.of_directory(repository / "package").code_id == before.code_id


def test_the_diff_restores_the_tree_bytes_and_binaries_included(
    repository: Path, tmp_path: Path
) -> None:
    (repository / "train.py").write_bytes(b"caf\xe9 = '\xff'\r\n")
    (repository / "blob.bin").write_bytes(bytes(range(256)))
    git(repository, "add", "blob.bin")
    identity = CodeIdentity.of_directory(repository)
    patch = tmp_path / "git.diff"
    patch.write_bytes(identity.diff)
    copy = tmp_path / "copy"
    git(tmp_path, "clone", "-q", str(repository), str(copy))
    git(copy, "apply", str(patch))
    assert (copy / "train.py").read_bytes() == b"caf\xe9 = '\xff'\r\n"
    assert (copy / "blob.bin").read_bytes() == bytes(range(256))


def test_untracked_files_are_named_but_do_not_count(repository: Path) -> None:
    clean = CodeIdentity.of_directory(repository).code_id
    (repository / "notes.txt").write_text("not in git\n")
    (repository / "experiments").mkdir()
    (repository / "experiments" / "results.json").write_text("{}\n")
    (repository / "ignored.txt").write_text("\n")
    (repository / ".git" / "info" / "exclude").write_text("ignored.txt\n")
    identity = CodeIdentity.of_directory(repository / "package")
    assert identity.code_id == clean
    assert not identity.dirty
    assert identity.untracked == ("experiments/", "notes.txt")


def test_no_repository_and_no_commit_give_no_identity(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert CodeIdentity.of_directory(tmp_path).code_id is None
    git(tmp_path, "init", "-q")
    assert CodeIdentity.of_directory(tmp_path) == CodeIdentity()
    assert capfd.readouterr() == ("", "")

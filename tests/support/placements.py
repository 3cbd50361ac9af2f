"""Links, pipes, devices, hard links, foreign owners and enormous files in each place of a run, a store, a stream and a compiled folder."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from random import Random

Placement = Callable[[Path, Path, Random], object]
"""Puts something at a free path; the second path is a directory outside, which nothing may touch."""

FOREIGN = 65534


def _socket(path: Path, outside: Path, random: Random) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _huge(path: Path, outside: Path, random: Random) -> None:
    path.touch()
    os.truncate(path, random.choice((3 << 30, 1 << 38)))


def _directory(path: Path, outside: Path, random: Random) -> None:
    path.mkdir()
    if random.random() < 0.5:
        (path / "file").write_text("something")


def _foreign(path: Path, outside: Path, random: Random) -> None:
    path.write_text("another user's")
    if os.geteuid() == 0:
        os.chown(path, FOREIGN, FOREIGN)
    path.chmod(random.choice((0, 0o600, 0o666)))


PLACEMENTS: dict[str, Placement] = {
    "link to a file": lambda path, outside, _: path.symlink_to(outside / "file.txt"),
    "link to a directory": lambda path, outside, _: path.symlink_to(outside),
    "dangling link": lambda path, outside, _: path.symlink_to(outside / "new"),
    "link to itself": lambda path, outside, _: path.symlink_to(path.name),
    "link upwards": lambda path, outside, _: path.symlink_to("../.."),
    "link to a device": lambda path, _, random: path.symlink_to(
        random.choice(("/dev/zero", "/dev/null", "/dev/full"))
    ),
    "pipe": lambda path, *_: os.mkfifo(path),
    "socket": _socket,
    "hard link": lambda path, outside, _: os.link(outside / "file.txt", path),
    "enormous file": _huge,
    "directory": _directory,
    "foreign file": _foreign,
}

NEW_NAMES = {
    "run": (
        ".lock", ".metrics.jsonl.tmp", ".results.json.tmp", "digests.jsonl", "streams.json", "heartbeats", "profiles", "compiled",
        "tensorboard", "wandb", "results.json", "latest.json", "best.json", "metadata/run.json", "metadata/.git.yaml.abcdefgh.tmp",
        "metadata/git.diff", "checkpoints/.staged-0123", "checkpoints/.deleting-ckpt-s000000000004", "checkpoints/.writing-host-1",
        "checkpoints/.uploading-0", "checkpoints/ckpt-s000000000004.pth.sha256.next", "checkpoints/latest", "checkpoints/targets",
        "checkpoints/model.pth", "checkpoints/latest.pth", "progress.json",
    ),
    "stream": ("store/usage.json", "store/lock", "store/writing", "store/writing/0.lock", "store/objects/b.safetensors", "log/lock",
               "log/committed.json", "log/owner.json", "log/trainer.lock", "log/committed.lock", "log/log.jsonl", "log.sqlite-journal",
               "log.sqlite.owner.json", "log.sqlite.trainer.lock"),
    "compiled": ("run/compiled", "run/compiled/code", "run/compiled/code.lock", "run/compiled/.code.abcdefgh.tmp", "me/danling/key",
                 "me/danling", "run/compiled/code/fxgraph"),
}  # fmt: skip
"""Names that a run, a stream or a folder of compiled code may come to have."""

MAY_BE_LINKS = ("checkpoints", "store", "log", "log.sqlite", "run", "me", "me/danling")
"""What users name or may replace by a link: it is written through."""


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def place(kind: str, directory: Path, outside: Path, random: Random) -> list[str]:
    """Put one or two things into places of a directory, and return which."""
    done = []
    for _ in range(random.choice((1, 1, 2))):
        there = sorted(
            str(path.relative_to(directory))
            for path in directory.rglob("*")
            if not path.is_symlink()
        )
        name = random.choice(random.choice((there, NEW_NAMES[kind])))
        what = random.choice(sorted(PLACEMENTS))
        path = directory / name
        is_allowed = name in MAY_BE_LINKS and "link" in what
        if is_allowed or not path.parent.is_dir() or path.parent.is_symlink():
            continue
        _remove(path)
        PLACEMENTS[what](path, outside, random)
        done.append(f"{what}: {name}")
    return done

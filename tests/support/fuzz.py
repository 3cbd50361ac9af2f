"""Random damage to checkpoints, each kind of it by name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

Damage = Callable[[Path, Path, Random], None]
"""Takes a file, another one of the same directory of checkpoints, and where its choices are drawn."""


def _rewrite(path: Path, content: bytes) -> None:
    # Under a new inode: names of one save are hard links.
    path.unlink()
    path.write_bytes(content)


def _flip_bit(path: Path, other: Path, random: Random) -> None:
    content = bytearray(path.read_bytes() or b"\0")
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    _rewrite(path, bytes(content))


def _flip_bit_of_all_names(path: Path, other: Path, random: Random) -> None:
    content = bytearray(path.read_bytes() or b"\0")
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    path.write_bytes(content)


def _overwrite(path: Path, other: Path, random: Random) -> None:
    content = bytearray(path.read_bytes())
    at, size = random.randrange(len(content) + 1), random.choice((1, 8, 64, 4096))
    content[at : at + size] = bytes(size) if random.random() < 0.5 else random.randbytes(size)
    _rewrite(path, bytes(content))


def _cut(path: Path, other: Path, random: Random) -> None:
    _rewrite(path, path.read_bytes()[: random.randrange(path.stat().st_size + 1)])


def _lengthen(path: Path, other: Path, random: Random) -> None:
    _rewrite(path, path.read_bytes() + random.randbytes(random.choice((1, 100, 5000))))


def _repeat_a_part(path: Path, other: Path, random: Random) -> None:
    content = path.read_bytes()
    at = random.randrange(len(content) + 1)
    _rewrite(path, content[:at] + content[max(0, at - 100) :])


def _empty(path: Path, other: Path, random: Random) -> None:
    _rewrite(path, b"")


def _huge(path: Path, other: Path, random: Random) -> None:
    _rewrite(path, path.read_bytes())
    os.truncate(path, 1 << 38)


def _remove(path: Path, other: Path, random: Random) -> None:
    path.unlink()


def _swap(path: Path, other: Path, random: Random) -> None:
    first, second = path.read_bytes(), other.read_bytes()
    _rewrite(path, second)
    _rewrite(other, first)


def _copy_over(path: Path, other: Path, random: Random) -> None:
    _rewrite(path, other.read_bytes())


def _rename(path: Path, other: Path, random: Random) -> None:
    os.replace(path, other)


def _directory(path: Path, other: Path, random: Random) -> None:
    path.unlink()
    path.mkdir()
    if random.random() < 0.5:
        (path / "file").write_text("something")


def _pipe(path: Path, other: Path, random: Random) -> None:
    path.unlink()
    os.mkfifo(path)


def _link_to_itself(path: Path, other: Path, random: Random) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _link_to_nothing(path: Path, other: Path, random: Random) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def _link_to_a_device(path: Path, other: Path, random: Random) -> None:
    path.unlink()
    path.symlink_to(random.choice(("/dev/zero", "/dev/null", "/dev/full")))


def _link_to_another(path: Path, other: Path, random: Random) -> None:
    path.unlink()
    path.symlink_to(os.path.relpath(other, path.parent))


def _hard_link_of_another(path: Path, other: Path, random: Random) -> None:
    if path != other:
        path.unlink()
        os.link(other, path)


def _no_rights(path: Path, other: Path, random: Random) -> None:
    path.chmod(0)


def _directory_lost(path: Path, other: Path, random: Random) -> None:
    if path.parent.parent.name == "targets":
        shutil.rmtree(path.parent)


def _text_changed(path: Path, other: Path, random: Random) -> None:
    content = path.read_bytes()
    digits = [index for index, byte in enumerate(content) if 48 <= byte < 58]
    if digits:
        at = random.choice(digits)
        _rewrite(path, content[:at] + str(random.randrange(10)).encode() + content[at + 1 :])


def _line_lost(path: Path, other: Path, random: Random) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    if lines:
        del lines[random.randrange(len(lines))]
    _rewrite(path, b"".join(lines))


DAMAGES: dict[str, Damage] = {
    "a bit": _flip_bit,
    "a bit of all names": _flip_bit_of_all_names,
    "a stretch": _overwrite,
    "a cut": _cut,
    "more at the end": _lengthen,
    "a part twice": _repeat_a_part,
    "emptied": _empty,
    "huge": _huge,
    "removed": _remove,
    "two swapped": _swap,
    "another's contents": _copy_over,
    "renamed": _rename,
    "a directory": _directory,
    "a named pipe": _pipe,
    "a link to itself": _link_to_itself,
    "a link to nothing": _link_to_nothing,
    "a link to a device": _link_to_a_device,
    "a link to another": _link_to_another,
    "a hard link of another": _hard_link_of_another,
    "no rights": _no_rights,
    "a directory lost": _directory_lost,
    "a digit": _text_changed,
    "a line": _line_lost,
}


def spoil(directory: Path, random: Random) -> list[str]:
    """Do one to three kinds of damage to files of a directory, and return which, with the names of the files."""
    done = []
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        files = sorted(path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())
        files = [path for path in files if path.stat().st_size < 1 << 30]
        if not files:
            break
        path, other = random.choice(files), random.choice(files)
        kind = random.choice(sorted(DAMAGES))
        DAMAGES[kind](path, other, random)
        done.append(f"{kind}: {path.relative_to(directory)} ({other.relative_to(directory)})")
    return done

"""Random damage to checkpoints, each kind of it by name; and forgeries, whose sums are right and whose contents are hostile."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch

from danling.checkpoints.manifest import HEADER

from .hostile import reseal

Change = Callable[[bytearray, Random], bytes | bytearray]
Damage = Callable[[Path, Path, Random], object]
"""Takes a file, another one of the same directory of checkpoints, and where its choices are drawn."""


def _rewrite(path: Path, content: bytes | bytearray) -> None:
    # Under a new inode: names of one save are hard links.
    path.unlink()
    path.write_bytes(content)


def _flip_bit(content: bytearray, random: Random) -> bytes | bytearray:
    content = content or bytearray(1)
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    return content


def _overwrite(content: bytearray, random: Random) -> bytes | bytearray:
    at, size = random.randrange(len(content) + 1), random.choice((1, 8, 64, 4096))
    content[at : at + size] = bytes(size) if random.random() < 0.5 else random.randbytes(size)
    return content


def _cut(content: bytearray, random: Random) -> bytes | bytearray:
    return content[: random.randrange(len(content) + 1)]


def _lengthen(content: bytearray, random: Random) -> bytes | bytearray:
    return content + random.randbytes(random.choice((1, 100, 5000)))


def _repeat_a_part(content: bytearray, random: Random) -> bytes | bytearray:
    at = random.randrange(len(content) + 1)
    return content[:at] + content[max(0, at - 100) :]


def _empty(content: bytearray, random: Random) -> bytes | bytearray:
    return b""


def _digit(content: bytearray, random: Random) -> bytes | bytearray:
    digits = [index for index, byte in enumerate(content) if 48 <= byte < 58]
    if digits:
        content[random.choice(digits)] = 48 + random.randrange(10)
    return content


def _line_lost(content: bytearray, random: Random) -> bytes | bytearray:
    lines = content.splitlines(keepends=True)
    if lines:
        del lines[random.randrange(len(lines))]
    return b"".join(lines)


CHANGES: dict[str, Change] = {
    "a bit": _flip_bit,
    "a stretch": _overwrite,
    "a cut": _cut,
    "more at the end": _lengthen,
    "a part twice": _repeat_a_part,
    "emptied": _empty,
    "a digit": _digit,
    "a line": _line_lost,
}
"""What becomes of the contents of one file."""


def _huge(path: Path, other: Path, random: Random) -> None:
    _rewrite(path, path.read_bytes())
    os.truncate(path, 1 << 38)


def _swap(path: Path, other: Path, random: Random) -> None:
    first, second = path.read_bytes(), other.read_bytes()
    _rewrite(path, second)
    _rewrite(other, first)


def _directory(path: Path, other: Path, random: Random) -> None:
    path.unlink()
    path.mkdir()
    if random.random() < 0.5:
        (path / "file").write_text("something")


def _pipe(path: Path, other: Path, random: Random) -> None:
    path.unlink()
    os.mkfifo(path)


def _link(path: Path, other: Path, random: Random) -> None:
    path.unlink()
    devices = ("/dev/zero", "/dev/null", "/dev/full")
    path.symlink_to(
        random.choice(
            (path.name, "nowhere", os.path.relpath(other, path.parent), random.choice(devices))
        )
    )


def _hard_link_of_another(path: Path, other: Path, random: Random) -> None:
    if path != other:
        path.unlink()
        os.link(other, path)


def _directory_lost(path: Path, other: Path, random: Random) -> None:
    if path.parent.parent.name == "targets":
        shutil.rmtree(path.parent)


DAMAGES: dict[str, Damage] = {
    "a bit of all names": lambda path, _, random: path.write_bytes(
        _flip_bit(bytearray(path.read_bytes()), random)
    ),
    "huge": _huge,
    "removed": lambda path, *_: path.unlink(),
    "two swapped": _swap,
    "another's contents": lambda path, other, _: _rewrite(path, other.read_bytes()),
    "renamed": lambda path, other, _: os.replace(path, other),
    "a directory": _directory,
    "a named pipe": _pipe,
    "a link": _link,
    "a hard link of another": _hard_link_of_another,
    "no rights": lambda path, *_: path.chmod(0),
    "a directory lost": _directory_lost,
}
"""What else happens to files and directories."""


def _change(kind: str, path: Path, random: Random) -> None:
    _rewrite(path, CHANGES[kind](bytearray(path.read_bytes()), random))


def spoil(directory: Path, random: Random) -> list[str]:
    """Do one to three kinds of damage to files of a directory, and return which, with the names of the files."""
    done = []
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        files = sorted(
            path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()
        )
        files = [path for path in files if path.stat().st_size < 1 << 30]
        if not files:
            break
        path, other = random.choice(files), random.choice(files)
        kind = random.choice(sorted(DAMAGES) + sorted(CHANGES))
        if kind in CHANGES:
            _change(kind, path, random)
        else:
            DAMAGES[kind](path, other, random)
        done.append(f"{kind}: {path.relative_to(directory)} ({other.relative_to(directory)})")
    return done


# Forgeries

FIGURES: tuple[Any, ...] = (
    0, -1, 1 << 40, 1 << 62, 10**400, 1.5, float("nan"), float("inf"), None, True, "", "x",
    "\x1b[2J", "9" * 401, "..", [], {}, [[]], {"a": 1},
)  # fmt: skip


def _nested(depth: int) -> Any:
    found: Any = 1
    for number in range(depth):
        found = {"a": found} if number % 2 else [found]
    return found


def _hostile_value(random: Random, victim: Path) -> Any:
    places = (str(victim), f"../../../{victim.name}", "../../..", "/dev/zero", "a\0b")
    return random.choice(
        (random.choice(FIGURES), random.choice(places), _nested(random.choice((5, 150, 900))))
    )


def _forge_in(value: Any, random: Random, victim: Path) -> Any:
    """Return nested values with one of them, anywhere in them, exchanged, left out or put under another key."""
    if isinstance(value, dict) and value and random.random() < 0.9:
        key = random.choice(list(value))
        forged = dict(value)
        how = random.random()
        if how < 0.1:
            del forged[key]
        elif how < 0.2:
            forged[random.choice((str(victim), "../x", "a.b", "\x1b[2J", "x" * 3000))] = forged.pop(
                key
            )
        else:
            forged[key] = _forge_in(value[key], random, victim)
        return forged
    if isinstance(value, (list, tuple)) and value and random.random() < 0.9:
        place = random.randrange(len(value))
        return [*value[:place], _forge_in(value[place], random, victim), *value[place + 1 :]]
    if isinstance(value, torch.Tensor) and random.random() < 0.7:
        shapes = (
            torch.zeros(()),
            torch.zeros(3, 5),
            torch.zeros(1).expand(1 << 20),
            torch.ones(value.shape, dtype=torch.complex64),
        )
        return random.choice(shapes)
    return _hostile_value(random, victim)


def _forge_file(path: Path, random: Random, victim: Path) -> None:
    forged = _forge_in(torch.load(path, weights_only=False), random, victim)
    path.unlink()
    torch.save(forged, path)


def _forge_json(path: Path, random: Random, victim: Path) -> None:
    try:
        path.write_text(json.dumps(_forge_in(json.loads(path.read_text()), random, victim)))
    except (ValueError, RecursionError):
        path.write_text("[" * 100_000)


def _forge_metadata(path: Path, random: Random, victim: Path) -> None:
    (path.parent / "index.json").unlink(missing_ok=True)
    content = bytearray(path.read_bytes())
    for _ in range(random.choice((1, 3, 30))):
        content[random.randrange(len(content))] = random.randrange(256)
    path.write_bytes(content)


def _forge_bytes(path: Path, random: Random, victim: Path) -> None:
    _change(
        random.choice(
            ("a bit", "a stretch", "a cut", "more at the end", "a part twice", "emptied")
        ),
        path,
        random,
    )


def _forge_manifest(path: Path, random: Random, victim: Path) -> None:
    """Exchange a word of a manifest: a name, a size, a digest, a number; and seal it again."""
    lines = path.read_text().splitlines()[:-1]
    at = random.randrange(len(lines))
    words = lines[at].split(" ")
    words[random.randrange(len(words))] = str(_hostile_value(random, victim)).replace("\n", " ")
    lines[at] = " ".join(words)
    _seal(path, lines)


def _name_a_victim(path: Path, name: str) -> None:
    _seal(path, [*path.read_text().splitlines()[:-1], f"# size: 3 {name}", f"{'0' * 64}  {name}"])


def _seal(path: Path, lines: list[str]) -> None:
    body = "\n".join(lines) + "\n"
    path.write_text(
        f"{body}# sha256 of the lines above: {hashlib.sha256(body.encode()).hexdigest()}\n"
    )


def _is_sums(path: Path) -> bool:
    return path.is_file() and path.name.endswith(".sha256") and path.read_text().startswith(HEADER)


def forge(directory: Path, random: Random, victim: Path) -> list[str]:
    """Put one or two hostile contents into checkpoints, with sums that are right, and return which."""
    done = []
    for _ in range(random.choice((1, 1, 2))):
        files = sorted(
            path
            for path in directory.rglob("*")
            if path.is_file() and not path.name.endswith(".sha256")
        )
        path = random.choice(files)
        how: Callable[[Path, Random, Path], None] = _forge_bytes
        if random.random() < 0.8:
            how = (
                _forge_json if path.suffix == ".json"
                else _forge_metadata if path.name == ".metadata"
                else _forge_file if path.suffix in (".pth", ".pt")
                else _forge_bytes
            )  # fmt: skip
        try:
            how(path, random, victim)
        except Exception:  # its second forgery: what lies there is no file of torch.save any more
            _forge_bytes(path, random, victim)
        done.append(f"{how.__name__[1:]}: {path.relative_to(directory)}")
    reseal(directory)
    sums = [path for path in sorted(directory.rglob("*.sha256")) if _is_sums(path)]
    if random.random() < 0.3:
        name = random.choice((str(victim), str(victim), f"../../../{victim.name}"))
        for path in sums:
            _name_a_victim(path, name)
        done.append(f"name_a_victim: {name}")
    elif sums and random.random() < 0.4:
        path = random.choice(sums)
        _forge_manifest(path, random, victim)
        done.append(f"forge_manifest: {path.relative_to(directory)}")
    return done

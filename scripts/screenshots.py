"""Make the pictures in docs/assets from runs that this script trains: `python scripts/screenshots.py` (about a minute).

`python scripts/screenshots.py --text` writes what `examples/digits.py` prints into a file into docs/guides/logging.md.

The terminal pictures are what the programs really print to a terminal of 150 columns, as SVG; the third is what `danling plot` draws.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ASSETS = ROOT / "docs" / "assets"
PAGE = ROOT / "docs" / "guides" / "logging.md"
COLUMNS = 150
RATES = ("1e-3", "1e-2", "5e-2")


def write_text() -> None:
    """Put what the example prints into the page, between its markers."""
    page = PAGE.read_text()
    with tempfile.TemporaryDirectory() as name:
        Path(name, "examples").symlink_to(ROOT / "examples")
        program = [sys.executable, "examples/digits.py", "--dir"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [*program, f"{name}/file"],
            capture_output=True,
            text=True,
            env=environment,
            cwd=name,
            check=True,
        )
        page = between(page, "file", (done.stderr + done.stdout).splitlines(), name)
    PAGE.write_text(page)


def between(page: str, marker: str, lines: Sequence[str], place: str) -> str:
    """Return a page with lines as the block behind `<!-- digits: MARKER -->`; the temporary place is named otherwise."""
    text = "\n".join(lines).replace(place, "/home/you/runs")
    block = f"<!-- digits: {marker} -->\n\n```text\n{text}\n```\n"
    found = re.subn(
        rf"<!-- digits: {marker} -->\n\n```text\n.*?```\n", lambda _: block, page, flags=re.DOTALL
    )
    assert found[1] == 1, f"no place for {marker} in {PAGE}"
    return found[0]


def main() -> None:
    """Train, print, draw."""
    if "--text" in sys.argv:
        write_text()
        return
    ASSETS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        for rate in RATES:
            command = [sys.executable, str(ROOT / "examples" / "digits.py"), "--optim.lr", rate]
            said = in_terminal(command, place)
        words = ["python examples/digits.py --optim.lr " + RATES[-1]]
        (ASSETS / "bar.svg").write_text(svg(words, screen(said, until="epoch 7")))
        danling = [sys.executable, "-m", "danling"]
        table = in_terminal([*danling, "runs", "--sort", "best", "--reverse"], place)
        (ASSETS / "runs.svg").write_text(svg(["danling runs --sort best --reverse"], screen(table)))
        drawing = ["--figure", "loss", "acc", "learning_rate", "--smooth", "0.8", "-o"]
        in_terminal([*danling, "plot", "experiments", *drawing, str(ASSETS / "curves.png")], place)


def in_terminal(command: Sequence[str], directory: Path, columns: int = COLUMNS) -> str:
    """Run a program with a terminal as its output and return what it wrote there."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=slave, stderr=slave, cwd=directory, env=environment
    ) as process:
        os.close(slave)
        parts = []
        while True:
            try:
                part = os.read(master, 65536)
            except OSError:  # Linux reports the end of the other side as an error
                break
            if not part:
                break
            parts.append(part)
    os.close(master)
    text = b"".join(parts).decode()
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}:\n{text}")
    return text


def screen(text: str, *, until: str | None = None) -> list[str]:
    """Return the lines that a terminal shows, after the bar was drawn again below `until`, or at the end."""
    lines: list[list[str]] = [[]]
    column = 0
    drawn_after = False
    for piece in re.findall(r"\r|\n|[^\r\n]+", text):
        if piece == "\r":
            column = 0
        elif piece == "\n":
            lines.append([])
            column = 0
        else:
            line = lines[-1]
            line += [" "] * (column - len(line))
            line[column : column + len(piece)] = piece
            column += len(piece)
            drawn_after = (
                until is not None
                and any(until in "".join(past) for past in lines[:-1])
                and " left |" in piece
            )
        if drawn_after:
            break
    return "\n".join("".join(line).rstrip() for line in lines).strip("\n").split("\n")


def svg(commands: Sequence[str], lines: Sequence[str]) -> str:
    """Return lines of a terminal as a picture."""
    shown = [*(f"$ {command}" for command in commands), *lines]
    width, height = 12 + 7.3 * max(map(len, shown)), 20 + 17 * len(shown)
    rows = "\n".join(
        f'<text x="10" y="{22 + 17 * i}" textLength="{7.2 * len(line):.1f}" xml:space="preserve">{escape(line)}</text>'
        for i, line in enumerate(shown)
    )
    style = (
        'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="12" fill="#e6e6e6"'
    )
    size = f'width="{width:.0f}" height="{height}" viewBox="0 0 {width:.0f} {height}"'
    box = '<rect width="100%" height="100%" rx="6" fill="#1e1e1e"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{box}\n<g {style}>\n{rows}\n</g>\n</svg>\n'


if __name__ == "__main__":
    main()

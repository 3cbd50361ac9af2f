"""Draw docs/assets/kills.svg from a real run: `python scripts/draw_kills.py` (about three minutes).

`examples/digits.py` is trained once without a break, and once more in a directory where it is killed by SIGKILL again and again and
started anew with `--auto_resume true`. The script ends with an error unless every loss, of repeated updates too, and the weights, the
optimizer and the random streams at the end are those of the run that was left alone, to the bit; then it draws both.

    python scripts/draw_kills.py --kills 20 --epochs 10 --output docs/assets/kills.svg
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "examples" / "digits.py"
WIDTH, LEFT, RIGHT = 860, 58, 842
TOP, BOTTOM, STRIP, FLOOR = 48, 282, 318, 400


@dataclass(frozen=True)
class Attempt:
    """One start of the program.

    Attributes:
        begin: Updates that were done when it began, read from its checkpoint.
        end: The last update that it made.
        losses: Training loss of each of its updates.
        killed: Whether SIGKILL ended it.
    """

    begin: int
    end: int
    losses: Mapping[int, float]
    killed: bool


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, compare, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the instants of the kills")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "assets" / "kills.svg")
    parser.add_argument("--keep", type=Path, help="a JSON file for the losses of every attempt")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        whole = attempt(place / "whole", options.epochs, until=None)
        attempts = killed_run(
            place / "killed", options.epochs, last=whole.end, kills=options.kills, seed=options.seed
        )
        compare(whole, attempts)
        compare_states(place / "whole", place / "killed")
    if options.keep is not None:
        options.keep.write_text(json.dumps([asdict(one) for one in (whole, *attempts)]))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(draw(whole, attempts))
    repeated = sum(len(one.losses) for one in attempts) - len(whole.losses)
    print(
        f"{options.output}: {options.kills} kills by SIGKILL, {whole.end} updates and {repeated} repeated ones, "
        "all losses and the state at the end equal to the bit"
    )
    return 0


def killed_run(directory: Path, epochs: int, *, last: int, kills: int, seed: int) -> list[Attempt]:
    """Start the program until it ends, and kill it at `kills` updates that are drawn from all of them."""
    draw = random.Random(seed)
    places = sorted(draw.sample(range(1, last), kills))
    made = [attempt(directory, epochs, until=step, then=draw.uniform(0.0, 0.05)) for step in places]
    return [*made, attempt(directory, epochs, until=None)]


def attempt(directory: Path, epochs: int, *, until: int | None, then: float = 0.0) -> Attempt:
    """Start the program in `directory`, and kill it `then` seconds after it made the update `until`, if there is one."""
    metrics, said = directory / "metrics.jsonl", directory.with_suffix(".txt")
    command = [
        sys.executable,
        str(PROGRAM),
        "--dir",
        str(directory),
        "--auto_resume",
        "true",
        "--log_interval",
        "1",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    before = written_at(metrics)
    with (
        said.open("w") as output,
        subprocess.Popen(
            [*command, "--epochs", str(epochs)], stdout=output, stderr=output, env=environment
        ) as process,
    ):
        if until is not None:
            # The lines of the attempt before are there until this one writes its first.
            while (
                written_at(metrics) == before or last_step(metrics) < until
            ) and process.poll() is None:
                time.sleep(0.002)
            time.sleep(then)
            process.send_signal(signal.SIGKILL)
    text = said.read_text()
    if process.returncode != (0 if until is None else -signal.SIGKILL):
        raise SystemExit(f"{command} ended with {process.returncode}:\n{text}")
    begun = re.search(r"Training from step (\d+)", text)
    assert begun is not None, text
    begin, losses = int(begun[1]), losses_of(metrics)
    return Attempt(
        begin,
        max(losses),
        {step: loss for step, loss in losses.items() if step > begin},
        until is not None,
    )


def written_at(file: Path) -> int:
    """Return when a file was written last, 0 without it."""
    return file.stat().st_mtime_ns if file.exists() else 0


def last_step(metrics: Path) -> int:
    """Return the update of the last whole line of a file that is being written, 0 without one."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - 2000, 0))
            steps = re.findall(rb'\{"step": (\d+)[^\n]*\n', file.read())
    except FileNotFoundError:
        return 0
    return int(steps[-1]) if steps else 0


def losses_of(metrics: Path) -> dict[int, float]:
    """Return the training loss of every update that was logged; the last line may be cut off."""
    lines = metrics.read_text().split("\n")[:-1]
    records = [json.loads(line) for line in lines]
    return {record["step"]: record["train/loss"] for record in records if "train/loss" in record}


def compare(whole: Attempt, attempts: Sequence[Attempt]) -> None:
    """End with an error where an update of the killed run has another loss than the run that was left alone."""
    for one in attempts:
        other = [step for step, loss in one.losses.items() if loss != whole.losses[step]]
        if other:
            raise SystemExit(f"Expected equal losses. Received: others at {other}.")
    if set().union(*(one.losses for one in attempts)) != set(whole.losses):
        raise SystemExit(
            "Expected every update to be made by one attempt at least. Received: others."
        )


def compare_states(whole: Path, killed: Path) -> None:
    """End with an error where the last checkpoints of two runs differ in anything but times, places and counts of starts."""
    import torch

    states = [
        torch.load(run / "checkpoints" / "latest.pth", weights_only=True) for run in (whole, killed)
    ]
    for name in ("model", "optimizer", "scheduler", "dataloaders"):
        check_equal(name, *(state[name] for state in states))
    for name in ("train", "rng"):
        check_equal(name, *(state["state"][name] for state in states))


def check_equal(where: str, one: Any, other: Any) -> None:
    """End with an error where two states differ in a bit."""
    import torch

    if isinstance(one, torch.Tensor):
        same = torch.equal(one, other)
    elif isinstance(one, Mapping):
        same = one.keys() == other.keys()
        for key in one:
            check_equal(f"{where}.{key}", one[key], other.get(key))
    elif isinstance(one, (list, tuple)):
        same = len(one) == len(other)
        for index, pair in enumerate(zip(one, other)):
            check_equal(f"{where}[{index}]", *pair)
    else:
        same = one == other
    if not same:
        raise SystemExit(f"Expected equal states. Received: others at {where}.")


def draw(whole: Attempt, attempts: Sequence[Attempt]) -> str:
    """Return both runs as a picture: losses above, the attempts of the killed one below."""
    last = whole.end
    kills = [one for one in attempts if one.killed]
    raw = [whole.losses[step] for step in sorted(whole.losses)]
    smooth = smoothed(raw)
    low, high = math.floor(math.log10(min(smooth))), math.ceil(math.log10(max(smooth)))

    def x(step: float) -> float:
        return LEFT + (RIGHT - LEFT) * step / last

    def y(loss: float) -> float:
        share = (math.log10(max(loss, 10.0**low)) - low) / (high - low)
        return BOTTOM - (BOTTOM - TOP) * min(max(share, 0.0), 1.0)

    def line(steps: Sequence[int], values: Sequence[float], style: str) -> str:
        points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in zip(steps, values))
        return f'<polyline points="{points}" fill="none" stroke-linejoin="round" {style}/>'

    steps = sorted(whole.losses)
    merged: dict[int, float] = {}
    for one in attempts:
        merged.update(one.losses)
    resumed = smoothed([merged[step] for step in steps])
    at = dict(zip(steps, resumed))
    parts = [
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="459" rx="8" fill="#ffffff" stroke="#d0d4dc"/>'
    ]
    for power in range(low, high + 1):
        parts.append(
            f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y(10.0**power):.1f}" y2="{y(10.0**power):.1f}" stroke="#e6e8ee"/>'
        )
        label = f"{10.0**power:g}"
        parts.append(
            f'<text x="{LEFT - 8}" y="{y(10.0**power) + 4:.1f}" text-anchor="end">{label}</text>'
        )
    for one in kills:
        parts.append(
            f'<line x1="{x(one.end):.1f}" x2="{x(one.end):.1f}" y1="{TOP}" y2="{FLOOR}" stroke="#f3c3c3"/>'
        )
    parts.append(line(steps, smooth, 'stroke="#b9c2d6" stroke-width="7" stroke-linecap="round"'))
    parts.append(line(steps, resumed, 'stroke="#3f51b5" stroke-width="1.8"'))
    parts += [cross(x(one.end), y(at[one.end])) for one in kills]
    height = (FLOOR - STRIP) / len(attempts)
    for row, one in enumerate(attempts):
        colour = "#3f51b5" if one.killed else "#2e7d32"
        top = STRIP + row * height
        width = max(x(one.end) - x(one.begin), 1.5)
        parts.append(
            f'<rect x="{x(one.begin):.1f}" y="{top:.1f}" width="{width:.1f}" height="{height - 1:.1f}" fill="{colour}"/>'
        )
    for step in range(0, last + 1, max(10 * round(last / 80), 1)):
        parts.append(f'<text x="{x(step):.1f}" y="{FLOOR + 18}" text-anchor="middle">{step}</text>')
    parts.append(
        f'<text x="{(LEFT + RIGHT) / 2:.0f}" y="{FLOOR + 36}" text-anchor="middle">update</text>'
    )
    parts.append(
        f'<text x="{LEFT}" y="{STRIP - 10}">attempts of the killed run, each from its checkpoint to its end</text>'
    )
    words = f"killed by SIGKILL {len(kills)} times" if len(kills) != 1 else "killed by SIGKILL once"
    parts += [
        f'<line x1="{LEFT}" x2="{LEFT + 26}" y1="24" y2="24" stroke="#b9c2d6" stroke-width="7" stroke-linecap="round"/>',
        f'<text x="{LEFT + 36}" y="28">loss of the run that was left alone</text>',
        f'<line x1="{LEFT + 272}" x2="{LEFT + 298}" y1="24" y2="24" stroke="#3f51b5" stroke-width="1.8"/>',
        cross(LEFT + 285, 24),
        f'<text x="{LEFT + 308}" y="28">loss of the run that was {words}</text>',
    ]
    style = 'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="13" fill="#454b5a"'
    title = f"Training loss of a run left alone and of one {words}: the curves are the same, and every update has an equal loss."
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 460" role="img" aria-label="{title}" {style}>'
    return "\n".join([head, f"<title>{title}</title>", *parts, "</svg>\n"])


def cross(x: float, y: float) -> str:
    """Return the mark of a kill."""
    return f'<path d="M{x - 4:.1f} {y - 4:.1f} l8 8 m0 -8 l-8 8" stroke="#d32f2f" stroke-width="2.2" stroke-linecap="round" fill="none"/>'


def smoothed(values: Sequence[float], weight: float = 0.95) -> list[float]:
    """Return the exponential moving average of values, with bias correction."""
    mean, shown = 0.0, []
    for count, value in enumerate(values, 1):
        mean = weight * mean + (1 - weight) * value
        shown.append(mean / (1 - weight**count))
    return shown


if __name__ == "__main__":
    raise SystemExit(main())

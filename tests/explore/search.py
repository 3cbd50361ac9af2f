"""Searches: draws programs, checks each, shrinks the first one of a search that fails, and prints it with the command
that replays it.

python -m explore.search --programs 500 --seed 7 --budget 600
python -m explore.search --replay '{"settings": {"accum_steps": 2}}'
python -m explore.search --report part1.jsonl part2.jsonl
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Flaky

from .properties import Verdict, checked
from .running import processor_seconds
from .script import class_of, render
from .spec import Program, Stack, flat
from .strategies import programs

STACKS_EVERY = 8
"""With stacks, one of so many groups of programs has them."""


class Found(AssertionError):
    """A program for which a property does not hold."""


def kind_of(stack: Stack) -> str:
    """Return the name of a stack, with the axes of a mesh."""
    axes = [
        name for name in ("replicate", "shard", "tensor", "pipeline") if getattr(stack, name) > 1
    ]
    return ".".join([stack.kind, *axes])


def features(program: Program) -> list[str]:
    """Return the names of the parts of a program, for the table of pairs."""
    settings, data, criterion = program.settings, program.data, program.criterion
    found = [f"model:{class_of(part)}" for part in flat(program.model.parts)]
    found += [
        f"dtype:{program.model.dtype}",
        f"data:{data.inputs}",
        f"source:{data.source}",
        f"form:{data.form}",
    ]
    found += [
        f"criterion:{criterion.kind}",
        f"optimizer:{program.optimizer.kind}",
        f"stack:{kind_of(program.stack)}",
    ]
    found += [f"augment:{kind}" for kind in data.augment]
    found += [f"state:{state.where}.{state.kind}" for state in program.state]
    found += [f"event:{event.kind}" for event in program.events]
    flags = {
        "sum": criterion.reduction == "sum",
        "ignore_index": criterion.ignore_index is not None,
        "class_weights": criterion.class_weights,
        "label_smoothing": criterion.label_smoothing > 0,
        "sample_weights": criterion.sample_weights,
        "tied": program.model.tied,
        "tasks": program.model.tasks,
        "lenient": program.optimizer.lenient,
        "find_unused": program.stack.find_unused,
        "per_position": program.model.per_position,
        "sampler": data.sampler is not None,
        "ragged": data.ragged,
        "nan": bool(data.nan_samples),
        "target_dtype": data.target_dtype != "int64",
        "groups": program.optimizer.groups,
        "weight_decay": program.optimizer.weight_decay > 0,
        "fused": program.optimizer.fused,
        "by_hand_optimizer": not program.optimizer.by_config,
        "epochs": settings.epochs is not None,
        "steps": settings.steps is not None,
        "global_batch": settings.global_batch_size is not None,
        "micro_batch": settings.micro_batch_size is not None,
        "accumulation": settings.accum_steps > 1,
        "clip_norm": settings.max_grad_norm is not None,
        "clip_value": settings.max_grad_value is not None,
        f"precision:{settings.precision}": settings.precision is not None,
        "skip": settings.skip_nonfinite_grad,
        "keep_last": settings.drop_last is False,
        "no_shuffle": settings.shuffle is False,
        "workers": settings.num_workers > 0,
        "keyed": settings.keyed is not None,
        "evaluates": data.val > 0,
        "patience": settings.patience is not None,
        "ema": settings.ema is not None,
        "canonical": settings.gradient_sum != "fast",
        "dcp": settings.checkpoint_backend != "auto",
        f"ranks:{program.stack.ranks}": program.stack.ranks > 1,
    }
    found += [name for name, present in flags.items() if present]
    if settings.schedule is not None:
        found.append(f"schedule:{settings.schedule.kind}")
    return sorted(set(found))


@dataclass
class Tally:
    """What a search has seen."""

    log: Path | None = None
    kinds: collections.Counter[str] = field(default_factory=collections.Counter)
    reasons: collections.Counter[str] = field(default_factory=collections.Counter)
    parts: collections.Counter[str] = field(default_factory=collections.Counter)
    pairs: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)
    warned: collections.Counter[str] = field(default_factory=collections.Counter)
    seconds: float = 0.0
    processor: float = 0.0

    def add(self, program: Program, verdict: Verdict) -> None:
        """Count a program."""
        self.kinds[verdict.kind] += 1
        self.seconds += verdict.seconds
        self.processor += verdict.processor
        if self.log is not None:
            times = {"seconds": round(verdict.seconds, 2), "processor": round(verdict.processor, 2)}
            line = {
                "kind": verdict.kind,
                "broken": verdict.broken,
                **times,
                "text": verdict.text[:300],
                "named": verdict.named,
                "program": program.to_json(),
            }
            with self.log.open("a") as file:
                file.write(json.dumps(line) + "\n")
        if verdict.kind == "refused":
            self.reasons[verdict.text.split("\n")[0][:160]] += 1
            return
        present = features(program)
        self.parts.update(present)
        self.pairs.update(itertools.combinations(present, 2))
        self.warned.update({line[:140] for line in verdict.named})

    def add_log(self, log: Path) -> None:
        """Count the programs of a log."""
        for text in log.read_text().splitlines():
            line = json.loads(text)
            program = Program.from_json(line.pop("program"))
            self.add(program, Verdict(**line))

    def report(self) -> str:
        """Return counts as text."""
        count = sum(self.kinds.values())
        lines = [
            f"{count} programs: " + ", ".join(f"{n} {kind}" for kind, n in self.kinds.most_common())
        ]
        seconds = f"{self.seconds / max(count, 1):.2f} seconds a program"
        lines.append(f"{seconds}, {self.processor / max(count, 1):.2f} of the processor")
        lines += ["", "Refusals by reason:"] + [
            f"{n:5} {reason}" for reason, n in self.reasons.most_common()
        ]
        lines += ["", "Warnings:"] + [f"{n:5} {text}" for text, n in self.warned.most_common(40)]
        lines += [
            "",
            "Parts that ran:",
            ", ".join(f"{name} {n}" for name, n in self.parts.most_common()),
        ]
        names = sorted(self.parts)
        never = [pair for pair in itertools.combinations(names, 2) if pair not in self.pairs]
        total = len(names) * (len(names) - 1) // 2
        lines += ["", f"Pairs of parts: {total - len(never)} of {total} ran together. Never:"]
        by_first: dict[str, list[str]] = {}
        for first, second in never[:4000]:
            by_first.setdefault(first, []).append(second)
        lines += [f"  {first}: {', '.join(seconds)}" for first, seconds in by_first.items()]
        return "\n".join(lines)


def replay_command(program: Program) -> str:
    """Return the command that checks a program again."""
    return f"PYTHONPATH=.:tests python -m explore.search --replay '{program.to_json()}'"


def described(program: Program, verdict: Verdict) -> str:
    """Return a finding: the script, what differs, and the command that replays it."""
    named = "".join(f"\nwarned: {line[:300]}" for line in verdict.named)
    return (
        f"{'=' * 30} {verdict.broken}\n{render(program)}\n{'-' * 30}\n{verdict.text}{named}\n{'-' * 30}\n"
        f"{replay_command(program)}\n"
    )


def search(
    count: int,
    *,
    number: int,
    budget: float,
    stacks: bool = False,
    check: Callable[[Program], Verdict] = checked,
    tally: Tally | None = None,
    shrink_seconds: float = 60.0,
    known: dict[str, Verdict] | None = None,
) -> tuple[Program, Verdict] | None:
    """Check programs until one fails, the count is reached or the budget is used up; return the smallest that fails."""
    tally = tally if tally is not None else Tally()
    known = known if known is not None else {}
    end = time.monotonic() + budget
    smallest: list[tuple[Program, Verdict]] = []
    wanted: list[str] = []

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        print_blob=False,
        phases=[Phase.generate, Phase.shrink] if shrink_seconds else [Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs(stacks))
    def body(program: Program) -> None:
        nonlocal end
        if time.monotonic() > end:
            return
        text = program.to_json()
        is_new = text not in known
        verdict = known[text] = known.get(text) or check(program)
        if not wanted and is_new:
            tally.add(program, verdict)
        if verdict.kind not in ("differs", "died") or (wanted and verdict.broken != wanted[0]):
            return
        if not wanted:
            wanted.append(verdict.broken)
            end = time.monotonic() + shrink_seconds
        smallest.append((program, verdict))
        raise Found(verdict.broken)

    with contextlib.suppress(Found, Flaky):
        body()
    return min(smallest, key=lambda found: len(found[0].to_json())) if smallest else None


def main() -> None:
    """Search, or replay a program."""
    parser = argparse.ArgumentParser(prog="python -m explore.search", description=__doc__)
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--budget", type=float, default=2400.0, help="seconds")
    parser.add_argument(
        "--stacks", action="store_true", help="draw stacks of several processes too"
    )
    parser.add_argument(
        "--stacks-every",
        type=int,
        default=STACKS_EVERY,
        metavar="N",
        help="in one of so many groups of programs",
    )
    parser.add_argument(
        "--shrink", type=float, default=60.0, help="seconds to make a finding smaller"
    )
    parser.add_argument("--replay", help="a program as JSON, or a file of one")
    parser.add_argument("--script", action="store_true", help="only print the script of --replay")
    parser.add_argument("--log", type=Path, help="file that gets a line of JSON for each program")
    parser.add_argument(
        "--report", type=Path, nargs="+", help="only print the counts of such files together"
    )
    parser.add_argument(
        "--brief", action="store_true", help="leave scripts and pairs out of the report"
    )
    options = parser.parse_args()
    if options.report:
        tally = Tally()
        for log in options.report:
            tally.add_log(log)
        print(tally.report())
        return
    from support.preloading import preload
    from support.processes import fork_server

    if options.replay:
        text = options.replay
        if os.path.exists(text):
            text = Path(text).read_text()
        program = Program.from_json(text)
        if options.script:
            print(render(program))
            return
        preload()
        fork_server()
        verdict = checked(program, timeout=300)
        print(described(program, verdict) if verdict.kind != "right" else verdict)
        sys.exit(verdict.kind in ("differs", "died"))
    print(f"seed {options.seed}", flush=True)
    preload()
    fork_server()
    tally, begun, number, failed = Tally(options.log), time.monotonic(), options.seed * 1000, False
    known: dict[str, Verdict] = {}
    while True:
        left = options.budget - (time.monotonic() - begun)
        count = options.programs - sum(tally.kinds.values())
        if left <= 0 or count <= 0:
            break
        # Few at a time: hypothesis begins each search with small programs, a tenth of all.
        chunk = min(count + 1, 9)
        found = search(
            chunk,
            number=number,
            budget=left,
            stacks=options.stacks and number % options.stacks_every == 0,
            tally=tally,
            shrink_seconds=options.shrink,
            known=known,
        )
        number += 1
        if found is not None:
            failed = True
            program, verdict = found
            print(
                f"=== {verdict.broken}\n{verdict.text}\n{program.to_json()}"
                if options.brief
                else described(*found),
                flush=True,
            )
    print(tally.report().split("\nPairs of")[0] if options.brief else tally.report())
    print(
        f"{time.monotonic() - begun:.0f} s, {processor_seconds():.0f} of the processor with those of ranks"
    )
    sys.exit(failed)


if __name__ == "__main__":
    main()

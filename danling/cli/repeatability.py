"""Which operations of this machine give other bits when they are made again, and what to set."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence

JOB = "danling.cli.repeatability_job"
REPEATS = 8
"""How often a process makes an operation. One that varies does so nearly each time; two processes make each."""

Answers = Mapping[str, Mapping[str, object]]
"""What a process said of each operation, by name: `digests` of its repetitions, or an `error`."""
Ask = Callable[[Sequence[str]], str]
"""Runs Python with these arguments and returns what it prints."""


def examine_repeatability(ask: Ask, only: Sequence[str] = ()) -> Iterator[tuple[str, str, str]]:
    """Make a program of many operations again and again, and yield name, state and detail of each.

    An operation is `ok` if its output and gradients have the same bits in every repetition of two processes; the detail says whether
    they are others with another number of threads. It `varies` if they differ, but `deterministic=true` mends or refuses it;
    otherwise it has `failed`.

    Args:
        ask: Runs Python.
        only: Names of operations; none: all.
    """
    chosen = ["--only", *only] if only else []
    devices, threads = json.loads(ask(["-m", JOB, "--describe"]))
    for device in devices:
        asked = ["-m", JOB, "--device", device, "--repeats", str(REPEATS), *chosen]
        plain = [_answers(ask(asked)) for _ in range(2)]
        fixed = _answers(ask([*asked, "--deterministic"]))
        other = 2 if threads == 1 else 1
        elsewhere = _answers(ask([*asked, "--threads", str(other)])) if device == "cpu" else {}
        for name in plain[0]:
            state, detail = verdict(
                [answers[name] for answers in plain], fixed[name], elsewhere.get(name), threads, other
            )
            yield name if len(devices) == 1 else f"{name} ({device})", state, detail


def _answers(lines: str) -> Answers:
    return {said["name"]: said for said in map(json.loads, lines.splitlines())}


def verdict(
    plain: Sequence[Mapping[str, object]],
    fixed: Mapping[str, object],
    elsewhere: Mapping[str, object] | None,
    threads: int,
    other: int,
) -> tuple[str, str]:
    """Return state and detail of one operation.

    Args:
        plain: What each process said of it.
        fixed: What was said with `deterministic=true`.
        elsewhere: What was said with another number of threads; `None` if that was not tried.
        threads: Threads of the processes.
        other: The other number of threads.
    """
    for said in plain:
        if "error" in said:
            return "absent", f"does not run here: {said['error']}"
    found = _digests(*plain)
    if len(set(found)) > 1:
        differing = len(found) - max(found.count(one) for one in set(found))
        return _varying(f"{differing} of {len(found)} repetitions have other bits", fixed)
    refused = f"; deterministic=true refuses it: {fixed['error']}" if "error" in fixed else ""
    if elsewhere is not None and set(_digests(elsewhere)) != set(found):
        return "ok", f"the same bits with {threads} threads, others with {other}: keep OMP_NUM_THREADS{refused}"
    return "ok", f"the same bits{refused}"


def _digests(*said: Mapping[str, object]) -> list[object]:
    found: list[object] = []
    for one in said:
        digests = one.get("digests", ())
        assert isinstance(digests, (list, tuple))
        found += digests
    return found


def _varying(what: str, fixed: Mapping[str, object]) -> tuple[str, str]:
    if "error" in fixed:
        return "varies", f"{what}; deterministic=true refuses it: {fixed['error']}"
    if len(set(_digests(fixed))) > 1:
        return (
            "failed",
            f"{what}, with deterministic=true too: do without this operation where runs must come back bitwise",
        )
    return "varies", f"{what}; none with deterministic=true"

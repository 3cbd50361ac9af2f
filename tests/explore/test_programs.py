"""Fixed programs of the search: what `make explore` asks of random ones, and one of them that must be found out."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from explore import properties
from explore.fixed import CHOSEN, FOUND
from explore.properties import Verdict, checked
from explore.script import render
from explore.search import Tally, described, features, replay_command, search
from explore.spec import Data, Event, Model, Optimizer, Part, Program, Settings, Stack, State
from explore.strategies import programs
from hypothesis import HealthCheck, given, settings

RIGHT = {f"chosen-{number}": text for number, text in enumerate(CHOSEN)}


@pytest.mark.parametrize("name", [*FOUND, *RIGHT])
def test_fixed_program_is_right_or_refused(name: str) -> None:
    program = Program.from_json({**FOUND, **RIGHT}[name])
    verdict = checked(program, timeout=120)
    assert verdict.kind in ("right", "refused"), described(program, verdict)


def test_chosen_programs_are_trained_and_not_refused() -> None:
    """A fixed program that is refused would show nothing."""
    verdict = checked(Program.from_json(CHOSEN[0]))
    assert verdict.kind == "right", verdict.text


@settings(
    max_examples=30,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(programs(stacks=True))
def test_drawn_program_is_the_same_after_json_and_renders_as_python(program: Program) -> None:
    assert Program.from_json(program.to_json()) == program
    compile(render(program), "program.py", "exec")
    assert features(program)


def test_script_of_a_program_runs_as_a_file(tmp_path: Path) -> None:
    program = Program(
        model=Model((Part("linear"), Part("dropout", p=0.5))),
        data=Data(val=3),
        settings=Settings(batch_size=4),
        state=(State("runner", "int"),),
    )
    file = tmp_path / "program.py"
    file.write_text(render(program, str(tmp_path / "run")))
    done = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "checkpoints" / "latest.pth").is_file()


def test_search_finds_an_update_without_clipping_and_shrinks_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The search must be able to fail: here clipping is left out, and the smallest program that shows it is small."""
    from danling.runners import torch_runner

    def nothing(self: Any, grad_norm: torch.Tensor) -> None:
        pass

    monkeypatch.setattr(torch_runner.TorchRunner, "clip_gradients", nothing)
    base = Program(optimizer=Optimizer(lr=0.5), settings=Settings(max_grad_norm=0.1))
    large = replace(
        base, model=Model((Part("linear"), Part("tanh"))), settings=replace(base.settings, epochs=2)
    )
    for program in (base, large):
        verdict = checked(program)
        assert (verdict.kind, verdict.broken) == ("differs", "reference"), verdict
    right = replace(base, settings=Settings())
    assert checked(right).kind == "right"


def test_hanging_program_is_killed_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(properties, "check", _hang)
    verdict = checked(Program(), timeout=0.5)
    assert (verdict.kind, verdict.broken) == ("died", "ends")
    assert "did not end" in verdict.text


def _hang(program: Program) -> Verdict:
    import signal

    signal.pause()
    return Verdict("right")


def test_finding_is_printed_as_a_script_with_its_replay_command() -> None:
    found: list[Program] = []

    def check(program: Program) -> Verdict:
        found.append(program)
        wrong = program.settings.accum_steps > 1
        return Verdict("differs" if wrong else "right", "off by 1", "reference" if wrong else "")

    tally = Tally()
    result = search(60, number=1, budget=60.0, check=check, tally=tally)
    assert result is not None
    program, verdict = result
    assert program.settings.accum_steps > 1
    assert len(program.to_json()) < 200, "it was not shrunk"
    text = described(program, verdict)
    assert render(program) in text
    assert replay_command(program) in text
    assert "Pairs of parts" in tally.report()


def test_search_without_a_finding_counts_refusals_by_reason() -> None:
    tally = Tally()
    result = search(
        5,
        number=2,
        budget=60.0,
        check=lambda program: Verdict("refused", "ValueError: Expected a\nat"),
        tally=tally,
    )
    assert result is None
    assert tally.reasons["ValueError: Expected a"] == sum(tally.kinds.values()) >= 5


def test_counts_of_a_log_are_those_of_its_search(tmp_path: Path) -> None:
    tally, again = Tally(tmp_path / "log.jsonl"), Tally()
    tally.add(
        Program(settings=Settings(steps=1, epochs=None)),
        Verdict("right", seconds=1.0, named=["a warning"]),
    )
    tally.add(Program(), Verdict("refused", "ValueError: Expected a\nat", seconds=2.0))
    again.add_log(tmp_path / "log.jsonl")
    assert again.report() == tally.report()
    assert again.kinds == {"right": 1, "refused": 1}


@pytest.mark.parametrize("event", ["stop", "kill"])
def test_run_on_two_processes_is_checked(event: str) -> None:
    program = Program(
        data=Data(train=8),
        settings=Settings(batch_size=2, epochs=None, steps=3),
        events=(Event(event, 1),),
        stack=Stack("ddp", ranks=2),
    )
    verdict = checked(program)
    assert verdict.kind == "right", described(program, verdict)

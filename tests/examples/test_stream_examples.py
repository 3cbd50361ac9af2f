"""Other uses of a stream as programs: short runs, and what each of them is there to show."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest


def test_a_student_comes_near_its_teacher(run_example: Callable[..., str]) -> None:
    output = run_example(
        "streams/distillation", "--steps", "150", "--evaluate_interval", "150", "--teacher.steps", "200"
    )
    teacher, student, alone = (float(found) for found in re.findall(r"test accuracy (\S+) of", output))
    assert teacher > 0.88 and student > 0.82 and student > alone, output


def test_embeddings_are_computed_once(run_example: Callable[..., str]) -> None:
    first = run_example("streams/embeddings", "--epochs", "1", "--features.images", "400")
    again = run_example("streams/embeddings", "--epochs", "1", "--features.images", "400")
    assert "\n400 embeddings were computed, 400 are there" in first
    assert "\n0 embeddings were computed, 400 are there" in again
    accuracies = [re.findall(r"test accuracy (\S+) on", output) for output in (first, again)]
    assert accuracies[0] == accuracies[1] and float(accuracies[0][0]) > 0.5


@pytest.mark.parametrize(("played", "oldest"), [("64", 3), pytest.param("16", 0, marks=pytest.mark.slow)])
def test_a_policy_learns_from_episodes_of_its_own(played: str, oldest: int, run_example: Callable[..., str]) -> None:
    output = run_example("streams/rollouts", "--steps", "150", "--rollouts.played", played)
    found = re.search(r"moves (\S+) -> (\S+), 5.1 is the shortest way", output)
    assert found is not None, output
    assert float(found[1]) > 13 and float(found[2]) < 8, output
    assert f"up to {oldest} updates ago" in output

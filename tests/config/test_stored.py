"""The configuration of a run that goes on from a stored one, without a runner."""

from __future__ import annotations

from danling.config import RunnerConfig
from danling.config.runner_config import continued


class Own(RunnerConfig):
    """A program's configuration."""

    width: int = 4


STORED = {"steps": 10, "lineage": "stored", "width": 8, "wandb": {"api_key": "theirs"}, "mine": {"depth": 2}}


def test_what_is_given_goes_over_what_is_stored() -> None:
    config = continued(STORED, {"steps": 20}, Own)
    assert isinstance(config, Own)
    assert (config.steps, config.lineage, config.width, config.mine.depth) == (20, "stored", 8, 2)
    assert continued(STORED, None, Own).steps == 10


def test_a_configuration_that_is_given_says_its_class_and_gives_what_it_changes() -> None:
    given = Own({"lineage": "given"})
    config = continued(STORED, given, RunnerConfig)
    assert isinstance(config, Own) and config is not given
    # A default of its class counts among what it changes.
    assert (config.steps, config.lineage, config.width) == (10, "given", 4)
    assert given.steps is None  # the caller's object stays as it is


def test_secrets_of_the_run_that_goes_on_are_left_out() -> None:
    config = continued({"steps": 10, "mine": 3, "token": "theirs"}, {"other": 4}, RunnerConfig)
    assert (config.mine, config.other) == (3, 4)
    assert "theirs" not in str(config.plain())

"""Settings that the environment imposes on the runs of a program, without a change of the program or of its command line.

`danling audit` and other checks start a user's own program as a child process, and have it train in a scratch directory, from a given
checkpoint, or on another layout. The program may read its settings from anywhere; so they are changed where all programs come by: a runner
puts the settings of the environment variable `DANLING_SETTINGS` over the configuration that it was given, before it checks it.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from danling.utils.plain import parse_json

if TYPE_CHECKING:
    from .runner_config import RunnerConfig

logger = logging.getLogger("danling")

VARIABLE = "DANLING_SETTINGS"
"""The environment variable: one JSON object of settings by dotted key."""

_has_ended = False


def imposed() -> dict[str, object]:
    """Return the settings that the environment imposes, empty where it imposes none."""
    text = os.environ.get(VARIABLE, "")
    try:
        settings = parse_json(text) if text else {}
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise ValueError(
            f'Expected {VARIABLE} to be a JSON object of settings, such as {{"seed": 1}}. Received: {text[:80]!r}. Unset it, or mend it.'
        )
    return settings


def impose(config: RunnerConfig) -> None:
    """Put the settings that the environment imposes over those of a configuration, and say in a warning which."""
    settings = imposed()
    if settings and _has_ended:
        logger.info("What %s asks for has been trained: the program ends where it would begin another run.", VARIABLE)
        raise SystemExit(0)
    for key, value in settings.items():
        config.set(key, value)
    if settings:
        logger.warning("%s sets %s in the place of what this program has set.", VARIABLE, ", ".join(settings))


def end_after() -> None:
    """Have a program on which settings are imposed end where it would begin another run: they are meant for one."""
    global _has_ended
    _has_ended = VARIABLE in os.environ

"""Settings that whoever starts a program imposes on its runs, without a change of the program or of its command line.

`danling audit` and other checks start a user's own program as a child process, and have it train in a scratch directory, from a given
checkpoint, or on another layout. The program may read its settings from anywhere; so they are changed where all programs come by: a runner
puts what stands in the environment variable `DANLING_SETTINGS` over the configuration that it was given, before it checks it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from danling.utils.nesting import parse_json

if TYPE_CHECKING:
    from .runner_config import RunnerConfig

logger = logging.getLogger("danling")

VARIABLE = "DANLING_SETTINGS"
"""The environment variable: one JSON object of settings by dotted key."""


def imposing(settings: Mapping[str, object]) -> dict[str, str]:
    """Return the environment variables by which a program has settings imposed on its runs.

    Args:
        settings: Plain values by key; dots reach into sections: `{"dir": "scratch", "checkpoint.interval": 10}`.
    """
    return {VARIABLE: json.dumps(dict(settings))}


def imposed(environment: Mapping[str, str] | None = None) -> dict[str, object]:
    """Return the settings that the environment imposes, empty where it imposes none.

    Args:
        environment: Variables by name; `None` takes those of this process.

    Raises:
        ValueError: If the variable is no JSON object.
    """
    text = (os.environ if environment is None else environment).get(VARIABLE, "")
    if not text:
        return {}
    try:
        settings = parse_json(text)
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise ValueError(
            f'Expected {VARIABLE} to be a JSON object of settings, such as {{"seed": 1}}. Received: {text[:80]!r}. Unset it, or mend it.'
        )
    return settings


def impose(config: RunnerConfig) -> None:
    """Put the settings that the environment imposes over those of a configuration, and say in a warning which.

    Args:
        config: It is changed.

    Raises:
        ValueError: If the variable is no JSON object, or a setting cannot be.
    """
    settings = imposed()
    for key, value in settings.items():
        config.set(key, value)
    if settings:
        logger.warning("%s sets %s in the place of what this program has set.", VARIABLE, ", ".join(settings))

"""Settings that the environment imposes on the runs of a program, without a change of the program or of its command line.

`danling audit` and other checks start a user's own program as a child process, and have it train in a scratch directory, from a given
checkpoint, or on another layout. The program may read its settings from anywhere; so they are changed where all programs come by: a runner
puts the settings of the environment variable `DANLING_SETTINGS` over the configuration that it was given, before it checks it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from danling.utils.files import read_text
from danling.utils.plain import json_text, parse_json

if TYPE_CHECKING:
    from .runner_config import RunnerConfig

logger = logging.getLogger("danling")

VARIABLE = "DANLING_SETTINGS"
"""The environment variable: one JSON object of settings by dotted key."""
VARIABLE_OF = "DANLING_SETTINGS_OF"
"""The environment variable of the path of a `MeantRun`, as JSON."""

_has_ended = False


@dataclass(frozen=True)
class MeantRun:
    """Which of the runs that a program makes the settings are meant for: the one that has these names.

    Attributes:
        names: What names it, such as its `lineage`; `None` for a key that its settings leave out.
        place: Its directory, which its settings may name in another way; `None` where it has none yet.
        others: Settings by dotted key that other runs of the program get.
        looks: Those that they get where they only look at a run, which stays where it is.
        stored: The configuration that the run was trained with; `None` where it is not compared.
        replicas: Ranks that read different samples there.
    """

    names: Mapping[str, object]
    place: str | None
    others: Mapping[str, object]
    looks: Mapping[str, object]
    stored: Mapping[str, object] | None = None
    replicas: int = 1

    def is_meant(self, config: RunnerConfig) -> bool:
        """Return whether a configuration is that of the run.

        Its other settings are not asked: a run that has kept its names may have others now, which is for its resume to judge.
        """
        return all(self._is_named(key, value, config.get(key, None)) for key, value in self.names.items())

    def _is_named(self, key: str, value: object, now: object) -> bool:
        return now == value or (key == "dir" and isinstance(now, str) and os.path.abspath(now) == self.place)

    def write(self, file: Path) -> dict[str, str]:
        """Write this to a file, and return the environment variable by which a program finds it."""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json_text(asdict(self)), encoding="utf-8")
        return {VARIABLE_OF: os.fspath(file.absolute())}


def imposing(settings: Mapping[str, object]) -> dict[str, str]:
    """Return the environment variables by which a program has settings imposed on its runs."""
    return {VARIABLE: json.dumps(dict(settings))}


def imposed(environment: Mapping[str, str] | None = None) -> dict[str, object]:
    """Return the settings that the environment imposes, empty where it imposes none."""
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
    """Put the settings that the environment imposes over those of a configuration, and say in a warning which."""
    settings, meant = imposed(), _meant_run()
    if meant is not None and _has_ended:
        logger.info(
            "What %s asks for has been trained: the program ends here, where it would begin another run.", VARIABLE
        )
        raise SystemExit(0)
    if meant is not None and not meant.is_meant(config):
        settings = dict(meant.looks if config.checkpoint.load_only else meant.others)
    for key, value in settings.items():
        config.set(key, value)
    if settings:
        logger.warning("%s sets %s in the place of what this program has set.", VARIABLE, ", ".join(settings))


def check_identity(config: RunnerConfig, *, replicas: int) -> None:
    """Refuse to train a run again with other settings than it had; nothing happens unless the environment says which run is meant."""
    meant = _meant_run()
    if meant is None or meant.stored is None or config.get("dir", None) != imposed().get("dir"):
        return
    differences = config.differences(meant.stored, stored_replicas=meant.replicas, replicas=replicas)
    if differences:
        raise ValueError(
            f"Expected the program to have the settings of the run {meant.place}. Received: {'; '.join(differences)}. Start it with "
            "the arguments that it had then."
        )


def end_after() -> None:
    """Have the program end where it would begin another run; nothing happens unless the environment says which run is meant."""
    global _has_ended
    _has_ended = VARIABLE_OF in os.environ


def _meant_run() -> MeantRun | None:
    file = os.environ.get(VARIABLE_OF)
    if not file:
        return None
    found: dict[str, Any] = parse_json(read_text(file))
    return MeantRun(**found)

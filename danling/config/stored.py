"""The configuration of a run that goes on from the one that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from danling.utils.secrets import without_secrets

from .runner_config import RunnerConfig


def continued(
    stored: Mapping[str, Any], given: Mapping[str, object] | None, config_class: type[RunnerConfig]
) -> RunnerConfig:
    """Return the configuration of a run that goes on: the stored one, with what the caller gives over it.

    Secrets in the stored one, which an older version wrote down, are those of the run that made it, and are left out.

    Args:
        stored: What is obeyed of the stored configuration.
        given: What overrides it.
        config_class: Class of the configuration, unless `given` is a configuration itself, whose class it then has.
    """
    known = without_secrets(stored, stored.get("secret_keys") or ())
    if isinstance(given, RunnerConfig):
        own = deepcopy(given)
        own.merge(known)
    else:
        own = config_class(known)
    own.claim(known)  # the run that is gone on with has trained with them
    own.merge(given.changed() if isinstance(given, RunnerConfig) else dict(given or {}))
    return own

"""Older keys of the configuration, and the names that torch and other trainers give a precision."""

from __future__ import annotations

from danling.utils.suggest import did_you_mean
from danling.utils.warn import warn_user

from .stacks import NAMES as STACK_NAMES

OLDER_KEYS = {
    "platform": "stack",
    "checkpoint_async": "checkpoint.async_enabled",
    "checkpoint_interval": "checkpoint.interval",
}
_PLATFORMS = ("auto", "torch", "deepspeed", "accelerate")
_PRECISIONS: dict[str, str | None] = {
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "fp32": None,
    "float32": None,
    "no": None,
}


def read_precision(value: object) -> object:
    """Return the name of a precision that torch or another trainer calls otherwise."""
    name = str(value).removeprefix("torch.").lower()
    return _PRECISIONS.get(name, value)


def read_older(name: str, value: object) -> object:
    """Return what an older key's value means for the key that has taken its place, with a warning.

    Raises:
        ValueError: If the value is none of the older key's.
    """
    warn_older(name)
    if name != "platform":
        return value
    platform = str(value).lower()
    if platform not in (*_PLATFORMS, *STACK_NAMES):
        raise ValueError(
            f"Expected platform to be one of {', '.join(map(repr, _PLATFORMS))}. Received: platform={value!r}."
            f"{did_you_mean(platform, _PLATFORMS)}"
        )
    return value


def warn_older(name: str) -> None:
    """Warn that a key is an older one, with the one that has taken its place."""
    warn_user(f"{name!r} is an older key: use {OLDER_KEYS[name]!r}.", DeprecationWarning)

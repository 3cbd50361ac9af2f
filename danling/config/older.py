"""Names of before and of elsewhere: older keys, the stacks' aliases, other spellings of a precision."""

from __future__ import annotations

from danling.utils.suggest import did_you_mean
from danling.utils.warn import warn_user

STACKS = {
    "auto": "ddp",
    "ddp": "ddp",
    "torch": "ddp",
    "parallel": "parallel",
    "deepspeed": "deepspeed",
    "ds": "deepspeed",
    "accelerate": "accelerate",
    "graph": "graph",
}
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


def stack_named(stack: object) -> str:
    """Return the name of a stack without aliases; case, `-` and `_` do not matter.

    Raises:
        ValueError: If it is unknown; the message lists those there are.
    """
    name = str(stack).lower().replace("-", "").replace("_", "")
    if name not in STACKS:
        raise ValueError(
            f"Expected stack to be one of {', '.join(map(repr, STACKS))}. Received: stack={stack!r}.{did_you_mean(name, STACKS)}"
        )
    return STACKS[name]


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
    if platform not in (*_PLATFORMS, *STACKS):
        raise ValueError(
            f"Expected platform to be one of {', '.join(map(repr, _PLATFORMS))}. Received: platform={value!r}."
            f"{did_you_mean(platform, _PLATFORMS)}"
        )
    return value


def warn_older(name: str) -> None:
    """Warn that a key is an older one, with the one that has taken its place."""
    warn_user(f"{name!r} is an older key: use {OLDER_KEYS[name]!r}.", DeprecationWarning)

"""The stacks that the configuration knows, one row each, and older keys of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from danling.utils.messages import did_you_mean, warn_user


@dataclass(frozen=True, kw_only=True)
class StackTraits:
    """What a configuration has to know of a stack.

    Attributes:
        aliases: Other values of `stack` that mean this one.
        default_backend: What `checkpoint.backend="auto"` means on it; `None` where the stack writes a kind of its own.
        unread: Sections and dotted keys that have no effect on it.
        file_section: Whether the section named after the stack may be given as the path of a file of that library's.
        counts_flops: Whether torch sees the operations of a whole update on it, so that they can be counted: no rank computes a part of
            the model, and nothing is compiled.
    """

    aliases: tuple[str, ...] = ()
    default_backend: str | None = "file"
    unread: tuple[str, ...] = ()
    file_section: bool = False
    counts_flops: bool = False


STACKS: Mapping[str, StackTraits] = {
    "ddp": StackTraits(
        aliases=("auto", "torch"), unread=("parallel", "fsdp", "deepspeed", "accelerate"), counts_flops=True
    ),
    "parallel": StackTraits(default_backend="dcp", unread=("deepspeed", "accelerate", "compile.optimize_ddp")),
    "deepspeed": StackTraits(
        aliases=("ds",),
        default_backend=None,
        unread=("parallel", "fsdp", "accelerate", "compile.optimize_ddp", "checkpoint.backend"),
        file_section=True,
    ),
    "accelerate": StackTraits(unread=("parallel", "fsdp", "deepspeed"), file_section=True, counts_flops=True),
    "graph": StackTraits(unread=("parallel", "fsdp", "deepspeed", "accelerate")),
}
"""The stacks by name. `danling.runners.runner` names the class of each."""

NAMES: Mapping[str, str] = {alias: name for name, row in STACKS.items() for alias in (name, *row.aliases)}
"""Every accepted value of `stack`, and the stack that it means."""

BACKENDS: tuple[str, ...] = tuple(dict.fromkeys(row.default_backend for row in STACKS.values() if row.default_backend))
"""The values of `checkpoint.backend` that `auto` may mean, that of the first stack first."""


def stack_named(stack: object) -> str:
    """Return the name of a stack without aliases; case, `-` and `_` do not matter."""
    name = str(stack).lower().replace("-", "").replace("_", "")
    if name not in NAMES:
        raise ValueError(
            f"Expected stack to be one of {', '.join(map(repr, NAMES))}. Received: stack={stack!r}.{did_you_mean(name, NAMES)}"
        )
    return NAMES[name]


def has_file_section(key: str) -> bool:
    """Return whether a key is a section that may be given as the path of a file, such as a DeepSpeed configuration."""
    return key in STACKS and STACKS[key].file_section


def counts_flops(stack: str) -> bool:
    """Return whether the operations of an update can be counted on a stack; not on one of a user's own name."""
    return stack in STACKS and STACKS[stack].counts_flops


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
    """Return what an older key's value means for the key that has taken its place, with a warning."""
    warn_older(name)
    if name != "platform":
        return value
    platform = str(value).lower()
    if platform not in (*_PLATFORMS, *NAMES):
        raise ValueError(
            f"Expected platform to be one of {', '.join(map(repr, _PLATFORMS))}. Received: platform={value!r}."
            f"{did_you_mean(platform, _PLATFORMS)}"
        )
    return value


def warn_older(name: str) -> None:
    """Warn that a key is an older one, with the one that has taken its place."""
    warn_user(f"{name!r} is an older key: use {OLDER_KEYS[name]!r}.", DeprecationWarning)

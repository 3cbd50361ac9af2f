"""Parameter names without the prefixes that wrappers add."""

from __future__ import annotations

# A checkpoint written under DDP, `torch.compile` or activation checkpointing must load into the bare model, so these never reach a file.
WRAPPER_SEGMENTS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def canonical_name(name: str, *, wrappers: frozenset[str] = WRAPPER_SEGMENTS - {"module"}) -> str:
    """Return `name` without wrapper segments.

    `module` is left alone by default: a user's own submodule may be called so. Unwrap DDP itself before asking for names.
    """
    return ".".join(segment for segment in name.split(".") if segment not in wrappers)

"""What `compile.memory_policy` asks for."""

from __future__ import annotations

import math

POLICIES = ("default", "budget", "recompute")


def read_memory_policy(policy: str | None) -> tuple[str, float]:
    """Return the kind of a memory policy, one of `POLICIES`, and the share of the activations that it keeps: 1 unless it is a budget.

    Args:
        policy: `None` or `"default"`, `"budget:<x>"` with 0 < x < 1, or `"recompute"`.

    Raises:
        ValueError: If it is none of these. A budget of 0 is refused: torch computes random operations such as dropout again under it,
            which gives wrong gradients. Offloading is refused: no graph of torch does it.
    """
    kind, colon, share = (policy or "default").partition(":")
    if kind in ("default", "recompute") and not colon:
        return kind, 1.0
    try:
        budget = float(share) if kind == "budget" else math.nan
    except ValueError:
        budget = math.nan
    if 0 < budget < 1:
        return kind, budget
    reason = ""
    if budget == 0:
        reason = " Under a budget of 0 torch draws dropout anew in the backward, which gives wrong gradients; 'recompute' keeps little."
    elif kind == "offload":
        reason = " Nothing is offloaded: 'recompute' keeps little in memory."
    elif budget == 1:
        reason = " A budget of 1 is 'default'."
    raise ValueError(
        f"Expected compile.memory_policy to be 'default', 'budget:<x>' with 0 < x < 1, or 'recompute'. Received: "
        f"compile.memory_policy={policy!r}.{reason}"
    )

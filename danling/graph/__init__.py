"""Forward and loss as one compiled function: what it keeps for the backward, and where its compiled code lies."""

from __future__ import annotations

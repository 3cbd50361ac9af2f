"""Forward and loss as one compiled function: what it keeps for the backward, and where its compiled code is."""

from __future__ import annotations

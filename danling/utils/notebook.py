"""Whether this process is the kernel of a notebook, where cells are run again and again."""

from __future__ import annotations

import sys


def in_notebook() -> bool:
    """Return whether this process is a kernel of Jupyter; a terminal of IPython is none. IPython is not imported for it."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None

"""`python -m danling`: the command `danling`."""

from __future__ import annotations

import sys

from danling.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

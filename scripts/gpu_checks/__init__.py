"""The checks that `gpu_check.py` runs, each a function that returns what it found."""

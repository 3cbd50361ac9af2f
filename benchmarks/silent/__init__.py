"""Published silent faults of training as programs, each with its right twin."""

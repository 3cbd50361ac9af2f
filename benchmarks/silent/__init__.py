"""Published faults of training that no error and no loss curve shows, as programs of their own, each with its right twin."""

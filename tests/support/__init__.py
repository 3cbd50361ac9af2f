"""What tests share: real processes, torchrun, kills, data sets."""

"""Draft models for speculative decoding, trained on the hidden states of a frozen target."""

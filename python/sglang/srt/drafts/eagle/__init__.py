"""Heads over hidden states of the target (EAGLE, EAGLE-3)."""

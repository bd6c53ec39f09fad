"""Gated feed-forward blocks."""

"""Assistants that attend to the target's keys and values."""

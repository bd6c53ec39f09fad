"""Grouped-query attention: attention over keys and values."""

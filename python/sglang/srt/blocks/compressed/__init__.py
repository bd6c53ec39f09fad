"""Attention to compressed entries beside a window (DeepSeek-V4)."""

"""Attention of grouped queries to selected runs of tokens (Qwen3.8-Flash-Next)."""

"""Readers of the formats in which block drafts are published. No torch."""

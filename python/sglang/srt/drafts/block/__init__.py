"""Drafts that propose a block of tokens in one pass (DFlash, DSpark)."""

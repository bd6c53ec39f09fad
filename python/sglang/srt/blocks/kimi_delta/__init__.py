"""Kimi delta attention (arXiv 2510.26692)."""

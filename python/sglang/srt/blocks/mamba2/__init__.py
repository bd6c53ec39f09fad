"""The Mamba-2 mixer (arXiv 2405.21060)."""

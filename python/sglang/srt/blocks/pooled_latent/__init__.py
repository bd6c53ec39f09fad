"""Attention of latents to selected runs of tokens (GLM-5.3-Flash)."""

"""Latent attention (MLA, arXiv 2405.04434): one latent a token, for all heads."""

"""What the descriptions of recurrent blocks share."""

CHUNK_TOKENS = 64
"""Tokens of a chunk of a prompt in the kernels; a test holds it to their number."""

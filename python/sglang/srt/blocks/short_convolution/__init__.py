"""A causal convolution of a block's output, or of keys and values, over a few tokens (Inkling)."""

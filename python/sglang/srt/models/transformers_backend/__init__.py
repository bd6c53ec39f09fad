"""Models whose code is a class of transformers."""

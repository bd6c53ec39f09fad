"""Models whose code is a class of transformers: their facts, found by a run without weights, and their description."""

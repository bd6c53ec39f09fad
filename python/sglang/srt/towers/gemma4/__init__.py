"""The encoder of Gemma 4."""

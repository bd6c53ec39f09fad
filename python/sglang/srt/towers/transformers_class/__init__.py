"""Encoders that a class of transformers computes."""

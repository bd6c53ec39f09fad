"""A model's own layers for multi-token prediction."""

"""A model's own layers for multi-token prediction, one for each draft token of a step."""

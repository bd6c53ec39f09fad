"""Writes quantized checkpoints in the formats that models are published in: `python -m sglang.quantize --help`."""

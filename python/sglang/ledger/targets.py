"""The targets that the lock files are measured for, and how much of each is recorded."""

from __future__ import annotations

COMPLETE = frozenset({"sm120"})
"""Lock files in which every launch has a row. The others have those that decide about tiles."""
LEFT_OUT = ("kernels_zero_points.", "kernels_dequantized.", "quant_linear_dequantized.", "trellis.")
"""How the names of kernels begin that have no rows in the others. Those without zero points decide about tiles, and
8-bit weights beside 16-bit activations, and EXL3's, have the tiles of SM120 on every GPU."""

TRITON_VERSIONS = ("3.6.0", "3.9.0")
"""Verified: the oldest that we support and the one that CI pins."""
NOT_NATIVE = frozenset({"3.6.0/sm_121"})
"""Compiles, but low-precision products go through wider types; recorded, and not held to the spill budget. What needs
packed four-bit operands is not compiled there (Variant.native_only), nor launched (hardware.arch.NEEDS_TRITON)."""

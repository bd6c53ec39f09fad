"""The kernel of `quant_linear` for many rows and weights of 8 bits beside activations of 16 bits. Few rows take the
same as others. Reference: `LinearWeight.dequantized`."""

from __future__ import annotations

from sglang.srt.layers.triton_ops import quant_linear
from sglang.srt.layers.triton_ops.dequantized_dot import multiply
from sglang.srt.layers.triton_ops.kernel_variant import with_functions

tiles_kernel = with_functions(quant_linear.tiles_kernel, __name__, multiply=multiply)

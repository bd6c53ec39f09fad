"""The grouped kernels of `kernels` for weights of 8 bits beside activations of 16 bits. Few pairs take those of
`kernels_few`. Reference: `ExpertWeights.dequantized`."""

from __future__ import annotations

from sglang.srt.layers.moe.fused_moe_triton import kernels
from sglang.srt.layers.triton_ops.dequantized_dot import multiply
from sglang.srt.layers.triton_ops.kernel_variant import with_functions

gate_up_kernel = with_functions(kernels.gate_up_kernel, __name__, multiply=multiply)
down_kernel = with_functions(kernels.down_kernel, __name__, multiply=multiply)

"""Mamba-2, which keeps one state of fixed size for each request, as a mixer of `layer_spec`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sglang.srt.blocks.recurrent_state.spec import CHUNK_TOKENS
from sglang.srt.kernels.spec import Need
from sglang.srt.plan.block_defaults import MixerDefaults
from sglang.srt.plan.cache_spec import PER_REQUEST, CacheSpec, CacheTensor
from sglang.srt.plan.layer_spec import ParallelConfig
from sglang.srt.plan.weight_spec import Elements, Matrix, Weights


@dataclass(frozen=True, slots=True)
class Mamba2(MixerDefaults):
    """State-space duality (arXiv 2405.21060) after a causal convolution over `conv_kernel` tokens. Each head keeps a
    state [state_dim, head_dim] of `state_dtype`; heads come in `num_groups` groups with the same B and C."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    conv_kernel: int
    conv_bias: bool = True
    proj_bias: bool = False
    dt_min: float = 0.0
    dt_max: float = float("inf")
    state_dtype: str = "float32"

    @property
    def value_dim(self) -> int:
        return self.head_dim

    @property
    def rope(self) -> None:
        return None

    @property
    def defers_all_reduce(self) -> bool:
        return not self.proj_bias

    def uneven_part(self, tp_size: int) -> str:
        return f"{self.num_groups} groups of Mamba-2 heads" if self.num_groups % tp_size else ""

    def widths(self, tp_size: int) -> tuple[int, int]:
        """Returns the elements of B (and of C), and of x, of one token on a rank."""
        return self.num_groups // tp_size * self.state_dim, self.num_heads // tp_size * self.head_dim

    def needs(self, parallel: ParallelConfig) -> Iterator[Need]:
        heads = (self.num_heads // parallel.attn_tp_size, self.num_groups // parallel.attn_tp_size)
        yield Need("causal_conv1d", q_dtype=parallel.dtype)
        yield Need("state_space_duality", q_dtype=parallel.dtype, heads=heads)
        yield Need("gated_rmsnorm", q_dtype=parallel.dtype)

    def caches(self, parallel: ParallelConfig) -> tuple[CacheSpec, ...]:
        keys, values = self.widths(parallel.attn_tp_size)
        heads = self.num_heads // parallel.attn_tp_size
        state = CacheTensor("state", (heads, self.state_dim, self.head_dim), parallel.state_dtype or self.state_dtype)
        convolved = CacheTensor("conv", (self.conv_kernel - 1, 2 * keys + values), parallel.dtype)
        return (CacheSpec("state", (state, convolved), lifetime=PER_REQUEST),)

    def weights(self, hidden_size: int, tp_size: int) -> Weights:
        keys, values = self.widths(tp_size)
        heads, channels = self.num_heads // tp_size, 2 * keys + values
        return (
            Matrix("ssm.in", ("",), channels + values + heads, hidden_size, self.proj_bias),
            Matrix("ssm.out", ("",), hidden_size, values, self.proj_bias),
            Elements(channels * (self.conv_kernel + self.conv_bias) + values),
            Elements(3 * heads, "float32"),
        )

    def activation_elements(self, tp_size: int) -> int:
        """Returns the elements as GatedDelta does; its chunks have only the scores."""
        keys, values = self.widths(tp_size)
        return 4 * keys + 5 * values + self.num_heads // tp_size * CHUNK_TOKENS

    def verified_elements(self, tp_size: int) -> tuple[int, int]:
        """Returns the elements as GatedDelta does."""
        keys, values = self.widths(tp_size)
        return 2 * (2 * keys + values), 2 * (self.num_heads // tp_size)

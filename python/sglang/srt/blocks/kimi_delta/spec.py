"""Kimi delta attention, a gated delta rule with a decay for each channel of the keys, as a mixer of `layer_spec`."""

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
class KimiDelta(MixerDefaults):
    """Kimi delta attention (arXiv 2510.26692): the gated delta rule after a causal convolution over `conv_kernel`
    tokens, with a decay for each channel of a key. A head has queries, keys and values of `head_dim` and keeps a state
    [head_dim, head_dim] of `state_dtype`. Low-rank projections of the hidden states (rank `head_dim`) make the decays
    and the output's sigmoid gates; with `full_rank` one projection makes each.

    The log of a decay lies between `lower_bound` and 0; `lower_bound` 0: no limit.
    """

    num_heads: int
    head_dim: int
    conv_kernel: int
    lower_bound: float = 0.0
    state_dtype: str = "float32"
    full_rank: bool = False

    @property
    def value_dim(self) -> int:
        return self.head_dim

    @property
    def rope(self) -> None:
        return None

    def width(self, tp_size: int) -> int:
        """Returns the elements of q (and of k, and of v) of one token on a rank."""
        return self.num_heads // tp_size * self.head_dim

    def needs(self, parallel: ParallelConfig) -> Iterator[Need]:
        heads = self.num_heads // parallel.attn_tp_size
        yield Need("causal_conv1d", q_dtype=parallel.dtype)
        yield Need("kimi_delta_rule", q_dtype=parallel.dtype, heads=(heads, heads))
        yield Need("gated_rmsnorm", q_dtype=parallel.dtype)

    def caches(self, parallel: ParallelConfig) -> tuple[CacheSpec, ...]:
        heads, width = self.num_heads // parallel.attn_tp_size, self.width(parallel.attn_tp_size)
        state = CacheTensor("state", (heads, self.head_dim, self.head_dim), parallel.state_dtype or self.state_dtype)
        convolved = CacheTensor("conv", (self.conv_kernel - 1, 3 * width), parallel.dtype)
        return (CacheSpec("state", (state, convolved), lifetime=PER_REQUEST),)

    def weights(self, hidden_size: int, tp_size: int) -> Weights:
        heads, width, rank = self.num_heads // tp_size, self.width(tp_size), self.head_dim
        first = Matrix("kda.low", ("f_a", "g_a"), 2 * rank, hidden_size)
        others: Weights = (Matrix("kda.decay", ("f_b",), width, rank), Matrix("kda.gate", ("g_b",), width, rank))
        if self.full_rank:
            first, others = Matrix("kda.decay_gate", ("f", "g"), 2 * width, hidden_size), ()
        return (
            Matrix("kda.in", ("q", "k", "v"), 3 * width, hidden_size),
            first,
            Matrix("kda.beta", ("b",), heads, hidden_size, quantized=False),
            *others,
            Matrix("kda.out", ("",), hidden_size, width),
            Elements(3 * width * self.conv_kernel + self.head_dim),
            Elements(heads + width, "float32"),
        )

    def activation_elements(self, tp_size: int) -> int:
        """Returns the elements of a prompt's token, whose chunks are computed apart from the state: q, k and v as
        projected and convolved, the inputs of the decays, the gate, sums of decays in fp32, u, w and the output, each
        as wide as q; for every head the scores of CHUNK_TOKENS tokens, and products of keys in fp32."""
        return 13 * self.width(tp_size) + 3 * self.num_heads // tp_size * CHUNK_TOKENS

    def verified_elements(self, tp_size: int) -> tuple[int, int]:
        """Returns the elements as `GatedDelta` does, with a decay for each channel."""
        return 6 * self.width(tp_size), self.width(tp_size) + self.num_heads // tp_size

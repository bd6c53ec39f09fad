"""The gated delta net, which keeps one state of fixed size for each request, as a mixer of `layer_spec`."""

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
class GatedDelta(MixerDefaults):
    """Gated delta rule (arXiv 2412.06464) after a causal convolution over `conv_kernel` tokens. Each value head keeps a
    state [key_dim, value_dim] of `state_dtype`. `by_key_head`: checkpoints store all projections of a key head
    together. The output is gated by SiLU, or with `sigmoid_gate` by a sigmoid."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    state_dtype: str = "float32"
    by_key_head: bool = False
    sigmoid_gate: bool = False

    @property
    def num_heads(self) -> int:
        return self.value_heads

    @property
    def rope(self) -> None:
        return None

    def uneven_part(self, tp_size: int) -> str:
        divided = self.key_heads % tp_size == 0 and self.value_heads % tp_size == 0
        return "" if divided else f"{self.key_heads} key heads of gated delta nets"

    def _widths(self, tp_size: int) -> tuple[int, int]:
        """Returns the elements of k (and of q), and of v, of one token on a rank."""
        return self.key_heads // tp_size * self.key_dim, self.value_heads // tp_size * self.value_dim

    def needs(self, parallel: ParallelConfig) -> Iterator[Need]:
        heads = (self.value_heads // parallel.attn_tp_size, self.key_heads // parallel.attn_tp_size)
        yield Need("causal_conv1d", q_dtype=parallel.dtype)
        traits = frozenset({"hybrid_gdn"})
        yield Need("gated_delta_rule", q_dtype=parallel.dtype, traits=traits, heads=heads)
        yield Need("gated_rmsnorm", q_dtype=parallel.dtype)

    def caches(self, parallel: ParallelConfig) -> tuple[CacheSpec, ...]:
        keys, values = self._widths(parallel.attn_tp_size)
        heads = self.value_heads // parallel.attn_tp_size
        state = CacheTensor("state", (heads, self.key_dim, self.value_dim), parallel.state_dtype or self.state_dtype)
        convolved = CacheTensor("conv", (self.conv_kernel - 1, 2 * keys + values), parallel.dtype)
        return (CacheSpec("state", (state, convolved), lifetime=PER_REQUEST),)

    def weights(self, hidden_size: int, tp_size: int) -> Weights:
        keys, values = self._widths(tp_size)
        heads = self.value_heads // tp_size
        inputs, gates = (("qkvz",), ("ba",)) if self.by_key_head else (("qkv", "z"), ("b", "a"))
        rows = () if self.by_key_head else (2 * keys + values, values)
        return (
            Matrix("gdn.in", inputs, 2 * (keys + values), hidden_size, part_rows=rows),
            Matrix("gdn.in_gates", gates, 2 * heads, hidden_size, quantized=False),
            Matrix("gdn.out", ("",), hidden_size, values),
            Elements((2 * keys + values) * self.conv_kernel + self.value_dim),
            Elements(2 * heads, "float32"),
        )

    def activation_elements(self, tp_size: int) -> int:
        """Returns the elements that are projected and convolved, and those of a prompt's chunks, which are computed
        apart from the state: the scores of CHUNK_TOKENS tokens, u and w of every value head, and the output."""
        keys, values = self._widths(tp_size)
        heads = self.value_heads // tp_size
        return 4 * keys + 5 * values + heads * (CHUNK_TOKENS + self.key_dim)

    def verified_elements(self, tp_size: int) -> tuple[int, int]:
        """Returns what is kept of a token until it is accepted: elements of the model's dtype (the convolution's inputs
        and outputs) and fp32 elements (a decay and a gate for each head)."""
        keys, values = self._widths(tp_size)
        return 2 * (2 * keys + values), 2 * (self.value_heads // tp_size)

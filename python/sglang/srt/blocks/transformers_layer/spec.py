"""A layer whose code is a class of transformers, as blocks of `layer_spec`. It attends through our caches; its
products and its experts are ours, and everything else is the class's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sglang.srt.blocks.gqa.spec import GQA
from sglang.srt.blocks.mlp.spec import Dense, up_parts
from sglang.srt.blocks.moe.spec import MoE
from sglang.srt.kernels.spec import Need
from sglang.srt.plan.attention_parts import Softmax, Values
from sglang.srt.plan.block_defaults import HeadDims
from sglang.srt.plan.cache_spec import CacheSpec
from sglang.srt.plan.layer_spec import ParallelConfig, ResidualDefaults
from sglang.srt.plan.ranks import HeadShares, RankLayout, ShardRange, share_of_units, whole
from sglang.srt.plan.transformers_backend.facts import AttentionFact, ExpertsFact, LinearFact, TensorFact
from sglang.srt.plan.weight_spec import Elements, Matrix, Weights

if TYPE_CHECKING:
    from typing import Self

COLUMNS, ROWS, PACKED = "colwise", "rowwise", "packed_colwise"
"""Styles by which ranks divide a product's outputs, its inputs, or each of two halves of its outputs. With any other
style every rank computes the whole product."""
_SCALES = 128
"""Outputs or inputs that stay together in a quantized checkpoint: all groups of scales divide it."""


@dataclass(frozen=True, slots=True)
class TransformersLayer(GQA):
    """A layer of a class of transformers, with its attention. The class rotates queries and keys itself.

    attention: how the class calls it; linears: the products; tensors: the other parameters
    unit: outputs or inputs of a product that stay on one rank
    """

    attention: AttentionFact | None = None
    linears: tuple[LinearFact, ...] = ()
    tensors: tuple[TensorFact, ...] = ()
    unit: int = 1

    @property
    def attends_in_shares(self) -> bool:
        """Returns whether the class's plan divides the heads over ranks; else each rank has all of them."""
        return any(linear.style == COLUMNS and self.of_attention(linear) for linear in self.linears)

    @property
    def defers_all_reduce(self) -> bool:
        return False

    def of_attention(self, linear: LinearFact) -> bool:
        """Returns whether a product belongs to the attention of the layer."""
        assert self.attention is not None
        return linear.name.startswith(f"{self.attention.module}.")

    def shares(self, tp_size: int) -> HeadShares:
        return HeadShares(self.num_heads, self.num_kv_heads, tp_size if self.attends_in_shares else 1)

    def effective_dcp_size(self, tp_size: int, dcp_size: int) -> int:
        return 1

    def with_scale_rows(self, rows_of: Callable[[Matrix], int]) -> Self:
        return replace(self, unit=_SCALES)

    def share_problems(self, tp_size: int, module_of: Callable[[str, str], str]) -> Iterator[str]:
        if tp_size > 1 and not any(linear.style in (COLUMNS, ROWS, PACKED) for linear in self.linears):
            yield f"--tp-size {tp_size}: the plan of the model's class divides no products over ranks"
        for linear in self.linears:
            if self._by_heads(linear, COLUMNS) and linear.rows % self.num_kv_heads:
                yield f"--tp-size {tp_size} does not divide the {linear.rows} outputs of {linear.name} by heads"

    def scaled_head_dims(self, tp_size: int) -> Iterator[HeadDims]:
        for linear in self.linears:
            if self._by_heads(linear, COLUMNS):
                yield HeadDims(linear.name, ("",), 0, *self._dims(linear.rows))
            elif self._by_heads(linear, ROWS):
                yield HeadDims(linear.name, ("",), 1, *self._dims(linear.cols))

    def _by_heads(self, linear: LinearFact, style: str) -> bool:
        return linear.style == style and self.of_attention(linear)

    def _dims(self, total: int) -> tuple[int, bool]:
        """Returns the outputs or inputs of each head, and whether it is a KV head: keys and values have as many as all
        KV heads together."""
        dims = (self.num_kv_heads * self.head_dim, self.num_kv_heads * self.v_head_dim)
        of_kv = self.num_heads != self.num_kv_heads and (total in dims or total % self.num_heads != 0)
        return total // (self.num_kv_heads if of_kv else self.num_heads), of_kv

    def _share(self, total: int, linear: LinearFact, tp_size: int, rank: int) -> ShardRange:
        if not self.of_attention(linear):
            return share_of_units(total, min(self.unit, total), rank, tp_size)
        shares, (dims, of_kv) = self.shares(tp_size), self._dims(total)
        return (shares.kv_heads(rank) if of_kv else shares.heads(rank)).scale_dims(dims)

    def rows_of(self, linear: LinearFact, tp_size: int, rank: int) -> tuple[ShardRange, ...]:
        """Returns a rank's runs of a product's outputs."""
        if linear.style == COLUMNS:
            return (self._share(linear.rows, linear, tp_size, rank),)
        if linear.style == PACKED:
            half = self._share(linear.rows // 2, linear, tp_size, rank)
            return half.among(2, 0), half.among(2, 1)
        return (whole(linear.rows),)

    def cols_of(self, linear: LinearFact, tp_size: int, rank: int) -> ShardRange:
        """Returns a rank's run of a product's inputs."""
        return self._share(linear.cols, linear, tp_size, rank) if linear.style == ROWS else whole(linear.cols)

    def needs(self, parallel: ParallelConfig) -> Iterator[Need]:
        yield from GQA.needs(self, parallel)

    def weights(self, hidden_size: int, tp_size: int) -> Weights:
        assert self.attention is not None
        parts: list[Matrix | Elements] = []
        for linear in self.linears:
            rows = sum(run.padded_count for run in self.rows_of(linear, tp_size, 0))
            cols = self.cols_of(linear, tp_size, 0).padded_count
            parts.append(Matrix(linear.name, ("",), rows, cols, linear.bias))
        for tensor in self.tensors:
            if tensor.name == self.attention.sinks:
                parts.append(Elements(self.shares(tp_size).padded_heads, "float32"))
            else:
                parts.append(elements_of(tensor))
        return tuple(parts)

    def activation_elements(self, tp_size: int) -> int:
        widest = max((sum(run.padded_count for run in self.rows_of(x, tp_size, 0)) for x in self.linears), default=0)
        shares = self.shares(tp_size)
        heads = (3 * shares.padded_heads + 2 * shares.padded_kv_heads) * self.head_dim
        return 2 * heads + 3 * widest


@dataclass(frozen=True, slots=True)
class TextLayer(TransformersLayer):
    """A layer of a class that generates no text: the tokens of a text, which a step computes whole, attend to one
    another, and nothing is cached."""

    @property
    def cache_scale_bytes(self) -> int:
        return 0

    def caches(self, parallel: ParallelConfig) -> tuple[CacheSpec, ...]:
        return ()

    def attention_shape(self, tp_size: int) -> Any:
        return None

    def attention_site(self, tp_size: int, dcp_size: int) -> Any:
        return None

    def needs(self, parallel: ParallelConfig) -> Iterator[Need]:
        assert self.attention is not None
        traits = set() if self.attention.causal else {"bidirectional"}
        traits |= {"sliding_window"} if self.window and self.attention.causal else set()
        traits |= {"two_sided_window"} if self.window and not self.attention.causal else set()
        dims, dtype = (self.head_dim, self.v_head_dim), parallel.dtype
        yield Need("prefill_attention", *dims, dtype, dtype, traits=frozenset(traits))


def elements_of(tensor: TensorFact) -> Elements:
    """Returns the elements of a tensor that every rank has."""
    return Elements(math.prod(tensor.shape), "float32" if tensor.fp32 else None)


def softmax_of(attention: AttentionFact) -> Softmax:
    """Returns what the class's call says of the softmax."""
    return Softmax(attention.scale, attention.logit_cap, bool(attention.sinks))


def values_of(attention: AttentionFact) -> Values:
    """Returns what the class's call says of values."""
    return Values(attention.v_head_dim)


@dataclass(frozen=True, slots=True)
class TransformersExperts(MoE):
    """The routed experts of a class's layer. The class chooses and weights them; its shared experts are products of the
    layer."""

    fact: ExpertsFact | None = None

    def with_scale_groups(self, group_of: Callable[[str, Dense], int]) -> Self:
        return self

    def needs(self, parallel: ParallelConfig) -> Iterator[Need]:
        traits = {self.activation.trait} - {""} | ({"expert_bias"} if self.bias else set())
        yield Need("fused_moe", q_dtype=parallel.dtype, traits=frozenset(traits))

    def weights(self, hidden_size: int, ranks: RankLayout, expert_rows: int) -> Weights:
        experts, up = ranks.padded_experts(self.num_experts), up_parts(self.activation)
        return (
            Matrix("moe.w13", up, len(up) * expert_rows, hidden_size, self.bias, experts=experts),
            Matrix("moe.w2", ("down",), hidden_size, expert_rows, self.bias, experts=experts),
        )


@dataclass(frozen=True, slots=True)
class TransformersStream(ResidualDefaults):
    """The residual stream of a class, which adds up its blocks' outputs itself.

    outside: parameters outside of the layers, besides the embedding and the head's matrix
    """

    outside: tuple[Elements, ...] = ()

    @property
    def streams(self) -> int:
        return 1

    @property
    def defers_all_reduce(self) -> bool:
        return False

    @property
    def norms_apart(self) -> bool:
        return False

    def needs(self, parallel: ParallelConfig) -> Iterator[Need]:
        yield from ()

    def weights(self, hidden_size: int) -> Weights:
        return ()

    def head_weights(self, hidden_size: int) -> Weights:
        return self.outside

"""Lists the ops that a model needs, each once, from its description."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import replace

from sglang.srt.blocks.moe.spec import MoE
from sglang.srt.kernels.spec import Need
from sglang.srt.plan.equal_layers import distinct
from sglang.srt.plan.layer_spec import LayerSpec, ParallelConfig
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.rank_weights import RankWeights
from sglang.srt.plan.weight_spec import Matrix, Weights


def needs_of(of_rank: RankWeights, parallel: ParallelConfig) -> tuple[Need, ...]:
    """Returns the needs of a rank in the order of a layer. Needs of one op and shape are merged, with the traits of all
    layers; an op with several shapes has one need for each, told apart by `variant`."""
    model, dtype = of_rank.model, parallel.dtype
    feed_forward = list(_feed_forward(of_rank, parallel))
    sharded = parallel.ranks.tp_size > 1
    per_layer = model.per_layer_inputs
    on_host = model.embedding.on_host or (per_layer is not None and per_layer.on_host)
    return (
        Need("decode_inputs", q_dtype=dtype),
        *([Need("embedding_rows", q_dtype=dtype)] if sharded or on_host else []),
        Need("rmsnorm", q_dtype=dtype),
        *_merged(_of_layers(model, lambda layer: [layer.residual.needs(parallel)])),
        *_linears(of_rank, parallel.dtype),
        *_merged(
            _with_both_ways(need, model) for need in _of_layers(model, lambda layer: [layer.mixer.needs(parallel)])
        ),
        *_vision(model, dtype),
        *_merged(feed_forward),
        *_wide_experts(of_rank, feed_forward),
        *([Need("all_reduce", q_dtype=dtype, ranks=parallel.ranks.tp_size)] if sharded else []),
    )


def _of_layers(model: ModelDescription, needs: Callable[[LayerSpec], Iterable[Iterable[Need]]]) -> list[Need]:
    """Returns the needs of the layers' blocks, in order. Those of equal layers come once."""
    return [need for layer in distinct(model.layers) for block in needs(layer) for need in block]


def _feed_forward(of_rank: RankWeights, parallel: ParallelConfig) -> Iterator[Need]:
    """Yields the needs of the layers' feed-forward blocks, in order, with the quantization, shapes and counts of their
    experts. Those of equal layers come once."""
    model, known = of_rank.model, set[int]()
    for weights, layer in zip(of_rank.layers, model.layers, strict=True):
        if id(layer) in known:
            continue
        known.add(id(layer))
        for need in (need for block in layer.token_blocks for need in block.needs(parallel)):
            experts = layer.ffn.experts
            if need.op == "fused_moe" and experts is not None:
                need = _with_experts(need, experts, weights, of_rank)
            yield need


def _with_experts(need: Need, experts: MoE, weights: Weights, of_rank: RankWeights) -> Need:
    """Returns the need with quantization scheme, shapes and counts of a layer's routed experts."""
    products = [part for part in weights if isinstance(part, Matrix) and part.experts]
    shapes = tuple((product.rows, product.cols, product.bias) for product in products)
    numbers = (products[0].experts, experts.top_k + experts.fused_shared, of_rank.ranks.ep_size)
    quant = of_rank.model.expert_quant
    return replace(need, quant=quant.scheme if quant else None, shapes=shapes, experts=numbers)


WIDE_EXPERTS = "16_bits"
"""Variant of the need of experts in 16 bits, where other layers have quantized ones."""


def _wide_experts(of_rank: RankWeights, feed_forward: Iterable[Need]) -> Iterator[Need]:
    """Yields the needs of experts in 16 bits, where other layers have quantized ones: one for each kind of experts."""
    if not of_rank.model.wide_experts:
        return
    kinds = {need.shapes + (need.experts,): need for need in feed_forward if need.op == "fused_moe"}
    for i, need in enumerate(kinds.values()):
        wide = replace(need, quant=None)
        yield replace(wide, variant=_variant_of_experts(wide) if i else WIDE_EXPERTS)


def _variant_of_experts(need: Need) -> str:
    """Returns the variant of a further kind of experts, where layers differ in their width, their number, the size of
    what goes in and out, or how many a token chooses."""
    (count, top_k, _), (_, (size, width, _)) = need.experts, need.shapes
    return _name_of_experts(count, size, width, top_k, need.quant)


def _name_of_experts(count: int, size: int, width: int, top_k: int, scheme: str | None) -> str:
    return f"{count}x{size}x{width}_top{top_k}_{scheme or WIDE_EXPERTS}"


def key_of_experts(choices: Container[str], down: Matrix, top_k: int, scheme: str | None) -> str:
    """Returns the key of the choice for experts whose second matrices are `down` on a rank. A token chooses `top_k` of
    them."""
    name = _name_of_experts(down.experts, down.rows, down.cols, top_k, scheme)
    names = [name, *([] if scheme else [WIDE_EXPERTS])]
    return next((key for name in names if (key := f"fused_moe/{name}") in choices), "fused_moe")


def _merged(needs: Iterable[Need]) -> Iterator[Need]:
    """Yields one need for each op and shape. Further shapes of an op, after the first, are named by their head dims or
    their experts."""
    by_shape: dict[Need, frozenset[str]] = {}
    for need in dict.fromkeys(needs):  # most layers need the same
        shape = replace(need, traits=frozenset())
        by_shape[shape] = by_shape.get(shape, frozenset()) | need.traits
    seen: set[str] = set()
    for shape, traits in by_shape.items():
        variant = ""
        if shape.op in seen:
            variant = _variant_of_experts(shape) if any(shape.experts) else f"{shape.head_dim}x{shape.v_head_dim}"
        seen.add(shape.op)
        yield replace(shape, traits=traits, variant=variant)


def _linears(of_rank: RankWeights, dtype: str) -> Iterator[Need]:
    """Yields one "linear" need for 16-bit products, and one for each quantization scheme."""
    head = of_rank.model.head_quant
    shapes: dict[str | None, set[tuple[int, int, bool]]] = {
        head.scheme if head else None: {(of_rank.head.rows, of_rank.head.cols, False)}
    }
    for matrix, quant in of_rank.matrices():
        if not matrix.experts and matrix.dtype is None:
            shapes.setdefault(quant.scheme if quant else None, set()).add((matrix.rows, matrix.cols, matrix.bias))
    for scheme in sorted(shapes, key=lambda scheme: scheme or ""):
        yield Need("linear", q_dtype=dtype, quant=scheme, shapes=tuple(sorted(shapes[scheme])))


def _with_both_ways(need: Need, model: ModelDescription) -> Need:
    """Returns the need, with the trait "both_ways" where image tokens attend to each other in both directions (prompts,
    in layers with a window)."""
    here = model.media is not None and model.media.both_ways and "sliding_window" in need.traits
    return replace(need, traits=need.traits | {"both_ways"}) if here and need.op == "extend_attention" else need


def _vision(model: ModelDescription, dtype: str) -> Iterator[Need]:
    dim = model.vision_head_dim if model.media is None else model.media.tower.head_dim
    if dim:
        yield Need("prefill_attention", dim, dim, dtype, dtype, traits=frozenset({"bidirectional"}))

"""From a model's description to the ops that it needs, each once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from sglang.srt.kernels.spec import Need
from sglang.srt.plan.layer_spec import Matrix, Serving
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.ranks import RankLayout
from sglang.srt.plan.weights import expert_rows


def needs_of(model: ModelDescription, serving: Serving) -> tuple[Need, ...]:
    """In the order of a layer. Needs of one op and shape are one, whose traits are those of any layer; an op that has
    several shapes has a need for each, told apart by `variant`. Raises UserError where the experts cannot be divided.
    """
    dtype = serving.dtype
    experts = _experts(model, serving.ranks)
    blocks = (block for layer in model.layers for block in layer.token_blocks)
    feed_forward = [need for block in blocks for need in block.needs(serving)]
    sharded = serving.tp_size > 1
    return (
        Need("decode_inputs", q_dtype=dtype),
        *([Need("embedding_rows", q_dtype=dtype)] if sharded else []),
        Need("rmsnorm", q_dtype=dtype),
        *_merged(need for layer in model.layers for need in layer.residual.needs(serving)),
        *_linears(model, serving),
        *_merged(need for layer in model.layers for need in layer.mixer.needs(serving)),
        *_vision(model, dtype),
        *_merged(replace(need, **experts) if need.op == "fused_moe" else need for need in feed_forward),
        *([Need("all_reduce", q_dtype=dtype, ranks=serving.tp_size)] if sharded else []),
    )


def _experts(model: ModelDescription, ranks: RankLayout) -> dict[str, Any]:
    """Scheme, shapes and numbers of the routed experts, as fields of their need."""
    experts, quant = model.experts, model.expert_quant
    if experts is None:
        return {}
    weights = experts.weights(model.hidden_size, ranks, expert_rows(model, ranks))
    products = (part for part in weights if isinstance(part, Matrix) and part.experts)
    shapes = tuple((product.rows, product.cols, product.bias) for product in products)
    fused = experts.fused_shared
    numbers = (ranks.expert_room(experts.num_experts) + fused, experts.top_k + fused, ranks.ep_size)
    return {"quant": quant.scheme if quant else None, "shapes": shapes, "experts": numbers}


def _merged(needs: Iterable[Need]) -> Iterator[Need]:
    """One for each op and shape; what an op has several of is named by its head dims, after the first."""
    by_shape: dict[Need, frozenset[str]] = {}
    for need in needs:
        shape = replace(need, traits=frozenset())
        by_shape[shape] = by_shape.get(shape, frozenset()) | need.traits
    seen: set[str] = set()
    for shape, traits in by_shape.items():
        variant = f"{shape.head_dim}x{shape.v_head_dim}" if shape.op in seen else ""
        seen.add(shape.op)
        yield replace(shape, traits=traits, variant=variant)


def _linears(model: ModelDescription, serving: Serving) -> Iterator[Need]:
    """The 16-bit products, and one need for each scheme of the others."""
    head = model.head_quant
    shapes: dict[str | None, set[tuple[int, int, bool]]] = {
        head.scheme if head else None: {(-(-model.vocab_size // serving.tp_size), model.hidden_size, False)}
    }
    for matrix, quant in model.matrices(serving.ranks, expert_rows(model, serving.ranks)):
        if not matrix.experts and matrix.dtype is None:
            shapes.setdefault(quant.scheme if quant else None, set()).add((matrix.rows, matrix.cols, matrix.bias))
    for scheme in sorted(shapes, key=lambda scheme: scheme or ""):
        yield Need("linear", q_dtype=serving.dtype, quant=scheme, shapes=tuple(sorted(shapes[scheme])))


def _vision(model: ModelDescription, dtype: str) -> Iterator[Need]:
    dim = model.vision_head_dim
    if dim:
        yield Need("prefill_attention", dim, dim, dtype, dtype, traits=frozenset({"bidirectional"}))

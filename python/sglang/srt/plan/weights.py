"""Bytes of a model's weights on one rank, known before anything is allocated. No torch.

They are what `models/` allocates; a test compares both for every architecture.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from sglang.srt.configs.quant_rules import ModuleQuant
from sglang.srt.configs.quant_scheme import PLANE_COLUMNS, SCALE_BYTES, wants_planes
from sglang.srt.configs.trellis import BLOCK, Trellis, trellis_bytes
from sglang.srt.plan.expert_slot_plan import BUFFERS
from sglang.srt.plan.layer_spec import ABSENT
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.rank_weights import RankWeights
from sglang.srt.plan.weight_spec import Matrix, Weights

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int32": 4, "int64": 8, "fp8_e4m3": 1}


def rank_weight_bytes(
    of_rank: RankWeights, dtype: str, fp8_cache: bool = False, features: Collection[str] | None = None
) -> int:
    """Returns the bytes of one rank's parameters, exactly as they are allocated. An `fp8_cache` has scales, which are
    parameters. `features` (of ArchTraits): of the GPU whose kernels rearrange the weights; None: counts the weights as
    stored."""
    model, item = of_rank.model, _DTYPE_BYTES[dtype]
    hidden = model.hidden_size
    normed = model.embedding.norm is not None and model.embedding.norm.weighted
    rows = 0 if model.embedding.on_host else of_rank.head.rows
    total = (rows + normed) * hidden * item if model.has_embedding else 0
    norm = hidden * (4 if model.zero_centred_norms else item)  # one before each block, and the final one
    if not model.layers[-1].residual.norms_apart:
        norm = 0
    if model.last_stage:
        if not model.tie_embeddings:
            total += matrix_bytes(of_rank.head, model.head_quant, item, features)
        total += hidden * item if model.plain_final_norm else norm
        total += _bytes_of(model, 0, model.layers[-1].residual.head_weights(hidden), item, features)
    for i, (layer, weights) in enumerate(zip(model.layers, of_rank.layers, strict=True)):
        if layer.on_other_stage:
            continue
        norms = sum(block != ABSENT for block in (layer.mixer, layer.ffn)) - (not layer.residual.mixer_norms)
        total += norm * norms
        total += _bytes_of(model, i, weights + layer.residual.weights(hidden), item, features)
        total += layer.mixer.cache_scale_bytes if fp8_cache else 0
    if model.encodes_media and model.media is not None:
        total += model.media.tower.num_weights() * item
    if model.per_layer_inputs is not None:
        total += _bytes_of(
            model, 0, model.per_layer_inputs.model_weights(hidden, of_rank.ranks.vocab_tp_size), item, features
        )
    return total + _buffer_bytes(of_rank, item, features)


def expert_bytes(of_rank: RankWeights, dtype: str, features: Collection[str] | None = None) -> list[int]:
    """Returns the bytes of all experts of each layer whose experts lie in main memory."""
    item = _DTYPE_BYTES[dtype]
    return [sum(_all_experts(m, quant, item, features) for m, quant in pair) for pair in _offloaded(of_rank)]


def slot_bytes(of_rank: RankWeights, dtype: str, features: Collection[str] | None = None) -> int:
    """Returns the bytes of the slots of all layers whose experts lie in main memory."""
    item = _DTYPE_BYTES[dtype]
    return sum(
        _all_experts(replace(m, experts=m.slots), quant, item, features)
        for pair in _offloaded(of_rank)
        for m, quant in pair
    )


def _buffer_bytes(of_rank: RankWeights, item: int, features: Collection[str] | None) -> int:
    """Returns the bytes of the buffers that layers share, one set for each form that these have."""
    forms = {tuple(pair) for pair in _offloaded(of_rank)}
    return BUFFERS * sum(
        _all_experts(replace(m, experts=m.buffered), quant, item, features) for pair in forms for m, quant in pair
    )


def _offloaded(of_rank: RankWeights) -> list[list[tuple[Matrix, ModuleQuant | None]]]:
    """Returns the matrices of experts in main memory by layer, with their quantization."""
    layers = [
        [(m, of_rank.model.quant_of(i, m)) for m in weights if isinstance(m, Matrix) and m.slots]
        for i, weights in enumerate(of_rank.layers)
    ]
    return [pair for pair in layers if pair]


def _all_experts(matrix: Matrix, quant: ModuleQuant | None, item: int, features: Collection[str] | None) -> int:
    whole = replace(matrix, slots=0)
    return matrix_bytes(whole, quant, item, features) + whole.rows * whole.num_matrices * item * whole.bias


def front_bytes(of_rank: RankWeights, dtype: str, embedding_rows: int, head: bool) -> int:
    """Returns the bytes of a draft's weights before and behind its layers. `embedding_rows`: rows of its own embedding
    on the rank; `head`: it has an output head of its own."""
    model, item = of_rank.model, _DTYPE_BYTES[dtype]
    total = _bytes_of(model, 0, of_rank.front, item, None) + embedding_rows * model.hidden_size * item
    return total + (matrix_bytes(of_rank.head, model.head_quant, item) if head else 0)


def wide_bytes(of_rank: RankWeights, dtype: str) -> dict[str, int]:
    """Returns the bytes that a quantized checkpoint keeps in `dtype`, on one rank, by block ("attn", "mlp", ...) and
    "embeddings", the largest first; empty if nothing is quantized."""
    item, quantized = _DTYPE_BYTES[dtype], False
    sizes = {"embeddings": of_rank.head.rows * of_rank.head.cols * item}
    for weight, quant in of_rank.matrices():
        if weight.dtype is not None:
            continue
        if quant is not None:
            quantized = True
        else:
            block = weight.name.partition(".")[0]
            sizes[block] = sizes.get(block, 0) + matrix_bytes(weight, None, item)
    return dict(sorted(sizes.items(), key=lambda size: -size[1])) if quantized else {}


def _bytes_of(
    model: ModelDescription, layer: int, weights: Weights, item: int, features: Collection[str] | None
) -> int:
    total = 0
    for weight in weights:
        if isinstance(weight, Matrix):
            size = item if weight.dtype is None else _DTYPE_BYTES[weight.dtype]
            total += matrix_bytes(weight, model.quant_of(layer, weight), size, features)
            total += weight.rows * weight.num_matrices * size * weight.bias
        else:
            total += weight.count * (item if weight.dtype is None else _DTYPE_BYTES[weight.dtype])
    return total


def matrix_bytes(matrix: Matrix, quant: ModuleQuant | None, item: int, features: Collection[str] | None = None) -> int:
    """Returns the bytes of a matrix and its scales in the memory of the device. `item`: bytes of an unquantized
    element; `features`: as in `rank_weight_bytes`."""
    rows, cols, modules = matrix.rows, matrix.cols, len(matrix.parts)
    if quant is None:
        return matrix.num_matrices * rows * cols * item
    if quant.trellises:
        return matrix.num_matrices * _trellis_bytes(matrix, quant.trellises)
    scheme = quant.format
    # There is one zero point for each group, in the model's dtype.
    zeros = math.prod(scheme.scale_shape(rows, cols)) * item if quant.zero_points else 0
    if features is not None and wants_planes(scheme, features):
        cols = -(-cols // PLANE_COLUMNS) * PLANE_COLUMNS
    if matrix.experts:
        scales = modules if scheme.group == (0, 0) else math.prod(scheme.scale_shape(rows, cols))
        singles = 4 * modules * (scheme.global_scale + quant.static_input)
    else:
        # One scale a matrix is repeated for every row.
        scales = rows if scheme.group[1] == 0 else math.prod(scheme.scale_shape(rows, cols))
        singles = (4 * rows if scheme.global_scale else 0) + (4 * modules if quant.static_input else 0) + zeros
    return matrix.num_matrices * (rows * cols * scheme.bits // 8 + scales * SCALE_BYTES[scheme.scale] + singles)


def _trellis_bytes(matrix: Matrix, trellises: Sequence[Trellis]) -> int:
    """Returns the bytes of one matrix of trellises, whose parts have their own. For experts `trellises` has those of
    several of them, by part. A head's rows may begin and end within blocks."""
    parts = matrix.rows_of_parts
    ones = trellises[:: len(trellises) // len(parts)]
    more = BLOCK if matrix.name == "lm_head" and matrix.rows % BLOCK else 0
    return sum(trellis_bytes(one, rows + more, matrix.cols) for one, rows in zip(ones, parts, strict=True))

"""Bytes of a model's weights on one rank, known before anything is allocated. No torch.

Counts what `models/` allocates; a test holds the two together for every architecture.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from sglang.srt.configs.quant_rules import ModuleQuant
from sglang.srt.configs.quant_scheme import PLANE_COLUMNS, SCALE_BYTES, expert_share, wants_planes
from sglang.srt.plan.layer_spec import ABSENT, Matrix, Mixer, Weights
from sglang.srt.plan.mixers import GQA, MLA
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.ranks import RankLayout

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int32": 4}


def rank_weight_bytes(
    model: ModelDescription,
    dtype: str,
    ranks: RankLayout,
    fp8_cache: bool = False,
    features: Collection[str] | None = None,
) -> int:
    """Of one rank's parameters, exactly as they are allocated. An `fp8_cache` of keys and values has scales, which are
    parameters. `features` (of ArchTraits): of the GPU whose kernels arrange the weights; None: as they are stored.

    Raises UserError where the experts cannot be divided.
    """
    item, hidden = _DTYPE_BYTES[dtype], model.hidden_size
    vocab_rows = -(-model.vocab_size // ranks.tp_size)
    total = vocab_rows * hidden * item if model.has_embedding else 0
    norm = hidden * (4 if model.zero_centred_norms else item)  # before a block, and behind the last one
    if model.last_stage:
        if not model.tie_embeddings:
            total += matrix_bytes(Matrix("lm_head", ("",), vocab_rows, hidden), model.head_quant, item, features)
        total += norm + _bytes_of(model, 0, model.layers[-1].residual.head_weights(hidden), item, features)
    rows = expert_rows(model, ranks)
    for i, layer in enumerate(model.layers):
        if layer.elsewhere:
            continue
        weights = layer.weights(hidden, ranks, rows)
        total += norm * sum(block != ABSENT for block in (layer.mixer, layer.ffn))
        total += _bytes_of(model, i, weights + layer.residual.weights(hidden), item, features)
        total += _cache_scale_bytes(layer.mixer) if fp8_cache else 0
    if model.per_layer_inputs is not None:
        total += _bytes_of(model, 0, model.per_layer_inputs.model_weights(hidden, ranks.tp_size), item, features)
    return total


def wide_bytes(model: ModelDescription, dtype: str, ranks: RankLayout) -> dict[str, int]:
    """Of a quantized checkpoint: what it keeps in `dtype`, on one rank, by block ("attn", "mlp", ...) and "embeddings",
    the most first; empty if nothing is quantized."""
    item, rows = _DTYPE_BYTES[dtype], expert_rows(model, ranks)
    sizes = {"embeddings": -(-model.vocab_size // ranks.tp_size) * model.hidden_size * item}
    quantized = False
    for i, layer in enumerate(model.layers):
        for weight in layer.weights(model.hidden_size, ranks, rows):
            if isinstance(weight, Matrix) and weight.dtype is None:
                if model.quant_of(i, weight) is not None:
                    quantized = True
                else:
                    block = weight.name.partition(".")[0]
                    sizes[block] = sizes.get(block, 0) + matrix_bytes(weight, None, item)
    return dict(sorted(sizes.items(), key=lambda size: -size[1])) if quantized else {}


def _cache_scale_bytes(mixer: Mixer) -> int:
    if isinstance(mixer, GQA):
        return 8 if mixer.caches_tokens else 0
    return 4 if isinstance(mixer, MLA) else 0


def expert_rows(model: ModelDescription, ranks: RankLayout) -> int:
    """Intermediate dims of each of its routed experts that a rank has room for; 0 without experts. Raises UserError."""
    if model.experts is None:
        return 0
    quant = model.expert_quant
    return expert_share(model.experts.intermediate_size, ranks.expert_tp_size, quant.format if quant else None)


def _bytes_of(
    model: ModelDescription, layer: int, weights: Weights, item: int, features: Collection[str] | None
) -> int:
    total = 0
    for weight in weights:
        if isinstance(weight, Matrix):
            size = item if weight.dtype is None else _DTYPE_BYTES[weight.dtype]
            total += matrix_bytes(weight, model.quant_of(layer, weight), size, features)
            total += weight.rows * max(1, weight.experts) * size * weight.bias
        else:
            total += weight.count * (item if weight.dtype is None else _DTYPE_BYTES[weight.dtype])
    return total


def matrix_bytes(matrix: Matrix, quant: ModuleQuant | None, item: int, features: Collection[str] | None = None) -> int:
    """Data and scales; `item`: bytes of an element that is not quantized; `features`: see `rank_weight_bytes`."""
    rows, cols, modules = matrix.rows, matrix.cols, len(matrix.parts)
    if quant is None:
        return max(1, matrix.experts) * rows * cols * item
    scheme = quant.format
    if features is not None and wants_planes(scheme, features):
        cols = -(-cols // PLANE_COLUMNS) * PLANE_COLUMNS
    if matrix.experts:
        scales = modules if scheme.group == (0, 0) else math.prod(scheme.scale_shape(rows, cols))
        singles = 4 * modules * (scheme.global_scale + quant.static_input)
    else:
        # One scale a matrix is repeated for every row.
        scales = rows if scheme.group[1] == 0 else math.prod(scheme.scale_shape(rows, cols))
        singles = (4 * rows if scheme.global_scale else 0) + (4 * modules if quant.static_input else 0)
    return max(1, matrix.experts) * (rows * cols * scheme.bits // 8 + scales * SCALE_BYTES[scheme.scale] + singles)

"""Bytes of a model's weights on one rank, known before anything is allocated. No torch.

Counts what `models/` allocates; a test holds the two together for every architecture.
"""

from __future__ import annotations

import math

from sglang.srt.configs.quant_rules import ModuleQuant
from sglang.srt.configs.quant_scheme import SCALE_BYTES, expert_share
from sglang.srt.plan.layer_spec import ABSENT, Matrix, Weights
from sglang.srt.plan.mixers import GQA, MLA
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.ranks import RankLayout

_CACHE_SCALE_BYTES = {GQA: 8, MLA: 4}
_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int32": 4}


def rank_weight_bytes(model: ModelDescription, dtype: str, ranks: RankLayout, fp8_cache: bool = False) -> int:
    """Of one rank's parameters, exactly as they are allocated. An `fp8_cache` of keys and values has scales, which are
    parameters.

    Raises UserError where the experts cannot be divided.
    """
    item, hidden = _DTYPE_BYTES[dtype], model.hidden_size
    vocab_rows = -(-model.vocab_size // ranks.tp_size)
    total = vocab_rows * hidden * (1 if model.tie_embeddings else 2) * item
    norm = hidden * (4 if model.zero_centred_norms else item)  # before a block, and behind the last one
    total += norm
    total += _bytes_of(model, 0, model.layers[-1].residual.head_weights(hidden), item)
    rows = expert_rows(model, ranks)
    for i, layer in enumerate(model.layers):
        weights = layer.mixer.weights(hidden, ranks.tp_size) + layer.ffn.weights(hidden, ranks, rows)
        total += norm * sum(block != ABSENT for block in (layer.mixer, layer.ffn))
        total += _bytes_of(model, i, weights + layer.residual.weights(hidden), item)
        total += _CACHE_SCALE_BYTES.get(type(layer.mixer), 0) if fp8_cache else 0
    return total


def expert_rows(model: ModelDescription, ranks: RankLayout) -> int:
    """Intermediate dims of each of its routed experts that a rank has room for; 0 without experts. Raises UserError."""
    if model.experts is None:
        return 0
    quant = model.expert_quant
    return expert_share(model.experts.intermediate_size, ranks.expert_tp_size, quant.format if quant else None)


def _bytes_of(model: ModelDescription, layer: int, weights: Weights, item: int) -> int:
    total = 0
    for weight in weights:
        if isinstance(weight, Matrix):
            size = item if weight.dtype is None else _DTYPE_BYTES[weight.dtype]
            total += matrix_bytes(weight, model.quant_of(layer, weight), size)
            total += weight.rows * max(1, weight.experts) * size * weight.bias
        else:
            total += weight.count * (item if weight.dtype is None else _DTYPE_BYTES[weight.dtype])
    return total


def matrix_bytes(matrix: Matrix, quant: ModuleQuant | None, item: int) -> int:
    """Data and scales; `item`: bytes of an element that is not quantized."""
    rows, cols, modules = matrix.rows, matrix.cols, len(matrix.parts)
    if quant is None:
        return max(1, matrix.experts) * rows * cols * item
    scheme = quant.format
    if matrix.experts:
        scales = modules if scheme.group == (0, 0) else math.prod(scheme.scale_shape(rows, cols))
        singles = 4 * modules * (scheme.global_scale + quant.static_input)
    else:
        # One scale a matrix is repeated for every row.
        scales = rows if scheme.group[1] == 0 else math.prod(scheme.scale_shape(rows, cols))
        singles = (4 * rows if scheme.global_scale else 0) + (4 * modules if quant.static_input else 0)
    return max(1, matrix.experts) * (rows * cols * scheme.bits // 8 + scales * SCALE_BYTES[scheme.scale] + singles)

"""Sampling spelled out for one request at a time, in numpy: what the batched code must agree with."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from sglang.srt.sampling.sampling_params import SamplingParams


def adjusted_logits(
    logits: np.ndarray,
    params: SamplingParams,
    prompt_ids: list[int],
    output_ids: list[int],
    stop_ids: Collection[int],
    allowed: Collection[int] | None = None,
) -> np.ndarray:
    """Bias, minimum length, penalties and grammar, in that order; logits [V]."""
    logits = logits.astype(np.float64).copy()
    for token, value in params.logit_bias.items():
        logits[int(token)] += value
    if len(output_ids) < params.min_new_tokens:
        logits[list(stop_ids)] = -np.inf
    for token in set(prompt_ids) | set(output_ids):
        logits[token] *= 1 / params.repetition_penalty if logits[token] > 0 else params.repetition_penalty
    for token in set(output_ids):
        logits[token] -= params.frequency_penalty * output_ids.count(token) + params.presence_penalty
    if allowed is not None:
        logits[[token for token in range(len(logits)) if token not in allowed]] = -np.inf
    return logits


def distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probabilities of the next token from adjusted logits [V]."""
    if params.temperature < 1e-6:
        return np.eye(len(logits))[int(logits.argmax())]
    weights = np.exp((logits - logits.max()) / params.temperature)
    order = np.argsort(-logits, kind="stable")
    kept = np.zeros(len(logits), dtype=bool)
    top_k = len(logits) if params.top_k == -1 else min(params.top_k, len(logits))
    kept[order[:top_k]] = True
    total, mass = weights[kept].sum(), 0.0
    for rank, token in enumerate(order[:top_k]):
        if mass >= params.top_p * total:
            kept[order[rank:]] = False
            break
        mass += weights[token]
    kept &= weights >= params.min_p
    return np.where(kept, weights, 0.0) / weights[kept].sum()


def pack_mask(allowed: list[Collection[int] | None], vocab_size: int) -> np.ndarray:
    """[B, ceil(V / 32)] int32 bitmask; None: everything."""
    bits = np.zeros((len(allowed), -(-vocab_size // 32) * 32), dtype=bool)
    for row, tokens in enumerate(allowed):
        bits[row, list(range(vocab_size)) if tokens is None else list(tokens)] = True
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)

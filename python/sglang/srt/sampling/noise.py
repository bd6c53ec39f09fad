"""Sampling noise as a pure function of (request seed, position, vocabulary id).

A token is drawn by the Gumbel-max rule: argmax over v of `logit[v] / temperature + gumbel(seed, position, v)`. As the
noise has no state, the draw depends neither on batch mates nor on what was retracted, cached or recomputed, and the
torch code here and the Triton kernel in `layers/triton_ops/sampling.py` give the same tokens.

The hash is two rounds of a 32-bit xor-shift-multiply mixer over the vocabulary id, keyed by the row; the mixer's
constants are C. Wellons' published low-bias search result (public domain).
"""

from __future__ import annotations

import torch

MIX_MUL_1 = 0x7FEB352D
MIX_MUL_2 = 0x846CA68B
GOLDEN = 0x9E3779B9
KEY_STEP = 0x85EBCA6B
MASK32 = 0xFFFFFFFF
UNIFORM_MAX = 1.0 - 2.0**-24
"""Largest uniform draw; it keeps the exponential computed from it finite."""


def mix32(x: torch.Tensor) -> torch.Tensor:
    """Applies a bijection to 32-bit values held in int64 (only the low 32 bits are ever nonzero)."""
    x = x ^ (x >> 16)
    x = (x * MIX_MUL_1) & MASK32
    x = x ^ (x >> 15)
    x = (x * MIX_MUL_2) & MASK32
    return x ^ (x >> 16)


def row_keys(
    seed_lo: torch.Tensor, seed_hi: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns two keys [B] int64 with 32 significant bits from seed_lo, seed_hi and positions, [B] integers each."""
    key_0 = mix32((seed_lo.long() & MASK32) ^ mix32((positions.long() + GOLDEN) & MASK32))
    # The extra steps keep mix32(key_0) and key_1 apart: where they meet, token 0 would always win.
    key_1 = mix32(mix32((seed_hi.long() + KEY_STEP) & MASK32) ^ ((key_0 + GOLDEN) & MASK32))
    return key_0, key_1


def gumbel_noise(
    seed_lo: torch.Tensor, seed_hi: torch.Tensor, positions: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """Returns [B, vocab_size] float32 standard Gumbel noise for [B] seeds and positions."""
    key_0, key_1 = row_keys(seed_lo, seed_hi, positions)
    ids = torch.arange(vocab_size, device=positions.device, dtype=torch.int64)
    bits = mix32(mix32((ids[None, :] + key_0[:, None]) & MASK32) ^ key_1[:, None])
    # Small uniforms carry the likely winners, so they keep all 32 bits: -log(1 - u) is exponential, -log of it Gumbel.
    uniform = ((bits.float() + 0.5) * 2.0**-32).clamp_(max=UNIFORM_MAX)
    return -torch.log(-torch.log1p(-uniform))

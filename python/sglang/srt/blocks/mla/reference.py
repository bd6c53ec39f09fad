"""Ops of latent attention in plain torch: the CPU kernels, and the reference for tests.

Math is done in fp32 and cast back to the input's dtype; matrix products run in the dtype of their operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sglang.srt.kernels.op import Op
from sglang.srt.layers import native_latent_records
from sglang.srt.layers.native_ops import apply_rope, load_cache, rmsnorm, store_cache
from sglang.srt.layers.native_sparse_ops import pack_latents

if TYPE_CHECKING:
    from sglang.srt.layers.attention.latent_chunks import LatentChunk
    from sglang.srt.plan.latent_record import LatentRecord


def latent_norm_rope_store(
    q: torch.Tensor,
    latent: torch.Tensor,
    absorbed: torch.Tensor | None,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cache: torch.Tensor,
    out_cache_loc: torch.Tensor,
    scale: float = 1.0,
    is_neox_style: bool = True,
    key_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalizes the latent, and with key_weight [rot] the rotary key; applies RoPE to the last dims of queries and of
    the key, and stores one entry per token.

    q [T, H, nope + rot], rewritten; latent [T, rank + rot]; absorbed [N, H, rank + rot], whose last rot dims become
    those of q's first N rows; positions and out_cache_loc [T]; cos_sin [max_pos, rot] fp32; weight [rank]; cache
    [slots, 1, rank + rot] -> [T, rank + rot], the entries before they take the cache's type. Source: DeepSeek-V2
    (arXiv 2405.04434), section 2.1.
    """
    rank, rot_dim = weight.shape[0], cos_sin.shape[1]
    cos, sin = cos_sin[positions].chunk(2, dim=-1)
    q_rotary = q[..., -rot_dim:]
    q_rotary.copy_(apply_rope(q_rotary, cos, sin, is_neox_style))
    if absorbed is not None:
        absorbed[..., rank:] = q_rotary[: len(absorbed)]
    key = latent[:, rank:] if key_weight is None else rmsnorm(latent[:, rank:], key_weight, eps)
    key = apply_rope(key[:, None], cos, sin, is_neox_style)[:, 0].to(q.dtype)
    entries = torch.cat((rmsnorm(latent[:, :rank], weight, eps), key), dim=-1)
    store_cache(cache, entries[:, None], out_cache_loc, scale)
    return entries


def latent_absorb(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Fills and returns out [T, H, N] = x [T, H, K] times w [H, K, N] per head. W_UK maps queries to latent dims, W_UV
    maps attention outputs to value dims."""
    torch.bmm(x.transpose(0, 1), w, out=out.transpose(0, 1))
    return out


def expanded_latent_attention(
    q: torch.Tensor,
    entries: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    out: torch.Tensor,
    start_loc: torch.Tensor,
    cache: torch.Tensor,
    chunks: Sequence[LatentChunk],
    *,
    scale: float,
    cache_scale: float = 1.0,
    record: LatentRecord | None = None,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> None:
    """Fills the rows of out [T, H, v] from start_loc[0] on with causal attention of q [T, H, nope + rot] over keys and
    values expanded from the cached prefixes' latents and the new tokens' entries [T, rank + rot].

    w_uk [H, nope, rank], w_uv [H, rank, v]; start_loc [B + 1]; cache [slots, 1, rank + rot], real value = stored value
    * cache_scale, or of records; chunks: of the prefixes; with a `window`, which counts the token itself, a single one
    of what the first new token of each sequence sees; sinks [H]: as in AttentionLayer. New tokens are
    seen as records, too: so answers do not depend on where a prompt is cut. Waits for the device.
    """
    rank = w_uk.shape[2]
    bounds = start_loc.tolist()
    prefixes: list[list[torch.Tensor]] = [[] for _ in bounds[:-1]]
    for chunk in chunks:
        if record is None:
            cached = load_cache(*chunk.of(cache), cache_scale)[:, 0].to(q.dtype)
        else:
            stored, slots = chunk.of(cache)
            cached = native_latent_records.unpack_records(stored[slots, 0], record, cache_scale).to(q.dtype)
        for parts, rows in zip(prefixes, cached.tensor_split(chunk.key_start[1:-1].long().cpu()), strict=True):
            parts.append(rows)
    if record is not None:
        records = native_latent_records.pack_records(entries, record, cache_scale)
        entries = native_latent_records.unpack_records(records, record, cache_scale).to(entries.dtype)
    for parts, first, end in zip(prefixes, bounds, bounds[1:], strict=False):
        context = torch.cat((*parts, entries[first:end]))
        keys = torch.einsum("lr,hdr->hld", context[:, :rank], w_uk)
        keys = torch.cat((keys, context[:, rank:].expand(len(keys), -1, -1)), dim=-1).float()
        values = torch.einsum("lr,hrd->hld", context[:, :rank], w_uv).float()
        scores = q[first:end].transpose(0, 1).float() @ keys.transpose(1, 2) * scale
        cached = len(context) - (end - first)
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(cached + 1)
        if window:
            hidden |= torch.ones_like(hidden).tril(cached - window)
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)), dim=-1)
        probs = torch.softmax(scores, dim=-1)[..., : len(context)]
        out[first:end] = (probs @ values).transpose(0, 1).to(out.dtype)


def latent_pack_store(entries: torch.Tensor, cache: torch.Tensor, out_cache_loc: torch.Tensor) -> None:
    """Stores entries [T, 576] packed into cache [S, 1, 656] uint8 at out_cache_loc [T]."""
    cache[out_cache_loc, 0] = pack_latents(entries)


LATENT_NORM_ROPE_STORE = Op("latent_norm_rope_store", latent_norm_rope_store)
LATENT_ABSORB = Op("latent_absorb", latent_absorb)
LATENT_PROMPT_ATTENTION = Op("latent_prompt_attention", expanded_latent_attention)
LATENT_PACK_STORE = Op("latent_pack_store", latent_pack_store)
